"""Prepared corpora on disk: record, vocabulary and token files.

A token file holds the token ids of a split as little-endian integers and is read through a memory map.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from txl.data.blocks import escaped
from txl.data.lacking import Lacking, normalised_note, unknown_note
from txl.data.located import bytes_before, located_tokens
from txl.data.pieces import BLOCK, Piece
from txl.data.vocabularies import load_vocabulary
from txl.data.vocabulary import Vocabulary
from txl.errors import Field, UserError
from txl.files import JsonObject, file_sha256, read_json, write_whole

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

META_FORMAT = 2
_OWN_HASH = "sha256_meta"  # key of a record's hash of everything else in it
_VERIFIED = "verified.json"  # file with the stamps of a corpus's files when they last had the recorded hashes
_SETTLED = 2.0  # seconds after which a change of a file shows in its time of change, which file systems round


class NotRead(UserError):
    """Error for files of a prepared corpus that may be whole, but that the system does not let the user read now."""


Ids = np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]
"""Token ids [N]."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest unsigned integer dtype that holds all ids of a vocabulary."""
    return next(np.dtype(name) for name in ("<u1", "<u2", "<u4") if vocab_size - 1 <= np.iinfo(name).max)


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
        return self._readable()[key]

    def __iter__(self) -> Iterator[int]:
        return map(int, self._readable())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        ids = self._readable()
        if dtype is not None and np.dtype(dtype) != ids.dtype:
            return np.asarray(ids).astype(dtype)
        return np.array(ids) if copy else np.asarray(ids)

    def _readable(self) -> Ids:
        """Return the ids; refuse a file that was cut off since, because reading behind its end kills the process."""
        if isinstance(self._ids, np.memmap):
            with suppress(FileNotFoundError):  # a removed file can still be read
                size = os.stat(path := str(self._ids.filename)).st_size
                if size < self._ids.nbytes:
                    raise UserError(f"{path}: cut off at {size:,} bytes by another program; run the command again")
        return self._ids


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
    """A prepared corpus: token files, vocabulary and record.

    Raises:
        UserError: if a file is missing, or is not the one that was prepared. Files that are unchanged since they were
            last verified are not read again.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._meta = read_meta(directory)
        self._bytes_of: dict[tuple[str, int], int | None] = {}  # training asks the same before every evaluation
        try:
            self.vocabulary = load_vocabulary(directory / "vocabulary.json")
            self._verify_changed()
        except OSError as error:
            raise _not_read(error, directory) from None

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
        n_bytes, vocabulary = self._record(split)["bytes"], self.vocabulary
        sentences = None
        if vocabulary.boundary is not None and vocabulary.eos_id is not None:
            sentences = Sentences(vocabulary.eos_id, vocabulary.boundary)
        bytes_of_first = functools.partial(self._bytes_of_first, split)
        return Tokens(self._ids(split), split, n_bytes, sentences, vocabulary.unk_id, bytes_of_first)

    def _ids(self, split: str) -> np.ndarray:
        return np.memmap(self._path(split, "tokens"), dtype=token_dtype(len(self.vocabulary)), mode="r")

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
        path = self._path(split, "tokens" if self.vocabulary.is_text else "text")
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
        return {key: value for key, value in self._meta.items() if key != "format"}

    def unknown_share(self, split: str) -> float | None:
        """Return the share of `<unk>` in the tokens of a split; None if the corpus lacks the split."""
        record = self._meta["splits"].get(split)
        return None if record is None else record["unknown"] / record["tokens"]

    def symbols(self, split: str) -> dict[int, int]:
        """Return the number of times that each character, by its code point, occurs in the text of a split.

        A byte that is not UTF-8 counts as U+DC80 to U+DCFF.
        """
        counts = np.zeros(sys.maxunicode + 1, dtype=np.int64)
        for text, _ in escaped(self.text_bytes(split)):
            codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
            of_block = np.bincount(codes)
            counts[: len(of_block)] += of_block
        return {code: int(counts[code]) for code in np.flatnonzero(counts).tolist()}

    def lacking(self, split: str, vocabulary: Vocabulary) -> Lacking:
        """Return the tally of the words and characters of a split that a vocabulary, or its training text, lacks."""
        tally, path = Lacking(vocabulary), self._path(split, "text")
        if vocabulary.kind == "word":
            for text, _ in vocabulary.texts(Piece(path), self.text_bytes(split)) if path.is_file() else ():
                tally.add_words(text)
        elif vocabulary.kind == "char" or vocabulary.seen is not None:
            for code, count in self.symbols(split).items():
                if not vocabulary.knows(chr(code)):
                    tally.add(chr(code), count)
        return tally

    def notes(self, split: str, trained: float | None = None, vocabulary: Vocabulary | None = None) -> list[str]:
        """Return notes for the reader of a split's results: what may be read in another way than meant, what
        normalising changed, the share of `<unk>`, and what a model's training text lacks.

        Args:
            split: split whose tokens are reported.
            trained: share of `<unk>` in a model's training text; None: unknown.
            vocabulary: vocabulary of a model, with the characters of its training text; None: the corpus's.
        """
        record = self._record(split)
        counts = self._meta.get("normalised", {})
        read = normalised_note(self.name, counts.get("byte_order_marks", 0), counts.get("line_ends", 0))
        kept = f"{read} (data.normalise false keeps them)" if read else None
        vocabulary, where = vocabulary or self.vocabulary, f"the {split} split"
        is_lacking = record["unknown"] > 0 or vocabulary.seen is not None
        lacking = self.lacking(split, vocabulary) if is_lacking else Lacking(vocabulary)
        unknown = unknown_note(lacking, record["unknown"], record["tokens"], where, trained)
        return [note for note in (self._meta.get("note"), kept, unknown, *lacking.notes(where)) if note is not None]

    def verify(self) -> None:
        """Compare all files with their recorded hashes."""
        for path, expected in self._hashes().items():
            if file_sha256(path) != expected:
                raise UserError(f"{path}: altered since it was prepared")
        if vocabulary_sha256(self.vocabulary) != self._meta["sha256_vocabulary"]:
            raise UserError(f"{self.directory / 'vocabulary.json'}: altered since it was prepared")

    def _hashes(self) -> dict[Path, str]:
        """Return the recorded hashes of the token files and texts."""
        splits = self._meta["splits"].items()
        tokens = {self._path(split, "tokens"): record["sha256_tokens"] for split, record in splits}
        return tokens | {
            self._path(split, "text"): record["sha256_text"]
            for split, record in splits
            if keeps_text(split, self.vocabulary)
        }

    def _verify_changed(self) -> None:
        """Verify the files unless all have the stamps with which they were last verified."""
        names = ["meta.json", "vocabulary.json", *(path.name for path in self._hashes())]
        statuses = {name: os.stat(self.directory / name) for name in names}
        stamps = {name: [at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino] for name, at in statuses.items()}
        path = self.directory / _VERIFIED
        with suppress(OSError, UserError):
            if read_json(path) == stamps:
                return
        self.verify()
        if time.time() - max(status.st_ctime for status in statuses.values()) > _SETTLED:
            with suppress(UserError):  # the folder may be another user's
                write_whole(path, json.dumps(stamps))

    def _record(self, split: str) -> JsonObject:
        if split not in self._meta["splits"]:
            raise UserError(f"{self.name} has no split {split!r}; expected one of {', '.join(self.splits)}")
        return self._meta["splits"][split]

    def _path(self, split: str, ending: str) -> Path:
        return self.directory / f"{split}.{ending}"


def keeps_text(split: str, vocabulary: Vocabulary | None) -> bool:
    """Return whether the text of a split is stored beside its tokens."""
    return split != "train" and not (vocabulary is not None and vocabulary.is_text)


def vocabulary_sha256(vocabulary: Vocabulary) -> str:
    """Return the hash of a vocabulary."""
    return _sha256(vocabulary.to_json())


def write_meta(directory: Path, meta: JsonObject) -> None:
    """Write the record of a prepared corpus, with its own hash."""
    content = json.dumps(meta | {_OWN_HASH: _sha256(meta)}, indent=1)
    (directory / "meta.json").write_text(content, encoding="utf-8")


def read_meta(directory: Path) -> JsonObject:
    """Read the record of a prepared corpus; refuse one that is not as `write_meta` wrote it."""
    try:
        meta = read_json(directory / "meta.json")
    except OSError as error:
        raise _not_read(error, directory) from None
    if not isinstance(meta, dict) or meta.pop(_OWN_HASH, None) != _sha256(meta):
        raise UserError(f"{directory}: damaged (meta.json is not one of a prepared corpus)")
    if meta["format"] != META_FORMAT:
        raise UserError(f"{directory}: prepared by another version (format {meta['format']!r})")
    return meta


def _sha256(values: JsonObject) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _not_read(error: OSError, directory: Path) -> UserError:
    what = f"{error.filename or directory}: {error.strerror}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP):
        return UserError(what)  # no regular file is there
    return NotRead(what, remedy=("choose another ", Field("data_dir")) if isinstance(error, PermissionError) else "")
