"""The base class of all model configurations, and that of all Transformer configurations.

Each family has its own subclass in its own file, with only the fields that the family uses.
"""

# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

from txl.config.sections import EvalConfig, Lengths, Limit, TrainConfig
from txl.config.values import FieldValues, Section, hints_of, kind_of, setting, shown
from txl.errors import UserError

ENCODING_HELP = (
    "position encoding. relative: as in the paper; shaw: learned relative vectors (Shaw et al.). Without memory: "
    "learned at every layer (Al-Rfou et al.), or sinusoid at the input (Vaswani et al.)"
)
# Settings of a memory that consists of positions, and the values that mean no memory.
NO_LENGTHS: dict[str, int | None] = {"mem_len": 0, "window": None, "clamp_len": None}
# Fields for a dropout rate, and fields whose values determine the meaning of the weights; arguments as for `setting`.
rate = functools.partial(setting, at_least=0, below=1, drops=True)
shaping = functools.partial(setting, changes_weights=True)


def family_name(name: str) -> Any:
    """Return the field that holds the name of a family; users cannot set it."""
    about = "model family: transformer-xl, vanilla or recurrent"
    return field(default=name, init=False, metadata={"help": about, "changes_weights": True})


@dataclass
class ModelConfig(Section, ABC):
    """The configuration shared by models of all families. Lengths are numbers of tokens, widths numbers of features."""

    family: str = family_name("")
    n_layer: int = shaping(12, "number of layers N", at_least=1, at_most=10_000)
    d_model: int = shaping(
        512,
        "width of the hidden states (of a Transformer even: R is half sines, half cosines)",
        at_least=1,
        at_most=2**20,
    )
    d_embed: int | None = shaping(None, "width of the token embedding; none: d_model", at_least=1, none="d_model")
    cutoffs: tuple[int, ...] = shaping((), "adaptive softmax: vocabulary ids at which a new cluster begins")
    div_val: int = shaping(
        1, "adaptive embedding: each cluster is this many times narrower than the one before", at_least=1, at_most=2**20
    )
    tie_projections: Literal["all", "all_but_first", "tails", "none"] = shaping(
        "all", "clusters whose output shares the embedding's projection; tails: all but the first, which has none"
    )
    tie_embeddings: bool = shaping(True, "use the embedding tables in the softmax too")
    n_softmax: int = shaping(
        1,
        "number of softmaxes in the mixture (Yang et al. 2017)",
        at_least=1,
        at_most=4096,
        expected="1 (no mixture) or more, at most 4096",
    )
    dropout: float = rate(0.1, "dropout on attention output, feed-forward or layer, and wherever no other rate is set")
    dropout_embed: float | None = rate(None, "dropout on the scaled embeddings; none: the same as dropout")
    dropout_out: float | None = rate(None, "dropout on the final hidden states; none: the same as dropout")
    dropout_words: float = rate(0.0, "probability that a word's embedding is zero everywhere in a segment")
    dropout_tail: float = rate(0.0, "dropout on hidden states in the width of an adaptive softmax's tail cluster")
    dropout_latent: float | None = rate(
        None, "mixture of softmaxes: dropout on each softmax's own hidden states; none: the same as dropout"
    )
    locked_dropout: bool = setting(
        False, "one dropout mask for all positions of a segment (variational), except for dropatt and dropout_tail"
    )
    init_std: float = setting(0.02, "standard deviation of the initial weights", at_least=0)
    proj_init_std: float = setting(0.01, "standard deviation of the initial embedding projections", at_least=0)
    activation_reg: float = setting(
        0.0, "activation regularisation: adds this times the mean of h^2 to the loss", at_least=0
    )
    temporal_reg: float = setting(
        0.0, "temporal activation regularisation: adds this times the mean of (h_t - h_{t-1})^2 to the loss", at_least=0
    )

    section: ClassVar[str] = "model"
    choice: ClassVar[str] = "encoding"  # name of the field that selects a model of the family
    title: ClassVar[str] = "every model"  # name of the models with these fields, for messages
    # Reason why these models have no memory whose length could be set; empty if they have one, and these three lengths
    # as fields.
    no_memory: ClassVar[str] = ""
    mem_len: ClassVar[int] = 0
    window: ClassVar[int | None] = None
    clamp_len: ClassVar[int | None] = None
    tells_distances: ClassVar[bool] = False  # scores depend on the distance to a key, which can then be clamped
    constant_state: ClassVar[bool] = False  # no position of the past is ever dropped from the state
    # Largest number of tokens that a model without memory reads at once; None for a model that carries a state.
    context: ClassVar[int | None] = None
    # Letters of the terms (a) to (d) of Section 3.3 whose sum is the attention score; empty without such terms.
    score_terms: ClassVar[str] = ""
    embedding_scale: ClassVar[float] = 1.0  # factor by which the token embeddings are multiplied
    n_auxiliary: ClassVar[int] = 0  # number of classifiers that are used only in training
    loss_depends_on_progress: ClassVar[bool] = False  # the training loss changes in the course of training
    first_weights: ClassVar[str] = "normal"  # the initial weights: "normal", "xavier" or "induction"

    @property
    def chosen_by(self) -> str:
        """The field that selects the model, and its value, as text for messages."""
        return f"model.{self.choice} is {getattr(self, self.choice)}"

    @classmethod
    def choices(cls) -> tuple[str, ...]:
        """Return the values that the field named by `choice` can have in this family."""
        return kind_of(hints_of(cls)[cls.choice]).choices

    @property
    @abstractmethod
    def display_name(self) -> str:
        """Name of the model in tables and reports."""

    @property
    def carries_state(self) -> bool:
        """True if the model carries a state from one segment to the next."""
        return self.constant_state or self.mem_len > 0

    @property
    def has_dropout(self) -> bool:
        """True if any rate of dropout is above 0."""
        return any(getattr(self, item.name) for item in dataclasses.fields(self) if item.metadata.get("drops"))

    def with_attention(self, name: str | None) -> Self:
        """Return a copy with the attention backend in a run's log, if any, unless the configuration chooses one."""
        return dataclasses.replace(self)

    @property
    def layer_width(self) -> int:
        """Number of units of every layer but the last."""
        return self.d_model

    @property
    def last_width(self) -> int:
        """Number of units of the last layer."""
        return self.d_model

    def weight_settings(self) -> FieldValues:
        """Return the settings that determine the meaning of the weights; lengths and dropout do not."""
        names = [item.name for item in dataclasses.fields(self) if item.metadata.get("changes_weights")]
        return {name: getattr(self, name) for name in names} | {"d_embed": self.d_embed or self.d_model}

    def parameter_count(self, vocab_size: int) -> int:
        """Return the number of parameters of a valid model with V tokens (more than the last of the cutoffs).

        Tied parameters count once. The configuration is read alone: building the model would import PyTorch.
        """
        d_embed, d_last = self.d_embed or self.d_model, self.last_width
        sizes = [end - first for first, end in pairwise((0, *self.cutoffs, vocab_size))]
        widths = [d_embed // self.div_val**cluster for cluster in range(len(sizes))]
        tables = sum(size * width for size, width in zip(sizes, widths, strict=True))
        projections = 0
        if self.div_val > 1 or d_embed != self.d_model:  # with equal widths one projection serves all clusters
            own = {"all": 0, "tails": 0, "all_but_first": 1, "none": len(sizes)}[self.tie_projections]
            projections = (sum(widths) if self.div_val > 1 else d_embed) + sum(widths[:own])
        total = self._layer_parameters(vocab_size) + tables * (1 if self.tie_embeddings else 2)
        total += self.d_model * projections + vocab_size + (len(sizes) - 1) * (d_embed + 1)
        if self.n_softmax > 1:  # W_pi, and W_k with its bias, for each softmax
            total += self.n_softmax * (d_last + d_last * self.d_model + self.d_model)
        return total

    @abstractmethod
    def _layer_parameters(self, vocab_size: int) -> int:
        """Return the number of parameters of the layers and of parts that only this family has."""

    def for_segment(self, segment: int, random_segments: bool = False) -> Self:
        """Return a copy whose number of positions, or largest distance, fits training segments of (about) a length."""
        return dataclasses.replace(self)

    def validate(self) -> None:
        """Check the rules of the model's shape, which do not depend on text or training."""
        self.check_ranges()
        choices = self.choices()
        family = f"{' or '.join(choices)} in the family {self.family} (txl.config.with_options chooses another)"
        self.require(getattr(self, self.choice) in choices, self.choice, family)
        increases = all(first < second for first, second in pairwise((0, *self.cutoffs)))
        self.require(increases, "cutoffs", "numbers above 0 that increase strictly, or nothing")
        d_embed = self.d_embed or self.d_model
        narrowest = d_embed // self.div_val ** min(len(self.cutoffs), 64)  # widths are below 2^64
        but = f"of {d_embed} embedding features the last cluster would get none"
        self.require(narrowest >= 1, "div_val", "a smaller div_val or fewer cutoffs", but)
        is_set = self.dropout_latent is not None
        self.require(self.n_softmax > 1 or not is_set, "dropout_latent", "none", "model.n_softmax is 1")
        self.require(bool(self.cutoffs) or self.dropout_tail == 0, "dropout_tail", "0", "there are no model.cutoffs")
        shares_width = self.tie_projections != "tails" or d_embed == self.d_model
        widths = f"model.d_embed is {self.d_embed} and model.d_model {self.d_model}"
        self.require(shares_width, "tie_projections", "the same: the shortlist has no projection", widths)

    def validate_use(self, train: TrainConfig, evaluation: EvalConfig) -> None:
        """Check the rules for the training and evaluation of this model."""
        carries_positions = not self.constant_state and self.mem_len > 0
        but = "this model has no memory for gradients to flow into (model.mem_len); use a longer train.segment"
        train.require(carries_positions or train.backprop_segments == 1, "backprop_segments", "1", but)
        train.require(self.carries_state or train.reset_memory == 0, "reset_memory", "0", "this model has no memory")
        if self.no_memory:
            self.refuse_lengths({name: getattr(evaluation, name) for name in NO_LENGTHS}, "eval.")

    def lengths(self, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None) -> Lengths:
        """Return the lengths for a state of the model: the given ones ("none": no limit), else the configuration's."""
        if self.no_memory:
            self.refuse_lengths({"mem_len": mem_len, "window": window, "clamp_len": clamp_len})
            return Lengths()
        lengths = Lengths(self.mem_len, self.window, self.clamp_len).given(mem_len, window, clamp_len)
        lengths.validate()
        return lengths

    def refuse_lengths(self, lengths: Mapping[str, object], prefix: str = "") -> None:
        """Refuse lengths of a memory, for a model without memory; None, "none" and a mem_len of 0 are allowed."""
        for name, value in lengths.items():
            if value not in (None, "none", NO_LENGTHS[name]):
                why = f"{self.chosen_by}: {self.no_memory}"
                raise UserError(field=f"{prefix}{name}", value=value, but=why, expected=shown(NO_LENGTHS[name]))


@dataclass
class TransformerConfig(ModelConfig):
    """The configuration shared by all Transformers, with memory or without."""

    n_head: int = shaping(8, "attention heads", at_least=1, at_most=2**12)
    d_head: int = shaping(64, "width of one head; n_head * d_head may differ from d_model", at_least=1, at_most=2**16)
    d_inner: int = shaping(2048, "width of the position-wise feed-forward's hidden layer", at_least=1, at_most=2**24)
    dropatt: float = rate(0.0, "dropout on attention probabilities")
    dropout_qkv: float = rate(0.0, "dropout on queries, keys, values and the projected R")
    dropout_inner: float | None = rate(None, "dropout after the feed-forward's ReLU; none: the same as dropout")
    pre_norm: bool = shaping(False, "LayerNorm before each sub-layer instead of after it")
    layer_norm_eps: float = shaping(1e-5, "epsilon of all norms (the authors' TensorFlow code: 1e-12)", above=0)
    init: Literal["normal", "xavier", "induction"] = setting(
        "normal",
        "initial weights. normal: as in the authors' code; xavier: as in Baevski and Auli's code; induction: normal, "
        "with two heads that copy from the start",
    )

    title: ClassVar[str] = "Transformers"

    @property
    def embedding_scale(self) -> float:
        """sqrt(d_model), as in Vaswani et al. (2017)."""
        return math.sqrt(self.d_model)

    @property
    def first_weights(self) -> str:
        """The value of `init`."""
        return self.init

    def validate(self) -> None:
        """See `ModelConfig.validate`."""
        super().validate()
        self.require(self.d_model % 2 == 0, "d_model", "an even number (R is half sines, half cosines)")

    def _layer_parameters(self, vocab_size: int) -> int:
        """Count W_q, W_k, W_v and W_o, the feed-forward's matrices and biases, and two LayerNorms, of every layer."""
        width, attention, inner = self.d_model, self.n_head * self.d_head, self.d_inner
        return self.n_layer * (4 * width * attention + 2 * width * inner + inner + width + 2 * 2 * width)
