"""`txl demo`: the whole command, and what it adjusts to the machine."""

from __future__ import annotations

import pytest

import txl
from tests.conftest import options_of, small_run
from txl.cli import main
from txl.commands.demo import MARK, steps_within, suited, whole_lines
from txl.config import RunConfig, TransformerXLConfig, with_options
from txl.runs import environment
from txl.runs.directory import RunDirectory
from txl.runs.events import DemoEvent, EndEvent, SampleEvent, SweepEvent, select
from txl.training import timing


def test_the_demo_goes_all_the_way(story, tmp_path, data_dir, capsys):
    out = tmp_path / "demo"
    words = ["demo", "--out", str(out), "--data-dir", str(data_dir), "--test-tokens", "1000"]
    words += options_of(small_run(str(story)))
    assert main(words) == 0
    printed, told = capsys.readouterr()
    for part in (MARK, "with memory 16", "without", "lzma that has seen it too: ", str(out / "report.html")):
        assert part in printed
    assert f"$ txl train stdlib-bpe --out {out} --model.n-layer 2" in told
    events = RunDirectory(out).events()
    samples = select(events, SampleEvent)
    assert len({sample["prompt"] for sample in samples}) == 3
    assert all(sample["prompt"] in story.read_text() and sample["text"] for sample in samples)
    [whole], [trained], [sweep] = select(events, DemoEvent), select(events, EndEvent), select(events, SweepEvent)
    assert whole["seconds"] > trained["elapsed"] > 0
    row = sweep["rows"][-1]
    assert (row["mem_len"], row["tokens"] + row["dropped"] + 1, row["dtype"]) == (16, 1000, "float32")
    assert (out / "memory-curve.svg").is_file()
    config = (out / "config.json").read_bytes()
    assert main(words) == 0  # the run goes on, and nothing is adjusted to the machine again
    assert (out / "config.json").read_bytes() == config
    capsys.readouterr()
    assert main([*words, "--train.learning-rate", "0.5"]) == 2
    assert "learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("le\nwhole\nlines\npar", "whole\nlines\n"),
        ("no line", "no line"),
        ("a\n\n \nb", "a\n\n \nb"),
        ("a long paragraph\nHeading\nanother paragraph", "a long paragraph\nHeading\nanother paragraph"),
        ("\ufffd\u6f22\u5b57\ufffd", "\u6f22\u5b57"),
    ],
)
def test_a_context_is_whole_lines(text, expected):
    assert whole_lines(text) == expected


@pytest.mark.parametrize(
    ("step_seconds", "least", "steps"),
    # 260 seconds less 350 steps' time are left for training.
    [
        (0.05, 500, 2400),
        (0.1, 500, 2200),
        (0.15, 500, 1300),
        (0.2, 500, 900),
        (0.29, 500, 500),
        (100.0, 500, 500),
        (0.5, 900, 900),
    ],
)
def test_as_many_steps_as_fit_into_five_minutes(step_seconds, least, steps):
    assert steps_within(300, step_seconds, least, 2400) == steps


def suited_run(monkeypatch: pytest.MonkeyPatch, seconds: float, flags: str = "", **options: str) -> RunConfig:
    """Return the demo's configuration on a processor with `flags` that takes `seconds` for a step."""
    given = {name.replace("__", "."): value for name, value in options.items()}
    monkeypatch.setattr(environment, "cpu_flags", flags.split)
    monkeypatch.setattr(timing, "timed", lambda *_: seconds)
    monkeypatch.setattr(timing, "training_workload", lambda *_, **__: (None, None))
    return suited(with_options(txl.preset("stdlib-bpe"), given), given, "cpu")


@pytest.mark.parametrize(
    ("seconds", "options", "steps", "rate", "init"),
    [
        (0.01, {}, 2400, 0.0032, "normal"),
        (0.15, {}, 1300, 0.0039, "induction"),
        (0.5, {}, 500, 0.0054, "induction"),
        (0.5, {"model__init": "xavier"}, 900, 0.0044, "xavier"),
        (0.5, {"model__pre_norm": "false"}, 900, 0.0044, "normal"),
        (0.5, {"train__steps": "2001"}, 2001, 0.0034, "normal"),
        (0.5, {"train__learning_rate": "0.1"}, 500, 0.1, "induction"),
        (0.5, {"data__unit": "byte"}, 500, 0.0054, "induction"),
        (0.5, {"data__unit": "word"}, 2400, 0.0032, "normal"),  # the size of its vocabulary depends on the text
    ],
)
def test_steps_rate_and_first_weights_suit_the_machine(monkeypatch, capsys, seconds, options, steps, rate, init):
    run = suited_run(monkeypatch, seconds, **options)
    assert isinstance(run.model, TransformerXLConfig)
    assert (run.train.steps, run.train.learning_rate, run.model.init) == (steps, rate, init)
    told = f"{steps:,} training steps instead of 2,400"
    assert (told in capsys.readouterr().err) == (steps < 2400 and "train__steps" not in options)


@pytest.mark.parametrize(
    ("flags", "options", "dtype"),
    [
        ("avx2 avx512f", {}, "float32"),
        ("avx512f avx512_bf16", {}, "bfloat16"),
        ("avx512f avx512_bf16", {"train__dtype": "float32"}, "float32"),
    ],
)
def test_arithmetic_suits_the_machine(monkeypatch, flags, options, dtype):
    assert suited_run(monkeypatch, 0.01, flags, **options).train.dtype == dtype


def test_a_model_of_another_family_has_no_heads_that_copy(monkeypatch):
    vanilla = {"model__family": "vanilla", "model__encoding": "learned", "model__mem_len": "0", "eval__mem_len": "0"}
    run = suited_run(monkeypatch, 0.5, model__qk_norm="false", eval__window="none", **vanilla)
    assert (run.train.steps, run.model.first_weights) == (900, "normal")
