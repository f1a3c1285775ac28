"""Token files: a split's token ids as little-endian integers on disk, read through a memory map."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest unsigned integers that hold all ids."""
    for name in ("<u1", "<u2", "<u4"):
        dtype = np.dtype(name)
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise ValueError(f"a vocabulary of {vocab_size} tokens does not fit 32 bits")


@dataclass(frozen=True)
class Sentences:
    """How a stream of separate sentences is cut: training shuffles them."""

    boundary_id: int
    """The token at a sentence's ends."""
    boundary: str
    """"end": one such token between two sentences; "both": two."""


class Tokens:
    """A split's token ids, one-dimensional; nothing is in memory that is not looked at."""

    def __init__(
        self,
        ids: np.ndarray,
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
        """Of a corpus of separate sentences; None: running text."""
        self.unk_id = unk_id
        """What stands for everything that the vocabulary lacks; None: it lacks nothing."""
        self.bytes_of_first = bytes_of_first
        """Gives the bytes of text that so many tokens from the first on stand for; None where that is not known."""

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, key: Any) -> Any:
        return self._ids[key]

    def __iter__(self) -> Iterator[int]:
        return map(int, self._ids)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if dtype is not None and np.dtype(dtype) != self._ids.dtype:
            return np.asarray(self._ids).astype(dtype)
        return np.array(self._ids) if copy else np.asarray(self._ids)


class TokenWriter:
    """Writes a token file block by block, counting and hashing as it goes."""

    def __init__(self, path: Path, dtype: np.dtype[Any], unk_id: int | None):
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
        """Of what has been written."""
        return self._hash.hexdigest()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
