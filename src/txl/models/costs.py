"""Bytes that the layers of a model take while they train: the families' parts of `txl.training.estimate`.

Letters: N layers, B lanes of one micro-batch, T tokens, M positions of memory that a window leaves in use, S = M + T
keys, E d_model, F d_inner, A = n_head * d_head, H heads, f = 4 bytes, w = 4 (2 for bfloat16).
"""

from __future__ import annotations

from dataclasses import dataclass

from txl.config import ModelConfig, TrainConfig, TransformerConfig


@dataclass(frozen=True)
class LayerCosts:
    """Bytes that all layers of a model take."""

    activations: int
    """Kept for the backward pass of one micro-batch."""
    scratch: int
    """Bytes that the backward pass alone takes."""
    state: int
    """The states that go into a step and come out of it, of all lanes."""
    beside_softmax: bool = True
    """True: scratch is needed while the softmax's tensors exist; False: after them."""


def dropout_copies(model: ModelConfig, rate: float | None) -> tuple[int, int]:
    """Count the tensors of its input's size that one dropout keeps for the backward pass: its output, and its mask.

    Both counts are 1 if there is dropout, else 0; the mask of locked dropout, which all positions share, counts as 0.
    Compiled dropout keeps no mask either; it counts, because which attention will train the model may not be known.

    Args:
        model: a model's configuration.
        rate: of this dropout; None: the model's general one.
    """
    dropped = 1 if (model.dropout if rate is None else rate) > 0 else 0
    return dropped, 0 if model.locked_dropout else dropped


def transformer_costs(
    model: TransformerConfig,
    train: TrainConfig,
    *,
    n_memory: int,
    queries: int,
    keeps_scores: bool,
    norm_bytes: int = 0,
) -> LayerCosts:
    """Estimate all layers of a Transformer.

    - memory: 2 * f*N*(all lanes)*max(M,T)*E, the states that go into a step and those that come out (which keep their
      layer's whole input alive), if there is any,
    - activations, with the masks m of the dropout after a sub-layer and m' of that inside the feed-forward (d is 1 if
      there is one), and m'' of queries, keys and values, all 0 for locked dropout (`dropout_copies`):
      N*B * [ (f*S + (2*m*w + 2*f + w)*T) * E       the context; two dropout masks, two LayerNorm inputs, one output
              + w * (3*T + 2*S) * A                 q+u, q+v and what attention gives; k and v
              + w * m'' * (T + 2*S) * A             masks of queries, keys and values
              + n * (T + S) * A                     what the norms of queries and keys keep, if there are any
              + w * H*T*S * (3 if dropatt else 1)   attention probabilities, their mask and the product
              + w * (1 + d + m') * T*F ]            after the ReLU; its dropout's product and mask
      where pre-norm adds N*B * (f*S - w*T) * E,
    - scratch, the buffers of a backward pass: w*B * max(3*H*T*S, 2*T*F).

    Args:
        model: the configuration.
        train: how it is trained.
        n_memory: M; carried along if it is a Transformer-XL, even where it is 0.
        queries: 3 for q+u, q+v and what attention gives, 2 for one query.
        keeps_scores: attention probabilities are kept; else H*T*S is 0.
        norm_bytes: n.
    """
    n_query, n_key = train.segment, n_memory + train.segment
    full, low = 4, 2 if train.dtype == "bfloat16" else 4
    d_attention = model.n_head * model.d_head
    _, masked = dropout_copies(model, None)
    _, masked_qkv = dropout_copies(model, model.dropout_qkv)
    scores = model.n_head * n_query * n_key if keeps_scores else 0
    layer = (
        (full * n_key + (2 * masked * low + 2 * full + low) * n_query) * model.d_model
        + low * (queries * n_query + 2 * n_key) * d_attention
        + low * masked_qkv * (n_query + 2 * n_key) * d_attention
        + norm_bytes * (n_query + n_key) * d_attention
        + low * scores * (3 if model.dropatt > 0 else 1)
        + low * (1 + sum(dropout_copies(model, model.dropout_inner))) * n_query * model.d_inner
    )
    if model.pre_norm:  # the LayerNorm before the attention sees memory and segment
        layer += (full * n_key - low * n_query) * model.d_model
    lanes = train.batch_size // train.micro_batches
    state = 2 * full * model.n_layer * train.batch_size * max(n_memory, n_query) * model.d_model
    return LayerCosts(
        model.n_layer * lanes * layer,
        low * lanes * max(3 * scores, 2 * n_query * model.d_inner),
        state if model.tells_distances else 0,
    )
