"""What the estimates of all kinds of layers share: what they come to, and what a dropout keeps."""

from __future__ import annotations

from dataclasses import dataclass

from txl.config import ModelConfig


@dataclass(frozen=True)
class LayerCosts:
    """Bytes that all layers of a model take."""

    activations: int
    """Kept for the backward pass of one micro-batch."""
    scratch: int
    """Of the backward pass alone."""
    state: int
    """What goes into a step and what comes out of it, all lanes."""


def dropout_copies(model: ModelConfig, rate: float | None) -> tuple[int, int]:
    """Tensors of its input's size that one dropout keeps for the backward pass: what came out, and its mask.

    Both are 1 if there is dropout, else 0; the mask of locked dropout, which all positions share, counts as 0.

    Args:
        model: a model's configuration.
        rate: of this dropout; None: the model's general one.
    """
    dropped = 1 if (model.dropout if rate is None else rate) > 0 else 0
    return dropped, 0 if model.locked_dropout else dropped
