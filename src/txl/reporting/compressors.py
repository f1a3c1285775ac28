"""Sizes that general compressors give a text: the simplest thing that a language model has to beat."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

SETTINGS = "zlib level 9, bzip2 level 9, xz preset 9e"
"""Settings of `compress`, logged with its sizes, so that sizes of other settings are never taken for these."""

_LARGEST_DICTIONARY = 64 * 2**20
"""Dictionary of xz preset 9 in bytes: lzma finds repetitions so far back."""


@dataclass(frozen=True)
class Compressed:
    """Sizes in bytes of a text and of its compressed forms."""

    text: int
    zlib: int
    """Level 9, the highest (the format of gzip)."""
    bz2: int
    """Level 9, the highest."""
    lzma: int
    """xz preset 9 with its extra effort, the highest, as `xz -9e` writes it."""

    def bits_per_byte(self, name: str) -> float:
        """Return the bits that "zlib", "bz2" or "lzma" needs for a byte of text, its file's header included."""
        return 8 * getattr(self, name) / self.text


def compress(blocks: Iterable[bytes], limit: int | None = None) -> Compressed:
    """Compress a text, a block at a time; memory does not grow with the text beyond lzma's dictionary.

    Args:
        blocks: the text.
        limit: bytes of it to compress, from its beginning; None: all.
    """
    xz, deflate, sorting = (
        _xz(_LARGEST_DICTIONARY if limit is None else limit),
        zlib.compressobj(level=9),
        bz2.BZ2Compressor(9),
    )
    text = by_zlib = by_bz2 = by_lzma = 0
    for block in blocks:
        if limit is not None:
            block = block[: limit - text]
        text += len(block)
        by_zlib += len(deflate.compress(block))
        by_bz2 += len(sorting.compress(block))
        by_lzma += len(xz.compress(block))
        if text == limit:
            break
    by_zlib, by_bz2, by_lzma = by_zlib + len(deflate.flush()), by_bz2 + len(sorting.flush()), by_lzma + len(xz.flush())
    return Compressed(text, by_zlib, by_bz2, by_lzma)


def lzma_after(before: Iterable[bytes], text: bytes) -> int:
    """Count the bytes by which lzma's file grows when a text is appended to another one.

    Of the other text lzma sees the end, as far as its dictionary reaches. Two threads compress, one with the text and
    one without, in some twenty times as much memory as both texts take, at most 1.4 GB.

    Args:
        before: the other text, in order.
        text: the one that counts.
    """
    kept, size = deque[bytes](), 0
    for block in before:
        kept.append(block)
        size += len(block)
        while size - len(kept[0]) >= _LARGEST_DICTIONARY:
            size -= len(kept.popleft())
    seen = b"".join(kept)[-max(_LARGEST_DICTIONARY - len(text), 1) :]

    def compressed(data: bytes) -> int:
        xz = _xz(len(seen) + len(text))
        return len(xz.compress(data)) + len(xz.flush())

    with ThreadPoolExecutor() as threads:
        alone, both = threads.map(compressed, (seen, seen + text))
    return both - alone


def _xz(text: int) -> lzma.LZMACompressor:
    """Return `xz -9e` for a text of so many bytes: a longer dictionary gains nothing and takes ten times its size."""
    dictionary = min(max(text, 4096), _LARGEST_DICTIONARY)
    preset = 9 | lzma.PRESET_EXTREME
    return lzma.LZMACompressor(filters=[{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": dictionary}])
