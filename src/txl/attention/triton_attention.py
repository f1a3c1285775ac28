"""Relative attention in Triton kernels for NVIDIA GPUs, forward and backward, without a matrix of all scores.

For the backward pass the operands, the output and one number per query are kept; dropout as in `native/attention.py`,
with a seed that stays on the device. Results are the same to the last bit in every run: there are no atomics, and the
groups in which lanes are summed depend only on the shape.

Shapes: B lanes, T queries, S keys of which the last T are the queries' own, H heads, D width of a head.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from txl.attention.equations import AttentionRefused, KeyScope, Operands
from txl.attention.shifted import shifted_attention

# Smallest number of programs for the gradient of positions, if there are enough lanes. With 2,048 the kernel takes 0.85
# of the time that it takes with 512 (enwik8-12L on an H200).
_POSITION_PROGRAMS = 2048


class Tiling(NamedTuple):
    """Sizes of a kernel's tiles, and Triton's options."""

    block: int  # number of queries and of keys in a tile
    warps: int
    stages: int  # pipeline stages: with more than one, operands are loaded ahead
    shared: int  # upper bound on the kernel's shared memory in bytes, read from the binaries of Triton 3.6 and 3.9

    @property
    def options(self) -> dict[str, Any]:
        """Triton's compile options."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


# Names in `triton_kernels`.
KERNELS = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "position_gradient_kernel")
# Tilings of the four kernels on Hopper GPUs in bfloat16, by padded head width: the fastest of several that were timed
# on an H200. Its matrix units read tiles of 64 rows from shared memory; on older GPUs they exceed the registers.
_HOPPER = {
    64: (Tiling(64, 4, 3, 114688), Tiling(32, 4, 3, 49152), Tiling(64, 4, 2, 115200), Tiling(64, 4, 2, 115200)),
    128: (Tiling(64, 4, 3, 212992), Tiling(32, 4, 3, 94208), Tiling(32, 4, 3, 102912), Tiling(32, 4, 3, 102912)),
}


@functools.cache
def tilings(d_head: int, dtype: torch.dtype, tf32: bool, capability: tuple[int, int]) -> dict[str, Tiling] | None:
    """Return the tiling of each kernel for a head width, dtype and compute capability; None if none fits.

    Except for `_HOPPER` they were chosen to fit.
    """
    width = padded_width(d_head)
    if dtype == torch.bfloat16:
        if capability[0] == 9 and width <= 128:
            return dict(zip(KERNELS, _HOPPER[max(64, width)], strict=True))
        warps, shared = 8 if width == 256 else 4, {32: 20480, 64: 20480, 128: 40960, 256: 81920}.get(width)
    else:
        warps = 4 if tf32 else 8
        shared = {32: 28672, 64: 40960 if tf32 else 53248, 128: 81920 if tf32 else 102400}.get(width)
    return None if shared is None else dict.fromkeys(KERNELS, Tiling(32, warps, 1, shared))


def padded_width(d_head: int) -> int:
    """Return the head width rounded up to a power of two, at least 32, as matrix units require."""
    return max(32, 1 << (d_head - 1).bit_length())


def why_not_triton(device: torch.device | str, dtype: torch.dtype | None, d_head: int) -> str | None:
    """Return why the kernels cannot be used, as a phrase that follows their name; None if they can.

    `dtype` is that of the matrix products; None: not known yet.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return f"cannot train on {device}, only on cuda"
    if dtype not in (None, torch.float32, torch.bfloat16):
        return f"cannot train in {dtype}, only in float32 and bfloat16"
    return _why_not_here(device, dtype, d_head, _tf32())


@functools.cache  # called in every layer; the hardware does not change
def _why_not_here(device: torch.device, dtype: torch.dtype | None, d_head: int, tf32: bool) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if torch.version.cuda is None or (device.index or 0) >= torch.cuda.device_count():
        return "needs an NVIDIA GPU and a PyTorch that was built for it"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"needs compute capability 8.0 or above (this GPU has {capability[0]}.{capability[1]})"
    tiles, heads = tilings(d_head, dtype or torch.bfloat16, tf32, capability), f"heads of {d_head} features"
    if tiles is None:
        return f"has no room for {heads} in {dtype or 'any dtype'}"
    available = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if (needed := max(tile.shared for tile in tiles.values())) > available:
        return f"needs {needed:,} bytes of shared memory for {heads} in {dtype} ({device} has {available:,})"
    return None


def _tf32() -> bool:
    """Return whether PyTorch may compute float32 products in TF32."""
    return torch.get_float32_matmul_precision() != "highest"


def triton_attention(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H D"]:
    """Compute `reference_attention` in Triton kernels; there are no second derivatives.

    With gradients or dropout, the operands must be float32 or bfloat16 on a GPU. Without, `shifted_attention` computes
    single queries, and all segments that the kernels do not support.
    """
    query = operands.query
    # `torch.compile` traces only shapes; support by this machine was checked when the model was built.
    traced = torch.compiler.is_compiling()
    reason = None if traced else why_not_triton(query.device, query.dtype, query.shape[-1])
    if dropout == 0 and not torch.is_grad_enabled() and (query.shape[1] == 1 or reason is not None):
        return shifted_attention(operands, scope)
    if reason is not None:
        raise AttentionRefused("triton", reason)
    return kernel_attention(operands, scope, dropout)


def kernel_attention(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Float[Tensor, "B T H D"]:
    """Compute `triton_attention` always in the kernels; on a CPU they run in Triton's interpreter."""
    device = operands.query.device
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device) if dropout > 0 else None
    oldest = scope.oldest(device)
    if oldest is not None:
        oldest = oldest.to(torch.int32)
    window = operands.key.shape[1] if scope.window is None else scope.window
    return _attend(list(operands), oldest, seed, window, dropout)[0]


@torch.library.custom_op("txl::relative_attention", mutates_args=())
def _attend(
    operands: Sequence[Tensor], oldest: Tensor | None, seed: Tensor | None, window: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Return outputs [B,T,H,D], and log-sum-exps to base 2, float32 [B,H,T]."""
    query, call = operands[0], _Call(Operands(*operands), oldest, seed, window, dropout)
    n_lane, n_query, n_head, _ = query.shape
    out = query.new_empty(query.shape)
    lse = query.new_empty(n_lane, n_head, n_query, dtype=torch.float32)
    blocks = call.blocks("forward_kernel", n_query)
    call.launch("forward_kernel", (blocks, n_head, n_lane), out=out, lse=lse)
    return out, lse


@torch.library.custom_op("txl::relative_attention_backward", mutates_args=())
def _attend_backward(
    above: Tensor,
    out: Tensor,
    lse: Tensor,
    operands: Sequence[Tensor],
    oldest: Tensor | None,
    seed: Tensor | None,
    window: int,
    dropout: float,
) -> list[Tensor]:
    """Return the gradients of query, key, value, position, u and v."""
    query, key, value, position, u, v = operands
    call = _Call(Operands(*operands), oldest, seed, window, dropout)
    n_lane, n_query, n_head, d_head = query.shape
    n_key = key.shape[1]
    above = padded(above)
    strides = {f"above_{name}": stride for name, stride in zip(("lane", "row", "head"), above.stride(), strict=False)}
    rows = {"above": above, "lse": lse, "delta": torch.empty_like(lse), **strides}

    name = "query_gradient_kernel"  # the other kernels need the `delta` that it computes
    grad_query = query.new_empty(query.shape)
    grad_biases = query.new_empty(2, n_lane, call.blocks(name, n_query), n_head, d_head, dtype=torch.float32)
    grid = (call.blocks(name, n_query), n_head, n_lane)
    call.launch(name, grid, **rows, out=out, grad_query=grad_query, grad_biases=grad_biases)

    name = "key_gradient_kernel"
    grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
    grid = (call.blocks(name, n_key), n_head, n_lane)
    call.launch(name, grid, **rows, grad_key=grad_key, grad_value=grad_value)

    name = "position_gradient_kernel"
    block, n_query_block, n_key_block = call.tiles[name].block, call.blocks(name, n_query), call.blocks(name, n_key)
    # Number of diagonals of tiles, from the lower left tile to the last one with a visible key.
    n_diagonal = n_query_block + min(n_key_block - 1, math.ceil((n_key - n_query) / block))
    n_group = min(n_lane, math.ceil(_POSITION_PROGRAMS / (n_head * n_diagonal)))
    # The lanes of a group are summed in the kernel, the groups here: no atomics, so the same bits in every run.
    sums = position.new_zeros(n_group, 2, (n_diagonal + 1) * block, n_head, d_head, dtype=torch.float32)
    grid = (n_diagonal, n_head, n_group)
    call.launch(name, grid, **rows, grad_position=sums, n_lane=n_lane, n_group=n_group)
    first = n_query_block * block - n_query
    grad_position = sums.sum(dim=(0, 1)).narrow(0, first, n_key).to(position.dtype)
    grad_u, grad_v = (grad.sum(dim=(0, 1)) for grad in grad_biases)
    return [grad_query, grad_key, grad_value, grad_position, grad_u.to(u.dtype), grad_v.to(v.dtype)]


class _Call:
    """Arguments shared by all kernels of a call."""

    def __init__(self, operands: Operands, oldest: Tensor | None, seed: Tensor | None, window: int, dropout: float):
        query = operands.query
        _, n_query, n_head, d_head = query.shape
        self.device = query.device
        capability = torch.cuda.get_device_capability(self.device) if query.is_cuda else (9, 0)
        tf32 = _tf32()
        tiles = tilings(d_head, query.dtype, tf32, capability)
        assert tiles is not None, "why_not_triton was not asked"
        self.tiles = tiles
        key, value, position = (padded(rows) for rows in (operands.key, operands.value, operands.position))
        self.arguments: dict[str, Any] = {
            # Added here, not in the kernels, whose matrix units then read them without passing registers.
            "query_u": padded(torch.add(query, operands.u, out=query.new_empty(query.shape))).contiguous(),
            "query_v": padded(torch.add(query, operands.v, out=query.new_empty(query.shape))).contiguous(),
            "key": key,
            "value": value,
            "position": position,
            "oldest_of": oldest,
            "seed_at": seed,
            **dict(zip(("key_lane", "key_row", "key_head"), key.stride(), strict=False)),
            **dict(zip(("value_lane", "value_row", "value_head"), value.stride(), strict=False)),
            **dict(zip(("position_row", "position_head"), position.stride(), strict=False)),
            "n_head": n_head,
            "n_query": n_query,
            "n_key": key.shape[1],
            "d_head": d_head,
            "d_operand": key.shape[-1],
            "window": window,
            "scale": 1 / math.sqrt(d_head),
            "factor": 1 / (1 - dropout),
            "THRESHOLD": round(dropout * 2**32),
            "PRECISION": "tf32" if tf32 else "ieee",
            "WIDTH": padded_width(d_head),
        }

    def blocks(self, name: str, n_row: int) -> int:
        """Return the number of blocks into which a kernel divides queries or keys."""
        return math.ceil(n_row / self.tiles[name].block)

    def launch(self, name: str, grid: tuple[int, int, int], **more: Any) -> None:
        """Run a kernel; `AttentionRefused` if the device has too few resources, and then nothing is launched."""
        from txl.attention import triton_kernels

        kernel, tiles = getattr(triton_kernels, name), self.tiles[name]
        try:
            kernel[grid](**self.arguments, **more, BLOCK=tiles.block, **tiles.options)
        except triton_kernels.triton.runtime.errors.OutOfResources as error:
            raise AttentionRefused("triton", f"does not fit on {self.device} ({error})") from None


def padded(rows: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows multiple"]:
    """Return rows with stride 1 in the last dimension, padded with zeros to the next multiple of 16."""
    missing = -rows.shape[-1] % 16
    if missing:
        return F.pad(rows, (0, missing))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@_attend.register_fake
def _(operands: Sequence[Tensor], *others: Any) -> tuple[Tensor, Tensor]:
    query = operands[0]
    n_lane, n_query, n_head, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(n_lane, n_head, n_query, dtype=torch.float32)


@_attend_backward.register_fake
def _(above: Tensor, out: Tensor, lse: Tensor, operands: Sequence[Tensor], *others: Any) -> list[Tensor]:
    return [operand.new_empty(operand.shape) for operand in operands]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    operands, oldest, seed, ctx.window, ctx.dropout = inputs
    ctx.save_for_backward(*output, oldest, seed, *operands)


def _gradients(ctx: Any, above: Tensor, _above_lse: Tensor | None) -> tuple[list[Tensor] | None, ...]:
    out, lse, oldest, seed, *operands = ctx.saved_tensors
    return _attend_backward(above, out, lse, operands, oldest, seed, ctx.window, ctx.dropout), None, None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)
