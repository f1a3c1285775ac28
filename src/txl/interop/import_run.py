"""Import a foreign checkpoint as an ordinary run: read, convert and verify, then write completely or not at all."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

from txl.config import DataConfig, EvalConfig, RunConfig, TransformerXLConfig, validate
from txl.data.vocabulary import Vocabulary
from txl.errors import Field, UserError
from txl.files import JsonObject, check_new_directory
from txl.interop.conversion import converted
from txl.interop.export_run import is_own_export, read_own_export, read_test_settings
from txl.interop.huggingface_checkpoint import is_huggingface, read_huggingface
from txl.interop.new_directory import write_directory
from txl.interop.original import source_of
from txl.interop.source import Source
from txl.interop.tensorflow import read_tensorflow, tensorflow_prefix
from txl.interop.torch_files import is_torch_file, read_torch_file
from txl.interop.vocabularies import read_beside
from txl.models import build_model
from txl.runs.checkpoints import Contents, weights_identity, write_checkpoint
from txl.runs.directory import RunDirectory, load_weights
from txl.runs.events import EventName


def read_source(path: Path) -> Source:
    """Read a checkpoint of any supported kind; the kind is recognised from the content."""
    if not path.exists() and tensorflow_prefix(path) is None:
        raise UserError(f"{path}: no such file or directory; expected a checkpoint")
    if path.is_dir() and is_huggingface(path):
        return read_huggingface(path)
    prefix = tensorflow_prefix(path)
    if prefix is not None:
        return read_tensorflow(prefix)
    if path.is_dir():
        inside = next((path / name for name in ("model.pt", "checkpoint_best.pt") if (path / name).is_file()), None)
        if inside is None:
            raise UserError(
                f"{path}: no checkpoint there; expected model.pt, checkpoint_best.pt, a config.json of Hugging Face's "
                f"with its weights, or a TensorFlow checkpoint"
            )
        path = inside
    if not is_torch_file(path):
        raise UserError(
            f"{path}: not a file that torch.save wrote; expected model.pt, a directory of Hugging Face's, or a "
            f"TensorFlow checkpoint"
        )
    return source_of(read_torch_file(path), str(path))


def import_run(
    path: Path,
    out: Path,
    *,
    vocabulary: Vocabulary | None = None,
    model_options: JsonObject | None = None,
    data: DataConfig | None = None,
    name: str | None = None,
) -> tuple[RunConfig, list[str]]:
    """Import a foreign checkpoint into a new run directory.

    Args:
        path: path of the checkpoint.
        out: directory to write; must be missing or empty.
        vocabulary: vocabulary that replaces the checkpoint's; None: the checkpoint's.
        model_options: fields of `TransformerXLConfig` that the file does not state.
        data: default text of `txl eval`; None: `txl eval` requires an option that names the text.
        name: name of the run; None: that of the file or directory.

    Returns:
        The run's configuration, and notes for the user.

    Raises:
        UserError: if the checkpoint cannot be read, contradicts itself or the options, or `out` cannot be written. All
            files written to `out` are then removed.
    """
    check_new_directory(out)
    tested = None
    if path.is_dir() and is_own_export(path):
        tested = read_test_settings(path)
        model, weights = read_own_export(path, model_options or {})
        source = Source("an export of this project", {}, vocabulary=lambda: read_beside(path, ("vocabulary.json",)))
    else:
        source = read_source(path)
        model, weights = converted(source, model_options or {})
    n_token = len(weights["softmax.bias"])
    if vocabulary is None:
        try:
            vocabulary = source.vocabulary()
        except UserError as error:
            raise UserError((error, "; ", Field("vocabulary", "FILE"), " gives another vocabulary")) from None
    if vocabulary is not None and len(vocabulary) != n_token:
        raise UserError(f"the vocabulary has {len(vocabulary)} symbols, the checkpoint {n_token}; expected the same")
    run = _configuration(name or path.resolve().name, source, model, vocabulary, data)
    if tested is not None:
        lengths = {"mem_len": model.mem_len, "window": model.window, "clamp_len": model.clamp_len}
        run.eval = dataclasses.replace(tested, **lengths)
    validate(run)
    RunConfig.from_dict(run.to_dict())  # write only a configuration that can be read again
    with torch.device("meta"):
        network = build_model(run.model, n_token)
    load_weights(network, weights, str(path), assign=True)  # requires every tensor, with the right shape
    write_directory(out, lambda folder: _fill(RunDirectory(folder), run, vocabulary, network.state_dict(), source))
    notes = list(source.notes)
    if vocabulary is None:
        notes.append("no vocabulary: text cannot be read or printed")
    return run, notes


def _configuration(
    name: str, source: Source, model: TransformerXLConfig, vocabulary: Vocabulary | None, data: DataConfig | None
) -> RunConfig:
    run = RunConfig(name=name, model=model)
    run.data = dataclasses.replace(data or DataConfig(corpus=""))
    if vocabulary is not None:
        run.data.unit = vocabulary.kind  # pyright: ignore[reportAttributeAccessIssue]
    segment = source.segment or min(128, max(1, model.mem_len))
    run.train = dataclasses.replace(run.train, segment=segment)
    run.eval = EvalConfig(segment=segment, mem_len=model.mem_len, window=model.window, clamp_len=model.clamp_len)
    return run


def _fill(
    directory: RunDirectory, run: RunConfig, vocabulary: Vocabulary | None, weights: JsonObject, source: Source
) -> None:
    if vocabulary is not None:
        vocabulary.save(directory.path / "vocabulary.json")
    belongs = weights_identity(dataclasses.asdict(run.model), directory.path / "vocabulary.json")
    contents = Contents(weights, {}, {"imported_from": source.kind}, belongs)
    written = write_checkpoint(directory.checkpoints, 0, contents)
    directory.set_pointer("latest", written.name)
    directory.append(
        EventName.IMPORT,
        0,
        source=source.kind,
        config=run.to_dict(),
        total_parameters=sum(tensor.numel() for tensor in weights.values()),
        command=sys.argv,
    )
    directory.write_config(run)
