"""The layers of a training step as one function: h^N, memory and all gradients are those of the modules.

On a CPU the kernels run in Triton's interpreter (`make triton`), on a GPU as compiled kernels.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from tests.kernel_devices import DEVICES
from torch import Tensor

import txl
from txl.attention.equations import distances_farthest_first
from txl.config import TransformerXLConfig
from txl.models import fused_layers
from txl.models.fused_layers import fused_hidden_states
from txl.models.layers import LockedDropout
from txl.models.memory import Memory
from txl.models.transformer_xl import TransformerXL

TINY = TransformerXLConfig(
    n_layer=2, d_model=20, n_head=2, d_head=7, d_inner=18, mem_len=9, dropout=0.0, attention="shifted"
)
# Numbers of lanes, new tokens, positions of memory, filled positions, window.
NORMS = {
    "post-norm": {},
    "pre-norm": {"pre_norm": True},
    "qk_norm": {"qk_norm": True},
    "pre-norm, qk_norm": {"pre_norm": True, "qk_norm": True},
}
SEGMENTS = {
    "without memory": (2, 5, 0, None, None),
    "one token": (1, 1, 3, None, None),
    "memory": (3, 6, 9, None, None),
    "lanes of several lengths, window": (3, 7, 9, (9, 0, 4), 8),
}
# Every segment without the options of the norms, and every pair of options with and without memory.
CASES = [(segment, "post-norm", untie_r) for segment in SEGMENTS for untie_r in (False, True)]
CASES += [(segment, norms, False) for norms in list(NORMS)[1:] for segment in ("one token", "memory")]
CASES += [(segment, "pre-norm, qk_norm", True) for segment in ("without memory", "lanes of several lengths, window")]


def built(config: TransformerXLConfig, device: str) -> TransformerXL:
    torch.manual_seed(1)
    model = TransformerXL(config, 30).to(device).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(device), alpha=0.2)
    return model


def memory_of(model: TransformerXL, segment: tuple, device: str) -> Memory:
    n_lane, _, n_memory, filled, window = segment
    state = model.init_state(n_lane, window="none" if window is None else window)
    hidden = tuple(torch.randn(n_lane, n_memory, model.config.d_model).to(device) for _ in range(model.config.n_layer))
    return dataclasses.replace(state, hidden=hidden, filled=filled)


def passes(model: TransformerXL, hidden: Tensor, state: Memory, fused: bool) -> dict[str, Tensor]:
    """Return h^N, the inputs of all layers, and all gradients of a weighted sum of h^N."""
    model.zero_grad()
    leaf = hidden.clone().requires_grad_()
    if fused:
        distances = distances_farthest_first(state.length + hidden.shape[1], None, hidden.device)
        biases = model._shared_biases() or [bias for attention in model.attentions for bias in attention.biases(None)]
        r = model._encoded(distances, hidden.dtype)
        last, inputs = fused_hidden_states(model.config, [*model.layers], biases, leaf, state, r)
    else:
        last, after = model._from_hidden(leaf, dataclasses.replace(state, lengths=dataclasses.replace(state.lengths)))
        inputs = list(after.hidden)
    (last * torch.linspace(-1, 1, last.numel(), device=last.device).view_as(last)).sum().backward()
    assert leaf.grad is not None
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    kept = {f"memory {number}": rows[:, -1:].detach() for number, rows in enumerate(inputs)}
    return {"last": last.detach(), "h0": leaf.grad, **kept, **grads}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    wrong = {
        name: float((found[name] - right).norm() / right.norm().clamp(min=1e-6)) for name, right in expected.items()
    }
    assert max(wrong.values()) < tolerance, wrong


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("segment", "norms", "untie_r"), CASES)
def test_the_layers_and_all_gradients_are_those_of_the_modules(segment, norms, untie_r, device):
    segment = SEGMENTS[segment]
    model = built(dataclasses.replace(TINY, untie_r=untie_r, **NORMS[norms]), device)
    state = memory_of(model, segment, device)
    hidden = torch.randn(segment[0], segment[1], TINY.d_model).to(device)
    expected = passes(model, hidden, state, fused=False)
    check_equal(passes(model, hidden, state, fused=True), expected, 2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n_memory", "window"), [(9, None), (3, 2)], ids=["whole tiles", "short memory and window"])
def test_widths_that_need_no_padding(n_memory, window, device):
    model = built(dataclasses.replace(TINY, d_model=32, d_head=16, d_inner=48, pre_norm=n_memory == 9), device)
    state = memory_of(model, (2, 7, n_memory, None, window), device)
    # As in recorded steps after a reset: the numbers of filled positions are on the device.
    state = dataclasses.replace(state, filled_tensor=torch.tensor([n_memory, 1], device=device))
    hidden = torch.randn(2, 7, 32).to(device)
    expected = passes(model, hidden, state, fused=False)
    check_equal(passes(model, hidden, state, fused=True), expected, 2e-5)


@pytest.mark.usefixtures("right_bfloat16")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norms", ["post-norm", "pre-norm, qk_norm"])
def test_in_bfloat16_the_layers_are_as_near_to_float32_as_the_modules(norms, device):
    model = built(dataclasses.replace(TINY, **NORMS[norms]), device)
    state = memory_of(model, SEGMENTS["memory"], device)
    hidden = torch.randn(3, 6, TINY.d_model).to(device)
    right = passes(model, hidden, state, fused=False)
    errors = []
    for fused in (False, True):
        with torch.autocast(device, torch.bfloat16):
            found = passes(model, hidden, state, fused)
        errors.append(
            [float((found[name].float() - of).norm() / of.norm().clamp(min=1e-6)) for name, of in right.items()]
        )
    print(f"modules {max(errors[0])}, fused {max(errors[1])}")
    assert sum(errors[1]) < 1.5 * sum(errors[0])
    assert max(errors[1]) < 2 * max(errors[0])


@pytest.mark.parametrize("device", DEVICES)
def test_weight_gradients_of_groups_of_layers_are_the_same(device, monkeypatch):
    model = built(dataclasses.replace(TINY, n_layer=3), device)
    state, hidden = memory_of(model, SEGMENTS["memory"], device), torch.randn(3, 6, TINY.d_model).to(device)
    expected = passes(model, hidden, state, fused=False)
    for limit in (0, 32_000):  # one layer at a time; two, and then the third
        monkeypatch.setattr(fused_layers, "_KEPT_GRADIENTS", limit)
        check_equal(passes(model, hidden, state, fused=True), expected, 2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norms", ["post-norm", "pre-norm, qk_norm"])
def test_locked_dropout_multiplies_by_one_mask_a_lane(norms, device, monkeypatch):
    dropouts = {"dropout": 0.3, "dropout_qkv": 0.2, "dropout_inner": 0.4, "locked_dropout": True, "dropout_r": 0.0}
    config = dataclasses.replace(TINY, **dropouts, **NORMS[norms])
    model = built(config, device)
    state = memory_of(model, SEGMENTS["memory"], device)
    hidden, runs = torch.randn(3, 6, TINY.d_model).to(device), []
    draw = fused_layers._Run._draw
    monkeypatch.setattr(fused_layers._Run, "_draw", lambda run: (draw(run), runs.append(run)))
    found = passes(model, hidden, state, fused=True)
    masks = []  # in the order in which the modules ask for them
    for drops, of in zip(runs[0].drops, runs[0].masks, strict=True):
        heads = (
            mask.view(-1, 2, mask.shape[-1] // 2)[..., :7].flatten(1) for mask in (*of[:2], of.value, of.position[None])
        )
        masks += [*heads, drops[0][:, :20], drops[1][:, :18], drops[2][:, :20]]
    kept = torch.cat([mask.flatten() for mask in masks]) > 0
    assert 0.6 < float(kept.float().mean()) < 0.85
    left = list(masks)

    def with_given_mask(module: LockedDropout, rows: Tensor) -> Tensor:
        if module.p == 0:
            return rows
        mask = left.pop(0)
        return rows * (mask if rows.ndim == 2 else mask[:, None])

    monkeypatch.setattr(LockedDropout, "forward", with_given_mask)
    expected = passes(model, hidden, state, fused=False)
    assert not left
    check_equal(found, expected, 2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norms", ["post-norm", "pre-norm, qk_norm"])
def test_other_dropout_is_drawn_anew_in_each_step_and_has_the_same_mask_in_both_passes(norms, device):
    model = built(dataclasses.replace(TINY, dropout=0.3, dropatt=0.1, **NORMS[norms]), device)
    state = memory_of(model, SEGMENTS["memory"], device)
    hidden = torch.randn(3, 6, TINY.d_model).to(device)
    torch.manual_seed(5)
    found = passes(model, hidden, state, fused=True)
    torch.manual_seed(5)
    check_equal(passes(model, hidden, state, fused=True), found, 1e-7)
    other = passes(model, hidden, state, fused=True)
    assert float((other["last"] - found["last"]).norm()) > 0.1
    # The derivative along a direction, from two further forward passes with the same masks.
    direction, step = torch.randn(3, 6, TINY.d_model).to(device), 2e-4
    sums = []
    for sign in (1, -1):
        torch.manual_seed(5)
        last = passes(model, hidden + sign * step * direction, state, fused=True)["last"]
        sums.append(float((last.double() * torch.linspace(-1, 1, last.numel(), device=device).view_as(last)).sum()))
    slope = (sums[0] - sums[1]) / (2 * step)
    assert slope == pytest.approx(float((found["h0"] * direction).sum()), rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_neither_a_second_pass_nor_a_second_derivative_is_silently_wrong(device):
    model = built(TINY, device)
    hidden = torch.randn(1, 2, TINY.d_model, device=device, requires_grad=True)
    r = model._encoded(distances_farthest_first(2, None, hidden.device), hidden.dtype)
    for create_graph, message in ((False, "differentiated before"), (True, "once_differentiable")):
        last, _ = fused_hidden_states(TINY, [*model.layers], [model.u, model.v], hidden, model.init_state(1), r)
        (grad,) = torch.autograd.grad(last.square().sum(), hidden, create_graph=create_graph, retain_graph=True)
        with pytest.raises(RuntimeError, match=message):
            (grad if create_graph else last).sum().backward()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let a model on a CPU name the reason why it is not fused on a GPU."""
    monkeypatch.setattr("txl.models.transformer_xl.why_not_triton", lambda device, *of: why_not_dtype(*of))


def why_not_dtype(dtype: torch.dtype, d_head: int) -> str | None:
    return None if dtype in (torch.float32, torch.bfloat16) else f"cannot train in {dtype}"


def of_triton(config: TransformerXLConfig) -> TransformerXL:
    """Return a model whose attention is `triton`, on a CPU."""
    model = built(config, "cpu")
    model.backend = dataclasses.replace(model.backend, name="triton")
    for attention in model.attentions:
        attention.attend = model.backend
    return model


def why_not(model: TransformerXL, dtype: torch.dtype = torch.float32) -> str:
    return model.why_not_fused(model.init_state(1), torch.zeros(1, 1, TINY.d_model, dtype=dtype)) or ""


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("change", "reason"),
    [({"encoding": "shaw"}, "encoding is shaw"), ({"dropout_qkv": 0.1}, "dropout_qkv")],
    ids=str,
)
def test_other_models_keep_their_modules(change, reason):
    config = dataclasses.replace(TINY, **change)
    assert "attention is shifted" in why_not(built(config, "cpu"))
    assert reason in why_not(of_triton(config))


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("preset", ["enwik8-12L", "ptb", "stdlib-bpe", "wt103-base"])
def test_models_of_presets_are_fused(preset):
    config = txl.preset(preset).model
    assert isinstance(config, TransformerXLConfig)
    small = {"n_layer": 2, "d_model": 20, "n_head": 2, "d_head": 7, "d_inner": 18, "d_embed": None, "cutoffs": ()}
    assert why_not(of_triton(dataclasses.replace(config, **small))) == ""


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("norms", ["post-norm", "pre-norm, qk_norm"])
def test_a_hook_or_another_class_of_module_keeps_the_modules(norms):
    model = of_triton(dataclasses.replace(TINY, **NORMS[norms]))
    assert why_not(model) == ""
    with torch.no_grad():
        model.u.add_(1)  # other numbers change nothing
    assert why_not(model) == ""
    attention = model.attentions[0]
    for register in (
        attention.register_forward_hook,
        attention.norm.register_full_backward_hook,
        attention.norm.register_full_backward_pre_hook,
        torch.nn.modules.module.register_module_full_backward_hook,
    ):
        hook = register(lambda *_: None)
        assert "hook" in why_not(model)
        hook.remove()
    assert why_not(model) == ""
    attention.q_proj = torch.nn.Sequential(attention.q_proj)  # pyright: ignore
    assert "not a class" in why_not(model)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("untie_r", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.attention.q_proj.register_parameter("bias", torch.nn.Parameter(torch.ones(14))), "q_proj"),
        (lambda layer: layer.attention.norm.register_parameter("bias", None), "norm.bias"),
        (lambda layer: setattr(layer.feed_forward.norm, "eps", 1e-3), "eps"),
        (lambda layer: setattr(layer.feed_forward.dropout_inner, "p", 0.5), "dropout"),
        (lambda layer: setattr(layer.attention, "dropout", LockedDropout(0.0)), "dropout"),
        (lambda layer: setattr(layer.attention, "dropatt", 0.5), "dropout"),
        (lambda layer: layer.attention.eval(), "mode"),
        (lambda layer: layer.double(), "float32"),
    ],
    ids=["bias", "no bias", "eps", "rate", "locked", "dropatt", "evaluation", "float64"],
)
def test_a_layer_that_was_changed_keeps_the_modules(change, reason, untie_r):
    model = of_triton(dataclasses.replace(TINY, untie_r=untie_r))
    assert why_not(model) == ""
    change(model.layers[1])
    assert reason in why_not(model)


@pytest.mark.usefixtures("on_a_gpu")
def test_other_dtypes_and_transforms_keep_the_modules():
    model = of_triton(TINY)
    assert "float16" in why_not(model, torch.float16)
    reasons = []
    torch.func.grad(lambda number: (reasons.append(why_not(model)), number)[1])(torch.tensor(1.0))
    assert "torch.func" in reasons[0]
    model.u = torch.nn.Parameter(model.u.double())
    assert "float32" in why_not(model)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_model_that_was_asked_is_freed_at_once():
    model = of_triton(TINY)
    assert why_not(model) == ""
    freed = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert freed() is None
    finally:
        gc.enable()
