"""Directories of Hugging Face's `TransfoXLLMHeadModel`: config.json, safetensors or pytorch_model.bin, vocabulary.

The file may leave out tensors that the model shares. The logit of cluster i is in row i-1, as in this package.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from txl.data.vocabulary import Vocabulary
from txl.errors import UserError
from txl.files import JsonObject, read_json
from txl.interop.conversion import restore_shared
from txl.interop.original import stated_settings
from txl.interop.source import Source
from txl.interop.torch_files import read_torch_file
from txl.interop.vocabularies import read_beside

MODEL_TYPE = "transfo-xl"
VOCABULARIES = ("vocab.pkl", "vocab.bin", "vocab.txt")


def is_huggingface(folder: Path) -> bool:
    """Return whether a directory holds a Transformer-XL in Hugging Face's format."""
    config = stated_config(folder)
    return config is not None and (
        config.get("model_type") == MODEL_TYPE or "TransfoXL" in str(config.get("architectures"))
    )


def stated_config(folder: Path) -> JsonObject | None:
    """Return the content of config.json; None if the file is missing or is not a JSON object.

    Raises:
        UserError: if the file is damaged.
    """
    try:
        values = read_json(folder / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return values if isinstance(values, dict) else None


def read_huggingface(folder: Path) -> Source:
    """Read the checkpoint in a directory."""
    config = stated_config(folder)
    if config is None:
        raise UserError(f"{folder}: config.json is missing or no JSON; expected a directory of Hugging Face's")
    settings = stated_settings(config, str(folder), itself_extra=False)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in read_weights(folder).items()}
    untied = bool(config.get("untie_r", True))
    if not untied:
        tensors = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.dec_attn\.r_.*_bias", name)}
    all_but_first = bool(config.get("proj_share_all_but_first", True))
    restore_shared(tensors, all_but_first)

    settings["untie_r"] = untied
    size = config.get("vocab_size")
    n_token = sum(len(bias) for name, bias in tensors.items() if re.match(r"crit\.out_layers\..*bias", name))
    if n_token and isinstance(size, int) and size != n_token:
        raise UserError(f"{folder}: config.json says {size} tokens, the weights have {n_token}")
    settings["layer_norm_eps"] = float(config.get("layer_norm_epsilon", 1e-5))
    stated = config.get("architectures")
    architecture = stated[0] if isinstance(stated, list) and stated else "TransfoXLLMHeadModel"
    source = Source(f"Hugging Face's {architecture}", tensors, settings)
    source.vocabulary = partial(_vocabulary, folder, n_token, source.notes)
    return source


def _vocabulary(folder: Path, n_token: int, notes: list[str]) -> Vocabulary | None:
    """Read the vocabulary with its added tokens, as far as the model has rows for them; the others are noted."""
    path = folder / "added_tokens.json"
    added = read_json(path) if path.is_file() else {}
    if not isinstance(added, dict) or not all(type(number) is int for number in added.values()):
        raise UserError(f"{path}: expected tokens with their ids")
    if unused := [token for token, number in added.items() if number >= n_token]:
        notes.append(f"added tokens for which the model has no weights are left out: {', '.join(unused[:8])}")
    return read_beside(folder, VOCABULARIES, {number: token for token, number in added.items() if number < n_token})


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a directory that `save_pretrained` wrote, from one file or from several and an index."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return _tensors_of(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                parts = sorted(set(read_json(index)["weight_map"].values()), key=str)
            except (KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{index}: damaged ({type(error).__name__}: {error})") from None
            if any(not isinstance(part, str) or "/" in part or "\\" in part or part.startswith(".") for part in parts):
                raise UserError(f"{index}: names files outside of its directory")
            return {key: tensor for part in parts for key, tensor in _tensors_of(folder / part).items()}
    raise UserError(f"{folder}: no weights there; expected model.safetensors or pytorch_model.bin")


def _tensors_of(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path}: missing")
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: damaged ({str(error)[:200]})") from None
    value = read_torch_file(path)
    if not isinstance(value, dict) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        raise UserError(f"{path}: not a dictionary of tensors")
    return {str(name): tensor for name, tensor in value.items()}
