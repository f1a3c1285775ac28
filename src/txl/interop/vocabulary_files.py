"""Vocabularies of earlier implementations: pickles (`vocab.pkl`, `vocab.bin`, `cache.pt`) or one word per line."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import models

from txl.data.bpe import BpeVocabulary, byte_level, byte_symbols
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.vocabularies import load_vocabulary
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError, brief, cause
from txl.files import opened, read_json
from txl.interop.safe_pickle import SafeUnpickler, StandIn, UnsafePickle
from txl.interop.torch_files import read_torch_file

_ENDS = ("<eos>", "<S>", "</s>")
_UNKNOWNS = ("<unk>", "<UNK>", "<unknown>")


def read_beside(folder: Path, names: Sequence[str], added: Mapping[int, str] | None = None) -> Vocabulary | None:
    """Read the first of some vocabulary files that a directory holds; None if it holds none."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    return None if path is None else read_vocabulary(path, added)


def read_vocabulary(path: Path, added: Mapping[int, str] | None = None) -> Vocabulary:
    """Read a vocabulary file: JSON, a pickle of an earlier implementation, or text with one symbol per line.

    `added` has further symbols by id, used as far as their ids follow those of the file's symbols without a gap.
    """
    try:
        with opened(path) as file:
            content = file.read()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a vocabulary") from None
    head = content[:64]
    if head.lstrip().startswith(b"{"):
        values = read_json(path)
        if "kind" in values:
            return load_vocabulary(path)
        numbers = list(values.values())
        if not all(type(number) is int for number in numbers) or sorted(numbers) != list(range(len(numbers))):
            expected = "this project's vocabulary, or symbols with their numbers 0, 1, 2 ... without gaps"
            raise UserError(f"{path}: JSON, but no vocabulary", expected=expected)
        return vocabulary_of(sorted(values, key=values.__getitem__), str(path))
    if head[:4] == b"PK\x03\x04" or head[:2] == b"\x80\x02":
        return vocabulary_from(read_torch_file(path), str(path), added)
    if head[:1] in (b"\x80", b"(", b"c"):
        try:
            value = SafeUnpickler(io.BytesIO(content)).load()
        except UnsafePickle as error:
            if head[:1] == b"\x80":
                raise UserError(f"{path}: refused: {error}") from None
        else:
            return vocabulary_from(value, str(path), added)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; expected one symbol a line, or a pickle") from None
    # The symbol is the first word of a line, as in the authors' `_build_from_file`.
    symbols = [line.split()[0] if line.split() else line for line in text.split("\n")]
    return vocabulary_of(_with_added([symbol for symbol in symbols if symbol], added), str(path))


def _with_added(symbols: list[object], added: Mapping[int, str] | None) -> list[object]:
    symbols = list(symbols)
    while added and len(symbols) in added:
        symbols.append(added[len(symbols)])
    return symbols


def vocabulary_from(value: object, where: str, added: Mapping[int, str] | None = None) -> Vocabulary:
    """Return the vocabulary in a pickled object: a Vocab, its attributes, a corpus with a Vocab, or symbols.

    A Vocab is one of words, or NVIDIA's with a GPT2Tokenizer. `added` is as in `read_vocabulary`.
    """
    for _ in range(4):
        attributes = value.__dict__ if isinstance(value, StandIn) else value
        if isinstance(attributes, list):
            return vocabulary_of(_with_added(attributes, added), where)
        if not isinstance(attributes, dict):
            break
        if isinstance(attributes.get("idx2sym"), list):
            lower, delimiter = attributes.get("lower_case") is True, attributes.get("delimiter")
            symbols = _with_added(attributes["idx2sym"], added)
            return vocabulary_of(symbols, where, lower=lower, delimiter=delimiter)
        if "bpe_ranks" in attributes:  # a GPT2Tokenizer: tokens with their ids, and merges with their ranks
            ranks = attributes["bpe_ranks"]
            try:
                # Special tokens keep their ids, but their names in a text are read like any other text.
                tokens = attributes["encoder"] | (attributes.get("added_tokens_encoder") or {})
                if not tokens.keys() >= set(byte_symbols()):
                    raise UserError("it lacks a byte")
                return BpeVocabulary(byte_level(models.BPE(tokens, sorted(ranks, key=ranks.__getitem__))))
            except Exception as error:  # the tokenizers library raises plain Exceptions
                problem = f"{where}: its tokens and merges are not those of byte-level BPE{cause(error)}"
                raise UserError(problem) from None
        value = attributes.get("vocab", attributes.get("tokenizer"))
    raise UserError(f"{where}: no idx2sym in it; expected the vocabulary of an earlier implementation")


def vocabulary_of(
    symbols: Sequence[object], where: str, *, lower: bool = False, delimiter: object = None
) -> Vocabulary:
    """Return the vocabulary of bytes (enwik8), characters (text8) or words whose symbols are given in order of id.

    With `lower`, text is read in lower case. `delimiter` is the text between two symbols; None: white space, "": the
    symbols are the characters of a line.
    """
    words = [symbol for symbol in symbols if isinstance(symbol, str)]
    if not words or len(words) < len(symbols):
        raise UserError(f"{where}: expected symbols, one or more, in the order of their ids")
    if delimiter is not None and not (isinstance(delimiter, str) and delimiter in ("", " ")):
        problem = (
            f"{where}: its delimiter is {brief(delimiter)}; only words between white space, and characters, are read"
        )
        raise UserError(problem, remedy="leave the vocabulary out and use token ids")
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
