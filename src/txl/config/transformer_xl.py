"""The configuration of Transformer-XL."""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from txl.config.model import ENCODING_HELP, TransformerConfig, family_name, rate, shaping
from txl.config.sections import EvalConfig, Lengths, TrainConfig
from txl.config.values import ANYTHING, FieldValues, setting, shown
from txl.errors import UserError

# Backends that no measurement found to be the fastest anywhere. Configurations may still name them, and mean `auto`.
FORMER_ATTENTIONS = ("factorised", "flex")
HUGGINGFACE_TYPE = "txl-transformer-xl"  # model type in the library transformers
AttentionName = Literal["auto", "fastest", "reference", "shifted", "compiled", "triton", "factorised", "flex"]


@dataclass
class TransformerXLConfig(TransformerConfig):
    """A Transformer-XL with the encoding of the paper (Section 3) or that of Shaw et al."""

    family: str = family_name("transformer-xl")
    encoding: Literal["relative", "shaw"] = shaping("relative", ENCODING_HELP)
    # Other families have constants of these names: they have no memory whose length could be set.
    mem_len: int = setting(512, "positions M of hidden states carried from segment to segment", lacking=0)
    window: int | None = setting(None, "keys a query sees, itself included; none: all of memory and segment")
    clamp_len: int | None = setting(None, "largest distance; greater ones count as this one; none: no clamp")
    max_distance: int = shaping(
        64,
        "shaw: largest distance with a vector of its own; longer ones share it",
        at_least=0,
        below=2**24,
        expected="0 or more positions",
        lacking=ANYTHING,
    )
    qk_norm: bool = shaping(False, "RMSNorm over the features of each head: queries, keys and the projected R")
    untie_r: bool = shaping(False, "one pair of biases u and v a layer instead of one pair for all", lacking=ANYTHING)
    dropout_r: float | None = rate(None, "dropout on the sinusoid R; none: the same as dropout", lacking=ANYTHING)
    attention: AttentionName = setting(
        "auto",
        "attention backend. auto: on a GPU the backend that was measured to be the fastest there, else shifted; "
        "fastest: on a CPU compiled, if there is compiled code (the wheel's, or a C++ compiler's), else as auto",
    )

    title: ClassVar[str] = "Transformer-XL (model.encoding relative or shaw)"
    tells_distances: ClassVar[bool] = True

    @property
    def display_name(self) -> str:
        """Name with the encoding, if it is not the paper's, and "without memory", if the model has none."""
        name = "Transformer-XL" if self.encoding == "relative" else "Transformer with Shaw et al.'s encoding"
        return name if self.mem_len else f"{name} without memory"

    @property
    def score_terms(self) -> str:
        """All four terms for the paper's encoding; two for that of Shaw et al., which has no u and v."""
        return "abcd" if self.encoding == "relative" else "ab"

    @property
    def names_attention(self) -> bool:
        """True if `attention` names a backend, instead of leaving the choice open."""
        return self.attention not in ("auto", "fastest", *FORMER_ATTENTIONS)

    def weight_settings(self) -> FieldValues:
        """See `ModelConfig.weight_settings`; `max_distance` is included only if distances are learned."""
        settings = super().weight_settings()
        if self.encoding != "shaw":
            del settings["max_distance"]
        return settings

    def with_attention(self, name: str | None) -> Self:
        """See `ModelConfig.with_attention`; without a name it is `shifted`, the only one before names were logged."""
        return dataclasses.replace(self, attention=self.attention if self.names_attention else name or "shifted")

    def longest_distance(self, segment: int) -> int:
        """Return the largest distance from a query to a key that it attends to, in segments of `segment` tokens."""
        limits = [self.mem_len + segment - 1]
        limits += [] if self.window is None else [self.window - 1]
        return min(limits + ([] if self.clamp_len is None else [self.clamp_len]))

    def for_segment(self, segment: int, random_segments: bool = False) -> Self:
        """See `ModelConfig.for_segment`."""
        if self.encoding != "shaw":
            return dataclasses.replace(self)
        return dataclasses.replace(self, max_distance=min(self.max_distance, self.longest_distance(segment)))

    def validate(self) -> None:
        """See `ModelConfig.validate`."""
        super().validate()
        Lengths(self.mem_len, self.window, self.clamp_len).validate("model.")
        is_relative = self.encoding == "relative"
        self.require(is_relative or not self.qk_norm, "qk_norm", "relative", f"model.encoding is {self.encoding}")
        if self.init == "induction" and (obstacle := self.induction_obstacle()) is not None:
            raise UserError(field="model.init", value=self.init, but=f"{obstacle}, or model.init normal")

    def induction_obstacle(self) -> str | None:
        """Return why `model.init induction` is impossible, and what it needs; None if it is possible."""
        even = self.d_head % 2 == 0 and 16 <= self.d_head <= self.d_model
        rules = {
            "pre_norm": (self.pre_norm, "true"),
            "qk_norm": (self.qk_norm, "true"),
            "n_layer": (self.n_layer >= 2, "2 or more"),
            "d_head": (even, "an even number from 16 to model.d_model"),
            "tie_embeddings": (self.tie_embeddings, "true"),
            "d_embed": (self.d_embed in (None, self.d_model), "model.d_model"),
            "div_val": (self.div_val == 1, "1"),
            "n_softmax": (self.n_softmax == 1, "1"),
            "window": (self.window is None or self.window >= 16, "16 or more"),
            "clamp_len": (self.clamp_len is None or self.clamp_len >= 16, "16 or more"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                return f"model.{name} is {shown(getattr(self, name))}; expected {expected}"
        return None

    def fusion_obstacle(self) -> str | None:
        """Return why the layers of a training step on a GPU cannot be one function; None if they can."""
        reasons = {
            f"encoding is {self.encoding}": self.encoding != "relative",
            "dropout_qkv drops single numbers": self.dropout_qkv > 0 and not self.locked_dropout,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _layer_parameters(self, vocab_size: int) -> int:
        """Count the Transformer's parameters, W_{k,R}, u, v and gains of `qk_norm`, or learned vectors of distances."""
        layers, attention = super()._layer_parameters(vocab_size), self.n_head * self.d_head
        if self.encoding == "shaw":
            return layers + self.n_layer * (self.max_distance + 1) * attention
        biases = (self.n_layer if self.untie_r else 1) * 2 * attention
        gains = 3 * self.n_layer * self.d_head if self.qk_norm else 0
        return layers + self.n_layer * self.d_model * attention + biases + gains

    def validate_use(self, train: TrainConfig, evaluation: EvalConfig) -> None:
        """Check that training uses every learned vector of a distance; others would be noise in longer evaluations."""
        super().validate_use(train, evaluation)
        farthest = self.longest_distance(train.segment)
        but = f"training has no distance above {farthest}, so that farther vectors would stay untrained"
        is_used = self.encoding != "shaw" or self.max_distance <= farthest
        self.require(is_used, "max_distance", f"at most {farthest}", but)
