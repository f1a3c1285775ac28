"""What the layers of a Transformer hold while they train: the part of `txl.training.estimate` that is theirs.

Letters: N layers, B lanes of one micro-batch, T tokens, M positions of memory that a window leaves in use, S = M + T
keys, E d_model, F d_inner, A = n_head * d_head, H heads, f = 4 bytes, w = 4 (2 for bfloat16); of the dropout after a
sub-layer m = 1 if there is one, else 0, of that inside the feed-forward d and m', of that of queries, keys and values
m'': m, m' and m'' are masks, and 0 for locked dropout, whose masks are small (`dropout_copies`).
"""

from __future__ import annotations

from txl.config import ModelConfig, TrainConfig, has_absolute_positions
from txl.training.estimate_layers import LayerCosts, dropout_copies


def transformer_costs(model: ModelConfig, train: TrainConfig) -> LayerCosts:
    """Of all layers.

    - memory: 2 * f*N*(all lanes)*max(M,T)*E, the states that go into a step and those that come out (which keep their
      layer's whole input alive),
    - activations:
      N*B * [ (f*S + (2*m*w + 2*f + w)*T) * E       the context; two dropout masks, two LayerNorm inputs, one output
              + w * (3*T + 2*S) * A                 q+u, q+v and what attention gives; k and v
              + w * m'' * (T + 2*S) * A             masks of queries, keys and values
              + w * H*T*S * (3 if dropatt else 1)   attention probabilities, their mask and the product
              + w * (1 + d + m') * T*F ]            after the ReLU; its dropout's product and mask
      where pre-norm adds N*B * (f*S - w*T) * E, and with absolute positions there is one query, so 2*T for 3*T, and
      no H*T*S without dropatt: the fused attention keeps no probabilities,
    - scratch, the buffers of a backward pass: w*B * max(3*H*T*S, 2*T*F).
    """
    carried = model.mem_len if model.window is None else min(model.mem_len, model.window - 1)
    n_query, n_key = train.segment, carried + train.segment
    full, low = 4, 2 if train.dtype == "bfloat16" else 4
    absolute, d_attention = has_absolute_positions(model), model.n_head * model.d_head
    _, masked = dropout_copies(model, None)
    _, masked_qkv = dropout_copies(model, model.dropout_qkv)
    scores = 0 if absolute and model.dropatt == 0 else model.n_head * n_query * n_key
    layer = (
        (full * n_key + (2 * masked * low + 2 * full + low) * n_query) * model.d_model
        + low * ((2 if absolute else 3) * n_query + 2 * n_key) * d_attention
        + low * masked_qkv * (n_query + 2 * n_key) * d_attention
        + low * scores * (3 if model.dropatt > 0 else 1)
        + low * (1 + sum(dropout_copies(model, model.dropout_inner))) * n_query * model.d_inner
    )
    if model.pre_norm:  # the LayerNorm before the attention sees memory and segment
        layer += (full * n_key - low * n_query) * model.d_model
    lanes = train.batch_size // train.micro_batches
    memory = 0 if absolute else 2 * full * model.n_layer * train.batch_size * max(carried, n_query) * model.d_model
    return LayerCosts(model.n_layer * lanes * layer, low * lanes * max(3 * scores, 2 * n_query * model.d_inner), memory)
