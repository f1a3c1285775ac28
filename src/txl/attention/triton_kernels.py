"""Relative attention for NVIDIA GPUs in Triton: forward and backward, no matrix of all scores.

A program computes square tiles of BLOCK queries and BLOCK keys. The position terms of a tile need a band of 2 BLOCK - 1
rows of W_kR R. Row S-1-d belongs to distance d, so query i and key j use row T-1-i+j: entry (m, n) of a tile is entry
BLOCK-1-m+n of its band. The band is cut into two blocks of BLOCK rows, `low` and `high`, and two products of BLOCK by
BLOCK give the position terms by distance. Row m needs the last m+1 columns of `low` and the first BLOCK-1-m of `high`.
A selection combines these columns in one tile, in which every row is a rotation of the required one; one gather then
rotates the rows (`_by_key`). The `high` of a tile is the `low` of the next tile of keys, so a program that iterates
over keys computes only one of the two products per tile.

The backward pass consists of three kernels. Each computes the weights again from the log-sum-exp of their row:
gradients of queries along the keys, of keys and values along the queries, and of positions along the diagonals, whose
tiles share a band. The order of every sum depends only on the shape, without atomics: the same bits in every run.

This module needs Triton; only `txl.attention.triton_attention` uses it, and imports it at the first call.

Shapes: B lanes, T queries, S keys of which the last T are the queries' own, H heads, D width of a head, WIDTH the power
of two above it.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Arguments that Triton must not specialise code for: memory grows, and the last segments are shorter.
SIZES = ["n_lane", "n_query", "n_key", "window", "n_group"]


@triton.jit
def _rows(start, row_stride, first, n_row, width, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows first, ..., first + BLOCK - 1 of a matrix [n_row,width], with zeros outside: [BLOCK,WIDTH]."""
    row = first + tl.arange(0, BLOCK)
    feature = tl.arange(0, WIDTH)
    inside = ((row >= 0) & (row < n_row))[:, None] & (feature < width)[None, :]
    return tl.load(start + row[:, None] * row_stride + feature[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(start, row_stride, first, n_row, width, rows, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows as `_rows` loads them, converted to the dtype that `start` points to."""
    row = first + tl.arange(0, BLOCK)
    feature = tl.arange(0, WIDTH)
    inside = (row < n_row)[:, None] & (feature < width)[None, :]
    tl.store(start + row[:, None] * row_stride + feature[None, :], rows.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _product(left, right, PRECISION: tl.constexpr):
    """Return the product left right^T in float32."""
    return tl.dot(left, tl.trans(right), input_precision=PRECISION)


@triton.jit
def _by_key(low, high, BLOCK: tl.constexpr):
    """Convert position terms by distance, [BLOCK,BLOCK] for each half of the band, to terms by key, [BLOCK,BLOCK]."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    first = BLOCK - 1 - row
    return tl.gather(tl.where(column >= first, low, high), (first + column) % BLOCK, 1)


@triton.jit
def _by_distance(grad, BLOCK: tl.constexpr):
    """Invert `_by_key` for gradients: convert a tile by key to its parts by distance, for `low` and for `high`."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    turned = tl.gather(grad, (row + 1 + column) % BLOCK, 1)
    zero = tl.zeros_like(turned)
    is_low = column >= BLOCK - 1 - row
    return tl.where(is_low, turned, zero), tl.where(is_low, zero, turned)


@triton.jit
def _seen(first_query, first_key, n_query, n_key, window, oldest, BLOCK: tl.constexpr):
    """Return whether each query of a tile sees each key; see `KeyScope`."""
    query = (first_query + tl.arange(0, BLOCK))[:, None]
    key = (first_key + tl.arange(0, BLOCK))[None, :]
    distance = n_key - n_query + query - key
    return (distance >= 0) & (distance < window) & (key >= oldest) & (query < n_query)


@triton.jit
def _hidden(scores, first_query, first_key, n_query, n_key, window, oldest, BLOCK: tl.constexpr):
    """Return the scores, -inf where a query does not see a key; most tiles are seen whole, and need no comparisons."""
    nearest = n_key - n_query + first_query - first_key - (BLOCK - 1)  # shortest distance in the tile
    whole = (nearest >= 0) & (nearest + 2 * BLOCK - 2 < window) & (first_key >= oldest)
    if not (whole & (first_query + BLOCK <= n_query)):
        seen = _seen(first_query, first_key, n_query, n_key, window, oldest, BLOCK)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _kept(seed, lane, head, first_query, first_key, THRESHOLD: tl.constexpr, BLOCK: tl.constexpr):
    """Return which weights of a tile dropout keeps: those with a word of Philox4x32-7 not below the threshold.

    The counter is (key // 64 * 16 + key % 16, query, head, lane), and key // 16 % 4 selects one of its four words. The
    compiled library for CPUs draws the same words.
    """
    tl.static_assert(BLOCK == 64 or BLOCK == 32)
    zero = tl.zeros([BLOCK, 16], tl.int32)
    group = zero + (first_key // 64 * 16 + tl.arange(0, 16))[None, :]
    query = zero + (first_query + tl.arange(0, BLOCK))[:, None]
    w0, w1, w2, w3 = tl.philox(seed, group, query, zero + head, (zero + lane).to(tl.int32), 7)
    limit = tl.full([BLOCK, 16], THRESHOLD, tl.uint32)
    k0, k1, k2, k3 = w0 >= limit, w1 >= limit, w2 >= limit, w3 >= limit
    if BLOCK == 64:  # four groups of 16 keys, side by side
        words = tl.join(tl.join(k0, k2), tl.join(k1, k3))  # [BLOCK,16,2,2]: word 2s + t at (s, t)
        kept = tl.reshape(tl.permute(words, (0, 2, 3, 1)), (BLOCK, BLOCK))
    else:
        first_half = zero + first_key % 64 < 32
        words = tl.join(tl.where(first_half, k0, k2), tl.where(first_half, k1, k3))
        kept = tl.reshape(tl.permute(words, (0, 2, 1)), (BLOCK, BLOCK))
    return kept


@triton.jit
def _first_keys(oldest_of, lane, first_query, n_query, n_key, window, BLOCK: tl.constexpr):
    """Return the lane's oldest key, and the first key and the end of the tiles that a block of queries sees."""
    oldest = 0 if oldest_of is None else tl.load(oldest_of + lane)
    memory = n_key - n_query
    start = tl.maximum(tl.maximum(memory + first_query - window + 1, oldest), 0) // BLOCK * BLOCK
    return oldest, start, memory + tl.minimum(first_query + BLOCK, n_query)


@triton.jit
def _gradients_of_scores(scores, grad_weights, kept, lse, delta, scale, factor, DROPS: tl.constexpr):
    """Return the weights applied to the values, and the gradient of the scores before their scale.

    Scores are -inf where a query does not see a key.
    """
    weights = tl.exp2(scores * (scale * LOG2_E) - lse[:, None])
    if DROPS:
        applied = tl.where(kept, weights * factor, 0.0)
        grad_weights = tl.where(kept, grad_weights * factor, 0.0)
    else:
        applied = weights
    return applied, weights * (grad_weights - delta[:, None]) * scale


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    query_u, query_v, key, value, position, oldest_of, seed_at, out, lse,
    key_lane, key_row, key_head, value_lane, value_row, value_head,
    position_row, position_head,
    n_head, n_query, n_key, d_head, d_operand, window, scale, factor,
    THRESHOLD: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute outputs [B,T,H,D] and each query's log-sum-exp to base 2, float32 [B,H,T], for one block of queries.

    Args:
        query_u, query_v: pointers to q + u and q + v, [B,T,H,D], dense.
        key, value: pointers to [B,S,H,D], with stride 1 in the last dimension and any other strides.
        position: pointer to [S,H,D], farthest distance first, with strides as for `key`.
        oldest_of: pointer to int32 [B], the first filled key of each lane; None: 0.
        seed_at: pointer to int64 [1], the key of the generator; None: no dropout.
        d_head: D, width of outputs and gradients.
        d_operand: width of all operands, zeros after D; a multiple of 16, so that each load has many bytes.
        window: number of keys that a query sees.
        scale: 1 / sqrt(D).
        factor: 1 / (1 - p).
        THRESHOLD: p 2^32.
        PRECISION: precision of float32 products, "ieee" or "tf32".
    """
    block, head, lane = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    wide = head.to(tl.int64)  # int64, as the offset of a head's keys may exceed 2^31
    first_query = block * BLOCK
    key += lane * key_lane + wide * key_head
    value += lane * value_lane + wide * value_head
    position += wide * position_head
    first = lane * n_query * n_head + head  # index of the first vector of this lane and head
    of_u = _rows(query_u + first * d_operand, n_head * d_operand, first_query, n_query, d_operand, BLOCK, WIDTH)
    of_v = _rows(query_v + first * d_operand, n_head * d_operand, first_query, n_query, d_operand, BLOCK, WIDTH)
    dense = first * d_head
    oldest, start, end = _first_keys(oldest_of, lane, first_query, n_query, n_key, window, BLOCK)
    seed = 0 if seed_at is None else tl.load(seed_at)

    # Online softmax: the greatest score so far, the sum of exp(score - greatest), and the values weighted alike.
    band = n_query - BLOCK - first_query  # first row of the band for a tile with first key 0
    rows = _rows(position, position_row, band + start, n_key, d_operand, BLOCK, WIDTH)
    low = _product(of_v, rows, PRECISION)
    greatest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first_key in range(start, end, BLOCK):
        rows = _rows(position, position_row, band + first_key + BLOCK, n_key, d_operand, BLOCK, WIDTH)
        high = _product(of_v, rows, PRECISION)
        keys = _rows(key, key_row, first_key, n_key, d_operand, BLOCK, WIDTH)
        scores = _product(of_u, keys, PRECISION) + _by_key(low, high, BLOCK)
        low = high
        scores = _hidden(scores * (scale * LOG2_E), first_query, first_key, n_query, n_key, window, oldest, BLOCK)
        new_greatest = tl.maximum(greatest, tl.max(scores, 1))
        finite = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)  # for rows without a visible key so far
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(greatest - finite)
        total = total * shrink + tl.sum(weights, 1)
        greatest = new_greatest
        if seed_at is not None:
            kept = _kept(seed, lane, head, first_query, first_key, THRESHOLD, BLOCK)
            weights = tl.where(kept, weights, 0.0)
        values = _rows(value, value_row, first_key, n_key, d_operand, BLOCK, WIDTH)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    if seed_at is not None:
        sums *= factor
    total = tl.where(total == 0.0, 1.0, total)  # for rows after the last query
    row = first_query + tl.arange(0, BLOCK)
    place = (lane * n_head + head) * n_query + row
    tl.store(lse + place, greatest + tl.log2(total), mask=row < n_query)
    _store_rows(out + dense, n_head * d_head, first_query, n_query, d_head, sums / total[:, None], BLOCK, WIDTH)


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    query_u, query_v, key, value, position, oldest_of, seed_at, out, above, lse, delta, grad_query, grad_biases,
    key_lane, key_row, key_head, value_lane, value_row, value_head,
    position_row, position_head, above_lane, above_row, above_head,
    n_head, n_query, n_key, d_head, d_operand, window, scale, factor,
    THRESHOLD: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, [B,T,H,D], and dO . O, float32 [B,H,T], for one block of queries.

    Args:
        out: pointer to the outputs of the forward pass, [B,T,H,D], dense.
        above: pointer to the gradient of `out`, [B,T,H,D].
        grad_query: pointer to [B,T,H,D], dense.
        grad_biases: pointer to float32 [2,B,N,H,D], dense: gradients of u and v, summed over each block of queries.
        others: as in `forward_kernel`.
    """
    block, head, lane = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    wide = head.to(tl.int64)  # int64, as the offset of a head's keys may exceed 2^31
    first_query = block * BLOCK
    key += lane * key_lane + wide * key_head
    value += lane * value_lane + wide * value_head
    position += wide * position_head
    first = lane * n_query * n_head + head  # index of the first vector of this lane and head
    of_u = _rows(query_u + first * d_operand, n_head * d_operand, first_query, n_query, d_operand, BLOCK, WIDTH)
    of_v = _rows(query_v + first * d_operand, n_head * d_operand, first_query, n_query, d_operand, BLOCK, WIDTH)
    dense = first * d_head
    attended = _rows(out + dense, n_head * d_head, first_query, n_query, d_head, BLOCK, WIDTH)
    grad = _rows(
        above + lane * above_lane + wide * above_head, above_row, first_query, n_query, d_operand, BLOCK, WIDTH
    )
    row = first_query + tl.arange(0, BLOCK)
    place = (lane * n_head + head) * n_query + row
    # delta_i = dO_i . O_i = sum_j P_ij dP_ij, which the softmax's derivative subtracts from every dP_ij.
    row_delta = tl.sum(grad.to(tl.float32) * attended.to(tl.float32), 1)
    tl.store(delta + place, row_delta, mask=row < n_query)
    row_lse = tl.load(lse + place, mask=row < n_query, other=0.0)
    oldest, start, end = _first_keys(oldest_of, lane, first_query, n_query, n_key, window, BLOCK)
    seed = 0 if seed_at is None else tl.load(seed_at)

    band = n_query - BLOCK - first_query
    rows = _rows(position, position_row, band + start, n_key, d_operand, BLOCK, WIDTH)
    low = _product(of_v, rows, PRECISION)
    of_low = tl.zeros([BLOCK, BLOCK], of_u.dtype)  # gradient of `low` that the previous tile computed for its `high`
    by_content = tl.zeros([BLOCK, WIDTH], tl.float32)
    by_position = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first_key in range(start, end, BLOCK):
        rows = _rows(position, position_row, band + first_key + BLOCK, n_key, d_operand, BLOCK, WIDTH)
        high = _product(of_v, rows, PRECISION)
        keys = _rows(key, key_row, first_key, n_key, d_operand, BLOCK, WIDTH)
        scores = _product(of_u, keys, PRECISION) + _by_key(low, high, BLOCK)
        low = high
        values = _rows(value, value_row, first_key, n_key, d_operand, BLOCK, WIDTH)
        grad_weights = _product(grad, values, PRECISION)
        # Here the comparisons take less time than a branch (measured on an H200).
        seen = _seen(first_query, first_key, n_query, n_key, window, oldest, BLOCK)
        scores = tl.where(seen, scores, float("-inf"))
        kept = seen
        if seed_at is not None:
            kept = _kept(seed, lane, head, first_query, first_key, THRESHOLD, BLOCK)
        _, grad_scores = _gradients_of_scores(
            scores, grad_weights, kept, row_lse, row_delta, scale, factor, seed_at is not None
        )
        grad_scores = grad_scores.to(of_u.dtype)
        by_content = tl.dot(grad_scores, keys, by_content, input_precision=PRECISION)
        lower, higher = _by_distance(grad_scores, BLOCK)
        rows = _rows(position, position_row, band + first_key, n_key, d_operand, BLOCK, WIDTH)
        by_position = tl.dot(of_low + lower, rows, by_position, input_precision=PRECISION)
        of_low = higher
    end = start + tl.cdiv(end - start, BLOCK) * BLOCK
    rows = _rows(position, position_row, band + end, n_key, d_operand, BLOCK, WIDTH)
    by_position = tl.dot(of_low, rows, by_position, input_precision=PRECISION)
    _store_rows(
        grad_query + dense, n_head * d_head, first_query, n_query, d_head, by_content + by_position, BLOCK, WIDTH
    )
    feature = tl.arange(0, WIDTH)
    n_block = tl.num_programs(0)
    of_u = grad_biases + ((lane * n_block + block) * n_head + head) * d_head
    of_v = of_u + tl.num_programs(2).to(tl.int64) * n_block * n_head * d_head
    tl.store(of_u + feature, tl.sum(by_content, 0), mask=feature < d_head)
    tl.store(of_v + feature, tl.sum(by_position, 0), mask=feature < d_head)


@triton.jit
def _tile(
    query_u, query_v, keys, values, low_rows, high_rows, seed_at, above, lse, delta,
    above_row, head, lane, first_query, first_key, oldest,
    n_head, n_query, n_key, d_operand, window, scale, factor,
    THRESHOLD: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return for one tile q + u, q + v, the gradient `above`, the applied weights, and the gradient of the scores.

    Args:
        query_u, query_v, above: pointers to the part [T,D] of one lane and head.
        keys, values, low_rows, high_rows: [BLOCK,WIDTH].
        others: as in `forward_kernel`.
    """
    of_u = _rows(query_u, n_head * d_operand, first_query, n_query, d_operand, BLOCK, WIDTH)
    of_v = _rows(query_v, n_head * d_operand, first_query, n_query, d_operand, BLOCK, WIDTH)
    low, high = _product(of_v, low_rows, PRECISION), _product(of_v, high_rows, PRECISION)
    scores = _product(of_u, keys, PRECISION) + _by_key(low, high, BLOCK)
    grad = _rows(above, above_row, first_query, n_query, d_operand, BLOCK, WIDTH)
    grad_weights = _product(grad, values, PRECISION)
    row = first_query + tl.arange(0, BLOCK)
    place = (lane * n_head + head) * n_query + row
    row_lse = tl.load(lse + place, mask=row < n_query, other=0.0)
    row_delta = tl.load(delta + place, mask=row < n_query, other=0.0)
    scores = _hidden(scores, first_query, first_key, n_query, n_key, window, oldest, BLOCK)
    kept = scores  # not used without dropout
    if seed_at is not None:
        kept = _kept(tl.load(seed_at), lane, head, first_query, first_key, THRESHOLD, BLOCK)
    applied, grad_scores = _gradients_of_scores(
        scores, grad_weights, kept, row_lse, row_delta, scale, factor, seed_at is not None
    )
    return of_u, of_v, grad, applied.to(of_u.dtype), grad_scores.to(of_u.dtype)


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    query_u, query_v, key, value, position, oldest_of, seed_at, above, lse, delta, grad_key, grad_value,
    key_lane, key_row, key_head, value_lane, value_row, value_head,
    position_row, position_head, above_lane, above_row, above_head,
    n_head, n_query, n_key, d_head, d_operand, window, scale, factor,
    THRESHOLD: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute gradients of keys and values, [B,S,H,D], dense, for one block of keys; arguments as in other kernels."""
    head, lane = tl.program_id(1), tl.program_id(2).to(tl.int64)
    wide = head.to(tl.int64)
    first_key = tl.program_id(0) * BLOCK
    query_u += (lane * n_query * n_head + head) * d_operand
    query_v += (lane * n_query * n_head + head) * d_operand
    above += lane * above_lane + wide * above_head
    position += wide * position_head
    keys = _rows(key + lane * key_lane + wide * key_head, key_row, first_key, n_key, d_operand, BLOCK, WIDTH)
    values = _rows(value + lane * value_lane + wide * value_head, value_row, first_key, n_key, d_operand, BLOCK, WIDTH)
    oldest = 0 if oldest_of is None else tl.load(oldest_of + lane)
    memory = n_key - n_query
    start = tl.maximum(first_key - memory, 0) // BLOCK * BLOCK
    end = tl.minimum(n_query, first_key + BLOCK - 1 - memory + window)
    end = tl.where(first_key + BLOCK <= oldest, start, end)  # no query sees this block
    of_keys = tl.zeros([BLOCK, WIDTH], tl.float32)
    of_values = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first_query in range(start, end, BLOCK):
        band = n_query - BLOCK - first_query + first_key
        low_rows = _rows(position, position_row, band, n_key, d_operand, BLOCK, WIDTH)
        high_rows = _rows(position, position_row, band + BLOCK, n_key, d_operand, BLOCK, WIDTH)
        of_u, _, grad, applied, grad_scores = _tile(
            query_u, query_v, keys, values, low_rows, high_rows, seed_at, above, lse, delta,
            above_row, head, lane, first_query, first_key, oldest,
            n_head, n_query, n_key, d_operand, window, scale, factor, THRESHOLD, PRECISION, WIDTH, BLOCK,
        )  # fmt: skip
        of_values = tl.dot(tl.trans(applied), grad, of_values, input_precision=PRECISION)
        of_keys = tl.dot(tl.trans(grad_scores), of_u, of_keys, input_precision=PRECISION)
    dense = (lane * n_key * n_head + head) * d_head
    _store_rows(grad_key + dense, n_head * d_head, first_key, n_key, d_head, of_keys, BLOCK, WIDTH)
    _store_rows(grad_value + dense, n_head * d_head, first_key, n_key, d_head, of_values, BLOCK, WIDTH)


@triton.jit(do_not_specialize=SIZES)
def position_gradient_kernel(
    query_u, query_v, key, value, position, oldest_of, seed_at, above, lse, delta, grad_position,
    key_lane, key_row, key_head, value_lane, value_row, value_head,
    position_row, position_head, above_lane, above_row, above_head,
    n_head, n_lane, n_query, n_key, d_head, d_operand, window, n_group, scale, factor,
    THRESHOLD: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of positions over a group of lanes, along one diagonal of tiles.

    All tiles of a diagonal share the two blocks of their band. `grad_position` is float32 [G,2,N+1,BLOCK,H,D], dense,
    for N diagonals, the first at the lower left. Diagonal n writes block n in the first half (from `low`) and block
    n + 1 in the second half (from `high`). Block 0 begins at row T - BLOCK ceil(T / BLOCK).
    """
    diagonal, head, group = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    wide = head.to(tl.int64)
    n_block = tl.cdiv(n_query, BLOCK)
    offset = diagonal - (n_block - 1)  # index of a tile's block of keys minus that of its block of queries
    position += wide * position_head
    band = n_query - BLOCK + offset * BLOCK
    low_rows = _rows(position, position_row, band, n_key, d_operand, BLOCK, WIDTH)
    high_rows = _rows(position, position_row, band + BLOCK, n_key, d_operand, BLOCK, WIDTH)
    of_low = tl.zeros([BLOCK, WIDTH], tl.float32)
    of_high = tl.zeros([BLOCK, WIDTH], tl.float32)
    # The shortest distance in a tile is BLOCK - 1 less than the distance between its first query and first key.
    in_window = n_key - n_query - offset * BLOCK - (BLOCK - 1) < window
    end = tl.where(in_window, tl.minimum(n_block, tl.cdiv(n_key, BLOCK) - offset), 0)
    for lane in range(group, n_lane, n_group):
        oldest = 0 if oldest_of is None else tl.load(oldest_of + lane)
        for block in range(tl.maximum(oldest // BLOCK - offset, tl.maximum(-offset, 0)), end):
            first_key = (block + offset) * BLOCK
            keys = _rows(key + lane * key_lane + wide * key_head, key_row, first_key, n_key, d_operand, BLOCK, WIDTH)
            values = _rows(
                value + lane * value_lane + wide * value_head, value_row, first_key, n_key, d_operand, BLOCK, WIDTH
            )
            dense = (lane * n_query * n_head + head) * d_operand
            _, of_v, _, _, grad_scores = _tile(
                query_u + dense, query_v + dense, keys, values, low_rows, high_rows, seed_at,
                above + lane * above_lane + wide * above_head, lse, delta,
                above_row, head, lane, block * BLOCK, first_key, oldest,
                n_head, n_query, n_key, d_operand, window, scale, factor, THRESHOLD, PRECISION, WIDTH, BLOCK,
            )  # fmt: skip
            lower, higher = _by_distance(grad_scores, BLOCK)
            of_low = tl.dot(tl.trans(lower), of_v, of_low, input_precision=PRECISION)
            of_high = tl.dot(tl.trans(higher), of_v, of_high, input_precision=PRECISION)
    n_rows = (tl.num_programs(0) + 1) * BLOCK  # rows of one half
    row_stride = n_head * d_head
    half = grad_position + (2 * group * n_rows) * row_stride + head * d_head
    _store_rows(half, row_stride, diagonal * BLOCK, n_rows, d_head, of_low, BLOCK, WIDTH)
    half += n_rows.to(tl.int64) * row_stride
    _store_rows(half, row_stride, (diagonal + 1) * BLOCK, n_rows, d_head, of_high, BLOCK, WIDTH)
