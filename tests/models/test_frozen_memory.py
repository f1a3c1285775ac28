"""Memory read without gradients: keys, values and positions are projected once, with the same results."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.models.test_contract import EXACT, LENGTH, SMALL, VARIANTS, B, V, lively, stream
from torch import Tensor

from txl.models.transformer_xl import RelativeMultiHeadAttention, TransformerXL
from txl.native.build import compiled_code

QUIET = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def read(model: TransformerXL, tokens: Tensor, segment: int, state: Any) -> tuple[Tensor, Any]:
    parts = []
    for start in range(0, tokens.shape[1], segment):
        part, state = model.log_probs(tokens[:, start : start + segment], state)
        parts.append(part)
    return torch.cat(parts, dim=1), state


@pytest.fixture(params=VARIANTS, scope="module")
def model(request) -> TransformerXL:
    return lively(VARIANTS[request.param])


@pytest.mark.parametrize("lengths", [*EXACT, pytest.param({"mem_len": 5, "window": "none"}, id="short-memory")])
@pytest.mark.parametrize("segment", [1, 4, LENGTH])
def test_the_same_as_through_hidden_states(model, lengths, segment):
    tokens = torch.cat([stream(seed=seed)[0] for seed in range(3)], dim=1)
    expected, _ = read(model, tokens, segment, model.init_state(B, **lengths))
    assert expected.requires_grad
    for quiet in QUIET.values():
        with quiet():
            found, state = read(model, tokens, segment, model.init_state(B, **lengths))
        assert state.projections is not None
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def projected_positions(monkeypatch) -> list[int]:
    """Return a list to which every later projection of keys and values appends its number of positions."""
    seen = []
    real = RelativeMultiHeadAttention.keys_and_values

    def counting(self, context):
        seen.append(context.shape[1])
        return real(self, context)

    monkeypatch.setattr(RelativeMultiHeadAttention, "keys_and_values", counting)
    return seen


def test_each_position_is_projected_once(monkeypatch):
    model = lively(VARIANTS["post-norm"])
    n_layer = model.config.n_layer
    rows = projected_positions(monkeypatch)
    tables = []
    real = RelativeMultiHeadAttention.position
    monkeypatch.setattr(
        RelativeMultiHeadAttention, "position", lambda self, r: (tables.append(len(r)), real(self, r))[1]
    )
    with torch.no_grad(), compiled_code(False):  # compiled steps do not call the patched methods
        read(model, stream(200)[0], 1, model.init_state(B, mem_len=9))
    # The first call also projects the empty memory, which adds no positions.
    assert sum(rows) == n_layer * 200
    assert tables == [length for length in (1, 2, 4, 8, 10) for _ in range(n_layer)]


def test_buffers_do_not_grow_and_are_rarely_copied():
    model = lively(VARIANTS["post-norm"])
    with torch.inference_mode():
        _, state = read(model, stream(100)[0], 1, model.init_state(B, mem_len=64))
        sizes, seen = set(), []
        for token in torch.randint(V, (1000, B, 1)):
            _, state = model.log_probs(token, state)
            assert state.projections is not None
            buffers = state.projections.buffers
            assert buffers is not None
            sizes.add(sum(each.numel() for layer in buffers.layers for each in layer))
            if not any(buffers is each for each in seen):
                seen.append(buffers)
    assert len(sizes) == 1
    width = model.config.d_model + 2 * model.config.n_head * model.config.d_head
    assert sizes.pop() <= 2 * model.config.n_layer * B * 64 * width
    assert len(seen) <= 1000 / 30


@pytest.mark.parametrize("quiet", QUIET.values(), ids=QUIET)
def test_old_states_stay_valid_whoever_goes_on_with_them(quiet):
    model = lively(VARIANTS["pre-norm"])
    tokens, others = stream(60, seed=2)[0], stream(60, seed=3)[0]
    with quiet():
        _, state = read(model, tokens[:, :20], 3, model.init_state(B, mem_len=8, window=9))
        kept = [each.clone() for each in (*state.hidden, *state.projections.keys, *state.projections.values)]
        first, middle = read(model, tokens[:, 20:40], 1, state)
        second, _ = read(model, others[:, 20:40], 1, state)
        again, _ = read(model, tokens[:, 20:40], 1, state)
        end, _ = read(model, tokens[:, 40:], 1, middle)
        whole, _ = read(model, tokens[:, 20:], 1, state)
        fresh, _ = read(
            model, torch.cat([tokens[:, :20], others[:, 20:40]], dim=1), 1, model.init_state(B, mem_len=8, window=9)
        )
    assert torch.equal(first, again)
    assert torch.equal(torch.cat([first, end], dim=1), whole)
    torch.testing.assert_close(second, fresh[:, 20:], rtol=0, atol=1e-10)
    now = [*state.hidden, *state.projections.keys, *state.projections.values]
    assert all(torch.equal(before, after) for before, after in zip(kept, now, strict=True))


def test_a_step_broken_off_half_way_leaves_the_state_as_it_was(monkeypatch):
    model = lively(VARIANTS["post-norm"])
    tokens = stream()[0]
    with torch.no_grad():
        _, state = read(model, tokens[:, :9], 3, model.init_state(B, mem_len=8))
        expected, _ = read(model, tokens[:, 9:], 3, state)
        feed_forward = model.layers[1].feed_forward
        with monkeypatch.context() as patch:
            patch.setattr(feed_forward, "forward", lambda hidden: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model.log_probs(tokens[:, 5:9], state)
        found, _ = read(model, tokens[:, 9:], 3, state)
    assert torch.equal(found, expected)


def test_train_evaluate_train_evaluate():
    """After the weights change, a carried state gives the same losses as a state that holds hidden states alone."""
    model = lively(VARIANTS["post-norm"])
    tokens, targets = stream()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    carried, plain = model.init_state(B), model.init_state(B)
    for round_ in range(3):
        _, plain = read(model, tokens[:, :9], 3, plain)
        with torch.no_grad():
            _, carried = read(model, tokens[:, :9], 3, carried)
            before, _ = model.nll(tokens[:, 9:], targets[:, 9:], carried)
        loss, _ = model.training_loss(tokens, targets, model.init_state(B))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected, _ = model.nll(tokens[:, 9:], targets[:, 9:], plain)
        with torch.no_grad():
            found, _ = model.nll(tokens[:, 9:], targets[:, 9:], carried)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert (found - before).abs().max() > 1e-3, round_


def test_gradients_flow_through_a_memory_that_was_read_without():
    model = lively(VARIANTS["post-norm"])
    tokens, targets = stream()
    states = []
    for quiet in (torch.no_grad, torch.inference_mode, nullcontext):
        with quiet():
            states.append(read(model, tokens[:, :9], 3, model.init_state(B))[1])
    gradients = [
        torch.autograd.grad(model.nll(tokens[:, 9:], targets[:, 9:], state)[0].sum(), list(model.parameters()))
        for state in states
    ]
    for other in gradients[:2]:
        torch.testing.assert_close(other, gradients[2], rtol=0, atol=1e-9)


def test_a_state_goes_from_inference_mode_to_no_grad_and_back():
    model = lively(VARIANTS["post-norm"])
    tokens = stream()[0]
    expected, _ = read(model, tokens, 3, model.init_state(B))
    state, parts = model.init_state(B), []
    for number, start in enumerate(range(0, LENGTH, 3)):
        with (torch.no_grad, torch.inference_mode)[number % 2]():
            part, state = model.log_probs(tokens[:, start : start + 3], state)
            parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-10)


def test_lanes_are_selected_reset_and_shortened_with_their_projections(monkeypatch):
    model = lively(VARIANTS["post-norm"])
    tokens = stream()[0]

    def through(state, quiet):
        with quiet():
            _, state = read(model, tokens[:, :9], 3, state)
            state = state.select(torch.tensor([2, 0, 1])).reset(torch.tensor([False, True, False]))
            _, state = read(model, tokens[:, 9:12], 1, state)
            state = state.with_mem_len(4).select(torch.tensor([1, 1, 2]))
            return read(model, tokens[:, 12:], 2, state)[0]

    expected = through(model.init_state(B), nullcontext)
    rows = projected_positions(monkeypatch)
    with compiled_code(False):
        found = through(model.init_state(B), torch.no_grad)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert sum(rows) == model.config.n_layer * LENGTH
    torch.testing.assert_close(through(model.init_state(B), torch.no_grad), expected, rtol=0, atol=1e-10)


def test_autocast_s_projections_are_not_taken_for_float32_s():
    model = lively(VARIANTS["post-norm"], torch.float32)
    tokens = stream()[0]
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            _, state = read(model, tokens[:, :9], 3, model.init_state(B))
        assert state.projections is not None
        assert state.projections.keys[0].dtype == torch.bfloat16
        found, _ = read(model, tokens[:, 9:], 3, state)
        expected, _ = read(model, tokens[:, 9:], 3, dataclasses.replace(state, projections=None))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


WINDOW = 14


def losses_and_sizes(model, tokens, segment):
    """Return the losses of a stream [1,L+1], and the size in bytes of all buffers of the state after every segment."""
    state, losses, sizes = model.init_state(1, mem_len=WINDOW - 1, window=WINDOW), [], []
    for start in range(0, tokens.shape[1] - 1, segment):
        part = tokens[:, start : start + segment + 1]
        nll, state = model.nll(part[:, :-1], part[:, 1:], state)
        losses.append(nll)
        held = [*state.hidden, *state.projections.keys, *state.projections.values, *state.projections.positions]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
        sizes.append(sum(storages.values()))
    return torch.cat(losses, dim=1), sizes


@pytest.mark.parametrize(("n_token", "segment"), [(700, 1), (4_000, 7), (4_000, 40)])
def test_a_long_stream_neither_grows_nor_drifts(n_token, segment):
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
