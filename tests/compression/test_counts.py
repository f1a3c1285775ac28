"""Counts, compared with a slow implementation that uses dictionaries, and matches with earlier text."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from txl.compression.counts import DISTRIBUTIONS, MATCH, ORDERS, Counts

TEXT = b"She sells sea shells; the shells she sells are sea shells, I'm sure. So if she sells sea shells " * 2


def by_dictionaries(text: bytes) -> list[np.ndarray]:
    """Return the probabilities before every byte, each float64 [ORDERS,256]."""
    seen: dict[bytes, Counter[int]] = defaultdict(Counter)
    padded, found = bytes(ORDERS) + text, []
    for place, symbol in enumerate(text, start=ORDERS):
        below, rows = [1 / 256] * 256, []
        for order in range(ORDERS):
            counts = seen[padded[place - order : place]] if order else seen[b""]
            n, d = counts.total(), len(counts)
            if n:
                below = [(counts[value] + d * below[value]) / (n + d) for value in range(256)]
            rows.append(below)
            counts[symbol] += 1
        found.append(np.array(rows))
    return found


def test_distributions_of_growing_contexts():
    counts = Counts(1)
    for symbol, expected in zip(TEXT, by_dictionaries(TEXT), strict=True):
        found, _ = counts.predict()
        np.testing.assert_allclose(found[0, :ORDERS], expected, rtol=1e-5)
        np.testing.assert_allclose(found.sum(axis=2), 1, rtol=1e-5)
        counts.read(np.array([symbol]))


def test_a_match_names_what_followed_the_last_time():
    counts = Counts(1)
    named = []
    for place, symbol in enumerate(TEXT):
        found, met = counts.predict()
        if met[0] >= DISTRIBUTIONS:
            named.append((place, int(found[0, ORDERS].argmax())))
        counts.read(np.array([symbol]))
    half = len(TEXT) // 2
    assert [each for each in named if each[0] >= half + MATCH] == [
        (place, TEXT[place]) for place in range(half + MATCH, len(TEXT))
    ]


def test_counts_that_are_full_are_halved():
    counts = Counts(2)
    for _ in range(600):
        counts.read(np.array([97, 97]))
    found, _ = counts.predict()
    assert found[:, :ORDERS].sum(axis=2) == pytest.approx(1, abs=1e-5)
    assert found[0, 0, 97] > 0.98


def test_the_last_lane_s_text_goes_on_in_the_first():
    one, two = Counts(1), Counts(2)
    for symbol in TEXT:
        one.read(np.array([symbol]))
    for first, second in zip(TEXT[: len(TEXT) // 2], TEXT[len(TEXT) // 2 :], strict=True):
        two.read(np.array([first, second]))
    two.rotate()
    assert two.predict()[0][0, ORDERS - 1].argmax() == one.predict()[0][0, ORDERS - 1].argmax()
