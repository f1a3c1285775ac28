"""Checkpoints: written beside the old ones, whole or not at all, and verified when they are read.

A checkpoint is a directory step-NNNNNNNN with the weights (`model.safetensors`), everything else that training needs to
go on (`training_state.safetensors` for tensors, `training_state.json` for numbers), and `manifest.json` with the size
and sha256 of each. Nothing in it needs pickle.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from txl.data.token_files import file_sha256
from txl.errors import UserError

MODEL_FILE = "model.safetensors"
STATE_TENSORS_FILE = "training_state.safetensors"
STATE_FILE = "training_state.json"
MANIFEST_FILE = "manifest.json"
_FORMAT = 1
_PARTIAL = ".partial"


def checkpoint_name(step: int) -> str:
    """The directory's name."""
    return f"step-{step:08d}"


def checkpoint_names(folder: Path) -> list[str]:
    """The whole checkpoints in a folder, oldest first."""
    return sorted(each.name for each in folder.glob("step-*") if (each / MANIFEST_FILE).is_file())


def write_checkpoint(
    folder: Path, step: int, weights: dict[str, Tensor], state_tensors: dict[str, Tensor], state: dict[str, Any]
) -> Path:
    """Write a checkpoint into `folder` and return its directory.

    The files are written under another name, synced, and renamed together; after a crash or on a full disk there is
    either a whole checkpoint or none. One of the same step is replaced.

    Raises:
        UserError: if it cannot be written; what was written of it is removed.
    """
    final = folder / checkpoint_name(step)
    temporary = folder / f".{final.name}{_PARTIAL}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
        temporary.mkdir()
        for name, tensors in ((MODEL_FILE, weights), (STATE_TENSORS_FILE, state_tensors)):
            contiguous = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
            safetensors.torch.save_file(contiguous, temporary / name)
        (temporary / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        files = {
            name: {"bytes": (temporary / name).stat().st_size, "sha256": file_sha256(temporary / name)}
            for name in (MODEL_FILE, STATE_TENSORS_FILE, STATE_FILE)
        }
        manifest = {"format": _FORMAT, "step": step, "files": files}
        (temporary / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for each in (*temporary.iterdir(), temporary):
            _sync(each)
        _swap(temporary, final, folder / f".{final.name}.replaced{_PARTIAL}")
        _sync(folder)
    except (OSError, SafetensorError) as error:
        # The safetensors library reports a full disk by an exception of its own.
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{final}: the checkpoint could not be written ({reason}); older checkpoints are untouched: make room, "
            f"then run the same command to go on from the last one"
        ) from None
    finally:
        remove_partial(folder)
    return final


def _swap(new: Path, final: Path, old: Path) -> None:
    """Let `new` take the name `final`; what had it becomes `old`."""
    try:
        if final.exists():
            os.rename(final, old)
        os.rename(new, final)
    except BaseException:
        if old.exists() and not final.exists():
            os.rename(old, final)
        raise


def remove_partial(folder: Path) -> None:
    """Remove what an interrupted write has left."""
    for each in folder.glob(f".step-*{_PARTIAL}"):
        shutil.rmtree(each, ignore_errors=True)


def read_tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, after comparing it with the manifest.

    Raises:
        UserError: if something is missing, truncated or altered.
    """
    verify_file(checkpoint, name)
    try:
        return safetensors.torch.load_file(checkpoint / name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{checkpoint / name}: cannot be read ({error})") from None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The numbers of a checkpoint's training state, after comparing the file with the manifest.

    Raises:
        UserError: if something is missing, truncated or altered.
    """
    verify_file(checkpoint, STATE_FILE)
    return json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))


def verify_file(checkpoint: Path, name: str) -> None:
    """Compare a file with the manifest.

    Raises:
        UserError: saying how they differ.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
        version, files = manifest["format"], manifest["files"]
    except FileNotFoundError:
        raise UserError(f"{checkpoint}: not a whole checkpoint ({MANIFEST_FILE} is missing)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint / MANIFEST_FILE}: damaged ({type(error).__name__}: {error})") from None
    if version != _FORMAT:
        raise UserError(f"{checkpoint}: a checkpoint of format {version!r}; this version reads format {_FORMAT}")
    path, other = checkpoint / name, "use another checkpoint or restore it from a copy"
    try:
        n_bytes, sha256 = files[name]["bytes"], files[name]["sha256"]
        size = path.stat().st_size
        if size != n_bytes:
            kind = "truncated" if size < n_bytes else "altered"
            raise UserError(f"{path}: {kind}: {size} bytes, the manifest says {n_bytes}; {other}")
        if file_sha256(path) != sha256:
            raise UserError(f"{path}: altered: its sha256 is not the one in the manifest; {other}")
    except (KeyError, TypeError) as error:
        raise UserError(f"{checkpoint / MANIFEST_FILE}: does not list {name} ({error}); {other}") from None
    except FileNotFoundError:
        raise UserError(f"{path}: missing from the checkpoint; {other}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {other}") from None


def prune(folder: Path, keep: int, protected: set[str]) -> None:
    """Delete all but the newest `keep` checkpoints and the protected ones."""
    names = sorted(each.name for each in folder.glob("step-*"))
    for name in names[:-keep]:
        if name not in protected:
            shutil.rmtree(folder / name, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
