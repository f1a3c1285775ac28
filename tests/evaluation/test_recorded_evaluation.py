"""Evaluations with recorded steps: the same numbers as eager ones, to the last bit; on a CPU graphs are imitated."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import small_run
from tests.models.test_contract import SMALL, VARIANTS, V, lively
from tests.training.test_trainer import events, train
from tests.waiting import AHEAD, Waits
from torch import nn

from txl.attention import KeyScope, Operands
from txl.config import TransformerXLConfig, VanillaConfig, as_family
from txl.data.characters import CharVocabulary
from txl.devices import Captured, records_on
from txl.evaluation import recorded
from txl.evaluation.dynamic import Adaptation, evaluate_dynamically, gradient_statistics
from txl.evaluation.perplexity import evaluate, evaluate_with
from txl.evaluation.recorded import WARM, Recordings, fuses
from txl.evaluation.sliding import evaluate_sliding
from txl.evaluation.stream import Settings
from txl.evaluation.surprisal import surprisals
from txl.models.family import FamilyModel
from txl.models.structure import evaluation_view
from txl.models.transformer_xl import TransformerXL
from txl.models.vanilla import VanillaTransformer
from txl.training.step import training_step

TEXT = np.random.default_rng(0).integers(0, V, 203)


@pytest.fixture
def recording(monkeypatch):
    """Function that begins the imitation of graphs, and returns the list of replays: the graph of each."""
    replays = []

    def record(self: Captured) -> Callable[[], None]:
        def replay() -> None:
            replays.append(self)
            new = self._function(*self.inputs)
            self.outputs = self.outputs or tuple(part.clone() for part in new)
            for kept, part in zip(self.outputs, new, strict=True):
                kept.copy_(part)

        return replay

    def begin() -> list[Captured]:
        monkeypatch.setattr(Captured, "_record", record)
        monkeypatch.setattr("txl.evaluation.recorded.records", lambda model: type(model) is TransformerXL)
        return replays

    return begin


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mem_len": 11, "window": "none", "temperature": 1.3},
        {"mem_len": 0, "batch_size": 1, "exhaustive": True},
        {"clamp_len": 3, "window": 5, "exhaustive": True, "dtype": "bfloat16"},
        {"mem_len": 3},
    ],
    ids=str,
)
def test_numbers_are_those_of_eager_steps(variant, settings: dict[str, Any], recording, monkeypatch):
    """Memory shorter and longer than a segment, a last short segment, lanes of unequal length, autocast."""
    if settings.get("mem_len") == 11:  # as a large memory, in three pieces
        monkeypatch.setattr("txl.models.memory._LARGE", 0)
    dtype = torch.float32 if settings.get("dtype") else torch.float64
    model, given = lively(VARIANTS[variant], dtype), {"segment": 4, "batch_size": 3, **settings}
    eager = evaluate(model, TEXT, **given)
    replays = recording()
    assert evaluate(model, TEXT, **given).nll == eager.nll
    n_segment = -(-(len(TEXT) // given["batch_size"] - 1) // given["segment"])
    assert len(replays) >= n_segment - 8, "a step was not recorded"
    assert len({id(graph) for graph in replays}) == 1


def eagerly(model: TransformerXL, settings: Settings) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txl.evaluation.recorded.records", lambda _: False)
        return evaluate_with(model, TEXT, settings).nll


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_that_are_kept_follow_the_weights(dtype, recording):
    """As in training. In the end every segment but the first of all is replayed, also while memory fills."""
    # Rows of 64 bytes: sums in MKL may depend on alignment.
    model = lively(dataclasses.replace(VARIANTS["post-norm"], d_head=16), torch.float32)
    replays, kept = recording(), Recordings()
    settings, used = Settings(4, 9, batch_size=3, dtype=dtype), 0
    for _ in range(5):
        eager, used = eagerly(model, settings), len(replays)
        assert evaluate_with(model, TEXT, settings, recordings=kept).nll == eager
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 1.05
    assert len(replays) - used == -(-66 // 4) - 1
    # Other settings and another model begin anew.
    for reader, others in ((model, dataclasses.replace(settings, clamp_len=2)), (copy.deepcopy(model), settings)):
        before = set(replays)
        assert evaluate_with(reader, TEXT, others, recordings=kept).nll == eagerly(reader, others)
        assert len(set(replays) - before) == 1


def test_hooks_and_observers_are_called(recording):
    model, replays, kept, seen = lively(VARIANTS["post-norm"]), recording(), Recordings(), []
    settings = Settings(4, batch_size=3)
    evaluate_with(model, TEXT, settings, recordings=kept)
    used = len(replays)
    hook = model.layers[0].register_forward_hook(lambda *given: seen.append(given))
    evaluate_with(model, TEXT, settings, recordings=kept)
    assert (len(seen), len(replays)) == (17, used)
    hook.remove()

    def attend(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> torch.Tensor:
        seen.append((operands, scope))
        return model.backend(operands, scope, dropout)

    attention = model.attentions[1]
    attention.attend = attend
    evaluate_with(model, TEXT, settings, recordings=kept)
    assert (len(seen), len(replays)) == (2 * 17, used)
    attention.attend = model.backend
    assert evaluate_with(model, TEXT, settings, recordings=kept).nll == eagerly(model, settings)
    assert len(replays) > used


def test_scores_are_those_of_eager_steps(recording):
    text = "a story of bees " * 16
    vocabulary = CharVocabulary(sorted(set(text)))
    torch.manual_seed(0)
    model = TransformerXL(VARIANTS["post-norm"], len(vocabulary)).eval()
    eager = list(surprisals(model, vocabulary, text, segment=4))
    replays = recording()
    assert list(surprisals(model, vocabulary, text, segment=4)) == eager
    assert len(replays) > 50


def test_evaluations_during_training_are_recorded(story, data_dir, tmp_path, recording, monkeypatch):
    losses = {}
    options = {
        "train.eval_every": "5",
        "train.steps": "30",
        "eval.segment": "2",
        "train.capture": "true",
    }
    for name in ("eager", "recorded"):
        monkeypatch.setattr("txl.training.compilation.check_capture", lambda *_: None)
        monkeypatch.setattr("txl.training.loop.CapturedStep", lambda: training_step)
        replays = recording() if name == "recorded" else []
        train(small_run(str(story), **options), tmp_path / name, data_dir)
        losses[name] = [event["nll"] for event in events(tmp_path / name, "valid")]
    # In float32, sums in MKL depend on the alignment of rows.
    assert losses["recorded"] == pytest.approx(losses["eager"], rel=1e-8)
    assert len(losses["eager"]) == 6
    assert len(replays) > 50


@pytest.mark.parametrize("temperature", [1.0, 1.2])
def test_nothing_waits_for_the_device_before_the_end(temperature, recording, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    model, replays, done = lively(VARIANTS["post-norm"]).to(AHEAD), recording(), []
    settings = Settings(4, batch_size=3, temperature=temperature)
    with Waits(), pytest.raises(Exception, match="meta"):  # where the sum of the losses is read
        evaluate_with(model, TEXT, settings, lambda *counts: done.append(counts))
    assert done[-1] == (198, 198)
    assert len(replays) > 8


@pytest.mark.parametrize("kind", ["Transformer-XL", "vanilla", "vanilla, sinusoid"])
def test_sliding_windows_are_recorded(kind, recording, monkeypatch):
    shape = VARIANTS["post-norm"]
    model: FamilyModel = lively(shape)
    if kind != "Transformer-XL":
        encoding = "sinusoid" if "sinusoid" in kind else "learned"
        config = dataclasses.replace(as_family(shape, VanillaConfig), max_segment=6, encoding=encoding)
        model = VanillaTransformer(config, V).double().eval()
    settings: dict[str, Any] = {"context": 6, "batch_size": 4, "temperature": 1.2}
    eager = evaluate_sliding(model, TEXT, **settings)
    replays = recording()
    monkeypatch.setattr("txl.evaluation.recorded.records_windows", lambda _: True)
    assert evaluate_sliding(model, TEXT, **settings).nll == eager.nll
    assert len(replays) == (202 - 6) // 4 - WARM
    model.register_forward_hook(lambda *_: None)
    assert evaluate_sliding(model, TEXT, **settings).nll == eager.nll
    assert len(replays) == (202 - 6) // 4 - WARM


@pytest.mark.parametrize(
    "settings",
    [
        {"mem_len": 9},
        {"batch_size": 3, "exhaustive": True, "temperature": 1.2},
        {"batch_size": 4, "exhaustive": True, "segment": 3},
        {"mem_len": 2, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_dynamic_evaluation_is_recorded(settings: dict[str, Any], recording):
    """Sums of squared gradients too; in the third case the last segment has targets that do not count."""
    dtype = torch.float32 if settings.get("dtype") else torch.float64
    model, given, adaptation = lively(SMALL, dtype), {"segment": 4, **settings}, Adaptation("rms", 0.01, 0.01)
    statistics = {name: value for name, value in given.items() if name != "exhaustive"}
    found, counts = [], []
    for begin in (list[Captured], recording):
        replays = begin()
        sums = gradient_statistics(model, TEXT, segments=14, **statistics)
        counts.append(len(replays))
        found.append((sums, evaluate_dynamically(model, TEXT, adaptation, sums, **given)))
        counts.append(len(replays))
    (eager, slow), (sums, fast) = found
    assert slow.nll == fast.nll
    assert eager.segments == sums.segments == 14
    assert all(torch.equal(square, sums.squares[name]) for name, square in eager.squares.items())
    assert 0 < counts[2] < counts[3]


def test_only_what_lies_on_the_current_gpu_is_recorded(monkeypatch):
    """On another one, a recording would be empty, and its replays would compute nothing."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [name for name in ("cuda:0", "cuda:1", "cpu") if records_on(torch.device(name))] == ["cuda:1"]
    model = lively(SMALL)
    for is_current in (False, True):
        monkeypatch.setattr(recorded, "records_on", lambda device, is_current=is_current: is_current)
        assert recorded.records(model) == recorded.records_windows(model) == is_current


@pytest.mark.parametrize("kind", ["lanes", "windows", "dynamic"])
def test_graphs_end_with_their_evaluation(kind, monkeypatch):
    """They hold a GPU's memory, of which Python's collector of cycles knows nothing."""
    graphs = []

    def record(self: Captured) -> Callable[[], None]:
        graphs.append(weakref.ref(self))
        self.outputs = self._function(*self.inputs)
        return lambda: None

    monkeypatch.setattr(Captured, "_record", record)
    monkeypatch.setattr("txl.evaluation.recorded.records", lambda _: True)
    monkeypatch.setattr("txl.evaluation.recorded.records_windows", lambda _: True)
    model = lively(SMALL)
    gc.disable()
    try:
        if kind == "lanes":
            evaluate(model, TEXT, segment=4, batch_size=3)
        elif kind == "windows":
            evaluate_sliding(model, TEXT, context=6, batch_size=4)
        else:
            evaluate_dynamically(model, TEXT, Adaptation("sgd", 0.01), segment=4)
        assert [graph() for graph in graphs] == [None]
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("attention", ["shifted", "triton"])
@pytest.mark.parametrize("temperature", [1.0, 1.2])
def test_graphs_on_a_gpu(attention, temperature, monkeypatch):
    """With graphs that are kept while weights change, with a tail cluster, and sliding windows."""
    shape = dataclasses.replace(VARIANTS["adaptive"], attention=attention)
    model, kept = lively(shape, torch.float32).cuda(), Recordings()
    settings = Settings(4, batch_size=3, temperature=temperature)
    for _ in range(5):
        assert evaluate_with(model, TEXT, settings, recordings=kept).nll == pytest.approx(
            eagerly(model, settings), rel=1e-4
        )
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 1.05
    slid = evaluate_sliding(model, TEXT, context=6, batch_size=4, temperature=temperature).nll
    monkeypatch.setattr("txl.evaluation.recorded.records_windows", lambda _: False)
    assert slid == pytest.approx(
        evaluate_sliding(model, TEXT, context=6, batch_size=4, temperature=temperature).nll, rel=1e-4
    )


@pytest.mark.parametrize("part", ["norm", "o_proj"])
def test_a_layer_that_was_changed_is_read_by_its_modules(part, monkeypatch):
    monkeypatch.setattr("txl.evaluation.recorded.why_not_triton", lambda *_: None)
    model = TransformerXL(TransformerXLConfig(n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=4), V)
    assert fuses(evaluation_view(model), torch.float32)
    module = model.attentions[1].get_submodule(part)
    if part == "norm":
        vars(module)["eps"] = 0.1
    else:
        module.register_parameter("bias", nn.Parameter(torch.ones(8)))
    assert not fuses(evaluation_view(model), torch.float32)
