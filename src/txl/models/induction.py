"""Initial weights that can copy: `model.init induction`.

A Transformer learns to copy, from "A B ... A" to "B", when two heads come to work together (Olsson et al. 2022,
"In-context Learning and Induction Heads"): one attends to the previous token, and one in a later layer finds the
position that follows an earlier occurrence of the current token. From random weights this takes most of a short run,
and how long depends on the seed. Here head 0 of the first two layers has these functions from the start; all weights
are trained as usual. The embedding must be tied to the softmax directly, because what the second head writes is read
there.

The head for the previous token needs term (d) of the paper alone, v^T W_kR R_d, so that it does not depend on words.

Shapes: E width of the model, D width of a head, K distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from txl.attention.equations import sinusoid
from txl.config import TransformerXLConfig
from txl.models.layers import Linear

_DISTANCES, _PENALTY, _STEPS = 1024, 1e-3, 12
"""Number of distances, penalty on |v|^2 and number of Newton steps, with which v of the head is computed."""
_FIRST_GAIN, _SECOND_GAIN = 1.5, 6.0
"""Gains of what the two heads write into the residual stream, as multiples of the deviation of the embeddings."""


def previous_token_bias(rows: Float[Tensor, "K D"]) -> Float[Tensor, " D"]:
    """Return the v with which attention by distance alone goes to distance 1.

    It minimises -log softmax(rows v / sqrt(D))_1 + _PENALTY |v|^2, a convex function, by Newton's method. The penalty
    decreases to its final value, so that every step begins near its solution.

    Args:
        rows: projected and normalised R_d of distances 0 to K-1.
    """
    scores, n_feature = rows / rows.shape[1] ** 0.5, rows.shape[1]
    bias, one = rows.new_zeros(n_feature), torch.eye(n_feature, dtype=rows.dtype, device=rows.device)
    for step in range(_STEPS):
        penalty = _PENALTY * 2.0 ** max(0, _STEPS - 4 - step)
        weights = torch.softmax(scores @ bias, dim=0)
        mean = weights @ scores
        slope = mean - scores[1] + 2 * penalty * bias
        curvature = scores.T @ (weights[:, None] * scores) - torch.outer(mean, mean) + 2 * penalty * one
        bias = bias - torch.linalg.solve(curvature, slope)
    return bias


class AttentionWeights(Protocol):
    """Weights of a layer's relative attention, except u and v, which layers may share."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    r_proj: Linear
    o_proj: Linear


@torch.no_grad()
def init_induction(config: TransformerXLConfig, layers: Sequence[AttentionWeights], v: Float[Tensor, "H D"]) -> None:
    """Give head 0 of the first two layers the weights of an induction circuit.

    If all layers share v, W_kR of head 0 becomes orthogonal to v in the other layers. All other weights stay as they
    were drawn.

    Args:
        config: configuration of the model, checked by its `validate`.
        layers: attention of each layer. The head of the first attends to the previous token, that of the second copies.
        v: v of the first layer, or of all layers.
    """
    previous, induction, *_ = layers
    width, own = config.d_head, slice(config.d_head)
    scale = config.init_std * config.d_model**0.5  # deviation of the scaled embeddings; norm of a matrix's random row

    # The highest frequencies tell near distances apart. A sine and its cosine keep the norm of all rows equal.
    half = width // 2
    fastest = [*range(half), *range(config.d_model // 2, config.d_model // 2 + half)]
    # On the CPU, because a model whose weights are loaded next is built without memory ("meta").
    rows = sinusoid(torch.arange(_DISTANCES, device="cpu"), config.d_model, torch.float64)[:, fastest] * 2**0.5
    chosen = torch.zeros(width, config.d_model, device="cpu")
    chosen[range(width), fastest] = scale
    previous.r_proj.weight[own] = chosen.to(previous.r_proj.weight)
    bias = previous_token_bias(rows)
    v[0] = bias.to(v)
    if not config.untie_r:  # otherwise head 0 of the other layers would prefer some distances, whatever the words
        along = (bias / bias.norm()).to(v)
        for layer in layers[1:]:
            projection = layer.r_proj.weight[own]
            layer.r_proj.weight[own] = projection - torch.outer(along, along @ projection)

    # The first head writes the previous token's features into a subspace, in which k of the second head reads them.
    read, written, copied = (previous.v_proj.weight.new_empty(width, config.d_model) for _ in range(3))
    for each in (read, written, copied):
        nn.init.orthogonal_(each)
    gain = (_FIRST_GAIN * scale) ** 0.5
    previous.v_proj.weight[own] = gain * read
    previous.o_proj.weight[:, own] = gain * written.T
    induction.q_proj.weight[own] = scale * read
    induction.k_proj.weight[own] = scale * written
    # The second head writes the token that it finds where the softmax, tied to the embeddings, reads it.
    gain = (_SECOND_GAIN * scale) ** 0.5
    induction.v_proj.weight[own] = gain * copied
    induction.o_proj.weight[:, own] = gain * copied.T
