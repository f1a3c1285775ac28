"""Import a foreign checkpoint as an ordinary run: read, convert and verify, then write completely or not at all."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

import torch

from txl.config import DataConfig, EvalConfig, RunConfig, validate
from txl.data.vocabulary import Vocabulary
from txl.errors import Field, UserError
from txl.files import JsonObject, check_new_directory
from txl.interop.conversion import Source, converted
from txl.interop.export_run import read_own_export, stated_by_export, write_directory
from txl.interop.original import is_huggingface, read_huggingface, source_of
from txl.interop.tensorflow import read_tensorflow, tensorflow_prefix
from txl.interop.torch_files import is_torch_file, read_torch_file
from txl.interop.vocabulary_files import read_beside
from txl.models import build_model
from txl.runs.checkpoints import Contents, weights_identity, write_checkpoint
from txl.runs.directory import RunDirectory, load_weights
from txl.runs.events import EventName

_PATTERNS = ("config.json", "*.safetensors", "*.index.json", "pytorch_model*.bin", "vocab.*", "added_tokens.json")


def checkpoint_path(name: str, quiet: bool = False) -> Path:
    """Return the path of a checkpoint on disk; if `name` is that of a model on the Hub, download it first.

    The Hub's client resumes an interrupted download and caches a complete one.
    """
    path = Path(os.path.expanduser(name))
    if path.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or path.with_name(path.name + ".index").exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (disable_progress_bars if quiet else enable_progress_bars)()
    try:
        return Path(snapshot_download(name, allow_patterns=list(_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{name}: no such file or directory, and not found on the Hub ({reason})") from None


def read_source(path: Path) -> Source:
    """Read a checkpoint of any supported kind; the kind is recognised from the content."""
    if path.is_dir() and is_huggingface(path):
        return read_huggingface(path)
    if (prefix := tensorflow_prefix(path)) is not None:
        return read_tensorflow(prefix)
    file = path
    if path.is_dir():
        file = next((path / name for name in ("model.pt", "checkpoint_best.pt") if (path / name).is_file()), path)
    if not file.exists() or file.is_dir() or not is_torch_file(file):
        kinds = "model.pt, checkpoint_best.pt, a directory of Hugging Face's, or a TensorFlow checkpoint"
        problem = "no checkpoint there" if path.exists() else "no such file or directory"
        raise UserError(f"{path}: {problem}", expected=kinds)
    return source_of(read_torch_file(file), str(file))


def import_run(
    path: Path,
    out: Path,
    *,
    vocabulary: Vocabulary | None = None,
    model_options: JsonObject | None = None,
    data: DataConfig | None = None,
    name: str | None = None,
) -> tuple[RunConfig, list[str]]:
    """Import a foreign checkpoint into a new run directory; return the run's configuration, and notes for the user.

    Args:
        path: path of the checkpoint.
        out: directory to write; must be missing or empty.
        vocabulary: vocabulary that replaces the checkpoint's; None: the checkpoint's.
        model_options: fields of `TransformerXLConfig` that the file does not state.
        data: default text of `txl eval`; None: `txl eval` requires an option that names the text.
        name: name of the run; None: that of the file or directory.

    Raises:
        UserError: if the checkpoint cannot be read, contradicts itself or the options, or `out` cannot be written. All
            files written to `out` are then removed.
    """
    check_new_directory(out)
    stated = stated_by_export(path) if path.is_dir() else None
    if stated is not None:
        model, weights, tested = read_own_export(path, stated, model_options or {})
        source = Source("an export of this project", {}, vocabulary=lambda: read_beside(path, ("vocabulary.json",)))
    else:
        source, tested = read_source(path), None
        model, weights = converted(source, model_options or {})
    n_token = len(weights["softmax.bias"])
    if vocabulary is None:
        try:
            vocabulary = source.vocabulary()
        except UserError as error:
            raise UserError((error, "; ", Field("vocabulary", "FILE"), " gives another vocabulary")) from None
    if vocabulary is not None and len(vocabulary) != n_token:
        raise UserError(f"the vocabulary has {len(vocabulary)} symbols, the checkpoint {n_token}; expected the same")
    run = RunConfig(name=name or path.resolve().name, model=model)
    run.data = dataclasses.replace(data or DataConfig(corpus=""))
    if vocabulary is not None:
        run.data.unit = vocabulary.kind  # pyright: ignore[reportAttributeAccessIssue]
    segment = source.segment or min(128, max(1, model.mem_len))
    run.train = dataclasses.replace(run.train, segment=segment)
    lengths = {"mem_len": model.mem_len, "window": model.window, "clamp_len": model.clamp_len}
    run.eval = dataclasses.replace(tested or EvalConfig(segment=segment), **lengths)
    validate(run)
    RunConfig.from_dict(run.to_dict())  # write only a configuration that can be read again
    with torch.device("meta"):
        network = build_model(run.model, n_token)
    load_weights(network, weights, str(path), assign=True)  # requires every tensor, with the right shape

    def fill(folder: Path) -> None:
        directory, tensors = RunDirectory(folder), network.state_dict()
        if vocabulary is not None:
            vocabulary.save(folder / "vocabulary.json")
        belongs = weights_identity(dataclasses.asdict(run.model), directory.path / "vocabulary.json")
        contents = Contents(tensors, {}, {"imported_from": source.kind}, belongs)
        directory.set_pointer("latest", write_checkpoint(directory.checkpoints, 0, contents).name)
        directory.append(
            EventName.IMPORT,
            0,
            source=source.kind,
            config=run.to_dict(),
            total_parameters=sum(tensor.numel() for tensor in tensors.values()),
            command=sys.argv,
        )
        directory.write_config(run)

    write_directory(out, fill)
    return run, [*source.notes, *(["no vocabulary: text cannot be read or printed"] if vocabulary is None else [])]
