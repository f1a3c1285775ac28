"""How much a text repeats itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def repeated_ngrams(symbols: Sequence[Hashable], n: int) -> tuple[int, int]:
    """The n-grams of a text that have occurred before in it, and all of its n-grams.

    Their quotient is "seq-rep-n" of Welleck et al. 2020 (Neural text generation with unlikelihood training): 1 minus
    the share of distinct n-grams.
    """
    ngrams = [tuple(symbols[start : start + n]) for start in range(len(symbols) - n + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)
