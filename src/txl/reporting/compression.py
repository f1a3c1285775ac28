"""What general compressors need for the same text: the simplest thing that a language model has to beat."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Compressed:
    """Sizes in bytes of a text and of its compressed forms."""

    text: int
    zlib: int
    """Level 9."""
    lzma: int
    """xz preset 9, whose dictionary of 64 MiB sees the whole text if that is shorter."""

    def bits_per_byte(self, name: str) -> float:
        """Bits that a compressor needs for a byte of text: "zlib" or "lzma"."""
        return 8 * getattr(self, name) / self.text


def compress(blocks: Iterable[bytes], limit: int) -> Compressed:
    """Compress the first `limit` bytes of a text; it is never in memory whole."""
    deflate, xz = zlib.compressobj(level=9), lzma.LZMACompressor(preset=9)
    text = by_zlib = by_lzma = 0
    for block in blocks:
        block = block[: limit - text]
        text += len(block)
        by_zlib += len(deflate.compress(block))
        by_lzma += len(xz.compress(block))
        if text == limit:
            break
    return Compressed(text, by_zlib + len(deflate.flush()), by_lzma + len(xz.flush()))
