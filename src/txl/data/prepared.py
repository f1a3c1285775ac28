"""A prepared corpus on disk: its record, its vocabulary, its token files.

A token file has the ids of a split as little-endian integers and is read through a memory map.
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
    """A prepared corpus that belongs to somebody else."""


Ids = np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]
"""Token ids [N]."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest unsigned integers that hold all ids."""
    for name in ("<u1", "<u2", "<u4"):
        dtype = np.dtype(name)
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise ValueError(f"a vocabulary of {vocab_size} tokens does not fit 32 bits")


@dataclass(frozen=True)
class Sentences:
    """The cuts of a stream of separate sentences, which training shuffles."""

    boundary_id: int
    """The token at a sentence's ends."""
    boundary: str
    """"end": one such token between two sentences; "both": two."""


class Tokens:
    """A split's token ids, one-dimensional; nothing is in memory that is not looked at."""

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
        """Bytes of the text that the ids stand for."""
        self.sentences = sentences
        """Cuts of a corpus of separate sentences; None: running text."""
        self.unk_id = unk_id
        """Id of everything that the vocabulary lacks; None: it lacks nothing."""
        self.bytes_of_first = bytes_of_first
        """Gives the bytes of text that so many tokens from the first on stand for; None where that is not known."""

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
    """Writes a token file block by block, counting and hashing as it goes."""

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
        """Hash of the tokens that have been written."""
        return self._hash.hexdigest()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class Corpus:
    """A prepared corpus: token files, vocabulary and what is known of them."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._meta = read_meta(directory)
        self._bytes_of: dict[tuple[str, int], int | None] = {}
        """Results of `_bytes_of_first`; training asks before every evaluation."""
        self.vocabulary = Vocabulary.load(directory / "vocabulary.json")
        if len(self.vocabulary) != self._meta["vocabulary_size"]:
            raise UserError(f"{directory}: vocabulary.json does not belong to this corpus; delete the folder")

    @property
    def name(self) -> str:
        """Its name, or the absolute path of a text of the user's."""
        return self._meta["name"]

    @property
    def unit(self) -> str:
        """Unit of text that one token is."""
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
            sentences = Sentences(self.vocabulary.ids[self.vocabulary.eos], self.vocabulary.boundary)
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
        """Return the bytes of text that the first tokens of a split stand for.

        None where the tokens do not spell the text and it is not kept (words of the training split), or is that of
        several files that no line's end separates.
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
        """Yield the text of a split, a block at a time; that of the training split is spelled by its tokens."""
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
        """Return name, unit, vocabulary size, and for each split tokens, bytes, unknown tokens and hashes."""
        return {key: value for key, value in self._meta.items() if key not in ("format", "dtype")}

    def unknown_share(self, split: str) -> float | None:
        """Return the share of a split's tokens that is `<unk>`; None if there is no such split."""
        record = self._meta["splits"].get(split)
        return None if record is None else record["unknown"] / record["tokens"]

    def notes(self, split: str, trained: float | None = None) -> list[str]:
        """Return remarks for a reader of a split's numbers on how its text was read.

        Args:
            split: whose `<unk>` are told.
            trained: share of a model's training text that is `<unk>`; None: not known.
        """
        record = self._record(split)
        counts = self._meta.get("normalised", {})
        read = normalised_note(self.name, counts.get("byte_order_marks", 0), counts.get("line_ends", 0))
        unknown = unknown_note(self.unit, record["unknown"], record["tokens"], f"the {split} split", trained)
        kept = f"{read} (data.normalise false keeps them)" if read else None
        return [note for note in (kept, unknown) if note is not None]

    def verify(self) -> None:
        """Compare the token files with their hashes."""
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
    """Return a remark on what was left out of a text when it was normalised; None for nothing."""
    marks = "a byte order mark" if byte_order_marks == 1 else f"{byte_order_marks:,} byte order marks"
    parts = [f"without {marks}"] * (byte_order_marks > 0)
    parts += [f"with \\n for {line_ends:,} line ends \\r\\n"] * (line_ends > 0)
    return f"{name} is read {' and '.join(parts)}" if parts else None


def unknown_note(unit: str, unknown: int, tokens: int, where: str, trained: float | None) -> str | None:
    """Return a remark on how much of a text is `<unk>`, and what that does to its numbers; None for nothing.

    Args:
        unit: of the tokens.
        unknown: how many are `<unk>`.
        tokens: how many there are.
        where: what they are tokens of.
        trained: share of the model's training text that is `<unk>`; None: not known.
    """
    if not unknown:
        return None
    symbol = {"char": "character"}.get(unit, unit)
    found = f"{unknown:,} of {tokens:,} {symbol}s of {where} ({_percent(unknown / tokens)}) are <unk>"
    if trained == 0:
        remedy = "data.min_count 2 would train it" if unit == "word" else "the units byte and bpe lack nothing"
        return f"{found}, which training never saw: what the model says of them is noise, in all averages too; {remedy}"
    seen = "" if trained is None else f" (in training {_percent(trained)})"
    return (
        f"{found}{seen}: they count as one and the same {symbol}, whose spelling costs nothing, so the loss is lower "
        f"than with a full vocabulary; compare it only with models of this vocabulary"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "below 0.1%"


def read_meta(directory: Path) -> JsonObject:
    """Read the record of a prepared corpus, after checking that its files are whole."""
    try:
        meta = read_json(directory / "meta.json")
        if meta["format"] != META_FORMAT:
            raise UserError(f"{directory}: prepared by another version (format {meta['format']!r})")
        width = np.dtype(meta["dtype"]).itemsize
        for split, record in meta["splits"].items():
            path = directory / f"{split}.tokens"
            if path.stat().st_size != record["tokens"] * width:
                raise UserError(f"{path}: {path.stat().st_size} bytes, expected {record['tokens'] * width}")
        return meta
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        if isinstance(error, PermissionError):
            raise NotAllowed(f"{error.filename}: {error.strerror}; choose another --data-dir") from None
        raise UserError(f"{directory}: damaged ({type(error).__name__}: {error})") from None
