"""Floating-point operations of a Transformer-XL, and rates of the machine.

Only matrix products are counted, with two operations (multiply, add) per product of two numbers, and only those whose
results are used. With B lanes, T tokens, M positions of memory, S = M + T keys, P pairs of a query and a key that it
sees (`visible_pairs`), A = n_head * d_head, E d_model, F d_inner, V vocabulary, N layers, one forward pass takes

    N * ( 2*B*T*E*A           queries
        + 2*B*S*E*A * 2       keys and values, memory included
        + 2*S*E*A             W_kR R
        + 2*B*P*A * 3         content scores, position scores, weighted values
        + 2*B*T*A*E           output projection
        + 2*B*T*E*F * 2 )     feed-forward
    + 2*B*T*E*V               softmax

operations. A mixture of C softmaxes takes 2*B*T*E*C*(V + E + 1) instead of the last line. In the last line, T counts
only positions that the loss counts (`train.loss`). A training step takes three times as many operations, because the
backward pass computes two products for each product of the forward pass, less the gradients that nobody needs: those
with respect to memory, and to R, which is a constant. With frozen weights (evaluation, generation), W_kR R and the keys
and values of memory are cached: keys and values take 2*B*T*E*A * 2, and W_kR R takes none.

Records from before 2026-11-28 counted T*S pairs, masked ones included, and the gradients with respect to memory and R:
for `enwik8-12L` in training 12% more.
"""

from __future__ import annotations

import time

import torch

from txl.config import TransformerXLConfig
from txl.errors import UserError
from txl.models.transformer_xl import TransformerXL
from txl.native.operations import linear
from txl.training.timing import synchronize


def visible_pairs(segment: int, memory: int, window: int | None = None) -> int:
    """Return the number of pairs of a query and a key that it sees, for one lane with full memory."""
    most = memory + segment if window is None else window
    return sum(min(memory + place, most) for place in range(1, segment + 1))


def forward_operations(
    model: TransformerXLConfig,
    vocab_size: int,
    batch_size: int,
    segment: int,
    memory: int,
    window: int | None = None,
    *,
    frozen: bool = False,
    scored: int | None = None,
) -> int:
    """Return the operations of one forward pass by the formula of this module."""
    if model.cutoffs or model.d_embed not in (None, model.d_model):
        raise UserError("operations are counted for models with a plain softmax and d_embed = d_model only")
    keys, width = memory + segment, model.n_head * model.d_head
    rows = batch_size * segment
    layer = (
        2 * rows * model.d_model * width
        + 2 * (rows if frozen else batch_size * keys) * model.d_model * width * 2
        + (0 if frozen else _position_operations(model, keys))
        + 2 * batch_size * visible_pairs(segment, memory, window) * width * 3
        + 2 * rows * width * model.d_model
        + 2 * rows * model.d_model * model.d_inner * 2
    )
    per_row = vocab_size if model.n_softmax == 1 else model.n_softmax * (vocab_size + model.d_model + 1)
    scored_rows = rows if scored is None else batch_size * scored
    return model.n_layer * layer + 2 * scored_rows * model.d_model * per_row


def training_operations(
    model: TransformerXLConfig,
    vocab_size: int,
    batch_size: int,
    segment: int,
    memory: int,
    window: int | None = None,
    *,
    scored: int | None = None,
    learned: int = 0,
) -> int:
    """Return the operations of a training step; `learned` positions of memory get a gradient (backprop_segments)."""
    forward = forward_operations(model, vocab_size, batch_size, segment, memory, window, scored=scored)
    of_memory = 2 * batch_size * (memory - learned) * model.d_model * model.n_head * model.d_head * 2
    return 3 * forward - model.n_layer * (of_memory + _position_operations(model, memory + segment))


def _position_operations(model: TransformerXLConfig, keys: int) -> int:
    """Return the operations of W_kR R in one layer; Shaw's position vectors are looked up, without a product."""
    return 0 if model.encoding == "shaw" else 2 * keys * model.d_model * model.n_head * model.d_head


def matmul_rate(dtype: torch.dtype, device: str, size: int = 2048, seconds: float = 1.0) -> float:
    """Return the operations per second of a product of two [size, size] matrices: the highest of repeated products.

    The highest, not the mean, because this rate is the machine's limit, with which workloads are compared.
    """
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    for _ in range(2):
        linear(left, right.t())
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        synchronize(device)
        began = time.perf_counter()
        linear(left, right.t())
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def read_bandwidth(device: str = "cpu", size: int | None = None) -> float:
    """Return the bytes per second that memory moves: the highest of repeated passes over `size` bytes.

    On a CPU these are sums over 256 MiB of float32. On a GPU they are copies of 4 GiB, each of whose bytes counts twice
    (read and written), timed by events of the device: a sum of 256 MiB takes there as long as four waits of the host.
    """
    best = float("inf")
    if not device.startswith("cuda"):
        numbers = torch.ones((size or 2**28) // 4)
        for _ in range(20):
            began = time.perf_counter()
            numbers.sum()
            best = min(best, time.perf_counter() - began)
        return numbers.nbytes / best
    source = torch.ones((size or 2**32) // 4, device=device)
    target = torch.empty_like(source)
    for _ in range(8):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        target.copy_(source)
        after.record()
        after.synchronize()
        best = min(best, before.elapsed_time(after) / 1000)
    return 2 * source.nbytes / best


def bytes_read_once(model: TransformerXL, memory: int) -> int:
    """Return the bytes that must be read to compute one token without gradients, with a full memory in one lane.

    These are the weights, the keys and values, and W_kR R of the distances that the model tells apart. W_kR itself is
    not read, because W_kR R is cached. An embedding table counts only if the softmax shares it.
    """
    unread = ["r_proj"] if model.config.tie_embeddings else ["r_proj", "embedding.tables"]
    read = [weight for name, weight in model.named_parameters() if not any(part in name for part in unread)]
    weights = sum(weight.numel() for weight in read)
    shape, state = model.config, model.init_state(1, mem_len=memory)
    n_key = state.capacity + 1
    n_distance = n_key if state.lengths.clamp_len is None else min(n_key, state.lengths.clamp_len + 1)
    held = shape.n_layer * (2 * n_key + n_distance) * shape.n_head * shape.d_head
    return (weights + held) * model.softmax.bias.element_size()
