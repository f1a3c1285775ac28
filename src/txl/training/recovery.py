"""What a training loop does when something goes wrong: numbers that are not finite, a loss that leaps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from txl.data.streams import Segment
from txl.errors import TrainingDiverged, UserError
from txl.files import write_whole
from txl.runs.checkpoints import checkpoint_name, remove_later, verify_checkpoint
from txl.training.progress import is_finite, uselessness
from txl.training.saver import point_at_best
from txl.training.snapshot import restore
from txl.training.step import StepResult

if TYPE_CHECKING:
    from txl.training.loop import TrainingLoop

_REMEDY = "try a lower --train.learning-rate or a longer --train.warmup-steps"


def skip_update(loop: TrainingLoop, result: StepResult, segment: Segment) -> None:
    """The loss or the gradient was not finite: the weights are as they were; go on, or stop if it happens again.

    Memory that the segment has filled with what is not finite is emptied, in all lanes and processes alike.

    Raises:
        TrainingDiverged: if it has happened too often in a row, or the weights are lost.
    """
    progress, train = loop.progress, loop.run.train
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if loop.trained.processes.any(not all(is_finite(state) for state in loop.states)):
        loop.states = loop.empty_memory()
    fields = {
        "loss": str(result.loss),
        "grad_norm": str(result.grad_norm),
        "epoch": segment.position.epoch,
        "offset": segment.position.offset,
        "tokens": list(segment.tokens.shape),
    }
    loop.record("skipped", in_a_row=progress.skipped_in_a_row, **fields)
    what = f"the loss ({result.loss}) or the gradient's norm ({result.grad_norm}) is not finite"
    # Weights that are not finite themselves will never be so again, and must not get into a checkpoint.
    is_lost = _is_lost(loop, loop.model)
    if progress.skipped_in_a_row <= train.max_skipped and not is_lost:
        loop.display.message(f"step {progress.step}: {what}; the update is skipped")
        return
    loop.guarded(loop.saver.wait)
    loop.record("stop", reason="not finite")
    path = loop.directory.path / "not-finite.json"
    if loop.trained.processes.is_first:
        details = fields | {"step": progress.step, "batch": segment.tokens.tolist()}
        write_whole(path, json.dumps(details) + "\n")
    weights = "are not finite themselves" if is_lost else "were not updated"
    raise TrainingDiverged(
        f"step {progress.step}: {what}, for {progress.skipped_in_a_row} steps in a row; the weights {weights}, the "
        f"batch and its position are in {path.name} and {_last_checkpoint(loop)}; {_REMEDY}"
    )


def check_weights(loop: TrainingLoop) -> None:
    """Keep weights that are not finite out of checkpoints: an update by finite gradients may have made them so.

    Raises:
        TrainingDiverged: if they are not.
    """
    if _is_lost(loop, loop.best_model):
        loop.guarded(loop.saver.wait)
        loop.record("stop", reason="not finite")
        raise TrainingDiverged(
            f"step {loop.progress.step}: the weights are not finite and were not saved; {_last_checkpoint(loop)}; "
            f"{_REMEDY}"
        )


def check_end(loop: TrainingLoop) -> None:
    """Look at what training came to; its last checkpoint is written.

    Raises:
        TrainingDiverged: if that is of no use.
    """
    progress = loop.progress
    if loop.run.train.eval_every and progress.validation_losses:
        name, loss = "validation loss", progress.validation_losses[-1]
    else:
        name, loss = "loss", math.nan if progress.skipped_in_a_row else progress.last_loss
    reason = uselessness(loss, progress.first_loss, loop.model.vocab_size)
    if reason is None:
        return
    reason = f"the last {name} is {reason}"
    loop.record("end", elapsed=progress.seconds, diverged=reason)
    skipped = f" ({progress.skipped:,} updates were skipped)" if progress.skipped else ""
    raise TrainingDiverged(
        f"step {progress.step} of {loop.run.train.steps}: training diverged, the model in {loop.directory.path} is of "
        f"no use: {reason}{skipped}; start anew with another --out, and {_REMEDY}"
    )


def _is_lost(loop: TrainingLoop, model: nn.Module) -> bool:
    """Whether a weight is not finite, in any process."""
    return loop.trained.processes.any(not all(bool(each.isfinite().all()) for each in _local_weights(model)))


def _last_checkpoint(loop: TrainingLoop) -> str:
    last = loop.directory.newest()
    return f"the last checkpoint is {last.name if last else 'none'}"


def report_spike(loop: TrainingLoop, result: StepResult) -> None:
    """Report a leap of the loss, and go back to the last checkpoint that was due, if that is wanted.

    Raises:
        UserError: if the directory cannot be written.
    """
    progress, train = loop.progress, loop.run.train
    loop.record("spike", loss=result.loss, grad_norm=result.grad_norm, recent_mean=progress.watch.mean)
    goes_back = (
        train.on_spike == "rollback"
        and progress.scheduled_step is not None
        and progress.rollbacks < train.max_rollbacks
    )
    loop.display.message(
        f"step {progress.step}: the loss leaps to {result.loss:.3f}, from a recent mean of "
        f"{progress.watch.mean:.3f}" + (f"; back to step {progress.scheduled_step}" if goes_back else "")
    )
    if goes_back and not roll_back(loop):
        loop.display.message(f"note: the checkpoint of step {progress.scheduled_step} is damaged; training goes on")


def roll_back(loop: TrainingLoop) -> bool:
    """Weights, optimiser and random numbers of the last checkpoint that was due; the text goes on behind the spike.

    Going through the same text again would lead to the same spike. False: the checkpoint cannot be used.
    """
    was, position = loop.progress, loop.position
    target = was.scheduled_step
    assert target is not None
    loop.guarded(loop.saver.wait)
    checkpoint = loop.directory.checkpoints / checkpoint_name(target)
    # Process 0 has waited for its disk and looks; the exchange makes the others wait for it.
    if loop.trained.processes.any(loop.trained.processes.is_first and not _is_good(checkpoint)):
        return False
    restore(loop, checkpoint)
    loop.position, loop.states = position, loop.empty_memory()
    loop.progress.rollbacks = was.rollbacks + 1
    loop.progress.skipped, loop.progress.seconds = was.skipped, was.seconds
    loop.record("rollback", from_step=was.step)
    if loop.trained.processes.is_first:
        point_at_best(loop.directory, loop.progress.best_step)
        remove_later(loop.directory.checkpoints, target)
    loop.saved_step = -1
    loop.save()
    return True


def _local_weights(model: nn.Module) -> Iterator[Tensor]:
    """This process's part of every weight."""
    for parameter in model.parameters():
        weight: Any = parameter.detach()
        yield weight.to_local() if hasattr(weight, "to_local") else weight


def _is_good(checkpoint: Path) -> bool:
    try:
        verify_checkpoint(checkpoint)
    except UserError:
        return False
    return True
