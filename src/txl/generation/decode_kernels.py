"""Kernels of a decoding step on NVIDIA GPUs in Triton: one new token a lane, bound by reading keys, values and weights.

A program of `attention_kernel` reads a range of distances of one head and lane, so that every key and value is read
once. It iterates over distances and not over places of the ring: rows of W_kR R and scores by distance are then rows in
order, and the ring's place follows by a subtraction. Each row of a tile keeps a softmax of its own, which are merged
after the loop: the loop needs no barrier. If several programs share a head, the one that ends last merges their sums in
the order of their distances: the same bits in every run.

This module needs Triton; only `txl.generation.fused_step` uses it, and imports it at the first step.

Shapes: n lanes, H heads, D width of a head, R places of a ring. Matrices of a head have STORED columns, D rounded up to
a multiple of 16, for loads of 16 bytes; WIDTH is the power of two above.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    query,
    key,
    value,
    u,
    v,
    keys,
    values,
    positions,
    by_distance,
    read,
    out,
    partials,
    sums,
    tickets,
    row_lane,
    ring_lane,
    ring_head,
    position_head,
    score_lane,
    score_head,
    size,
    chunk,
    d_head,
    scale,
    STORED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    INSIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the attention of one token a lane, and put its key and value into the rings; grid [splits,H,n].

    query, key, value: rows of H*D numbers, `row_lane` apart. keys, values: rings [n,H,R,STORED]. positions: W_kR R by
    distance, the nearest first, [H,R,STORED]; without INSIDE its products are read from `by_distance`, float32 [n,H,_].
    read: tokens that each lane has read. out: [n,H,D]. partials, sums, tickets: float32 [n,H,splits,WIDTH] and
    [n,H,splits,2], and int32 zeros [n,H], which are zeros again afterwards. scale: log2(e) / sqrt(D).
    """
    split, head, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_split, n_head = tl.num_programs(0), tl.num_programs(1)
    feature = tl.arange(0, WIDTH)
    own, stored = feature < d_head, feature < STORED
    here = lane.to(tl.int64) * row_lane + head * d_head + feature
    bias = head * d_head + feature
    row = tl.load(query + here, mask=own, other=0.0).to(tl.float32)
    query_u = (row + tl.load(u + bias, mask=own, other=0.0).to(tl.float32)) * scale
    query_v = (row + tl.load(v + bias, mask=own, other=0.0).to(tl.float32)) * scale

    n_read = tl.load(read + lane)
    place = (n_read % size).to(tl.int32)
    # Of longer distances the ring holds nothing yet, or keys of the slot's earlier stream.
    seen = tl.minimum(n_read + 1, size).to(tl.int32)
    ring = lane.to(tl.int64) * ring_lane + head * ring_head
    first = split * chunk
    end = tl.minimum(first + chunk, seen)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK, WIDTH], tl.float32)
    # Distance 0, the token itself, is not in the ring yet.
    for start in tl.range(tl.maximum(first, 1), end, BLOCK, num_stages=STAGES):
        distance = start + tl.arange(0, BLOCK)
        visible = distance < end
        at = place - distance
        at = tl.where(at < 0, at + size, at)
        inside = visible[:, None] & stored[None, :]
        places = ring + at[:, None] * STORED + feature[None, :]
        tile_keys = tl.load(keys + places, mask=inside, other=0.0)
        tile_values = tl.load(values + places, mask=inside, other=0.0)
        products = tile_keys.to(tl.float32) * query_u[None, :]
        if INSIDE:
            tile = head * position_head + distance[:, None] * STORED + feature[None, :]
            products += tl.load(positions + tile, mask=inside, other=0.0).to(tl.float32) * query_v[None, :]
            scores = tl.sum(products, 1)
        else:
            terms = by_distance + lane.to(tl.int64) * score_lane + head * score_head + distance
            scores = tl.sum(products, 1) + tl.load(terms, mask=visible, other=0.0)
        scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(largest, scores)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        factor, weight = tl.exp2(largest - base), tl.exp2(scores - base)
        total = total * factor + weight
        weighted = weighted * factor[:, None] + weight[:, None] * tile_values.to(tl.float32)
        largest = larger

    maximum = tl.max(largest, 0)
    factors = tl.exp2(largest - tl.where(maximum == float("-inf"), 0.0, maximum))
    denominator = tl.sum(total * factors, 0)
    attended = tl.sum(weighted * factors[:, None], 0)
    if split == 0:
        new_key = tl.load(key + here, mask=own, other=0.0)
        new_value = tl.load(value + here, mask=own, other=0.0)
        tl.store(keys + ring + place * STORED + feature, new_key, mask=stored)
        tl.store(values + ring + place * STORED + feature, new_value, mask=stored)
        of_key = new_key.to(tl.float32) * query_u
        if INSIDE:
            nearest = tl.load(positions + head * position_head + feature, mask=stored, other=0.0)
            score = tl.sum(of_key + nearest.to(tl.float32) * query_v, 0)
        else:
            score = tl.sum(of_key, 0) + tl.load(by_distance + lane.to(tl.int64) * score_lane + head * score_head)
        highest = tl.maximum(maximum, score)
        shrink, share = tl.exp2(maximum - highest), tl.exp2(score - highest)
        denominator = denominator * shrink + share
        attended = attended * shrink + share * new_value.to(tl.float32)
        maximum = highest

    line = lane.to(tl.int64) * n_head + head
    target = out + line * d_head + feature
    if SPLITS == 1:
        tl.store(target, (attended / denominator).to(out.dtype.element_ty), mask=own)
    else:
        part = line * n_split + split
        tl.store(partials + part * WIDTH + feature, attended)
        tl.store(sums + part * 2, maximum)
        tl.store(sums + part * 2 + 1, denominator)
        tl.debug_barrier()  # all threads have stored before one of them takes the ticket
        if tl.atomic_add(tickets + line, 1, sem="acq_rel", scope="gpu") == n_split - 1:
            number = tl.arange(0, SPLITS)
            parts = line * n_split + number
            there = number < n_split
            maxima = tl.load(sums + parts * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            denominators = tl.load(sums + parts * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            addresses = partials + parts[:, None] * WIDTH + feature[None, :]
            of_parts = tl.load(addresses, mask=there[:, None], other=0.0, cache_modifier=".cg")
            shares = tl.exp2(maxima - tl.max(maxima, 0))
            merged = tl.sum(of_parts * shares[:, None], 0) / tl.sum(denominators * shares, 0)
            tl.store(target, merged.to(out.dtype.element_ty), mask=own)
            tl.store(tickets + line, 0)


@triton.jit
def position_kernel(
    query,
    v,
    positions,
    by_distance,
    row_lane,
    position_head,
    score_lane,
    score_head,
    n_lane,
    size,
    d_head,
    scale,
    STORED: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the position terms of many lanes, which share W_kR R, as products; grid [distances / BLOCK,H,n / LANES].

    Arguments as in `attention_kernel`; `by_distance` is the result.
    """
    head = tl.program_id(1)
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    distance = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    feature = tl.arange(0, WIDTH)
    own, there, inside = feature < d_head, lane < n_lane, distance < size
    rows = query + lane[:, None].to(tl.int64) * row_lane + head * d_head + feature[None, :]
    queries = tl.load(rows, mask=there[:, None] & own[None, :], other=0.0).to(tl.float32)
    queries += tl.load(v + head * d_head + feature, mask=own, other=0.0).to(tl.float32)[None, :]
    tile = positions + head * position_head + distance[:, None] * STORED + feature[None, :]
    near = tl.load(tile, mask=inside[:, None] & (feature < STORED)[None, :], other=0.0)
    scores = tl.dot(queries.to(near.dtype), tl.trans(near), input_precision=PRECISION) * scale
    target = by_distance + lane[:, None].to(tl.int64) * score_lane + head * score_head + distance[None, :]
    tl.store(target, scores, mask=there[:, None] & inside[None, :])


@triton.jit
def product_kernel(
    rows,
    residual,
    normed,
    gain,
    shift,
    weight,
    bias,
    out,
    n_in,
    n_out,
    weight_row,
    eps,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
):
    """Compute the products [LANES,n_out] of a few rows with a weight [n_out,n_in], read once; grid [n_out / BLOCK].

    Rows of the weight are filled up with zeros to `weight_row` columns, a multiple of 16.
    With NORM, the rows are LayerNorm(residual + rows), which every program computes again and the first one stores.
    """
    column = tl.arange(0, WIDTH)
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, there = column < n_in, line < n_out
    tile = weight + line[:, None].to(tl.int64) * weight_row + column[None, :]
    factors = tl.load(tile, mask=there[:, None] & (column < weight_row)[None, :], other=0.0)
    for lane in tl.static_range(LANES):
        at = lane * n_in + column
        row = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            row += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            row = tl.where(inside, row - tl.sum(row, 0) / n_in, 0.0)
            row *= tl.rsqrt(tl.sum(row * row, 0) / n_in + eps)
            row = row * tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
            row += tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
            rounded = row.to(normed.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(normed + at, rounded, mask=inside)
            row = rounded.to(tl.float32)
        sums = tl.sum(factors.to(tl.float32) * row[None, :], 1)
        if BIAS:
            sums += tl.load(bias + line, mask=there, other=0.0).to(tl.float32)
        if RELU:
            sums = tl.where(sums < 0, 0.0, sums)  # NaN stays
        tl.store(out + lane * n_out + line, sums.to(out.dtype.element_ty), mask=there)


@triton.jit
def _mixed(state):
    """Take a step of SplitMix64, as `txl.generation.sampling` does."""
    state = state + (0x9E3779B97F4A7C15 - 2**64)
    state = (state ^ _shifted(state, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    state = (state ^ _shifted(state, 27)) * (0x94D049BB133111EB - 2**64)
    return state ^ _shifted(state, 31)


@triton.jit
def _shifted(state, BY: tl.constexpr):
    return (state >> BY) & ((1 << (64 - BY)) - 1)


@triton.jit
def draw_kernel(
    log_probs,
    settings,
    never,
    keys,
    tokens,
    before,
    read,
    drawn,
    n_vocab,
    n_slot,
    n_lane,
    WIDTH: tl.constexpr,
):
    """Draw a token in each lane as `permitted` and `Sampling.pick` do, and count it; grid [n].

    log_probs: float32 [n,V]. settings: top_k, top_p and temperature of each slot, float64 [3,B]. never: 1 for the
    tokens that a slot forbids, uint8 [B,V]. keys: seed, number of the token and 1 for lanes that take part, int64
    [3,n]; numbers grow where a token is drawn. tokens, read: int64 [B], the next token and the number of tokens read.
    before: copy of the tokens as they were, int64 [B].
    drawn: tokens and indices into `REASONS`, int64 [2,n].
    """
    lane = tl.program_id(0)
    token = tl.arange(0, WIDTH)
    inside = token < n_vocab
    here = lane.to(tl.int64) * n_vocab + token
    scores = tl.load(log_probs + here, mask=inside, other=float("-inf"))
    allowed = tl.where(tl.load(never + here, mask=inside, other=1) != 0, float("-inf"), scores)
    best, highest = tl.max(allowed, 0), tl.max(scores, 0)
    lacks_allowed = tl.max((allowed != allowed).to(tl.int32), 0) + (tl.abs(best) == float("inf")).to(tl.int32) > 0
    lacks_numbers = tl.max((scores != scores).to(tl.int32), 0) + (tl.abs(highest) == float("inf")).to(tl.int32) > 0
    obstacle = tl.where(lacks_allowed, tl.where(lacks_numbers, 2, 1), 0).to(tl.int64)
    allowed = tl.where(lacks_allowed & inside, 0.0, allowed)

    # Sorted by score, then by id: bits of floats whose order as integers is that of the numbers.
    bits = (allowed + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.sort((bits.to(tl.int64) << 32) | (WIDTH - 1 - token).to(tl.int64), descending=True)
    bits = (order >> 32).to(tl.int32)
    values = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    ids = WIDTH - 1 - (order & 0xFFFFFFFF)

    top_k = tl.load(settings + lane)
    top_p = tl.load(settings + n_slot + lane)
    temperature = tl.load(settings + 2 * n_slot + lane)
    is_greedy = temperature == 0
    candidate = token < tl.minimum(top_k, n_vocab.to(tl.float64)).to(tl.int32)
    best = tl.max(values, 0)
    exponents = (values - best).to(tl.float64) / tl.where(is_greedy, 1.0, temperature)
    probs = tl.where(candidate, tl.exp(exponents), 0.0)
    probs = probs / tl.sum(probs, 0)
    probs = tl.where(tl.cumsum(probs, 0) - probs >= top_p, 0.0, probs)
    ends = tl.cumsum(probs, 0)
    seed, number = tl.load(keys + lane), tl.load(keys + n_lane + lane)
    takes_part = tl.load(keys + 2 * n_lane + lane)
    chance = _shifted(_mixed(_mixed(seed) + number), 11).to(tl.float64) * 2.0**-53
    passed = (candidate & (ends <= chance * tl.max(ends, 0))).to(tl.int32)
    place = tl.minimum(tl.sum(passed, 0), tl.sum(candidate.to(tl.int32), 0) - 1)
    place = tl.where(is_greedy, 0, place)
    picked = tl.sum(tl.where(token == place, ids, 0), 0)

    has_drawn = (takes_part == 1) & (obstacle == 0)
    tl.store(before + lane, tl.load(tokens + lane))
    tl.store(tokens + lane, picked, mask=has_drawn)
    tl.store(keys + n_lane + lane, number + 1, mask=has_drawn)
    tl.store(read + lane, tl.load(read + lane) + takes_part)
    tl.store(drawn + lane, picked)
    tl.store(drawn + n_lane + lane, obstacle)
