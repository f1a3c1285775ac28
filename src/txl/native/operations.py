"""Operations in libraries other than PyTorch's own: products, dropout, RMSNorm and cross-entropy.

Each is PyTorch's operation with the same meaning. They are here because on a CPU PyTorch's version reads or writes more
memory than necessary, or uses one core.

Shapes: N rows, I and O inputs and outputs of a linear layer, D features, V classes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from txl.devices import cpu_fields, cpu_flags
from txl.native.build import is_wanted, library
from txl.native.tensors import Count, Pointer, call, computes, readable

# Largest number of rows for the library's products; for more rows PyTorch's matrix products are faster.
MOST_ROWS = 8
# Least number of rows, inputs and outputs for oneDNN; it must rearrange a matrix first.
LEAST_ROWS = 16
# Dtypes of weights, with the suffixes of the library's functions for them.
WEIGHT_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}


def linear(
    rows: Float[Tensor, "*rows I"],
    weight: Float[Tensor, "O I"],
    bias: Float[Tensor, " O"] | None = None,
    *,
    few: bool = True,
    keeps_sums: bool = False,
) -> Float[Tensor, "*rows O"]:
    """Compute `F.linear` by the library that `_product_by` names; with gradients of any order.

    Args:
        few: False: never use the ways for few rows, whose rounding is another (losses and QRNNs).
        keeps_sums: True: where the product of low-precision weights was summed in float32, return the float32 sums.
    """
    by = _product_by(rows, weight, bias, few)
    if by == "library":
        n_out, n_in = weight.shape
        x = rows.reshape(-1, n_in).to(sums_dtype(weight.dtype)).contiguous()
        out = x.new_empty(x.shape[0], n_out)
        getattr(library(), f"txl_linear_{WEIGHT_SUFFIXES[weight.dtype]}")(
            Pointer(weight.data_ptr()),
            Pointer(bias.data_ptr() if bias is not None else None),
            Count(n_out),
            Count(n_in),
            Pointer(x.data_ptr()),
            Count(x.shape[0]),
            Pointer(out.data_ptr()),
            int(not weight.is_contiguous()),
            torch.get_num_threads(),
        )
        return (out if keeps_sums else out.to(rows.dtype)).view(*rows.shape[:-1], -1)
    if by == "halves":
        # PyTorch's matrix-vector kernels reach about half the memory rate of its batched kernels.
        n_out, n_in = weight.shape
        halves = weight.view(2, n_out // 2, n_in).transpose(1, 2)
        product = torch.bmm(rows.reshape(1, 1, n_in).expand(2, 1, n_in), halves).view(*rows.shape[:-1], n_out)
        return product if bias is None else product.add_(bias)
    if by == "onednn":
        flat = rows.reshape(-1, rows.shape[-1])
        product = _OneDNN.apply(flat, weight, bias) if torch.is_grad_enabled() else _onednn(flat, weight, bias)
        assert isinstance(product, Tensor)
        return product.view(*rows.shape[:-1], -1)
    return F.linear(rows, weight, bias)


def _product_by(rows: Tensor, weight: Tensor, bias: Tensor | None, few: bool) -> str:
    """Return which library computes a product; the only place that decides it.

    - "library", the compiled one: up to `MOST_ROWS` rows without gradients. Such a product is bound by reading the
      weights, which the compiled library does at the speed of memory.
    - "halves": one such row without the compiled library, as a batch of two.
    - "onednn": many rows of float32, where it is faster than MKL (`onednn_is_faster`).
    - "pytorch": everything else, other devices included.
    """
    operands = [rows, weight] if bias is None else [rows, weight, bias]
    # First of all: while `torch.compile` traces, a comparison of sizes would restrict the sizes.
    if not readable(*operands) or torch.is_autocast_enabled("cpu"):
        return "pytorch"
    n_in, n_number, dtype = rows.shape[-1:].numel(), rows.numel(), weight.dtype
    # Both libraries read operands as if they had this form.
    regular = (
        weight.dim() == 2
        and all(tensor.layout == torch.strided for tensor in operands)
        and rows.shape[-1:] == weight.shape[1:]
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous() and bias.dtype == dtype))
    )
    if not regular or n_number == 0:
        return "pytorch"
    if not few or torch.is_grad_enabled() or n_number > MOST_ROWS * n_in:
        many = min(*weight.shape, n_number // n_in) >= LEAST_ROWS and rows.dtype == dtype == torch.float32
        return "onednn" if many and is_wanted() and onednn_is_faster() else "pytorch"
    if (
        dtype in WEIGHT_SUFFIXES
        and rows.dtype in (dtype, sums_dtype(dtype))
        and (weight.is_contiguous() or weight.t().is_contiguous())
        and library() is not None
    ):
        return "library"
    halves = n_number == n_in and weight.shape[0] % 2 == 0 and weight.is_contiguous()
    return "halves" if halves and rows.dtype == dtype == torch.float32 else "pytorch"


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the library's sums for weights of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether this processor multiplies float32 faster by oneDNN than by MKL, both of which PyTorch contains.

    MKL is Intel's. On the processor of AMD with AVX-512 that was measured, oneDNN is 1.2 to 2.5 times as fast.
    """
    return (
        cpu_fields().get("vendor_id") == "AuthenticAMD"
        and "avx512f" in cpu_flags()
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # not a public function of PyTorch
    )


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class _OneDNN(torch.autograd.Function):
    """rows W^T + b. The gradients are such products too, so they can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _onednn(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        rows, weight = ctx.saved_tensors
        (grad,) = above
        grad = grad.contiguous()  # that of a sum has strides of 0
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        return (
            linear(grad, weight.t(), few=False) if of_rows else None,
            linear(grad.t(), rows.t(), few=False) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def compiled_dropout(values: Tensor, rate: float) -> Tensor:
    """Set numbers to 0 with probability `rate` below 1, and multiply the others by 1/(1-rate).

    The mask is drawn from a seed and the index of each number (Philox), on all cores, and only the seed is kept for the
    backward pass; there are derivatives of any order. PyTorch's dropout keeps a mask of the input's size, and on
    processors not made by Intel draws all numbers on one core. `why_not_training` tells beforehand which values the
    library serves.
    """
    return _dropout(values, torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"), rate)


@torch.library.custom_op("txl::dropout", mutates_args=(), device_types="cpu")
def _dropout(values: Tensor, seed: Tensor, rate: float) -> Tensor:
    """Drop numbers by a seed; applied to a gradient, it is also the backward pass, as it drops the same numbers."""
    dense = values.contiguous()
    out = torch.empty_like(dense)
    numbers = Count(dense.numel()), ctypes.c_double(rate), ctypes.c_uint64(int(seed))
    call("txl_dropout", values.dtype, dense, out, *numbers)
    return out


def _like(values: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _keep_seed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, ctx.rate = inputs
    ctx.save_for_backward(seed)


def _dropout_gradient(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
    return _dropout(above, *ctx.saved_tensors, ctx.rate), None, None


_dropout.register_fake(_like)
_dropout.register_autograd(_dropout_gradient, setup_context=_keep_seed)


def compiled_rms_norm(
    values: Float[Tensor, "*rows D"], gain: Float[Tensor, " D"], epsilon: float
) -> Float[Tensor, "*rows D"]:
    """Return x / sqrt(mean(x^2) + epsilon) * gain for each row x, in the dtype of the values (Zhang and Sennrich 2019).

    One number per row is kept for the backward pass. `computes` tells whether the library supports the values.
    """
    return _normalised(values, gain.float(), epsilon)[0]


@torch.library.custom_op("txl::rms_norm", mutates_args=(), device_types="cpu")
def _normalised(values: Tensor, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    dense = values.contiguous()
    out = torch.empty_like(dense)
    scales = torch.empty(dense.shape[:-1], dtype=torch.float32, device="cpu")
    call("txl_rms_norm", dense.dtype, dense, gain.contiguous(), *_sizes(dense), ctypes.c_double(epsilon), out, scales)
    return out, scales


@torch.library.custom_op("txl::rms_norm_backward", mutates_args=(), device_types="cpu")
def _norm_gradients(values: Tensor, gain: Tensor, scales: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    dense, out = values.contiguous(), torch.empty(values.shape, dtype=values.dtype, device="cpu")
    gain_gradient = torch.empty(gain.shape, dtype=torch.float32, device="cpu")
    arguments = gain.contiguous(), scales, above.to(values.dtype).contiguous(), *_sizes(dense), out, gain_gradient
    call("txl_rms_norm_backward", dense.dtype, dense, *arguments)
    return out, gain_gradient


def _sizes(values: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    n = values.shape[-1]
    return Count(values.numel() // n if n else 0), Count(n)


def _keep_scales(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, gain, ctx.epsilon = inputs
    ctx.save_for_backward(values, gain, output[1])


def _norm_backward(ctx: Any, above: Tensor, _above_scales: Tensor | None) -> tuple[Tensor, Tensor, None]:
    values, gain, scales = ctx.saved_tensors
    if not torch.is_grad_enabled() and library() is not None:
        return *_norm_gradients(values, gain, scales, above), None
    # Second derivatives are required, or the library is not allowed in the backward pass.
    wide, factors = values.float(), above.float()
    scale = (wide.square().mean(-1, keepdim=True) + ctx.epsilon).rsqrt()
    normal, weighted = wide * scale, factors * gain
    gradient = scale * (weighted - normal * (weighted * normal).mean(-1, keepdim=True))
    return gradient.to(values.dtype), (factors * normal).reshape(-1, len(gain)).sum(0), None


_normalised.register_fake(
    lambda values, gain, epsilon: (_like(values), values.new_empty(values.shape[:-1], dtype=torch.float32))
)
_norm_gradients.register_fake(lambda values, gain, scales, above: (_like(values), torch.empty_like(gain)))
_normalised.register_autograd(_norm_backward, setup_context=_keep_scales)


def serves(logits: Tensor, targets: Tensor) -> bool:
    """Return whether the library computes these losses: `computes` is true, and the targets match the logits."""
    return (
        targets.dtype == torch.int64
        and targets.device == logits.device
        and targets.shape == logits.shape[:1]
        and type(targets) is type(logits)
        and computes(logits)
    )


def compiled_cross_entropy(logits: Float[Tensor, "N V"], targets: Tensor) -> Float32[Tensor, " N"] | None:
    """Return -log softmax(logits)[target], row by row; None if `serves` is false.

    There is no float32 copy of the logits; they and two numbers per row are kept for the backward pass.
    """
    return _losses(logits, targets)[0] if serves(logits, targets) else None


def losses_and_sums(
    logits: Float[Tensor, "N V"], targets: Int64[Tensor, " N"]
) -> tuple[Float32[Tensor, " N"], Float32[Tensor, "N 2"]]:
    """Return the losses, and for each row max(x) and log sum exp(x - max(x)); `serves` must be true."""
    n_row, n_class = logits.shape
    if n_row and not 0 <= int(targets.min()) <= int(targets.max()) < n_class:
        raise IndexError(f"targets are {int(targets.min())} to {int(targets.max())}; expected 0 to {n_class - 1}")
    losses = torch.empty(n_row, dtype=torch.float32, device="cpu")
    sums = torch.empty(n_row, 2, dtype=torch.float32, device="cpu")
    call("txl_cross_entropy", logits.dtype, _dense(logits), _dense(targets), Count(n_row), Count(n_class), losses, sums)
    return losses, sums


def write_gradient(
    logits: Float[Tensor, "N V"],
    targets: Int64[Tensor, " N"],
    sums: Float32[Tensor, "N 2"],
    above: Float32[Tensor, " N"],
    out: Float[Tensor, "N V"],
) -> None:
    """Write the gradient with respect to the logits to `out`, which may be the logits if they are contiguous.

    `sums` is the second result of `losses_and_sums`, `above` the gradient with respect to the losses.
    """
    n_row, n_class = logits.shape
    rows = Count(n_row), Count(n_class)
    call("txl_cross_entropy_backward", logits.dtype, _dense(logits), _dense(targets), sums, _dense(above), *rows, out)


def _dense(values: Tensor) -> Tensor:
    return values.resolve_neg().contiguous()


@torch.library.custom_op("txl::cross_entropy", mutates_args=(), device_types="cpu")
def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return losses_and_sums(logits, targets)


@torch.library.custom_op("txl::cross_entropy_backward", mutates_args=(), device_types="cpu")
def _loss_gradient(logits: Tensor, targets: Tensor, sums: Tensor, above: Tensor) -> Tensor:
    out = _like(logits)
    write_gradient(logits, targets, sums, above, out)
    return out


def _loss_backward(ctx: Any, above: Tensor, _above_sums: Tensor | None) -> tuple[Tensor, None]:
    logits, targets, sums = ctx.saved_tensors
    if not torch.is_grad_enabled() and library() is not None:
        return _loss_gradient(logits, targets, sums, above), None
    # Second derivatives are required, or the library is not allowed in the backward pass.
    probabilities = logits.softmax(-1, dtype=torch.float32)
    onehot = F.one_hot(targets, logits.shape[1])
    return ((probabilities - onehot) * above[:, None]).to(logits.dtype), None


@_losses.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    n_row = logits.shape[0]
    return logits.new_empty(n_row, dtype=torch.float32), logits.new_empty(n_row, 2, dtype=torch.float32)


_loss_gradient.register_fake(_like)
_losses.register_autograd(
    _loss_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1])
)
