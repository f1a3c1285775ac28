"""The configuration of Transformers without memory."""

# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from txl.config.model import ENCODING_HELP, TransformerConfig, family_name, shaping
from txl.config.sections import RANDOM_LENGTHS, EvalConfig, TrainConfig
from txl.config.values import ANYTHING, FieldValues, setting


@dataclass
class VanillaConfig(TransformerConfig):
    """A Transformer without memory, whose positions are counted within a segment."""

    family: str = family_name("vanilla")
    encoding: Literal["learned", "sinusoid"] = shaping("learned", ENCODING_HELP)
    max_segment: int = shaping(
        512, "without memory: tokens of the longest segment", at_least=1, expected="1 token or more", lacking=ANYTHING
    )
    layer_losses: bool = setting(
        False, "without memory: every layer predicts, layer l of n until l/(2n) of training is done (Al-Rfou et al.)"
    )
    n_target: int = setting(
        1,
        "without memory: number of following tokens that each position predicts",
        at_least=1,
        at_most=2**10,
        expected="1 (the next token) or a few more",
    )
    extra_target_weight: float = setting(
        0.5, "weight of the loss of a target after the next one", at_least=0, lacking=ANYTHING
    )

    attention: Literal["auto", "compiled"] = setting(
        "auto", "attention backend. auto: PyTorch's; compiled: code compiled for the CPU"
    )

    title: ClassVar[str] = "Transformers without memory (model.encoding learned or sinusoid)"
    no_memory: ClassVar[str] = (
        "it has no memory, as its positions are absolute: two segments would share the same positions (Section 3.3)"
    )

    @property
    def display_name(self) -> str:
        """Name of the model, chosen by its encoding."""
        return "Vanilla Transformer" if self.encoding == "learned" else "Transformer with sinusoids at its input"

    @property
    def context(self) -> int:
        """The value of `max_segment`."""
        return self.max_segment

    @property
    def n_auxiliary(self) -> int:
        """Number of classifiers of Al-Rfou et al.'s auxiliary losses (`txl.models.vanilla`)."""
        return (self.n_layer if self.layer_losses else 1) * self.n_target - 1

    @property
    def loss_depends_on_progress(self) -> bool:
        """True if the layers stop predicting one after the other."""
        return self.layer_losses

    def weight_settings(self) -> FieldValues:
        """See `ModelConfig.weight_settings`; `max_segment` is included only if positions are learned."""
        settings = super().weight_settings()
        if self.encoding != "learned":
            del settings["max_segment"]
        return settings

    def for_segment(self, segment: int, random_segments: bool = False) -> Self:
        """See `ModelConfig.for_segment`."""
        return dataclasses.replace(self, max_segment=segment + (RANDOM_LENGTHS if random_segments else 0))

    def validate(self) -> None:
        """See `ModelConfig.validate`."""
        super().validate()
        self.require(self.attention in ("auto", "compiled"), "attention", "auto or compiled without memory")
        self.require(self.init != "induction", "init", "normal or xavier without memory")
        name = "layer_losses" if self.layer_losses else "n_target"
        but = f"model.cutoffs is {list(self.cutoffs)}: each auxiliary prediction has a plain softmax of its own"
        self.require(not (self.n_auxiliary and self.cutoffs), name, "no cutoffs", but)

    def _layer_parameters(self, vocab_size: int) -> int:
        """Count the Transformer's parameters, learned positions of every layer, and classifiers of auxiliary losses."""
        learned = self.n_layer * self.max_segment * self.d_model if self.encoding == "learned" else 0
        return super()._layer_parameters(vocab_size) + learned + self.n_auxiliary * vocab_size * (self.d_model + 1)

    def validate_use(self, train: TrainConfig, evaluation: EvalConfig) -> None:
        """Check that no segment is longer than the number of positions, and that all targets of a segment are read."""
        super().validate_use(train, evaluation)
        but = f"model.n_target is {self.n_target}: what follows a segment's last target is not read"
        train.require(train.loss != "last" or self.n_target == 1, "loss", "full or half, or model.n_target 1", but)
        for section in (train, evaluation):
            fits, most = section.segment <= self.max_segment, f"at most model.max_segment, {self.max_segment}"
            section.require(fits, "segment", most)
        longest = train.segment + RANDOM_LENGTHS
        but = f"positions end at model.max_segment, {self.max_segment}"
        fits = not train.random_segments or self.max_segment >= longest
        train.require(fits, "random_segments", f"at least {longest}", but)
