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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import portalocker
from portalocker import LockFlags

from txl.config import RunConfig, model_from_dict
from txl.errors import Field, UserError
from txl.files import JsonObject, opened, read_json, with_null, write_whole
from txl.runs.checkpoints import MODEL_FILE, VerifiedCheckpoint, checkpoint_name, checkpoint_names, checkpoint_step
from txl.runs.events import EventName, RunLog, fields_of

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

    def vocabulary(self) -> Vocabulary | None:
        """Read the run's vocabulary; None for an imported model without a vocabulary."""
        from txl.data.vocabularies import load_vocabulary

        path = self.path / "vocabulary.json"
        return load_vocabulary(path, _RESTORE) if path.exists() else None

    def append(self, event: EventName, step: int, **fields: object) -> None:
        """Append an event to the log, as one line; `fields` must be declared for the event in `EVENTS`."""
        assert fields.keys() <= fields_of(event), f"{event}: {fields.keys() - fields_of(event)} are not declared"
        path, values = self.path / "log.jsonl", {"event": event, "step": step, "time": time.time(), **fields}
        line = json.dumps(with_null(values), ensure_ascii=False) + "\n"
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
        """Return the directory of a checkpoint: "best", "latest", or the number of a step; None: best, else latest."""
        which = ("best" if (self.path / "best").exists() else "latest") if which is None else str(which)
        is_pointer, is_step = which in ("best", "latest"), which.isascii() and which.isdecimal()
        if not (is_pointer or is_step):
            raise UserError(field="checkpoint", value=which, expected="best, latest or the number of a step")
        path = self.pointer(which) if is_pointer else self.checkpoints / checkpoint_name(int(which))
        if path is not None and path.is_dir():
            return path
        steps = ", ".join(str(checkpoint_step(name)) for name in checkpoint_names(self.checkpoints))
        if not steps:
            restore = f"restore its folder {self.checkpoints.name} from a copy"
            remedy = restore if self.log().started is None else ("train it with ", Field("out", self.path))
            raise UserError("has no checkpoint", value=self.path, remedy=remedy)
        if is_pointer:
            remedy = ("choose a step with ", Field("checkpoint"), f" ({steps}), or restore {which} from a copy")
            raise UserError("names no checkpoint", value=self.path / which, remedy=remedy)
        raise UserError(field="checkpoint", value=int(which), but=f"{self.path} has the steps {steps}")

    def load(
        self, checkpoint: Path | None = None, device: str = "cpu", attention: str | None = None
    ) -> tuple[FamilyModel, Vocabulary | None]:
        """Load the model of a checkpoint (None: best, else latest), in evaluation mode, and the run's vocabulary.

        A value of `model.attention` replaces the run's. A checkpoint that is missing, damaged, or does not fit the
        configuration raises UserError.
        """
        import torch

        from txl.models import build_model

        checkpoint = checkpoint or self.checkpoint()
        verified = VerifiedCheckpoint(checkpoint)
        tensors = verified.tensors(MODEL_FILE)
        config, vocabulary = self.config(), self.vocabulary()
        verified.check_belongs(dataclasses.asdict(config.model), self.path / "vocabulary.json")
        bias = tensors.get("softmax.bias")
        if bias is None or (vocabulary is not None and len(vocabulary) != len(bias)):
            size = "none" if bias is None else len(bias)
            tokens = "any" if vocabulary is None else len(vocabulary)
            raise UserError(f"{checkpoint}: softmax.bias has {size} tokens, the vocabulary {tokens}; {_RESTORE}")
        shape = config.model
        if attention is not None:
            shape = model_from_dict(dataclasses.asdict(shape) | {"attention": attention})
        with torch.device("meta"):  # spends no time and no random numbers on weights that are replaced
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
        with ExitStack() as stack:
            try:
                locks = [stack.enter_context(open(path, "w")).fileno()]
            except OSError as error:
                raise UserError(f"{path}: cannot be written ({error.strerror})") from None
            with suppress(OSError):  # Windows cannot open directories
                # The directory, too: a user may take the file for stale and delete it.
                locks.append(os.open(self.path, os.O_RDONLY))
                stack.callback(os.close, locks[-1])
            self._lock(locks[0])
            for descriptor in locks[1:]:  # on NFS, a descriptor opened to read has no exclusive lock
                self._lock(descriptor, tells=False)
            yield

    def _lock(self, descriptor: int, tells: bool = True) -> None:
        """Lock an open file until it is closed; a note says where locks are missing."""
        for _ in range(_LOCK_ATTEMPTS):  # `txl status` holds the lock briefly to test it
            try:
                portalocker.lock(descriptor, LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING)
                return
            except portalocker.AlreadyLocked:
                time.sleep(0.05)
            except (OSError, portalocker.LockException) as error:  # some network file systems have no locks
                if tells:
                    print(f"note: {self.path}: no lock ({error}); start no second training here", file=sys.stderr)
                return
        remedy = ("wait for it or use another ", Field("out"))
        raise UserError("another process is training here", value=self.path, remedy=remedy)


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
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(wanted.keys() | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != wanted.get(name):
            expected = f"the configuration describes {wanted.get(name, 'none')}"
            raise UserError(f"{source}: the weights' {name} has the shape {found}; {expected}")
    model.load_state_dict(tensors, assign=assign)
