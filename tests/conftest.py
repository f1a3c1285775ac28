"""Shared fixtures and helpers: real text, and a small run that is trained once."""

from __future__ import annotations

import importlib.util
import os

# Parallel test processes with several threads each would spend more time waiting for one another than computing. This
# must be set before torch is imported; commands that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

from tests import shapes

shapes.install()

from txl.config import RunConfig, leaf_fields, with_options

# Tested commands need these signals, which a background job or nohup ignores.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

SENTENCES = (
    "The river rose in the night, and by morning the lower fields were under water.\n",
    "Nobody in the village could remember such a flood; not even the oldest of them.\n",
    "\n",
    "    They carried what they could to the mill: flour, chairs, a clock that had stopped.\n",
    "“How long?” she asked. “Until it is over,” said the miller — and that was that.\n",
)


@pytest.fixture(autouse=True)
def shapes_checked_anew():
    """Check shapes in every test as if it ran alone."""
    shapes.forget()


@pytest.fixture
def any_shapes(monkeypatch):
    """Disable shape checks, so that tensors of wrong shapes reach the code."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def right_bfloat16(monkeypatch):
    """Correct Triton's interpreter, which multiplies bfloat16 bits as integers and truncates where GPUs round."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def rounding(self: Any, source: Any, dtype: Any) -> Any:
        if dtype.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
            return cast(self, source, dtype)
        rounded = torch.tensor(source.data).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    def product(self: Any, left: Any, right: Any, *others: Any) -> Any:
        left, right = (
            cast(self, each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (left, right)
        )
        return dot(self, left, right, *others)

    for name in ("cast_impl", "create_fp_trunc"):
        monkeypatch.setattr(builder, name, rounding)
    monkeypatch.setattr(builder, "create_dot", product)


@pytest.fixture(scope="session", name="test_data")
def folder_of_real_text() -> Path:
    """Folder of real text, the value of the environment variable TXL_TEST_DATA."""
    folder = os.environ.get("TXL_TEST_DATA")
    if not folder:
        pytest.skip("TXL_TEST_DATA names no folder of real text")
    return Path(folder)


@pytest.fixture(scope="session")
def story(tmp_path_factory) -> Path:
    """Small UTF-8 text with regularities to learn: numbered lines made of a few sentences."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    lines = [f"{number}. {SENTENCES[number * 7 % len(SENTENCES)]}" for number in range(400)]
    path.write_text("".join(lines), encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    """Directory for the corpora that tests prepare."""
    return tmp_path_factory.mktemp("corpora")


def small_run(corpus: str, **options: str) -> RunConfig:
    """Return a configuration that trains in a second or two; options are set by name, as in `model.n_layer="3"`."""
    base = {
        "data.corpus": corpus,
        "model.n_layer": "2",
        "model.d_model": "16",
        "model.n_head": "2",
        "model.d_head": "8",
        "model.d_inner": "24",
        "model.mem_len": "8",
        "model.dropout": "0.1",
        "model.dropatt": "0.1",
        "train.steps": "12",
        "train.batch_size": "4",
        "train.segment": "8",
        "train.learning_rate": "0.01",
        "train.warmup_steps": "2",
        "train.log_every": "3",
        "train.eval_every": "6",
        "train.eval_tokens": "400",
        "train.checkpoint_every": "4",
        "eval.segment": "8",
        "eval.mem_len": "16",
        "eval.window": "16",
        "eval.batch_size": "4",
    }
    return with_options(RunConfig(), base | options)


def options_of(run: RunConfig) -> list[str]:
    """Return a configuration as command-line options."""
    given = []
    for name, _, _, value in leaf_fields(run):
        if name == "name":
            continue
        text = "none" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        given.append(f"--{name.replace('_', '-')}={text}")
    return given


@pytest.fixture(scope="session")
def trained(story, data_dir, tmp_path_factory) -> Path:
    """Run directory of a small model, trained to the last step. Tests that change files work on a copy."""
    from txl.training.trainer import Trainer

    out = tmp_path_factory.mktemp("runs") / "small"
    Trainer(small_run(str(story)), out, data_dir=data_dir, quiet=True).fit()
    return out
