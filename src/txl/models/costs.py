"""Memory, in bytes, that the layers of a model need in training: the families' parts of `txl.training.estimate`.

Letters: N layers, B lanes of one micro-batch, T tokens, M positions of memory within the window, S = M + T keys,
E d_model, F d_inner, A = n_head * d_head, H heads, f = 4 bytes, w = 4 (2 for bfloat16).
"""

from __future__ import annotations

from dataclasses import dataclass

from txl.config import ModelConfig, TrainConfig, TransformerConfig


@dataclass(frozen=True)
class LayerCosts:
    """Memory in bytes, summed over all layers of a model."""

    activations: int
    """Bytes kept for the backward pass of one micro-batch."""
    scratch: int
    """Bytes needed during the backward pass only."""
    state: int
    """Bytes of the states before and after a step, for all lanes."""
    beside_softmax: bool = True
    """True: scratch is needed while the tensors of the softmax exist; False: after they are freed."""


def dropout_copies(model: ModelConfig, rate: float | None) -> tuple[int, int]:
    """Return the numbers of outputs and of masks, each of the input's size, that a dropout keeps for the backward pass.

    Both numbers are 1 if there is dropout, else 0. A mask of locked dropout counts as 0, since all positions share it.
    Compiled dropout keeps no mask, but a mask is counted: it may be unknown which attention will train the model.

    Args:
        model: model configuration.
        rate: rate of this dropout; None: the model's general rate.
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
    """Estimate the memory of all layers of a Transformer.

    - state, for a Transformer-XL: 2 * f*N*(all lanes)*max(M,T)*E, the states before and after a step (the latter keep
      the whole input of their layer alive),
    - activations, with m the mask of the dropout after a sub-layer, m' the mask of the dropout inside the feed-forward
      (d is 1 if it exists) and m'' the mask of queries, keys and values, all 0 for locked dropout (`dropout_copies`):
      N*B * [ (c + (2*m*w + 2*f + w)*T) * E         inputs of the q, k and v products; two dropout masks, two LayerNorm
                                                    inputs, one output
              + w * (3*T + 2*S) * A                 q+u, q+v and the attention output; k and v
              + w * m'' * (T + 2*S) * A             masks of queries, keys and values
              + n * (T + S) * A                     tensors kept by the norms of queries and keys, if any
              + w * H*T*S * (3 if dropatt else 1)   attention probabilities, their mask and the product
              + w * (1 + d + m') * T*F ]            output of the ReLU; output and mask of its dropout
      where c is w*(3*T + 2*M) in bfloat16, a copy for each product; otherwise f*S with pre-norm, the outputs of its
      LayerNorm, or 0. A model without recurrence adds f*T, the layer's input; in a Transformer-XL it counts as state.
      With pre-norm this input is the first LayerNorm's, so that f counts once, not twice,
    - scratch, the buffers of a backward pass: w*B * max(3*H*T*S, 2*T*F).

    Args:
        model: model configuration.
        train: training configuration.
        n_memory: M. The state of a Transformer-XL counts even if M is 0.
        queries: number of tensors [B,T,A] kept: 3 for q+u, q+v and the attention output, 2 for q and that output.
        keeps_scores: True if attention probabilities are kept; else H*T*S counts as 0.
        norm_bytes: n, bytes that the norms keep for each number of queries and keys.
    """
    n_query, n_key = train.segment, n_memory + train.segment
    full, low = 4, 2 if train.dtype == "bfloat16" else 4
    d_attention = model.n_head * model.d_head
    _, masked = dropout_copies(model, None)
    _, masked_qkv = dropout_copies(model, model.dropout_qkv)
    scores = model.n_head * n_query * n_key if keeps_scores else 0
    inputs = low * (3 * n_query + 2 * n_memory) if low < full else full * n_key if model.pre_norm else 0
    inputs += 0 if model.tells_distances else full * n_query  # the layer's input: otherwise state
    normed = full * (1 if model.pre_norm else 2) + low
    layer = (
        (inputs + (2 * masked * low + normed) * n_query) * model.d_model
        + low * (queries * n_query + 2 * n_key) * d_attention
        + low * masked_qkv * (n_query + 2 * n_key) * d_attention
        + norm_bytes * (n_query + n_key) * d_attention
        + low * scores * (3 if model.dropatt > 0 else 1)
        + low * (1 + sum(dropout_copies(model, model.dropout_inner))) * n_query * model.d_inner
    )
    lanes = train.batch_size // train.micro_batches
    state = 2 * full * model.n_layer * train.batch_size * max(n_memory, n_query) * model.d_model
    return LayerCosts(
        model.n_layer * lanes * layer,
        low * lanes * max(3 * scores, 2 * n_query * model.d_inner),
        state if model.tells_distances else 0,
    )
