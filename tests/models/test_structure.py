"""Modes, hooks and replaced modules: reading a text changes nothing in a model, and fast paths skip no part of it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.test_contract import SMALL, VARIANTS, B, V, lively, stream
from torch import nn

import txl
from txl.analysis.average_attention import average_attention
from txl.config import ModelConfig, RecurrentConfig, VanillaConfig
from txl.data.characters import CharVocabulary
from txl.evaluation.stream import Settings
from txl.models import build_model
from txl.models.structure import evaluation_view
from txl.models.transformer_xl import TransformerXL
from txl.native.build import compiled_code

IDS = np.random.default_rng(0).integers(0, V, 60)
LETTERS = CharVocabulary("abcdefghijklmnop")  # and <unk>
VANILLA = VanillaConfig(max_segment=12, n_layer=2, d_model=10, n_head=2, d_head=5, d_inner=13, dropout=0.3)
LSTM = RecurrentConfig(kind="lstm", n_layer=2, d_model=10, d_hidden=12, dropout=0.3, weight_drop=0.3)
MODELS = {"transformer-xl": SMALL, "vanilla": VANILLA, "lstm": LSTM}


def made(config: ModelConfig) -> Any:
    torch.manual_seed(0)
    model = build_model(config, V)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model


def tokens_of(model: Any, **settings: Any) -> list[list[int]]:
    return [each.tolist() for each in txl.generate_tokens(model, [1, 2], max_tokens=9, seed=3, **settings)]


READERS: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda model: txl.evaluate(model, IDS, segment=5, batch_size=2).nll,
    "evaluate with a cache": lambda model: txl.evaluate(txl.ContinuousCache(model, 9, 0.3, 0.1), IDS, segment=5).nll,
    "evaluate_sliding": lambda model: txl.evaluate_sliding(model, IDS, context=5).nll,
    "losses_at_context": lambda model: txl.losses_at_context(model, IDS, context=4, targets=range(9, 20)).tolist(),
    "tune_cache": lambda model: txl.tune_cache(model, IDS, size=9, segment=5, batch_size=2).nll,
    "surprisals": lambda model: [each.surprisal for each in txl.surprisals(model, LETTERS, "abcabcponm")],
    "generate_tokens": lambda model: tokens_of(model, samples=2),
    "generate_tokens, PyTorch": lambda model: tokens_of(model, compile=False),
}
ATTENTION: dict[str, Callable[[Any], Any]] = {
    "attention": lambda model: average_attention(model, IDS, Settings(5, batch_size=2)).weights.tolist(),
    "attention, token by token": lambda model: average_attention(
        model, IDS, Settings(1, batch_size=2)
    ).weights.tolist(),
}


@pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("reader", [*READERS, *ATTENTION])
def test_a_model_in_training_is_read_without_dropout_and_its_mode_never_touched(reader, config, monkeypatch):
    if reader in ATTENTION and config is LSTM:
        pytest.skip("has no attention")
    read, model = (READERS | ATTENTION)[reader], made(config)
    expected = read(model.eval())
    model.train()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}

    def touched(*_: Any) -> None:
        raise AssertionError("the mode was switched, which whoever trains or reads beside would notice")

    monkeypatch.setattr(nn.Module, "train", touched)
    assert read(model) == expected
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_two_threads_evaluate_a_model_in_training_while_it_trains():
    """The evaluation that ended first used to switch dropout on for the other one, and the model kept a wrong mode."""
    model, tokens, targets = made(SMALL), *stream()
    first_ended, second_began = threading.Event(), threading.Event()
    found = {}
    expected = txl.evaluate(model.eval(), IDS, segment=5, batch_size=2).nll
    model.train()

    def loss() -> float:
        torch.manual_seed(7)
        return model.training_loss(tokens, targets, model.init_state(B))[0].item()

    trains = loss()

    def first() -> None:
        def progress(done: int, total: int) -> None:
            second_began.wait(30)

        found["first"] = txl.evaluate(model, IDS, segment=5, batch_size=2, progress=progress).nll
        first_ended.set()

    def second() -> None:
        def progress(done: int, total: int) -> None:
            second_began.set()
            first_ended.wait(30)

        found["second"] = txl.evaluate(model, IDS, segment=5, batch_size=2, progress=progress).nll

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    second_began.wait(30)
    assert loss() == trains
    for thread in threads:
        thread.join()
    assert (found["first"], found["second"], loss(), model.training) == (expected, expected, trains, True)


def test_a_view_shares_weights_and_hooks_and_has_a_mode_and_attributes_of_its_own():
    model = made(SMALL)
    model.extra, model.tied, model.same = nn.Linear(3, 3), nn.Linear(3, 3), model.layers[0]
    model.tied.weight = model.extra.weight  # one weight and one module are registered twice
    model.extra.forward = model.extra.forward  # bound to the module
    view: Any = evaluation_view(model)
    assert (type(view), model.training) == (TransformerXL, True)
    assert not any(module.training for module in view.modules())
    pairs = zip(view.named_parameters(), model.named_parameters(), strict=True)
    assert all(name == its_name and mine is its for (name, mine), (its_name, its) in pairs)
    assert view.same is view.layers[0]
    assert view.extra.forward.__self__ is view.extra
    called = []
    model.extra.register_forward_hook(lambda *_: called.append(1))
    view.extra(torch.ones(3))
    assert called == [1]
    narrow: Any = evaluation_view(model, torch.bfloat16)
    assert {each.dtype for each in narrow.parameters()} == {torch.bfloat16}
    assert narrow.tied.weight is narrow.extra.weight
    assert model.u.dtype == torch.float32
    lstm = made(LSTM)
    converted = evaluation_view(lstm, torch.float64)
    tokens = torch.from_numpy(IDS)[None]
    losses = [each.nll(tokens[:, :-1], tokens[:, 1:], each.init_state(1))[0] for each in (lstm.eval(), converted)]
    assert losses[1].dtype == torch.float64
    torch.testing.assert_close(*losses, check_dtype=False)
    model.extra.weight = nn.Parameter(torch.zeros(3, 3))
    assert view.extra.weight is model.extra.weight
    view.layers[0].attention.attend = None
    assert model.layers[0].attention.attend is not None


def test_layers_compiled_for_training_are_read_in_evaluation_mode():
    model = made(VANILLA)
    expected = txl.evaluate(model.eval(), IDS, segment=5, batch_size=2).nll
    for layer in model.train().layers:
        layer.compile(backend="eager")
    assert txl.evaluate(model, IDS, segment=5, batch_size=2).nll == pytest.approx(expected, rel=1e-6)
    assert all(layer._compiled_call_impl is not None for layer in model.layers)


PARTS = ("", ".attention", ".attention.norm", ".attention.k_proj", ".attention.q_proj", ".attention.r_proj",
         ".attention.q_norm", ".attention.k_norm", ".attention.r_norm", ".attention.o_proj", ".attention.dropout",
         ".feed_forward", ".feed_forward.inner", ".feed_forward.norm")  # fmt: skip


def in_pieces(model: TransformerXL, state: Any, segment: int, quiet: bool, change: Any = None) -> torch.Tensor:
    """Return the log-probabilities of a text of 24 tokens; `change` is called after 12 tokens."""
    tokens, parts = stream(24)[0], []
    with torch.no_grad() if quiet else nullcontext():
        for start in range(0, 24, segment):
            if start == 12 and change is not None:
                change()
            part, state = model.log_probs(tokens[:, start : start + segment], state)
            parts.append(part.detach())
    return torch.cat(parts, dim=1)


def uneven(features: torch.Tensor) -> torch.Tensor:
    """Scale each feature differently, which normalisation does not undo."""
    return features * torch.linspace(0.5, 2, features.shape[-1], dtype=features.dtype)


@pytest.mark.parametrize("segment", [1, 12])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["forward hook", "forward pre-hook"])
def test_hooks_fire_without_gradients_as_they_do_with(kind, part, segment):
    """Hooks on a layer or its attention used to be skipped, so that they neither changed nor measured anything."""
    of_heads = part.endswith(("q_norm", "k_norm", "r_norm"))
    model = lively(VARIANTS["normalised heads" if of_heads else "post-norm"])
    called: list[int] = []

    def hook(module: nn.Module, given: Any, *output: Any) -> Any:
        called.append(1)
        if kind == "forward hook":
            return uneven(output[0])
        return uneven(given[0]), *given[1:]

    def add() -> None:
        module = model.get_submodule("layers.1" + part)
        module.register_forward_hook(hook) if kind == "forward hook" else module.register_forward_pre_hook(hook)

    plain = in_pieces(model, model.init_state(B, mem_len=9), segment, quiet=True)
    middle = in_pieces(model, model.init_state(B, mem_len=9), segment, quiet=True, change=add)
    each = 2 if part.endswith("k_proj") else 1  # memory and segment are two products
    assert len(called) == each * 12 // segment
    torch.testing.assert_close(middle[:, :12], plain[:, :12], rtol=0, atol=1e-10)
    assert (middle[:, 12:] - plain[:, 12:]).abs().max() > 1e-3
    with_gradients = in_pieces(model, model.init_state(B, mem_len=9), segment, quiet=False)
    without = in_pieces(model, model.init_state(B, mem_len=9), segment, quiet=True)
    torch.testing.assert_close(without, with_gradients, rtol=0, atol=1e-10)
    without_memory = (each - 1) * 2  # the first segments of the last two
    assert len(called) == each * (12 + 24 + 24) // segment - without_memory


@pytest.mark.parametrize("segment", [1, 12])
def test_hooks_of_all_modules_fire(segment):
    model, called = lively(VARIANTS["post-norm"]), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        in_pieces(model, model.init_state(B, mem_len=9), segment, quiet=True)
    finally:
        handle.remove()
    assert sum(each is model.layers[1].attention for each in called) == 24 // segment


class LoRA(nn.Module):
    """A low-rank update of a linear layer, as in adapter libraries; a scale of 0 switches the update off."""

    def __init__(self, base: nn.Module, rank: int = 2):
        super().__init__()
        self.base, self.scale = base, 1.0
        weight: Any = base.weight
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1], dtype=weight.dtype))
        self.up = nn.Parameter(torch.randn(weight.shape[0], rank, dtype=weight.dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.scale * (hidden @ self.down.t() @ self.up.t())


def adapt(model: Any, name: str = "k_proj") -> LoRA:
    attention = model.layers[1].attention
    setattr(attention, name, LoRA(getattr(attention, name)))
    return getattr(attention, name)


@pytest.mark.parametrize("segment", [1, 12])
@pytest.mark.parametrize("name", ["k_proj", "v_proj", "q_proj", "r_proj", "o_proj"])
def test_other_modules_compute_the_same_without_gradients_whatever_they_look_at(name, segment):
    model: Any = lively(VARIANTS["post-norm"])
    adapt(model, name)

    def halve() -> None:
        getattr(model.layers[1].attention, name).scale /= 2

    found = in_pieces(model, model.init_state(B, mem_len=9), segment, quiet=True, change=halve)
    getattr(model.layers[1].attention, name).scale = 1.0
    expected = in_pieces(model, model.init_state(B, mem_len=9), segment, quiet=False, change=halve)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("segment", [1, 12])
def test_dropout_switched_on_alone_is_not_passed_by(segment):
    """Monte Carlo dropout: all modules are in evaluation mode except the dropout layers."""
    model = lively(VARIANTS["post-norm"])
    for module in model.modules():
        module.train(isinstance(module, nn.Dropout)) if not list(module.children()) else None
    first, second = (in_pieces(model, model.init_state(B, mem_len=9), segment, quiet=True) for _ in range(2))
    assert ((first - second).abs().amax(dim=(0, 2)) > 1e-4).all()


@pytest.mark.parametrize("change", ["bias", "eps", "width", "forward", "parametrization"])
def test_layers_that_were_rebuilt_are_computed_as_they_are(change):
    model: Any = lively(VARIANTS["post-norm"])
    layer = model.layers[1]
    if change == "bias":
        weight = layer.attention.q_proj.weight
        layer.attention.q_proj = type(layer.attention.q_proj)(10, 15).double()
        layer.attention.q_proj.weight = weight
    elif change == "eps":
        layer.feed_forward.norm.eps = 0.5
    elif change == "width":
        layer.feed_forward.inner = type(layer.feed_forward.inner)(10, 33).double()
        layer.feed_forward.outer = type(layer.feed_forward.outer)(33, 10).double()
    elif change == "forward":
        real = layer.attention.forward
        layer.attention.forward = lambda *given: real(*given) * 1.5
    else:
        nn.utils.parametrize.register_parametrization(layer.attention.k_proj, "weight", Doubled())
    for segment in (1, 12):
        found = in_pieces(model, model.init_state(B, mem_len=9), segment, quiet=True)
        expected = in_pieces(model, model.init_state(B, mem_len=9), segment, quiet=False)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_a_state_may_go_from_a_model_to_its_view_and_to_a_copy():
    model = lively(VARIANTS["post-norm"])
    tokens = stream()[0]
    with torch.no_grad():
        _, state = model.log_probs(tokens[:, :9], model.init_state(B))
        expected, _ = model.log_probs(tokens[:, 9:10], state)
        for other in (evaluation_view(model), copy.deepcopy(model)):
            for wanted in (True, False):
                with compiled_code(wanted):
                    found, after = other.log_probs(tokens[:, 9:10], copy.deepcopy(state))
                    again, _ = other.log_probs(tokens[:, 9:10], state)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
                torch.testing.assert_close(again, expected, rtol=0, atol=1e-10)
                torch.testing.assert_close(
                    other.log_probs(tokens[:, 10:11], after)[0], model.log_probs(tokens[:, 10:11], after)[0]
                )
