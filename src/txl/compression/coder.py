"""Arithmetic coding with integer frequencies, and the conversion of a model's probabilities to frequencies.

All computation is exact integer arithmetic except one rounding in `Frequencies`, which is equal on both sides.

Shapes: B lanes, V symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from txl.errors import CommandFailed, Field

TOTAL = 1 << 30  # sum of a lane's frequencies, up to the rounding of the probabilities
_WIDTH = 64
_TOP = 1 << _WIDTH
_BOTTOM = 1 << (_WIDTH - 8)  # of the range: dividing it by `TOTAL` then costs less than 2^-26 of a symbol's share
_FORGET = 1 << 16  # counted symbols, or counts of literals, at which counts are halved


class RangeEncoder:
    """Encoder of symbols as bytes: each symbol narrows the range [low, low + range) to its share (Martin 1979)."""

    def __init__(self) -> None:
        self._low, self._range = 0, _TOP - 1
        self._out = bytearray()

    def encode(self, start: int, size: int, total: int) -> None:
        """Encode a symbol whose share is [start, start + size) of `total`; `total` is at most 2^31."""
        share = self._range // total
        self._low += share * start
        self._range = share * size
        while self._range < _BOTTOM:
            self._shift()
            self._range <<= 8

    def finish(self) -> bytes:
        """Return all bytes, as few as identify a number within the range if zeros are appended."""
        for n_byte in range(1, _WIDTH // 8):
            unit = 1 << (_WIDTH - 8 * n_byte)
            rounded = -(-self._low // unit) * unit
            if rounded < self._low + self._range:
                self._low = rounded
                break
        for _ in range(_WIDTH // 8):
            self._shift()
        return bytes(self._out.rstrip(b"\0"))

    def _shift(self) -> None:
        if self._low >= _TOP:  # the carry is added to the bytes written so far
            self._low -= _TOP
            place = len(self._out) - 1
            while self._out[place] == 255:
                self._out[place] = 0
                place -= 1
            self._out[place] += 1
        self._out.append(self._low >> (_WIDTH - 8))
        self._low = (self._low << 8) & (_TOP - 1)


class RangeDecoder:
    """The inverse of `RangeEncoder`: `find` locates the next symbol, `take` moves past this symbol."""

    def __init__(self, data: bytes):
        self._data, self._place = data, _WIDTH // 8
        self._code = int.from_bytes(data[: self._place].ljust(self._place, b"\0"), "big")
        self._range, self._share = _TOP - 1, 0

    def find(self, total: int) -> int:
        """Return a number below `total` that lies within the next symbol's share of `total`."""
        self._share = self._range // total
        return min(self._code // self._share, total - 1)

    def take(self, start: int, size: int) -> None:
        """Move past the symbol whose share is [start, start + size)."""
        self._code -= self._share * start
        self._range = self._share * size
        while self._range < _BOTTOM:
            following = self._data[self._place] if self._place < len(self._data) else 0
            self._place += 1
            self._code = (self._code << 8 | following) & (_TOP - 1)
            self._range <<= 8


class Frequencies:
    """Integer frequencies of the symbols: the model's probabilities, rounded once, and a count for the escape, if any.

    Every token gets at least 1 of `TOTAL`. The escape's frequency is estimated from the number of escapes so far
    (Krichevsky and Trofimov's estimate); in a file without escapes it costs a few bits.
    """

    def __init__(self, escape: int | None):
        self._escape, self._escaped, self._coded = escape, 0, 0

    def cumulative(self, log_probs: Tensor) -> np.ndarray:
        """Return cumulative frequencies of log-probabilities [B,V]: int64 [B,V+1]; [B,V+2] if the escape is no token.

        CommandFailed: a probability is not a finite number.
        """
        probabilities = log_probs.double().exp()
        if not bool(torch.isfinite(probabilities).all()):
            remedy = ("use a smaller ", Field("dynamic_learning_rate"), " if it adapts")
            raise CommandFailed("the model's probabilities are not finite numbers", remedy=remedy)
        n_lane, n_token = probabilities.shape
        reserved = 0
        if self._escape is not None:
            reserved = max(1, TOTAL * (2 * self._escaped + 1) // (2 * (self._coded + 1)))
        room = max(TOTAL - n_token - reserved, 0)
        result = np.zeros((n_lane, n_token + 1 + (self._escape == n_token)), dtype=np.int64)
        result[:, 1 : n_token + 1] = (probabilities * room).floor_().long().add_(1).numpy()
        if self._escape is not None:
            result[:, self._escape + 1] += reserved
        return np.cumsum(result, axis=1, out=result)

    def count(self, symbols: Sequence[int]) -> None:
        """Count coded symbols, to update the frequency of the escape."""
        if self._escape is not None:
            self._coded += len(symbols)
            self._escaped += symbols.count(self._escape)
            if self._coded >= _FORGET:
                self._coded, self._escaped = self._coded // 2, self._escaped // 2


class Literals:
    """Adaptive frequencies of the literal bytes that follow escapes."""

    _STEP = 32

    def __init__(self) -> None:
        self._counts, self._total = [1] * 256, 256

    def encode(self, encoder: RangeEncoder, value: int) -> None:
        """Encode one byte."""
        encoder.encode(sum(self._counts[:value]), self._counts[value], self._total)
        self._count(value)

    def decode(self, decoder: RangeDecoder) -> int:
        """Return the next byte."""
        at = decoder.find(self._total)
        value, end = next((value, end) for value, end in enumerate(accumulate(self._counts)) if end > at)
        decoder.take(end - self._counts[value], self._counts[value])
        self._count(value)
        return value

    def _count(self, value: int) -> None:
        self._counts[value] += self._STEP
        self._total += self._STEP
        if self._total > _FORGET:
            self._counts = [(count + 1) // 2 for count in self._counts]
            self._total = sum(self._counts)
