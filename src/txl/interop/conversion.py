"""A foreign checkpoint, and its conversion to this package's names and configuration; no weight is recomputed.

The authors' names are those in their PyTorch code; names of other implementations are converted to the authors' names:
`word_emb.emb_layers.i.weight`, `word_emb.emb_projs.i`, `layers.n.dec_attn.{qkv_net,r_net,o_net}.weight`,
`layers.n.dec_attn.layer_norm.*`, `layers.n.pos_ff.CoreNet.{0,3}.*`, `layers.n.pos_ff.layer_norm.*`, `r_w_bias` (u) and
`r_r_bias` (v), in every layer's `dec_attn` if they are not shared, `crit.cluster_{weight,bias}`,
`crit.out_layers.i.{weight,bias}`, `crit.out_projs.i`.

Tensor shapes determine most fields of the configuration; the file's settings and the user's options state the others.
Shapes: E d_model, F d_inner, H heads, D width of a head, V vocabulary, d_i width of cluster i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, count, takewhile
from typing import Any

import torch
from torch import Tensor

from txl.config import MODEL_FIELDS, FieldValues, TransformerXLConfig
from txl.data.vocabulary import Vocabulary
from txl.errors import Field, UserError

# Fields in which an option may differ from the file: fields that do not change the meaning of the weights, and
# `layer_norm_eps`, which most files do not state.
FREE = {name for name, field in MODEL_FIELDS.items() if not field.item.metadata.get("changes_weights")}
FREE.add("layer_norm_eps")
_TABLE, _PROJECTION = "word_emb.emb_layers.{}.weight", "word_emb.emb_projs.{}"
# Names of a layer's tensors here, and in the authors' code; q, k and v are one tensor there.
_LAYER = {
    "attention.r_proj.weight": "dec_attn.r_net.weight",
    "attention.o_proj.weight": "dec_attn.o_net.weight",
    "attention.norm.weight": "dec_attn.layer_norm.weight",
    "attention.norm.bias": "dec_attn.layer_norm.bias",
    "feed_forward.norm.weight": "pos_ff.layer_norm.weight",
    "feed_forward.norm.bias": "pos_ff.layer_norm.bias",
    "feed_forward.inner.weight": "pos_ff.CoreNet.0.weight",
    "feed_forward.inner.bias": "pos_ff.CoreNet.0.bias",
    "feed_forward.outer.weight": "pos_ff.CoreNet.3.weight",
    "feed_forward.outer.bias": "pos_ff.CoreNet.3.bias",
}
_BIASES = {"u": "r_w_bias", "v": "r_r_bias"}


@dataclass
class Source:
    """A foreign checkpoint: tensors by the authors' names, and the settings that its file states."""

    kind: str  # name of the implementation that wrote the checkpoint, for messages
    tensors: dict[str, Tensor]  # by the authors' names, with cluster i's logit in row i-1
    settings: FieldValues = field(default_factory=dict)  # fields of `TransformerXLConfig`; tensors tell the others
    segment: int | None = None  # number of tokens in a segment; None if the file does not state it
    # Reads the file's vocabulary, None if it contains none; not called if the user gives one.
    vocabulary: Callable[[], Vocabulary | None] = lambda: None
    notes: list[str] = field(default_factory=list)  # for the user


def window_of(same_length: object, mem_len: object, itself_extra: bool) -> int | None:
    """Return the `window` of `same_length`: `mem_len` keys, or one more if the query's own key is extra."""
    if not same_length or not isinstance(mem_len, int) or mem_len < 1:
        return None
    return mem_len + 1 if itself_extra else mem_len


def window_after(mem_len: object, window: Any, new_mem_len: int) -> Any:
    """Return the window after a change of the memory length, which that of `same_length` follows and others do not."""
    if not isinstance(mem_len, int) or not isinstance(window, int) or not 0 <= window - mem_len <= 1:
        return window
    return new_mem_len + window - mem_len if new_mem_len > 0 else None


def converted(source: Source, options: FieldValues) -> tuple[TransformerXLConfig, dict[str, Tensor]]:
    """Return the configuration and weights of a foreign checkpoint, whose `source.tensors` is emptied.

    `options` are fields of `TransformerXLConfig` that the user states.
    """
    if not any(name.startswith("crit.out_layers.") for name in source.tensors):
        problem = f"{source.kind}: the output layer is missing (no tensor crit.out_layers.*)"
        raise UserError(problem, remedy="save a language model with its output layer")
    tensors = {name: floating(name, tensor) for name, tensor in source.tensors.items()}
    source.tensors.clear()
    config = _configuration(tensors, source, options)
    weights = _weights(tensors, config)
    left = [name for name in tensors if not name.startswith("pos_emb.")]
    if left:
        raise UserError(f"{source.kind}: the tensor {left[0]} has no place in a Transformer-XL of encoding type 0")
    return config, weights


def floating(name: str, tensor: Tensor) -> Tensor:
    """Return a vector or matrix of any floating-point type as float32; refuse numbers that are not finite."""
    if not tensor.dtype.is_floating_point or tensor.ndim == 0:
        problem = f"the tensor {name} holds {tensor.dtype} in {tensor.ndim} dimensions"
        raise UserError(problem, expected="a vector or a matrix of floating-point numbers")
    tensor = tensor.to(torch.float32)
    # Not `isfinite`, which needs several times the tensor's memory. If a tensor contains NaN, `aminmax` returns NaN.
    if tensor.numel() and not all(math.isfinite(extreme) for extreme in tensor.aminmax()):
        raise UserError(f"the tensor {name} holds numbers that are not finite; use another checkpoint")
    return tensor


def _configuration(tensors: dict[str, Tensor], source: Source, options: FieldValues) -> TransformerXLConfig:
    stated = dict(source.settings)
    for name, value in options.items():
        if name not in FREE and stated.get(name, value) != value:
            raise contradiction(name, value, f"the checkpoint says {stated[name]}")
        stated[name] = value
    memory, window = (source.settings.get(name) for name in ("mem_len", "window"))
    if memory is not None and window is not None and "mem_len" in options and "window" not in options:
        stated["window"] = window_after(memory, window, options["mem_len"])
    n_cluster, facts = n_cluster_of(tensors), shape_of(tensors, source.kind)
    if not n_cluster and "div_val" in facts:
        stated.pop("div_val", None)  # without clusters there is nothing to divide
    facts["tie_embeddings"] = _embeddings_are_tied(tensors)
    facts["tie_projections"] = _projections_tied(tensors, n_cluster + 1)
    for name, value in facts.items():
        if stated.get(name) is not None and stated[name] != value:
            raise contradiction(name, stated[name], f"the checkpoint's tensors say {value}")
        stated[name] = value
    if n_cluster and "cutoffs" not in stated:
        problem = f"the checkpoint has {n_cluster} tail clusters, but does not say where they begin"
        raise UserError(problem, remedy=("give ", Field("model.cutoffs")))
    cutoffs = stated.setdefault("cutoffs", ())
    if len(cutoffs) != n_cluster:
        raise contradiction("cutoffs", cutoffs, f"the checkpoint has {n_cluster} tail clusters")
    stated.setdefault("div_val", 2)  # one table with a projection though as wide as the model: any value but 1
    fields = TransformerXLConfig.__dataclass_fields__
    known = {name: value for name, value in stated.items() if name in fields and fields[name].init}
    return TransformerXLConfig(**{"dropout": 0.0, **known})


def contradiction(name: str, value: object, found: str) -> UserError:
    """Return the error for a field of the model that contradicts the checkpoint."""
    return UserError(field=f"model.{name}", value=value, problem=found, remedy="leave the option out")


def shape_of(tensors: dict[str, Tensor], kind: str) -> FieldValues:
    """Return the `TransformerXLConfig` fields that the shapes determine; `cutoffs` only if each cluster has a table."""

    def shape(name: str, dimensions: int) -> list[int]:
        if name not in tensors:
            raise UserError(f"{kind}: the tensor {name} is missing; expected the weights of a Transformer-XL")
        if tensors[name].ndim != dimensions:
            raise UserError(f"{kind}: {name} has shape {list(tensors[name].shape)}; expected {dimensions} dimensions")
        return list(tensors[name].shape)

    untied = "layers.0.dec_attn.r_w_bias" in tensors
    d_model = shape("layers.0.dec_attn.qkv_net.weight", 2)[1]
    n_head, d_head = shape("layers.0.dec_attn.r_w_bias" if untied else "r_w_bias", 2)
    tables = [shape(_TABLE.format(i), 2) for i in range(max(1, _count(tensors, _TABLE)))]
    sizes, widths = zip(*tables, strict=True)
    fields: FieldValues = {
        "n_layer": _count(tensors, "layers.{}.dec_attn.qkv_net.weight"),
        "d_model": d_model,
        "n_head": n_head,
        "d_head": d_head,
        "d_inner": shape("layers.0.pos_ff.CoreNet.0.weight", 2)[0],
        "d_embed": widths[0],
        "untie_r": untied,
    }
    if len(tables) > 1:
        div_val = widths[0] // max(1, widths[1])
        if div_val < 2 or widths != tuple(widths[0] // div_val**i for i in range(len(widths))):
            raise UserError(f"{kind}: the clusters' embeddings have widths {list(widths)}, which no div_val produces")
        return fields | {"cutoffs": tuple(accumulate(sizes[:-1])), "div_val": div_val}
    # With one table, div_val does not change the function; a projection to the same width is there for any but 1.
    is_one = _PROJECTION.format(0) not in tensors or widths[0] != d_model
    return fields | ({"div_val": 1} if is_one else {})


def n_cluster_of(tensors: dict[str, Tensor]) -> int:
    """Return the number of tail clusters."""
    return len(tensors["crit.cluster_bias"]) if "crit.cluster_bias" in tensors else 0


def _embeddings_are_tied(tensors: dict[str, Tensor]) -> bool:
    """Return whether the output's tables equal the embedding's; if so, remove the output's from `tensors`."""
    outputs = {f"crit.out_layers.{i}.weight": tensors[_TABLE.format(i)] for i in range(_count(tensors, _TABLE))}
    same = all(name not in tensors or torch.equal(tensors[name], table) for name, table in outputs.items())
    for name in outputs if same else ():
        tensors.pop(name, None)
    return same


def _projections_tied(tensors: dict[str, Tensor], n_cluster: int) -> str:
    """Return `tie_projections`: a cluster is tied if its output projection is missing or equals the embedding's."""
    ties, split = [], _count(tensors, _TABLE) > 1
    for cluster in range(n_cluster):
        own = tensors.get(f"crit.out_projs.{cluster}")
        embedding = tensors.get(_PROJECTION.format(cluster if split else 0))
        ties.append(own is None or (embedding is not None and torch.equal(own, embedding)))
    if all(ties):
        return "all"
    return "all_but_first" if all(ties[1:]) and n_cluster > 1 else "none"


def _count(tensors: dict[str, Tensor], name: str) -> int:
    return len(list(takewhile(lambda number: name.format(number) in tensors, count())))


def _weights(tensors: dict[str, Tensor], config: TransformerXLConfig) -> dict[str, Tensor]:
    """Return the state dictionary of this package's model; used tensors are removed from `tensors`."""
    ours: dict[str, Tensor] = {}

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise UserError(f"the tensor {name} is missing from the checkpoint")
        return tensors.pop(name)

    n_table = _count(tensors, _TABLE)
    projections = [tensors.pop(_PROJECTION.format(i), None) for i in range(n_table)]
    for i, projection in enumerate(projections):
        ours[f"embedding.tables.{i}"] = take(_TABLE.format(i))
        if projection is not None:
            ours[f"embedding.projections.{i}"] = projection
        if not config.tie_embeddings:
            ours[f"softmax.own_tables.{i}"] = take(f"crit.out_layers.{i}.weight")
    ours["softmax.bias"] = torch.cat([take(f"crit.out_layers.{i}.bias") for i in range(n_table)])
    if config.cutoffs:
        ours |= {f"softmax.{name}": take(f"crit.{name}") for name in ("cluster_weight", "cluster_bias")}
    for cluster in range(len(config.cutoffs) + 1):
        own = tensors.pop(f"crit.out_projs.{cluster}", None)
        tied = config.tie_projections == "all" or (config.tie_projections == "all_but_first" and cluster > 0)
        embedding = projections[cluster if n_table > 1 else 0]
        if embedding is not None and not tied:
            # A projection that is missing from the file is a copy of the embedding's.
            ours[f"softmax.own_projections.{cluster}"] = embedding.clone() if own is None else own
    if not config.untie_r:
        ours |= {name: take(theirs) for name, theirs in _BIASES.items()}
    for layer in range(config.n_layer):
        prefix, theirs = f"layers.{layer}.", f"layers.{layer}.dec_attn."
        qkv = take(f"{theirs}qkv_net.weight")
        if qkv.shape[0] != 3 * config.n_head * config.d_head:
            expected = f"3 * {config.n_head} * {config.d_head}, as u and v have it"
            raise UserError(f"{theirs}qkv_net.weight has {qkv.shape[0]} rows", expected=expected)
        parts = zip(("q", "k", "v"), qkv.chunk(3), strict=True)
        ours |= {f"{prefix}attention.{name}_proj.weight": part for name, part in parts}
        ours |= {f"{prefix}{name}": take(f"{prefix}{their_name}") for name, their_name in _LAYER.items()}
        if config.untie_r:
            ours |= {f"{prefix}attention.{name}": take(f"{theirs}{bias}") for name, bias in _BIASES.items()}
    return ours


def flip_clusters(tensors: dict[str, Tensor]) -> None:
    """Move the logit of cluster i of C from row C-i, where the authors' PyTorch code reads it, to row i-1."""
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in tensors:
            tensors[name] = tensors[name].flip(0)


def restore_shared(tensors: dict[str, Tensor], all_but_first: bool) -> None:
    """Restore embeddings and projections that a file left out because the output layer shares them.

    With `all_but_first`, the first cluster does not share its projection.
    """
    for i in range(_count(tensors, "crit.out_layers.{}.bias")):
        if (own := tensors.get(f"crit.out_layers.{i}.weight")) is not None:
            tensors.setdefault(_TABLE.format(i), own)
    split = _count(tensors, _TABLE) > 1
    for cluster in range(n_cluster_of(tensors) + 1):
        own = tensors.get(f"crit.out_projs.{cluster}")
        if own is not None and not (all_but_first and cluster == 0):
            tensors.setdefault(_PROJECTION.format(cluster if split else 0), own)
