"""The authors' PyTorch checkpoints (`model.pt`, a pickled module, or a dictionary of weights), and NVIDIA's.

The settings of a pickled module are read from its attributes. In the authors' and NVIDIA's code, the logit of cluster i
of C is in row C-i of the cluster weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from typing import Any

from torch import Tensor

from txl.config import FieldValues
from txl.errors import UserError, brief
from txl.interop.conversion import flip_clusters
from txl.interop.safe_pickle import StandIn
from txl.interop.source import Source, length_or_none, window_of
from txl.interop.vocabularies import vocabulary_from

ENCODINGS = {
    1: "Shaw et al.'s learned relative vectors",
    2: "Vaswani et al.'s absolute sinusoid",
    3: "Al-Rfou et al.'s absolute learned vectors",
}


def source_of(value: object, path: str) -> Source:
    """Return the checkpoint in an object read from a torch.save file."""
    if isinstance(value, StandIn):
        return _from_module(_unwrapped(value), path)
    if isinstance(value, dict) and "model_state" in value:
        return _from_nvidia(value, path)
    if isinstance(value, dict) and value and all(isinstance(tensor, Tensor) for tensor in value.values()):
        names = {_bare(str(name)): tensor for name, tensor in value.items()}
        return _from_weights(names, path)
    raise UserError(
        f"{path}: holds a {type(value).__name__}; expected the authors' pickled model, a dictionary of its weights, or "
        f"NVIDIA's checkpoint"
    )


_MOST_MODULES = 100_000
_NUMBERS = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "div_val", "mem_len")
_RATES = ("dropout", "dropatt", "layer_norm_epsilon")


def stated_settings(stated: Mapping[str, Any], path: str, *, itself_extra: bool) -> FieldValues:
    """Return the `TransformerXLConfig` fields that the configuration of an earlier implementation states.

    Args:
        stated: values by name, as in Hugging Face's config.json and NVIDIA's `model_config`.
        path: path of the checkpoint, for messages.
        itself_extra: True if a query's own key is not among the `mem_len` keys, see `window_of`.

    Raises:
        UserError: if the model cannot be imported, or a value has the wrong type.
    """
    for name in ("attn_type", "ext_len", "sample_softmax", "cutoffs", "same_length", "mem_len"):
        if isinstance(stated.get(name), Tensor):
            raise UserError(f"{path}: {name} is a tensor; expected a plain value")
    refuse_encoding(stated.get("attn_type"), path)
    ext_len, n_sample = stated.get("ext_len"), stated.get("sample_softmax")
    if isinstance(ext_len, int) and ext_len > 0:
        raise UserError(
            f"{path}: an extended context of {ext_len} (ext_len); it cannot be imported, because its memory leaves gaps"
        )
    if isinstance(n_sample, (int, float)) and n_sample > 0:  # -1 or 0 means no sampling
        raise UserError(f"{path}: trained with a sampled softmax (sample_softmax), which cannot be imported")
    for name in _RATES:
        if name in stated and (type(stated[name]) not in (int, float) or not abs(stated[name]) < 1e9):
            raise UserError(f"{path}: {name} is {brief(stated[name])}; expected a number")
    cutoffs = stated.get("cutoffs") or ()
    if not isinstance(cutoffs, (list, tuple)) or not all(type(cutoff) is int for cutoff in cutoffs):
        raise UserError(f"{path}: cutoffs is {brief(cutoffs)}; expected a list of whole numbers")
    settings: FieldValues = {name: stated[name] for name in _NUMBERS if type(stated.get(name)) is int}
    settings |= {name: float(stated[name]) for name in ("dropout", "dropatt") if name in stated}
    return settings | {
        "cutoffs": tuple(cutoffs),
        "pre_norm": bool(stated.get("pre_lnorm")),
        "clamp_len": length_or_none(stated.get("clamp_len")),
        "window": window_of(stated.get("same_length"), stated.get("mem_len"), itself_extra=itself_extra),
    }


def refuse_encoding(kind: object, path: str) -> None:
    """Refuse every positional encoding except type 0, with an error that names the encoding."""
    if kind not in (0, None):
        name = ENCODINGS.get(kind, "unknown") if isinstance(kind, int) else "unknown"
        raise UserError(f"{path}: encoding type {brief(kind)} ({name}); only type 0, the paper's own, can be imported")


def _unwrapped(module: StandIn) -> StandIn:
    """Return the model inside wrappers such as DataParallel and FP16_Module."""
    for _ in range(8):
        module = _modules(module).get("module", module)
    return module


def _modules(module: StandIn) -> dict[str, StandIn]:
    modules = StandIn.attribute(module, "_modules", {})
    if not isinstance(modules, dict):
        return {}
    return {str(name): child for name, child in modules.items() if isinstance(child, StandIn)}


def _from_module(module: StandIn, path: str) -> Source:
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
    segment = StandIn.attribute(module, "tgt_len")
    return Source(
        "the authors' model.pt",
        tensors,
        stated_settings(_stated(module), path, itself_extra=False),
        segment=segment if type(segment) is int and segment > 0 else None,
    )


def _stated(module: StandIn) -> dict[str, Any]:
    """Return the settings that the attributes of a pickled model state, by the names in `stated_settings`."""
    names = (*_NUMBERS, "attn_type", "ext_len", "sample_softmax", "clamp_len", "same_length")
    stated = {name: StandIn.attribute(module, name) for name in names if StandIn.attribute(module, name) is not None}
    modules = _modules(module)
    if (embedding := modules.get("word_emb")) is not None:
        cutoffs = StandIn.attribute(embedding, "cutoffs")
        stated["cutoffs"] = cutoffs[:-1] if isinstance(cutoffs, list) else None  # the last is the vocabulary's size
        stated["div_val"] = StandIn.attribute(embedding, "div_val")
    layer = _modules(modules["layers"]).get("0") if "layers" in modules else None
    attention = _modules(layer).get("dec_attn") if layer is not None else None
    dropouts = {"dropout": modules.get("drop")}
    if attention is not None:
        stated["pre_lnorm"] = StandIn.attribute(attention, "pre_lnorm")
        dropouts["dropatt"] = _modules(attention).get("dropatt")
    for name, dropout in dropouts.items():
        rate = None if dropout is None else StandIn.attribute(dropout, "p")
        if isinstance(rate, (int, float)) and 0 <= rate < 1:
            stated[name] = rate
    return stated


def _from_weights(tensors: dict[str, Tensor], path: str) -> Source:
    if not any(name.startswith("word_emb.") or ".dec_attn." in name for name in tensors):
        raise UserError(f"{path}: its first tensor is {next(iter(tensors))}; expected the weights of a Transformer-XL")
    if "r_emb" in tensors:
        refuse_encoding(1 if "r_bias" in tensors else 3, path)
    flip_clusters(tensors)
    note = "a dictionary of weights does not state memory, clamp, window and pre-norm: set them by option"
    return Source("a dictionary of the authors' weights", tensors, notes=[note])


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
    """Return a tensor's name without the prefixes of wrappers."""
    return re.sub(r"^(module\.)+", "", name)
