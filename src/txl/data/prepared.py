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

from txl.data.lacking import Lacking, normalised_note, unknown_note
from txl.data.located import located_tokens
from txl.data.pieces import BLOCK, Piece, escaped
from txl.data.vocabularies import load_vocabulary
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.data.words import unjoined
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


Ids = np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]  # [N]


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest unsigned integer dtype that holds all ids of a vocabulary."""
    return next(np.dtype(name) for name in ("<u1", "<u2", "<u4") if vocab_size - 1 <= np.iinfo(name).max)


@dataclass(frozen=True)
class Sentences:
    """Boundaries of a corpus of separate sentences, which training shuffles."""

    boundary_id: int  # of the token at both ends of a sentence
    boundary: str  # "end": one boundary token between two sentences; "both": two


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
        self._ids, self.split, self.unk_id = ids, split, unk_id
        self.n_bytes = n_bytes  # length of the text that the ids stand for; None: unknown
        self.sentences = sentences  # None: running text
        self.bytes_of_first = bytes_of_first  # from n to the bytes of the text of the first n tokens; None if unknown

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
        return np.array(self._readable(), dtype, copy=copy)

    def _readable(self) -> Ids:
        """Return the ids; refuse a file that was cut off since, because reading behind its end kills the process."""
        if isinstance(self._ids, np.memmap):
            with suppress(FileNotFoundError):  # a removed file can still be read
                size = os.stat(path := str(self._ids.filename)).st_size
                if size < self._ids.nbytes:
                    raise UserError(f"{path}: cut off at {size:,} bytes by another program; run the command again")
        return self._ids


class Corpus:
    """A prepared corpus: token files, vocabulary and record.

    Raises:
        UserError: if a file is missing, or is not the one that was prepared. Files that are unchanged since they were
            last verified are not read again.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._meta = read_meta(directory)
        self.name: str = self._meta["name"]  # or the absolute path of the user's own text
        self.unit: str = self._meta["unit"]
        self.splits: tuple[str, ...] = tuple(self._meta["splits"])
        self._bytes_of: dict[tuple[str, int], int | None] = {}  # training asks the same before every evaluation
        try:
            self.vocabulary = load_vocabulary(directory / "vocabulary.json")
            self._verify_changed()
        except OSError as error:
            raise _not_read(error, directory) from None

    def info(self) -> JsonObject:
        """Return the record: name, unit, vocabulary size, hashes, and the tokens, bytes and `<unk>` of each split."""
        return {key: value for key, value in self._meta.items() if key != "format"}

    def tokens(self, split: str) -> Tokens:
        """Return the token ids of a split."""
        n_bytes, vocabulary = self._record(split)["bytes"], self.vocabulary
        sentences = None
        if vocabulary.boundary is not None and vocabulary.eos_id is not None:
            sentences = Sentences(vocabulary.eos_id, vocabulary.boundary)
        bytes_of_first = functools.partial(self._bytes_of_first, split)
        return Tokens(self._ids(split), split, n_bytes, sentences, vocabulary.unk_id, bytes_of_first)

    def text_bytes(self, split: str) -> Iterator[bytes]:
        """Yield the text of a split, block by block; the text of the training split is spelled from its tokens."""
        self._record(split)
        path = self._path(split, "tokens" if self.vocabulary.is_text else "text")
        if path.is_file():
            yield from Piece(path).blocks()
            return
        ids = self._ids(split)
        for start in range(0, len(ids), BLOCK):
            block = self.vocabulary.spell(np.asarray(ids[start : start + BLOCK], dtype=np.int64))
            if block is None:
                raise UserError(f"{self.name}: the text of the {split} split is not kept; read it from its source")
            yield block

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
            of_block = np.bincount(np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32))
            counts[: len(of_block)] += of_block
        return {code: int(counts[code]) for code in np.flatnonzero(counts).tolist()}

    def notes(self, split: str, trained: float | None = None, vocabulary: Vocabulary | None = None) -> list[str]:
        """Return notes for the reader of a split's results: what may be read in another way than meant, what
        normalising changed, the share of `<unk>` (beside `trained`, that of the training text), and what the training
        text of a model with this vocabulary (None: the corpus's) lacks.
        """
        record, counts = self._record(split), self._meta.get("normalised", {})
        read = normalised_note(self.name, counts.get("byte_order_marks", 0), counts.get("line_ends", 0))
        vocabulary, path = vocabulary or self.vocabulary, self._path(split, "text")
        tally, is_read = Lacking(vocabulary), record["unknown"] > 0 and path.is_file()
        if vocabulary.seen is not None or (is_read and vocabulary.kind == "char"):
            for code, count in self.symbols(split).items():
                if not vocabulary.knows(chr(code)):
                    tally.add(chr(code), count)
        elif is_read and isinstance(vocabulary, WordVocabulary):
            for text, _ in vocabulary.texts(Piece(path), self.text_bytes(split)):
                for word in vocabulary.cut(text):
                    if not vocabulary.knows(word):
                        tally.add(unjoined(word)[1])
        notes = (
            self._meta.get("note"),
            f"{read} (data.normalise false keeps them)" if read else None,
            unknown_note(tally, record["unknown"], record["tokens"], f"the {split} split", trained),
            *tally.notes(f"the {split} split"),
        )
        return [note for note in notes if note is not None]

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
            n_bytes, path = self.vocabulary.spelled_bytes(ids), self._path(split, "text")
            if n_bytes is None and path.is_file():
                tokens = located_tokens(Piece(path), self.text_bytes(split), self.vocabulary)
                agrees = all(token.id == number for number, token in zip(ids.tolist(), tokens, strict=False))
                following = next(tokens, None)
                n_bytes = following.start if agrees and following is not None else None
            self._bytes_of[split, n_token] = n_bytes
        return self._bytes_of[split, n_token]

    def _verify_changed(self) -> None:
        """Compare the files with the recorded hashes, unless all have the stamps with which they were last verified."""
        hashes: dict[Path, str] = {}
        for split, record in self._meta["splits"].items():
            hashes[self._path(split, "tokens")] = record["sha256_tokens"]
            if keeps_text(split, self.vocabulary):
                hashes[self._path(split, "text")] = record["sha256_text"]
        vocabulary, verified = self.directory / "vocabulary.json", self.directory / _VERIFIED
        statuses = {path.name: os.stat(path) for path in (self.directory / "meta.json", vocabulary, *hashes)}
        stamps = {name: [at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino] for name, at in statuses.items()}
        with suppress(OSError, UserError):
            if read_json(verified) == stamps:
                return
        altered = [path for path, expected in hashes.items() if file_sha256(path) != expected]
        if json_sha256(self.vocabulary.to_json()) != self._meta["sha256_vocabulary"]:
            altered.append(vocabulary)
        if altered:
            raise UserError(f"{altered[0]}: altered since it was prepared")
        if time.time() - max(status.st_ctime for status in statuses.values()) > _SETTLED:
            with suppress(UserError):  # the folder may be another user's
                write_whole(verified, json.dumps(stamps))

    def _record(self, split: str) -> JsonObject:
        if split not in self._meta["splits"]:
            raise UserError(f"{self.name} has no split {split!r}; expected one of {', '.join(self.splits)}")
        return self._meta["splits"][split]

    def _path(self, split: str, ending: str) -> Path:
        return self.directory / f"{split}.{ending}"


def keeps_text(split: str, vocabulary: Vocabulary) -> bool:
    """Return whether the text of a split is stored beside its tokens."""
    return split != "train" and not vocabulary.is_text


def write_meta(directory: Path, meta: JsonObject) -> None:
    """Write the record of a prepared corpus, with its own hash."""
    content = json.dumps(meta | {_OWN_HASH: json_sha256(meta)}, indent=1)
    (directory / "meta.json").write_text(content, encoding="utf-8")


def read_meta(directory: Path) -> JsonObject:
    """Read the record of a prepared corpus; refuse one that is not as `write_meta` wrote it."""
    try:
        meta = read_json(directory / "meta.json")
    except OSError as error:
        raise _not_read(error, directory) from None
    if not isinstance(meta, dict) or meta.pop(_OWN_HASH, None) != json_sha256(meta):
        raise UserError(f"{directory}: damaged (meta.json is not one of a prepared corpus)")
    if meta["format"] != META_FORMAT:
        raise UserError(f"{directory}: prepared by another version (format {meta['format']!r})")
    return meta


def json_sha256(values: object) -> str:
    """Return the hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _not_read(error: OSError, directory: Path) -> UserError:
    what = f"{error.filename or directory}: {error.strerror}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP):
        return UserError(what)  # no regular file is there
    return NotRead(what, remedy=("choose another ", Field("data_dir")) if isinstance(error, PermissionError) else "")
