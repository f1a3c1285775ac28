"""The attention backends: features of each, choice of the backend for a model, and computation of a segment.

Shapes: B lanes, T queries, S keys, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from txl import devices
from txl.attention.equations import AttentionRefused, KeyScope, Operands, reference_attention
from txl.attention.shifted import shifted_attention
from txl.attention.triton_attention import triton_attention, why_not_triton
from txl.config import TransformerXLConfig
from txl.config.transformer_xl import FORMER_ATTENTIONS
from txl.errors import UserError
from txl.native.attention import reading_attention, training_attention, why_not_training
from txl.native.tensors import transforms_are_active

# Function that computes attention from projected positions; arguments and result as in `reference_attention`.
RelativeAttention = Callable[..., Tensor]


def check_compiled(device: str, dtype: torch.dtype) -> None:
    """Raise `AttentionRefused` if the compiled library cannot train on a device, in a dtype, or on this machine."""
    # `torch.compile` traces only shapes; support by this machine was checked when the model was built.
    if not torch.compiler.is_compiling() and (reason := why_not_training(device, dtype)):
        raise AttentionRefused("compiled", reason, "auto")


def compiled_attention(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H D"]:
    """Compute `reference_attention` in the compiled library, forward and backward, without a matrix of all scores.

    Requires a CPU, and float32 or bfloat16. There are no second derivatives.
    """
    check_compiled(operands.query.device.type, operands.query.dtype)
    filled = scope.filled_tensor
    if scope.filled is not None:
        filled = torch.tensor(scope.filled, device="cpu")
    return training_attention(operands, window=scope.window, filled=filled, dropout=dropout)


def attention_without_gradients(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H D"]:
    """Compute `reference_attention` in the compiled library where that is faster, else by `shifted_attention`."""
    read = None
    if scope.filled_tensor is None:  # set in recorded steps on a GPU alone
        read = reading_attention(operands, scope.window, scope.filled)
    return shifted_attention(operands, scope, dropout) if read is None else read


def _triton_without_gradients(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Tensor:
    return (triton_attention if operands.query.is_cuda else attention_without_gradients)(operands, scope, dropout)


def causal_attention(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B T H D"],
    value: Float[Tensor, "B T H D"],
    dropout: float,
    compiled: bool = False,
) -> Float[Tensor, "B T H D"]:
    """Compute causal softmax attention within a segment, without relative positions.

    If `compiled`, segments with gradients or dropout (of attention weights) are computed in the compiled library.
    """
    if dropout == 0 and (read := reading_attention((query, key, value))) is not None:
        return read
    if compiled and (dropout > 0 or torch.is_grad_enabled()) and not transforms_are_active():
        check_compiled(query.device.type, query.dtype)
        return training_attention((query, key, value), dropout=dropout)
    heads = (rows.transpose(1, 2) for rows in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=dropout).transpose(1, 2)


# Function of model, device of the training and dtype of its products (None: not known yet); returns why a backend
# cannot train it, as a phrase that follows the backend's name, or None if it can.
Obstacle = Callable[[TransformerXLConfig, str | None, torch.dtype | None], str | None]


@dataclass(frozen=True)
class Backend:
    """A way to compute A^rel. Every backend supports every model."""

    name: str
    train: RelativeAttention  # for segments with gradients or dropout
    read: RelativeAttention = attention_without_gradients  # for others, on every device and in every dtype
    compiled_step: bool = True  # single tokens may pass through all layers in the compiled library at once
    obstacle: Obstacle | None = None

    def __call__(self, operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H D"]:
        """Return the attention output of every query of a segment, computed by `train` or `read`.

        Within transforms of `torch.func`, which the others do not support, `reference_attention` computes.
        """
        if transforms_are_active():
            return reference_attention(operands, scope, dropout)
        return (self.train if dropout > 0 or torch.is_grad_enabled() else self.read)(operands, scope, dropout)

    def refusal(
        self, model: TransformerXLConfig, device: str | None = None, dtype: torch.dtype | None = None
    ) -> AttentionRefused | None:
        """Return the error for a model that this backend cannot train, if any; arguments as for an `Obstacle`."""
        why = self.obstacle and self.obstacle(model, device, dtype)
        asked = self.name if model.attention == self.name else f"{model.attention} ({self.name})"
        return AttentionRefused(asked, why) if why else None


# Functions with names, because models are pickled with their backend.
def _compiled_obstacle(_: TransformerXLConfig, device: str | None, dtype: torch.dtype | None) -> str | None:
    return why_not_training(device, dtype or torch.float32) if device else _why_not_dtype(dtype)


def _triton_obstacle(model: TransformerXLConfig, device: str | None, dtype: torch.dtype | None) -> str | None:
    return why_not_triton(device, dtype, model.d_head) if device else _why_not_dtype(dtype)


def _why_not_dtype(dtype: torch.dtype | None) -> str | None:
    is_known = dtype in (None, torch.float32, torch.bfloat16)
    return None if is_known else f"cannot train in {dtype}, only in float32 and bfloat16"


BACKENDS = {
    backend.name: backend
    for backend in (
        # The equations, one query at a time.
        Backend("reference", reference_attention, reference_attention, compiled_step=False),
        # One product for all distances, read through a shifted view.
        Backend("shifted", shifted_attention),
        # A block of keys at a time in code compiled for the CPU, without a matrix of all scores.
        Backend("compiled", compiled_attention, obstacle=_compiled_obstacle),
        # Triton kernels for NVIDIA GPUs, a tile of queries and keys at a time, without a matrix of all scores.
        Backend("triton", triton_attention, _triton_without_gradients, obstacle=_triton_obstacle),
    )
}

# Fastest backend in a recorded measurement of training steps, by compute capability of the GPU and dtype of the matrix
# products (results/gpu-nvidia-h200.json; an H100 has the same processor).
FASTEST_ON_GPU: dict[tuple[tuple[int, int], torch.dtype], str] = {
    ((9, 0), torch.bfloat16): "triton",
    ((9, 0), torch.float32): "shifted",
}


def attention_backend(
    model: TransformerXLConfig, device: str | None = None, dtype: torch.dtype | None = None
) -> Backend:
    """Return the backend of a configuration; if that leaves the choice open, the first candidate that can train it.

    Before `shifted`, which supports every model on every device, there are only backends that were measured to be
    faster.

    Args:
        device, dtype: device and dtype of the matrix products in training; None: not known yet.
    """
    if not model.names_attention:
        names = ["compiled", "shifted"] if model.attention == "fastest" else ["shifted"]
        kind = devices.compute_capability(device)
        if kind is not None and dtype is not None and (kind, dtype) in FASTEST_ON_GPU:
            names.insert(0, FASTEST_ON_GPU[kind, dtype])
        return next(BACKENDS[name] for name in names if BACKENDS[name].refusal(model, device or "cpu") is None)
    if model.attention not in BACKENDS:
        names = ", ".join(["auto", "fastest", *BACKENDS])
        raise UserError(field="model.attention", value=model.attention, expected=f"one of {names}")
    backend = BACKENDS[model.attention]
    if (refusal := backend.refusal(model, device)) is not None:
        raise refusal
    return backend


def untimed_rival(model: TransformerXLConfig, device: str | None, dtype: torch.dtype | None) -> str | None:
    """Return the backend that may be faster than the one that `auto` or `fastest` takes, where neither was timed."""
    kind = devices.compute_capability(device)
    if model.names_attention or kind is None or dtype is None or (kind, dtype) in FASTEST_ON_GPU:
        return None
    return "triton" if BACKENDS["triton"].refusal(model, device, dtype) is None else None


def attention_note(
    model: TransformerXLConfig, device: str | None = None, dtype: torch.dtype | None = None
) -> str | None:
    """Return a message of one line if the choice made by `auto` or `fastest` may be unexpected, else None."""
    if model.attention in FORMER_ATTENTIONS:
        return f"model.attention {model.attention} exists no more; auto is used"
    kind, rival = devices.compute_capability(device), untimed_rival(model, device, dtype)
    if kind is not None and rival is not None:
        chosen, gpus = attention_backend(model, device, dtype).name, f"GPUs of compute capability {kind[0]}.{kind[1]}"
        return f"no attention was timed in {dtype} on {gpus}: {chosen} is used, model.attention {rival} may be faster"
    if model.attention == "fastest" and (device or "cpu") == "cpu":
        refusal = BACKENDS["compiled"].refusal(model, "cpu")
        return refusal and f"{refusal.reason}; shifted is used, which is slower"
    return None
