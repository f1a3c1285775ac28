"""Prepared corpora on disk: record, vocabulary and token files.

A token file holds the token ids of a split as little-endian integers and is read through a memory map.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from txl.data.located import bytes_before, located_tokens
from txl.data.sources import BLOCK, Piece
from txl.data.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary
from txl.errors import UserError
from txl.files import JsonObject, file_sha256, read_json

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

META_FORMAT = 1


class NotAllowed(UserError):
    """Error for a prepared corpus that the user has no permission to read."""


Ids = np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]
"""Token ids [N]."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest unsigned integer dtype that holds all ids of a vocabulary."""
    for name in ("<u1", "<u2", "<u4"):
        dtype = np.dtype(name)
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise ValueError(f"a vocabulary of {vocab_size} tokens does not fit 32 bits")


@dataclass(frozen=True)
class Sentences:
    """Boundaries of a corpus of separate sentences, which training shuffles."""

    boundary_id: int
    """Id of the token at both ends of a sentence."""
    boundary: str
    """"end": one boundary token between two sentences; "both": two boundary tokens."""


class Tokens:
    """Token ids of a split, one-dimensional; only the ids that are accessed are loaded into memory."""

    def __init__(
        self,
        ids: Ids,
        split: str,
        n_bytes: int | None,
        sentences: Sentences | None = None,
        unk_id: int | None = None,
        bytes_of_first: Callable[[int], int | None] = lambda n_token: None,
    ):
        self._ids = ids
        self.split = split
        self.n_bytes = n_bytes
        """Length in bytes of the text that the ids stand for; None: unknown."""
        self.sentences = sentences
        """Boundaries of a corpus of separate sentences; None: running text."""
        self.unk_id = unk_id
        """Id of `<unk>`; None: the vocabulary has no `<unk>`."""
        self.bytes_of_first = bytes_of_first
        """Function from n to the length in bytes of the text of the first n tokens; returns None if unknown."""

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, key: int) -> np.integer: ...

    @overload
    def __getitem__(self, key: slice | np.ndarray) -> Ids: ...

    def __getitem__(self, key: int | slice | np.ndarray) -> Ids | np.integer:
        return self._ids[key]

    def __iter__(self) -> Iterator[int]:
        return map(int, self._ids)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if dtype is not None and np.dtype(dtype) != self._ids.dtype:
            return np.asarray(self._ids).astype(dtype)
        return np.array(self._ids) if copy else np.asarray(self._ids)


class TokenWriter:
    """Writer of a token file, block by block; counts and hashes the tokens."""

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger], unk_id: int | None):
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._dtype, self._unk_id = dtype, unk_id
        self._hash = hashlib.sha256()
        self.tokens = self.unknown = 0

    def write(self, ids: np.ndarray) -> None:
        """Append token ids."""
        block = np.ascontiguousarray(ids, dtype=self._dtype)
        if self._unk_id is not None:
            self.unknown += int((block == self._unk_id).sum())
        self.tokens += len(block)
        self._hash.update(block.data)
        self._file.write(block.data)

    @property
    def sha256(self) -> str:
        """SHA-256 of the tokens written so far, in hexadecimal."""
        return self._hash.hexdigest()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class Corpus:
    """A prepared corpus: token files, vocabulary and record."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._meta = read_meta(directory)
        self._bytes_of: dict[tuple[str, int], int | None] = {}
        """Cached results of `_bytes_of_first`, which training calls before every evaluation."""
        self.vocabulary = Vocabulary.load(directory / "vocabulary.json")
        if len(self.vocabulary) != self._meta["vocabulary_size"]:
            raise UserError(f"{directory}: vocabulary.json does not belong to this corpus; delete the folder")

    @property
    def name(self) -> str:
        """Name of the corpus, or the absolute path of the user's own text."""
        return self._meta["name"]

    @property
    def unit(self) -> str:
        """Unit of the tokens."""
        return self._meta["unit"]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._meta["splits"])

    def tokens(self, split: str) -> Tokens:
        """Return the token ids of a split."""
        record = self._record(split)
        sentences = None
        if isinstance(self.vocabulary, WordVocabulary) and self.vocabulary.boundary is not None:
            assert self.vocabulary.eos_id is not None  # a boundary is a word
            sentences = Sentences(self.vocabulary.eos_id, self.vocabulary.boundary)
        return Tokens(
            self._ids(split),
            split,
            record["bytes"],
            sentences,
            self.vocabulary.unk_id,
            functools.partial(self._bytes_of_first, split),
        )

    def _ids(self, split: str) -> np.ndarray:
        return np.memmap(self._path(split, "tokens"), dtype=np.dtype(self._meta["dtype"]), mode="r")

    def _bytes_of_first(self, split: str, n_token: int) -> int | None:
        """Return the length in bytes of the text of the first `n_token` tokens of a split.

        Return None if the tokens do not determine the text and the text is either not kept (words of the training
        split) or consists of several files with no line end between them.
        """
        if n_token >= self._record(split)["tokens"]:
            return self._record(split)["bytes"]
        if (split, n_token) not in self._bytes_of:
            ids = np.asarray(self._ids(split)[:n_token], dtype=np.int64)
            n_bytes = self.vocabulary.spelled_bytes(ids)
            path = self._path(split, "text")
            if n_bytes is None and path.is_file():
                n_bytes = bytes_before(ids, located_tokens(Piece(path), self.text_bytes(split), self.vocabulary))
            self._bytes_of[split, n_token] = n_bytes
        return self._bytes_of[split, n_token]

    def text_bytes(self, split: str) -> Iterator[bytes]:
        """Yield the text of a split, block by block; the text of the training split is spelled from its tokens."""
        self._record(split)
        is_text = isinstance(self.vocabulary, ByteVocabulary) and self.vocabulary.is_complete
        path = self._path(split, "tokens" if is_text else "text")
        if not path.is_file():
            ids = self._ids(split)
            for start in range(0, len(ids), BLOCK):
                block = self.vocabulary.spell(np.asarray(ids[start : start + BLOCK], dtype=np.int64))
                if block is None:
                    raise UserError(f"{self.name}: the text of the {split} split is not kept; read it from its source")
                yield block
            return
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                yield block

    def info(self) -> JsonObject:
        """Return the record: name, unit, vocabulary size, hashes, and the tokens, bytes and `<unk>` of each split."""
        return {key: value for key, value in self._meta.items() if key not in ("format", "dtype")}

    def unknown_share(self, split: str) -> float | None:
        """Return the share of `<unk>` in the tokens of a split; None if the corpus lacks the split."""
        record = self._meta["splits"].get(split)
        return None if record is None else record["unknown"] / record["tokens"]

    def notes(self, split: str, trained: float | None = None) -> list[str]:
        """Return notes for the reader of a split's results: what normalising changed, and the share of `<unk>`.

        Args:
            split: split whose `<unk>` tokens are reported.
            trained: share of `<unk>` in a model's training text; None: unknown.
        """
        record = self._record(split)
        counts = self._meta.get("normalised", {})
        read = normalised_note(self.name, counts.get("byte_order_marks", 0), counts.get("line_ends", 0))
        unknown = unknown_note(self.unit, record["unknown"], record["tokens"], f"the {split} split", trained)
        kept = f"{read} (data.normalise false keeps them)" if read else None
        return [note for note in (kept, unknown) if note is not None]

    def verify(self) -> None:
        """Compare the token files with their recorded hashes."""
        for split, record in self._meta["splits"].items():
            path = self._path(split, "tokens")
            if file_sha256(path) != record["sha256_tokens"]:
                raise UserError(f"{path}: altered since it was prepared; delete {self.directory} to prepare it anew")

    def _record(self, split: str) -> JsonObject:
        if split not in self._meta["splits"]:
            raise UserError(f"{self.name} has no split {split!r}; expected one of {', '.join(self.splits)}")
        return self._meta["splits"][split]

    def _path(self, split: str, ending: str) -> Path:
        return self.directory / f"{split}.{ending}"


def normalised_note(name: str, byte_order_marks: int, line_ends: int) -> str | None:
    """Return a note on what normalising changed in a text; None if nothing was changed."""
    marks = "a byte order mark" if byte_order_marks == 1 else f"{byte_order_marks:,} byte order marks"
    parts = [f"without {marks}"] * (byte_order_marks > 0)
    parts += [f"with \\n for {line_ends:,} line ends \\r\\n"] * (line_ends > 0)
    return f"{name} is read {' and '.join(parts)}" if parts else None


def unknown_note(unit: str, unknown: int, tokens: int, where: str, trained: float | None) -> str | None:
    """Return a note on the share of `<unk>` in a text and its effect on results; None if there is no `<unk>`.

    Args:
        unit: unit of the tokens.
        unknown: number of `<unk>` tokens.
        tokens: number of all tokens.
        where: description of the text, such as "the valid split".
        trained: share of `<unk>` in the model's training text; None: unknown.
    """
    if not unknown:
        return None
    symbol = {"char": "character"}.get(unit, unit)
    found = f"{unknown:,} of {tokens:,} {symbol}s of {where} ({_percent(unknown / tokens)}) are <unk>"
    if trained == 0:
        remedy = "data.min_count 2 would train it" if unit == "word" else "the units byte and bpe lack nothing"
        return f"{found}, which training never saw: their losses are noise, also in every average; {remedy}"
    seen = "" if trained is None else f" (in training {_percent(trained)})"
    return (
        f"{found}{seen}: they count as one and the same {symbol}, whose spelling costs nothing, so the loss is lower "
        f"than with a full vocabulary; compare it only with models of this vocabulary"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "below 0.1%"


def read_meta(directory: Path) -> JsonObject:
    """Read the record of a prepared corpus, and check the sizes of its token files."""
    try:
        meta = read_json(directory / "meta.json")
        if meta["format"] != META_FORMAT:
            raise UserError(f"{directory}: prepared by another version (format {meta['format']!r})")
        if missing := sorted({"name", "unit", "vocabulary_size"} - meta.keys()):
            raise UserError(f"{directory}: damaged (meta.json has no {missing[0]})")
        width = np.dtype(meta["dtype"]).itemsize
        for split, record in meta["splits"].items():
            path = directory / f"{split}.tokens"
            if path.stat().st_size != record["tokens"] * width:
                raise UserError(f"{path}: {path.stat().st_size} bytes, expected {record['tokens'] * width}")
        return meta
    except PermissionError as error:
        raise NotAllowed(f"{error.filename}: {error.strerror}; choose another --data-dir") from None
    except OSError as error:
        raise UserError(f"{error.filename or directory}: {error.strerror}") from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{directory}: damaged (meta.json is not one of a prepared corpus)") from None
