"""Relative attention for NVIDIA GPUs in Triton: the forward pass, and the gradient of the scores.

A program computes square tiles of BLOCK queries and BLOCK keys. The position terms of a tile need a band of 2 BLOCK - 1
rows of W_kR R. Row S-1-d belongs to distance d, so query i and key j use row T-1-i+j: entry (m, n) of a tile is entry
BLOCK-1-m+n of its band. The band is cut into two blocks of BLOCK rows, `low` and `high`, and two products of BLOCK by
BLOCK give the position terms by distance. Row m needs the last m+1 columns of `low` and the first BLOCK-1-m of `high`.
A selection combines these columns in one tile, in which every row is a rotation of the required one; one gather then
rotates the rows (`_by_key`). The `high` of a tile is the `low` of the next tile of keys, so a program that iterates
over keys computes only one of the two products per tile.

The forward pass stores no scores. In the backward pass one kernel computes the weights again from the log-sum-exp of
their row, and stores them and the gradient of the scores for the matrix products that give all gradients.

This module needs Triton; only `txl.attention.triton_attention` uses it, and imports it at the first call.

Shapes: B lanes, T queries, S keys of which the last T are the queries' own, H heads, D width of a head with the zeros
after it, WIDTH the power of two above it.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Arguments that Triton must not specialise code for: memory grows, and the last segments are shorter.
SIZES = ["n_head", "n_query", "n_key", "window", "first_lane", "first_head"]


@triton.jit
def _row(start, row_stride, first):
    """Return the pointer to a row, in int64: the rows of all lanes lie between two rows of one."""
    return start + tl.cast(first, tl.int64) * row_stride


@triton.jit
def _rows(at, row_stride, first, n_row, width, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows first, ..., first + BLOCK - 1 of a matrix [n_row,width], with zeros outside: [BLOCK,WIDTH].

    `at` points to the first of them: it moves along in a loop, which saves registers.
    """
    row = tl.arange(0, BLOCK)
    feature = tl.arange(0, WIDTH)
    inside = ((first + row >= 0) & (first + row < n_row))[:, None] & (feature < width)[None, :]
    return tl.load(at + row[:, None] * row_stride + feature[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(at, row_stride, first, n_row, width, rows, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows as `_rows` loads them, converted to the dtype that `at` points to."""
    row = tl.arange(0, BLOCK)
    feature = tl.arange(0, WIDTH)
    inside = (first + row < n_row)[:, None] & (feature < width)[None, :]
    tl.store(at + row[:, None] * row_stride + feature[None, :], rows.to(at.dtype.element_ty), mask=inside)


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
def _seen(first_query, first_key, n_query, n_key, window, oldest, BLOCK: tl.constexpr):
    """Return whether each query of a tile sees each key; see `KeyScope`."""
    query = (first_query + tl.arange(0, BLOCK))[:, None]
    key = (first_key + tl.arange(0, BLOCK))[None, :]
    distance = n_key - n_query + query - key
    return (distance >= 0) & (distance < window) & (key >= oldest) & (query < n_query)


@triton.jit
def _whole(first_query, first_key, n_query, n_key, window, oldest, BLOCK: tl.constexpr):
    """Return whether all queries of a tile are there and see all its keys, as in most tiles."""
    nearest = n_key - n_query + first_query - first_key - (BLOCK - 1)  # shortest distance in the tile
    whole = (nearest >= 0) & (nearest + 2 * BLOCK - 2 < window) & (first_key >= oldest)
    return whole & (first_query + BLOCK <= n_query)


@triton.jit
def _hidden(scores, first_query, first_key, n_query, n_key, window, oldest, BLOCK: tl.constexpr):
    """Return the scores, -inf where a query does not see a key."""
    if not _whole(first_query, first_key, n_query, n_key, window, oldest, BLOCK):
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


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    query_u, query_v, key, value, position, oldest_of, seed_at, out, lse,
    query_row, query_lane, query_head, key_row, key_lane, key_head, value_row, value_lane, value_head,
    position_row, position_head,
    n_head, n_query, n_key, width, window, scale, factor,
    THRESHOLD: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute outputs [T,B,H,D] and each query's log-sum-exp to base 2, float32 [B,H,T], for one block of queries.

    Args:
        query_u, query_v: pointers to q + u and q + v, [T,B,H,D].
        key, value: pointers to [S,B,H,D], with stride 1 in the last dimension and any other strides.
        position: pointer to [S,H,D], farthest distance first, with strides as for `key`.
        oldest_of: pointer to int32 [B], the first filled key of each lane; None: 0.
        seed_at: pointer to int64 [1], the key of the generator; None: no dropout.
        out: pointer to the outputs, with the strides of the queries.
        width: D, a multiple of 16, so that each load has many bytes.
        window: number of keys that a query sees.
        scale: 1 / sqrt(D without the zeros).
        factor: 1 / (1 - p).
        THRESHOLD: p 2^32.
        PRECISION: precision of float32 products: "ieee", "tf32x3" or "tf32".
    """
    block, head, lane = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    wide = head.to(tl.int64)  # int64, as the offset of a head's keys may exceed 2^31
    first_query = block * BLOCK
    queries = _row(lane * query_lane + wide * query_head, query_row, first_query)
    of_u = _rows(query_u + queries, query_row, first_query, n_query, width, BLOCK, WIDTH)
    of_v = _rows(query_v + queries, query_row, first_query, n_query, width, BLOCK, WIDTH)
    oldest, start, end = _first_keys(oldest_of, lane, first_query, n_query, n_key, window, BLOCK)
    key_at = _row(key + lane * key_lane + wide * key_head, key_row, start)
    value_at = _row(value + lane * value_lane + wide * value_head, value_row, start)
    band = n_query - BLOCK - first_query  # first row of the band for a tile with first key 0
    position_at = _row(position + wide * position_head, position_row, band + start)
    seed = 0 if seed_at is None else tl.load(seed_at)

    # Online softmax: the greatest score so far, the sum of exp(score - greatest), and the values weighted alike.
    rows = _rows(position_at, position_row, band + start, n_key, width, BLOCK, WIDTH)
    low = _product(of_v, rows, PRECISION)
    greatest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first_key in range(start, end, BLOCK):
        position_at += BLOCK * position_row
        rows = _rows(position_at, position_row, band + first_key + BLOCK, n_key, width, BLOCK, WIDTH)
        high = _product(of_v, rows, PRECISION)
        keys = _rows(key_at, key_row, first_key, n_key, width, BLOCK, WIDTH)
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
        values = _rows(value_at, value_row, first_key, n_key, width, BLOCK, WIDTH)
        key_at += BLOCK * key_row
        value_at += BLOCK * value_row
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    if seed_at is not None:
        sums *= factor
    total = tl.where(total == 0.0, 1.0, total)  # for rows after the last query
    row = first_query + tl.arange(0, BLOCK)
    place = (lane * n_head + head) * n_query + row
    tl.store(lse + place, greatest + tl.log2(total), mask=row < n_query)
    _store_rows(out + queries, query_row, first_query, n_query, width, sums / total[:, None], BLOCK, WIDTH)


@triton.jit(do_not_specialize=SIZES)
def score_gradient_kernel(
    query_u, query_v, key, value, position, oldest_of, seed_at, out, lse, above, applied, by_key, by_distance,
    query_row, query_lane, query_head, key_row, key_lane, key_head, value_row, value_lane, value_head,
    position_row, position_head,
    n_head, first_lane, first_head, n_query, n_key, pitch, width, window, scale, factor,
    THRESHOLD: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the weights and the gradient of the scores, for one block of queries and all keys.

    A launch computes L lanes and N heads, from the given first ones; its results are dense, of their own shape. Columns
    from S to P are zeros.

    Args:
        above: pointer to the gradient of `out`, with the strides of the queries.
        applied: pointer to [L,N,T,P], the weights that multiplied the values, by key.
        by_key: pointer to [L,N,T,P], the gradient of the scores before their scale, by key: query i, key j at (i, j).
        by_distance: pointer to [N,T,L,P], the same gradient by distance: query i, key j at (i, T-1-i+j).
        pitch: P, S rounded up to a multiple of 16, so that each store by key has many bytes.
        others: as in `forward_kernel`.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    lane, head = first_lane + tl.program_id(2).to(tl.int64), first_head + tl.program_id(1)
    wide = head.to(tl.int64)
    first_query = block * BLOCK
    queries = _row(lane * query_lane + wide * query_head, query_row, first_query)
    of_u = _rows(query_u + queries, query_row, first_query, n_query, width, BLOCK, WIDTH)
    of_v = _rows(query_v + queries, query_row, first_query, n_query, width, BLOCK, WIDTH)
    grad = _rows(above + queries, query_row, first_query, n_query, width, BLOCK, WIDTH)
    attended = _rows(out + queries, query_row, first_query, n_query, width, BLOCK, WIDTH)
    # delta_i = dO_i . O_i = sum_j P_ij dP_ij, which the softmax's derivative subtracts from every dP_ij.
    delta = tl.sum(grad.to(tl.float32) * attended.to(tl.float32), 1) * scale
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK)[None, :]
    exists = first_query + row < n_query
    row_lse = tl.load(lse + (lane * n_head + head) * n_query + first_query + row, mask=exists, other=0.0)
    oldest, start, end = _first_keys(oldest_of, lane, first_query, n_query, n_key, window, BLOCK)
    end = start + tl.cdiv(end - start, BLOCK) * BLOCK
    key_at = _row(key + lane * key_lane + wide * key_head, key_row, start)
    value_at = _row(value + lane * value_lane + wide * value_head, value_row, start)
    band = n_query - BLOCK - first_query  # first row of the band for a tile with first key 0
    position_at = _row(position + wide * position_head, position_row, band + start)
    seed = 0 if seed_at is None else tl.load(seed_at)

    place = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dense = (place * n_query + first_query) * pitch
    applied += dense
    by_key += dense
    distance_row = tl.num_programs(2) * pitch
    place = tl.program_id(1).to(tl.int64) * n_query + first_query
    by_distance += (place * tl.num_programs(2) + tl.program_id(2)) * pitch
    row = row[:, None]
    shift = n_query - 1 - first_query - row  # column by distance minus column by key
    exists = exists[:, None]

    # Columns of keys that no query of the block sees. By distance, the last seen key of every row is in column S - 1.
    zeros = tl.zeros([BLOCK, BLOCK], by_key.dtype.element_ty)
    for first in range(0, start, BLOCK):
        tl.store(applied + (row * pitch + first + column), zeros, mask=exists)
        tl.store(by_key + (row * pitch + first + column), zeros, mask=exists)
    tail = n_key + tl.arange(0, 16)[None, :]
    tl.store(
        by_distance + (row * distance_row + tail), tl.zeros([BLOCK, 16], zeros.dtype), mask=exists & (tail < pitch)
    )
    for first in range(end, n_key, BLOCK):
        inside = exists & (first + column < pitch)
        tl.store(applied + (row * pitch + first + column), zeros, mask=inside)
        tl.store(by_key + (row * pitch + first + column), zeros, mask=inside)
    whole = tl.maximum(n_query - BLOCK - first_query + start, 0) // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        tl.store(by_distance + (row * distance_row + first + column), zeros, mask=exists)
    for first in range(whole, n_query - 1 - first_query + start, BLOCK):
        tl.store(
            by_distance + (row * distance_row + first + column), zeros, mask=exists & (first + column < shift + start)
        )

    rows = _rows(position_at, position_row, band + start, n_key, width, BLOCK, WIDTH)
    low = _product(of_v, rows, PRECISION)
    for first_key in range(start, end, BLOCK):
        position_at += BLOCK * position_row
        rows = _rows(position_at, position_row, band + first_key + BLOCK, n_key, width, BLOCK, WIDTH)
        high = _product(of_v, rows, PRECISION)
        keys = _rows(key_at, key_row, first_key, n_key, width, BLOCK, WIDTH)
        scores = _product(of_u, keys, PRECISION) + _by_key(low, high, BLOCK)
        low = high
        values = _rows(value_at, value_row, first_key, n_key, width, BLOCK, WIDTH)
        grad_weights = _product(grad, values, PRECISION)
        key_at += BLOCK * key_row
        value_at += BLOCK * value_row
        scores = _hidden(scores, first_query, first_key, n_query, n_key, window, oldest, BLOCK)
        weights = tl.exp2(scores * (scale * LOG2_E) - row_lse[:, None])
        used = weights
        if seed_at is not None:
            kept = _kept(seed, lane, head, first_query, first_key, THRESHOLD, BLOCK)
            used = tl.where(kept, weights * factor, 0.0)
            grad_weights = tl.where(kept, grad_weights, 0.0)
        grad_scores = (weights * (grad_weights * (scale * factor) - delta[:, None])).to(of_u.dtype)
        if _whole(first_query, first_key, n_query, n_key, window, oldest, BLOCK):
            tl.store(applied + (row * pitch + first_key + column), used.to(of_u.dtype))
            tl.store(by_key + (row * pitch + first_key + column), grad_scores)
            tl.store(by_distance + (row * distance_row + shift + first_key + column), grad_scores)
        else:
            inside = exists & (first_key + column < pitch)
            tl.store(applied + (row * pitch + first_key + column), used.to(of_u.dtype), mask=inside)
            tl.store(by_key + (row * pitch + first_key + column), grad_scores, mask=inside)
            inside = exists & (first_key + column + shift < n_key)
            tl.store(by_distance + (row * distance_row + shift + first_key + column), grad_scores, mask=inside)
