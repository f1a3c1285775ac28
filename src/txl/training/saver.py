"""Checkpoints written beside training: the loop waits for a copy of its state, not for the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from txl.errors import TrainingDiverged, UserError
from txl.files import JsonObject
from txl.runs.checkpoints import (
    STATE_SHARDS,
    Contents,
    checkpoint_name,
    prune,
    set_aside,
    verify_checkpoint,
    write_checkpoint,
)
from txl.runs.checkpoints import checkpoint_names as names_in
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName
from txl.training.snapshot import capture
from txl.training.state import TrainingSetup, TrainingState

REMEDY = "try a lower --train.learning-rate or a longer --train.warmup-steps"
"""Advice for a training that diverges."""


class CheckpointSaver:
    """Writes a run's checkpoints, one at a time, in a thread of its own or at once, and lets the pointers follow.

    What cannot be written (a full disk) stops the run, or is reported and the run goes on (`train.on_save_error`).
    """

    def __init__(self, setup: TrainingSetup):
        self._setup, self._directory = setup, setup.directory
        self._writes = setup.trained.processes.is_first
        self.belongs: JsonObject = {}
        """Configuration and vocabulary that the weights belong to (`checkpoints.weights_identity`)."""
        self.saved_step: int | None = None
        """The step whose state the last checkpoint holds; None if the next one has to be written in any case."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: TrainingState, required: bool = False) -> None:
        """Write a checkpoint, unless this step has one.

        Args:
            state: is copied, so that training may go on.
            required: without it the run's work would be lost, so that it has to be there before this returns.

        Raises:
            TrainingDiverged: if the weights are not finite.
            UserError: if it cannot be written, unless the run goes on without it.
        """
        step, counters = state.counters.step, state.counters
        self.finish(state)
        # All processes or none: what one process could not write, the others believe to be there.
        if self._setup.trained.processes.any(self.saved_step != step):
            self._refuse_lost_weights(state)
            began = time.perf_counter()
            contents = capture(state, self._setup)
            copy_seconds = time.perf_counter() - began
            contents.belongs = self.belongs
            named = (counters.best_step, counters.scheduled_step, counters.scheduled_best)
            protected = {each for each in named if each is not None}
            self.saved_step = step
            try:
                self._begin(step, contents, counters.best_step, protected, copy_seconds)
            except UserError as error:
                if required:
                    raise
                self._tolerate(error, state)
        if required:
            self.wait()

    def finish(self, state: TrainingState) -> None:
        """Return when nothing is being written; a checkpoint that could not be is dealt with as in `check`."""
        self._join()
        self.check(state)

    def check(self, state: TrainingState) -> None:
        """Report a checkpoint that could not be written in the background, once."""
        try:
            self._raise()
        except UserError as error:
            self._tolerate(error, state)

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            UserError: if what was written last could not be, whether the run goes on without it or not.
        """
        self._join()
        self._raise()

    def _tolerate(self, error: UserError, state: TrainingState) -> None:
        self.saved_step = None
        if self._setup.run.train.on_save_error == "stop":
            raise error
        self._setup.display.message(f"note: {error}; training goes on")
        self._setup.log.record(EventName.SAVE_FAILED, state.counters.step, reason=str(error))

    def _refuse_lost_weights(self, state: TrainingState) -> None:
        """Keep weights that are not finite out of checkpoints: an update by finite gradients may have made them so."""
        if is_lost(self._setup, state.best_model):
            self._setup.log.record(EventName.STOP, state.counters.step, reason="not finite")
            raise TrainingDiverged(
                f"step {state.counters.step}: the weights are not finite and were not saved; "
                f"{last_checkpoint(self._directory)}; {REMEDY}"
            )

    def _begin(
        self, step: int, contents: Contents, best_step: int | None, protected: set[int], copy_seconds: float
    ) -> None:
        """Write a checkpoint; return at once if it is written in the background.

        Args:
            step: its number.
            contents: a copy, which nothing changes any more.
            best_step: of the best checkpoint, for the pointer.
            protected: steps whose checkpoints stay.
            copy_seconds: time that making the copy took, for the log.
        """
        self._thread = threading.Thread(
            target=self._write,
            args=(step, contents, best_step, protected, copy_seconds),
            name="checkpoint",
            daemon=True,  # a second signal ends the program without waiting for a disk
        )
        self._thread.start()
        if not self._setup.run.train.async_checkpoints:
            self.wait()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(
        self, step: int, contents: Contents, best_step: int | None, protected: set[int], copy_seconds: float
    ) -> None:
        try:
            if self._writes:
                self._write_and_point(step, contents, best_step, protected, copy_seconds)
            elif contents.write_shards is not None:
                folder = self._directory.checkpoints / f".{checkpoint_name(step)}.partial" / STATE_SHARDS
                contents.write_shards(folder)  # what goes wrong is told by the process that writes
        except BaseException as error:  # raised again in the training thread
            self._error = error

    def _write_and_point(
        self, step: int, contents: Contents, best_step: int | None, protected: set[int], copy_seconds: float
    ) -> None:
        folder, began = self._directory.checkpoints, time.perf_counter()
        try:
            written = write_checkpoint(folder, step, contents)
        finally:
            if contents.give_up is not None:
                contents.give_up()  # the others still wait, if it did not come to the shards
        # The pointers move before anything that they named is deleted.
        self._directory.set_pointer("latest", written.name)
        point_at_best(self._directory, best_step)
        seconds = {"copy_seconds": copy_seconds, "write_seconds": time.perf_counter() - began}
        self._setup.log.record(EventName.CHECKPOINT, step, directory=written.name, best=best_step == step, **seconds)
        # The best that stands stays until a better one does: the save of that one may have failed.
        best = self._directory.pointer("best")
        kept = {checkpoint_name(each) for each in protected} | {written.name} | ({best.name} if best else set())
        for name in prune(folder, self._setup.run.train.keep_checkpoints, kept):
            self._setup.display.message(f"note: {folder / name} could not be deleted; training goes on")


def point_at_best(directory: RunDirectory, best_step: int | None) -> None:
    """Let `best` name the best checkpoint, if it is there."""
    if best_step is None:
        return
    name, named = checkpoint_name(best_step), directory.pointer("best")
    if (named is None or named.name != name) and (directory.checkpoints / name).is_dir():
        directory.set_pointer("best", name)


def newest_good(directory: RunDirectory) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint of this run, and why newer ones cannot be used; those are set aside.

    Raises:
        UserError: if there are checkpoints and none is intact; they then stay where they are.
    """
    folder, refused = directory.checkpoints, []
    names = names_in(folder)
    for name in reversed(names):
        try:
            verify_checkpoint(folder / name, directory.run_id())
        except UserError as error:
            refused.append((name, str(error)))
            continue
        return folder / name, [f"{reason}; set aside as {set_aside(folder / bad).name}" for bad, reason in refused]
    if refused:
        others = f" (and {len(refused) - 1} older ones are no better)" if len(refused) > 1 else ""
        raise UserError(f"{refused[0][1]}{others}")
    return None, []


def is_lost(setup: TrainingSetup, model: nn.Module) -> bool:
    """Return whether a weight is not finite, in any process."""
    return setup.trained.processes.any(not all(bool(each.isfinite().all()) for each in _local_weights(model)))


def _local_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield this process's part of every weight."""
    for parameter in model.parameters():
        weight: Any = parameter.detach()  # a DTensor where the weights are sharded
        yield weight.to_local() if hasattr(weight, "to_local") else weight


def last_checkpoint(directory: RunDirectory) -> str:
    """Return a clause that names the newest checkpoint."""
    last = directory.newest()
    return f"the last checkpoint is {last.name if last else 'none'}"
