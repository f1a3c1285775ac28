"""Checkpoints written beside training: the loop waits for a copy of its state, not for the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from txl.errors import UserError
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


class CheckpointSaver:
    """Writes one checkpoint at a time, in a thread of its own or at once, and lets the pointers follow.

    Args:
        directory: the run's.
        keep: how many of the newest checkpoints stay, beside those that are protected.
        in_background: False writes at once.
        writes: False for a process that only takes part in writing shards.
        say: shows a line to the user.
        record: adds an event of a step to the run's log.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        keep: int,
        in_background: bool,
        writes: bool,
        say: Callable[[str], None],
        record: Callable[..., None],
    ):
        self._directory, self._keep, self._in_background = directory, keep, in_background
        self._writes, self._say, self._record = writes, say, record
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, step: int, contents: Contents, best_step: int | None, protected: set[int], copy_seconds: float
    ) -> None:
        """Write a checkpoint, after the one before it; returns at once if it is written in the background.

        Args:
            step: its number.
            contents: a copy, which nothing changes any more.
            best_step: of the best checkpoint, for the pointer.
            protected: steps whose checkpoints stay.
            copy_seconds: what it took to make the copy, for the log.

        Raises:
            UserError: if this one (written at once) or the one before it could not be written.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write,
            args=(step, contents, best_step, protected, copy_seconds),
            name="checkpoint",
            daemon=True,  # a second signal ends the program without waiting for a disk
        )
        self._thread.start()
        if not self._in_background:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            UserError: if what was written last could not be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what went wrong in the background, once.

        Raises:
            UserError: if what was written last could not be.
        """
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
        self._record("checkpoint", step, directory=written.name, best=best_step == step, **seconds)
        # The best that stands stays until a better one does: the save of that one may have failed.
        best = self._directory.pointer("best")
        kept = {checkpoint_name(each) for each in protected} | {written.name} | ({best.name} if best else set())
        for name in prune(folder, self._keep, kept):
            self._say(f"note: {folder / name} could not be deleted; training goes on")


def point_at_best(directory: RunDirectory, best_step: int | None) -> None:
    """Let `best` name the best checkpoint, if it is there."""
    if best_step is None:
        return
    name, named = checkpoint_name(best_step), directory.pointer("best")
    if (named is None or named.name != name) and (directory.checkpoints / name).is_dir():
        directory.set_pointer("best", name)


def newest_good(directory: RunDirectory) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that can be gone on from, and why newer ones cannot; those are set aside.

    Raises:
        UserError: if there are checkpoints and none is good; they then stay where they are.
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
