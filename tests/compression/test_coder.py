"""Arithmetic coding: exact decoding, the length of the code, and integer frequencies."""

from __future__ import annotations

import math
import random

import pytest
import torch

from txl.compression.coder import TOTAL, Frequencies, Literals, RangeDecoder, RangeEncoder
from txl.errors import CommandFailed


def spans(seed: int, n: int) -> list[tuple[int, int, int]]:
    """Return start, size and total of random symbols: likely and least likely ones, at both ends of the range."""
    draw = random.Random(seed)
    found = []
    for _ in range(n):
        total = draw.choice([2, 3, 257, 1 << 16, TOTAL, TOTAL + 12345])
        size = draw.choice([1, 1, draw.randint(1, total - 1), total - 1])
        found.append((draw.choice([0, total - size, draw.randint(0, total - size)]), size, total))
    return found


def coded(symbols: list[tuple[int, int, int]]) -> bytes:
    encoder = RangeEncoder()
    for start, size, total in symbols:
        encoder.encode(start, size, total)
    return encoder.finish()


@pytest.mark.parametrize("seed", range(5))
def test_symbols_come_back_in_as_many_bits_as_their_probabilities_say(seed):
    symbols = spans(seed, 3000)
    data = coded(symbols)
    decoder = RangeDecoder(data)
    for start, size, total in symbols:
        assert start <= decoder.find(total) < start + size
        decoder.take(start, size)
    bits = sum(math.log2(total / size) for _, size, total in symbols)
    assert bits - 8 < 8 * len(data) < bits * (1 + 1e-6) + 16  # trailing zeros are not written


def test_a_carry_runs_through_bytes_that_are_full():
    # Always the last part of the range, so its low end comes as near to the upper end as possible.
    symbols = [(TOTAL - 1, 1, TOTAL)] * 40 + [(1, 1, 2)] * 100 + [(0, 1, TOTAL)] * 3
    decoder = RangeDecoder(coded(symbols))
    for start, size, total in symbols:
        assert start <= decoder.find(total) < start + size
        decoder.take(start, size)


def test_nothing_takes_no_bytes():
    assert coded([]) == b""
    assert coded([(0, 2, 2)] * 1000) == b""  # symbols of probability 1


def test_frequencies_are_the_probabilities_and_never_zero():
    log_probs = torch.tensor([[0.0, -1e9, -math.inf], [math.log(0.5), math.log(0.25), math.log(0.25)]])
    cumulative = Frequencies(None).cumulative(log_probs)
    sizes = cumulative[:, 1:] - cumulative[:, :-1]
    assert sizes[0].tolist() == [TOTAL - 3 + 1, 1, 1]
    assert sizes.min() >= 1
    assert (sizes[1] / TOTAL).tolist() == pytest.approx([0.5, 0.25, 0.25], abs=1e-8)
    assert cumulative[:, -1].max() <= TOTAL + 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_probabilities_that_are_no_numbers_are_refused(bad):
    with pytest.raises(CommandFailed, match="not finite"):
        Frequencies(None).cumulative(torch.tensor([[bad, 0.0]]))


@pytest.mark.parametrize("escape", [1, 3])  # a token of the vocabulary, or an additional symbol
def test_an_escape_that_is_never_needed_costs_a_few_bits_and_one_that_is_always_needed_too(escape):
    log_probs = torch.full((1, 3), 1 / 3).log()

    def cost(symbols: list[int]) -> float:
        frequencies, bits = Frequencies(escape), 0.0
        for symbol in symbols:
            row = frequencies.cumulative(log_probs)[0]
            bits -= math.log2((row[symbol + 1] - row[symbol]) / row[-1])
            frequencies.count([symbol])
        return bits

    assert cost([0] * 2000) < 2000 * math.log2(3) + 8
    assert cost([escape] * 2000) < 8


def test_literals_come_back_and_adapt():
    text = b"abracadabra" * 500
    encoder, literals = RangeEncoder(), Literals()
    for value in text:
        literals.encode(encoder, value)
    data = encoder.finish()
    decoder, literals = RangeDecoder(data), Literals()
    assert bytes(literals.decode(decoder) for _ in text) == text
    assert 8 * len(data) < 2.2 * len(text)  # the entropy of order 0 is 2.04 bits
