"""Vocabularies of all kinds, read from JSON."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from txl.data.bpe import BpeVocabulary, read_tokenizer
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError
from txl.files import JsonObject, read_json

_KINDS = {kind.kind: kind for kind in (ByteVocabulary, CharVocabulary, WordVocabulary, BpeVocabulary)}
_FORMATS = (1, 2, 3)  # 2 adds `normalise` and `rule`, 3 `lower`, `unk_id`, and words without `<eos>` or `<unk>`


def vocabulary_from_json(values: JsonObject, remedy: str = "") -> Vocabulary:
    """Build a vocabulary from the result of `to_json`; `remedy` tells what to do if the values are damaged."""
    try:
        kind, number = values["kind"], values["format"]
        if number in _FORMATS and kind in _KINDS:
            if kind == "bpe":
                values = values | {"tokenizer": read_tokenizer(values["tokenizer"])}
            # The names of a constructor's parameters are those of the entries; of others, such as "seen", it has none.
            names = inspect.signature(_KINDS[kind]).parameters
            return _KINDS[kind](**{name: values[name] for name in names if name in values})
    except UserError:
        raise
    except Exception:  # the tokenizers library raises plain Exceptions
        raise UserError("not a vocabulary", remedy=remedy) from None
    if number not in _FORMATS:
        raise UserError(f"vocabulary of format {number!r}; this version reads formats 1 to {_FORMATS[-1]}")
    raise UserError(f"vocabulary of kind {kind!r}", expected=", ".join(_KINDS))


def load_vocabulary(path: Path, remedy: str = "") -> Vocabulary:
    """Read a vocabulary that `Vocabulary.save` wrote; `remedy` tells what to do if it is damaged."""
    try:
        values = read_json(path, remedy)
        vocabulary = vocabulary_from_json(values, remedy)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", expected="a vocabulary") from None
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    if (seen := values.get("seen")) is not None:
        if not isinstance(seen, list) or not all(type(code) is int and 0 <= code <= sys.maxunicode for code in seen):
            raise UserError(f"{path}: seen is not a list of code points", remedy=remedy)
        vocabulary.seen = frozenset(seen)
    return vocabulary
