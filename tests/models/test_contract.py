"""What Transformer-XL guarantees beyond the contract of `LanguageModel` (test_contract_of_all.py)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from txl.config import Lengths, TransformerXLConfig
from txl.errors import UserError
from txl.models import build_model
from txl.models.transformer_xl import TransformerXL

V, B, LENGTH = 17, 3, 23
SMALL = TransformerXLConfig(n_layer=3, d_model=10, n_head=3, d_head=5, d_inner=13, mem_len=7, dropout=0.2, dropatt=0.1)
VARIANTS = {
    "post-norm": SMALL,
    "pre-norm": dataclasses.replace(SMALL, pre_norm=True),
    "untied biases": dataclasses.replace(SMALL, untie_r=True),
    "normalised heads": dataclasses.replace(SMALL, qk_norm=True, pre_norm=True),
    "reference attention": dataclasses.replace(SMALL, attention="reference"),
    "narrow embedding": dataclasses.replace(SMALL, d_embed=6),
    "Shaw et al.": dataclasses.replace(SMALL, encoding="shaw", max_distance=8),
    "Shaw et al., pre-norm, untied": dataclasses.replace(
        SMALL, encoding="shaw", max_distance=0, pre_norm=True, untie_r=True
    ),
    "adaptive": dataclasses.replace(SMALL, cutoffs=(5, 9)),
    "adaptive, narrower clusters": dataclasses.replace(SMALL, cutoffs=(5, 9), div_val=2),
}


def lively(config: TransformerXLConfig, dtype: torch.dtype = torch.float64) -> TransformerXL:
    """Return a model in evaluation mode whose weights are large enough for every term to matter."""
    torch.manual_seed(0)
    model = TransformerXL(config, V).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model


@pytest.fixture(params=VARIANTS, scope="module")
def model(request) -> TransformerXL:
    return lively(VARIANTS[request.param])


def stream(length: int = LENGTH, seed: int = 1) -> tuple[Tensor, Tensor]:
    both = torch.randint(V, (B, length + 1), generator=torch.Generator().manual_seed(seed))
    return both[:, :-1], both[:, 1:]


def nll_in_segments(model, tokens, targets, segment, **lengths):
    state, parts = model.init_state(tokens.shape[0], **lengths), []
    for start in range(0, tokens.shape[1], segment):
        part, state = model.nll(tokens[:, start : start + segment], targets[:, start : start + segment], state)
        parts.append(part)
    return torch.cat(parts, dim=1), state


EXACT = [
    pytest.param({"mem_len": LENGTH}, id="memory-of-everything"),
    pytest.param({"mem_len": 6, "window": 7}, id="window-of-memory-and-itself"),
    pytest.param({"mem_len": 9, "window": 4}, id="window-narrower-than-memory"),
    pytest.param({"mem_len": 9, "window": 6, "clamp_len": 2}, id="clamp"),
    pytest.param({"mem_len": 0, "window": 1}, id="only-itself"),
]


@pytest.mark.parametrize("lengths", EXACT)
@pytest.mark.parametrize("segment", [1, 5, 8])
def test_whole_equals_segments_equals_tokens(model, lengths, segment):
    tokens, targets = stream()
    whole, _ = nll_in_segments(model, tokens, targets, LENGTH, **lengths)
    parts, _ = nll_in_segments(model, tokens, targets, segment, **lengths)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-10)


def test_without_a_window_the_first_positions_are_equal_and_later_ones_are_not(model):
    tokens, targets = stream()
    whole, _ = nll_in_segments(model, tokens, targets, LENGTH, mem_len=7)
    by_token, _ = nll_in_segments(model, tokens, targets, 1, mem_len=7)
    torch.testing.assert_close(by_token[:, :8], whole[:, :8], rtol=0, atol=1e-10)
    assert (by_token[:, 8:] - whole[:, 8:]).abs().max() > 1e-6


def test_the_window_hides_what_lies_beyond_it():
    """One layer attends to exactly `window` keys: a token affects its own and the next `window` - 1 losses only."""
    model = lively(dataclasses.replace(SMALL, n_layer=1))
    tokens, targets = stream()
    lengths = {"mem_len": 9, "window": 4}
    before, _ = nll_in_segments(model, tokens, targets, 5, **lengths)
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % V
    after, _ = nll_in_segments(model, changed, targets, 5, **lengths)
    differs = (after - before).abs().amax(dim=0) > 1e-12
    assert differs.nonzero().flatten().tolist() == [8, 9, 10, 11]


def test_memory_that_starts_empty_is_not_attended_to(model):
    tokens, targets = stream()
    state = model.init_state(B, mem_len=20)
    assert state.length == 0
    cold, state = model.nll(tokens[:, :1], targets[:, :1], state)
    none, _ = model.nll(tokens[:, :1], targets[:, :1], model.init_state(B, mem_len=0))
    assert torch.equal(cold, none)
    assert state.length == 1


def test_memory_grows_to_its_length_and_no_further(model):
    tokens, targets = stream()
    lengths = []
    state = model.init_state(B, mem_len=7)
    for start in range(0, 20, 3):
        _, state = model.nll(tokens[:, start : start + 3], targets[:, start : start + 3], state)
        lengths.append(state.length)
    assert lengths == [3, 6, 7, 7, 7, 7, 7]


def test_no_gradient_into_memory_but_weights_learn_through_it():
    model = lively(SMALL)
    tokens, targets = stream()
    _, state = model.nll(tokens[:, :9], targets[:, :9], model.init_state(B))
    watched = dataclasses.replace(state, hidden=tuple(h.clone().requires_grad_() for h in state.hidden))
    nll, _ = model.nll(tokens[:, 9:10], targets[:, 9:10], watched)
    nll.sum().backward()
    assert all(hidden.grad is None for hidden in watched.hidden)
    # With one query, if only its own position had a gradient for W_k, this gradient would have rank 1 per lane.
    gradient = dict(model.named_parameters())["layers.0.attention.k_proj.weight"].grad
    assert gradient is not None
    assert torch.linalg.matrix_rank(gradient) > B


def test_reset_lane_reads_as_if_it_were_new(model):
    tokens, targets = stream()
    _, state = model.nll(tokens[:, :9], targets[:, :9], model.init_state(B, mem_len=7))
    state = state.reset(torch.tensor([False, True, False]))
    continued, after = model.nll(tokens[:, 9:14], targets[:, 9:14], state)
    fresh, _ = model.nll(tokens[:, 9:14], targets[:, 9:14], model.init_state(B, mem_len=7))
    torch.testing.assert_close(continued[1], fresh[1], rtol=0, atol=1e-10)
    assert (continued[[0, 2]] - fresh[[0, 2]]).abs().min(dim=1).values.max() > 0
    # The lane still equals a new one while its memory fills again.
    continued, after = model.nll(tokens[:, 14:], targets[:, 14:], after)
    fresh, _ = nll_in_segments(model, tokens[:, 9:], targets[:, 9:], 5, mem_len=7)
    torch.testing.assert_close(continued[1, :3], fresh[1, 5:8], rtol=0, atol=1e-10)
    everything = after.reset(torch.ones(B, dtype=torch.bool))
    assert everything.length == 0


def test_a_state_survives_being_written_as_tensors():
    model = lively(SMALL)
    tokens, targets = stream()
    _, state = model.nll(tokens[:, :9], targets[:, :9], model.init_state(B, mem_len=7, window=8, clamp_len=3))
    state = state.reset(torch.tensor([True, False, False]))
    _, state = model.nll(tokens[:, 9:13], targets[:, 9:13], state)
    copy = model.state_from_tensors(state.to_tensors())
    assert (copy.lengths, copy.filled) == (Lengths(7, 8, 3), state.filled)
    assert torch.equal(
        model.nll(tokens[:, 13:], targets[:, 13:], copy)[0], model.nll(tokens[:, 13:], targets[:, 13:], state)[0]
    )


def test_a_uniform_model_scores_log_v(model):
    uniform = build_model(model.config, V).double().eval()
    for parameter in uniform.parameters():
        parameter.data.zero_()
    tokens, targets = stream()
    log_probs, _ = uniform.log_probs(tokens, uniform.init_state(B))
    nll, _ = uniform.nll(tokens, targets, uniform.init_state(B))
    if model.config.cutoffs:  # the head holds 5 words and 2 clusters, of 4 and 8 words
        share = torch.tensor([1 / 7] * 5 + [1 / 28] * 4 + [1 / 56] * 8, dtype=torch.float64)
    else:
        share = torch.full((V,), 1 / V, dtype=torch.float64)
    torch.testing.assert_close(log_probs.exp(), share.expand_as(log_probs), rtol=0, atol=1e-12)
    torch.testing.assert_close(nll, -share.log()[targets], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"mem_len": -1}, "mem_len is -1"),
        ({"mem_len": 2.5}, "mem_len is 2.5; expected 0"),
        ({"window": 3.0}, "window is 3.0; expected 1"),
        ({"mem_len": 5, "window": 7}, "window 7 needs at least 6 positions of memory, but mem_len is 5"),
        ({"window": 0}, "window is 0"),
        ({"clamp_len": -2}, "clamp_len is -2"),
        ({"window": "all"}, "'all'; expected a number or 'none'"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(lengths, message):
    with pytest.raises(UserError, match=message):
        lively(SMALL).init_state(B, **lengths)


def test_none_switches_the_window_of_the_configuration_off():
    model = lively(dataclasses.replace(SMALL, window=3, clamp_len=2))
    assert model.init_state(B).lengths == Lengths(7, 3, 2)
    assert model.init_state(B, window="none", clamp_len="none").lengths == Lengths(7)


def test_ids_outside_of_the_vocabulary_are_never_scored_in_silence(model):
    tokens, targets = stream()
    for bad in (V, -100):
        changed = targets.clone()
        changed[1, 3] = bad
        with pytest.raises((IndexError, RuntimeError)):
            model.nll(tokens, changed, model.init_state(B))
    changed = tokens.clone()
    changed[1, 3] = V
    try:
        nll, _ = model.nll(changed, targets, model.init_state(B))
    except (IndexError, RuntimeError):
        return
    assert nll[1, 3:].isnan().all()


def test_a_state_holds_no_more_than_its_memory(model):
    tokens, targets = stream()
    for mem_len in (0, 4, 7):
        _, state = model.nll(tokens, targets, model.init_state(B, mem_len=mem_len))
        assert all(h.untyped_storage().nbytes() == 8 * B * mem_len * 10 for h in state.hidden)


def test_a_batch_of_the_wrong_size_is_refused(any_shapes):
    model = lively(SMALL)
    tokens, targets = stream()
    with pytest.raises(UserError, match=r"tokens have shape \[3, 23\], targets \[23, 3\]"):
        model.nll(tokens, targets.t(), model.init_state(B))
    with pytest.raises(UserError, match="no positions"):
        model.nll(tokens[:, :0], targets[:, :0], model.init_state(B))
    with pytest.raises(UserError, match="belongs to another model"):
        model.nll(tokens, targets, lively(dataclasses.replace(SMALL, n_layer=2)).init_state(B))
    with pytest.raises(UserError, match="tokens have 3 lanes, the state has 2"):
        model.nll(tokens, targets, model.init_state(2))


def test_gradients_through_log_probs_are_those_of_nll(model):
    tokens, targets = stream()
    log_probs, _ = model.log_probs(tokens, model.init_state(B))
    nll, _ = model.nll(tokens, targets, model.init_state(B))
    pairs = zip(
        torch.autograd.grad(-log_probs.gather(-1, targets[..., None]).sum(), list(model.parameters())),
        torch.autograd.grad(nll.sum(), list(model.parameters())),
        strict=True,
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_an_old_state_stays_valid_after_a_step(model):
    tokens, targets = stream()
    _, state = model.nll(tokens[:, :9], targets[:, :9], model.init_state(B))
    first, _ = model.nll(tokens[:, 9:], targets[:, 9:], state)
    again, _ = model.nll(tokens[:, 9:], targets[:, 9:], state)
    assert torch.equal(first, again)
