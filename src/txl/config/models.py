"""The families of models: what each one's configuration has, and the rules that its values obey.

A family has its own fields and no others. `txl.models.FAMILIES` has the model of each.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, get_args

from txl.config.sections import RANDOM_LENGTHS, EvalConfig, Lengths, Limit, TrainConfig
from txl.config.values import ANYTHING, check_ranges, checked, hints_of, require, setting, shown
from txl.errors import UserError

AttentionName = Literal["auto", "reference", "shifted", "compiled", "factorised", "flex"]
RelativeEncoding = Literal["relative", "shaw"]
AbsoluteEncoding = Literal["learned", "sinusoid"]
Encoding = Literal["relative", "shaw", "learned", "sinusoid"]
RecurrentKind = Literal["lstm", "qrnn"]
_ENCODING = (
    "of positions. relative: the paper's; shaw: learned relative vectors (Shaw et al.). Without memory: learned at "
    "every layer (Al-Rfou et al.), or sinusoid at the input (Vaswani et al.)"
)
_LENGTHS = ("mem_len", "window", "clamp_len")
_rate = partial(setting, at_least=0, below=1)
_shaping = partial(setting, changes_weights=True)


def _family(name: str) -> Any:
    """The field that names a family; it cannot be set."""
    about = "of models: transformer-xl, vanilla or recurrent"
    return field(default=name, init=False, metadata={"help": about, "changes_weights": True})


@dataclass
class ModelConfig(ABC):
    """What the models of all families have. Lengths count tokens, widths features."""

    family: str = _family("")
    n_layer: int = _shaping(12, "number of layers N", at_least=1, at_most=10_000)
    d_model: int = _shaping(
        512,
        "width of the hidden states (of a Transformer even: R is half sines, half cosines)",
        at_least=1,
        at_most=2**20,
    )
    d_embed: int | None = _shaping(None, "width of the token embedding; none: d_model", at_least=1, none="d_model")
    cutoffs: tuple[int, ...] = _shaping((), "adaptive softmax: vocabulary ids at which a new cluster begins")
    div_val: int = _shaping(
        1, "adaptive embedding: each cluster is this many times narrower than the one before", at_least=1, at_most=2**20
    )
    tie_projections: Literal["all", "all_but_first", "tails", "none"] = _shaping(
        "all", "clusters whose output projection is the embedding's own; tails: the others, the first has none"
    )
    tie_embeddings: bool = _shaping(True, "the output's tables are the embedding's")
    n_softmax: int = _shaping(
        1,
        "softmaxes that are mixed (Yang et al. 2017)",
        at_least=1,
        at_most=4096,
        expected="1 (no mixture) or more, at most 4096",
    )
    dropout: float = _rate(0.1, "dropout on attention output, feed-forward or layer, and wherever no other rate is set")
    dropout_embed: float | None = _rate(None, "dropout on the scaled embeddings; none: the same as dropout")
    dropout_out: float | None = _rate(None, "dropout on the final hidden states; none: the same as dropout")
    dropout_words: float = _rate(0.0, "probability with which a word's embedding is zero for a whole step")
    dropout_tail: float = _rate(0.0, "dropout on hidden states in the width of an adaptive softmax's tail cluster")
    dropout_latent: float | None = _rate(
        None, "mixture of softmaxes: dropout on each softmax's own hidden states; none: the same as dropout"
    )
    locked_dropout: bool = setting(
        False, "one dropout mask for all positions of a segment (variational), but for attention probabilities"
    )
    init_std: float = setting(0.02, "standard deviation of the initial weights", at_least=0)
    proj_init_std: float = setting(0.01, "standard deviation of the initial embedding projections", at_least=0)
    activation_reg: float = setting(
        0.0, "activation regularisation: adds this times the mean of h^2 to the loss", at_least=0
    )
    temporal_reg: float = setting(
        0.0, "temporal activation regularisation: adds this times the mean of (h_t - h_{t-1})^2 to the loss", at_least=0
    )

    choice: ClassVar[str] = "encoding"
    """The field that says which model of the family it is."""
    title: ClassVar[str] = "every model"
    """The models that have these fields, as messages call them."""
    no_memory: ClassVar[str] = ""
    """Why these models have no memory that a length could be set of; empty if they have one."""
    tells_distances: ClassVar[bool] = False
    """Whether scores depend on the distance to a key, which can then be clamped."""
    constant_state: ClassVar[bool] = False
    """Whether the state has a constant size, so that no position of the past is ever dropped."""
    if TYPE_CHECKING:
        mem_len: int = field(init=False)
        window: int | None = field(init=False)
        clamp_len: int | None = field(init=False)
    else:  # no fields: models without a memory of positions have nothing to set there
        mem_len, window, clamp_len = 0, None, None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            refuse_lacking(self, {name: value})  # a value that says nothing is no mistake
            return
        super().__setattr__(name, value)

    @property
    def chosen_by(self) -> str:
        """The field that says which model of which family it is, and its value, as messages have it."""
        return f"model.{self.choice} is {getattr(self, self.choice)}"

    @property
    @abstractmethod
    def display_name(self) -> str:
        """What the model is called in tables and reports."""

    @property
    def context(self) -> int | None:
        """Most tokens that a model without memory reads at once; None if its state carries what it has read."""
        return None

    @property
    def carries_state(self) -> bool:
        """Whether anything goes from one segment to the next."""
        return self.constant_state or self.mem_len > 0

    @property
    def has_dropout(self) -> bool:
        """Whether layers have dropout, inside or behind them."""
        return self.dropout > 0

    @property
    def score_terms(self) -> str:
        """Which of the terms (a) to (d) of Section 3.3 its attention scores are the sum of."""
        return ""

    @property
    def layer_width(self) -> int:
        """Units of every layer but the last."""
        return self.d_model

    @property
    def last_width(self) -> int:
        """Units of the last layer."""
        return self.d_model

    @property
    def embedding_scale(self) -> float:
        """Factor of the token embeddings."""
        return 1.0

    @property
    def n_auxiliary(self) -> int:
        """Number of classifiers that serve in training alone."""
        return 0

    @property
    def loss_depends_on_progress(self) -> bool:
        """Whether the training loss is another one in the course of training."""
        return False

    @property
    def first_weights(self) -> str:
        """How the weights are drawn: "normal" or "xavier"."""
        return "normal"

    def weight_settings(self) -> dict[str, Any]:
        """The settings without which the weights mean something else; lengths and dropout are not among them."""
        names = [item.name for item in dataclasses.fields(self) if item.metadata.get("changes_weights")]
        return {name: getattr(self, name) for name in names} | {"d_embed": self.d_embed or self.d_model}

    def parameter_count(self, vocab_size: int) -> int:
        """Count the parameters of a valid model by arithmetic, tied ones once: building it to count imports PyTorch.

        Args:
            vocab_size: tokens V of the vocabulary; above the last of the cutoffs.
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
        """Count the parameters of the layers and of what belongs to the family alone."""

    def for_segment(self, segment: int, random_segments: bool = False) -> Self:
        """A copy with as many positions, or at most as many distances, as segments of a length have.

        Args:
            segment: tokens of a training segment.
            random_segments: whether their lengths vary around it.
        """
        return dataclasses.replace(self)

    def validate(self) -> None:
        """The rules of the model's shape, whatever it is trained on and for how long.

        Raises:
            UserError: naming the first field that breaks one.
        """
        check_ranges(self, "model.")
        choices, chosen = get_args(hints_of(type(self))[self.choice]), getattr(self, self.choice)
        expected = f"{' or '.join(choices)} in the family {self.family} (txl.config.with_options chooses another)"
        require(chosen in choices, f"model.{self.choice}", chosen, expected)
        if any(first >= second for first, second in pairwise((0, *self.cutoffs))):
            raise UserError(
                f"model.cutoffs is {list(self.cutoffs)}; expected numbers above 0 that increase strictly, or nothing"
            )
        d_embed = self.d_embed or self.d_model
        for cluster in range(len(self.cutoffs) + 1):
            if d_embed // self.div_val**cluster < 1:
                raise UserError(
                    f"model.div_val is {self.div_val}: of {d_embed} embedding features cluster {cluster} would get "
                    f"none; use a smaller div_val or fewer cutoffs"
                )
        if self.n_softmax == 1 and self.dropout_latent is not None:
            raise UserError(
                f"model.dropout_latent is {self.dropout_latent}, but model.n_softmax is 1; expected none without a "
                f"mixture of softmaxes"
            )
        if self.dropout_tail > 0 and not self.cutoffs:
            raise UserError(
                f"model.dropout_tail is {self.dropout_tail}, but without model.cutoffs there are no tails; expected 0"
            )
        if self.tie_projections == "tails" and d_embed != self.d_model:
            raise UserError(
                f"model.tie_projections is tails, but model.d_embed is {self.d_embed} and model.d_model "
                f"{self.d_model}; expected the same: the shortlist's embeddings meet the hidden states without a "
                f"projection"
            )

    def validate_use(self, train: TrainConfig, evaluation: EvalConfig) -> None:
        """The rules of how this model can be trained and tested.

        Raises:
            UserError: naming the first field that breaks one.
        """
        if self.no_memory:
            self.refuse_lengths({name: getattr(evaluation, name) for name in _LENGTHS}, "eval.")

    def lengths(self, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None) -> Lengths:
        """Return the lengths that a state of the model gets: those given, else the configuration's own.

        Args:
            mem_len: positions of memory; None: the configuration's, as for the other two.
            window: keys a query sees, itself included; "none": no limit.
            clamp_len: largest distance told apart; "none": no clamp.
        """
        if self.no_memory:
            self.refuse_lengths({"mem_len": mem_len, "window": window, "clamp_len": clamp_len})
            return Lengths()
        lengths = Lengths(self.mem_len, self.window, self.clamp_len).given(mem_len, window, clamp_len)
        lengths.validate()
        return lengths

    def refuse_lengths(self, lengths: dict[str, int | str | None], prefix: str = "") -> None:
        """Refuse the lengths of a memory, for a model that has none.

        Args:
            lengths: mem_len, window and clamp_len, as far as they are known; "none" is none.
            prefix: of their names in errors.

        Raises:
            UserError: naming the first that is set.
        """
        for name, value in lengths.items():
            nothing = getattr(type(self), name)
            if value not in (None, "none", nothing):
                raise UserError(
                    f"{prefix}{name} is {value}, but {self.chosen_by}: {self.no_memory}; expected {shown(nothing)}"
                )


@dataclass
class TransformerConfig(ModelConfig):
    """What Transformers have, with memory or without."""

    n_head: int = _shaping(8, "attention heads", at_least=1, at_most=2**12)
    d_head: int = _shaping(64, "width of one head; n_head * d_head may differ from d_model", at_least=1, at_most=2**16)
    d_inner: int = _shaping(2048, "width of the position-wise feed-forward's hidden layer", at_least=1, at_most=2**24)
    dropatt: float = _rate(0.0, "dropout on attention probabilities")
    dropout_qkv: float = _rate(0.0, "dropout on queries, keys, values and the projected R")
    dropout_inner: float | None = _rate(None, "dropout after the feed-forward's ReLU; none: the same as dropout")
    pre_norm: bool = _shaping(False, "LayerNorm before each sub-layer instead of after it")
    layer_norm_eps: float = _shaping(1e-5, "epsilon of LayerNorm (the authors' TensorFlow code: 1e-12)", at_least=0)
    init: Literal["normal", "xavier"] = setting(
        "normal", "first weights. normal: the authors'; xavier: as Baevski and Auli's code has it"
    )

    title: ClassVar[str] = "Transformers"

    @property
    def embedding_scale(self) -> float:
        """sqrt(d_model), as in Vaswani et al. (2017)."""
        return math.sqrt(self.d_model)

    @property
    def first_weights(self) -> str:
        """`init`."""
        return self.init

    @property
    def has_dropout(self) -> bool:
        """See `ModelConfig.has_dropout`."""
        return self.dropout > 0 or self.dropatt > 0

    def validate(self) -> None:
        """See `ModelConfig.validate`."""
        super().validate()
        require(self.d_model % 2 == 0, "model.d_model", self.d_model, "an even number (R is half sines, half cosines)")

    def _layer_parameters(self, vocab_size: int) -> int:
        """W_q, W_k, W_v and W_o, the feed-forward's matrices and biases, and two LayerNorms, of every layer."""
        width, attention, inner = self.d_model, self.n_head * self.d_head, self.d_inner
        return self.n_layer * (4 * width * attention + 2 * width * inner + inner + width + 2 * 2 * width)


@dataclass
class TransformerXLConfig(TransformerConfig):
    """A Transformer-XL (Section 3 of the paper), or the same with the encoding of Shaw et al."""

    family: str = _family("transformer-xl")
    encoding: RelativeEncoding = _shaping("relative", _ENCODING)
    mem_len: int = setting(512, "positions M of hidden states carried from segment to segment", lacking=0)
    window: int | None = setting(None, "keys a query sees, itself included; none: all of memory and segment")
    clamp_len: int | None = setting(None, "distances above this one count as it; none: no clamp")
    max_distance: int = _shaping(
        64,
        "shaw: distances above this one share its vector",
        at_least=0,
        below=2**24,
        expected="0 or more positions",
        lacking=ANYTHING,
    )
    untie_r: bool = _shaping(False, "one pair of biases u and v a layer instead of one pair for all", lacking=ANYTHING)
    dropout_r: float | None = _rate(None, "dropout on the sinusoid R; none: the same as dropout", lacking=ANYTHING)
    attention: AttentionName = setting("auto", "attention backend; auto picks the fastest that supports the model")

    title: ClassVar[str] = "Transformer-XL (model.encoding relative or shaw)"
    tells_distances: ClassVar[bool] = True

    @property
    def display_name(self) -> str:
        """With its encoding, if that is not the paper's, and whether it is without memory."""
        name = "Transformer-XL" if self.encoding == "relative" else "Transformer with Shaw et al.'s encoding"
        return name if self.mem_len else f"{name} without memory"

    @property
    def score_terms(self) -> str:
        """All four; without u and v, two."""
        return "abcd" if self.encoding == "relative" else "ab"

    def weight_settings(self) -> dict[str, Any]:
        """See `ModelConfig.weight_settings`; the number of distances counts where they are learned."""
        settings = super().weight_settings()
        if self.encoding != "shaw":
            del settings["max_distance"]
        return settings

    def longest_distance(self, segment: int) -> int:
        """The largest distance between a query and a key that it sees, in segments of that many tokens."""
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

    def _layer_parameters(self, vocab_size: int) -> int:
        """The Transformer's; W_{k,R}, u and v, or the learned vectors of distances."""
        layers, attention = super()._layer_parameters(vocab_size), self.n_head * self.d_head
        if self.encoding == "shaw":
            return layers + self.n_layer * (self.max_distance + 1) * attention
        biases = (self.n_layer if self.untie_r else 1) * 2 * attention
        return layers + self.n_layer * self.d_model * attention + biases

    def validate_use(self, train: TrainConfig, evaluation: EvalConfig) -> None:
        """Every learned vector of a distance is met in training; another would be noise in a longer evaluation."""
        super().validate_use(train, evaluation)
        farthest = self.longest_distance(train.segment)
        if self.encoding == "shaw" and self.max_distance > farthest:
            raise UserError(
                f"model.max_distance is {self.max_distance}, but training sees no distance above {farthest} (mem_len "
                f"{self.mem_len}, segment {train.segment}), so that farther vectors would stay untrained; expected at "
                f"most {farthest}"
            )


@dataclass
class VanillaConfig(TransformerConfig):
    """A Transformer without memory, whose positions are those within a segment."""

    family: str = _family("vanilla")
    encoding: AbsoluteEncoding = _shaping("learned", _ENCODING)
    max_segment: int = _shaping(
        512, "without memory: tokens of the longest segment", at_least=1, expected="1 token or more", lacking=ANYTHING
    )
    layer_losses: bool = setting(
        False, "without memory: every layer predicts, layer l of n until l/(2n) of training is done (Al-Rfou et al.)"
    )
    n_target: int = setting(
        1,
        "without memory: tokens predicted at a position, the next and those after it",
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
        "it has no memory, for its positions are absolute: those of two segments could not be told apart (Section 3.3)"
    )

    @property
    def display_name(self) -> str:
        """By its encoding."""
        return "Vanilla Transformer" if self.encoding == "learned" else "Transformer with sinusoids at its input"

    @property
    def context(self) -> int:
        """`max_segment`."""
        return self.max_segment

    @property
    def n_auxiliary(self) -> int:
        """Classifiers of Al-Rfou et al.'s auxiliary losses (`txl.models.vanilla`)."""
        return (self.n_layer if self.layer_losses else 1) * self.n_target - 1

    @property
    def loss_depends_on_progress(self) -> bool:
        """With `layer_losses`, as layers stop to predict one after the other."""
        return self.layer_losses

    def weight_settings(self) -> dict[str, Any]:
        """See `ModelConfig.weight_settings`; the number of positions counts where they are learned."""
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
        names = ("auto", "compiled")
        require(self.attention in names, "model.attention", self.attention, f"{' or '.join(names)} without memory")
        if self.n_auxiliary and self.cutoffs:
            given = "model.layer_losses is true" if self.layer_losses else f"model.n_target is {self.n_target}"
            raise UserError(
                f"{given}, but model.cutoffs is {list(self.cutoffs)}: each auxiliary prediction has a plain softmax "
                f"of its own; expected no cutoffs"
            )

    def _layer_parameters(self, vocab_size: int) -> int:
        """The Transformer's; learned positions of every layer, and the classifiers of auxiliary losses."""
        learned = self.n_layer * self.max_segment * self.d_model if self.encoding == "learned" else 0
        return super()._layer_parameters(vocab_size) + learned + self.n_auxiliary * vocab_size * (self.d_model + 1)

    def validate_use(self, train: TrainConfig, evaluation: EvalConfig) -> None:
        """No segment is longer than there are positions, and all targets of one are read."""
        super().validate_use(train, evaluation)
        if train.loss == "last" and self.n_target > 1:
            raise UserError(
                f"train.loss is last, but model.n_target is {self.n_target}: what follows a segment's last target is "
                f"not read; expected full or half, or model.n_target 1"
            )
        for name, segment in (("train.segment", train.segment), ("eval.segment", evaluation.segment)):
            require(segment <= self.max_segment, name, segment, f"at most model.max_segment, {self.max_segment}")
        if train.random_segments and self.max_segment < train.segment + RANDOM_LENGTHS:
            raise UserError(
                f"train.random_segments draws segments longer than train.segment, {train.segment}, but positions end "
                f"at model.max_segment, {self.max_segment}; expected at least {train.segment + RANDOM_LENGTHS}"
            )


@dataclass
class RecurrentConfig(ModelConfig):
    """A recurrent network, whose state has a constant size."""

    family: str = _family("recurrent")
    kind: RecurrentKind = _shaping("lstm", "of recurrent network: lstm or qrnn", lacking="transformer")
    d_hidden: int | None = _shaping(
        None, "recurrent: units of every layer but the last; none: d_model", at_least=1, at_most=2**20, none="d_model"
    )
    d_last: int | None = _shaping(
        None,
        "recurrent: units of the last layer; none: d_model (others need n_softmax above 1)",
        at_least=1,
        at_most=2**20,
        none="d_model",
    )
    weight_drop: float = _rate(
        0.0, "recurrent: dropout of the weights, once a segment (lstm: the recurrent ones; qrnn: the convolution's)"
    )
    kernel_sizes: tuple[int, ...] = _shaping(
        (2,), "qrnn: tokens that each layer's convolution reads; the last number holds for all further layers"
    )
    zoneout: float = _rate(0.0, "qrnn: probability with which a unit keeps its state for a token")

    choice: ClassVar[str] = "kind"
    title: ClassVar[str] = "recurrent networks (model.kind lstm or qrnn)"
    constant_state: ClassVar[bool] = True
    no_memory: ClassVar[str] = "it carries a state of constant size, which has no positions to count"

    @property
    def display_name(self) -> str:
        """By its kind; AWD-LSTM where weights are dropped."""
        if self.kind == "qrnn":
            return "QRNN"
        return "AWD-LSTM" if self.weight_drop > 0 else "LSTM"

    @property
    def layer_width(self) -> int:
        """Units of every layer but the last."""
        return self.d_model if self.d_hidden is None else self.d_hidden

    @property
    def last_width(self) -> int:
        """Units of the last layer."""
        return self.d_last or self.d_model

    @property
    def widths(self) -> list[int]:
        """Features that enter the first layer, and units of each."""
        return [self.d_model, *[self.layer_width] * (self.n_layer - 1), self.last_width]

    @property
    def kernels(self) -> list[int]:
        """Tokens that the convolution of each layer of a QRNN reads."""
        given = list(self.kernel_sizes[: self.n_layer])
        return given + [given[-1]] * (self.n_layer - len(given))

    def validate(self) -> None:
        """See `ModelConfig.validate`."""
        super().validate()
        if self.kind == "lstm":
            for name in ("kernel_sizes", "zoneout"):
                value, default = getattr(self, name), self.__dataclass_fields__[name].default
                if value != default:
                    raise UserError(
                        f"model.{name} is {_shown(value)}, but model.kind is lstm, which has no use for it; leave it "
                        f"at its default, {_shown(default)}"
                    )
        sizes = self.kernel_sizes
        if self.kind == "qrnn" and not (1 <= len(sizes) <= self.n_layer and all(1 <= size <= 1024 for size in sizes)):
            raise UserError(
                f"model.kernel_sizes is {list(sizes)}; expected 1 to {self.n_layer} numbers from 1 to 1024, one for "
                f"each layer (the last holds for all further ones)"
            )
        if self.n_softmax == 1 and self.d_last not in (None, self.d_model):
            raise UserError(
                f"model.d_last is {self.d_last}, but model.n_softmax is 1; expected none or {self.d_model} without a "
                f"mixture of softmaxes"
            )

    def _layer_parameters(self, vocab_size: int) -> int:
        """LSTM: 4*H*(I + H) and two biases of 4*H a layer; QRNN: 3*H*K*I and a bias of 3*H; I inputs, H units."""
        widths = pairwise(self.widths)
        if self.kind == "lstm":
            return sum(4 * n_unit * (n_in + n_unit) + 8 * n_unit for n_in, n_unit in widths)
        return sum(3 * n_unit * (size * n_in + 1) for (n_in, n_unit), size in zip(widths, self.kernels, strict=True))


MODEL_FAMILIES: dict[str, type[ModelConfig]] = {
    "transformer-xl": TransformerXLConfig,
    "vanilla": VanillaConfig,
    "recurrent": RecurrentConfig,
}
"""The configuration of every family by its name."""
FamilyT = TypeVar("FamilyT", bound=ModelConfig)


@dataclass(frozen=True)
class ModelField:
    """A field of one family or of several."""

    item: dataclasses.Field[Any]
    hint: Any
    """Its type; of a field whose values differ between families, that of all of them."""
    owner: type[ModelConfig]
    """The class that declares it."""

    @property
    def lacking(self) -> Any:
        """The value that means the same as not having the field; `ANYTHING` where none changes anything."""
        return self.item.metadata.get("lacking", self.item.default)


def _model_fields() -> dict[str, ModelField]:
    hints = {"encoding": Encoding, "kind": Literal["transformer", "lstm", "qrnn"]}
    found: dict[str, ModelField] = {}
    for family in (ModelConfig, TransformerConfig, *MODEL_FAMILIES.values()):
        for item in dataclasses.fields(family):
            hint = hints.get(item.name, hints_of(family)[item.name])
            found.setdefault(item.name, ModelField(item, hint, family))
    return found


MODEL_FIELDS = _model_fields()
"""The fields of all families by name, those of every model first."""
_CHOOSE = ("family", "kind", "encoding")
"""Fields that choose a model rather than set something of it."""


def as_family(model: ModelConfig, family: type[FamilyT]) -> FamilyT:
    """A model of another family with the settings that both have; the others are left out.

    Args:
        model: stays as it is.
        family: its class. What `model` lacks has its default there, but for memory: without one, none.
    """
    if type(model) is family:
        return dataclasses.replace(model)
    values: dict[str, Any] = {}
    for item in dataclasses.fields(family):
        if item.name in _CHOOSE:
            continue
        if item.name in model.__dataclass_fields__:
            values[item.name] = getattr(model, item.name)
        elif item.metadata.get("lacking", ANYTHING) is not ANYTHING:
            values[item.name] = item.metadata["lacking"]
    return family(**values)


def model_with(model: ModelConfig, given: dict[str, Any], drop: bool = False) -> ModelConfig:
    """A copy with fields set; one that belongs to another family makes it a model of that family.

    Args:
        model: stays as it is.
        given: values by name.
        drop: settings of `model` that the other family lacks are left out rather than refused, but for a memory's.

    Raises:
        UserError: for a setting that the family lacks.
    """
    family = chosen_family(given, model)
    result = as_family(model, family)
    lacking = {}
    for name, value in given.items():
        if name in ("family", *family.__dataclass_fields__):
            object.__setattr__(result, name, value)
        else:
            lacking[name] = value
    refuse_lacking(result, lacking)
    kept = {*_CHOOSE, *given, *family.__dataclass_fields__}
    left = [item.name for item in dataclasses.fields(model) if item.name not in kept]
    carried = {name: getattr(model, name) for name in left if name in _LENGTHS or not drop}
    refuse_lacking(result, carried, carried=True)
    return result


def model_from_dict(values: Any) -> ModelConfig:
    """The inverse of `dataclasses.asdict`; missing fields take their defaults.

    Files that were written when there was one class for all families have the fields of all: `kind` and `encoding` then
    say which one it is, and the others' fields are left out.

    Raises:
        UserError: for a field that this version does not know or the family lacks, or a value of the wrong type.
    """
    if not isinstance(values, dict):
        raise UserError(f"configuration model: expected an object, found {values!r}")
    unknown = [name for name in values if name not in MODEL_FIELDS]
    if unknown:
        raise UserError(f"configuration field model.{unknown[0]} is not known to this version")
    given = {name: checked(MODEL_FIELDS[name].hint, value, f"model.{name}") for name, value in values.items()}
    family = chosen_family(given)
    own = [item.name for item in dataclasses.fields(family) if item.init]
    result = family(**{name: value for name, value in given.items() if name in own})
    others = {name: value for name, value in given.items() if name not in ("family", *own)}
    refuse_lacking(result, others, carried=True)
    return result


def refuse_lacking(model: ModelConfig, values: dict[str, Any], carried: bool = False) -> None:
    """Refuse settings of other families, where they say something.

    Args:
        model: the configuration that lacks them.
        values: fields of other families, by name.
        carried: whether nobody asked for them now: they stood in a configuration. Some do nothing there.

    Raises:
        UserError: naming the first.
    """
    for name, value in values.items():
        of = MODEL_FIELDS.get(name)
        if of is None:
            raise AttributeError(f"{type(model).__name__} has no field {name!r}")
        default = of.item.default if of.lacking is ANYTHING else of.lacking
        if value == default or (carried and of.lacking is ANYTHING):
            continue
        if name in _LENGTHS:
            model.refuse_lengths({name: value}, "model.")
        raise UserError(
            f"model.{name} is {_shown(value)}, but {model.chosen_by}, which has no use for it: it is a setting of "
            f"{of.owner.title}; leave it at its default, {_shown(default)}"
        )


def chosen_family(given: dict[str, Any], model: ModelConfig | None = None) -> type[ModelConfig]:
    """The family that `family` names, or else `kind` and `encoding`.

    Args:
        given: fields of a model by name.
        model: whose kind and encoding count where none is given.

    Raises:
        UserError: if there is no such family.
    """
    if "family" in given:
        if given["family"] not in MODEL_FAMILIES:
            raise UserError(f"model.family is {given['family']!r}; expected one of {', '.join(MODEL_FAMILIES)}")
        return MODEL_FAMILIES[given["family"]]
    if given.get("kind", getattr(model, "kind", "transformer")) != "transformer":
        return RecurrentConfig
    encoding = given.get("encoding", getattr(model, "encoding", "relative"))
    return VanillaConfig if encoding in get_args(AbsoluteEncoding) else TransformerXLConfig


def _shown(value: Any) -> str:
    """A value as the command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return shown(list(value) if isinstance(value, tuple) else value)
