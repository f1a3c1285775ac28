"""The authors' PyTorch checkpoints (a pickled module or a dictionary of weights), NVIDIA's, and Hugging Face's.

The settings of a pickled module are read from its attributes. In the authors' and NVIDIA's code, the logit of cluster i
of C is in row C-i of the cluster weights; in Hugging Face's directories it is in row i-1, as in this package, and
tensors that the model shares may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from txl.config import FieldValues
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError, brief
from txl.files import JsonObject, read_json
from txl.interop.conversion import Source, flip_clusters, restore_shared, window_of
from txl.interop.safe_pickle import StandIn
from txl.interop.torch_files import read_torch_file
from txl.interop.vocabulary_files import read_beside, vocabulary_from

MODEL_TYPE = "transfo-xl"
VOCABULARIES = ("vocab.pkl", "vocab.bin", "vocab.txt")
_MOST_MODULES = 100_000
_NUMBERS = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "div_val", "mem_len")
_RATES = ("dropout", "dropatt", "layer_norm_epsilon")


def source_of(value: object, path: str) -> Source:
    """Return the checkpoint in an object read from a torch.save file."""
    if isinstance(value, StandIn):
        return _from_module(value, path)
    if isinstance(value, dict) and "model_state" in value:
        return _from_nvidia(value, path)
    if isinstance(value, dict) and value and all(isinstance(tensor, Tensor) for tensor in value.values()):
        tensors = {_bare(str(name)): tensor for name, tensor in value.items()}
        if not any(name.startswith("word_emb.") or ".dec_attn." in name for name in tensors):
            raise UserError(f"{path}: its first tensor is {next(iter(tensors))}; expected those of a Transformer-XL")
        if "r_emb" in tensors:
            _refuse_encoding(1 if "r_bias" in tensors else 3, path)
        flip_clusters(tensors)
        note = "a dictionary of weights does not state memory, clamp, window and pre-norm: set them by option"
        return Source("a dictionary of the authors' weights", tensors, notes=[note])
    expected = "the authors' pickled model, a dictionary of its weights, or NVIDIA's checkpoint"
    raise UserError(f"{path}: holds a {type(value).__name__}", expected=expected)


def stated_settings(stated: Mapping[str, Any], path: str, *, itself_extra: bool) -> FieldValues:
    """Return the `TransformerXLConfig` fields that the configuration of an earlier implementation states.

    With `itself_extra`, a query's own key is not among the `mem_len` keys, see `window_of`. A model that cannot be
    imported and a value of the wrong type are refused.
    """
    for name in ("attn_type", "ext_len", "sample_softmax", "cutoffs", "same_length", "mem_len"):
        if isinstance(stated.get(name), Tensor):
            raise UserError(f"{path}: {name} is a tensor; expected a plain value")
    _refuse_encoding(stated.get("attn_type"), path)
    # An extended context leaves gaps in memory; -1 or 0 means no sampling of the softmax.
    for name, kinds in (("ext_len", int), ("sample_softmax", (int, float))):
        value = stated.get(name)
        if isinstance(value, kinds) and value > 0:
            raise UserError(f"{path}: {name} is {brief(value)}; a model trained with it cannot be imported")
    for name in _RATES:
        if name in stated and (type(stated[name]) not in (int, float) or not abs(stated[name]) < 1e9):
            raise UserError(f"{path}: {name} is {brief(stated[name])}; expected a number")
    cutoffs = stated.get("cutoffs") or ()
    if not isinstance(cutoffs, (list, tuple)) or not all(type(cutoff) is int for cutoff in cutoffs):
        raise UserError(f"{path}: cutoffs is {brief(cutoffs)}; expected a list of whole numbers")
    clamp = stated.get("clamp_len")  # -1 or 0 means no clamp
    settings: FieldValues = {name: stated[name] for name in _NUMBERS if type(stated.get(name)) is int}
    settings |= {name: float(stated[name]) for name in ("dropout", "dropatt") if name in stated}
    return settings | {
        "cutoffs": tuple(cutoffs),
        "pre_norm": bool(stated.get("pre_lnorm")),
        "clamp_len": clamp if type(clamp) is int and clamp > 0 else None,
        "window": window_of(stated.get("same_length"), stated.get("mem_len"), itself_extra=itself_extra),
    }


def _refuse_encoding(kind: object, path: str) -> None:
    if kind not in (0, None):
        raise UserError(f"{path}: encoding type {brief(kind)}; only type 0, the paper's own, can be imported")


def _modules(module: StandIn | None) -> dict[str, StandIn]:
    modules = None if module is None else StandIn.attribute(module, "_modules")
    if not isinstance(modules, dict):
        return {}
    return {str(name): child for name, child in modules.items() if isinstance(child, StandIn)}


def _from_module(module: StandIn, path: str) -> Source:
    """Return the model in a pickled module, which wrappers such as DataParallel and FP16_Module may hold."""
    for _ in range(8):
        module = _modules(module).get("module", module)
    tensors: dict[str, Tensor] = {}
    number = count()

    def walk(part: StandIn, prefix: str, depth: int) -> None:
        if depth > 16 or next(number) > _MOST_MODULES:
            raise UserError(f"{path}: has too many modules, or nested too deeply; expected the authors' pickled model")
        for kind in ("_parameters", "_buffers"):
            values = StandIn.attribute(part, kind)
            for name, tensor in values.items() if isinstance(values, dict) else ():
                if isinstance(tensor, Tensor):
                    tensors[f"{prefix}{name}"] = tensor
        for name, child in _modules(part).items():
            walk(child, f"{prefix}{name}.", depth + 1)

    walk(module, "", 0)
    if not tensors:
        raise UserError(f"{path}: holds a {module.origin} without weights; expected the authors' pickled model")
    flip_clusters(tensors)
    names = (*_NUMBERS, "attn_type", "ext_len", "sample_softmax", "clamp_len", "same_length")
    stated = {name: StandIn.attribute(module, name) for name in names if StandIn.attribute(module, name) is not None}
    modules = _modules(module)
    if (embedding := modules.get("word_emb")) is not None:
        cutoffs = StandIn.attribute(embedding, "cutoffs")
        stated["cutoffs"] = cutoffs[:-1] if isinstance(cutoffs, list) else None  # the last is the vocabulary's size
        stated["div_val"] = StandIn.attribute(embedding, "div_val")
    attention = _modules(_modules(modules.get("layers")).get("0")).get("dec_attn")
    if attention is not None:
        stated["pre_lnorm"] = StandIn.attribute(attention, "pre_lnorm")
    for name, dropout in (("dropout", modules.get("drop")), ("dropatt", _modules(attention).get("dropatt"))):
        rate = None if dropout is None else StandIn.attribute(dropout, "p")
        if isinstance(rate, (int, float)) and 0 <= rate < 1:
            stated[name] = rate
    segment = StandIn.attribute(module, "tgt_len")
    segment = segment if type(segment) is int and segment > 0 else None
    return Source("the authors' model.pt", tensors, stated_settings(stated, path, itself_extra=False), segment)


def _from_nvidia(value: dict[object, object], path: str) -> Source:
    weights, stated = value["model_state"], value.get("model_config")
    if not isinstance(weights, dict) or not isinstance(stated, dict):
        raise UserError(f"{path}: has a model_state, but no model_config; expected NVIDIA's checkpoint")
    settings = stated_settings(stated, path, itself_extra=True)
    segment = stated.get("tgt_len")
    if segment is not None and type(segment) is not int:
        raise UserError(f"{path}: tgt_len is {brief(segment)}; expected a whole number")
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        # `shared_out_projs` are copies of the embedding's projections.
        if isinstance(tensor, Tensor) and not (name := _bare(str(name))).startswith("crit.shared_out_projs."):
            tensors[re.sub(r"^crit\.out_layers_(bias|weight)e?s\.(\d+)$", r"crit.out_layers.\2.\1", name)] = tensor
    flip_clusters(tensors)
    vocab = value.get("vocab")
    return Source(
        "NVIDIA's checkpoint",
        tensors,
        settings,
        segment=segment,
        vocabulary=lambda: None if vocab is None else vocabulary_from(vocab, f"{path}: vocab"),
    )


def _bare(name: str) -> str:
    return re.sub(r"^(module\.)+", "", name)


def is_huggingface(folder: Path) -> bool:
    """Return whether a directory holds a Transformer-XL in Hugging Face's format."""
    config = stated_config(folder)
    return config is not None and (
        config.get("model_type") == MODEL_TYPE or "TransfoXL" in str(config.get("architectures"))
    )


def stated_config(folder: Path) -> JsonObject | None:
    """Return the content of config.json; None if the file is missing or is not a JSON object."""
    try:
        values = read_json(folder / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return values if isinstance(values, dict) else None


def read_huggingface(folder: Path) -> Source:
    """Read the checkpoint in a directory."""
    config = stated_config(folder) or {}
    settings = stated_settings(config, str(folder), itself_extra=False)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in read_weights(folder).items()}
    settings["untie_r"] = untied = bool(config.get("untie_r", True))
    if not untied:
        tensors = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.dec_attn\.r_.*_bias", name)}
    restore_shared(tensors, bool(config.get("proj_share_all_but_first", True)))
    size = config.get("vocab_size")
    n_token = sum(len(bias) for name, bias in tensors.items() if re.match(r"crit\.out_layers\..*bias", name))
    if n_token and isinstance(size, int) and size != n_token:
        raise UserError(f"{folder}: config.json says {size} tokens, the weights have {n_token}")
    settings["layer_norm_eps"] = float(config.get("layer_norm_epsilon", 1e-5))
    stated = config.get("architectures")
    architecture = stated[0] if isinstance(stated, list) and stated else "TransfoXLLMHeadModel"
    notes: list[str] = []

    def vocabulary() -> Vocabulary | None:
        path = folder / "added_tokens.json"
        added = read_json(path) if path.is_file() else {}
        if not isinstance(added, dict) or not all(type(number) is int for number in added.values()):
            raise UserError(f"{path}: expected tokens with their ids")
        if unused := [token for token, number in added.items() if number >= n_token]:
            notes.append(f"added tokens for which the model has no weights are left out: {', '.join(unused[:8])}")
        return read_beside(folder, VOCABULARIES, {number: token for token, number in added.items() if number < n_token})

    return Source(f"Hugging Face's {architecture}", tensors, settings, vocabulary=vocabulary, notes=notes)


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
