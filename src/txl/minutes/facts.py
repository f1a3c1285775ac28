"""Facts about a text that help to choose a model: its size, its characters, and the amount of repetition."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import zstandard

from txl.data.corpora import STDLIB, own_files
from txl.data.pieces import BLOCK, Piece
from txl.data.standard_library import stdlib_pieces
from txl.data.user_text import user_pieces

_LOOKED_AT = 64  # blocks of a megabyte read from the beginning; the rest of a longer text is assumed to be similar
_SAMPLE = 1 << 19  # bytes of the text in `TextFacts.sample`
_FAR = 27  # base-2 logarithm of the largest distance, in bytes, over which repetition is found


@dataclass(frozen=True)
class TextFacts:
    """Facts about the training split of a text."""

    bytes: int
    compressed_bytes: int
    """Estimated size after compression by zstandard, which finds repetition at any earlier place within 128 MiB."""
    characters: int
    """Number of different characters; 0 if the text is not UTF-8 or holds NUL bytes."""
    sample: str = field(default="", repr=False)
    """Parts of the text, from all of it that was looked at; the whole text if it is short."""

    @property
    def is_text(self) -> bool:
        """True if the text can be read in characters and BPE tokens."""
        return self.characters > 0


def text_facts(corpus: str) -> TextFacts:
    """Return facts about the training split of a user's text (file, folder or glob) or the standard library's sources.

    Raises:
        UserError: if the text does not exist or cannot be read.
    """
    if corpus != STDLIB:
        own_files(corpus)  # if there is no such file, the error lists the named corpora
    pieces = (stdlib_pieces("bpe") if corpus == STDLIB else user_pieces(corpus))["train"]
    size = sum(_size(piece) for piece in pieces)
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(3, enable_ldm=True, window_log=_FAR)
    ).compressobj()
    is_text = True
    looked_at = compressed = 0
    characters: set[str] = set()
    share, sample = _SAMPLE / max(_SAMPLE, min(size, _LOOKED_AT * BLOCK)), []
    for decoder, block, ends in _first_blocks(pieces):
        looked_at += len(block)
        compressed += len(compressor.compress(block))
        try:
            text = decoder.decode(block, final=ends) if is_text else ""
        except UnicodeDecodeError:
            is_text, text = False, ""
        characters.update(text)
        sample.append(text[: math.ceil(share * len(text))])
    compressed += len(compressor.flush())
    is_text = is_text and "\0" not in characters
    return TextFacts(
        size,
        round(compressed * size / max(1, looked_at)),
        len(characters) if is_text else 0,
        "".join(sample),
    )


def _size(piece: Piece) -> int:
    return sum(map(len, piece.blocks())) if piece.size is None else piece.size


def _first_blocks(pieces: Iterable[Piece]) -> Iterator[tuple[codecs.IncrementalDecoder, bytes, bool]]:
    """Yield blocks up to the limit, each with the decoder of its piece, and True for an empty block after the last one.

    The limit is counted in bytes, because small files yield small blocks.
    """
    left = _LOOKED_AT * BLOCK
    for piece in pieces:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for block in piece.blocks():
            yield decoder, block, False
            left -= len(block)
            if left <= 0:
                return
        yield decoder, b"", True
