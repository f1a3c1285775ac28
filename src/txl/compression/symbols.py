"""Encode any bytes as symbols of a vocabulary; a byte that no token covers becomes an escape and a literal byte.

Nothing is normalised: decoding returns exactly the bytes that were encoded.
"""

from __future__ import annotations

import re

import numpy as np

from txl.data.vocabulary import Vocabulary
from txl.errors import UserError

_AT_ONCE = 1 << 14  # symbols that are decoded at once
_INVALID = re.compile("[\udc80-\udcff]+")  # bytes that are not valid UTF-8, as "surrogateescape" decodes them


class Symbols:
    """The tokens of a vocabulary, and an escape if not every byte is a token."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        pieces = vocabulary.pieces
        if pieces is None:
            raise UserError(
                f"this model reads {vocabulary.kind} tokens, which do not keep the white space between them, so a file "
                f"could not be restored; use a model of bytes, characters or BPE tokens"
            )
        self._pieces = pieces
        of_byte = {piece[0]: token for token, piece in enumerate(pieces) if len(piece) == 1}
        has_all = len(of_byte) == 256  # never those of characters, of which only ASCII's are single bytes
        unknown = vocabulary.unk_id
        # Symbol that is followed by a literal byte; None: every byte is a token.
        self.escape: int | None = None if has_all else len(pieces) if unknown is None else unknown
        # Token that is read before the first symbol, and in place of an escape that is no token: a line end.
        self.start = of_byte.get(ord("\n"), 0)
        self._token_of = {piece: token for token, piece in enumerate(pieces) if token != unknown}
        self._byte_symbols = np.full(256, -1 if self.escape is None else self.escape, dtype=np.int32)
        for value, token in of_byte.items():
            self._byte_symbols[value] = token

    def encode(self, data: bytes) -> tuple[np.ndarray, bytes]:
        """Return symbols, int32 [N], and the literal bytes, one for each escape among the symbols."""
        if self._vocabulary.kind == "byte":
            return self._as_bytes(data)
        text = data.decode("utf-8", errors="surrogateescape")
        if self._vocabulary.kind == "char":
            return self._as_characters(text)
        parts, at = [], 0
        for invalid in _INVALID.finditer(text):
            parts += [self._as_pairs(text[at : invalid.start()])]
            parts += [self._as_bytes(invalid.group().encode("utf-8", errors="surrogateescape"))]
            at = invalid.end()
        parts.append(self._as_pairs(text[at:]))
        return np.concatenate([symbols for symbols, _ in parts]), b"".join(literals for _, literals in parts)

    def decode(self, symbols: np.ndarray, literals: bytes) -> bytes:
        """Return the bytes that `encode` encoded as symbols and literal bytes."""
        behind, text = iter(literals), bytearray()
        for at in range(0, len(symbols), _AT_ONCE):  # a Python list takes many times the memory of its array
            text += b"".join(
                [
                    bytes([next(behind)]) if symbol == self.escape else self._pieces[symbol]
                    for symbol in symbols[at : at + _AT_ONCE].tolist()
                ]
            )
        return bytes(text)

    def read(self, symbols: np.ndarray) -> np.ndarray:
        """Return the tokens that a model reads for symbols; an escape that is no token is read as a line end."""
        return np.where(symbols == len(self._pieces), self.start, symbols)

    def _as_bytes(self, data: bytes) -> tuple[np.ndarray, bytes]:
        values = np.frombuffer(data, dtype=np.uint8)
        symbols = self._byte_symbols[values]
        escaped = np.zeros(len(values), dtype=bool) if self.escape is None else symbols == self.escape
        return symbols, values[escaped].tobytes()

    def _as_characters(self, text: str) -> tuple[np.ndarray, bytes]:
        symbols: list[int] = []
        literals = bytearray()
        for character in text:
            spelled = character.encode("utf-8", errors="surrogateescape")
            known = self._token_of.get(spelled)
            if known is not None:
                symbols.append(known)
                continue
            assert self.escape is not None  # a character vocabulary always needs an escape
            symbols += [self.escape] * len(spelled)
            literals += spelled
        return np.array(symbols, dtype=np.int32), bytes(literals)

    def _as_pairs(self, text: str) -> tuple[np.ndarray, bytes]:
        data = text.encode("utf-8")
        symbols = self._vocabulary.encode_block(text).astype(np.int32)
        if b"".join([self._pieces[symbol] for symbol in symbols.tolist()]) == data:
            return symbols, b""
        return self._as_bytes(data)  # the tokenizer normalises its input
