"""Failures in training: updates that are not finite, spikes of the loss, and models that are useless at the end."""

from __future__ import annotations

import json
import math

from txl.data.lanes import Segment
from txl.errors import Field, TrainingDiverged, UserError
from txl.files import write_whole
from txl.models.language_model import State
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

    If the memory holds numbers that are not finite, the memory of all lanes in all processes is emptied. Too many
    skipped updates in a row, and weights that are not finite themselves, raise TrainingDiverged.
    """
    counters, processes = state.counters, setup.trained.processes
    check_memory(state, setup)
    counters.skipped += 1
    counters.skipped_in_a_row += 1
    if not math.isfinite(result.loss):
        counters.last_loss = None
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
    if counters.skipped_in_a_row <= setup.run.train.max_skipped and not lost:
        setup.display.message(f"step {counters.step}: {what}; the update is skipped")
        return
    saver.finish(state)
    setup.log.record(EventName.STOP, counters.step, reason="not finite")
    path = setup.directory.path / "not-finite.json"
    if processes.is_first:
        write_whole(path, json.dumps(fields | {"step": counters.step, "batch": segment.tokens.tolist()}) + "\n")
    what += ", nor are the weights" if lost else ""
    raise TrainingDiverged(
        f"step {counters.step}: {what}, for {counters.skipped_in_a_row} steps in a row; "
        f"the batch is in {path.name}, {last_checkpoint(setup.directory)}",
        remedy=REMEDY,
    )


def check_memory(state: TrainingState, setup: TrainingSetup) -> None:
    """Empty the memory of all lanes in all processes if it holds numbers that are not finite."""
    if setup.trained.processes.any(not all(is_finite(memory) for memory in state.memory)):
        state.memory = setup.empty_memory()


def is_finite(memory: State) -> bool:
    """Return whether a model's state holds only finite numbers."""
    return all(bool(tensor.isfinite().all()) for tensor in memory.to_tensors().values() if tensor.is_floating_point())


def report_spike(state: TrainingState, setup: TrainingSetup, saver: CheckpointSaver, result: UpdateResult) -> None:
    """Report a spike of the loss, and go back to the last scheduled checkpoint if `train.on_spike` is "rollback"."""
    counters, train = state.counters, setup.run.train
    mean, target = counters.watch.mean, counters.scheduled_step
    setup.log.record(EventName.SPIKE, counters.step, loss=result.loss, grad_norm=result.grad_norm, recent_mean=mean)
    goes_back = train.on_spike == "rollback" and target is not None and counters.rollbacks < train.max_rollbacks
    setup.display.message(
        f"step {counters.step}: the loss leaps to {result.loss:.3f}, from a recent mean of {mean:.3f}"
        + (f"; back to step {target}" if goes_back else "")
    )
    if goes_back and not roll_back(state, setup, saver):
        setup.display.message(f"note: the checkpoint of step {target} is damaged; training goes on")


def roll_back(state: TrainingState, setup: TrainingSetup, saver: CheckpointSaver) -> bool:
    """Restore weights, averages, optimiser, counters and random generators from the last scheduled checkpoint.

    Training continues with the text after the spike and an empty memory: the same text would cause the same spike. The
    result is False, and the state unchanged, if the checkpoint cannot be used.
    """
    was, position, processes = state.counters, state.position, setup.trained.processes
    target, checkpoint = was.scheduled_step, None
    assert target is not None
    saver.finish(state)
    path = setup.directory.checkpoints / checkpoint_name(target)
    is_damaged = False
    if processes.is_first:
        try:
            checkpoint = VerifiedCheckpoint(path)
            checkpoint.verify()
        except UserError:
            is_damaged = True
    # Process 0, which has finished writing, verifies the checkpoint; `any` makes the other processes wait for it.
    if processes.any(is_damaged):
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


def check_end(state: TrainingState, setup: TrainingSetup) -> None:
    """Refuse a trained model that is useless (TrainingDiverged); its last checkpoint is already written."""
    counters = state.counters
    if setup.run.train.eval_every and counters.validation_losses:
        name, loss = "validation loss", counters.validation_losses[-1]
    else:
        is_lost = counters.last_loss is None and counters.skipped_in_a_row > 0
        name, loss = "loss", math.nan if is_lost else counters.last_loss
    reason = uselessness(loss, counters.first_loss, state.model.vocab_size)
    if reason is None:
        return
    reason = f"the last {name} is {reason}"
    setup.log.record(EventName.END, counters.step, elapsed=counters.seconds, diverged=reason)
    raise TrainingDiverged(
        f"step {counters.step} of {setup.run.train.steps}: training diverged, the model in {setup.directory.path} is "
        f"of no use: {reason} (updates skipped: {counters.skipped:,})",
        remedy=("start anew with another ", Field("out"), ", and ", *REMEDY),
    )


def uselessness(loss: float | None, first_loss: float | None, vocab_size: int) -> str | None:
    """Return why a model with this mean loss (nats per token) is useless, or None if it may be usable.

    Uniform guessing costs log V nats per token, and a model that has learnt nothing costs about as much (with an
    adaptive softmax up to twice as much). A loss above twice log V that is also above the loss of the first update
    means divergence.
    """
    if loss is None:
        return None
    if not math.isfinite(loss):
        return f"{loss} nats"
    if loss <= 2 * math.log(vocab_size) or (first_loss is not None and loss <= first_loss):
        return None
    return f"{loss:.3f} nats, where guessing evenly costs {math.log(vocab_size):.3f}"
