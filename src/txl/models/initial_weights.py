"""All initial weights, drawn in the order of `named_parameters` from PyTorch's generator.

Three sources: the authors' code (the default), Baevski and Auli's ("xavier"), and PyTorch's own for recurrent layers.
`model.init induction` then gives two heads of a Transformer-XL weights that can copy.

A Transformer learns to copy, from "A B ... A" to "B", when two heads come to work together (Olsson et al. 2022): one
attends to the previous token, and one in a later layer finds the position that follows an earlier occurrence of the
current token. From random weights this takes most of a short run. Here head 0 of the first two layers has these
functions from the start; all weights are trained as usual. The embedding must be tied to the softmax, which reads what
the second head writes. The head for the previous token needs term (d) of the paper alone, v^T W_kR R_d, so that it does
not depend on words.

Shapes: E width of the model, D width of a head, K distances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from txl.attention.equations import sinusoid
from txl.config import ModelConfig, TransformerXLConfig

# Number of distances, penalty on |v|^2 and number of Newton steps, with which v of the head is computed.
_DISTANCES, _PENALTY, _STEPS = 1024, 1e-3, 12
# Gains of what the two heads write into the residual stream, as multiples of the deviation of the embeddings.
_FIRST_GAIN, _SECOND_GAIN = 1.5, 6.0


@torch.no_grad()
def init_weights(named_parameters: Iterable[tuple[str, Tensor]], config: ModelConfig) -> None:
    """Draw the initial weights of any model; recurrent layers then get others from `init_recurrent`."""
    xavier = config.first_weights == "xavier"
    for name, parameter in named_parameters:
        owner, _, last = name.rpartition(".")
        if last.endswith("bias"):
            parameter.zero_()  # in both codes
        elif owner.endswith("norm"):  # gains: around 1 in the authors' code, exactly 1 in the other
            parameter.fill_(1.0) if xavier else parameter.normal_(1.0, config.init_std)
        elif xavier and ("tables." in name or last in ("positions", "distances")):
            # Embeddings, and learned vectors of positions or distances: N(0, 1/d).
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        elif xavier:
            # Their code has one matrix for queries, keys and values; a gain of 1/sqrt(2) gives three matrices nearly
            # the distribution of its parts.
            nn.init.xavier_uniform_(parameter, gain=2**-0.5 if owner.endswith(("q_proj", "k_proj", "v_proj")) else 1.0)
        else:
            # The authors draw everything from one normal distribution, u and v included, except for the projections of
            # clusters to d_model, which have a deviation of their own.
            parameter.normal_(0.0, config.proj_init_std if "projections" in name else config.init_std)


@torch.no_grad()
def init_recurrent(uniform: Iterable[tuple[nn.Module, int]], cluster_weight: Tensor | None) -> None:
    """Draw the weights of recurrent layers and of a mixture of softmaxes again.

    `uniform` has modules, each with its fan n: weights and biases are uniform within 1/sqrt(n). n is the number of
    units for an LSTM, as in PyTorch, and of inputs for a convolution or mixture, as in Yang et al.'s code. Weights of
    the tail clusters start at 0, as in awd-lstm-lm.
    """
    for module, fan in uniform:
        for parameter in module.parameters():
            parameter.uniform_(-(fan**-0.5), fan**-0.5)
    if cluster_weight is not None:
        cluster_weight.zero_()


def previous_token_bias(rows: Float[Tensor, "K D"]) -> Float[Tensor, " D"]:
    """Return the v with which attention by distance alone goes to distance 1.

    It minimises -log softmax(rows v / sqrt(D))_1 + _PENALTY |v|^2, a convex function, by Newton's method. The penalty
    decreases to its final value, so that every step begins near its solution. The rows are the projected and normalised
    R_d of distances 0 to K-1.
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


@torch.no_grad()
def init_induction(config: TransformerXLConfig, layers: Sequence[nn.Module], v: Float[Tensor, "H D"]) -> None:
    """Give head 0 of the first two layers the weights of an induction circuit.

    The head of the first layer attends to the previous token, that of the second copies. `v` is that of the first layer
    or of all layers; if all share it, W_kR of head 0 becomes orthogonal to it in the other layers. All other weights
    stay as they were drawn.
    """
    # W_{k,R} of every layer; for the two heads also W_q, W_{k,E}, W_v and W_o.
    of_positions = [layer.get_parameter("r_proj.weight") for layer in layers]
    queries, keys = (layers[1].get_parameter(f"{name}_proj.weight") for name in "qk")
    values, outputs = ([layer.get_parameter(f"{name}_proj.weight") for layer in layers[:2]] for name in "vo")
    width, own = config.d_head, slice(config.d_head)
    scale = config.init_std * config.d_model**0.5  # deviation of the scaled embeddings; norm of a matrix's random row

    # The highest frequencies tell near distances apart. A sine and its cosine keep the norm of all rows equal.
    half = width // 2
    fastest = [*range(half), *range(config.d_model // 2, config.d_model // 2 + half)]
    # On the CPU, because a model whose weights are loaded next is built without memory ("meta").
    rows = sinusoid(torch.arange(_DISTANCES, device="cpu"), config.d_model, torch.float64)[:, fastest] * 2**0.5
    chosen = torch.zeros(width, config.d_model, device="cpu")
    chosen[range(width), fastest] = scale
    of_positions[0][own] = chosen.to(of_positions[0])
    bias = previous_token_bias(rows)
    v[0] = bias.to(v)
    if not config.untie_r:  # otherwise head 0 of the other layers would prefer some distances, whatever the words
        along = (bias / bias.norm()).to(v)
        for weight in of_positions[1:]:
            weight[own] = weight[own] - torch.outer(along, along @ weight[own])

    # The first head writes the previous token's features into a subspace, in which k of the second head reads them.
    read, written, copied = (values[0].new_empty(width, config.d_model) for _ in range(3))
    for subspace in (read, written, copied):
        nn.init.orthogonal_(subspace)
    gain = (_FIRST_GAIN * scale) ** 0.5
    values[0][own] = gain * read
    outputs[0][:, own] = gain * written.T
    queries[own] = scale * read
    keys[own] = scale * written
    # The second head writes the token that it finds where the softmax, tied to the embeddings, reads it.
    gain = (_SECOND_GAIN * scale) ** 0.5
    values[1][own] = gain * copied
    outputs[1][:, own] = gain * copied.T
