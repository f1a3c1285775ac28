"""Floating-point operations of a Transformer-XL, and rates of the machine.

Only matrix products are counted, with two operations (multiply, add) per product of two numbers. With B lanes, T
tokens, M positions of memory, S = M + T keys, A = n_head * d_head, E d_model, F d_inner, V vocabulary, N layers, one
forward pass takes

    N * ( 2*B*T*E*A           queries
        + 2*B*S*E*A * 2       keys and values, memory included
        + 2*S*E*A             W_kR R
        + 2*B*T*S*A * 2       content scores, weighted values; masked entries are computed too
        + 2*B*T*min(S,W)*A    position scores, of the distances inside the window W
        + 2*B*T*A*E           output projection
        + 2*B*T*E*F * 2 )     feed-forward
    + 2*B*T*E*V               softmax

operations. A mixture of C softmaxes takes 2*B*T*E*C*(V + E + 1) instead of the last line. In the last line, T counts
only positions that the loss counts (`train.loss`). A training step takes three times as many operations, because the
backward pass computes two products for each product of the forward pass. With frozen weights (evaluation, generation),
W_kR R and the keys and values of memory are cached: keys and values take 2*B*T*E*A * 2, and W_kR R takes none.
"""

from __future__ import annotations

import time

import torch

from txl.config import TransformerXLConfig
from txl.errors import UserError
from txl.models.transformer_xl import TransformerXL
from txl.native.operations import linear
from txl.training.timing import synchronize


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
    key_rows, distances = (rows, 0) if frozen else (batch_size * keys, keys)
    if model.encoding == "shaw":
        distances = 0  # its position vectors are looked up, without a product
    layer = (
        2 * rows * model.d_model * width
        + 2 * key_rows * model.d_model * width * 2
        + 2 * distances * model.d_model * width
        + 2 * rows * keys * width * 2
        + 2 * rows * min(keys, window or keys) * width
        + 2 * rows * width * model.d_model
        + 2 * rows * model.d_model * model.d_inner * 2
    )
    per_row = vocab_size if model.n_softmax == 1 else model.n_softmax * (vocab_size + model.d_model + 1)
    scored_rows = rows if scored is None else batch_size * scored
    return model.n_layer * layer + 2 * scored_rows * model.d_model * per_row


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


def read_bandwidth(device: str = "cpu") -> float:
    """Return the bytes per second that a sum over 256 MiB of float32 reads: the highest of repeated sums."""
    numbers = torch.ones(2**26, device=device)
    best = float("inf")
    for _ in range(20):
        synchronize(device)
        began = time.perf_counter()
        numbers.sum()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return numbers.nbytes / best


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
