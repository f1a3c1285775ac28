"""Measure the time for which a checkpoint interrupts training, written in the background or in the training loop.

    python -m benchmarks.saving results/saving.json

A preset is trained for a few steps on the sources of the standard library, with a checkpoint after every second step.
The result is the medians of: seconds to copy the state; seconds to write, verify and sync it; seconds of
a step alone, of a step during which a checkpoint is written, and of a pause between two steps with a checkpoint in it.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import txl
from txl.config import with_options
from txl.runs.directory import RunDirectory
from txl.training import loop as loop_module
from txl_lab.records import measure_and_record


def trained(preset: str, steps: int, in_background: bool, folder: Path) -> dict[str, float]:
    """Train once, and time every step and every pause between two steps."""
    options = {
        "data.corpus": "stdlib",
        "train.steps": str(steps),
        "train.batch_size": "4",
        "train.segment": "128",
        "model.mem_len": "128",
        "train.warmup_steps": "0",
        "train.eval_every": "0",
        "train.checkpoint_every": "2",
        "train.keep_checkpoints": "1",
        "train.async_checkpoints": str(in_background).lower(),
    }
    times, real = [], loop_module.training_step

    def timed(*arguments):
        began = time.perf_counter()
        result = real(*arguments)
        times.append((began, time.perf_counter()))
        return result

    loop_module.training_step = timed
    try:
        txl.Trainer(with_options(txl.preset(preset), options), out=folder, quiet=True).fit()
    finally:
        loop_module.training_step = real
    events = [event for event in RunDirectory(folder).events() if event["event"] == "checkpoint"]
    lengths = [end - began for began, end in times]
    pauses = [began - end for (_, end), (began, _) in itertools.pairwise(times)]
    # Steps are counted from 0 here: a checkpoint follows every odd step, and is written during the next, even step.
    return {
        "state_bytes": sum(path.stat().st_size for path in RunDirectory(folder).checkpoint("latest").iterdir()),
        "copy_seconds": statistics.median(event["copy_seconds"] for event in events),
        "write_seconds": statistics.median(event["write_seconds"] for event in events),
        "pause_with_checkpoint_seconds": statistics.median(pauses[1::2]),
        "pause_without_seconds": statistics.median(pauses[2::2]),
        "step_seconds_first_after_checkpoint": statistics.median(lengths[2::2]),
        "step_seconds_before_any_checkpoint": lengths[1],
    }


def measure(preset: str = "enwik8-12L", steps: str = "14") -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            name: trained(preset, int(steps), in_background, Path(folder) / name)
            for name, in_background in (("in_background", True), ("at_once", False))
        }
    return {"preset": preset, "steps": int(steps), **ways}


if __name__ == "__main__":
    measure_and_record("saving", measure)
