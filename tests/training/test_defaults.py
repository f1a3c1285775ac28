"""What is fast on a GPU: the choice for a preset, the line about it, what is recorded, and how a run goes on.

The GPU's compute capability and the times of steps are given, so that every choice is made on a CPU.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import options_of, small_run

import txl
from txl import devices
from txl.attention import BACKENDS, attention_backend
from txl.cli import main
from txl.commands import options as command_options
from txl.commands.parser import build_parser
from txl.config import RunConfig, TransformerXLConfig, with_options
from txl.devices import Captured
from txl.errors import UserError
from txl.presets import presets
from txl.runs.directory import RunDirectory
from txl.training import compilation, defaults, timing
from txl.training import trainer as trainer_module
from txl.training.trainer import Trainer

FAST = {"train.dtype": "bfloat16", "train.capture": "true"}
HOPPER, AMPERE, TURING, PASCAL = (9, 0), (8, 0), (7, 5), (6, 1)
Gpu = Callable[[tuple[int, int]], None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Function that gives this machine a GPU of a compute capability, on which `triton` can train from 8.0 on."""

    def put(capability: tuple[int, int]) -> None:
        def obstacle(model: object, device: str | None, dtype: torch.dtype | None) -> str | None:
            known = dtype in (None, torch.float32, torch.bfloat16)
            return None if known and (device or "").startswith("cuda") and capability >= AMPERE else "cannot train here"

        is_gpu = lambda device: capability if str(device).startswith("cuda") else None  # noqa: E731
        monkeypatch.setattr(devices, "compute_capability", is_gpu)
        monkeypatch.setitem(BACKENDS, "triton", dataclasses.replace(BACKENDS["triton"], obstacle=obstacle))

    return put


def chosen(preset: str = "enwik8-12L", device: str = "cuda", **given: str) -> dict[str, str]:
    given = {name.replace("__", "."): value for name, value in given.items()}
    return defaults.fast_options(txl.preset(preset), given, device)


@pytest.mark.parametrize("capability", [HOPPER, AMPERE, (8, 6), (8, 9), (10, 0), (12, 0)])
def test_a_gpu_of_capability_8_and_above_trains_in_bfloat16_with_recorded_steps(gpu: Gpu, capability):
    gpu(capability)
    assert chosen() == chosen(device="cuda:1") == FAST


def test_every_preset_becomes_a_run_that_is_valid_and_can_be_recorded_or_stays(gpu: Gpu):
    gpu(HOPPER)
    for name in presets():
        fast = chosen(name)
        txl.config.validate(with_options(txl.preset(name), fast))
        assert fast in (FAST, {"train.dtype": "bfloat16"}, {}), name
    assert [name for name in ("enwik8-12L", "wt103-base", "ptb", "stdlib-bpe") if chosen(name) != FAST] == []


def test_a_model_whose_steps_cannot_be_recorded_trains_in_bfloat16_and_a_recurrent_one_as_before(gpu: Gpu):
    gpu(HOPPER)
    low = {"train.dtype": "bfloat16"}
    assert chosen(train__optimizer="sgd", train__schedule="constant") == chosen(train__backprop_segments="2") == low
    layered = [name for name in presets() if txl.preset(name).model.loss_depends_on_progress]
    recurrent = [name for name in presets() if txl.preset(name).model.family == "recurrent"]
    assert layered
    assert recurrent
    assert all(chosen(name) == low for name in layered)
    assert all(chosen(name) == {} for name in recurrent)


@pytest.mark.parametrize(
    ("capability", "dtype"), [(TURING, {"train.dtype": "float16"}), ((7, 0), {"train.dtype": "float16"}), (PASCAL, {})]
)
def test_a_gpu_without_fast_bfloat16_never_trains_in_it(gpu: Gpu, capability, dtype):
    gpu(capability)
    assert chosen() == {"train.capture": "true"} | dtype
    attention = defaults.chosen_attention(txl.preset("enwik8-12L"), "cuda", lambda run: pytest.fail("timed"))
    assert attention == defaults.ChosenAttention("shifted")


def test_options_of_the_user_win(gpu: Gpu):
    gpu(HOPPER)
    assert chosen(train__dtype="float32") == {"train.capture": "true"}
    assert chosen(train__capture="false") == {"train.dtype": "bfloat16"}
    assert chosen(train__dtype="float32", train__capture="false") == {}
    assert chosen(train__tf32="true") == {"train.capture": "true"}, "TF32 is of float32 products"
    assert chosen(train__dtype="float64") == {"train.capture": "true"}


def test_several_processes_do_not_record(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    gpu(HOPPER)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert chosen() == {"train.dtype": "bfloat16"}
    gpu(TURING)
    assert chosen() == {"train.dtype": "float16"}
    assert chosen(train__parallel="fsdp") == {}  # float16 is refused there


class Times:
    """Given seconds of a step with each attention backend, or an error; and the backends that were timed."""

    def __init__(self, **seconds: float | Exception):
        self.seconds: Mapping[str, float | Exception] = seconds
        self.timed: list[str] = []

    def __call__(self, run: RunConfig) -> float:
        attention = run.to_dict()["model"]["attention"]
        self.timed.append(attention)
        seconds = self.seconds[attention]
        if isinstance(seconds, Exception):
            raise seconds
        return seconds


def attention_of(times: Times | None, **changes: str) -> defaults.ChosenAttention:
    run = with_options(txl.preset("enwik8-12L"), FAST | {name.replace("__", "."): v for name, v in changes.items()})
    chosen = defaults.chosen_attention(run, "cuda", times)
    assert chosen is not None
    return chosen


@pytest.mark.parametrize(
    ("shifted", "triton", "name"),
    [
        (0.010, 0.008, "triton"),
        (0.010, 0.0095, "shifted"),  # faster, but not by a tenth: the next start might measure otherwise
        (0.010, 0.012, "shifted"),
        (1.4, 0.9, "triton"),
        (torch.OutOfMemoryError("CUDA out of memory"), 0.5, "triton"),
        (0.5, torch.OutOfMemoryError("CUDA out of memory"), "shifted"),
        (0.010, RuntimeError("no such instruction\nin line 7"), "shifted"),
    ],
)
def test_an_unmeasured_gpu_is_timed_and_the_usual_backend_needs_a_clear_rival(gpu: Gpu, shifted, triton, name):
    gpu(AMPERE)
    times = Times(shifted=shifted, triton=triton)
    choice = attention_of(times)
    assert times.timed == ["shifted", "triton"]
    assert choice.name == name
    line = defaults.note(FAST, choice, "cuda")
    told = [
        "needs too much memory" if isinstance(seconds, torch.OutOfMemoryError) else
        "no such instruction" if isinstance(seconds, Exception) else f"{1000 * seconds:.3g} ms"
        for seconds in (shifted, triton)
    ]  # fmt: skip
    assert all(words in line for words in told) or "no such instruction" in line
    assert "\n" not in line


def test_an_error_of_the_usual_backend_is_not_hidden(gpu: Gpu):
    gpu(AMPERE)
    with pytest.raises(ValueError, match="wrong"):
        attention_of(Times(shifted=ValueError("wrong"), triton=0.1))


def test_a_long_step_is_not_timed_twice(gpu: Gpu):
    gpu(AMPERE)
    times = Times(shifted=1.6)
    assert attention_of(times).name == "shifted"
    assert times.timed == ["shifted"]


def test_nothing_is_timed_where_the_attention_is_known_or_given(gpu: Gpu):
    never = Times()
    gpu(AMPERE)
    assert attention_of(None) == defaults.ChosenAttention("shifted")
    assert attention_of(never, model__attention="triton") == defaults.ChosenAttention("triton")
    assert attention_of(never, train__dtype="float64") == defaults.ChosenAttention("shifted")
    gpu(HOPPER)
    assert attention_of(never) == defaults.ChosenAttention("triton")
    assert attention_of(never, train__dtype="float32") == defaults.ChosenAttention("shifted")
    assert defaults.chosen_attention(txl.preset("wt103-lstm"), "cuda", never) is None


@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({}, "triton"),
        ({"train.capture": "true"}, "triton"),
        ({"model.encoding": "shaw"}, "triton"),
        ({"train.dtype": "float32"}, "shifted"),
    ],
)
def test_a_model_trains_with_the_attention_that_the_line_names(gpu: Gpu, monkeypatch, changes, attention):
    gpu(HOPPER)
    run = with_options(txl.preset("enwik8-12L"), {"train.dtype": "bfloat16", "model.n_layer": "1"} | changes)
    assert defaults.chosen_attention(run, "cuda", None) == defaults.ChosenAttention(attention)

    def build(model: TransformerXLConfig, vocabulary: int, device: str, dtype: torch.dtype) -> None:
        raise RuntimeError(attention_backend(model, device, dtype).name)

    monkeypatch.setattr(compilation, "build_model", build)
    with pytest.raises(RuntimeError, match=f"^{attention}$"):  # the training builds a model with the same
        compilation.model_to_train(run.model, 7, "cuda", run.train)


def test_the_line_names_the_choice_and_the_options_that_undo_it(gpu: Gpu):
    gpu(HOPPER)
    assert defaults.note(FAST, attention_of(None), "cuda") == (
        "fast on a GPU of compute capability 9.0: train.dtype bfloat16, train.capture true, attention triton; "
        "--train.dtype float32 --train.capture false gives float32 and eager steps back"
    )
    assert defaults.note({}, attention_of(None), "cuda") == ""
    assert defaults.note({}, None, "cuda") == ""
    assert defaults.note({"train.capture": "true"}, None, "cuda").endswith(
        "train.capture true; --train.capture false gives eager steps back"
    )


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 4 + 2 + 20), (0.4, 4 + 2 + 3), (0.6, 2 + 1)])
def test_timing_ends_within_ten_seconds_for_two_backends(monkeypatch: pytest.MonkeyPatch, seconds, steps):
    """Steps of up to the limit are timed a few times, longer ones once; on a CPU nothing is recorded."""
    taken = []
    monkeypatch.setattr(timing, "seconds_of", lambda step, device: taken.append(seconds) or seconds)
    monkeypatch.setattr(timing, "check_trainable", lambda *_: None)
    real = timing.model_to_train
    monkeypatch.setattr(timing, "model_to_train", lambda model, vocabulary, _, train: real(model, 7, "cpu", train))
    assert defaults.step_seconds(small_run("stdlib"), 7, "cuda") == seconds
    assert len(taken) == steps
    assert 2 * sum(taken) < 10


class OnGpu:
    """The command on an imitated GPU: steps are computed on the CPU, and recorded steps are replayed by calling them."""

    def __init__(self, words: list[str], times: Times, capsys: pytest.CaptureFixture[str]):
        self.words, self.times, self._capsys = words, times, capsys
        self.said = ""

    def __call__(self, out: Path, *more: str, preset: str = "stdlib-tiny") -> int:
        self.times.timed = []
        code = main(["train", preset, "--out", str(out), *self.words, *more])
        self.said = self._capsys.readouterr().err
        return code

    @property
    def notes(self) -> list[str]:
        return [line for line in self.said.splitlines() if "compute capability" in line]


@pytest.fixture
def on_gpu(gpu: Gpu, story: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> OnGpu:
    gpu(AMPERE)
    times = Times(shifted=0.02, triton=0.01)
    fixed = ("model.attention", "train.dtype", "train.capture")
    words = [word for word in options_of(small_run(str(story))) if word[2:].partition("=")[0] not in fixed]

    class OnCpu(Trainer):
        """A trainer whose device is the CPU."""

        def __init__(self, run: RunConfig, out: Path, device: str | None = None, **others: Any):
            super().__init__(run, out, device="cpu", **others)

    def record(self: Captured) -> Callable[[], None]:
        return lambda: setattr(self, "outputs", self._function(*self.inputs))

    build_parser()  # imports every command before the function is replaced, of which some keep a name
    monkeypatch.setattr(command_options, "pick_device", lambda name: name or "cuda")
    monkeypatch.setattr(trainer_module, "Trainer", OnCpu)
    monkeypatch.setattr(defaults, "step_seconds", lambda run, vocab_size, device: times(run))
    monkeypatch.setattr(Captured, "_record", record)
    monkeypatch.setattr("txl.training.compilation.check_capture", lambda *_: None)
    # On a CPU nothing can compute `triton`; the name is what is recorded.
    shifted = dataclasses.replace(BACKENDS["shifted"], name="triton")
    monkeypatch.setitem(BACKENDS, "triton", shifted)
    monkeypatch.setattr(trainer_module, "describe_hardware", lambda _: hardware("cuda"))
    return OnGpu([*words, "--data-dir", str(data_dir)], times, capsys)


def hardware(device: str) -> dict[str, object]:
    return {"cpu": "x", "cores": 1, "threads": torch.get_num_threads(), "memory_bytes": None, "device": device}


def test_a_preset_without_options_trains_fast_says_so_in_one_line_and_records_it(on_gpu: OnGpu, tmp_path: Path):
    assert on_gpu(tmp_path / "run") == 0
    assert len(on_gpu.notes) == 1
    assert (
        "note: fast on a GPU of compute capability 8.0: train.dtype bfloat16, train.capture true, attention triton"
        in (on_gpu.notes[0])
    )
    assert "timed a step: shifted 20 ms, triton 10 ms" in on_gpu.notes[0]
    run, log = RunDirectory(tmp_path / "run").config(), RunDirectory(tmp_path / "run").log()
    assert (run.train.dtype, run.train.capture, run.to_dict()["model"]["attention"]) == ("bfloat16", True, "triton")
    assert log.events[0]["event"] == "start"
    assert log.events[0]["config"]["train"]["dtype"] == "bfloat16"
    assert log.events[0]["attention"] == "triton"


def test_a_run_goes_on_as_it_began_and_is_not_timed_again(on_gpu: OnGpu, tmp_path: Path):
    out = tmp_path / "run"
    assert on_gpu(out) == 0
    config = (out / "config.json").read_bytes()
    on_gpu.times.seconds = {"shifted": 0.01, "triton": 0.02}  # the choice would now be another
    assert on_gpu(out) == 0
    assert (on_gpu.times.timed, on_gpu.notes) == ([], [])
    assert (out / "config.json").read_bytes() == config
    assert on_gpu(out, "--train.steps", "14", "--extend") == 0
    assert RunDirectory(out).config().train.dtype == "bfloat16"
    assert on_gpu(out, "--train.dtype", "float32") == 2
    assert "train.dtype bfloat16 -> float32" in on_gpu.said


def test_given_options_win_and_are_not_named(on_gpu: OnGpu, tmp_path: Path):
    slow = ("--train.dtype", "float32", "--train.capture", "false", "--model.attention", "shifted")
    assert on_gpu(tmp_path / "slow", *slow) == 0
    assert (on_gpu.notes, on_gpu.times.timed) == ([], [])
    run = RunDirectory(tmp_path / "slow").config()
    assert (run.train.dtype, run.train.capture, run.to_dict()["model"]["attention"]) == ("float32", False, "shifted")
    assert on_gpu(tmp_path / "slow") == 0, "it goes on as it began"
    assert on_gpu(tmp_path / "partly", "--train.capture", "false") == 0
    assert "train.capture" not in on_gpu.notes[0].partition(";")[0]
    assert RunDirectory(tmp_path / "partly").config().train.capture is False


def test_a_quiet_start_says_nothing_and_chooses_alike(on_gpu: OnGpu, tmp_path: Path):
    assert on_gpu(tmp_path / "run", "--quiet") == 0
    assert on_gpu.said == ""
    assert RunDirectory(tmp_path / "run").config().train.dtype == "bfloat16"


def test_a_dry_run_shows_the_choice_and_times_nothing(on_gpu: OnGpu, tmp_path: Path, capsys):
    words = ["train", "stdlib-tiny", "--dry-run", "--json", *on_gpu.words]
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)["config"]
    assert (shown["train"]["dtype"], shown["train"]["capture"]) == ("bfloat16", True)
    assert on_gpu.times.timed == []


def test_the_configuration_of_a_run_directory_and_a_fork_s_are_kept(on_gpu: OnGpu, tmp_path: Path):
    slow = ("--train.dtype", "float32", "--train.capture", "false")
    assert on_gpu(tmp_path / "slow", *slow) == 0
    assert on_gpu(tmp_path / "again", preset=str(tmp_path / "slow")) == 0
    assert (on_gpu.notes, on_gpu.times.timed) == ([], [])
    assert RunDirectory(tmp_path / "again").config().train.dtype == "float32"
    assert on_gpu(tmp_path / "slow", "--fork", "--train.seed", "2") == 0
    assert RunDirectory(tmp_path / "slow-fork-1").config().train.dtype == "float32"
    assert on_gpu(tmp_path / "slow", "--fork", "--train.seed", "2") == 0
    assert not (tmp_path / "slow-fork-2").exists()


def test_a_run_of_a_cpu_is_as_it_was(on_gpu: OnGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer_module, "describe_hardware", lambda _: hardware("cpu"))
    out = tmp_path / "run"
    assert on_gpu(out, "--device", "cpu") == 0
    assert (on_gpu.notes, on_gpu.times.timed) == ([], [])
    run = RunDirectory(out).config()
    assert (run.train.dtype, run.train.capture, run.to_dict()["model"]["attention"]) == ("float32", False, "auto")
    assert on_gpu(out) == 0, "it goes on on a GPU as it began"
    assert RunDirectory(out).config() == run
    assert on_gpu(tmp_path / "low", "--device", "cpu", "--train.dtype", "bfloat16") == 0
    assert on_gpu(tmp_path / "low", "--device", "cpu") == 2, "another run, as ever"


def test_a_trainer_in_a_program_trains_exactly_what_it_was_given(gpu: Gpu, tmp_path: Path):
    gpu(HOPPER)
    run = small_run("stdlib")
    assert Trainer(run, tmp_path / "run", device="cpu").run.train == run.train
    with pytest.raises(UserError, match="CUDA|cuda"):
        Trainer(run, tmp_path / "run", device="cuda")
