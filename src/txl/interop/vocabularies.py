"""Vocabularies of earlier implementations: pickles (`vocab.pkl`, `vocab.bin`, `cache.pt`) or one word per line."""

from __future__ import annotations

import io
import reprlib
from collections.abc import Sequence
from pathlib import Path

from txl.data.vocabulary import ByteVocabulary, CharVocabulary, Vocabulary, WordVocabulary
from txl.errors import UserError
from txl.files import read_json
from txl.interop.safe_pickle import SafeUnpickler, StandIn, UnsafePickle
from txl.interop.torch_files import read_torch_file

_ENDS = ("<eos>", "<S>", "</s>")
_UNKNOWNS = ("<unk>", "<UNK>", "<unknown>")


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a vocabulary file: JSON, a pickle of an earlier implementation, or text with one symbol per line."""
    try:
        head = path.read_bytes()[:64]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a vocabulary") from None
    if head.lstrip().startswith(b"{"):
        return _from_json(path)
    if head[:4] == b"PK\x03\x04" or head[:2] == b"\x80\x02":
        return vocabulary_from(read_torch_file(path), str(path))
    if head[:1] in (b"\x80", b"(", b"c"):
        try:
            value = SafeUnpickler(io.BytesIO(path.read_bytes())).load()
        except UnsafePickle as error:
            if head[:1] == b"\x80":
                raise UserError(f"{path}: refused: {error}") from None
        else:
            return vocabulary_from(value, str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; expected one symbol a line, or a pickle") from None
    # The symbol is the first word of a line, as in the authors' `_build_from_file`.
    symbols = [line.split()[0] if line.split() else line for line in text.split("\n")]
    return vocabulary_of([symbol for symbol in symbols if symbol], str(path))


def _from_json(path: Path) -> Vocabulary:
    values = read_json(path)
    if isinstance(values, dict) and "kind" in values:
        return Vocabulary.load(path)
    if isinstance(values, dict) and all(type(number) is int for number in values.values()):
        if sorted(values.values()) != list(range(len(values))):
            raise UserError(f"{path}: its numbers are not 0, 1, 2 ... without gaps; expected a vocabulary")
        return vocabulary_of(sorted(values, key=values.__getitem__), str(path))
    raise UserError(f"{path}: JSON, but no vocabulary; expected this project's, or symbols with their numbers")


def vocabulary_from(value: object, where: str) -> Vocabulary:
    """Return the vocabulary in a pickled object: a Vocab, its attributes, a corpus with a Vocab, or symbols."""
    for _ in range(4):
        attributes = value.__dict__ if isinstance(value, StandIn) else value
        if isinstance(attributes, list):
            return vocabulary_of(attributes, where)
        if not isinstance(attributes, dict):
            break
        if isinstance(attributes.get("idx2sym"), list):
            lower, delimiter = attributes.get("lower_case") is True, attributes.get("delimiter")
            return vocabulary_of(attributes["idx2sym"], where, lower=lower, delimiter=delimiter)
        value = attributes.get("vocab")
    raise UserError(f"{where}: no idx2sym in it; expected the vocabulary of an earlier implementation")


def vocabulary_of(
    symbols: Sequence[object], where: str, *, lower: bool = False, delimiter: object = None
) -> Vocabulary:
    """Return the vocabulary of bytes (enwik8), characters (text8) or words whose symbols are given in order of id.

    Args:
        symbols: symbols, with or without one for the end of a line and one for unknown words.
        where: file, for messages.
        lower: True if the text is read in lower case; symbols for bytes are not changed by it.
        delimiter: text between two symbols; None: white space. "": the symbols are the characters of a line.
    """
    words = [symbol for symbol in symbols if isinstance(symbol, str)]
    if not words or len(words) < len(symbols):
        raise UserError(f"{where}: expected symbols, one or more, in the order of their ids")
    if delimiter is not None and not (isinstance(delimiter, str) and delimiter in ("", " ")):
        raise UserError(
            f"{where}: its delimiter is {reprlib.repr(delimiter)}; only words between white space, and characters, are "
            f"read: leave the vocabulary out and use token ids"
        )
    end = next((symbol for symbol in _ENDS if symbol in words), None)
    unknown = next((symbol for symbol in _UNKNOWNS if symbol in words), None)
    if all(word.isascii() and word.isdecimal() and len(word) <= 3 and int(word) < 256 for word in words):
        return ByteVocabulary([int(word) for word in words])
    others = [word for word in words if word not in (end, unknown)]
    try:
        if all(len(word) == 1 for word in others) and (end is None or (delimiter == "" and end != "<S>")):
            ends = {end: "\n"} if delimiter == "" else {"_": " "}  # text8's file has spaces between its characters
            return CharVocabulary(
                [ends.get(word, word) for word in words if word != unknown],
                unknown=unknown is not None,
                unk_id=0 if unknown is None else words.index(unknown),
                lower=lower,
                normalise=delimiter == "",  # as Python reads the lines of a file
            )
        if delimiter == "":
            raise UserError("its symbols are characters (its delimiter is ''), but some have more than one character")
        boundary = "end" if end == "<S>" else None
        return WordVocabulary(words, eos=end, unk=unknown, boundary=boundary, lower=lower)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
