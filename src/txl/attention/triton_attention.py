"""Relative attention in Triton kernels for NVIDIA GPUs, forward and backward.

The forward pass stores no matrix of scores. For the backward pass the operands, the output and one number per query are
kept; one kernel then writes the weights and the gradient of the scores, and batched matrix products give all gradients.
Dropout as in `native/attention.py`, with a seed that stays on the device. Results are the same to the last bit in every
run: there are no atomics, and the groups in which lanes are summed depend only on the shape.

Shapes: B lanes, T queries, S keys of which the last T are the queries' own, H heads, D width of a head.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from txl.attention.equations import AttentionRefused, KeyScope, Operands
from txl.attention.shifted import shifted_attention

# Bytes of weights and gradients of scores that a backward pass stores at once: with more it goes by groups of lanes.
GROUP_BYTES = 640 * 2**20


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
KERNELS = ("forward_kernel", "score_gradient_kernel")
# Tilings of the kernels on Hopper GPUs in bfloat16, by padded head width: for 64 the fastest of six that were timed on
# an H200. Its matrix units read tiles of 64 rows from shared memory; on older GPUs these exceed the registers.
_HOPPER = {
    64: (Tiling(64, 4, 3, 114688), Tiling(32, 2, 2, 28672)),
    128: (Tiling(64, 4, 3, 212992), Tiling(64, 8, 2, 163840)),
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
        warps, shared = 8 if width == 256 else 4, {32: 10240, 64: 16384, 128: 28672, 256: 65536}.get(width)
    else:
        warps = 4 if tf32 else 8
        shared = {32: 28672, 64: 40960, 128: 69632}.get(width)
    return None if shared is None else dict.fromkeys(KERNELS, Tiling(32, warps, 1, shared))


def padded_width(d_head: int) -> int:
    """Return the head width rounded up to a power of two, at least 32, as matrix units require."""
    return max(32, 1 << (d_head - 1).bit_length())


def precision(d_head: int, tf32: bool) -> str:
    """Return the precision of float32 products: TF32 if allowed, else three products in it with float32's accuracy.

    With 128 features those three exceed the registers.
    """
    return "tf32" if tf32 else "tf32x3" if padded_width(d_head) <= 64 else "ieee"


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


class AttentionCall(NamedTuple):
    """All that the kernels of a call share besides tensors."""

    d_head: int  # D, the true width, of the scale 1/sqrt(D); operands have D' >= D columns, with zeros after D
    window: int  # number of keys that a query sees; S: no limit
    oldest: Int32[Tensor, " B"] | None  # first filled key of each lane; None: 0
    seed: Int64[Tensor, " 1"] | None  # on the device; None: no dropout
    dropout: float
    n_key: int  # S; keys, values, positions and their gradients may have more rows (see `aligned`), all zeros

    def launch(self, name: str, grid: tuple[int, int, int], tensors: dict[str, Tensor], **sizes: int) -> None:
        """Run a kernel with a block of queries in each program; `grid` has queries instead of blocks.

        `AttentionRefused` if the device has too few resources, and then nothing is launched.
        """
        from txl.attention import triton_kernels

        query, key, value, position = (tensors[name] for name in ("query_u", "key", "value", "position"))
        n_query, _, n_head, width = query.shape
        tf32 = _tf32()
        capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else (9, 0)
        tiles = tilings(width, query.dtype, tf32, capability)
        assert tiles is not None, "why_not_triton was not asked"
        tile, n_row, *programs = tiles[name], *grid
        strides = {
            **dict(zip(("query_row", "query_lane", "query_head"), query.stride(), strict=False)),
            **dict(zip(("key_row", "key_lane", "key_head"), key.stride(), strict=False)),
            **dict(zip(("value_row", "value_lane", "value_head"), value.stride(), strict=False)),
            **dict(zip(("position_row", "position_head"), position.stride(), strict=False)),
        }
        try:
            with torch.cuda.device_of(query):  # where Triton launches
                getattr(triton_kernels, name)[math.ceil(n_row / tile.block), *programs](
                    **tensors,
                    **strides,
                    **sizes,
                    oldest_of=self.oldest,
                    seed_at=self.seed,
                    n_head=n_head,
                    n_query=n_query,
                    n_key=self.n_key,
                    width=width,
                    window=self.window,
                    scale=1 / math.sqrt(self.d_head),
                    factor=1 / (1 - self.dropout),
                    THRESHOLD=round(self.dropout * 2**32),
                    PRECISION=precision(width, tf32),
                    WIDTH=padded_width(width),
                    BLOCK=tile.block,
                    **tile.options,
                )
        except triton_kernels.triton.runtime.errors.OutOfResources as error:
            raise AttentionRefused("triton", f"does not fit on {query.device} ({error})") from None


def attend(
    query_u: Float[Tensor, "T B H D"],
    query_v: Float[Tensor, "T B H D"],
    key: Float[Tensor, "S B H D"],
    value: Float[Tensor, "S B H D"],
    position: Float[Tensor, "S H D"],
    call: AttentionCall,
    out: Float[Tensor, "T B H D"] | None = None,
) -> tuple[Float[Tensor, "T B H D"], Float[Tensor, "B H T"]]:
    """Return outputs, and log-sum-exps to base 2 in float32; capturable in a CUDA graph.

    Args:
        query_u, query_v: q + u and q + v, contiguous; here and in all operands, D is a multiple of 16.
        key, value: any strides, but 1 in the last dimension.
        position: W_kR R, farthest distance first, with strides as for keys.
        call: what the operands mean.
        out: where to write the outputs; None: a new tensor.

    Keys, values and positions may have more than S rows.
    """
    n_query, n_lane, n_head, _ = query_u.shape
    out = torch.empty_like(query_u) if out is None else out
    lse = query_u.new_empty(n_lane, n_head, n_query, dtype=torch.float32)
    tensors = {"query_u": query_u, "query_v": query_v, "key": key, "value": value, "position": position}
    call.launch("forward_kernel", (n_query, n_head, n_lane), {**tensors, "out": out, "lse": lse})
    return out, lse


def attend_backward(
    above: Float[Tensor, "T B H D"],
    out: Float[Tensor, "T B H D"],
    lse: Float[Tensor, "B H T"],
    query_u: Float[Tensor, "T B H D"],
    query_v: Float[Tensor, "T B H D"],
    key: Float[Tensor, "S B H D"],
    value: Float[Tensor, "S B H D"],
    position: Float[Tensor, "S H D"],
    call: AttentionCall,
    grad_key: Float[Tensor, "S B H D"],
    grad_value: Float[Tensor, "S B H D"],
    grad_position: Float[Tensor, "S H D"],
) -> tuple[Float[Tensor, "T B H D"], Float[Tensor, "T B H D"]]:
    """Return the gradients of q + u and q + v; those of keys, values and positions are written. As capturable.

    Args:
        above: gradient of `out`, contiguous.
        out, lse: results of `attend` for the same operands and call.
        query_u, query_v, position: as for `attend`.
        key, value: as for `attend`, and lanes and heads together have one stride: stride(1) = H stride(2).
        call: as for `attend`.
        grad_key, grad_value: written; strides of their own, as for keys.
        grad_position: written; any strides, but 1 in the last dimension.

    Keys, values, positions and their gradients have S rows, or all of them `aligned(S)`, with zeros after S.
    """
    n_query, n_lane, n_head, _ = query_u.shape
    pitch = aligned(call.n_key)
    # Products over all columns of the pitch read aligned rows; those over S columns may not (see `aligned`).
    n_key = pitch if key.shape[0] == pitch else call.n_key
    n, h = _group(n_lane, n_head, 3 * n_query * pitch * query_u.element_size())
    grad_query_u, grad_query_v = torch.empty_like(query_u), torch.empty_like(query_v)
    buffers = query_u.new_empty(3, n * h * n_query * pitch)
    tensors = {"query_u": query_u, "query_v": query_v, "key": key, "value": value, "position": position}
    tensors |= {"out": out, "lse": lse, "above": above}
    sums = None if n == n_lane else torch.zeros_like(grad_position, dtype=torch.float32)
    for lanes, heads in itertools.product(_slices(n_lane, n), _slices(n_head, h)):
        n, h = lanes.stop - lanes.start, heads.stop - heads.start
        parts = [buffer[: n * h * n_query * pitch] for buffer in buffers]
        stored = dict(zip(("applied", "by_key", "by_distance"), parts, strict=True))
        first = {"first_lane": lanes.start, "first_head": heads.start}
        call.launch("score_gradient_kernel", (n_query, h, n), {**tensors, **stored}, pitch=pitch, **first)

        applied, by_key = (part.view(n * h, n_query, pitch)[..., :n_key] for part in parts[:2])
        torch.bmm(applied.mT, _of_each(above, lanes, heads), out=_of_each(grad_value, lanes, heads))
        torch.bmm(by_key.mT, _of_each(query_u, lanes, heads), out=_of_each(grad_key, lanes, heads))
        torch.bmm(by_key, _of_each(key, lanes, heads), out=_of_each(grad_query_u, lanes, heads))

        # By distance all lanes are one matrix, but those of a group lie apart in the queries.
        by_distance = parts[2].view(h, n_query, n, pitch)[..., :n_key]
        for lane in _slices(n, n if n == n_lane else 1):
            matrices = by_distance[:, :, lane].flatten(1, 2)
            lane = slice(lanes.start + lane.start, lanes.start + lane.stop)
            rows = _of_heads(query_v, lane, heads)
            torch.bmm(matrices, position[:, heads].transpose(0, 1), out=_of_heads(grad_query_v, lane, heads))
            if sums is None:
                torch.bmm(matrices.mT, rows, out=grad_position[:, heads].transpose(0, 1))
            else:
                sums[:, heads] += torch.bmm(matrices.mT, rows).transpose(0, 1)
    if sums is not None:
        grad_position.copy_(sums)
    return grad_query_u, grad_query_v


def aligned(size: int) -> int:
    """Return a size rounded up to a multiple of 16, with which a GPU reads whole rows.

    Triton's accesses then have 16 bytes in bfloat16, and cuBLAS has products for it; with other widths and numbers of
    keys it takes kernels of older GPUs, which take three times as long (S = 140 on an H200).
    """
    return -(-size // 16) * 16


def _group(n_lane: int, n_head: int, size: int) -> tuple[int, int]:
    """Return how many lanes and heads a launch computes: with `size` bytes for each lane and head, in `GROUP_BYTES`."""
    fitting = GROUP_BYTES // size
    if fitting >= n_head:
        return math.ceil(n_lane / math.ceil(n_lane / (fitting // n_head))), n_head
    return 1, math.ceil(n_head / math.ceil(n_head / max(1, fitting)))


def _slices(number: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, number)) for first in range(0, number, step)]


def _of_each(rows: Float[Tensor, "N B H D"], lanes: slice, heads: slice) -> Float[Tensor, "BH N D"]:
    """Return a view of one matrix for each lane and head: all heads, or one lane."""
    part = rows[:, lanes, heads]
    return part.view(len(part), -1, part.shape[-1]).transpose(0, 1)


def _of_heads(rows: Float[Tensor, "T B H D"], lanes: slice, heads: slice) -> Float[Tensor, "heads TB D"]:
    """Return a view of one matrix for each head: of all lanes, or one lane."""
    part = rows[:, lanes, heads]
    return part.view(-1, *part.shape[2:]).transpose(0, 1)


@torch.library.custom_op("txl::relative_attention", mutates_args=())
def _attend(
    operands: Sequence[Tensor], oldest: Tensor | None, seed: Tensor | None, window: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Return outputs [B,T,H,D], and log-sum-exps to base 2, float32 [B,H,T]."""
    query, key, value, position, u, v = operands
    call = AttentionCall(query.shape[-1], window, oldest, seed, dropout, key.shape[1])
    key, value = (padded(rows.transpose(0, 1)) for rows in (key, value))
    out, lse = attend(_summed(query, u), _summed(query, v), key, value, padded(position), call)
    return out[..., : call.d_head].transpose(0, 1), lse


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
    call = AttentionCall(query.shape[-1], window, oldest, seed, dropout, key.shape[1])
    above, out, key, value = (padded(rows.transpose(0, 1), dense=True) for rows in (above, out, key, value))
    position = padded(position)
    written = torch.empty_like(key), torch.empty_like(value), torch.empty_like(position)
    rows = _summed(query, u), _summed(query, v), key, value, position
    by_content, by_position = attend_backward(above, out, lse, *rows, call, *written)
    grads = [(by_content + by_position).transpose(0, 1), *(grad.transpose(0, 1) for grad in written[:2]), written[2]]
    biases = [grad.sum((0, 1), dtype=torch.float32) for grad in (by_content, by_position)]
    return [
        *(grad[..., : call.d_head] for grad in grads),
        *(grad[:, : call.d_head].to(bias.dtype).contiguous() for grad, bias in zip(biases, (u, v), strict=True)),
    ]


def _summed(query: Float[Tensor, "B T H D"], bias: Float[Tensor, "H D"]) -> Float[Tensor, "T B H multiple"]:
    """Return q + u or q + v as `attend` requires it."""
    n_lane, n_query, n_head, d_head = query.shape
    rows = query.new_empty(n_query, n_lane, n_head, aligned(d_head))
    torch.add(query.transpose(0, 1), bias, out=rows[..., :d_head])
    rows[..., d_head:] = 0
    return rows


def padded(rows: Float[Tensor, "*rows width"], dense: bool = False) -> Float[Tensor, "*rows multiple"]:
    """Return rows with stride 1 in the last dimension, padded with zeros to the next multiple of 16.

    Args:
        rows: not copied if they are so already.
        dense: whether the result must be contiguous.
    """
    missing = -rows.shape[-1] % 16
    if missing == 0 and (rows.is_contiguous() if dense else rows.stride(-1) == 1):
        return rows
    result = rows.new_empty(*rows.shape[:-1], rows.shape[-1] + missing)
    result[..., : rows.shape[-1]] = rows
    result[..., rows.shape[-1] :] = 0
    return result


@_attend.register_fake
def _(operands: Sequence[Tensor], *others: Any) -> tuple[Tensor, Tensor]:
    n_lane, n_query, n_head, _ = operands[0].shape
    return _fake(operands[0]), operands[0].new_empty(n_lane, n_head, n_query, dtype=torch.float32)


@_attend_backward.register_fake
def _(above: Tensor, out: Tensor, lse: Tensor, operands: Sequence[Tensor], *others: Any) -> list[Tensor]:
    query, key, value, position, u, v = operands
    return [*map(_fake, (query, key, value, position)), u.new_empty(u.shape), v.new_empty(v.shape)]


def _fake(rows: Tensor) -> Tensor:
    """Return a tensor with the strides of results for rows [B,N,H,D] or [N,H,D]: time-major, with padding."""
    *lane, n_row, n_head, d_head = rows.shape
    fake = rows.new_empty(n_row, *lane, n_head, aligned(d_head))[..., :d_head]
    return fake.transpose(0, 1) if lane else fake


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    operands, oldest, seed, ctx.window, ctx.dropout = inputs
    ctx.save_for_backward(*output, oldest, seed, *operands)


def _gradients(ctx: Any, above: Tensor, _above_lse: Tensor | None) -> tuple[list[Tensor] | None, ...]:
    out, lse, oldest, seed, *operands = ctx.saved_tensors
    return _attend_backward(above, out, lse, operands, oldest, seed, ctx.window, ctx.dropout), None, None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)
