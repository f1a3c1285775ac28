"""Errors with a structure, and the options by which the command line tells them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from txl import cli
from txl.commands import presets as presets_command
from txl.commands.parser import build_parser
from txl.errors import Field, RunInterrupted, UserError, is_out_of_memory


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UserError("plain"), "plain"),
        (UserError(field="mem_len", value=-1, expected="0 or more"), "mem_len is -1; expected 0 or more"),
        (UserError("not empty", field="out", value=Path("a"), remedy="give another"), "out a: not empty; give another"),
        (UserError("damaged", value="my run"), "'my run': damaged"),
        (UserError(field="a.b", value=True, but="c is 1", expected=("no ", Field("c"))), "a.b is true, but c is 1; expected no c"),
        (UserError((UserError("e", field="f"), "; use ", Field("g", None))), "f: e; use g none"),
        (UserError(field="steps", value="5"), "steps is '5'"),
        (UserError(field="ids", value=tuple(range(9))), "ids is [0, 1, 2, 3, 4, 5, ...]"),
    ],
)  # fmt: skip
def test_an_error_says_field_value_expectation_and_remedy(error, text):
    assert str(error) == text
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field) == (text, error.field)


def test_an_exit_code_travels_with_the_error():
    again = pickle.loads(pickle.dumps(RunInterrupted("stopped", 143)))
    assert (str(again), again.exit_code) == ("stopped", 143)


@pytest.mark.parametrize(
    ("words", "field", "option"),
    [
        (["train", "ptb"], "model.mem_len", "--model.mem-len"),
        (["train", "ptb"], "init_from", "--init-from"),
        (["train", "ptb"], "out", "--out"),
        (["train", "ptb"], "preset", "PRESET"),
        (["eval", "runs/a"], "mem_len", "--mem-len"),
        (["eval", "runs/a"], "model.mem_len", "model.mem_len"),
        (["data", "info", "a"], "data_dir", "--data-dir"),
        (["data", "info", "data"], "nothing", "nothing"),
    ],
)
def test_a_setting_is_told_by_the_option_of_the_command(words, field, option):
    parser = build_parser()
    command = parser.chosen(parser.parse_args(words))
    error = UserError(field=field, value=1, remedy=("set ", Field(field, 0)))
    assert error.text(command.name_of) == f"{option} is 1; set {option} 0"


def after(first: Exception, second: Exception) -> Exception:
    """Return the second exception as it is raised while the first one is handled."""
    try:
        try:
            raise first
        finally:
            raise second
    except Exception as error:
        return error


CAPTURE = "CUDA error: operation failed due to a previous error during capture"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA driver error: cudaErrorMemoryAllocation"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (after(torch.OutOfMemoryError("CUDA out of memory."), torch.AcceleratorError(CAPTURE)), True),
        (after(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), RuntimeError(CAPTURE)), True),
        (after(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), RuntimeError(CAPTURE)), False),
        (after(torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("a shape is wrong")), False),
        (RuntimeError(CAPTURE), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_is_not_enough(error, expected):
    assert is_out_of_memory(error) is expected


def test_memory_that_ends_within_a_recording_gives_one_line(monkeypatch, capsys):
    error = after(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), torch.AcceleratorError(CAPTURE))

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(presets_command, "run", fails)
    assert cli.main(["presets"]) == 2
    assert capsys.readouterr().err.startswith(
        "txl: error: out of memory; use a smaller model, batch, segment or memory"
    )
