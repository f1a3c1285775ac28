"""Reading back what `txl export` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from txl.config import MODEL_FIELDS, EvalConfig, RunConfig, TransformerXLConfig, model_from_dict
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError
from txl.interop.export_run import EXPORT_KIND, HUGGINGFACE_TYPE
from txl.interop.huggingface_checkpoint import read_weights
from txl.interop.names import FREE


def is_own_export(folder: Path) -> bool:
    """Whether a directory was written by `txl export`."""
    return _stated(folder) is not None


def _stated(folder: Path) -> dict[str, Any] | None:
    """The model's fields as config.json has them, if it is one of ours."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict):
        return None
    if values.get("format") == EXPORT_KIND and isinstance(values.get("model"), dict):
        return values["model"]
    return values if values.get("model_type") == HUGGINGFACE_TYPE else None


def read_test_settings(folder: Path) -> EvalConfig | None:
    """How the exported run was tested, if the export says it.

    Raises:
        UserError: if what it says is no such thing.
    """
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return RunConfig.from_dict({"eval": values["eval"]}).eval if "eval" in values else None


def read_own_export(
    folder: Path, options: dict[str, Any]
) -> tuple[TransformerXLConfig, dict[str, Tensor], Vocabulary | None]:
    """Configuration, weights and vocabulary.

    Args:
        folder: what `txl export` wrote, or transformers' `save_pretrained` after it.
        options: fields of `TransformerXLConfig` that the user states.

    Raises:
        UserError: if something is missing, damaged, or contradicts the options.
    """
    stated = _stated(folder) or {}
    known = {name: value for name, value in stated.items() if name in MODEL_FIELDS}
    for name, value in options.items():
        if name not in FREE and name in known and known[name] != value:
            raise UserError(f"model.{name} is {value}, but {folder} says {known[name]}; leave the option out")
        known[name] = list(value) if isinstance(value, tuple) else value
    model = model_from_dict(known)
    if not isinstance(model, TransformerXLConfig):
        raise UserError(f"{folder}: {model.chosen_by}; only Transformer-XL itself is exported and imported")
    weights = read_weights(folder)
    weights = {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}
    if "softmax.bias" not in weights:
        raise UserError(f"{folder}: the tensor softmax.bias is missing")
    named = folder / "vocabulary.json"
    return model, weights, Vocabulary.load(named) if named.is_file() else None
