"""Layers that the families share: products, dropout, feed-forward.

Shapes: T tokens of a segment, E d_model, I and O inputs and outputs of a linear layer, D width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from txl.attention.backends import check_compiled
from txl.config import TransformerConfig
from txl.models.loss import at_least_float32
from txl.native.operations import compiled_dropout, compiled_rms_norm, linear
from txl.native.tensors import computes


class Linear(nn.Linear):
    """Linear layer with the parameters of `nn.Linear`; faster for the few rows of a decoding step."""

    def forward(self, input: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """Return the product; see `linear`."""
        return linear(input, self.weight, self.bias)


class LockedDropout(nn.Module):
    """Dropout with one mask per lane, shared by all positions of a segment.

    Also called variational dropout (Gal and Ghahramani 2016, Section 4; "locked" in AWD-LSTM, Merity et al. 2017).
    Kept features are scaled by 1/(1-p), so the expectation does not change.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, hidden: Float[Tensor, "*lanes T E"]) -> Float[Tensor, "*lanes T E"]:
        """Drop features in training; otherwise return the input itself."""
        if not self.training or self.p == 0:
            return hidden
        # One row of ones for each lane: every position of the segment loses the same features.
        ones = hidden.new_ones(*hidden.shape[:-2], 1, hidden.shape[-1])
        return hidden * F.dropout(ones, self.p)

    def extra_repr(self) -> str:
        """Return the rate, for printing."""
        return f"p={self.p}"


class Dropout(nn.Dropout):
    """`nn.Dropout`, in the compiled library if `compiled` is true, as for models whose attention is `compiled`."""

    compiled = False

    def forward(self, input: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Drop numbers in training; otherwise return the input itself."""
        if not (self.compiled and self.training and self.p > 0):
            return super().forward(input)
        # Compiled attention would raise the same error, but only after this dropout.
        check_compiled(input.device.type, input.dtype)
        return compiled_dropout(input, self.p)


class HeadNorm(nn.RMSNorm):
    """RMSNorm over the features of each head (`qk_norm`), computed in float32 at least.

    The compiled library computes it without gradients, and if `compiled` is true also in training.
    """

    compiled = False

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Return x / sqrt(mean(x^2) + eps), times the gain."""
        assert self.eps is not None
        if (self.compiled or not torch.is_grad_enabled()) and computes(x, self.weight):
            return compiled_rms_norm(x, self.weight, self.eps)
        wide = at_least_float32(x)
        return F.rms_norm(wide, self.normalized_shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


def make_dropout(p: float, locked: bool) -> nn.Module:
    """Return a locked or an ordinary dropout layer of rate `p`."""
    return LockedDropout(p) if locked else Dropout(p)


class PositionwiseFeedForward(nn.Module):
    """Feed-forward sub-layer: Linear, ReLU, Linear, with residual and LayerNorm."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.pre_norm = config.pre_norm
        self.inner = Linear(config.d_model, config.d_inner)
        self.outer = Linear(config.d_inner, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = make_dropout(config.dropout, config.locked_dropout)
        inner = config.dropout if config.dropout_inner is None else config.dropout_inner
        self.dropout_inner = make_dropout(inner, config.locked_dropout)

    def forward(self, hidden: Float[Tensor, "*lanes E"]) -> Float[Tensor, "*lanes E"]:
        """Compute the sub-layer for one segment."""
        # FFN(x) = W_2 relu(W_1 x + b_1) + b_2, then post-norm as in the paper or pre-norm.
        inner = self.inner(self.norm(hidden) if self.pre_norm else hidden)
        output = self.dropout(self.outer(self.dropout_inner(F.relu(inner))))
        return hidden + output if self.pre_norm else self.norm(hidden + output)
