"""Facts of a text that tell how to model it: its size, its script, and how much of it repeats."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import zstandard

from txl.data.corpora import STDLIB, own_files
from txl.data.sources import BLOCK, Piece, stdlib_pieces, user_pieces

_LOOKED_AT = 64
"""Blocks of a megabyte from the beginning that are read; they speak for the rest of a longer text."""
_FAR = 27
"""Repetition is found as far back as 2**27 bytes."""


@dataclass(frozen=True)
class TextFacts:
    """Facts of a text's training split."""

    bytes: int
    compressed_bytes: int
    """Size after zstandard, which finds repetition anywhere before."""
    characters: int
    """Number of different characters; 0 if this is no UTF-8 text, or holds NUL bytes."""

    @property
    def is_text(self) -> bool:
        """True if it can be read in characters and byte pairs."""
        return self.characters > 0


def text_facts(corpus: str) -> TextFacts:
    """Look at the training split of a user's text (a file, folder or glob), or of the standard library's sources.

    Raises:
        UserError: for a text that is not there or cannot be read.
    """
    if corpus != STDLIB:
        own_files(corpus)  # what is no file is refused with the names of the known corpora
    pieces = (stdlib_pieces("bpe") if corpus == STDLIB else user_pieces(corpus))["train"]
    size = sum(_size(piece) for piece in pieces)
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(3, enable_ldm=True, window_log=_FAR)
    ).compressobj()
    decoder, is_text = codecs.getincrementaldecoder("utf-8")(), True
    looked_at = compressed = 0
    characters: set[str] = set()
    for block in _first_blocks(pieces):
        looked_at += len(block)
        compressed += len(compressor.compress(block))
        try:
            text = decoder.decode(block) if is_text else ""
        except UnicodeDecodeError:
            is_text, text = False, ""
        characters.update(text)
    compressed += len(compressor.flush())
    is_text = is_text and "\0" not in characters
    return TextFacts(
        size,
        round(compressed * size / max(1, looked_at)),
        len(characters) if is_text else 0,
    )


def _size(piece: Piece) -> int:
    return sum(map(len, piece.blocks())) if piece.size is None else piece.size


def _first_blocks(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Yield blocks until there are enough; many small files are many small blocks."""
    left = _LOOKED_AT * BLOCK
    for piece in pieces:
        for block in piece.blocks():
            yield block
            left -= len(block)
            if left <= 0:
                return
