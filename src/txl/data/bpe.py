"""The vocabulary of byte-pair encoding."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from txl.data.vocabulary import Vocabulary, utf8
from txl.errors import UserError
from txl.files import JsonObject, is_utf8

# Characters of a corpus passed to the BPE library at once; tokens do not cross the ends of these chunks.
BPE_CHUNK = 1 << 16
BPE_TRAINING_BYTES = 100_000_000  # about as many bytes are read to learn merges, spread evenly over the training text
# Characters from which BPE encodes a text outside of the interpreter's lock, which starts the library's own threads.
_LONG = 1 << 14
# Characters of a piece of text (a word, a number ...) in which BPE merges are learned; longer pieces are cut, because
# the time that the library takes grows with the square of this length.
BPE_LONGEST = 1 << 10
# A piece of text as the BPE library cuts it, apart from a space before it; signs such as ½ count as letters here.
_RUN = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")


class BpeVocabulary(Vocabulary):
    """Vocabulary of byte-level byte-pair encoding by the `tokenizers` library: lossless, without `<unk>`."""

    kind = "bpe"
    reads_all = True

    def __init__(self, tokenizer: Tokenizer, *, normalise: bool = False):
        self.tokenizer, self.normalise = tokenizer, normalise
        byte_of = {symbol: value for value, symbol in enumerate(byte_symbols())}
        ids = tokenizer.get_vocab()
        if sorted(ids.values()) != list(range(len(ids))):
            raise UserError("a bpe vocabulary whose ids are not 0, 1, 2 ... without gaps")
        tokens = sorted(ids, key=ids.__getitem__)
        self.pieces = self._pieces = [bytes(byte_of[symbol] for symbol in token) for token in tokens]
        self.longest = max(map(len, self._pieces), default=1)
        # In this form, as `train` makes it, white space begins a new piece, or continues white space.
        cut = tokenizer.pre_tokenizer
        is_usual = isinstance(cut, pre_tokenizers.ByteLevel) and cut.use_regex and not cut.add_prefix_space
        if is_usual and tokenizer.normalizer is None and not tokenizer.get_added_tokens_decoder():
            self.border = re.compile(r"(?<=\S)[ \t\r\n]")

    @staticmethod
    def train(texts: Iterable[str], vocab_size: int, *, n_bytes: int = 0, normalise: bool = False) -> BpeVocabulary:
        """Learn a vocabulary of at most `vocab_size` tokens: the 256 bytes and the most useful merges.

        Of a long text (`n_bytes`), only every k-th chunk is read.
        """
        if vocab_size < 257:
            expected = "257 or more (256 bytes and merges of them)"
            raise UserError(field="data.vocab_size", value=vocab_size, expected=expected)
        chunks = (text[start : start + BPE_CHUNK] for text in texts for start in range(0, len(text), BPE_CHUNK))
        every = max(1, math.ceil(n_bytes / BPE_TRAINING_BYTES))
        tokenizer = byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
            special_tokens=[],
        )
        tokenizer.train_from_iterator(map(_without_long_pieces, itertools.islice(chunks, 0, None, every)), trainer)
        return BpeVocabulary(tokenizer, normalise=normalise)

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text: int64 [N]; each byte that is not UTF-8 (see `utf8`) is a separate token."""
        parts = [np.empty(0, dtype=np.int64)]
        text = utf8(self.read(text)).decode("utf-8", errors="surrogateescape")
        for whole in [text] if is_utf8(text) else re.split("([\udc80-\udcff])", text):
            if "\udc80" <= whole <= "\udcff":
                parts.append(np.array([self._pieces.index(utf8(whole))]))
                continue
            for part in self._parts(whole):
                # For a long part: `encode` would keep all other threads waiting.
                is_short, encoder = len(part) < _LONG, self.tokenizer
                ids = (encoder.encode(part) if is_short else encoder.encode_batch_fast([part])[0]).ids
                parts.append(np.fromiter(ids, np.int64, len(ids)))
        return np.concatenate(parts)

    def encode_block(self, text: str) -> np.ndarray:
        """Return the token ids of a block of a corpus: uint32 [N]. Chunks keep the encoding of long blocks fast."""
        chunks = [text[start : start + BPE_CHUNK] for start in range(0, len(text), BPE_CHUNK)]
        encoded = self.tokenizer.encode_batch_fast(chunks)
        return np.concatenate([np.array(chunk.ids, dtype=np.uint32) for chunk in encoded] or [np.empty(0, np.uint32)])

    def to_json(self) -> JsonObject:
        """Return the tokenizer in the JSON form of the `tokenizers` library."""
        return self._as_json(tokenizer=json.loads(self.tokenizer.to_str()))


def byte_level(model: models.BPE) -> Tokenizer:
    """Return a byte-level BPE tokenizer with the tokens and merges of `model`."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def read_tokenizer(values: JsonObject) -> Tokenizer:
    """Return a tokenizer from its JSON form, after checking that its tokens and merges are all that is its own.

    Anything else, such as a huge padding, could change the ids or end the process.
    """
    if values["model"].get("continuing_subword_prefix"):  # the library may panic at it
        raise UserError("a bpe vocabulary's tokenizer has a model that is not plain byte-level BPE")
    tokenizer = Tokenizer.from_str(json.dumps(values))
    stated, plain = (json.loads(one.to_str()) for one in (tokenizer, byte_level(models.BPE())))
    plain["model"] |= {name: stated["model"].get(name) for name in ("vocab", "merges")}
    for name in plain | stated:
        if stated.get(name) != plain.get(name):
            raise UserError(f"a bpe vocabulary's tokenizer has a {name} that is not plain byte-level BPE")
    return tokenizer


def _without_long_pieces(text: str) -> list[str]:
    """Cut a text within its pieces of more than `BPE_LONGEST` characters, and nowhere else."""
    bounds = [0]
    for place in range(BPE_LONGEST, len(text), BPE_LONGEST):  # a longer piece spans one of these places
        if _RUN.fullmatch(text, place - 1, place + 1):
            after = _RUN.match(text, place, place + BPE_LONGEST)
            before = _RUN.match(text[place - BPE_LONGEST : place][::-1])
            if after is not None and before is not None and len(after[0]) + len(before[0]) > BPE_LONGEST:
                bounds.append(place)
    return [text[start:end] for start, end in itertools.pairwise([*bounds, len(text)])]


def byte_symbols() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte: the byte's own, or the next free one
    from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    free = itertools.count(0x100)
    return [chr(value if value in printable else next(free)) for value in range(256)]
