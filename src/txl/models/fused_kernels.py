"""Triton kernels for the elementwise work and the LayerNorms of a Transformer-XL layer, forward and backward.

A program takes tiles of ROWS rows, number `program_id(0)` and every `num_programs(0)`-th after it, so that sums over
rows (gradients of biases and gains) leave each program once, without atomics: the same bits in every run. Arithmetic is
in float32. Widths are constants, which lets Triton see that several numbers of a row can be loaded at once.

This module needs Triton; only `fused_rows.py` uses it, and imports it at the first call.

Shapes: N rows, of which row n belongs to lane n % B; WIDTH columns, of which those after the true width are zero.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

# Arguments that Triton must not specialise code for: segments and batches differ, and every dropout has its own site.
SIZES = ["n_row", "n_lane", "n_value", "site"]
# Fourth word of a counter of Philox: lanes stand there in the attention kernels, which may have the same seed.
_ROWS = tl.constexpr(0x726F7773)


@triton.jit
def _kept(seed, row, first, site, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return which numbers of rows `row`, from column `first` on, dropout keeps: [ROWS,BLOCK].

    Column c has word c % 4 of Philox4x32-7 at the counter (row, c // 4, site, constant).
    """
    zero = tl.zeros([ROWS, BLOCK // 4], tl.int32)
    group = zero + (first // 4 + tl.arange(0, BLOCK // 4))[None, :]
    w0, w1, w2, w3 = tl.philox(seed, zero + row[:, None], group, zero + site, zero + _ROWS, 7)
    limit = tl.full([ROWS, BLOCK // 4], THRESHOLD, tl.uint32)
    words = tl.join(tl.join(w0 >= limit, w2 >= limit), tl.join(w1 >= limit, w3 >= limit))  # word 2s + t at (s, t)
    return tl.reshape(words, (ROWS, BLOCK))


@triton.jit
def _dropped(
    numbers, row, column, first, inside, mask, mask_row, seed, n_lane, site, factor,
    MASK_WIDTH: tl.constexpr, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply locked dropout if there is a mask, or counted dropout if there is a threshold."""
    if mask is not None:
        place = (row % n_lane)[:, None] * mask_row + column[None, :]
        numbers *= tl.load(mask + place, mask=inside & (column < MASK_WIDTH)[None, :], other=0.0).to(tl.float32)
    if THRESHOLD > 0:
        kept = _kept(seed, row, first, site, THRESHOLD, ROWS, BLOCK)
        numbers = tl.where(kept, numbers * factor, 0.0)
    return numbers


@triton.jit(do_not_specialize=SIZES)
def residual_norm_kernel(
    residual, update, bias, gamma, beta, mask, seed_at, hidden, low, total, mean, rstd,
    mask_row, n_row, n_lane, site, factor, eps,
    D_MODEL: tl.constexpr, WIDTH: tl.constexpr, MASK_WIDTH: tl.constexpr, THRESHOLD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute total = residual + drop(update + bias) and its LayerNorm, in float32 and in the dtype of `low`.

    Args:
        residual, update: pointers to [N,WIDTH]; without `update` it is the LayerNorm of `residual`, and no `total`.
        bias: pointer to float32 [D_MODEL], or None.
        gamma, beta: pointers to float32 [D_MODEL]; without `gamma` only `total` is computed.
        mask: pointer to locked dropout's mask [B,MASK_WIDTH], rows `mask_row` apart; None without.
        seed_at: pointer to int64 [1], the key of counted dropout; None without.
        hidden, low, total: pointers to outputs [N,WIDTH]; `hidden` may be None.
        mean, rstd: pointers to outputs float32 [N], of the rows of `total`.
        site: number of this dropout in the step.
        factor: 1 / (1 - p).
        THRESHOLD: p 2^32.
        STAGES: of the pipeline: the next STAGES - 1 tiles are loaded ahead.
    """
    # Four numbers of each tensor for a thread: with eight, two lines of float32 would be read or written in turns.
    column = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    true = column < D_MODEL
    if gamma is not None:
        gain, shift = tl.load(gamma + column, mask=true, other=0.0), tl.load(beta + column, mask=true, other=0.0)
    if bias is not None:
        offset = tl.load(bias + column, mask=true, other=0.0)
    seed = 0 if seed_at is None else tl.load(seed_at)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_row, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n_row)[:, None] & (column < WIDTH)[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        z = tl.load(residual + place, mask=inside, other=0.0)
        if update is not None:
            added = tl.load(update + place, mask=inside, other=0.0).to(tl.float32)
            if bias is not None:
                added += offset[None, :]
            z += _dropped(
                added, row, column, 0, inside, mask, mask_row, seed, n_lane, site, factor,
                MASK_WIDTH, THRESHOLD, ROWS, BLOCK,
            )  # fmt: skip
        z = tl.where(true[None, :], z, 0.0)
        if update is not None:
            tl.store(total + place, z, mask=inside)
        if gamma is not None:
            of_mean = tl.sum(z, 1) / D_MODEL
            centred = tl.where(true[None, :], z - of_mean[:, None], 0.0)
            of_rstd = tl.rsqrt(tl.sum(centred * centred, 1) / D_MODEL + eps)
            normed = centred * of_rstd[:, None] * gain[None, :] + shift[None, :]
            if hidden is not None:
                tl.store(hidden + place, normed, mask=inside)
            tl.store(low + place, normed.to(low.dtype.element_ty), mask=inside)
            tl.store(mean + row, of_mean, mask=row < n_row)
            tl.store(rstd + row, of_rstd, mask=row < n_row)


@triton.jit(do_not_specialize=SIZES)
def residual_norm_backward_kernel(
    grad_hidden, grad_low, grad_total, total, mean, rstd, gamma, mask, seed_at, grad_residual, grad_update, partial,
    mask_row, partial_program, partial_kind, n_row, n_lane, site, factor,
    D_MODEL: tl.constexpr, WIDTH: tl.constexpr, MASK_WIDTH: tl.constexpr, THRESHOLD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `residual_norm_kernel`.

    Args:
        grad_hidden, grad_low, grad_total: pointers to gradients of `hidden`, `low` and `total`, [N,WIDTH], or None.
        gamma: None if there was no LayerNorm: then only `grad_total` is read.
        grad_residual, grad_update: pointers to outputs [N,WIDTH], or None.
        partial: pointer to the sums of this program's rows, float32 [programs,3,WIDTH]: gradients of gamma, beta, bias.
        others: as in `residual_norm_kernel`.
    """
    column = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    true = column < D_MODEL
    if gamma is not None:
        gain = tl.load(gamma + column, mask=true, other=0.0)
    of_gamma = tl.zeros([ROWS, BLOCK], tl.float32)
    of_beta = tl.zeros([ROWS, BLOCK], tl.float32)
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    seed = 0 if seed_at is None else tl.load(seed_at)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_row, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n_row)[:, None] & (column < WIDTH)[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        if gamma is None:
            grad = tl.load(grad_total + place, mask=inside, other=0.0)
        else:
            if grad_hidden is None:
                above = tl.load(grad_low + place, mask=inside, other=0.0).to(tl.float32)
            else:
                above = tl.load(grad_hidden + place, mask=inside, other=0.0)
                if grad_low is not None:
                    above += tl.load(grad_low + place, mask=inside, other=0.0).to(tl.float32)
            above = tl.where(true[None, :], above, 0.0)
            of_mean = tl.load(mean + row, mask=row < n_row, other=0.0)
            of_rstd = tl.load(rstd + row, mask=row < n_row, other=0.0)
            z = tl.load(total + place, mask=inside, other=0.0)
            normed = tl.where(true[None, :], (z - of_mean[:, None]) * of_rstd[:, None], 0.0)
            of_gamma += above * normed
            of_beta += above
            # The derivative of LayerNorm: (g - mean(g) - x mean(g x)) / std, for normalised x and g scaled by gamma.
            scaled = above * gain[None, :]
            along = tl.sum(scaled * normed, 1) / D_MODEL
            grad = (scaled - (tl.sum(scaled, 1) / D_MODEL)[:, None] - normed * along[:, None]) * of_rstd[:, None]
            if grad_total is not None:
                grad += tl.load(grad_total + place, mask=inside, other=0.0)
        grad = tl.where(true[None, :], grad, 0.0)
        if grad_residual is not None:
            tl.store(grad_residual + place, grad, mask=inside)
        if grad_update is not None:
            grad = _dropped(
                grad, row, column, 0, inside, mask, mask_row, seed, n_lane, site, factor,
                MASK_WIDTH, THRESHOLD, ROWS, BLOCK,
            )  # fmt: skip
            grad = tl.where(true[None, :], grad, 0.0)
            of_bias += grad
            tl.store(grad_update + place, grad.to(grad_update.dtype.element_ty), mask=inside)
    partial += tl.program_id(0).to(tl.int64) * partial_program + column
    tl.store(partial, tl.sum(of_gamma, 0), mask=column < WIDTH)
    tl.store(partial + partial_kind, tl.sum(of_beta, 0), mask=column < WIDTH)
    tl.store(partial + 2 * partial_kind, tl.sum(of_bias, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=SIZES)
def relu_bias_kernel(
    inner, bias, mask, seed_at, mask_row, n_row, n_lane, site, factor,
    D_INNER: tl.constexpr, WIDTH: tl.constexpr, MASK_WIDTH: tl.constexpr, THRESHOLD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace `inner` [N,WIDTH] by drop(relu(inner + bias)); program (i, j) computes the j-th BLOCK of columns.

    Args:
        bias: pointer to float32 [D_INNER].
        others: as in `residual_norm_kernel`.
    """
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    true = column < D_INNER
    offset = tl.load(bias + column, mask=true, other=0.0)
    seed = 0 if seed_at is None else tl.load(seed_at)
    for tile in range(tl.program_id(0), tl.cdiv(n_row, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n_row)[:, None] & (column < WIDTH)[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        sums = tl.load(inner + place, mask=inside, other=0.0).to(tl.float32) + offset[None, :]
        # Not `maximum`, which may return 0 where the sum is not a number.
        active = _dropped(
            tl.where(sums < 0.0, 0.0, sums), row, column, first, inside, mask, mask_row, seed, n_lane, site, factor,
            MASK_WIDTH, THRESHOLD, ROWS, BLOCK,
        )  # fmt: skip
        active = tl.where(true[None, :], active, 0.0)
        tl.store(inner + place, active.to(inner.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def relu_bias_backward_kernel(
    grad, kept, partial, partial_program, n_row, factor,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace `grad` [N,WIDTH] by the gradient of `inner` in `relu_bias_kernel`, whose result is `kept`.

    `partial` points to the sums of this program's rows, float32 [programs,WIDTH], the gradient of the bias.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_row, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n_row)[:, None] & (column < WIDTH)[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        above = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        passed = tl.load(kept + place, mask=inside, other=0.0).to(tl.float32) > 0.0
        above = tl.where(passed, above * factor, 0.0)
        sums += above
        tl.store(grad + place, above.to(grad.dtype.element_ty), mask=inside)
    place = tl.program_id(0).to(tl.int64) * partial_program + column
    tl.store(partial + place, tl.sum(sums, 0), mask=column < WIDTH)


@triton.jit
def _of_lanes(mask, row, column, n_lane, inside, WIDTH: tl.constexpr):
    """Load for each row its lane's row of a mask [B,WIDTH], in float32."""
    place = (row % n_lane)[:, None] * WIDTH + column[None, :]
    return tl.load(mask + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _drop_values(
    value, mask, value_row, value_lane, value_head, n_value, n_lane, column, true,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply values or their gradients, [S,B,H,HEAD] with n_value = S B rows, in place by a mask [B,WIDTH]."""
    within = column // HEAD * value_head + column % HEAD
    for tile in range(tl.program_id(0), tl.cdiv(n_value, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n_value)[:, None] & (column < WIDTH)[None, :]
        place = (row // n_lane).to(tl.int64) * value_row + (row % n_lane) * value_lane
        place = place[:, None] + within[None, :]
        rows = tl.load(value + place, mask=inside, other=0.0).to(tl.float32)
        rows = tl.where(true[None, :], rows * _of_lanes(mask, row, column, n_lane, inside, WIDTH), 0.0)
        tl.store(value + place, rows.to(value.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def queries_kernel(
    query, u, v, query_mask, key_mask, position_mask, value_mask, value, query_u, query_v,
    value_row, value_lane, value_head, n_row, n_value, n_lane,
    D_HEAD: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the queries of attention; program (i, j) computes the j-th BLOCK of columns.

    Keys and positions are not multiplied by their masks of locked dropout; the queries are, with the same scores.

    Args:
        query: pointer to [N,WIDTH], where head h has columns h HEAD, ..., h HEAD + D_HEAD - 1.
        u, v: pointers to float32 [H,D_HEAD].
        query_mask, key_mask, value_mask: pointers to masks of locked dropout [B,WIDTH], scaled; None without.
        position_mask: pointer to the mask of positions [WIDTH], which all lanes share.
        value: pointer to [S,B,H,HEAD], to be multiplied by its mask; n_value = S B.
        query_u, query_v: pointers to outputs [N,WIDTH].
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    true = (column < WIDTH) & (column % HEAD < D_HEAD)
    of_head = column // HEAD * D_HEAD + column % HEAD
    of_u, of_v = tl.load(u + of_head, mask=true, other=0.0), tl.load(v + of_head, mask=true, other=0.0)
    if query_mask is not None:
        of_position = tl.load(position_mask + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_row, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n_row)[:, None] & (column < WIDTH)[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        rows = tl.load(query + place, mask=inside, other=0.0).to(tl.float32)
        if query_mask is None:
            by_content = rows + of_u[None, :]
            by_position = rows + of_v[None, :]
        else:
            rows *= _of_lanes(query_mask, row, column, n_lane, inside, WIDTH)
            by_content = (rows + of_u[None, :]) * _of_lanes(key_mask, row, column, n_lane, inside, WIDTH)
            by_position = (rows + of_v[None, :]) * of_position[None, :]
        by_content = tl.where(true[None, :], by_content, 0.0)
        by_position = tl.where(true[None, :], by_position, 0.0)
        tl.store(query_u + place, by_content.to(query_u.dtype.element_ty), mask=inside)
        tl.store(query_v + place, by_position.to(query_v.dtype.element_ty), mask=inside)
    if query_mask is not None:
        _drop_values(
            value, value_mask, value_row, value_lane, value_head, n_value, n_lane, column, true, WIDTH, HEAD, ROWS
        )


@triton.jit(do_not_specialize=SIZES)
def queries_backward_kernel(
    grad_u, grad_v, query_mask, key_mask, position_mask, value_mask, grad_value, grad_query, partial,
    value_row, value_lane, value_head, partial_program, partial_kind, n_row, n_value, n_lane,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `queries_kernel`.

    Args:
        grad_u, grad_v: pointers to the gradients of query_u and query_v, [N,WIDTH].
        grad_value: pointer to the gradient of the dropped values, to be multiplied in place.
        grad_query: pointer to the output [N,WIDTH].
        partial: pointer to the sums of this program's rows, float32 [programs,2,WIDTH]: the gradients of u and v.
        others: as in `queries_kernel`.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if query_mask is not None:
        of_position = tl.load(position_mask + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    of_u = tl.zeros([ROWS, BLOCK], tl.float32)
    of_v = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_row, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n_row)[:, None] & (column < WIDTH)[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        by_content = tl.load(grad_u + place, mask=inside, other=0.0).to(tl.float32)
        by_position = tl.load(grad_v + place, mask=inside, other=0.0).to(tl.float32)
        if query_mask is not None:
            by_content *= _of_lanes(key_mask, row, column, n_lane, inside, WIDTH)
            by_position *= of_position[None, :]
        of_u += by_content
        of_v += by_position
        grad = by_content + by_position
        if query_mask is not None:
            grad *= _of_lanes(query_mask, row, column, n_lane, inside, WIDTH)
        tl.store(grad_query + place, grad.to(grad_query.dtype.element_ty), mask=inside)
    place = partial + tl.program_id(0).to(tl.int64) * partial_program + column
    tl.store(place, tl.sum(of_u, 0), mask=column < WIDTH)
    tl.store(place + partial_kind, tl.sum(of_v, 0), mask=column < WIDTH)
    if query_mask is not None:
        _drop_values(
            grad_value,
            value_mask,
            value_row,
            value_lane,
            value_head,
            n_value,
            n_lane,
            column,
            column < WIDTH,
            WIDTH,
            HEAD,
            ROWS,
        )


@triton.jit
def _head_rows(row, n_head, outer, head, column):
    """Return the offsets of `column` in rows (r, h), numbered r H + h, of a tensor with these two strides."""
    return ((row // n_head).to(tl.int64) * outer + (row % n_head) * head)[:, None] + column[None, :]


@triton.jit(do_not_specialize=SIZES)
def head_norm_kernel(
    rows, gains, out, row_outer, row_group, row_head, n_row, n_head, eps,
    D_HEAD: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the RMSNorm of each head; program (i, g) computes rows of group g, which have a gain of their own.

    Args:
        rows: pointer to [R,G,H,HEAD] with the strides row_outer, row_group, row_head, 1; n_row = R H.
        gains: pointer to float32 [G,D_HEAD].
        out: pointer to the output, dense.
    """
    column, group = tl.arange(0, BLOCK), tl.program_id(1)
    gain = tl.load(gains + group * D_HEAD + column, mask=column < D_HEAD, other=0.0)
    for tile in range(tl.program_id(0), tl.cdiv(n_row, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n_row)[:, None] & (column < HEAD)[None, :]
        place = group * row_group + _head_rows(row, n_head, row_outer, row_head, column)
        # Numbers after D_HEAD are zeros.
        x = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, 1) / D_HEAD + eps)[:, None] * gain[None, :]
        place = group * n_head * HEAD + _head_rows(row, n_head, tl.num_programs(1) * n_head * HEAD, HEAD, column)
        tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def head_norm_backward_kernel(
    rows, gains, grad, partial, row_outer, row_group, row_head, grad_outer, grad_group, grad_head,
    partial_program, partial_kind, n_row, n_head, eps,
    D_HEAD: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace `grad` [R,G,H,HEAD], the gradient of the output of `head_norm_kernel`, by that of `rows`.

    `partial` points to the sums of this program's rows, float32 [programs,G,HEAD], the gradients of the gains.
    """
    column, group = tl.arange(0, BLOCK), tl.program_id(1)
    gain = tl.load(gains + group * D_HEAD + column, mask=column < D_HEAD, other=0.0)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_row, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n_row)[:, None] & (column < HEAD)[None, :]
        place = group * row_group + _head_rows(row, n_head, row_outer, row_head, column)
        x = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D_HEAD + eps)[:, None]
        place = group * grad_group + _head_rows(row, n_head, grad_outer, grad_head, column)
        above = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        normed, scaled = x * rstd, above * gain[None, :]
        sums += above * normed
        along = tl.sum(scaled * normed, 1) / D_HEAD
        tl.store(grad + place, ((scaled - normed * along[:, None]) * rstd).to(grad.dtype.element_ty), mask=inside)
    partial += tl.program_id(0).to(tl.int64) * partial_program + group * partial_kind + column
    tl.store(partial, tl.sum(sums, 0), mask=column < HEAD)
