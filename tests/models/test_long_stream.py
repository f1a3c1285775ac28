"""A long stream read with frozen weights: its buffers do not grow, and its losses do not drift."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from tests.models.test_contract import SMALL, lively

WINDOW = 14
SHAPE = {"mem_len": 13, "window": WINDOW}
V = 17


def losses_and_sizes(model, tokens, segment):
    """Return the losses of a stream [1,L+1], and the size in bytes of all buffers of the state after every segment."""
    state, losses, sizes = model.init_state(1, **SHAPE), [], []
    for start in range(0, tokens.shape[1] - 1, segment):
        part = tokens[:, start : start + segment + 1]
        nll, state = model.nll(part[:, :-1], part[:, 1:], state)
        losses.append(nll)
        held = [*state.hidden, *state.projections.keys, *state.projections.values, *state.projections.positions]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
        sizes.append(sum(storages.values()))
    return torch.cat(losses, dim=1), sizes


def check(n_token, segment):
    model = lively(SMALL, torch.float32)
    reach = SMALL.n_layer * (WINDOW - 1)
    tokens = torch.randint(V, (1, n_token + 1), generator=torch.Generator().manual_seed(3))
    end = tokens[:, -(200 + reach + 1) :]
    with torch.inference_mode():
        losses, sizes = losses_and_sizes(model, tokens, segment)
        fresh, _ = losses_and_sizes(model, end, segment)
        exact, _ = losses_and_sizes(copy.deepcopy(model).double(), end, 200 + reach)
    torch.testing.assert_close(losses[:, -200:], fresh[:, -200:], rtol=0, atol=2e-5)
    torch.testing.assert_close(losses[:, -200:].double(), exact[:, -200:], rtol=0, atol=2e-5)
    # Buffers are reallocated now and then, so sizes vary, but later sizes must not exceed the early ones.
    full = [size for number, size in enumerate(sizes) if number * segment > 4 * WINDOW]
    assert max(full[len(full) // 10 :]) <= max(full[: len(full) // 10])


@pytest.mark.parametrize(("n_token", "segment"), [(700, 1), (4_000, 7), (4_000, 40)])
def test_a_stream_neither_grows_nor_drifts(n_token, segment):
    check(n_token, segment)


@pytest.mark.skipif("TXL_TEST_LONG_STREAM" not in os.environ, reason="minutes; set TXL_TEST_LONG_STREAM=1 to run it")
def test_a_million_tokens_neither_grow_nor_drift():
    check(1_000_000, 40)
