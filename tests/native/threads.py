"""A check that results do not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor


def assert_same_with_any_number_of_threads(work: Callable[[], tuple[Tensor, ...]]) -> None:
    """Assert that `work` returns the same bits with 1, 2 and 5 threads."""
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(work())
    finally:
        torch.set_num_threads(before)
    for ours, others in pairwise(found):
        for one, other in zip(ours, others, strict=True):
            assert torch.equal(one, other)
