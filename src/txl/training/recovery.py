"""Handling of failures in training: updates that are not finite, and spikes of the loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from txl.data.lanes import Segment
from txl.errors import TrainingDiverged, UserError
from txl.files import write_whole
from txl.runs.checkpoints import VerifiedCheckpoint, checkpoint_name, remove_later
from txl.runs.events import EventName
from txl.training.saver import REMEDY, CheckpointSaver, is_lost, last_checkpoint, point_at_best
from txl.training.snapshot import restore
from txl.training.state import TrainingSetup, TrainingState
from txl.training.step import UpdateResult


def skip_update(
    state: TrainingState, setup: TrainingSetup, saver: CheckpointSaver, result: UpdateResult, segment: Segment
) -> None:
    """Count and report an update that was skipped because its loss or gradient was not finite.

    If the memory holds numbers that are not finite, the memory of all lanes in all processes is emptied.

    Raises:
        TrainingDiverged: if too many updates in a row were skipped, or the weights themselves are not finite.
    """
    counters, train, processes = state.counters, setup.run.train, setup.trained.processes
    counters.skipped += 1
    counters.skipped_in_a_row += 1
    if not math.isfinite(result.loss):
        counters.last_loss = None
    if processes.any(not all(is_finite(memory) for memory in state.memory)):
        state.memory = setup.empty_memory()
    fields = {
        "loss": str(result.loss),
        "grad_norm": str(result.grad_norm),
        "epoch": segment.position.epoch,
        "offset": segment.position.offset,
        "tokens": list(segment.tokens.shape),
    }
    setup.log.record(EventName.SKIPPED, counters.step, in_a_row=counters.skipped_in_a_row, **fields)
    what = f"the loss ({result.loss}) or the gradient's norm ({result.grad_norm}) is not finite"
    # Weights that are not finite stay so in later steps, and must not be saved in a checkpoint.
    lost = is_lost(setup, state.model)
    if counters.skipped_in_a_row <= train.max_skipped and not lost:
        setup.display.message(f"step {counters.step}: {what}; the update is skipped")
        return
    saver.finish(state)
    setup.log.record(EventName.STOP, counters.step, reason="not finite")
    path = setup.directory.path / "not-finite.json"
    if processes.is_first:
        details = fields | {"step": counters.step, "batch": segment.tokens.tolist()}
        write_whole(path, json.dumps(details) + "\n")
    weights = "are not finite themselves" if lost else "were not updated"
    raise TrainingDiverged(
        f"step {counters.step}: {what}, for {counters.skipped_in_a_row} steps in a row; the weights {weights}, the "
        f"batch and its position are in {path.name} and {last_checkpoint(setup.directory)}",
        remedy=REMEDY,
    )


def is_finite(memory: Any) -> bool:
    """Return whether a model's state holds only finite numbers."""
    return all(bool(tensor.isfinite().all()) for tensor in memory.to_tensors().values() if tensor.is_floating_point())


def report_spike(state: TrainingState, setup: TrainingSetup, saver: CheckpointSaver, result: UpdateResult) -> None:
    """Report a spike of the loss, and go back to the last scheduled checkpoint if `train.on_spike` is "rollback"."""
    counters, train = state.counters, setup.run.train
    mean = counters.watch.mean
    setup.log.record(EventName.SPIKE, counters.step, loss=result.loss, grad_norm=result.grad_norm, recent_mean=mean)
    goes_back = (
        train.on_spike == "rollback"
        and counters.scheduled_step is not None
        and counters.rollbacks < train.max_rollbacks
    )
    setup.display.message(
        f"step {counters.step}: the loss leaps to {result.loss:.3f}, from a recent mean of {mean:.3f}"
        + (f"; back to step {counters.scheduled_step}" if goes_back else "")
    )
    if goes_back and not roll_back(state, setup, saver):
        setup.display.message(f"note: the checkpoint of step {counters.scheduled_step} is damaged; training goes on")


def roll_back(state: TrainingState, setup: TrainingSetup, saver: CheckpointSaver) -> bool:
    """Restore weights, averages, optimiser, counters and random generators from the last scheduled checkpoint.

    Training continues with the text after the spike and an empty memory: the same text would cause the same spike.

    Returns:
        False if the checkpoint cannot be used; the state is then unchanged.
    """
    was, position, processes = state.counters, state.position, setup.trained.processes
    target = was.scheduled_step
    assert target is not None
    saver.finish(state)
    path = setup.directory.checkpoints / checkpoint_name(target)
    checkpoint = _verified(path) if processes.is_first else None
    # Process 0, which has finished writing, verifies the checkpoint; `any` makes the other processes wait for it.
    if processes.any(processes.is_first and checkpoint is None):
        return False
    restore(state, setup, checkpoint or VerifiedCheckpoint(path))
    # The memory of the checkpoint belongs to other text than the next segment.
    state.position, state.memory = position, setup.empty_memory()
    counters = state.counters
    counters.rollbacks = was.rollbacks + 1
    counters.skipped, counters.seconds = was.skipped, was.seconds
    setup.log.record(EventName.ROLLBACK, counters.step, from_step=was.step)
    if processes.is_first:
        point_at_best(setup.directory, counters.best_step)
        remove_later(setup.directory.checkpoints, target)
    # The checkpoint has the position before the spike; a resume must not read that text again.
    saver.saved_step = None
    saver.save(state)
    return True


def _verified(path: Path) -> VerifiedCheckpoint | None:
    try:
        checkpoint = VerifiedCheckpoint(path)
        checkpoint.verify()
        return checkpoint
    except UserError:
        return None
