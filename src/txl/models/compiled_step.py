"""One-token steps through all layers in the compiled library: the weights and the buffers, as it reads them.

Shapes: B lanes, H heads, D width of a head, E d_model, L distances, R positions of a buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from txl.config import TransformerXLConfig
from txl.native.build import library
from txl.native.operations import WEIGHT_SUFFIXES
from txl.native.tensors import Count, Pointer

_MOST_D = 512  # MOST_D in decode.cpp
_Pointers = ctypes.Array[ctypes.c_void_p]

# Names of a layer's weights in the order of `Layer` in decode.cpp, which reads them as one array of pointers, with
# shapes: A is H*D, E d_model, F d_inner. u and v follow.
WEIGHTS = {
    "attention.q_proj.weight": "AE",
    "attention.k_proj.weight": "AE",
    "attention.v_proj.weight": "AE",
    "attention.o_proj.weight": "EA",
    "feed_forward.inner.weight": "FE",
    "feed_forward.inner.bias": "F",
    "feed_forward.outer.weight": "EF",
    "feed_forward.outer.bias": "E",
    "attention.norm.weight": "E",
    "attention.norm.bias": "E",
    "feed_forward.norm.weight": "E",
    "feed_forward.norm.bias": "E",
}
# Names of the weights in `Gains` of decode.cpp, with `qk_norm`. A step gets the projected R already normalised.
_GAINS = {"attention.q_norm.weight": "D", "attention.k_norm.weight": "D"}


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, Count) for name in ("n_layer", "d_model", "n_head", "d_head", "d_inner", "pre_norm")),
        ("epsilon", ctypes.c_double),
        ("layers", Pointer),
        ("gains", Pointer),
    ]


class Places(ctypes.Structure):
    """`Places` in decode.cpp: locations of a step's tokens in the buffers, made by `places_of`."""

    indices: tuple[Tensor, ...]  # `lanes`, `at` and `seen`, kept alive as long as their addresses are in use
    _fields_ = [
        *((name, Count) for name in ("head_stride", "lane_stride", "hidden_stride", "size", "n_distance", "clamp")),
        *((name, Pointer) for name in ("lanes", "at", "seen")),
    ]


class LayerWeights:
    """Addresses of a model's weights for the library, made by `layer_weights`; valid while the model is unchanged."""

    def __init__(self, config: TransformerXLConfig, tensors: list[Tensor], gains: list[Tensor]):
        compiled = library()
        assert compiled is not None
        self.tensors = [*tensors, *gains]
        self.dtype = tensors[0].dtype
        self._run = getattr(compiled, f"txl_step_{WEIGHT_SUFFIXES[self.dtype]}")
        self._addresses, self._gains = _addresses(tensors), _addresses(gains)
        sizes = config.n_layer, config.d_model, config.n_head, config.d_head, config.d_inner, int(config.pre_norm)
        layers = ctypes.cast(self._addresses, Pointer)
        self._model = _Model(
            *sizes, config.layer_norm_eps, layers, ctypes.cast(self._gains, Pointer) if gains else None
        )

    def step(self, hidden: Float[Tensor, "B E"], caches: _Pointers, places: Places) -> None:
        """Turn h^0 into h^N in place and write the tokens' keys and values; `hidden` has the dtype of the sums."""
        tokens = Count(hidden.shape[0]), Pointer(hidden.data_ptr())
        self._run(ctypes.byref(self._model), caches, ctypes.byref(places), *tokens, torch.get_num_threads())


def layer_weights(
    config: TransformerXLConfig, layers: Iterable[nn.Module], shared: nn.Module | None
) -> LayerWeights | None:
    """Return the layers of a Transformer-XL for the library; None if the library cannot compute them.

    The library does not support learned distances, devices other than the CPU, or weights of several dtypes or
    unexpected shapes. The layers must have no hooks and be made of this package's own modules; `shared` has the u and v
    of all layers (None: the attention of each layer has its own).
    """
    if config.encoding != "relative" or config.d_head > _MOST_D:
        return None
    sizes = {"A": config.n_head * config.d_head, "D": config.d_head, "E": config.d_model, "F": config.d_inner}
    names = WEIGHTS | (_GAINS if config.qk_norm else {})
    weights: list[tuple[Tensor | None, tuple[int, ...]]] = []
    gains: list[tuple[Tensor | None, tuple[int, ...]]] = []
    for layer in layers:
        for name, shape in names.items():
            path, _, last = name.rpartition(".")
            owner = layer.get_submodule(path)
            unknown_bias = "bias" in owner._parameters and f"{path}.bias" not in WEIGHTS and owner.bias is not None
            if unknown_bias or getattr(owner, "eps", config.layer_norm_eps) != config.layer_norm_eps:
                return None
            kind = gains if name in _GAINS else weights
            # From `_parameters`: the attribute may be computed by a parametrization, at another address each time.
            kind.append((owner._parameters.get(last), tuple(sizes[letter] for letter in shape)))
        biases = layer.get_submodule("attention") if shared is None else shared
        weights += [(biases._parameters.get(name), (config.n_head, config.d_head)) for name in ("u", "v")]
    tensors, shapes = zip(*weights, *gains, strict=True)
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) < len(tensors) or len(present) != config.n_layer * (len(names) + 2):
        return None
    dtype = present[0].dtype
    alike = all(tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in present)
    if not alike or dtype not in WEIGHT_SUFFIXES or tuple(tensor.shape for tensor in present) != shapes:
        return None
    return LayerWeights(config, present[: len(weights)], present[len(weights) :])


def _addresses(tensors: Sequence[Tensor | None]) -> _Pointers:
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (Pointer * len(addresses))(*addresses)


def caches_of(
    keys: Sequence[Tensor], values: Sequence[Tensor], hidden: Sequence[Tensor] | None, positions: Sequence[Tensor]
) -> _Pointers:
    """Return the addresses of the buffers of all layers, one of each per layer.

    Keys and values are [H,B,R,D], inputs of the layer [B,R,E] (None: not kept), and W_kR R [H,L,D].
    """
    entries = [None] * len(keys) if hidden is None else hidden
    return _addresses([tensor for layer in zip(keys, values, entries, positions, strict=True) for tensor in layer])


def places_of(
    key: Float[Tensor, "H lanes R D"],
    hidden: Float[Tensor, "lanes R E"] | None,
    position: Float[Tensor, "H L D"],
    clamp_len: int | None,
    lanes: Int64[Tensor, " B"],
    at: Int64[Tensor, " B"],
    seen: Int64[Tensor, " B"],
) -> Places:
    """Describe the locations of the next tokens in the buffers, whose layout is the same in all layers.

    Args:
        lanes: lanes of the buffers that the tokens belong to.
        at: index of each token's key in the buffer, which is a ring: the index before the first is the last.
        seen: number of keys that each token attends to, its own included.
    """
    n_distance = position.shape[1]
    places = Places(
        key.stride(0),
        key.stride(1),
        0 if hidden is None else hidden.stride(0),
        key.shape[2],
        n_distance,
        n_distance if clamp_len is None else clamp_len,
        *(indices.data_ptr() for indices in (lanes, at, seen)),
    )
    places.indices = (lanes, at, seen)
    return places
