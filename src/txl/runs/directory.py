"""A run on disk: its configuration, vocabulary, log and checkpoints, and the loading of its model.

    config.json  vocabulary.json  log.jsonl  best  latest  report.html
    checkpoints/step-NNNNNNNN/{model.safetensors, training_state.safetensors, training_state.json, manifest.json}

`log.jsonl` is append-only, with one JSON object per line. `best` and `latest` are text files that name a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import portalocker
from portalocker import LockFlags

from txl.config import RunConfig, model_from_dict
from txl.data.catalogue import BENCHMARKS
from txl.errors import UserError
from txl.files import JsonObject, opened, parsed_json, read_json, with_null, write_whole
from txl.runs.checkpoints import (
    MODEL_FILE,
    checkpoint_name,
    checkpoint_names,
    checkpoint_step,
    read_tensors,
    verify_belongs,
)
from txl.runs.events import EventName, ImportEvent, StartEvent, fields_of, is_complete, select

if TYPE_CHECKING:  # a run is described without PyTorch, which takes seconds to import
    import torch

    from txl.data.vocabulary import Vocabulary
    from txl.models.family import FamilyModel

_LOCK_ATTEMPTS = 10
_RESTORE = "restore it from a copy"
_FIGURES = ("loss", "grad_norm", "nll", "ppl", "bpc")
"""Numeric fields of logged events in which null stands for infinity or NaN."""


def _with_nan(event: JsonObject) -> JsonObject:
    """Return an event, or a row of a sweep, with NaN for null in `_FIGURES`."""
    rows = event.get("rows")
    if isinstance(rows, list):
        event = event | {"rows": [_with_nan(row) if isinstance(row, dict) else row for row in rows]}
    return event | {name: math.nan for name in _FIGURES if event.get(name, 0) is None}


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @property
    def config_path(self) -> Path:
        """Path of config.json, the file that makes a directory a run."""
        return self.path / "config.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    def config(self) -> RunConfig:
        """Read the run's configuration."""
        try:
            stored = read_json(self.config_path, _RESTORE)
        except FileNotFoundError:
            raise UserError(f"{self.path}: not a run directory (it has no config.json)") from None
        except OSError as error:
            raise UserError(f"{self.config_path}: {error.strerror}") from None
        try:
            return RunConfig.from_dict(of_today(stored) if isinstance(stored, dict) else stored)
        except UserError as error:
            raise UserError(f"{self.config_path}: {error}") from None

    def write_config(self, config: RunConfig) -> None:
        """Write config.json."""
        write_whole(self.config_path, json.dumps(config.to_dict(), indent=1) + "\n")

    def write_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Write vocabulary.json."""
        vocabulary.save(self.path / "vocabulary.json")

    def vocabulary(self) -> Vocabulary | None:
        """Read the run's vocabulary; None for an imported model without a vocabulary."""
        from txl.data.vocabulary import Vocabulary

        path = self.path / "vocabulary.json"
        return Vocabulary.load(path, _RESTORE) if path.exists() else None

    def append(self, event: EventName, step: int, **fields: object) -> None:
        """Append an event to the log, as one line; `fields` must be declared for the event in `EVENTS`."""
        assert fields.keys() <= fields_of(event), f"{event}: {fields.keys() - fields_of(event)} are not declared"
        values = {"event": event, "step": step, "time": time.time(), **fields}
        line = json.dumps(with_null(values), ensure_ascii=False) + "\n"
        path = self.path / "log.jsonl"
        try:
            with open(path, "ab+") as file:
                # `txl eval` may write while the run trains; some network file systems have no locks.
                with suppress(portalocker.LockException):
                    portalocker.lock(file, LockFlags.EXCLUSIVE)
                # A crash may have torn the last line: the next event begins on a line of its own.
                if file.tell() > 0:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        line = "\n" + line
                file.write(line.encode("utf-8", errors="replace"))
        except OSError as error:
            raise UserError(f"{path}: the log cannot be written ({error.strerror})") from None

    def events(self) -> list[JsonObject]:
        """Return all events of the log in order; torn lines are left out."""
        return self.events_and_torn()[0]

    def events_and_torn(self) -> tuple[list[JsonObject], int]:
        """Return all events of the log in order, and the number of torn lines; null in `_FIGURES` becomes NaN.

        A line is torn if a crash has cut it off, or if it lacks fields of its event (`is_complete`).
        """
        path = self.path / "log.jsonl"
        try:
            with opened(path) as file:
                text = file.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise UserError(f"{path}: the log cannot be read ({error.strerror})") from None
        found, torn = [], 0
        # Not splitlines, which would also split at U+2028 and similar characters that a logged text may hold.
        for line in text.split("\n"):
            try:
                event = parsed_json(line) if line.strip() else None
            except ValueError:
                event = {}
            event = _with_nan(event) if isinstance(event, dict) else {}
            if is_complete(event):
                found.append(event)
            else:
                torn += line.strip() != ""
        return found, torn

    def lacks_log(self) -> bool:
        """Return whether the run has checkpoints, but no log that tells how they came about."""
        events = self.events()
        begins = select(events, StartEvent) or select(events, ImportEvent)
        return self.newest() is not None and not begins

    def run_id(self) -> str | None:
        """Return the unique identifier of the run; None if the log does not hold one."""
        runs = (event.get("run") for event in select(self.events(), StartEvent, EventName.START))
        return next((run for run in runs if isinstance(run, str)), None)

    def started(self) -> StartEvent | None:
        """Return the newest `start` event of the log; None for an imported model."""
        starts = select(self.events(), StartEvent, EventName.START)
        return starts[-1] if starts else None

    def trained_on(self) -> JsonObject:
        """Return the logged record of the training corpus (`Corpus.info`); empty for an imported model."""
        started = self.started()
        return {} if started is None else cast("JsonObject", started["corpus"])

    def pointer(self, name: str) -> Path | None:
        """Return the checkpoint that `best` or `latest` names, if there is one."""
        try:
            with opened(self.path / name) as file:
                target = file.read(64).decode("utf-8").strip()
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None
        if not re.fullmatch(r"step-\d{8,}", target):
            return None
        return self.checkpoints / target

    def set_pointer(self, name: str, checkpoint: str) -> None:
        """Make `best` or `latest` name a checkpoint."""
        write_whole(self.path / name, checkpoint + "\n")

    def newest(self) -> Path | None:
        """Return the newest checkpoint, even if a crash has prevented `latest` from naming it."""
        names = checkpoint_names(self.checkpoints)
        return self.checkpoints / names[-1] if names else None

    def checkpoint(self, which: str | int | None = None) -> Path:
        """Return the directory of a checkpoint.

        Args:
            which: "best", "latest", or the number of a step; None: best, else latest.
        """
        which = ("best" if (self.path / "best").exists() else "latest") if which is None else str(which)
        if which in ("best", "latest"):
            found = self.pointer(which)
        elif which.isascii() and which.isdecimal():
            found = self.checkpoints / checkpoint_name(int(which))
        else:
            raise UserError(field="checkpoint", value=which, expected="best, latest or the number of a step")
        if found is None or not found.is_dir():
            raise UserError(self._no_checkpoint(which))
        return found

    def _no_checkpoint(self, which: str) -> str:
        """Return the message for a checkpoint that is not there."""
        steps = [str(checkpoint_step(name)) for name in checkpoint_names(self.checkpoints)]
        if not steps and self.started() is None:
            return f"{self.path} has no checkpoint; restore its folder {self.checkpoints.name} from a copy"
        if not steps:
            return f"{self.path} has no checkpoint; train it: txl train --out {shlex.quote(str(self.path))}"
        if which in ("best", "latest"):
            return (
                f"{self.path / which} names no checkpoint; choose a step with --checkpoint ({' or '.join(steps)}), or "
                f"restore {which} from a copy"
            )
        return f"checkpoint is {which}, but {self.path} has the steps {', '.join(steps)}"

    def load(
        self, checkpoint: Path | None = None, device: str = "cpu", attention: str | None = None
    ) -> tuple[FamilyModel, Vocabulary | None]:
        """Load the model of a checkpoint, in evaluation mode, and the run's vocabulary.

        Args:
            checkpoint: directory of the checkpoint; None: best, else latest.
            device: device of the model.
            attention: value of `model.attention` for computing gradients; None: the run's.

        Raises:
            UserError: if the checkpoint is missing, damaged, or does not fit the configuration.
        """
        import torch

        from txl.models import build_model

        checkpoint = checkpoint or self.checkpoint()
        tensors = read_tensors(checkpoint, MODEL_FILE)
        config, vocabulary = self.config(), self.vocabulary()
        verify_belongs(checkpoint, dataclasses.asdict(config.model), self.path / "vocabulary.json")
        bias = tensors.get("softmax.bias")
        if bias is None:
            raise UserError(f"{checkpoint}: not the weights of a model of this version (softmax.bias is missing)")
        if vocabulary is not None and len(vocabulary) != len(bias):
            raise UserError(
                f"{self.path}: the vocabulary has {len(vocabulary)} tokens, the checkpoint {len(bias)}; "
                f"they do not belong together"
            )
        with torch.device("meta"):  # spends no time and no random numbers on weights that are replaced
            shape = config.model
            if attention is not None:
                shape = model_from_dict(dataclasses.asdict(shape) | {"attention": attention})
            model = build_model(shape, len(bias))
        # Copies are aligned in memory: the last bit of a product must not depend on a tensor's place in the file.
        load_weights(model, {name: tensor.clone() for name, tensor in tensors.items()}, str(checkpoint), assign=True)
        return model.to(device).eval(), vocabulary

    def is_locked(self) -> bool:
        """Return whether a process on this machine is training in this directory now."""
        try:
            with opened(self.path / ".lock") as file:
                portalocker.lock(file, LockFlags.SHARED | LockFlags.NON_BLOCKING)
        except portalocker.AlreadyLocked:
            return True
        except (OSError, portalocker.LockException):
            return False
        return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock this directory during the `with` block, so that no other process trains in it."""
        path = self.path / ".lock"
        try:
            file = open(path, "w")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from None
        with file, _opened_directory(self.path) as directory:
            self._lock(file.fileno(), f"{path}: no lock")
            if directory is not None:  # a user may take the file for stale and delete it
                self._lock(directory, None)
            yield

    def _lock(self, descriptor: int, note: str | None) -> None:
        """Lock an open file until it is closed; print `note` if the file system does not support locks."""
        for _ in range(_LOCK_ATTEMPTS):  # `txl status` holds the lock briefly to test it
            try:
                portalocker.lock(descriptor, LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING)
                return
            except portalocker.AlreadyLocked:
                time.sleep(0.05)
            except (OSError, portalocker.LockException) as error:  # some network file systems have no locks
                if note is not None:
                    print(f"note: {note} ({error}); start no second training here", file=sys.stderr)
                return
        raise UserError(f"{self.path}: another process is training here; wait for it or use another --out")


@contextmanager
def _opened_directory(path: Path) -> Iterator[int | None]:
    """Yield the descriptor of an open directory; None if the system cannot open directories (Windows)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def of_today(config: JsonObject) -> JsonObject:
    """Return a stored configuration; `data.word_rule` and `data.normalise`, if missing, are as in earlier versions."""
    data = config.get("data")
    if not isinstance(data, dict) or "word_rule" in data or "min_count" not in data:
        return config
    data = {**data, "word_rule": None}
    is_own = str(data.get("corpus")) not in BENCHMARKS and data.get("unit") != "byte"
    if is_own:
        data["normalise"] = False
    if is_own and data.get("unit") == "word":
        data["word_rule"] = "whitespace"
    elif data["min_count"] == 1:
        data["min_count"] = None
    return {**config, "data": data}


def load(
    path: str | Path, *, checkpoint: str | int | None = None, device: str = "cpu"
) -> tuple[FamilyModel, Vocabulary | None]:
    """Load the model of a run, in evaluation mode, and the run's vocabulary (None if the run has none).

    Args:
        path: path of a run directory.
        checkpoint: "best", "latest" or the number of a step; None: best, else latest.
        device: device of the model.

    Raises:
        UserError: if `path` is not a run directory, or the checkpoint is missing or damaged.
    """
    run_directory = RunDirectory(path)
    run_directory.config()
    return run_directory.load(run_directory.checkpoint(checkpoint), device)


def load_weights(model: torch.nn.Module, tensors: dict[str, torch.Tensor], source: str, assign: bool = False) -> None:
    """Copy weights into a model, or make the model use the given tensors themselves (`assign`)."""
    wanted = model.state_dict()
    for name, tensor in wanted.items():
        if name not in tensors:
            raise UserError(f"{source}: the weights lack {name}; the configuration describes another model")
        if tensors[name].shape != tensor.shape:
            raise UserError(
                f"{source}: {name} has shape {list(tensors[name].shape)}, the configuration "
                f"(n_head, d_head, d_model, ...) needs {list(tensor.shape)}"
            )
    extra = sorted(set(tensors) - set(wanted))
    if extra:
        raise UserError(f"{source}: the weights hold {extra[0]}, which the configuration has no place for")
    model.load_state_dict(tensors, assign=assign)
