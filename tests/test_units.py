"""Losses and durations as text for readers."""

from __future__ import annotations

import math

from txl.units import duration, metric, ppl_text


def test_bits_for_bytes_and_characters_perplexity_for_words_and_pieces():
    assert metric("byte", math.log(2)) == metric("char", math.log(2)) == ("bpc", "1.0000")
    assert metric("word", math.log(50)) == metric("bpe", math.log(50)) == ("ppl", "50.00")
    assert metric("word", math.log(26_506.4)) == ("ppl", "26,506")


def test_perplexities_have_the_digits_that_matter():
    assert [ppl_text(ppl) for ppl in (1.2344, 12.344, 1234.4, 1.5e6, math.inf)] == [
        "1.234", "12.34", "1,234", "1.5e+06", "inf",
    ]  # fmt: skip


def test_durations():
    assert [duration(seconds) for seconds in (0, 59.6, 61, 3723.4, math.inf)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:02:03",
        "?",
    ]
