"""Sizes of a text under general-purpose compressors: the simplest baseline for a language model."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

SETTINGS = "zlib level 9, bzip2 level 9, xz preset 9e"
"""Settings of `compress`, logged with the sizes, so that sizes from other settings are not mistaken for these sizes."""

# Dictionary size of xz preset 9 in bytes: the largest distance at which lzma finds repetitions.
_LARGEST_DICTIONARY = 64 * 2**20


def compress(blocks: Iterable[bytes], limit: int | None = None) -> dict[str, int]:
    """Return the sizes in bytes of a text and of its compressed forms: text, zlib, bz2, lzma.

    Memory use does not grow with the text beyond lzma's dictionary.

    Args:
        blocks: text as consecutive blocks of bytes.
        limit: number of bytes to compress, from the beginning of the text; None: all.
    """
    compressors = {
        "zlib": zlib.compressobj(level=9),
        "bz2": bz2.BZ2Compressor(9),
        "lzma": _xz(_LARGEST_DICTIONARY if limit is None else limit),
    }
    sizes = dict.fromkeys(("text", *compressors), 0)
    for block in blocks:
        if limit is not None:
            block = block[: limit - sizes["text"]]
        sizes["text"] += len(block)
        for name, compressor in compressors.items():
            sizes[name] += len(compressor.compress(block))
        if sizes["text"] == limit:
            break
    return sizes | {name: sizes[name] + len(compressor.flush()) for name, compressor in compressors.items()}


def lzma_after(before: Iterable[bytes], text: bytes) -> int:
    """Return the number of bytes by which lzma's file grows when `text` is appended to `before`.

    lzma uses only the end of `before`, as far back as its dictionary reaches. Two threads compress, one with `text` and
    one without. They need about twenty times the memory of both texts, at most 1.4 GB.

    Args:
        before: preceding text, as consecutive blocks of bytes.
        text: text whose additional size is measured.
    """
    recent, size = deque[bytes](), 0
    for block in before:
        recent.append(block)
        size += len(block)
        while size - len(recent[0]) >= _LARGEST_DICTIONARY:
            size -= len(recent.popleft())
    seen = b"".join(recent)[-max(_LARGEST_DICTIONARY - len(text), 1) :]

    def compressed(data: bytes) -> int:
        xz = _xz(len(seen) + len(text))
        return len(xz.compress(data)) + len(xz.flush())

    with ThreadPoolExecutor() as threads:
        alone, both = threads.map(compressed, (seen, seen + text))
    return both - alone


def _xz(text: int) -> lzma.LZMACompressor:
    """Return an `xz -9e` compressor for a text of `text` bytes.

    A dictionary larger than the text would save nothing and need ten times its size in memory.
    """
    dictionary = min(max(text, 4096), _LARGEST_DICTIONARY)
    preset = 9 | lzma.PRESET_EXTREME
    return lzma.LZMACompressor(filters=[{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": dictionary}])
