"""Fixtures for reproductions that take seconds: six training steps of a tiny model."""

from __future__ import annotations

import dataclasses

import pytest

from txl.config import DataConfig, EvalConfig, RunConfig, TrainConfig, TransformerXLConfig
from txl_lab.paper.catalogue import definitions
from txl_lab.paper.experiment import Experiment
from txl_lab.paper.outcome import gather
from txl_lab.paper.scales import TINY, Scale


def micro_run(steps: int = 6) -> RunConfig:
    return RunConfig(
        name="micro",
        model=TransformerXLConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=8, dropout=0.0),
        train=TrainConfig(
            steps=steps,
            batch_size=2,
            segment=8,
            learning_rate=1e-2,
            log_every=3,
            eval_every=3,
            eval_tokens=100,
            checkpoint_every=2,
            keep_checkpoints=1,
        ),
        eval=EvalConfig(segment=8, mem_len=16, window=16, batch_size=2),
    )


@pytest.fixture(scope="module")
def micro() -> Scale:
    return dataclasses.replace(
        TINY,
        name="micro",
        words=micro_run,
        characters=micro_run,
        attention_lengths=(0.5, 1, 2),
        eval_tokens=80,
        context_step=4,
        longest_context=12,
        targets=20,
        speed_lengths=0.005,
        speed_steps=1,
    )


@pytest.fixture(scope="module")
def words(story) -> DataConfig:
    return DataConfig(corpus=str(story), unit="word")


def experiment(name, scale, data, out, data_dir, seeds=2, **changes):
    definition = dataclasses.replace(definitions()[name], **changes)
    return Experiment(definition, scale, data, out, seeds, "cpu", str(data_dir), quiet=True)


def gathered(it, rows):
    return gather(it.definition, it.scale, it.seeds, it.data.corpus, it.data.unit, rows)


def files(folder):
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {path: path.stat().st_mtime_ns for path in found}
