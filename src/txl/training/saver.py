"""Checkpoints written in the background: training waits for a copy of its state, not for the disk."""

from __future__ import annotations

import dataclasses
import threading
import time

from torch import nn

from txl.errors import Field, TrainingDiverged, UserError
from txl.runs.checkpoints import (
    STATE_SHARDS,
    Contents,
    VerifiedCheckpoint,
    checkpoint_name,
    checkpoint_names,
    prune,
    set_aside,
    write_checkpoint,
)
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName
from txl.training.parallel import local_tensor
from txl.training.snapshot import copied_state
from txl.training.state import Counters, TrainingSetup, TrainingState

# For a run that diverges.
REMEDY = ("try a lower ", Field("train.learning_rate"), " or a longer ", Field("train.warmup_steps"))


class CheckpointSaver:
    """Writer of a run's checkpoints and of the pointers `latest` and `best`.

    A background thread writes one checkpoint at a time; without `train.async_checkpoints` training waits for it. If a
    checkpoint cannot be written (a full disk), the run stops, or reports the failure and continues
    (`train.on_save_error`).
    """

    def __init__(self, setup: TrainingSetup):
        self._setup, self._directory = setup, setup.directory
        self.saved_step: int | None = None  # step of the last checkpoint; None: `save` must write the next in any case
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: TrainingState, required: bool = False) -> None:
        """Write a checkpoint of a copy of the state, unless the last one is of this step.

        If it is `required`, because the run's work would be lost without it, return only when it is written, and raise
        the UserError of a failure whatever `train.on_save_error`. Weights that are not finite raise TrainingDiverged.
        """
        step, counters, processes = state.counters.step, state.counters, self._setup.trained.processes
        if not required and not processes.any(self.saved_step != step):
            return  # do not wait for the thread that writes this step
        self.finish(state)
        # All processes save or none: a process does not notice that another one could not write the last checkpoint.
        if processes.any(self.saved_step != step):
            # Even an update with finite gradients can produce weights that are not finite.
            if is_lost(self._setup, state.best_model):
                self._setup.log.record(EventName.STOP, step, reason="not finite")
                what = f"step {step}: the weights are not finite and were not saved"
                raise TrainingDiverged(f"{what}; {last_checkpoint(self._directory)}", remedy=REMEDY)
            began = time.perf_counter()
            contents = copied_state(state, self._setup)
            contents.belongs = self._setup.belongs
            self.saved_step = step
            write = (contents, dataclasses.replace(counters), time.perf_counter() - began)
            # A daemon, so that a second signal ends the program without waiting for a disk.
            self._thread = threading.Thread(target=self._write, args=write, name="checkpoint", daemon=True)
            self._thread.start()
        if required:
            self.wait()
        elif not self._setup.run.train.async_checkpoints:
            self.finish(state)

    def finish(self, state: TrainingState) -> None:
        """Wait for the thread that writes, then handle a failed checkpoint as `check` does."""
        self.join()
        self.check(state)

    def check(self, state: TrainingState) -> None:
        """Report a checkpoint that could not be written, once, or raise its error (`train.on_save_error`)."""
        try:
            self._raise()
        except UserError as error:
            self.saved_step = None
            if self._setup.run.train.on_save_error == "stop":
                raise
            self._setup.display.message(f"note: {error}; training goes on")
            self._setup.log.record(EventName.SAVE_FAILED, state.counters.step, reason=str(error))

    def wait(self) -> None:
        """Wait for the thread that writes; raise its error, whatever the value of `train.on_save_error`."""
        self.join()
        self._raise()

    def join(self) -> None:
        """Wait for the thread that writes, whether it succeeds or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, contents: Contents, counters: Counters, copy_seconds: float) -> None:
        """Write a checkpoint, or this process's shards of it; in the background thread."""
        folder, step, began = self._directory.checkpoints, counters.step, time.perf_counter()
        try:
            if not self._setup.trained.processes.is_first:
                if contents.write_shards is not None:
                    # Process 0 reports the errors.
                    contents.write_shards(folder / f".{checkpoint_name(step)}.partial" / STATE_SHARDS)
                return
            try:
                written = write_checkpoint(folder, step, contents)
            finally:
                if contents.give_up is not None:
                    contents.give_up()  # the other processes wait for this if writing failed before the shards
            # The pointers move before a checkpoint that they named is deleted.
            self._directory.set_pointer("latest", written.name)
            point_at_best(self._directory, counters.best_step)
            seconds = {"copy_seconds": copy_seconds, "write_seconds": time.perf_counter() - began}
            is_best = counters.best_step == step
            self._setup.log.record(EventName.CHECKPOINT, step, directory=written.name, best=is_best, **seconds)
            # The checkpoint that `best` names is kept until `best` moves: saving a better one may have failed.
            best = self._directory.pointer("best")
            steps = (step, counters.best_step, counters.scheduled_step, counters.scheduled_best)
            protected = {checkpoint_name(needed) for needed in steps if needed is not None}
            protected |= {best.name} if best else set()
            for name in prune(folder, self._setup.run.train.keep_checkpoints, protected):
                self._setup.display.message(f"note: {folder / name} could not be deleted; training goes on")
        except BaseException as error:  # raised again in the training thread
            self._error = error


def point_at_best(directory: RunDirectory, best_step: int | None) -> None:
    """Set the pointer `best` to the checkpoint of `best_step`, if that checkpoint exists."""
    if best_step is None:
        return
    name, named = checkpoint_name(best_step), directory.pointer("best")
    if (named is None or named.name != name) and (directory.checkpoints / name).is_dir():
        directory.set_pointer("best", name)


def newest_good(directory: RunDirectory, run_id: str | None) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """Return the newest intact checkpoint of a run, and the reasons why newer ones were refused and set aside.

    If there are checkpoints and none is intact, none is moved, and UserError is raised.
    """
    folder, refused = directory.checkpoints, []
    for name in reversed(checkpoint_names(folder)):
        try:
            checkpoint = VerifiedCheckpoint(folder / name)
            checkpoint.verify(run_id)
        except UserError as error:
            refused.append((name, str(error)))
            continue
        return checkpoint, [f"{reason}; set aside as {set_aside(folder / bad).name}" for bad, reason in refused]
    if refused:
        raise UserError(f"no checkpoint can be used: {'; '.join(reason for _, reason in refused)}")
    return None, []


def is_lost(setup: TrainingSetup, model: nn.Module) -> bool:
    """Return whether any process holds a weight that is not finite."""
    weights = (local_tensor(parameter.detach()) for parameter in model.parameters())
    return setup.trained.processes.any(not all(bool(weight.isfinite().all()) for weight in weights))


def last_checkpoint(directory: RunDirectory) -> str:
    """Return a clause for messages that names the newest checkpoint."""
    last = directory.newest()
    return f"the last checkpoint is {last.name if last else 'none'}"
