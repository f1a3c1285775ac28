"""Steps launched before earlier ones are done, as on a GPU: the host does not wait, and results stay the same."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.conftest import small_run
from tests.training.test_guards import spoil_gradients
from tests.training.test_trainer import assert_continues_exactly, assert_same_end, events, train
from tests.waiting import AHEAD, Waits

import txl
from txl import devices
from txl.config import ModelConfig, RecurrentConfig, TrainConfig, TransformerXLConfig, VanillaConfig
from txl.devices import Captured, sent
from txl.errors import RunInterrupted, UserError
from txl.models import build_model
from txl.models.language_model import State
from txl.models.memory import Memory
from txl.training import compilation
from txl.training import loop as loop_module
from txl.training.compilation import WARM, CapturedStep
from txl.training.optimisers import build_optimizer
from txl.training.parallel import TrainedModel
from txl.training.state import WeightAverage
from txl.training.step import StepInputs, StepOutput, training_step
from txl.training.trainer import Trainer


@pytest.fixture
def whole_pytorch(monkeypatch):
    """Provide stand-ins for autocast and fused Adam, which PyTorch lacks on the meta device."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    for update in ("_fused_adam_", "_fused_sgd_"):
        monkeypatch.setattr(torch, update, lambda *_, **__: None)


SHAPE = TransformerXLConfig(n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6)
FAMILIES: dict[str, ModelConfig] = {
    "plain": SHAPE,
    "window, pre-norm, dropout": dataclasses.replace(SHAPE, window=5, pre_norm=True, dropatt=0.1, dropout_words=0.1),
    "adaptive": dataclasses.replace(SHAPE, cutoffs=(4, 9), div_val=2),
    "mixture": dataclasses.replace(SHAPE, cutoffs=(4,), n_softmax=2),
    "Shaw": dataclasses.replace(SHAPE, encoding="shaw", max_distance=4),
    "vanilla": VanillaConfig(n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, max_segment=6),
    "QRNN": RecurrentConfig(kind="qrnn", n_layer=2, d_model=8, kernel_sizes=(2, 1)),
}


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("model", FAMILIES.values(), ids=list(FAMILIES))
def test_a_step_does_not_wait_for_the_device(model, optimizer, whole_pytorch):
    """Two steps of two parts with averaged weights, the second step with memory; no step reads the loss."""
    train_config = TrainConfig(batch_size=4, segment=6, micro_batches=2, optimizer=optimizer, weight_decay=0.1)
    made = build_model(model, 20).to(AHEAD).train()
    optimizer, average = build_optimizer(made, train_config), WeightAverage(made)
    text = torch.randint(20, (4, 7))
    rows = [made.tail_rows(part, "full") for part in text[:, 1:].chunk(2)]
    states: list[State] = [made.init_state(2), made.init_state(2)]
    void = None
    for _ in range(2):
        with Waits():
            tokens, targets = sent(text[:, :-1], AHEAD), sent(text[:, 1:], AHEAD)
            average.prepare()
            inputs = StepInputs(tokens, targets, states, void=void, tail_rows=rows, average=average)
            result = training_step(made, optimizer, inputs, train_config)
        states, void = result.states, result.skipped
        with pytest.raises(Exception, match="meta"):
            result.result()


def test_a_wait_is_found():
    """The test above detects a synchronous copy, and shapes that depend on values on the device."""
    with Waits(), pytest.raises(AssertionError, match="waits"):
        torch.ones(3).to(AHEAD)
    made = build_model(FAMILIES["adaptive"], 20).to(AHEAD).train()
    hidden, targets = (
        torch.empty(5, *more, device=AHEAD, dtype=dtype) for more, dtype in (((8,), None), ((), torch.long))
    )
    made.softmax.nll(hidden, targets, made.embedding, (2, 1))
    with pytest.raises(NotImplementedError):
        made.softmax.nll(hidden, targets, made.embedding)


@pytest.mark.parametrize("rows", [(7, 3), (9, 20), (30, 30)], ids=str)
def test_room_for_the_targets_of_tail_clusters_changes_no_loss(rows):
    """The clusters have room for exactly their targets, for more targets, or for every token."""
    made = build_model(FAMILIES["adaptive"], 20).double()
    hidden, targets = torch.randn(30, 8, dtype=torch.float64, requires_grad=True), torch.zeros(30, dtype=torch.int64)
    targets[[1, 2, 5, 8, 13, 21, 29]] = torch.tensor([4, 5, 6, 7, 8, 4, 5])
    targets[[0, 9, 20]] = torch.tensor([9, 19, 12])
    assert made.tail_rows(targets[None], "full") == (7, 3)
    parameters = [hidden, *made.softmax.parameters(), *made.embedding.parameters()]
    results = []
    for room in (None, rows):
        nll = made.softmax.nll(hidden, targets, made.embedding, room)
        results.append([nll, *torch.autograd.grad((nll * torch.arange(30)).sum(), parameters)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


SPOILT = {5, 6}


@pytest.fixture
def reading_later(monkeypatch):
    monkeypatch.setattr(loop_module, "reads_later", lambda setup, state: True)


@pytest.mark.parametrize(
    "options",
    [
        {"train.log_every": "7", "train.eval_every": "12"},
        {"train.log_every": "7", "train.average_from": "2", "train.average_mu": "0.3"},
        {"train.log_every": "7", "train.average_from": "4", "train.micro_batches": "2"},
        {"train.log_every": "7", "train.reset_memory": "0.4", "train.micro_batches": "2"},
        {"train.log_every": "1"},
    ],
    ids=str,
)
def test_a_run_that_reads_later_is_the_same_run(options, story, data_dir, tmp_path, monkeypatch):
    """Two updates in a row are bad, and losses are read late: the final state and the reports are bit for bit equal."""
    run = small_run(str(story), **options, **{"train.checkpoint_every": "0"})
    for later in (False, True):
        with monkeypatch.context() as patch:
            spoil_by_step(patch)
            patch.setattr(loop_module, "reads_later", lambda setup, state, later=later: later)
            train(run, tmp_path / str(later), data_dir)
    assert_same_end(tmp_path / "True", tmp_path / "False")
    told = [
        [
            {
                key: value
                for key, value in each.items()
                if key in ("event", "step", "loss", "grad_norm", "in_a_row", "nll")
            }
            for each in events(tmp_path / str(later), name)
        ]
        for later in (False, True)
        for name in ("skipped", "train", "valid")
    ]
    assert told[:3] == told[3:]
    assert [each["step"] for each in told[0]] == sorted(SPOILT)


def spoil_by_step(monkeypatch) -> None:
    """Make the gradients of the steps `SPOILT` infinite, also when a step is repeated; tokens identify the step."""
    real, texts = loop_module.training_step, []

    def spoiled(trained, optimizer, inputs, *args):
        tokens = inputs.tokens.clone()
        if not any(torch.equal(tokens, each) for each in texts):
            texts.append(tokens)
        number = 1 + next(place for place, each in enumerate(texts) if torch.equal(tokens, each))
        with monkeypatch.context() as patch:
            if number in SPOILT:
                spoil_gradients(patch, {1})
            return real(trained, optimizer, inputs, *args)

    monkeypatch.setattr(loop_module, "training_step", spoiled)
    monkeypatch.setattr(compilation, "training_step", spoiled)


def nowhere_finite(state: State) -> Memory:
    assert isinstance(state, Memory)
    return dataclasses.replace(state, hidden=tuple(each * math.nan for each in state.hidden))


def test_memory_that_is_not_finite_is_emptied_before_the_next_update_counts(
    story, data_dir, tmp_path, monkeypatch, reading_later
):
    """The update after a bad one is repeated, with empty memory if the bad one left memory that is not finite."""
    lengths, real = [], loop_module.training_step

    def poisoned(trained, optimizer, inputs, *args):
        lengths.append(inputs.states[0].length)
        result = real(trained, optimizer, inputs, *args)
        if len(lengths) == 5:
            bad = torch.ones((), dtype=torch.bool)
            states: list[State] = [nowhere_finite(each) for each in result.states]
            return StepOutput(torch.tensor([math.nan, math.nan, 1.0]), bad, states, result.n_target)
        return result

    monkeypatch.setattr(loop_module, "training_step", poisoned)
    outcome = train(small_run(str(story), **{"train.log_every": "6"}), tmp_path / "run", data_dir)
    assert outcome["step"] == 12
    assert lengths == [0, 8, 8, 8, 8, 8, 0, 8, 8, 8, 8, 8, 8]  # step 6 was made twice
    assert len(events(tmp_path / "run", "skipped")) == 1


def test_a_run_that_reads_later_can_be_stopped_anywhere(story, data_dir, tmp_path, monkeypatch, reading_later):
    run = small_run(str(story), **{"train.log_every": "7", "train.checkpoint_every": "0"})
    assert_continues_exactly(run, tmp_path, data_dir, monkeypatch)


@pytest.fixture
def recording(monkeypatch):
    """Simulate CUDA graphs on a CPU, and provide the list of graphs: a replay computes again, into the same tensors."""
    recorded = []

    def record(self: Captured) -> Callable[[], None]:
        recorded.append(self)

        def replay() -> None:
            new = self._function(*self.inputs)
            if not self.outputs:
                self.outputs = tuple(each.clone() for each in new)
            for kept, each in zip(self.outputs, new, strict=True):
                kept.copy_(each)

        return replay

    monkeypatch.setattr(Captured, "_record", record)
    monkeypatch.setattr("txl.training.compilation.check_capture", lambda *_: None)
    return recorded


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train.micro_batches": "2", "train.average_from": "4"},
        {"data.unit": "word", "model.cutoffs": "10,30", "model.div_val": "2"},
        {"train.steps": "45", "train.batch_size": "8", "train.epoch_shift": "3"},
        {"train.steps": "40", "train.random_segments": "true"},
        {"train.steps": "40", "train.reset_memory": "0.3"},
        {"train.steps": "30", "train.average_from": "15", "train.average_mu": "0.2"},
        {"train.steps": "40", "train.average_from": "25", "train.random_segments": "true", "train.reset_memory": "0.1"},
        {"train.steps": "40", "train.reset_memory": "0.3", "train.micro_batches": "2", "train.optimizer": "muon"},
    ],
    ids=str,
)
def test_a_recorded_run_is_the_same_run(options, story, data_dir, tmp_path, monkeypatch, recording, reading_later):
    """The steps include bad updates, words in tail clusters, and the short last segment of an epoch."""
    every = {"train.log_every": "50", "train.eval_every": "0", "train.checkpoint_every": "0"}
    run = small_run(str(story), **every, **options, **{"train.capture": "true"})
    for name in ("recorded", "eager"):
        with monkeypatch.context() as patch:
            spoil_by_step(patch)
            if name == "eager":
                patch.setattr(loop_module, "CapturedStep", lambda: loop_module.training_step)
            train(run, tmp_path / name, data_dir)
    if "train.random_segments" in options:
        assert len(recording) > 2
    else:  # anew, where an average of the weights begins
        assert len(recording) == 1 + (options.get("train.average_from") == "15")
    assert_same_end(tmp_path / "recorded", tmp_path / "eager")


def test_graphs_of_other_lengths_share_the_memory_of_one_that_is_recorded(recording):
    model: Any = build_model(SHAPE, 20).train()
    config = TrainConfig(batch_size=2, segment=6)
    optimizer, step = build_optimizer(model, config), CapturedStep()
    states: list[State] = [model.init_state(2).filled_with_noise()]
    for length in (6, 6, 6, 5, 5, 6, 5, 5, 6, 5):
        tokens = torch.zeros(2, length, dtype=torch.int64)
        states = step(model, optimizer, StepInputs(tokens, tokens, states), config).states
    assert [graph._beside for graph in recording] == [None, recording[0]]


@pytest.mark.parametrize("fails", [False, True])
def test_cycles_are_not_collected_while_a_graph_is_recorded(fails, monkeypatch):
    """An engine that is collected there would wait for the device, which a recording must not."""
    for name in ("Stream", "current_device", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    torch.cuda.graph.return_value.__exit__.return_value = False  # pyright: ignore[reportAttributeAccessIssue]
    seen = []

    def function(tokens: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append(gc.isenabled())
        return (tokens[3 if fails and len(seen) == 2 else 0],)

    with pytest.raises(IndexError) if fails else contextlib.nullcontext():
        Captured(function, warm_up=1).record(torch.zeros(1))
    assert seen == [True, False]
    assert gc.isenabled()
    devices._recording_stream.cache_clear()


def test_graphs_end_where_an_average_of_the_weights_begins(monkeypatch):
    """All but the first, whose memory later graphs use; they hold a GPU's memory, of which Python knows nothing."""
    graphs, model = [], build_model(SHAPE, 20).train()
    config = TrainConfig(batch_size=2, segment=6)
    optimizer, step = build_optimizer(model, config), CapturedStep()
    states: list[State] = [model.init_state(2).filled_with_noise()]

    def record(self: Captured) -> Callable[[], None]:
        graphs.append(weakref.ref(self))
        self.outputs = self._function(*self.inputs)
        return lambda: None

    monkeypatch.setattr(Captured, "_record", record)
    gc.disable()
    try:
        for number, length in enumerate((6, 6, 6, 6, 5, 5, 6)):
            tokens = torch.zeros(2, length, dtype=torch.int64)
            average = WeightAverage(model) if number == 6 else None
            states = step(model, optimizer, StepInputs(tokens, tokens, states, average=average), config).states
        assert [graph() is None for graph in graphs] == [False, True]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "device", "reason"),
    [
        ({}, "cpu", "this run trains on cpu"),
        ({"train.optimizer": "sgd"}, "cuda", "train.optimizer is sgd"),
        ({"train.on_spike": "rollback"}, "cuda", "train.on_spike is rollback"),
    ],
)
def test_what_a_graph_cannot_serve_is_refused(options, device, reason, tmp_path):
    run = small_run("stdlib", **options, **{"train.capture": "true"})
    with pytest.raises(UserError, match=reason) as refused:
        Trainer(run, tmp_path / "run", device=device)
    assert refused.value.field == "train.capture"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, "cuda", True),
        ({"train.reset_memory": "0.1", "train.optimizer": "muon"}, "cuda:1", True),
        ({}, "cpu", False),
        ({"train.optimizer": "sgd"}, "cuda", False),
        ({"train.backprop_segments": "2"}, "cuda", False),
    ],
)
def test_where_steps_can_be_recorded_without_asking(options, device, expected):
    run = small_run("stdlib", **options)
    assert compilation.can_capture(run, device) is expected
    assert run.train.capture is False


def test_other_devices_than_a_cpu_and_nvidia_gpus_do_not_train(tmp_path):
    with pytest.raises(UserError) as refused:
        Trainer(txl.preset("stdlib-tiny"), tmp_path / "run", device="mps:0")
    assert (refused.value.field, refused.value.value) == ("device", "mps:0")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_of_no_number_is_refused(dtype, tmp_path):
    run = small_run("stdlib", **{"train.dtype": dtype})
    with pytest.raises(UserError, match="Invalid device string: 'cuda:x'; use device cpu"):
        Trainer(run, tmp_path / "run", device="cuda:x")


def test_tf32_needs_a_gpu(tmp_path):
    run = dataclasses.replace(txl.preset("stdlib-tiny"), train=TrainConfig(tf32=True))
    with pytest.raises(UserError) as refused:
        Trainer(run, tmp_path / "run", device="cpu")
    assert refused.value.field == "train.tf32"
    assert torch.get_float32_matmul_precision() == "highest"


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ON_A_GPU = {name: shape for name, shape in FAMILIES.items() if not isinstance(shape, RecurrentConfig)}
ON_A_GPU["triton"] = dataclasses.replace(SHAPE, attention="triton", dropatt=0.1, d_head=16)


@contextlib.contextmanager
def nobody_waits() -> Iterator[None]:
    """Make CUDA raise an error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps_on_a_gpu(
    shape: ModelConfig, captured: bool, dtype: Any, optimizer_name: Any
) -> tuple[list[tuple[float, float]], torch.nn.Module]:
    """Return losses and gradient norms of twelve updates, the eighth bad and the ninth void, and the trained model."""
    config = TrainConfig(dtype=dtype, batch_size=4, segment=6, micro_batches=2, learning_rate=0.01, capture=True)
    config = dataclasses.replace(config, optimizer=optimizer_name)
    torch.manual_seed(3)
    model = build_model(shape, 20, "cuda").cuda().train()
    optimizer = build_optimizer(model, config)
    step = CapturedStep() if captured else training_step
    states: list[State] = [model.init_state(2), model.init_state(2)]
    generator, void, numbers = torch.Generator().manual_seed(4), None, []
    for number in range(12):
        text = torch.randint(20, (4, 7), generator=generator)
        rows = [model.tail_rows(part, "full") for part in text[:, 1:].chunk(2)]
        spoilt = model.softmax.bias.detach()[:1].clone()
        if number == 7:
            model.softmax.bias.data[:1] = math.inf
        # The first steps may wait: libraries initialise themselves, and a graph is recorded.
        with nobody_waits() if number > WARM + 3 else contextlib.nullcontext():
            tokens, targets = sent(text[:, :-1], "cuda"), sent(text[:, 1:], "cuda")
            inputs = StepInputs(tokens, targets, states, void=void, tail_rows=rows)
            result = step(TrainedModel(model), optimizer, inputs, config)
        if number == 7:
            model.softmax.bias.data[:1] = spoilt
        if number != 8:
            states = result.states
        void = result.skipped if number == 7 else None
        numbers.append(result.result()[:2])
        assert result.result().updated is (number not in (7, 8))
    return numbers, model


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "optimizer"), [*((each, "adam") for each in ON_A_GPU.values()), (SHAPE, "muon")], ids=[*ON_A_GPU, "Muon"]
)
def test_on_a_gpu_steps_wait_for_nothing_and_recorded_ones_are_the_same(shape, optimizer, dtype, device):
    eager, recorded = (steps_on_a_gpu(shape, captured, dtype, optimizer) for captured in (False, True))
    for ours, theirs in zip(recorded[0], eager[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3 if dtype == "float32" else 3e-2, nan_ok=True)
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    for ours, theirs in zip(recorded[1].parameters(), eager[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train.average_from": "6"},
        {"train.random_segments": "true"},
        {"train.optimizer": "muon", "train.reset_memory": "0.3"},
    ],
    ids=str,
)
def test_a_run_on_a_gpu_is_the_same_captured_and_stopped(options, device, story, data_dir, tmp_path, monkeypatch):
    """Losses agree between runs without graphs, with graphs, and with graphs and an interruption."""
    losses = []
    for name in ("eager", "captured", "stopped"):
        more = {"train.steps": "60", "train.log_every": "20", "train.capture": str(name != "eager").lower()}
        run = small_run(str(story), **{"train.eval_every": "0"} | options | more)
        if name == "stopped":
            with monkeypatch.context() as patch:
                patch.setattr(loop_module, "CapturedStep", stopping_step(31))
                with pytest.raises(RunInterrupted):
                    train(run, tmp_path / name, data_dir, device=device)
        train(run, tmp_path / name, data_dir, device=device)
        losses.append([each["loss"] for each in events(tmp_path / name, "train")])
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=1e-3)


def stopping_step(number: int) -> Callable[[], Callable[..., StepOutput]]:
    """Return a factory of captured steps; a step sends SIGINT to this process at call `number`."""

    def make() -> Callable[..., StepOutput]:
        real, calls = CapturedStep(), []

        def step(*args):
            calls.append(1)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGINT)
            return real(*args)

        return step

    return make


def test_a_recorded_run_goes_on_without_recording(story, data_dir, tmp_path, monkeypatch, recording, reading_later):
    run = small_run(str(story), **{"train.capture": "true", "train.log_every": "6"})
    train(run, tmp_path / "whole", data_dir)
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "CapturedStep", stopping_step(9))
        with pytest.raises(RunInterrupted):
            train(run, tmp_path / "changed", data_dir)
    assert recording
    run.train.capture = False
    train(run, tmp_path / "changed", data_dir)
    # The rate of a recorded step is rounded to float32.
    losses = [[each["loss"] for each in events(tmp_path / name, "train")] for name in ("changed", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
