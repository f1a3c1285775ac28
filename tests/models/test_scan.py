"""The parallel scan against a loop over positions: values and gradients."""

from __future__ import annotations

import pytest
import torch

from txl.models.recurrent import linear_recurrence


def one_by_one(decay, drive, initial):
    decay, drive, initial = decay.detach(), drive.detach(), initial.detach()
    states = torch.zeros_like(decay)
    for lane in range(decay.shape[0]):
        for unit in range(decay.shape[2]):
            state = float(initial[lane, unit])
            for place in range(decay.shape[1]):
                state = float(decay[lane, place, unit]) * state + float(drive[lane, place, unit])
                states[lane, place, unit] = state
    return states


@pytest.mark.parametrize("n_position", [1, 2, 3, 7, 16, 17, 23])
@pytest.mark.parametrize("chunk", [None, 1, 2, 5, 100])
def test_values_and_gradients(n_position, chunk):
    torch.manual_seed(n_position)
    shapes = ((2, n_position, 3), (2, n_position, 3), (2, 3))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    states = linear_recurrence(*inputs, chunk=chunk)
    torch.testing.assert_close(states, one_by_one(*inputs), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *each: linear_recurrence(*each, chunk=chunk), inputs)


def test_decays_of_zero_and_one_and_long_streams_stay_exact():
    """A scan by logarithms or division would overflow or divide by zero here."""
    decay = torch.rand(1, 3000, 4).round()
    drive, initial = torch.randn(1, 3000, 4), torch.randn(1, 4)
    for chunk in (None, 55):
        found = linear_recurrence(decay, drive, initial, chunk=chunk)
        torch.testing.assert_close(
            found.double(), one_by_one(*(each.double() for each in (decay, drive, initial))), rtol=0, atol=1e-5
        )
