"""The configuration of recurrent networks."""

# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from txl.config.model import ModelConfig, family_name, rate, shaping
from txl.config.values import shown

RecurrentKind = Literal["lstm", "qrnn"]
_units = functools.partial(shaping, None, at_least=1, at_most=2**20, none="d_model")


@dataclass
class RecurrentConfig(ModelConfig):
    """A recurrent network, whose state has a constant size."""

    family: str = family_name("recurrent")
    kind: RecurrentKind = shaping("lstm", "kind of recurrent network: lstm or qrnn", lacking="transformer")
    d_hidden: int | None = _units("recurrent: units of every layer but the last; none: d_model")
    d_last: int | None = _units("recurrent: units of the last layer; none: d_model (others need n_softmax above 1)")
    weight_drop: float = rate(
        0.0, "recurrent: dropout of the weights, once a segment (lstm: recurrent weights; qrnn: convolution)"
    )
    kernel_sizes: tuple[int, ...] = shaping(
        (2,), "qrnn: tokens that each layer's convolution reads; the last number holds for all further layers"
    )
    zoneout: float = rate(0.0, "qrnn: probability that a unit keeps its state for a token")

    choice: ClassVar[str] = "kind"
    title: ClassVar[str] = "recurrent networks (model.kind lstm or qrnn)"
    constant_state: ClassVar[bool] = True
    no_memory: ClassVar[str] = "it carries a state of constant size, which has no positions to count"

    @property
    def display_name(self) -> str:
        """Name of the model, chosen by its kind; an LSTM with dropped weights is an AWD-LSTM."""
        if self.kind == "qrnn":
            return "QRNN"
        return "AWD-LSTM" if self.weight_drop > 0 else "LSTM"

    @property
    def layer_width(self) -> int:
        """Number of units of every layer but the last."""
        return self.d_model if self.d_hidden is None else self.d_hidden

    @property
    def last_width(self) -> int:
        """Number of units of the last layer."""
        return self.d_last or self.d_model

    @property
    def widths(self) -> list[int]:
        """Number of input features of the first layer, then the number of units of each layer."""
        return [self.d_model, *[self.layer_width] * (self.n_layer - 1), self.last_width]

    @property
    def kernels(self) -> list[int]:
        """Number of tokens that the convolution of each layer of a QRNN reads."""
        sizes = list(self.kernel_sizes[: self.n_layer])
        return sizes + [sizes[-1]] * (self.n_layer - len(sizes))

    def validate(self) -> None:
        """See `ModelConfig.validate`."""
        super().validate()
        for name in ("kernel_sizes", "zoneout"):
            default = self.__dataclass_fields__[name].default
            but = f"model.kind is lstm, which has no use for it; leave it at its default, {shown(default)}"
            self.require(self.kind == "qrnn" or getattr(self, name) == default, name, but=but)
        fits = 1 <= len(self.kernel_sizes) <= self.n_layer and all(1 <= size <= 1024 for size in self.kernel_sizes)
        expected = f"1 to {self.n_layer} numbers from 1 to 1024, one a layer (the last holds for all further ones)"
        self.require(self.kind == "lstm" or fits, "kernel_sizes", expected)
        is_usual, but = self.d_last in (None, self.d_model), "model.n_softmax is 1"
        self.require(self.n_softmax > 1 or is_usual, "d_last", f"none or {self.d_model} without a mixture", but)

    def _layer_parameters(self, vocab_size: int) -> int:
        """Count 4*H*(I + H) + 8*H a layer for LSTM, 3*H*(K*I + 1) for QRNN; I inputs, H units, K kernel size."""
        widths = pairwise(self.widths)
        if self.kind == "lstm":
            return sum(4 * n_unit * (n_in + n_unit) + 8 * n_unit for n_in, n_unit in widths)
        return sum(3 * n_unit * (size * n_in + 1) for (n_in, n_unit), size in zip(widths, self.kernels, strict=True))
