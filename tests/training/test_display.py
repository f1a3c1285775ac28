"""Display of training: plain lines without a terminal, a live panel on a terminal, and TensorBoard."""

from __future__ import annotations

import math
import os
import pty
import subprocess
import sys
import textwrap

import pytest
from tests.conftest import small_run
from tests.training.test_guards import events
from tests.training.test_trainer import stop_after, train

from txl.errors import RunInterrupted, UserError
from txl.training.display import Display
from txl.training.pace import StepFigures

FIGURES = StepFigures(
    step=40, loss=math.log(2), tokens_per_second=12345.6, learning_rate=2.5e-4, grad_norm=0.5, seconds_left=3723.4,
    tokens=40_000, tokens_read=40_000, elapsed=3.3,
)  # fmt: skip


def test_plain_lines_go_to_standard_error(capsys):
    with Display("demo", "byte", 100, quiet=False) as display:
        display.message("[weights] of a/b")
        display.show(FIGURES)
        display.line(FIGURES)
        display.valid(40, math.log(4), 5000, is_best=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "[weights] of a/b",
        "step 40/100 | loss 0.6931 | bpc 1.0000 | 12,346 tokens/s | lr 2.50e-04 | grad norm 0.500 | left 1:02:03",
        "validation at step 40: bpc 2.0000 on 5,000 tokens, the best so far",
    ]


def test_a_message_is_one_line_whatever_its_paths_hold(capsys):
    with Display("demo", "byte", 100, quiet=False) as display:
        display.message("in two\nlines")
    assert capsys.readouterr().err == "in two lines\n"


def test_quiet_says_nothing(capsys):
    with Display("demo", "byte", 100, quiet=True) as display:
        display.message("text")
        display.show(FIGURES)
        display.line(FIGURES)
        display.valid(40, 1.0, 5, is_best=False)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_terminal_gets_a_live_panel():
    program = textwrap.dedent("""
        from txl.training.display import Display
        from txl.training.pace import StepFigures
        with Display("[demo]", "word", 100, quiet=False) as display:
            display.message("a [note]")
            display.show(StepFigures(40, 1.0, 5000.0, 0.001, 0.25, 61.0, 9, 9, 3.0))
            display.valid(40, 2.0, 5, is_best=False)
    """)
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=terminal, stdout=subprocess.PIPE, env=environment, check=True
    )
    os.close(terminal)
    shown = ""
    try:
        while block := os.read(controller, 65536):
            shown += block.decode()
    except OSError:  # how Linux reports that the other end is closed
        pass
    os.close(controller)
    assert done.stdout == b""
    for text in (
        "[demo]", "a [note]", "40/100", "1.0000 nats", "2.718", "ppl 7.389 at step 40", "5,000 tokens/s", "1.00e-03",
        "0.250", "1:01",
    ):  # fmt: skip
        assert text in shown


def test_figures_for_tensorboard(story, data_dir, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(small_run(str(story), **{"train.tensorboard": "true"}), tmp_path / "run", data_dir)
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    logged = {event["step"]: event["loss"] for event in events(tmp_path / "run", "train")}
    shown = {point.step: point.value for point in read.Scalars("train/loss")}
    assert shown == pytest.approx(logged)
    assert [point.step for point in read.Scalars("valid/bpc")] == [6, 12]


def test_a_run_that_is_stopped_has_written_its_figures_for_tensorboard(story, data_dir, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stop_after(monkeypatch, 3)
    with pytest.raises(RunInterrupted):
        train(
            small_run(str(story), **{"train.tensorboard": "true", "train.log_every": "1"}), tmp_path / "run", data_dir
        )
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [point.step for point in read.Scalars("train/loss")] == [1, 2, 3]


def test_without_tensorboard_one_line_says_what_to_install(story, data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="the package tensorboard is missing"):
        train(small_run(str(story), **{"train.tensorboard": "true"}), tmp_path / "run", data_dir)
    assert not (tmp_path / "run").exists()
