"""Checkpoints: written beside the older ones, completely or not at all, and verified when read.

A checkpoint is a directory step-NNNNNNNN with the weights (`model.safetensors`), everything else that is needed to
continue training (`training_state.json` for numbers; for tensors `training_state.safetensors`, or a folder
`training_state` of shards where each process writes its own part), and `manifest.json` with the size and sha256 of each
file, and the configuration, vocabulary and run that the weights belong to. No file requires pickle.

The libraries that write and read tensors detect a truncated file, but not a flipped bit; the manifest detects both.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from txl.errors import UserError
from txl.files import JsonObject, file_sha256, follow_umask, is_full, read_json, reason_of, sync

if TYPE_CHECKING:  # files are verified without PyTorch, which takes seconds to import
    from torch import Tensor

    from txl.data.vocabulary import Vocabulary
    from txl.models.language_model import LanguageModel

MODEL_FILE = "model.safetensors"
STATE_TENSORS_FILE = "training_state.safetensors"
STATE_SHARDS = "training_state"
STATE_FILE = "training_state.json"
MANIFEST_FILE = "manifest.json"
_FORMAT = 2
_PARTIAL = ".partial"
_CHUNK = 1 << 20  # bytes compared at a time
OTHERWISE = "use another checkpoint or restore it from a copy"


@dataclass
class Contents:
    """Weights, training state and identity that a checkpoint holds."""

    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]
    numbers: JsonObject
    belongs: JsonObject = field(default_factory=dict)  # what the weights belong to (`weights_identity`)
    # Writes the tensors of all processes into a folder, and returns when all are written.
    write_shards: Callable[[Path], None] | None = None
    # Tells waiting processes, if `write_shards` was not called, that no shards will be written.
    give_up: Callable[[], None] | None = None


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"step-{step:08d}"


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, including damaged ones, oldest first."""
    names = [path.name for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]
    return sorted(names, key=checkpoint_step)


def checkpoint_step(name: str) -> int:
    """Return the training step of a checkpoint's directory, step-NNNNNNNN."""
    return int(name.removeprefix("step-"))


def weights_identity(model: JsonObject, vocabulary: Path, run_id: str | None = None) -> JsonObject:
    """Return a checkpoint's identity: the model's configuration, the hash of the vocabulary's file, and the run."""
    try:
        sha256 = file_sha256(vocabulary) if vocabulary.exists() else None
    except OSError as error:
        raise UserError(f"{vocabulary}: cannot be read ({error.strerror})") from None
    # As JSON gives the values back: lists for tuples.
    return {"model": json.loads(json.dumps(model)), "vocabulary_sha256": sha256, "run": run_id}


def tensors_digest(tensors: Mapping[str, Tensor], more: str = "") -> str:
    """Return a digest of named tensors and of a text, by which compressed files and streams recognise a model."""
    import torch

    total = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    total.update(more.encode())
    return total.hexdigest()


def model_digest(model: LanguageModel, vocabulary: Vocabulary) -> str:
    """Return a digest of a model's weights and configuration, and of its vocabulary."""
    described = [asdict(model.config), vocabulary.to_json()]
    return tensors_digest(model.state_dict(), json.dumps(described, sort_keys=True))


def write_checkpoint(folder: Path, step: int, contents: Contents) -> Path:
    """Write a checkpoint into `folder` and return its directory.

    The files are written into a temporary directory, read back and synced, and the directory is then renamed. After a
    crash or on a full disk there is either a complete checkpoint or none. A checkpoint of the same step is replaced.

    Raises:
        UserError: if the checkpoint cannot be written; an incomplete checkpoint is removed.
    """
    final = folder / checkpoint_name(step)
    temporary, replaced = folder / f".{final.name}{_PARTIAL}", folder / f".{final.name}.replaced{_PARTIAL}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
        temporary.mkdir()
        if contents.write_shards is not None:
            (temporary / STATE_SHARDS).mkdir()
            contents.write_shards(temporary / STATE_SHARDS)  # the other processes wait for this call
        for name, tensors in ((MODEL_FILE, contents.weights), (STATE_TENSORS_FILE, contents.tensors)):
            _write_tensors(temporary / name, tensors)
        (temporary / STATE_FILE).write_text(json.dumps(contents.numbers, indent=1), encoding="utf-8")
        files = {
            path.relative_to(temporary).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        manifest = {"format": _FORMAT, "step": step, **contents.belongs, "files": files}
        manifest["sha256"] = _own_sha256(manifest)
        (temporary / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        if final.exists():
            os.rename(final, replaced)
        os.rename(temporary, final)
        sync(folder)
    except (OSError, SafetensorError) as error:
        # The safetensors library reports a full disk by an exception of its own.
        remedy = "make room" if is_full(error) else "see to it that files can be written there"
        raise UserError(
            f"{final}: the checkpoint could not be written ({reason_of(error)}); older checkpoints are untouched: "
            f"{remedy}, then run the same command to go on from the last one"
        ) from None
    finally:
        remove_partial(folder)
    return final


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of tensors, and compare the content of the file with the tensors."""
    import safetensors.torch
    import torch

    contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, path)
    follow_umask(path)
    # Not read by the library, which maps the file into memory: it would count as memory of this process.
    with open(path, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
        for key, tensor in contiguous.items():
            file.seek(8 + header_size + header[key]["data_offsets"][0])
            content = tensor.reshape(-1).view(torch.uint8).numpy().data
            for first in range(0, len(content), _CHUNK):
                piece = content[first : first + _CHUNK]
                if file.read(len(piece)) != piece:
                    raise OSError(5, f"{key} was not read back as it was written")


def remove_partial(folder: Path) -> None:
    """Remove the remains of an interrupted write.

    If a replacement was interrupted between its two renames, the replaced checkpoint gets its name back.
    """
    for path in folder.glob(f".step-*{_PARTIAL}"):
        replaced = re.fullmatch(rf"\.(step-\d+)\.replaced{re.escape(_PARTIAL)}", path.name)
        if replaced and not (folder / replaced[1]).exists():
            os.rename(path, folder / replaced[1])
        else:
            shutil.rmtree(path, ignore_errors=True)


class VerifiedCheckpoint:
    """A checkpoint whose files are compared with its manifest, each once, before they are used.

    All methods raise UserError, with the file's name, if a file is missing, truncated or altered.
    """

    def __init__(self, path: Path):
        self.path, manifest_path = path, path / MANIFEST_FILE
        if not manifest_path.is_file():
            raise UserError(f"{path}: not a whole checkpoint ({MANIFEST_FILE} is missing)")
        self.manifest = manifest = _json_object(manifest_path)
        if manifest.get("format") != _FORMAT:
            found = f"a checkpoint of format {manifest.get('format')!r}"
            raise UserError(f"{path}: {found}; this version reads format {_FORMAT}")
        for name, kind in (("step", int), ("files", dict), ("model", dict)):
            if type(manifest.get(name, {} if name == "model" else None)) is not kind:
                raise UserError(f"{manifest_path}: damaged (its {name} is {manifest.get(name)!r})")
        for name in map(PurePosixPath, manifest["files"]):
            if name.is_absolute() or ".." in name.parts:
                raise UserError(f"{manifest_path}: names a file outside of its directory ({name})")
        if manifest.get("sha256") != _own_sha256(manifest) or checkpoint_name(manifest["step"]) != path.name:
            raise UserError(f"{manifest_path}: altered, or of another step than {path.name}; {OTHERWISE}")
        self._verified: set[str] = set()

    def verify(self, run_id: str | None = None) -> None:
        """Compare every file with the manifest, and the manifest with the run that is to continue, if it is known."""
        if None not in (run_id, self.manifest.get("run")) and self.manifest["run"] != run_id:
            raise UserError(f"{self.path}: a checkpoint of another run, which was copied here")
        for name in dict.fromkeys((MODEL_FILE, STATE_TENSORS_FILE, STATE_FILE, *self.manifest["files"])):
            self._verify_file(name)
        self.state()

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Read the tensors of a file; weights must be finite."""
        import safetensors.torch

        self._verify_file(name)
        try:
            tensors = safetensors.torch.load_file(self.path / name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path / name}: cannot be read ({error})") from None
        for key, tensor in tensors.items():
            if name == MODEL_FILE and tensor.is_floating_point() and not tensor.isfinite().all():
                raise UserError(f"{self.path / name}: {key} is not finite: the training diverged; {OTHERWISE}")
        return tensors

    def state(self) -> JsonObject:
        """Read the numbers of the training state."""
        self._verify_file(STATE_FILE)
        return _json_object(self.path / STATE_FILE)

    def check_belongs(self, model: JsonObject, vocabulary: Path) -> None:
        """Refuse a model configuration or a vocabulary other than the one that the weights belong to."""
        here, known = weights_identity(model, vocabulary), self.manifest.get("vocabulary_sha256")
        if known is not None and known != here["vocabulary_sha256"]:
            kind = "altered" if vocabulary.exists() else "missing"
            raise UserError(f"{vocabulary}: {kind} since {self.path.name} was written; restore it from a copy")
        written = self.manifest.get("model") or {}
        for name, value in here["model"].items():
            # The weights do not depend on the backend: backends differ only in rounding.
            if name != "attention" and name in written and written[name] != value:
                raise UserError(
                    f"{self.path.parent.parent / 'config.json'}: model.{name} is {value}, but {self.path.name} was "
                    f"written with {written[name]}; set it back"
                )

    def _verify_file(self, name: str) -> None:
        """Compare the size and sha256 of a file with the manifest, unless that was done before."""
        if name in self._verified:
            return
        path = self.path / name
        try:
            n_bytes, sha256 = self.manifest["files"][name]["bytes"], self.manifest["files"][name]["sha256"]
        except (KeyError, TypeError) as error:
            raise UserError(f"{self.path / MANIFEST_FILE}: does not list {name} ({error}); {OTHERWISE}") from None
        try:
            size = path.stat().st_size
            if size != n_bytes:
                kind = "truncated" if size < n_bytes else "altered"
                raise UserError(f"{path}: {kind}: {size} bytes, the manifest says {n_bytes}; {OTHERWISE}")
            if file_sha256(path) != sha256:
                raise UserError(f"{path}: altered: its sha256 is not the one in the manifest; {OTHERWISE}")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({reason_of(error)}); {OTHERWISE}") from None
        self._verified.add(name)


def _own_sha256(manifest: JsonObject) -> str:
    """Return the sha256 of a manifest without its own entry `sha256`."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _json_object(path: Path) -> JsonObject:
    try:
        value = read_json(path, OTHERWISE)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {OTHERWISE}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: damaged (not an object); {OTHERWISE}")
    return value


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that cannot be used to an unused name, under which it is ignored; return the new path."""
    number = 0
    while (target := checkpoint.with_name(f"refused-{checkpoint.name}{f'-{number}' if number else ''}")).exists():
        number += 1
    try:
        os.rename(checkpoint, target)
    except OSError as error:
        raise UserError(f"{checkpoint}: cannot be set aside ({error.strerror})") from None
    return target


def prune(folder: Path, keep: int, protected: set[str]) -> list[str]:
    """Delete all but the newest `keep` checkpoints and the protected ones; return the names whose deletion failed."""
    return [name for name in checkpoint_names(folder)[:-keep] if name not in protected and not _deleted(folder / name)]


def _deleted(checkpoint: Path) -> bool:
    """Delete a checkpoint and return whether that succeeded."""
    # Renamed first: the remains of an interrupted deletion must not look like a damaged checkpoint.
    doomed = checkpoint.with_name(f".{checkpoint.name}.deleted{_PARTIAL}")
    try:
        os.rename(checkpoint, doomed)
        shutil.rmtree(doomed)
    except OSError:
        return False
    return True


def remove_later(folder: Path, step: int) -> None:
    """Delete, or else set aside, the checkpoints after `step`, so that training does not resume from them."""
    for name in checkpoint_names(folder):
        if checkpoint_step(name) > step and not _deleted(folder / name) and (folder / name).exists():
            set_aside(folder / name)
