"""Checkpoints of the authors' TensorFlow code, among them the released large models.

Reading requires TensorFlow itself (the extra `tensorflow`). In a checkpoint, kernels are transposed, and u and v of all
layers are stacked. The logit of cluster i is in row i-1, as in this package. A checkpoint holds only weights: memory,
clamp and window must be given as options (`same_length` with `mem_len` M in the authors' code is `window` M + 1).

Shapes: E d_model, L layers, H heads, D width of a head, d_i width of cluster i.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl.config import FieldValues
from txl.errors import UserError
from txl.interop.source import Source

_EMBED, _SOFTMAX = "transformer/adaptive_embed", "transformer/adaptive_softmax"


def tensorflow_prefix(path: Path) -> Path | None:
    """Return the prefix of the checkpoint files (PREFIX.index, PREFIX.data-...) at or in a path; None without any."""
    if path.is_dir():
        listing = path / "checkpoint"
        if listing.is_file():
            named = re.search(r'^model_checkpoint_path: "([^"]*)"', listing.read_text(errors="replace"), re.MULTILINE)
            if named and (path / f"{Path(named[1]).name}.index").is_file():
                return path / Path(named[1]).name
        found = sorted(path.glob("*.ckpt*.index"), key=_step)
        return found[-1].with_suffix("") if found else None
    if path.suffix == ".index" and path.is_file():
        return path.with_suffix("")
    return path if path.with_name(path.name + ".index").is_file() else None


def _step(path: Path) -> tuple[int, str]:
    number = re.search(r"-(\d+)\.index$", path.name)
    return (int(number[1]) if number else -1, path.name)


def read_tensorflow(prefix: Path) -> Source:
    """Read the checkpoint whose files have the given prefix."""
    try:
        from tensorflow.train import load_checkpoint  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    except ImportError:
        raise UserError(
            f"{prefix} is a TensorFlow checkpoint, and TensorFlow is not installed; "
            f"pip install 'transformer-xl[tensorflow]', import it, and uninstall it again"
        ) from None
    try:
        reader = load_checkpoint(str(prefix))
        names = [name for name in reader.get_variable_to_shape_map() if not _is_of_the_optimiser(name)]
        return source_of({name: reader.get_tensor(name) for name in names}, str(prefix))
    except UserError:
        raise
    except Exception as error:  # TensorFlow's error classes, which only TensorFlow itself defines
        raise UserError(f"{prefix}: damaged ({type(error).__name__}: {str(error).splitlines()[0][:150]})") from None


def _is_of_the_optimiser(name: str) -> bool:
    return not name.startswith("transformer/") or "/Adam" in name


def source_of(arrays: dict[str, np.ndarray], path: str) -> Source:
    """Return TensorFlow's variables by the authors' PyTorch names.

    Args:
        arrays: variables by name; used variables are removed.
        path: path of the checkpoint, for messages.
    """
    tensors: dict[str, Tensor] = {}

    def take(name: str, transposed: bool = False) -> Tensor:
        if name not in arrays:
            raise UserError(f"{path}: the variable {name} is missing; expected the authors' TensorFlow model")
        array = np.asarray(arrays.pop(name))
        return torch.from_numpy(np.ascontiguousarray(array.T if transposed else array))

    if "transformer/r_r_bias" not in arrays or "transformer/r_w_bias" not in arrays:
        raise UserError(f"{path}: no transformer/r_w_bias; expected the authors' TensorFlow model of encoding type 0")
    u, v = take("transformer/r_w_bias"), take("transformer/r_r_bias")
    n_layer = 0
    while f"transformer/layer_{n_layer}/rel_attn/qkv/kernel" in arrays:
        theirs, ours = f"transformer/layer_{n_layer}/", f"layers.{n_layer}."
        for name in ("qkv", "r", "o"):
            tensors[f"{ours}dec_attn.{name}_net.weight"] = take(f"{theirs}rel_attn/{name}/kernel", transposed=True)
        for name, part in (("rel_attn", "dec_attn"), ("ff", "pos_ff")):
            tensors[f"{ours}{part}.layer_norm.weight"] = take(f"{theirs}{name}/LayerNorm/gamma")
            tensors[f"{ours}{part}.layer_norm.bias"] = take(f"{theirs}{name}/LayerNorm/beta")
        for name, place in (("layer_1", 0), ("layer_2", 3)):
            tensors[f"{ours}pos_ff.CoreNet.{place}.weight"] = take(f"{theirs}ff/{name}/kernel", transposed=True)
            tensors[f"{ours}pos_ff.CoreNet.{place}.bias"] = take(f"{theirs}ff/{name}/bias")
        if u.ndim == 3:  # one pair per layer
            if n_layer >= len(u) or v.shape != u.shape:
                raise UserError(f"{path}: transformer/r_w_bias has shape {list(u.shape)}; expected one pair a layer")
            tensors[f"{ours}dec_attn.r_w_bias"], tensors[f"{ours}dec_attn.r_r_bias"] = u[n_layer], v[n_layer]
        n_layer += 1
    if u.ndim == 2:
        tensors["r_w_bias"], tensors["r_r_bias"] = u, v
    if n_layer == 0:
        raise UserError(f"{path}: no transformer/layer_0/rel_attn/qkv/kernel; expected encoding type 0")
    d_model = tensors["layers.0.dec_attn.qkv_net.weight"].shape[1]
    _take_embeddings(arrays, tensors, take, d_model)
    settings = _take_softmax(arrays, tensors, take) | {"layer_norm_eps": 1e-12}  # tf.contrib.layers.layer_norm's
    left = sorted(arrays)
    if left:
        raise UserError(f"{path}: the variable {left[0]} has no place in a Transformer-XL of encoding type 0")
    return Source(
        "the authors' TensorFlow checkpoint",
        tensors,
        settings,
        notes=["a TensorFlow checkpoint does not state memory, clamp and window (same_length M is window M + 1): "
               "set them by option"],
    )  # fmt: skip


def _take_embeddings(
    arrays: dict[str, np.ndarray], tensors: dict[str, Tensor], take: Callable[..., Tensor], d_model: int
) -> None:
    """Move the embedding's tables and projections, one for all clusters or one per cluster, to `tensors`.

    A missing projection of a cluster, which is then as wide as the model, becomes the identity.
    """
    if f"{_EMBED}/lookup_table" in arrays:
        tensors["word_emb.emb_layers.0.weight"] = take(f"{_EMBED}/lookup_table")
        if f"{_EMBED}/proj_W" in arrays:
            tensors["word_emb.emb_projs.0"] = take(f"{_EMBED}/proj_W", transposed=True)
        return
    cluster = 0
    while f"{_EMBED}/cutoff_{cluster}/lookup_table" in arrays:
        tensors[f"word_emb.emb_layers.{cluster}.weight"] = take(f"{_EMBED}/cutoff_{cluster}/lookup_table")
        if f"{_EMBED}/cutoff_{cluster}/proj_W" in arrays:
            tensors[f"word_emb.emb_projs.{cluster}"] = take(f"{_EMBED}/cutoff_{cluster}/proj_W", transposed=True)
        else:
            tensors[f"word_emb.emb_projs.{cluster}"] = torch.eye(d_model)
        cluster += 1


def _take_softmax(
    arrays: dict[str, np.ndarray], tensors: dict[str, Tensor], take: Callable[..., Tensor]
) -> FieldValues:
    """Move the output's biases, cluster weights and projections to `tensors`; return the cutoffs, from the biases."""
    if f"{_SOFTMAX}/bias" in arrays:
        tensors["crit.out_layers.0.bias"] = take(f"{_SOFTMAX}/bias")
        return {"cutoffs": ()}
    split = "word_emb.emb_layers.1.weight" in tensors
    biases = []
    while f"{_SOFTMAX}/cutoff_{len(biases)}/b" in arrays:
        cluster = len(biases)
        biases.append(take(f"{_SOFTMAX}/cutoff_{cluster}/b"))
        if f"{_SOFTMAX}/cutoff_{cluster}/proj" in arrays:
            tensors[f"crit.out_projs.{cluster}"] = take(f"{_SOFTMAX}/cutoff_{cluster}/proj", transposed=True)
    if len(biases) > 1:
        tensors["crit.cluster_weight"] = take(f"{_SOFTMAX}/cutoff_0/cluster_W")
        tensors["crit.cluster_bias"] = take(f"{_SOFTMAX}/cutoff_0/cluster_b")
    if split:
        tensors |= {f"crit.out_layers.{cluster}.bias": bias for cluster, bias in enumerate(biases)}
    elif biases:
        tensors["crit.out_layers.0.bias"] = torch.cat(biases)
    ends = np.cumsum([len(bias) for bias in biases]).tolist()
    return {"cutoffs": tuple(ends[:-1])}
