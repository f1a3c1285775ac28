"""A run on disk: its configuration, vocabulary, log and checkpoints, and the loading of its model.

    config.json  vocabulary.json  log.jsonl  best  latest  report.html
    checkpoints/step-NNNNNNNN/{model.safetensors, training_state.safetensors, training_state.json, manifest.json}

`log.jsonl` is append-only, with one JSON object per line. `best` and `latest` are text files that name a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import portalocker
from portalocker import LockFlags

from txl.config import RunConfig, model_from_dict
from txl.errors import Field, UserError
from txl.files import JsonObject, opened, read_json, write_whole
from txl.runs.checkpoints import MODEL_FILE, VerifiedCheckpoint, checkpoint_name, checkpoint_names, checkpoint_step
from txl.runs.events import EventName
from txl.runs.log import RunLog, append_event

if TYPE_CHECKING:  # a run is described without PyTorch, which takes seconds to import
    import torch

    from txl.data.vocabulary import Vocabulary
    from txl.models.family import FamilyModel

_LOCK_ATTEMPTS = 10
_RESTORE = "restore it from a copy"


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
            return RunConfig.from_dict(stored)
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
        from txl.data.vocabularies import load_vocabulary

        path = self.path / "vocabulary.json"
        return load_vocabulary(path, _RESTORE) if path.exists() else None

    def append(self, event: EventName, step: int, **fields: object) -> None:
        """Append an event to the log, as one line; `fields` must be declared for the event in `EVENTS`."""
        append_event(self.path / "log.jsonl", event, step, **fields)

    def log(self) -> RunLog:
        """Read the log."""
        return RunLog.read(self.path / "log.jsonl")

    def events(self) -> list[JsonObject]:
        """Return all events of the log in order; torn lines are left out."""
        return self.log().events

    def lacks_log(self) -> bool:
        """Return whether the run has checkpoints, but no log that tells how they came about."""
        log = self.log()
        return self.newest() is not None and log.resumed is None and not log.is_import

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
            path = self.pointer(which)
        elif which.isascii() and which.isdecimal():
            path = self.checkpoints / checkpoint_name(int(which))
        else:
            raise UserError(field="checkpoint", value=which, expected="best, latest or the number of a step")
        if path is None or not path.is_dir():
            raise self._no_checkpoint(which)
        return path

    def _no_checkpoint(self, which: str) -> UserError:
        """Return the error for a checkpoint that is not there."""
        steps = [str(checkpoint_step(name)) for name in checkpoint_names(self.checkpoints)]
        if not steps:
            restore = f"restore its folder {self.checkpoints.name} from a copy"
            remedy = restore if self.log().started is None else ("train it with ", Field("out", self.path))
            return UserError("has no checkpoint", value=self.path, remedy=remedy)
        if which in ("best", "latest"):
            choose = ("choose a step with ", Field("checkpoint"), f" ({' or '.join(steps)})")
            remedy = (*choose, f", or restore {which} from a copy")
            return UserError("names no checkpoint", value=self.path / which, remedy=remedy)
        but = f"{self.path} has the steps {', '.join(steps)}"
        return UserError(field="checkpoint", value=int(which), but=but)

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
        verified = VerifiedCheckpoint(checkpoint)
        tensors = verified.tensors(MODEL_FILE)
        config, vocabulary = self.config(), self.vocabulary()
        verified.check_belongs(dataclasses.asdict(config.model), self.path / "vocabulary.json")
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
        remedy = ("wait for it or use another ", Field("out"))
        raise UserError("another process is training here", value=self.path, remedy=remedy)


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
