"""What several test files share: real text, and a small run that has been trained once."""

from __future__ import annotations

import os

# Several test processes with several threads each would wait for one another more than they compute. Set before torch
# is imported, and inherited by the commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
from pathlib import Path

import jaxtyping
import pytest

from tests import shapes

shapes.install()

from txl.config import RunConfig, leaf_fields, with_options

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background: the commands under test must not be
    signal.signal(signal.SIGINT, signal.default_int_handler)

SENTENCES = (
    "The river rose in the night, and by morning the lower fields were under water.\n",
    "Nobody in the village could remember such a flood; not even the oldest of them.\n",
    "\n",
    "    They carried what they could to the mill: flour, chairs, a clock that had stopped.\n",
    "“How long?” she asked. “Until it is over,” said the miller — and that was that.\n",
)


@pytest.fixture
def any_shapes(monkeypatch):
    """Leave shapes unchecked, so that wrong ones reach the code."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session", name="test_data")
def folder_of_real_text() -> Path:
    """The folder of real text that TXL_TEST_DATA names."""
    folder = os.environ.get("TXL_TEST_DATA")
    if not folder:
        pytest.skip("TXL_TEST_DATA names no folder of real text")
    return Path(folder)


@pytest.fixture(scope="session")
def story(tmp_path_factory) -> Path:
    """A small UTF-8 text with an inner order: numbered lines made of a few sentences."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    lines = [f"{number}. {SENTENCES[number * 7 % len(SENTENCES)]}" for number in range(400)]
    path.write_text("".join(lines), encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    """Where the tests' corpora are prepared."""
    return tmp_path_factory.mktemp("corpora")


def small_run(corpus: str, **options: str) -> RunConfig:
    """A configuration that trains in a second or two; options as on the command line, `model.n_layer="3"`."""
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
    """A configuration as command-line options."""
    given = []
    for name, _, _, value in leaf_fields(run):
        if name == "name":
            continue
        text = "none" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        given.append(f"--{name.replace('_', '-')}={text}")
    return given


@pytest.fixture(scope="session")
def trained(story, data_dir, tmp_path_factory) -> Path:
    """A run directory of a small model that was trained to its end. Tests that change it copy it."""
    from txl.training.trainer import Trainer

    out = tmp_path_factory.mktemp("runs") / "small"
    Trainer(small_run(str(story)), out, data_dir=data_dir, quiet=True).fit()
    return out
