"""Cross-entropy of linear layers on GPUs: cuBLAS products in the compute dtype, and Triton kernels between them.

The logits of a cluster of classes are one product. One kernel reads them once and writes each row's loss and
log-sum-exp; in the backward pass another one writes their gradient over them, from which two products give the
gradients of rows and weights. Sums are float32. All products are of copies whose rows begin at multiples of 16 bytes
(410 features in bfloat16 do not, and take slow kernels), padded with zeros. The order of every sum depends only on the
shape, without atomics: the same bits in every run.

This module needs Triton; only `txl.models.loss` uses it, and imports it at the first call.

Shapes: N rows, E features, V classes of a cluster; P is V rounded up to the pitch of the logits.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows whose gradients a program of `gradient_kernel` sums for the biases: 1/16 of the bytes of bfloat16 logits.
ROWS = 32


@triton.jit(do_not_specialize=["n_class"])
def loss_kernel(logits, bias, targets, losses, sums, n_class, pitch, BLOCK: tl.constexpr):
    """Compute the loss and the log-sum-exp of one row, float32 [N] each, from logits [N,P] and biases float32 [P].

    Biases are -inf where there is no class. A target (int64 [N]) that is no class gives NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * pitch
    # Online: the greatest logit so far, and the sum of exp(logit - greatest) in each place of a block.
    greatest = tl.full([], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for first in range(0, pitch, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < pitch
        values = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
        values += tl.load(bias + column, mask=inside, other=float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(values, 0))
        finite = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        totals = totals * tl.exp(greatest - finite) + tl.exp(values - finite)
        greatest = new_greatest
    total = greatest + tl.log(tl.sum(totals, 0))
    target = tl.load(targets + row)
    known = (target >= 0) & (target < n_class)
    right = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
    right += tl.load(bias + target, mask=known, other=0.0)
    tl.store(losses + row, total - right)
    tl.store(sums + row, total)


@triton.jit(do_not_specialize=["n_row", "above_row"])
def gradient_kernel(
    logits, bias, targets, sums, above, partial, n_row, pitch, above_row,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write (softmax - onehot) times the gradient of the loss over a block of logits; 0 where there is no class.

    Args:
        sums: pointer to float32 [N], the log-sum-exps of `loss_kernel`.
        above: pointer to float32 with stride `above_row`, the gradient of each loss.
        partial: pointer to float32 [N/ROWS,P], for sums over ROWS rows each.
    """
    group = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < pitch
    biases = tl.load(bias + column, mask=inside, other=0.0)[None, :]
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, ROWS, TILE):
        row = group * ROWS + first + tl.arange(0, TILE)
        there = row < n_row
        at = logits + row.to(tl.int64)[:, None] * pitch + column[None, :]
        mask = there[:, None] & inside[None, :]
        values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        of_row = tl.load(sums + row, mask=there, other=0.0)
        target = tl.load(targets + row, mask=there, other=0)
        factor = tl.load(above + row.to(tl.int64) * above_row, mask=there, other=0.0)
        values = tl.exp(values + biases - of_row[:, None])
        values = tl.where(column[None, :] == target[:, None], values - 1.0, values) * factor[:, None]
        values = tl.where(mask, values, 0.0)
        tl.store(at, values.to(logits.dtype.element_ty), mask=mask)
        total += tl.sum(values, 0)
    tl.store(partial + group.to(tl.int64) * pitch + column, total, mask=inside)


@triton.jit(do_not_specialize=["n_row", "n_out"])
def copy_kernel(
    source, out, n_row, width, source_row, n_out, out_width, out_row, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy a matrix [n_row,width] to [n_out,out_width] in another dtype, cut or padded with zeros."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < n_row)[:, None] & (column < width)[None, :]
    values = tl.load(source + row[:, None] * source_row + column[None, :], mask=inside, other=0.0)
    mask = (row < n_out)[:, None] & (column < out_width)[None, :]
    tl.store(out + row[:, None] * out_row + column[None, :], values.to(out.dtype.element_ty), mask=mask)


class Slice(NamedTuple):
    """Rows of one of several tensors."""

    tensor: int  # which
    first: int
    end: int


class Cluster(NamedTuple):
    """The rows of one softmax, and where the weights and biases of its classes are, in order."""

    rows: Tensor  # [N,E]
    targets: Tensor  # int64 [N]
    weights: tuple[Slice, ...]
    biases: tuple[Slice, ...]


class _Kept(NamedTuple):
    """All that the backward pass reads of a cluster."""

    rows: Tensor  # [N,E], padded, in the compute dtype
    weight: Tensor  # [P,E], padded, in the compute dtype
    bias: Tensor  # float32 [V]
    targets: Tensor  # int64 [N]
    sums: Tensor  # float32 [N]

    def chunks(self, limit: int) -> list[slice]:
        """Return the rows whose logits exist at a time."""
        n_row, most = len(self.rows), max(1, limit // len(self.weight))
        return [slice(first, min(first + most, n_row)) for first in range(0, n_row, most)]


def fused_cross_entropies(
    clusters: Sequence[Cluster], tensors: Sequence[Tensor], dtype: torch.dtype, limit: int
) -> tuple[Tensor, ...]:
    """Return the loss of each row of each cluster, float32; no second derivatives.

    Logits are kept for the backward pass while those of all clusters are at most `limit`, and otherwise computed again,
    in chunks of rows if those of one cluster are more.

    Args:
        clusters: rows, and slices of `tensors`; no row of a tensor belongs to two clusters.
        tensors: weights [_,E] and biases [_].
        dtype: that of the products.
        limit: largest number of logits that exist at a time, at least one row.
    """
    for rows, targets, *_ in clusters:
        if targets.shape != rows.shape[:1]:
            raise ValueError(
                f"targets have the shape {tuple(targets.shape)}; expected one for each of {len(rows)} rows"
            )
    rows, room = [cluster.rows for cluster in clusters], limit if torch.is_grad_enabled() else 0
    with torch.cuda.device_of(rows[0]):  # where Triton launches; autograd does the same
        return _FusedCrossEntropy.apply(clusters, dtype, limit, room, *rows, *tensors)  # pyright: ignore[reportReturnType]


class _FusedCrossEntropy(torch.autograd.Function):
    """`fused_cross_entropies`, with the rows of all clusters and then all tensors as arguments with gradients.

    `room` is the largest number of logits to keep.
    """

    @staticmethod
    def forward(
        ctx: Any, clusters: Sequence[Cluster], dtype: torch.dtype, limit: int, room: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        parameters, losses, kept = tensors[len(clusters) :], [], []
        ctx.logits = []  # of each cluster, or None
        for cluster in clusters:
            weight, bias = (
                [parameters[part.tensor][part.first : part.end] for part in parts]
                for parts in (cluster.weights, cluster.biases)
            )
            weight = aligned(weight, dtype)
            of = _Kept(
                aligned([cluster.rows], dtype, rows=False),
                weight,
                _biases(bias, len(weight)),
                cluster.targets.contiguous(),
                torch.empty(len(cluster.rows), dtype=torch.float32, device=weight.device),
            )
            found, logits, chunks = torch.empty_like(of.sums), None, of.chunks(limit)
            for part in chunks:
                logits = of.rows[part] @ weight.t()
                _losses(logits, of, part, found, sum(map(len, bias)))
            if logits is None or len(chunks) > 1 or logits.numel() > room:
                logits = None
            else:
                room -= logits.numel()
            ctx.logits.append(logits)
            losses.append(found)
            kept += of
        ctx.save_for_backward(*kept)
        ctx.slices = [(cluster.weights, cluster.biases) for cluster in clusters]
        ctx.limit, ctx.alike = limit, [(tensor.shape, tensor.dtype) for tensor in tensors]
        return tuple(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        saved, n_cluster, needed = ctx.saved_tensors, len(ctx.slices), ctx.needs_input_grad[4:]
        size = len(_Kept._fields)
        every = [_Kept(*saved[first : first + size]) for first in range(0, len(saved), size)]
        # Gradients are written once; only tensors with classes that have no row here need zeros.
        counts = [len(of.rows) for of in every] + [0] * (len(needed) - n_cluster)
        for of, parts in zip(every, ctx.slices, strict=True):
            for part in (*parts[0], *parts[1]):
                counts[n_cluster + part.tensor] += (part.end - part.first) * (len(of.rows) > 0)
        grads = [
            (torch.empty if count == shape[0] else torch.zeros)(shape, dtype=dtype, device=above[0].device)
            if need and count
            else None
            for (shape, dtype), need, count in zip(ctx.alike, needed, counts, strict=True)
        ]
        for number, (of, grad) in enumerate(zip(every, above, strict=True)):
            kept, ctx.logits[number] = ctx.logits[number], None  # written over: a second pass computes them again
            of_weight = of_bias = None
            weights, biases = ctx.slices[number]
            for part in of.chunks(ctx.limit):
                logits = of.rows[part] @ of.weight.t() if kept is None else kept
                of_bias = _added(of_bias, _to_gradient(logits, of, part, grad))
                if (out := grads[number]) is not None:
                    copied(logits @ of.weight, out[part])
                if any(needed[n_cluster + part.tensor] for part in weights):
                    of_weight = _added(of_weight, logits.t() @ of.rows[part])
                del logits  # before those of the next chunk exist
            for parts, gradient in ((weights, of_weight), (biases, of_bias)):
                first = 0
                for part in parts:
                    out, end = grads[n_cluster + part.tensor], first + part.end - part.first
                    if out is not None and gradient is not None:
                        copied(gradient[first:end], out[part.first : part.end])
                    first = end
        return None, None, None, None, *grads


def _losses(logits: Tensor, of: _Kept, part: slice, losses: Tensor, n_class: int) -> None:
    """Write the losses and log-sum-exps of the rows of a part."""
    pitch = logits.shape[1]
    block = min(4096, triton.next_power_of_2(pitch))
    rows = of.targets[part], losses[part], of.sums[part]
    warps = max(1, min(8, block // 512))
    loss_kernel[(len(logits),)](logits, of.bias, *rows, n_class, pitch, BLOCK=block, num_warps=warps)


def _to_gradient(logits: Tensor, of: _Kept, part: slice, above: Tensor) -> Tensor:
    """Replace logits by their gradient, and return its sum over the rows, float32 [P]."""
    n_row, pitch = logits.shape
    block, n_group = min(1024, triton.next_power_of_2(pitch)), triton.cdiv(n_row, ROWS)
    partial = torch.empty(n_group, pitch, dtype=torch.float32, device=logits.device)
    rows, sizes = (of.targets[part], of.sums[part], above[part]), (n_row, pitch, above.stride(0))
    grid, tile = (n_group, triton.cdiv(pitch, block)), min(ROWS, 4096 // block)
    gradient_kernel[grid](logits, of.bias, *rows, partial, *sizes, ROWS=ROWS, TILE=tile, BLOCK=block, num_warps=4)
    return partial.sum(0)


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """Add the gradient of a chunk; several are summed in float32."""
    return part if total is None else total.float().add_(part)


def _biases(parts: Sequence[Tensor], pitch: int) -> Tensor:
    """Return biases [_] as float32 [P], -inf where there is no class."""
    if len(parts) == 1 and len(parts[0]) == pitch:
        return parts[0].float().contiguous()
    out, first = parts[0].new_full((pitch,), -torch.inf, dtype=torch.float32), 0
    for part in parts:
        out[first : first + len(part)] = part
        first += len(part)
    return out


def aligned(parts: Sequence[Tensor], dtype: torch.dtype, rows: bool = True) -> Tensor:
    """Return matrices [_,E] as one matrix in a dtype, padded with zeros to multiples of 16 if that has two bytes.

    Without anything to do, the result is the matrix itself. Rows of products must begin at multiples of 16 bytes, and
    Triton loads 16 bytes at a time if their length is a multiple of 16.

    Args:
        rows: True: pad also the number of rows, which are as many as the logits of a row.
    """
    multiple = 16 if dtype.itemsize == 2 else 1
    n_row, width = sum(map(len, parts)), parts[0].shape[1]
    shape = n_row + -n_row % (multiple if rows else 1), width + -width % multiple
    if len(parts) == 1 and (parts[0].dtype, parts[0].shape) == (dtype, shape):
        return parts[0].contiguous()
    out, first = parts[0].new_empty(shape, dtype=dtype), 0
    for place, part in enumerate(parts, start=1):
        end = first + len(part) if place < len(parts) else shape[0]  # the zeros follow the last part
        copied(part, out[first:end])
        first = end
    return out


def copied(source: Tensor, out: Tensor) -> None:
    """Copy a vector or a matrix into another one in its dtype, cut or padded with zeros."""
    if source.dim() == 1:
        source, out = source[None], out[None]
    if source.stride(1) != 1:
        source = source.contiguous()
    block = min(512, triton.next_power_of_2(out.shape[1]))
    tile = min(triton.next_power_of_2(len(out)), 4096 // block)
    grid = (triton.cdiv(len(out), tile), triton.cdiv(out.shape[1], block))
    sizes = (*source.shape, source.stride(0), *out.shape, out.stride(0))
    copy_kernel[grid](source, out, *sizes, TILE=tile, BLOCK=block, num_warps=4)
