from __future__ import annotations

import math

import torch

from txl.attention.equations import distances_farthest_first, sinusoid


def test_distances_run_from_the_farthest_to_zero_and_stop_at_the_clamp():
    assert distances_farthest_first(5, None).tolist() == [4, 3, 2, 1, 0]
    assert distances_farthest_first(5, 2).tolist() == [2, 2, 2, 1, 0]
    assert distances_farthest_first(3, 0).tolist() == [0, 0, 0]


def test_sinusoid_has_all_sines_first_then_all_cosines():
    row = sinusoid(torch.tensor([7]), 6, torch.float64)[0].tolist()
    angles = [7 / 10000 ** (2 * k / 6) for k in range(3)]
    expected = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    assert all(math.isclose(found, want, abs_tol=1e-14) for found, want in zip(row, expected, strict=True))


def test_a_float32_model_has_the_authors_sinusoid_to_the_last_bit():
    """The authors' code: inv_freq = 1 / 10000 ** (arange(0, d, 2.0) / d), outer product, sin, cos; all in float32."""
    distances = torch.arange(3800, -1, -1.0)
    inv_freq = 1 / (10000 ** (torch.arange(0.0, 512, 2.0) / 512))
    angles = torch.ger(distances, inv_freq)
    theirs = torch.cat([angles.sin(), angles.cos()], dim=-1)
    assert torch.equal(sinusoid(distances_farthest_first(3801, None), 512, torch.float32), theirs)


def test_sinusoid_has_the_dtype_of_the_model_but_is_never_computed_below_float32():
    distances = distances_farthest_first(3001, None)
    low = sinusoid(distances, 14, torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, sinusoid(distances, 14, torch.float32).bfloat16())
