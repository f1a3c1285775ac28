"""Sizes that general compressors give a text: the simplest thing that a language model has to beat."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

SETTINGS = "zlib level 9, xz preset 9"
"""Settings of `compress`, logged with its sizes, so that sizes of other settings are never taken for these."""

_LARGEST_DICTIONARY = 64 * 2**20
"""Dictionary of xz preset 9 in bytes: lzma finds repetitions so far back."""


@dataclass(frozen=True)
class Compressed:
    """Sizes in bytes of a text and of its compressed forms."""

    text: int
    zlib: int
    """Level 9, the highest (the format of gzip)."""
    lzma: int
    """xz preset 9, the highest, as `xz -9` writes it."""

    def bits_per_byte(self, name: str) -> float:
        """Return the bits that a compressor, "zlib" or "lzma", needs for a byte of text, its file's header included."""
        return 8 * getattr(self, name) / self.text


def compress(blocks: Iterable[bytes], limit: int | None = None) -> Compressed:
    """Compress a text, a block at a time; memory does not grow with the text beyond lzma's dictionary.

    Args:
        blocks: the text.
        limit: bytes of it to compress, from its beginning; None: all.
    """
    # A dictionary longer than the text gains nothing, and the encoder's memory is ten times the dictionary.
    dictionary = _LARGEST_DICTIONARY if limit is None else min(max(limit, 4096), _LARGEST_DICTIONARY)
    xz = lzma.LZMACompressor(filters=[{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}])
    deflate = zlib.compressobj(level=9)
    text = by_zlib = by_lzma = 0
    for block in blocks:
        if limit is not None:
            block = block[: limit - text]
        text += len(block)
        by_zlib += len(deflate.compress(block))
        by_lzma += len(xz.compress(block))
        if text == limit:
            break
    return Compressed(text, by_zlib + len(deflate.flush()), by_lzma + len(xz.flush()))
