"""How many parameters a configuration's model has, by arithmetic: building it to count takes PyTorch, and its time.

Letters: E d_model, D d_embed, F d_inner, A = n_head * d_head, V vocabulary, V_i and d_i tokens and features of
cluster i.
"""

from __future__ import annotations

from itertools import pairwise

from txl.config.kinds import kernel_sizes
from txl.config.model_rules import has_absolute_positions, has_auxiliary_losses
from txl.config.sections import ModelConfig


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """All parameters of a valid model, tied ones once; `sum(p.numel() for p in build_model(...).parameters())`.

    Args:
        model: its shape.
        vocab_size: tokens of the vocabulary; above the last of the model's cutoffs.
    """
    layers = _transformer(model, vocab_size) if model.kind == "transformer" else _recurrent(model)
    return layers + _embedding_and_softmax(model, vocab_size) + _mixture(model)


def _transformer(model: ModelConfig, vocab_size: int) -> int:
    """Layers: W_q, W_k, W_v, W_o and W_{k,R} (E*A each), F*E twice with biases, two LayerNorms; u and v (A each)."""
    width, attention = model.d_model, model.n_head * model.d_head
    layer = 4 * width * attention + 2 * width * model.d_inner + model.d_inner + width + 2 * 2 * width
    if has_absolute_positions(model):
        learned = model.n_layer * model.max_segment * width if model.encoding == "learned" else 0
        return model.n_layer * layer + learned + _auxiliary(model, vocab_size)
    if model.encoding == "shaw":
        return model.n_layer * (layer + (model.max_distance + 1) * attention)
    layer += width * attention
    return model.n_layer * layer + (model.n_layer if model.untie_r else 1) * 2 * attention


def _auxiliary(model: ModelConfig, vocab_size: int) -> int:
    """A classifier (V*E + V) for each target of each layer that predicts, but for the model's own."""
    if not has_auxiliary_losses(model):
        return 0
    heads = (model.n_layer if model.layer_losses else 1) * model.n_target - 1
    return heads * (vocab_size * model.d_model + vocab_size)


def _recurrent(model: ModelConfig) -> int:
    """Layers: LSTM 4*H*(I + H) and two biases of 4*H; QRNN 3*H*K*I and a bias of 3*H, for I inputs and H units."""
    hidden, last = model.d_hidden or model.d_model, model.d_last or model.d_model
    widths = [model.d_model, *[hidden] * (model.n_layer - 1), last]
    if model.kind == "lstm":
        return sum(4 * n_unit * (n_in + n_unit) + 8 * n_unit for n_in, n_unit in pairwise(widths))
    sizes = zip(pairwise(widths), kernel_sizes(model), strict=True)
    return sum(3 * n_unit * (size * n_in + 1) for (n_in, n_unit), size in sizes)


def _embedding_and_softmax(model: ModelConfig, vocab_size: int) -> int:
    """Tables (V_i*d_i, twice if untied), projections (E*d_i) and the output's own, biases; D + 1 a tail cluster."""
    d_embed = model.d_embed or model.d_model
    sizes = [end - first for first, end in pairwise((0, *model.cutoffs, vocab_size))]
    widths = [d_embed // model.div_val**cluster for cluster in range(len(sizes))]
    tables = sum(size * width for size, width in zip(sizes, widths, strict=True))
    projected = model.div_val > 1 or d_embed != model.d_model
    own = {"all": (0, 0), "tails": (0, 0), "all_but_first": (0, 1), "none": (0, len(sizes))}[model.tie_projections]
    projections = 0
    if projected:  # with equal widths, one projection serves all clusters' embeddings
        projections = sum(widths) if model.div_val > 1 else d_embed
        projections += sum(widths[slice(*own)])
    total = tables * (1 if model.tie_embeddings else 2) + model.d_model * projections
    return total + vocab_size + (len(sizes) - 1) * (d_embed + 1)


def _mixture(model: ModelConfig) -> int:
    """W_pi (H*K) and W_k (H*K*E) with its bias, for H features of the last layer and K softmaxes."""
    if model.n_softmax == 1:
        return 0
    last = model.d_model if model.kind == "transformer" else model.d_last or model.d_model
    return model.n_softmax * (last + last * model.d_model + model.d_model)
