"""Conversion of the authors' tensors to this package's names and configuration; no weight is recomputed.

Tensor shapes determine most fields of the configuration; the file's settings and the user's options state the others.
Shapes: E d_model, F d_inner, H heads, D width of a head, V vocabulary, d_i width of cluster i.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from txl.config import MODEL_FIELDS, FieldValues, TransformerXLConfig
from txl.errors import UserError
from txl.interop.source import Source, window_after

FREE = {name for name, field in MODEL_FIELDS.items() if not field.item.metadata.get("changes_weights")}
FREE.add("layer_norm_eps")
"""Fields in which an option may differ from the file: fields that do not change the meaning of the weights, and
`layer_norm_eps`, which most files do not state."""


def converted(source: Source, options: FieldValues) -> tuple[TransformerXLConfig, dict[str, Tensor]]:
    """Return the configuration and weights of a foreign checkpoint; `source.tensors` is emptied.

    Args:
        source: checkpoint as read from its file.
        options: fields of `TransformerXLConfig` that the user states.
    """
    if not any(name.startswith("crit.out_layers.") for name in source.tensors):
        raise UserError(
            f"{source.kind}: the output layer is missing (no tensor crit.out_layers.*), as in a model for features or "
            f"classes; only a language model can be imported: save it with its output layer"
        )
    tensors = {name: floating(name, tensor) for name, tensor in source.tensors.items()}
    source.tensors.clear()
    config = _configuration(tensors, source, options)
    weights = _weights(tensors, config)
    left = [name for name in tensors if not name.startswith("pos_emb.")]
    if left:
        raise UserError(f"{source.kind}: the tensor {left[0]} has no place in a Transformer-XL of encoding type 0")
    return config, weights


def floating(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of any floating-point type as float32.

    Raises:
        UserError: if the tensor has another type, is a single number, or holds numbers that are not finite.
    """
    if not tensor.dtype.is_floating_point:
        raise UserError(f"the tensor {name} holds {tensor.dtype}; expected floating-point numbers")
    if tensor.ndim == 0:
        raise UserError(f"the tensor {name} is a single number; expected a vector or a matrix")
    tensor = tensor.to(torch.float32)
    # Not `isfinite`, which needs several times the tensor's memory. If a tensor contains NaN, `aminmax` returns NaN.
    if tensor.numel() and not all(math.isfinite(each) for each in tensor.aminmax()):
        raise UserError(f"the tensor {name} holds numbers that are not finite; use another checkpoint")
    return tensor


def _configuration(tensors: dict[str, Tensor], source: Source, options: FieldValues) -> TransformerXLConfig:
    """Return the configuration from the tensors' shapes, the settings in the file, and the user's options."""
    found = shape_of(tensors, source.kind)
    cutoffs = found.pop("cutoffs", None)
    stated = dict(source.settings)
    for name, value in options.items():
        if name not in FREE and name in stated and stated[name] != value:
            raise UserError(f"model.{name} is {value}, but the checkpoint says {stated[name]}; leave the option out")
        stated[name] = value
    memory, window = (source.settings.get(name) for name in ("mem_len", "window"))
    if memory is not None and window is not None and "mem_len" in options and "window" not in options:
        stated["window"] = window_after(memory, window, options["mem_len"])
    for name, value in found.items():
        if name == "div_val" and not n_cluster_of(tensors):
            stated.pop(name, None)  # without clusters there is nothing to divide
        if name in stated and stated[name] is not None and stated[name] != value:
            raise UserError(f"model.{name} is {stated[name]}, but the checkpoint's tensors say {value}")
        stated[name] = value
    n_cluster = n_cluster_of(tensors)
    if cutoffs is not None:
        if tuple(stated.get("cutoffs", cutoffs)) != cutoffs:
            raise UserError(
                f"model.cutoffs is {list(stated['cutoffs'])}, but the checkpoint's tensors say {list(cutoffs)}"
            )
        stated["cutoffs"] = cutoffs
    elif n_cluster and "cutoffs" not in stated:
        raise UserError(
            f"the checkpoint has {n_cluster} tail clusters, but does not say where they begin; give --model.cutoffs"
        )
    if len(stated.get("cutoffs", ())) != n_cluster:
        raise UserError(
            f"model.cutoffs is {list(stated.get('cutoffs', ()))}, but the checkpoint has {n_cluster} tail clusters"
        )
    stated.setdefault("cutoffs", ())
    stated.setdefault("div_val", 2)  # one table with a projection though as wide as the model: any value but 1
    stated["tie_embeddings"] = _embeddings_are_tied(tensors)
    tie = _projections_tied(tensors, len(stated["cutoffs"]) + 1)
    if "tie_projections" in options and options["tie_projections"] != tie:
        raise UserError(
            f"model.tie_projections is {options['tie_projections']}, but the checkpoint's tensors say {tie}"
        )
    stated["tie_projections"] = tie
    known = {item.name for item in dataclasses.fields(TransformerXLConfig) if item.init}
    return TransformerXLConfig(**{"dropout": 0.0, **{name: value for name, value in stated.items() if name in known}})


def shape_of(tensors: dict[str, Tensor], kind: str) -> FieldValues:
    """Return the `TransformerXLConfig` fields that the shapes determine; `cutoffs` only if each cluster has a table."""

    def shape(name: str, dimensions: int) -> list[int]:
        if name not in tensors:
            raise UserError(f"{kind}: the tensor {name} is missing; expected the weights of a Transformer-XL")
        if tensors[name].ndim != dimensions:
            raise UserError(f"{kind}: {name} has shape {list(tensors[name].shape)}; expected {dimensions} dimensions")
        return list(tensors[name].shape)

    n_layer = 0
    while f"layers.{n_layer}.dec_attn.qkv_net.weight" in tensors:
        n_layer += 1
    untied = "layers.0.dec_attn.r_w_bias" in tensors
    d_model = shape("layers.0.dec_attn.qkv_net.weight", 2)[1]
    n_head, d_head = shape("layers.0.dec_attn.r_w_bias" if untied else "r_w_bias", 2)
    tables = []
    while f"word_emb.emb_layers.{len(tables)}.weight" in tensors:
        tables.append(shape(f"word_emb.emb_layers.{len(tables)}.weight", 2))
    if not tables:
        raise UserError(f"{kind}: the tensor word_emb.emb_layers.0.weight is missing; expected an embedding")
    found = {
        "n_layer": n_layer,
        "d_model": d_model,
        "n_head": n_head,
        "d_head": d_head,
        "d_inner": shape("layers.0.pos_ff.CoreNet.0.weight", 2)[0],
        "d_embed": tables[0][1],
        "untie_r": untied,
    }
    if len(tables) > 1:
        ends = [sum(size for size, _ in tables[: i + 1]) for i in range(len(tables))]
        found["cutoffs"] = tuple(ends[:-1])
        widths = [width for _, width in tables]
        found["div_val"] = widths[0] // max(1, widths[1])
        if found["div_val"] < 2 or widths != [widths[0] // found["div_val"] ** i for i in range(len(widths))]:
            raise UserError(f"{kind}: the clusters' embeddings have widths {widths}, which no div_val produces")
    elif "word_emb.emb_projs.0" not in tensors:
        found["div_val"] = 1
    elif tables[0][1] != d_model:
        found["div_val"] = 1  # a narrower embedding; with one table, div_val does not change the function
    return found


def n_cluster_of(tensors: dict[str, Tensor]) -> int:
    """Return the number of tail clusters."""
    return len(tensors["crit.cluster_bias"]) if "crit.cluster_bias" in tensors else 0


def _embeddings_are_tied(tensors: dict[str, Tensor]) -> bool:
    """Return whether the output's tables equal the embedding's; if so, remove the output's from `tensors`."""
    same = True
    for i in range(_count(tensors, "word_emb.emb_layers.{}.weight")):
        own = tensors.get(f"crit.out_layers.{i}.weight")
        same = same and (own is None or torch.equal(own, tensors[f"word_emb.emb_layers.{i}.weight"]))
    if same:
        for i in range(_count(tensors, "word_emb.emb_layers.{}.weight")):
            tensors.pop(f"crit.out_layers.{i}.weight", None)
    return same


def _projections_tied(tensors: dict[str, Tensor], n_cluster: int) -> Literal["all", "all_but_first", "none"]:
    """Return `tie_projections`: a cluster is tied if its output projection is missing or equals the embedding's."""
    split = _count(tensors, "word_emb.emb_layers.{}.weight") > 1

    def shared(cluster: int) -> bool:
        own = tensors.get(f"crit.out_projs.{cluster}")
        embedding = tensors.get(f"word_emb.emb_projs.{cluster if split else 0}")
        return own is None or (embedding is not None and torch.equal(own, embedding))

    ties = [shared(cluster) for cluster in range(n_cluster)]
    if all(ties):
        return "all"
    return "all_but_first" if all(ties[1:]) and n_cluster > 1 else "none"


def _count(tensors: dict[str, Tensor], name: str) -> int:
    number = 0
    while name.format(number) in tensors:
        number += 1
    return number


def _weights(tensors: dict[str, Tensor], config: TransformerXLConfig) -> dict[str, Tensor]:
    """Return the state dictionary of this package's model; used tensors are removed from `tensors`."""
    ours: dict[str, Tensor] = {}

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise UserError(f"the tensor {name} is missing from the checkpoint")
        return tensors.pop(name)

    n_table = _count(tensors, "word_emb.emb_layers.{}.weight")
    projections = [tensors.get(f"word_emb.emb_projs.{i}") for i in range(n_table)]
    for i in range(n_table):
        ours[f"embedding.tables.{i}"] = take(f"word_emb.emb_layers.{i}.weight")
        if projections[i] is not None:
            ours[f"embedding.projections.{i}"] = take(f"word_emb.emb_projs.{i}")
        if not config.tie_embeddings:
            ours[f"softmax.own_tables.{i}"] = take(f"crit.out_layers.{i}.weight")
    ours["softmax.bias"] = torch.cat([take(f"crit.out_layers.{i}.bias") for i in range(n_table)])
    if config.cutoffs:
        ours["softmax.cluster_weight"], ours["softmax.cluster_bias"] = (
            take("crit.cluster_weight"),
            take("crit.cluster_bias"),
        )
    for cluster in range(len(config.cutoffs) + 1):
        own = tensors.pop(f"crit.out_projs.{cluster}", None)
        tied = config.tie_projections == "all" or (config.tie_projections == "all_but_first" and cluster > 0)
        if projections[0] is not None and not tied:
            # A projection that is missing from the file is a copy of the embedding's.
            embedding = projections[cluster if n_table > 1 else 0]
            assert embedding is not None
            ours[f"softmax.own_projections.{cluster}"] = embedding.clone() if own is None else own
    if not config.untie_r:
        ours["u"], ours["v"] = take("r_w_bias"), take("r_r_bias")
    for layer in range(config.n_layer):
        theirs, attention = f"layers.{layer}.", f"layers.{layer}.attention."
        qkv = take(f"{theirs}dec_attn.qkv_net.weight")
        if qkv.shape[0] != 3 * config.n_head * config.d_head:
            raise UserError(
                f"{theirs}dec_attn.qkv_net.weight has {qkv.shape[0]} rows; expected 3 * {config.n_head} * "
                f"{config.d_head}, as u and v have it"
            )
        for name, part in zip(("q", "k", "v"), qkv.chunk(3), strict=True):
            ours[f"{attention}{name}_proj.weight"] = part
        ours[f"{attention}r_proj.weight"] = take(f"{theirs}dec_attn.r_net.weight")
        ours[f"{attention}o_proj.weight"] = take(f"{theirs}dec_attn.o_net.weight")
        if config.untie_r:
            ours[f"{attention}u"], ours[f"{attention}v"] = (
                take(f"{theirs}dec_attn.r_w_bias"),
                take(f"{theirs}dec_attn.r_r_bias"),
            )
        feed_forward = f"layers.{layer}.feed_forward."
        for kind in ("weight", "bias"):
            ours[f"{attention}norm.{kind}"] = take(f"{theirs}dec_attn.layer_norm.{kind}")
            ours[f"{feed_forward}norm.{kind}"] = take(f"{theirs}pos_ff.layer_norm.{kind}")
            ours[f"{feed_forward}inner.{kind}"] = take(f"{theirs}pos_ff.CoreNet.0.{kind}")
            ours[f"{feed_forward}outer.{kind}"] = take(f"{theirs}pos_ff.CoreNet.3.{kind}")
    return ours


def flip_clusters(tensors: dict[str, Tensor]) -> None:
    """Move the logit of cluster i of C from row C-i, where the authors' PyTorch code reads it, to row i-1."""
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in tensors:
            tensors[name] = tensors[name].flip(0)


def restore_shared(tensors: dict[str, Tensor], all_but_first: bool) -> None:
    """Restore embeddings and projections that a file left out because the output layer shares them.

    Args:
        tensors: tensors by the authors' names; changed in place.
        all_but_first: True if the first cluster does not share its projection.
    """
    for i in range(_count(tensors, "crit.out_layers.{}.bias")):
        name = f"word_emb.emb_layers.{i}.weight"
        if name not in tensors and f"crit.out_layers.{i}.weight" in tensors:
            tensors[name] = tensors[f"crit.out_layers.{i}.weight"]
    n_table = _count(tensors, "word_emb.emb_layers.{}.weight")
    for cluster in range(n_cluster_of(tensors) + 1):
        own = tensors.get(f"crit.out_projs.{cluster}")
        name = f"word_emb.emb_projs.{cluster if n_table > 1 else 0}"
        if own is not None and name not in tensors and not (all_but_first and cluster == 0):
            tensors[name] = own
