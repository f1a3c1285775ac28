"""Checkpoints of the authors' TensorFlow code, among them the released large models.

Reading requires TensorFlow itself (the extra `tensorflow`). In a checkpoint, kernels are transposed, and u and v of all
layers are stacked. The logit of cluster i is in row i-1, as in this package. A checkpoint holds only weights: memory,
clamp and window must be given as options (`same_length` with `mem_len` M in the authors' code is `window` M + 1).

Shapes: E d_model, L layers, H heads, D width of a head, d_i width of cluster i.
"""

from __future__ import annotations

import re
from itertools import accumulate, count, takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl.errors import UserError
from txl.interop.conversion import Source

_EMBED, _SOFTMAX = "transformer/adaptive_embed", "transformer/adaptive_softmax"
_LAYER = r"transformer/layer_(\d+)"
# Patterns of variables, and their names in the authors' PyTorch code.
_RENAMED = (
    (rf"{_LAYER}/rel_attn/(qkv|r|o)/kernel", r"layers.\1.dec_attn.\2_net.weight"),
    (rf"{_LAYER}/rel_attn/LayerNorm/gamma", r"layers.\1.dec_attn.layer_norm.weight"),
    (rf"{_LAYER}/rel_attn/LayerNorm/beta", r"layers.\1.dec_attn.layer_norm.bias"),
    (rf"{_LAYER}/ff/LayerNorm/gamma", r"layers.\1.pos_ff.layer_norm.weight"),
    (rf"{_LAYER}/ff/LayerNorm/beta", r"layers.\1.pos_ff.layer_norm.bias"),
    (rf"{_LAYER}/ff/layer_1/kernel", r"layers.\1.pos_ff.CoreNet.0.weight"),
    (rf"{_LAYER}/ff/layer_1/bias", r"layers.\1.pos_ff.CoreNet.0.bias"),
    (rf"{_LAYER}/ff/layer_2/kernel", r"layers.\1.pos_ff.CoreNet.3.weight"),
    (rf"{_LAYER}/ff/layer_2/bias", r"layers.\1.pos_ff.CoreNet.3.bias"),
    (rf"{_EMBED}/lookup_table", "word_emb.emb_layers.0.weight"),
    (rf"{_EMBED}/proj_W", "word_emb.emb_projs.0"),
    (rf"{_EMBED}/cutoff_(\d+)/lookup_table", r"word_emb.emb_layers.\1.weight"),
    (rf"{_EMBED}/cutoff_(\d+)/proj_W", r"word_emb.emb_projs.\1"),
    (rf"{_SOFTMAX}/bias", "crit.out_layers.0.bias"),
    (rf"{_SOFTMAX}/cutoff_(\d+)/b", r"crit.out_layers.\1.bias"),
    (rf"{_SOFTMAX}/cutoff_(\d+)/proj", r"crit.out_projs.\1"),
    (rf"{_SOFTMAX}/cutoff_0/cluster_W", "crit.cluster_weight"),
    (rf"{_SOFTMAX}/cutoff_0/cluster_b", "crit.cluster_bias"),
    ("transformer/r_w_bias", "r_w_bias"),
    ("transformer/r_r_bias", "r_r_bias"),
)
_TRANSPOSED = ("/kernel", "/proj_W", "/proj")  # endings of the variables that are transposed


def tensorflow_prefix(path: Path) -> Path | None:
    """Return the prefix of the checkpoint files (PREFIX.index, PREFIX.data-...) at or in a path; None without any."""
    if path.is_dir():
        listing = path / "checkpoint"
        if listing.is_file():
            named = re.search(r'^model_checkpoint_path: "([^"]*)"', listing.read_text(errors="replace"), re.MULTILINE)
            if named and (path / f"{Path(named[1]).name}.index").is_file():
                return path / Path(named[1]).name
        # The newest by its step; one without a step is the oldest.
        steps = {file: re.search(r"-(\d+)\.index$", file.name) for file in sorted(path.glob("*.ckpt*.index"))}
        newest = max(steps, key=lambda file: (int((steps[file] or [0, -1])[1]), file.name), default=None)
        return None if newest is None else newest.with_suffix("")
    if path.suffix == ".index" and path.is_file():
        return path.with_suffix("")
    return path if path.with_name(path.name + ".index").is_file() else None


def read_tensorflow(prefix: Path) -> Source:
    """Read the checkpoint whose files have the given prefix."""
    try:
        from tensorflow.train import load_checkpoint  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    except ImportError:
        problem = f"{prefix} is a TensorFlow checkpoint, and TensorFlow is not installed"
        raise UserError(problem, remedy="pip install 'transformer-xl[tensorflow]'") from None
    try:
        reader = load_checkpoint(str(prefix))
        names = [name for name in reader.get_variable_to_shape_map() if name.startswith("transformer/")]
        names = [name for name in names if "/Adam" not in name]  # those of the optimiser
        return source_of({name: reader.get_tensor(name) for name in names}, str(prefix))
    except UserError:
        raise
    except Exception as error:  # TensorFlow's error classes, which only TensorFlow itself defines
        raise UserError(f"{prefix}: damaged ({type(error).__name__}: {str(error).splitlines()[0][:150]})") from None


def source_of(arrays: dict[str, np.ndarray], path: str) -> Source:
    """Return TensorFlow's variables, which are taken out of `arrays`, by the authors' PyTorch names."""
    tensors: dict[str, Tensor] = {}
    is_divided = f"{_EMBED}/cutoff_0/lookup_table" in arrays
    for variable in sorted(arrays):
        array = arrays.pop(variable)
        pattern = next((pair for pair in _RENAMED if re.fullmatch(pair[0], variable)), None)
        if pattern is None:
            raise UserError(f"{path}: the variable {variable} has no place in a Transformer-XL of encoding type 0")
        array = np.asarray(array.T if variable.endswith(_TRANSPOSED) else array)
        tensors[re.sub(*pattern, variable)] = torch.from_numpy(np.ascontiguousarray(array))
    if not {"r_w_bias", "r_r_bias", "layers.0.dec_attn.qkv_net.weight"} <= tensors.keys():
        problem = f"{path}: r_w_bias, r_r_bias or layer_0 is missing"
        raise UserError(problem, expected="the authors' model, encoding type 0")
    u, v = tensors["r_w_bias"], tensors["r_r_bias"]
    if u.ndim != 2:  # not shared: [L,H,D], one pair a layer
        if u.ndim != 3 or v.shape != u.shape or f"layers.{len(u)}.dec_attn.qkv_net.weight" in tensors:
            raise UserError(f"{path}: transformer/r_w_bias has shape {list(u.shape)}; expected one pair a layer")
        for name in ("r_w_bias", "r_r_bias"):
            tensors |= {f"layers.{layer}.dec_attn.{name}": bias for layer, bias in enumerate(tensors.pop(name))}
    if is_divided:
        # A cluster without a projection is as wide as the model: its projection is the identity.
        d_model = tensors["layers.0.dec_attn.qkv_net.weight"].shape[1]
        names = (f"word_emb.emb_layers.{cluster}.weight" for cluster in count())
        for cluster, _ in enumerate(takewhile(tensors.__contains__, names)):
            tensors.setdefault(f"word_emb.emb_projs.{cluster}", torch.eye(d_model))
    # The clusters' biases tell the cutoffs; if all clusters share a table, their biases are joined.
    names = [f"crit.out_layers.{cluster}.bias" for cluster in range(len(tensors))]
    biases = [tensors[name] for name in takewhile(tensors.__contains__, names)]
    cutoffs = tuple(accumulate(len(bias) for bias in biases[:-1]))
    if len(biases) > 1 and "word_emb.emb_layers.1.weight" not in tensors:
        tensors |= {names[0]: torch.cat(biases)}
        for name in names[1 : len(biases)]:
            del tensors[name]
    settings = {"cutoffs": cutoffs, "layer_norm_eps": 1e-12}  # epsilon of tf.contrib.layers.layer_norm
    note = "a TensorFlow checkpoint does not state memory, clamp and window (same_length M is window M + 1): "
    return Source("the authors' TensorFlow checkpoint", tensors, settings, notes=[f"{note}set them by option"])
