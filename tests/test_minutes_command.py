"""`txl train --minutes`: the command, what it times, and how its runs go on."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch

from txl.cli import main
from txl.config import RunConfig, with_options
from txl.errors import UserError
from txl.minutes import measured as measuring
from txl.minutes import rule
from txl.minutes.rule import AIM, FEWEST_STEPS, StepTimes, TextFacts, TokenizedText, base_run, choose
from txl.presets import preset
from txl.runs.directory import RunDirectory
from txl.training import timing
from txl.training.loop import TrainingLoop
from txl.training.timing import training_workload


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "my.txt"
    words = random.Random(1).choices(["alpha", "beta", "gamma", "delta\n"], k=15_000)
    path.write_text(" ".join(words), encoding="utf-8")
    return path


TINY = [
    *("--model.n-layer", "1", "--model.d-model", "32", "--train.batch-size", "2", "--train.segment", "8"),
    *("--model.mem-len", "8", "--eval.mem-len", "8", "--eval.window", "none", "--eval.segment", "8"),
]


class Train:
    """`txl train`, with a measurement that always reports two seconds per step."""

    def __init__(self, text: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
        self.text, self.folder, self.capsys = text, folder, capsys
        self.measured: list[RunConfig] = []

    def speed(self, run: RunConfig, *_: object) -> StepTimes:
        self.measured.append(run)
        return StepTimes(2.0, 1e-5)

    def __call__(self, *words: str, out: str = "run") -> int:
        self.measured.clear()
        given = ["--data.corpus", str(self.text), "--out", str(self.folder / out), "--device", "cpu"]
        code = main(["train", *given, "--data-dir", str(self.folder / "data"), *TINY, *words])
        self.printed, self.said = self.capsys.readouterr()
        return code

    def run(self, out: str = "run") -> RunConfig:
        """Return the configuration of a run."""
        return RunDirectory(self.folder / out).config()


@pytest.fixture
def train(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    command = Train(text, tmp_path, capsys)
    monkeypatch.setattr(measuring, "measured_speed", command.speed)
    return command


def without_checkpoints(run: Path) -> None:
    """Leave a run as if its first steps had failed."""
    shutil.rmtree(run / "checkpoints")
    for name in ("latest", "best"):
        (run / name).unlink()


@pytest.mark.parametrize(("unit", "told"), [("byte", ": bytes, prepared in"), ("word", ": 6 words, ")])
def test_the_command_trains_what_it_chose(train: Train, tmp_path: Path, unit: str, told: str):
    assert train("--minutes", "1", "--data.unit", unit) == 0
    run, said = train.run(), train.said
    assert FEWEST_STEPS <= run.train.steps <= 60 * AIM / 2
    assert (run.name, run.data.unit, run.model.n_layer) == ("1-minutes", unit, 1)
    assert told in said
    assert f"{run.train.steps:,} steps" in said
    assert len(train.measured) == 1, "shape and batch were given"


def test_neither_a_run_that_begins_with_it_nor_a_fork_keeps_its_plan(train: Train, tmp_path: Path):
    assert train("--minutes", "1", "--data.unit", "byte") == 0
    first, second = tmp_path / "run", tmp_path / "second"
    planned = RunDirectory(first).config().train.planned_minutes
    assert planned is not None
    words = ["train", str(first), "--init-from", str(first), "--out", str(second), "--train.steps", "2"]
    assert main([*words, "--device", "cpu", "--data-dir", str(tmp_path / "data")]) == 0
    assert train("--fork", "--train.steps", "2", "--train.warmup-steps", "1") == 0
    for path in (second, tmp_path / "run-fork-1"):
        assert RunDirectory(path).config().train.planned_minutes is None
    assert train("--fork") == 0
    assert RunDirectory(first).config().train.planned_minutes == planned, "no fork was needed"


def test_a_text_whose_byte_pairs_would_take_too_long_is_read_in_bytes(train: Train, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    monkeypatch.setattr(rule, "SURELY_PREPARED", 1.0)
    monkeypatch.setattr(measuring, "measured_bpe", lambda facts, vocab_size: asked.append(vocab_size) or 16.0)
    assert train("--minutes", "1", "--dry-run") == 0
    assert "train.planned_minutes" in train.printed
    assert not (train.folder / "run").exists()
    assert ": bytes (BPE would take too long to prepare), prepared in" in train.said
    assert train("--minutes", "2", "--data.vocab-size", "300", "--dry-run") == 0
    assert ": a BPE vocabulary of " in train.said
    assert asked == [1024, 300]


def test_the_same_command_goes_on_without_choosing_again(train: Train, tmp_path: Path):
    assert train("--minutes", "1") == 0
    config = (tmp_path / "run" / "config.json").read_bytes()
    assert [train("--minutes", "1"), train()] == [0, 0]
    assert not train.measured
    assert (tmp_path / "run" / "config.json").read_bytes() == config
    assert train("--minutes", "2") == 2
    assert "holds the run 1-minutes" in train.said


def test_a_run_that_was_stopped_goes_on_exactly(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Killed(BaseException):
        """Imitated end of the process."""

    assert train("--minutes", "1", out="whole") == 0
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    evaluate_and_save, stopped = TrainingLoop._evaluate_and_save, []

    def stop_in_the_middle(loop: TrainingLoop, step: int, is_last: bool) -> None:
        evaluate_and_save(loop, step, is_last)
        if step == 7 and not stopped:
            stopped.append(step)
            raise Killed

    # The choice depends on elapsed time, so the stopped run is given the configuration of the complete run.
    chosen = RunConfig.from_dict(config)
    monkeypatch.setattr("txl.commands.train._chosen", lambda *_: chosen)
    monkeypatch.setattr(TrainingLoop, "_evaluate_and_save", stop_in_the_middle)
    with pytest.raises(Killed):
        train("--minutes", "1", out="stopped")
    monkeypatch.setattr("txl.commands.train._chosen", None)
    assert stopped
    assert train("--minutes", "1", out="stopped") == 0
    losses = [
        [event["nll"] for event in RunDirectory(tmp_path / name).events() if event["event"] == "valid"][-1]
        for name in ("whole", "stopped")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "0"], "--minutes is 0.0; expected a number above 0"),
        (["--minutes", "-3"], "--minutes is -3.0"),
        (["--minutes", "nan"], "--minutes is nan"),
        (["--minutes", "inf"], "--minutes is inf"),
        (["--minutes", "soon"], "--minutes: expected a number, found 'soon'"),
        (["stdlib-bpe", "--minutes", "5"], "--minutes and PRESET were both given"),
        (["--minutes", "5", "--train.steps", "100"], "--train.steps"),
        (["--minutes", "5", "--init-from", "elsewhere"], "--init-from"),
        (["--minutes", "5", "--extend"], "--extend"),
        (["--minutes", "5", "--model.family", "vanilla"], "--model.family vanilla: "),
        (["--minutes", "5", "--model.kind", "lstm"], "--model.kind lstm: "),
        (["--minutes", "5", "--model.encoding", "sinusoid"], "--model.encoding sinusoid: "),
        (["--minutes", "5", "--train.tf32"], "TF32 needs an NVIDIA GPU"),
        (["--minutes", "5", "--train.eval-batch-size", "9000"], "(--train.eval-batch-size)"),
        (["--minutes", "5", "--train.segment", "20000"], "2 lanes of "),
        (["--minutes", "5", "--data.corpus", "ptb"], "--data.corpus ptb: it has presets of its own"),
        (["--minutes", "5", "--data.corpus", "nowhere.txt"], "nowhere.txt"),
        (["--minutes", "0.05"], "remain for training"),
        (["--minutes", "5", "--train.learning-rate", "-1"], "--train.learning-rate is -1.0"),
        (["--minutes", "5", "--train.segment", "-4"], "--train.segment is -4"),
        (["--minutes", "5", "--train.batch-size", "0"], "--train.batch-size is 0"),
        (["--minutes", "5", "--train.micro-batches", "3"], "--train.micro-batches is 3"),
        (["--minutes", "5", "--data.max-words", "5"], "data.max-words"),
        ([], "no preset is named"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(train: Train, tmp_path: Path, words: list[str], said: str):
    assert train(*words) == 2
    assert said in train.said
    assert not (tmp_path / "run").exists()
    assert not train.measured or "remain for training" in said


def test_a_directory_that_cannot_be_used_is_refused_before_anything_is_measured(
    train: Train, text: Path, tmp_path: Path
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.doc").touch()
    assert train("--minutes", "5") == 2
    assert "it contains thesis.doc" in train.said
    assert main(["train", "--minutes", "5", "--corpus", str(text)]) == 2
    assert "--out: missing" in train.capsys.readouterr().err
    assert not train.measured
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_timed_is_what_is_trained(dtype: str):
    run = with_options(preset("stdlib-bpe"), {"train.dtype": dtype, "model.attention": "auto", "model.n_layer": "1"})
    model, _ = training_workload(run, 64, "cpu")
    assert {str(each.dtype) for each in model.parameters()} == {f"torch.{dtype}"}
    run.model.attention = "compiled"
    if dtype == "float64":
        with pytest.raises(UserError, match="cannot train in torch.float64"):
            training_workload(run, 64, "cpu")


def test_layers_without_a_compiler_are_timed_as_they_are_trained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "compile_layers", lambda *_: "no compiler")
    run = with_options(preset("stdlib-bpe"), {"train.compile": "true", "model.n_layer": "1"})
    training_workload(run, 64, "cpu", must_compile=False)
    with pytest.raises(UserError, match="no working compiler here"):
        training_workload(run, 64, "cpu")


def test_time_that_went_by_in_the_choice_is_counted(train: Train, monkeypatch: pytest.MonkeyPatch):
    real = rule.choose

    def slow(*given):
        choice = real(*given)
        monkeypatch.setattr(rule, "AIM", -1.0)  # as if the minute had passed
        return choice

    monkeypatch.setattr(rule, "choose", slow)
    assert train("--minutes", "1") == 2
    said = train.said
    assert "0:00 remain for training" in said
    assert "20 steps or more; give more minutes" in said


def test_options_that_fit_the_choice_and_not_the_preset_are_taken(train: Train, tmp_path: Path):
    assert train("--minutes", "1", "--train.average-from", "9", "--train.min-learning-rate", "0.004") == 0
    run = train.run()
    assert run.train.average_from == 9
    late = {"train.average_from": "5000", "train.min_learning_rate": "0.005"}
    measuring.check_options(base_run(60), late, "cpu")


def test_several_processes_do_not_choose(train: Train, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train("--minutes", "1") == 2
    assert "--minutes: measures one process" in train.said


def test_what_was_chosen_for_another_text_and_never_trained_is_chosen_anew(train: Train, tmp_path: Path):
    assert train("--minutes", "1", "--data.unit", "byte") == 0
    first = train.run()
    without_checkpoints(tmp_path / "run")
    assert train("--minutes", "1", "--data.unit", "byte") == 0
    assert not train.measured, "the same text and options go on with the choice"
    without_checkpoints(tmp_path / "run")
    train.text.rename(tmp_path / "other.txt")
    train.text = tmp_path / "other.txt"
    assert train("--minutes", "1") == 0
    assert train.measured
    second = train.run()
    assert (first.data.unit, second.data.unit, second.data.corpus) == ("byte", "bpe", str(train.text))
    without_checkpoints(tmp_path / "run")
    assert train("--minutes", "2") == 0
    assert train.run().name == "2-minutes"


def test_a_preset_s_run_without_a_checkpoint_is_not_replaced(train: Train, tmp_path: Path):
    RunDirectory(tmp_path / "run").path.mkdir()
    RunDirectory(tmp_path / "run").write_config(preset("stdlib-bpe"))
    assert train("--minutes", "2") == 2
    assert "holds the run stdlib-bpe, which --minutes 2 did not choose" in train.said


def test_without_evaluations_none_is_timed(text: Path):
    given = {"data.corpus": str(text), "data.unit": "byte", "train.eval_every": "0", "train.eval_batch_size": "9000"}
    run = with_options(preset("stdlib-bpe"), given | {"model.n_layer": "1", "train.batch_size": "2"})
    corpus = measuring.open_corpus(str(text), config=run.data, data_dir=text.parent / "data", quiet=True)
    assert measuring.measured_speed(run, corpus, "cpu", 1.0).evaluated_token == math.inf
    facts = TokenizedText(TextFacts(60_000, 20_000, 60), 60_000, 3000, 256)
    choice = choose(run, facts, 60, lambda run: StepTimes(0.1, math.inf), given)
    assert choice.run.train.steps == 600


def test_shapes_that_the_machine_or_the_text_has_no_room_for_are_not_timed(text: Path, monkeypatch: pytest.MonkeyPatch):
    run = with_options(
        preset("stdlib-bpe"), {"data.corpus": str(text), "data.unit": "byte", "train.batch_size": "9000"}
    )
    corpus = measuring.open_corpus(str(text), config=run.data, data_dir=text.parent / "data", quiet=True)
    assert measuring.measured_speed(run, corpus, "cpu", 1.0).step == math.inf, "lanes shorter than a segment"

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(measuring, "training_workload", full)
    run.train.batch_size = 2
    assert measuring.measured_speed(run, corpus, "cpu", 1.0).step == math.inf


@pytest.mark.parametrize("tf32", [True, False])
def test_steps_are_timed_in_the_precision_that_they_are_trained_in(tf32: bool, monkeypatch: pytest.MonkeyPatch):
    precisions = []
    monkeypatch.setattr(timing, "check_trainable", lambda *_: None)
    real = timing.training_step

    def watched(*given):
        precisions.append(torch.get_float32_matmul_precision())
        return real(*given)

    monkeypatch.setattr(timing, "training_step", watched)
    run = with_options(preset("stdlib-bpe"), {"train.tf32": str(tf32).lower(), "model.n_layer": "1"})
    training_workload(run, 64, "cpu")[1]()
    assert precisions == ["high" if tf32 else "highest"]


def test_a_text_that_is_too_small_is_refused(train: Train, tmp_path: Path):
    (tmp_path / "small.txt").write_text("too little\n" * 100)
    assert train("--minutes", "5", "--data.corpus", str(tmp_path / "small.txt")) == 2
    assert "990 bytes to train on" in train.said
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == []
