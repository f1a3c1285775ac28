"""A vocabulary as the tokenizer files that transformers' AutoTokenizer opens."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from txl.data.vocabulary import (
    BYTE_ORDER_MARK,
    BpeVocabulary,
    ByteVocabulary,
    CharVocabulary,
    Vocabulary,
    WordVocabulary,
    byte_symbols,
)
from txl.data.words import JOINER, joining_rules
from txl.errors import UserError

PADDING = "<|pad|>"


def tokenizer_files(vocabulary: Vocabulary) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json; encoding gives the same ids as the vocabulary.

    Decoded words are joined by spaces, line ends too, and marks as their joiners say.

    Raises:
        UserError: for a vocabulary that the library cannot represent.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": 10**9,
    }
    tokenizer = _tokenizer(vocabulary)
    before = [normalizers.Replace(Regex(rf"\A{BYTE_ORDER_MARK}"), ""), normalizers.Replace("\r\n", "\n")]
    if vocabulary.normalise:
        after = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([*before, *after])  # pyright: ignore[reportAttributeAccessIssue]
    if not tokenizer.add_special_tokens([PADDING]):
        raise UserError(f"the vocabulary has a token {PADDING!r} of its own")
    config["pad_token"] = PADDING  # the id behind the vocabulary, which the model takes for no token
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=1, ensure_ascii=False) + "\n",
    }


def _tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    if isinstance(vocabulary, BpeVocabulary):
        return Tokenizer.from_str(vocabulary.tokenizer.to_str())  # a copy: the padding is added to it
    if isinstance(vocabulary, ByteVocabulary):
        if not vocabulary.is_complete:
            raise UserError(f"the vocabulary has {len(vocabulary)} of the 256 bytes; the others would silently vanish")
        tokenizer = Tokenizer(models.BPE({symbol: value for value, symbol in enumerate(byte_symbols())}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    if isinstance(vocabulary, CharVocabulary):
        unknown = {} if vocabulary.unk_id is None else {"<unk>": vocabulary.unk_id}
        first = len(unknown)
        ids = unknown | {character: first + number for number, character in enumerate(vocabulary.characters)}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>") if unknown else models.WordLevel(ids))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return tokenizer
    assert isinstance(vocabulary, WordVocabulary)
    if vocabulary.boundary == "both":
        raise UserError("the vocabulary marks both ends of a sentence, which a tokenizer of the library cannot")
    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary.ids), unk_token=vocabulary.unk))
    line_ends = normalizers.Replace("\n", f" {vocabulary.eos} ")
    tokenizer.normalizer = line_ends
    if vocabulary.rule == "punctuation":
        joiners = [normalizers.Replace(Regex(pattern), content) for pattern, content in joining_rules()]
        tokenizer.normalizer = normalizers.Sequence([*joiners, line_ends])
        space, touching = decoders.WordPiece(prefix=JOINER, cleanup=False), decoders.Replace(Regex(f"{JOINER} ?"), "")
        tokenizer.decoder = decoders.Sequence([space, decoders.Fuse(), touching])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if vocabulary.boundary is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{vocabulary.eos} $A", special_tokens=[(vocabulary.eos, vocabulary.eos_id)]
        )
    return tokenizer
