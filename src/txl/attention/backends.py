"""The attention backends: features of each, choice of the backend for a model, and computation of a segment.

Shapes: B lanes, T queries, S keys, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from txl.attention.equations import KeyScope, Operands, reference_attention
from txl.attention.refused import AttentionRefused
from txl.attention.shifted import shifted_attention
from txl.attention.triton_attention import triton_attention, why_not_triton
from txl.config import TransformerXLConfig
from txl.errors import UserError
from txl.native.attention import reading_attention, training_attention, why_not_training
from txl.native.tensors import transforms_are_active


class RelativeAttention(Protocol):
    """Function that computes attention from projected positions; arguments as in `reference_attention`."""

    def __call__(self, operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H D"]:
        """Return the attention output of every query."""
        ...


def compiled_attention(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H D"]:
    """Compute `reference_attention` in the compiled library, forward and backward, without a matrix of all scores.

    Requires a CPU, and float32 or bfloat16. There are no second derivatives.
    """
    _check_compiled(operands.query)
    filled = scope.filled_tensor
    if scope.filled is not None:
        filled = torch.tensor(scope.filled, device="cpu")
    return training_attention(operands, window=scope.window, filled=filled, dropout=dropout)


def _check_compiled(query: Tensor) -> None:
    # `torch.compile` traces only shapes; support by this machine was checked when the model was built.
    if not torch.compiler.is_compiling() and (reason := why_not_training(query.device.type, query.dtype)):
        raise AttentionRefused("compiled", reason, "auto")


def _compiled_obstacle(device: str, dtype: torch.dtype | None, _: object) -> str | None:
    return why_not_training(device, dtype or torch.float32)


def attention_without_gradients(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H D"]:
    """Compute `reference_attention` in the compiled library where that is faster, else by `shifted_attention`."""
    read = None
    if scope.filled_tensor is None:  # set in recorded steps on a GPU alone
        read = reading_attention(operands, scope.window, scope.filled)
    return shifted_attention(operands, scope, dropout) if read is None else read


def causal_attention(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B T H D"],
    value: Float[Tensor, "B T H D"],
    dropout: float,
    compiled: bool = False,
) -> Float[Tensor, "B T H D"]:
    """Compute causal softmax attention within a segment, without relative positions.

    Args:
        query, key, value: queries, keys and values of one segment.
        dropout: probability with which an attention weight is dropped.
        compiled: True: segments with gradients or dropout are computed in the compiled library.
    """
    if dropout == 0 and (read := reading_attention((query, key, value))) is not None:
        return read
    if compiled and (dropout > 0 or torch.is_grad_enabled()) and not transforms_are_active():
        _check_compiled(query)
        return training_attention((query, key, value), dropout=dropout)
    heads = (rows.transpose(1, 2) for rows in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=dropout).transpose(1, 2)


@dataclass(frozen=True)
class Backend:
    """A way to compute A^rel. Every backend supports windows, memories of different lengths and untied biases."""

    name: str
    train: RelativeAttention
    """Function for segments with gradients or dropout; not used in training if `factorises`."""
    read: RelativeAttention = attention_without_gradients
    """Function for segments without gradients and dropout."""
    train_reads_on: str | None = None
    """Device type on which `train` replaces `read`."""
    factorises: bool = False
    """True: training computes `SegmentPhases.attend` (flex.py), which needs W_kR itself instead of W_kR R. It has no
    clamp, no dropout of weights or of R, and R must be the sinusoid, not normalised."""
    compiled_step: bool = False
    """True if single tokens without gradients may pass through all layers in the compiled library at once."""
    devices: tuple[str, ...] | None = None
    """Device types supported in training; None: all. Without gradients every model runs on every device."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """Dtypes supported in training; None: all."""
    obstacle: Callable[[str, torch.dtype | None, int], str | None] | None = None
    """Function of device, dtype (None: not known yet) and head width; returns why this machine cannot train with the
    backend, or None if it can. None: every machine can."""

    def __call__(self, operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H D"]:
        """Return the attention output of every query of a segment, computed by `train` or `read`.

        Within transforms of `torch.func`, which the others do not support, `reference_attention` computes.
        """
        if transforms_are_active():
            return reference_attention(operands, scope, dropout)
        by_train = dropout > 0 or torch.is_grad_enabled() or operands.query.device.type == self.train_reads_on
        return (self.train if by_train else self.read)(operands, scope, dropout)

    def refusal(
        self, model: TransformerXLConfig, device: str | None = None, dtype: torch.dtype | None = None
    ) -> AttentionRefused | None:
        """Return the error for a model that this backend cannot train; None if it can.

        Args:
            model: model configuration.
            device: device of the training, such as "cpu" or "cuda:1"; None: not known yet.
            dtype: dtype of the matrix products; None: not known yet.
        """
        why = (_not_factorised(model) if self.factorises else None) or self._misplaced(model, device, dtype)
        asked = self.name if model.attention == self.name else f"{model.attention} ({self.name})"
        return None if why is None else AttentionRefused(asked, why)

    def _misplaced(self, model: TransformerXLConfig, device: str | None, dtype: torch.dtype | None) -> str | None:
        """Return a message on an unsupported device or dtype; None if both are supported."""
        if device and self.devices and device.partition(":")[0] not in self.devices:
            return f"cannot train on {device}, only on {' or '.join(self.devices)}"
        if dtype and self.dtypes and dtype not in self.dtypes:
            return f"cannot train in {dtype}; set train.dtype to float32"
        return self.obstacle(device, dtype, model.d_head) if device and self.obstacle else None


def _not_factorised(model: TransformerXLConfig) -> str | None:
    """Return a message on the first option of a model that the factorised form lacks; None if it has all."""
    if model.encoding != "relative":
        return f"needs the sinusoid R (model.encoding is {model.encoding})"
    if model.qk_norm:
        return "has no norm of W_kR R (model.qk_norm is true); set it to false"
    if model.clamp_len is not None:
        return f"has no clamp (clamp_len is {model.clamp_len}); set it to none"
    rates = [
        ("on attention", "dropatt", model.dropatt),
        ("on R", "dropout_r", model.dropout if model.dropout_r is None else model.dropout_r),
        ("on W_kR R", "dropout_qkv", model.dropout_qkv),
    ]
    for where, name, rate in rates:
        if rate:
            return f"has no dropout {where} (model.{name} is {rate}); set it to 0"
    return None


BACKENDS = {
    backend.name: backend
    for backend in (
        # The equations, one query at a time.
        Backend("reference", reference_attention, reference_attention),
        # One product for all distances, read through a shifted view.
        Backend("shifted", shifted_attention, compiled_step=True),
        # A block of keys at a time in code compiled for the CPU, without a matrix of all scores.
        Backend(
            "compiled",
            compiled_attention,
            compiled_step=True,
            devices=("cpu",),
            dtypes=(torch.float32, torch.bfloat16),
            obstacle=_compiled_obstacle,
        ),
        # Triton kernels for NVIDIA GPUs, a tile of queries and keys at a time, without a matrix of all scores.
        Backend(
            "triton",
            triton_attention,
            train_reads_on="cuda",
            compiled_step=True,
            devices=("cuda",),
            dtypes=(torch.float32, torch.bfloat16),
            obstacle=why_not_triton,
        ),
        # Plain fused attention over wider heads, by FlexAttention.
        Backend("flex", shifted_attention, factorises=True, devices=("cuda",), dtypes=(torch.float32, torch.bfloat16)),
    )
}

# Backends that are tried in turn, after the one in `FASTEST_CAPTURED`, if any. `shifted` supports every model on every
# device, and most recorded models were trained with it. Only backends that were measured to be faster may precede it.
# `factorised` was a backend that no measurement found to be the fastest anywhere; configurations may still name it.
_CHOICES = {"auto": ("shifted",), "fastest": ("compiled", "shifted"), "factorised": ("shifted",)}

# Fastest backend in a recorded measurement of captured training steps, by CUDA's name of the GPU and the dtype of the
# matrix products (results/gpu-nvidia-h200.json). Steps that are not captured wait for the launch of each kernel, and
# there the same measurement found `shifted` faster (wt103-base: 93,384 tokens/s beside 72,038 with `triton`).
FASTEST_CAPTURED: dict[tuple[str, torch.dtype], str] = {
    ("NVIDIA H200", torch.bfloat16): "triton",
    ("NVIDIA H200", torch.float32): "shifted",
}


def _gpu(device: str | None) -> str | None:
    """Return the name of an NVIDIA GPU of this machine; None for any other device."""
    place = torch.device(device or "cpu")
    if place.type != "cuda" or (place.index or 0) >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_name(place)


def attention_backend(
    model: TransformerXLConfig, device: str | None = None, dtype: torch.dtype | None = None, captured: bool = False
) -> Backend:
    """Return the backend of a configuration; for "auto" and "fastest", the first candidate that supports the model.

    Args:
        model: model configuration.
        device: device that the model will train on; None: not known yet.
        dtype: dtype of the matrix products in training; None: not known yet.
        captured: True if training steps are recorded as CUDA graphs (`train.capture`).
    """
    if model.attention in _CHOICES:
        names = list(_CHOICES[model.attention])
        if captured and dtype is not None and (fastest := FASTEST_CAPTURED.get((_gpu(device) or "", dtype))):
            names.insert(0, fastest)
        return next(BACKENDS[name] for name in names if BACKENDS[name].refusal(model, device or "cpu") is None)
    if model.attention not in BACKENDS:
        names = ", ".join([*_CHOICES, *BACKENDS])
        raise UserError(field="model.attention", value=model.attention, expected=f"one of {names}")
    backend = BACKENDS[model.attention]
    if (refusal := backend.refusal(model, device)) is not None:
        raise refusal
    return backend


def attention_note(
    model: TransformerXLConfig, device: str | None = None, dtype: torch.dtype | None = None
) -> str | None:
    """Return a message of one line if the choice made by `auto` or `fastest` may be unexpected, else None.

    For `fastest` on a CPU it states why compiled attention is not used; on a GPU, that no backend was timed there. The
    arguments are those of `attention_backend`.
    """
    if model.attention not in _CHOICES:
        return None
    if model.attention == "factorised":
        return "model.attention factorised exists no more; auto is used"
    gpu = _gpu(device)
    if gpu is not None and dtype in (torch.float32, torch.bfloat16) and (gpu, dtype) not in FASTEST_CAPTURED:
        chosen = attention_backend(model, device, dtype).name
        return (
            f"no attention backend was timed in {str(dtype)[6:]} on {gpu}; {chosen} is used, model.attention triton "
            f"may be faster"
        )
    if model.attention != "fastest" or (device or "cpu") != "cpu":
        return None
    refusal = BACKENDS["compiled"].refusal(model, "cpu")
    return refusal and f"{refusal.reason}; shifted is used, which is slower"
