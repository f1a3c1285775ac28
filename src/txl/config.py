"""The configuration of a run: dataclasses, JSON in and out, and the rules that their values must obey.

Every field is an option of the command line: ``config.model.mem_len`` is ``--model.mem-len``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from txl.errors import UserError
from txl.model_kinds import Kind, validate_kind, validate_no_positions

Unit = Literal["byte", "char", "word", "bpe"]
AttentionName = Literal["auto", "reference", "shifted", "factorised", "flex"]
LossName = Literal["full", "half", "last"]
Encoding = Literal["relative", "shaw", "learned", "sinusoid"]
RANDOM_LENGTHS = 40
"""By how much segments of random length may be longer than their mean: eight standard deviations."""


def _setting(default: Any, help: str) -> Any:
    """A dataclass field that carries the help text of its command-line option."""
    return field(default=default, metadata={"help": help})


@dataclass
class ModelConfig:
    """A Transformer-XL (Section 3 of the paper), or what it is compared with. Lengths count tokens, widths features.

    Fields that a kind of model does not have keep their defaults (`txl.model_kinds`).
    """

    encoding: Encoding = _setting(
        "relative",
        "of positions. relative: the paper's; shaw: learned relative vectors (Shaw et al.). Without memory: learned at "
        "every layer (Al-Rfou et al.), or sinusoid at the input (Vaswani et al.)",
    )
    max_distance: int = _setting(64, "shaw: distances above this one share its vector")
    max_segment: int = _setting(512, "without memory: tokens of the longest segment")

    n_layer: int = _setting(12, "number of layers N")
    d_model: int = _setting(512, "width of the hidden states (even: R is half sines, half cosines)")
    n_head: int = _setting(8, "attention heads")
    d_head: int = _setting(64, "width of one head; n_head * d_head may differ from d_model")
    d_inner: int = _setting(2048, "width of the position-wise feed-forward's hidden layer")
    d_embed: int | None = _setting(None, "width of the token embedding; none: d_model")
    mem_len: int = _setting(512, "positions M of hidden states carried from segment to segment")
    window: int | None = _setting(None, "keys a query sees, itself included; none: all of memory and segment")
    clamp_len: int | None = _setting(None, "distances above this one count as it; none: no clamp")
    dropout: float = _setting(0.1, "dropout on attention output and feed-forward, and wherever no other rate is set")
    dropatt: float = _setting(0.0, "dropout on attention probabilities")
    dropout_r: float | None = _setting(None, "dropout on the sinusoid R; none: the same as dropout")
    dropout_embed: float | None = _setting(None, "dropout on the scaled embeddings; none: the same as dropout")
    dropout_out: float | None = _setting(None, "dropout on the final hidden states; none: the same as dropout")
    dropout_qkv: float = _setting(0.0, "dropout on queries, keys, values and the projected R")
    dropout_words: float = _setting(0.0, "probability with which a word's embedding is zero for a whole step")
    locked_dropout: bool = _setting(
        False, "one dropout mask for all positions of a segment (variational), but for attention probabilities"
    )
    pre_norm: bool = _setting(False, "LayerNorm before each sub-layer instead of after it")
    layer_norm_eps: float = _setting(1e-5, "epsilon of LayerNorm (the authors' TensorFlow code: 1e-12)")
    untie_r: bool = _setting(False, "one pair of biases u and v a layer instead of one pair for all")
    cutoffs: tuple[int, ...] = _setting((), "adaptive softmax: vocabulary ids at which a new cluster begins")
    div_val: int = _setting(1, "adaptive embedding: each cluster is this many times narrower than the one before")
    tie_projections: Literal["all", "all_but_first", "tails", "none"] = _setting(
        "all", "clusters whose output projection is the embedding's own; tails: the others, the first has none"
    )
    tie_embeddings: bool = _setting(True, "the output's tables are the embedding's")
    init_std: float = _setting(0.02, "standard deviation of the initial weights")
    proj_init_std: float = _setting(0.01, "standard deviation of the initial embedding projections")
    activation_reg: float = _setting(0.0, "activation regularisation: adds this times the mean of h^2 to the loss")
    temporal_reg: float = _setting(
        0.0, "temporal activation regularisation: adds this times the mean of (h_t - h_{t-1})^2 to the loss"
    )
    layer_losses: bool = _setting(
        False, "without memory: every layer predicts, layer l of n until l/(2n) of training is done (Al-Rfou et al.)"
    )
    n_target: int = _setting(1, "without memory: tokens predicted at a position, the next and those after it")
    extra_target_weight: float = _setting(0.5, "weight of the loss of a target after the next one")
    attention: AttentionName = _setting("auto", "attention backend; auto picks the fastest that supports the model")
    dropout_inner: float | None = _setting(None, "dropout after the feed-forward's ReLU; none: the same as dropout")
    dropout_tail: float = _setting(0.0, "dropout on hidden states in the width of an adaptive softmax's tail cluster")
    init: Literal["normal", "xavier"] = _setting(
        "normal", "first weights. normal: the authors'; xavier: as Baevski and Auli's code has it"
    )

    kind: Kind = _setting("transformer", "transformer: the one that `encoding` names; or recurrent: lstm, qrnn")
    d_hidden: int | None = _setting(None, "recurrent: units of every layer but the last; none: d_model")
    d_last: int | None = _setting(
        None, "recurrent: units of the last layer; none: d_model (others need n_softmax above 1)"
    )
    weight_drop: float = _setting(
        0.0, "recurrent: dropout of the weights, once a segment (lstm: the recurrent ones; qrnn: the convolution's)"
    )
    kernel_sizes: tuple[int, ...] = _setting(
        (2,), "qrnn: tokens that each layer's convolution reads; the last number holds for all further layers"
    )
    zoneout: float = _setting(0.0, "qrnn: probability with which a unit keeps its state for a token")
    n_softmax: int = _setting(1, "softmaxes that are mixed (Yang et al. 2017)")
    dropout_latent: float | None = _setting(
        None, "mixture of softmaxes: dropout on each softmax's own hidden states; none: the same as dropout"
    )


@dataclass
class DataConfig:
    """Which text, and in which units it is read."""

    corpus: str = _setting("stdlib", "name of a corpus, or a file, folder or glob of the user's")
    unit: Unit = _setting("byte", "what one token is")
    source: str | None = _setting(None, "folder or archive to take a named corpus from instead of downloading it")
    vocab_size: int = _setting(8192, "number of tokens of a bpe vocabulary")
    min_count: int = _setting(1, "words seen less often in training become <unk>")
    max_words: int | None = _setting(None, "keep only this many of the most frequent words; none: all")
    like_original: bool = _setting(
        False, "prepare a named corpus as the authors' code does (enwik8 without newlines ...)"
    )
    boundary: Literal["end", "both"] = _setting("end", "which <S> around a sentence of lm1b is predicted")
    verify: bool = _setting(True, "refuse a named corpus whose counts or hashes are not the known ones")


@dataclass
class TrainConfig:
    """How a model is trained."""

    steps: int = _setting(400_000, "updates of the weights")
    batch_size: int = _setting(22, "lanes B read in parallel")
    micro_batches: int = _setting(1, "parts the lanes are divided into, one forward and backward each, to save memory")
    segment: int = _setting(512, "tokens T of each lane in one step")
    loss: LossName = _setting(
        "full", "positions of a segment that have a loss: all, the recent half (Table 6), or the last one"
    )
    random_segments: bool = _setting(False, "draw each segment's length around `segment`, as AWD-LSTM does")
    optimizer: Literal["adam", "adamw", "sgd"] = _setting("adam", "optimiser")
    momentum: float = _setting(0.0, "sgd: Nesterov's momentum; 0: none")
    learning_rate: float = _setting(2.5e-4, "peak learning rate")
    min_learning_rate: float = _setting(0.0, "learning rate at the end of the cosine, floor of inverse_sqrt")
    embedding_lr_factor: float = _setting(1.0, "the embedding tables' learning rate, relative to the others'")
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = _setting("cosine", "shape after the warm-up")
    warmup_steps: int = _setting(0, "steps of linear warm-up")
    beta1: float = _setting(0.9, "Adam's first-moment decay")
    beta2: float = _setting(0.999, "Adam's second-moment decay")
    eps: float = _setting(1e-8, "Adam's epsilon")
    weight_decay: float = _setting(0.0, "weight decay, on matrices only (adam: L2 in the gradient; adamw: decoupled)")
    clip: float = _setting(0.25, "largest norm of the gradient; 0: no clipping")
    average_from: int | None = _setting(
        None, "average the weights of all later steps, and use the average; the schedule falls until here; none: never"
    )
    average_patience: int | None = _setting(
        None,
        "begin to average when an evaluation is worse than the best of more than this many before; none: never",
    )
    average_mu: float | None = _setting(
        None, "weight of the newest weights in the average; none: 1/n at the n-th, which is the plain mean"
    )
    average_lr_factor: float = _setting(1.0, "factor of the learning rate while weights are averaged")
    dtype: Literal["float32", "bfloat16", "float64"] = _setting(
        "float32", "arithmetic: bfloat16 of the matrix products alone (autocast), float64 of everything"
    )
    parallel: Literal["ddp", "fsdp"] = _setting(
        "ddp", "several processes (torchrun): ddp keeps the whole model in each, fsdp shards it (FSDP2)"
    )
    compile: bool = _setting(False, "compile the layers (torch.compile); on a CPU this needs a C++ compiler")
    seed: int = _setting(1, "seed of weights and dropout")
    log_every: int = _setting(100, "steps between lines of the log")
    eval_every: int = _setting(4000, "steps between evaluations on the validation split; 0: never")
    eval_tokens: int | None = _setting(None, "tokens of the validation split used while training; none: all")
    eval_batch_size: int | None = _setting(None, "lanes of the evaluations while training; none: eval.batch_size")
    checkpoint_every: int = _setting(4000, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = _setting(2, "how many of the newest checkpoints are kept, beside the best")
    async_checkpoints: bool = _setting(True, "write checkpoints while training goes on, from a copy of the state")
    on_save_error: Literal["stop", "continue"] = _setting("stop", "when a checkpoint cannot be written (a full disk)")
    max_skipped: int = _setting(
        10, "updates in a row that are skipped because loss or gradient is not finite, before the run stops"
    )
    spike: float | None = _setting(
        10.0, "a loss this many standard deviations above the recent mean is reported as a spike; none: never"
    )
    on_spike: Literal["report", "rollback"] = _setting(
        "report", "rollback: go back to the last due checkpoint and on with the text behind the spike"
    )
    max_rollbacks: int = _setting(3, "times that a run goes back because of a spike")
    tensorboard: bool = _setting(False, "write the log's figures for TensorBoard too (needs its package)")


@dataclass
class EvalConfig:
    """How a trained model is evaluated, if the command does not say otherwise."""

    segment: int = _setting(128, "tokens of each lane in one step")
    mem_len: int = _setting(512, "positions of memory")
    window: int | None = _setting(None, "keys a query sees, itself included; none: all of memory and segment")
    clamp_len: int | None = _setting(None, "distances above this one count as it; none: no clamp")
    batch_size: int = _setting(10, "lanes read in parallel")
    temperature: float = _setting(1.0, "of the softmax: above 1 flattens the distribution")


@dataclass
class RunConfig:
    """Everything that determines a run, apart from the machine it happens on."""

    name: str = "custom"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """The inverse of `to_dict`; missing fields take their defaults.

        Raises:
            UserError: for a field that this version does not know, or a value of the wrong type.
        """
        return _from_dict(cls, values, prefix="")


def leaf_fields(config: Any, prefix: str = "") -> list[tuple[str, dataclasses.Field[Any], Any, Any]]:
    """Every field that is not itself a dataclass: (dotted name, field, its type, its value)."""
    leaves = []
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        name = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            leaves.extend(leaf_fields(value, f"{name}."))
        else:
            leaves.append((name, item, hints[item.name], value))
    return leaves


def differences(old: RunConfig, new: RunConfig, ignore: frozenset[str] = frozenset()) -> list[str]:
    """The fields in which two configurations differ, as "train.steps 100 -> 200", but for the names in `ignore`."""
    return [
        f"{name} {_shown(before)} -> {_shown(after)}"
        for (name, _, _, before), (_, _, _, after) in zip(leaf_fields(old), leaf_fields(new), strict=True)
        if before != after and name not in ignore
    ]


def with_options(config: RunConfig, options: dict[str, str]) -> RunConfig:
    """A copy of a configuration with fields set from text, as the command line gives them.

    Args:
        config: stays as it is.
        options: dotted names, "-" allowed for "_", to values: ``{"model.mem-len": "128", "model.window": "none"}``.

    Raises:
        UserError: for a name that is no field (with the nearest ones), or a value of the wrong type.
    """
    result = RunConfig.from_dict(config.to_dict())
    types_of = {name: hint for name, _, hint, _ in leaf_fields(result) if name != "name"}
    for option, text in options.items():
        name = option.replace("-", "_")
        if name not in types_of:
            near = difflib.get_close_matches(name, types_of, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join('--' + each.replace('_', '-') for each in near)}?" if near else ""
            raise UserError(f"unknown option --{option}{hint}")
        section, field_name = name.split(".")
        setattr(getattr(result, section), field_name, parse_value(types_of[name], text, f"--{name.replace('_', '-')}"))
    return result


def parse_value(expected: Any, text: str, name: str) -> Any:
    """A value of type `expected` from its text; "none" for None, commas in lists, true and false.

    Raises:
        UserError: naming the option, what came and what was expected.
    """
    if text.lower() == "none" and _allows_none(expected):
        return None
    expected = _without_none(expected)
    try:
        if expected is bool:
            return {"true": True, "false": False}[text.lower()]
        if typing.get_origin(expected) is tuple:
            return tuple(int(part) for part in text.split(",") if part.strip())
        if typing.get_origin(expected) is Literal:
            choices = typing.get_args(expected)
            return choices[choices.index(text)]
        return typing.cast(type[Any], expected)(text)
    except (ValueError, KeyError):
        raise UserError(f"{name} is {text!r}; expected {_described(expected)}") from None


def validate_model(model: ModelConfig) -> None:
    """The rules of a model's shape.

    Raises:
        UserError: naming the first field that breaks one.
    """
    most_of = {
        "n_layer": 10_000,
        "d_model": 2**20,
        "n_head": 2**12,
        "d_head": 2**16,
        "d_inner": 2**24,
        "div_val": 2**20,
    }
    for name, most in most_of.items():
        _require(1 <= getattr(model, name) <= most, f"model.{name}", getattr(model, name), f"1 or more, at most {most}")
    even = model.d_model % 2 == 0 or model.kind != "transformer"
    _require(even, "model.d_model", model.d_model, "an even number (R is half sines, half cosines)")
    if model.d_embed is not None:
        _require(model.d_embed >= 1, "model.d_embed", model.d_embed, "1 or more, or none for d_model")
    rates = [item.name for item in dataclasses.fields(model) if item.name.startswith("drop")]
    for name in rates:
        rate: float | None = getattr(model, name)
        _require(rate is None or 0 <= rate < 1, f"model.{name}", rate, "a probability from 0 up to but not including 1")
    for name in (
        "init_std", "proj_init_std", "activation_reg", "temporal_reg", "layer_norm_eps", "extra_target_weight"
    ):  # fmt: skip
        value = getattr(model, name)
        _require(0 <= value < math.inf, f"model.{name}", value, "0 or more")
    _validate_clusters(model)
    validate_lengths(model.mem_len, model.window, model.clamp_len, "model.")
    _require(model.max_segment >= 1, "model.max_segment", model.max_segment, "1 token or more")
    _require(0 <= model.max_distance < 2**24, "model.max_distance", model.max_distance, "0 or more positions")
    if has_absolute_positions(model):
        _require_no_memory(model, model, "model.")
    _validate_auxiliary(model)
    validate_kind(model)


def has_auxiliary_losses(model: ModelConfig) -> bool:
    """Whether it has classifiers that serve in training alone (`txl.models.auxiliary`)."""
    return model.layer_losses or model.n_target > 1


def _validate_auxiliary(model: ModelConfig) -> None:
    """The rules of Al-Rfou et al.'s auxiliary losses."""
    _require(1 <= model.n_target <= 2**10, "model.n_target", model.n_target, "1 (the next token) or a few more")
    if not has_auxiliary_losses(model):
        return
    given = "model.layer_losses is true" if model.layer_losses else f"model.n_target is {model.n_target}"
    if not has_absolute_positions(model):
        raise UserError(
            f"{given}, but model.encoding is {model.encoding}: auxiliary losses are those of a vanilla Transformer; "
            f"expected the encoding learned or sinusoid"
        )
    if model.cutoffs:
        raise UserError(
            f"{given}, but model.cutoffs is {list(model.cutoffs)}: each auxiliary prediction has a plain softmax of "
            f"its own; expected no cutoffs"
        )


def has_absolute_positions(model: ModelConfig) -> bool:
    """Whether positions are those within a segment, so that no memory can be read beside it (Section 3.3)."""
    return model.encoding in ("learned", "sinusoid")


def _require_no_memory(model: ModelConfig, lengths: ModelConfig | EvalConfig, prefix: str) -> None:
    """Absolute positions of two segments cannot be told apart (Section 3.3)."""
    for name, nothing in (("mem_len", 0), ("window", None), ("clamp_len", None)):
        if getattr(lengths, name) != nothing:
            raise UserError(
                f"{prefix}{name} is {getattr(lengths, name)}, but model.encoding is {model.encoding}: its positions "
                f"are absolute, and those of two segments could not be told apart (Section 3.3); expected "
                f"{_shown(nothing)}"
            )


def longest_distance(model: ModelConfig, segment: int) -> int:
    """The largest distance between a query and a key that it sees, in segments of that many tokens."""
    farthest = model.mem_len + segment - 1
    limits = [farthest, *([] if model.window is None else [model.window - 1])]
    return min([*limits, *([] if model.clamp_len is None else [model.clamp_len])])


def _require_trained_distances(model: ModelConfig, train: TrainConfig) -> None:
    """Every learned vector of a distance is met in training; one that is not would be noise in a longer evaluation."""
    farthest = longest_distance(model, train.segment)
    if model.max_distance > farthest:
        raise UserError(
            f"model.max_distance is {model.max_distance}, but training sees no distance above {farthest} (mem_len "
            f"{model.mem_len}, segment {train.segment}), so that farther vectors would stay untrained; expected at "
            f"most {farthest}"
        )


def _validate_clusters(model: ModelConfig) -> None:
    """The rules of an adaptive softmax that hold for every vocabulary."""
    if any(first >= second for first, second in pairwise((0, *model.cutoffs))):
        raise UserError(
            f"model.cutoffs is {list(model.cutoffs)}; expected numbers above 0 that increase strictly, or nothing"
        )
    d_embed = model.d_embed or model.d_model
    for cluster in range(len(model.cutoffs) + 1):
        if d_embed // model.div_val**cluster < 1:
            raise UserError(
                f"model.div_val is {model.div_val}: of {d_embed} embedding features cluster {cluster} would get none; "
                f"use a smaller div_val or fewer cutoffs"
            )


def validate_lengths(mem_len: int, window: int | None, clamp_len: int | None, prefix: str = "") -> None:
    """The rules of memory length, window and clamp.

    Raises:
        UserError: naming the first one that breaks a rule, with `prefix` in front of its name.
    """
    _require(mem_len >= 0, f"{prefix}mem_len", mem_len, "0 (no memory) or more positions")
    if window is not None:
        _require(window >= 1, f"{prefix}window", window, "1 (a query that sees itself) or more keys, or none")
        if mem_len < window - 1:
            raise UserError(
                f"{prefix}window {window} needs at least {window - 1} positions of memory, but {prefix}mem_len is "
                f"{mem_len}; raise mem_len or lower the window to at most {mem_len + 1}"
            )
    if clamp_len is not None:
        _require(clamp_len >= 0, f"{prefix}clamp_len", clamp_len, "0 or more positions, or none")


def validate(run: RunConfig) -> None:
    """The rules of a whole configuration, apart from those that depend on the data.

    Raises:
        UserError: naming the first field that breaks one.
    """
    validate_model(run.model)
    train, data = run.train, run.data
    for name in ("steps", "batch_size", "micro_batches", "segment", "log_every", "keep_checkpoints"):
        _require(getattr(train, name) >= 1, f"train.{name}", getattr(train, name), "1 or more")
    at_least_0 = ("warmup_steps", "eval_every", "checkpoint_every", "weight_decay", "clip", "min_learning_rate", "seed")
    for name in (*at_least_0, "max_skipped", "max_rollbacks"):
        _require(0 <= getattr(train, name) < math.inf, f"train.{name}", getattr(train, name), "0 or more")
    _require(train.seed < 2**63, "train.seed", train.seed, "a number below 2**63")
    for name in ("learning_rate", "embedding_lr_factor", "average_lr_factor"):
        _require(0 < getattr(train, name) < math.inf, f"train.{name}", getattr(train, name), "a number above 0")
    if train.spike is not None:
        _require(0 < train.spike < math.inf, "train.spike", train.spike, "standard deviations above 0, or none")
    if train.on_spike == "rollback" and not train.checkpoint_every:
        raise UserError("train.on_spike rollback needs checkpoints to go back to, but train.checkpoint_every is 0")
    _validate_averaging(train)
    _require(0 <= train.momentum < 1, "train.momentum", train.momentum, "from 0 up to but not including 1")
    if train.momentum > 0 and train.optimizer != "sgd":
        raise UserError(f"train.momentum is {train.momentum}, but train.optimizer is {train.optimizer}; expected sgd")
    _require(train.eps > 0, "train.eps", train.eps, "a number above 0")
    for name in ("beta1", "beta2"):
        _require(
            0 <= getattr(train, name) < 1, f"train.{name}", getattr(train, name), "from 0 up to but not including 1"
        )
    if train.eval_tokens is not None:
        _require(train.eval_tokens >= 2, "train.eval_tokens", train.eval_tokens, "2 or more tokens, or none for all")
    if train.eval_batch_size is not None:
        _require(train.eval_batch_size >= 1, "train.eval_batch_size", train.eval_batch_size, "1 lane or more, or none")
    if train.min_learning_rate > train.learning_rate:
        raise UserError(
            f"train.min_learning_rate is {train.min_learning_rate}; expected at most train.learning_rate, "
            f"{train.learning_rate}"
        )
    if train.batch_size % train.micro_batches:
        raise UserError(
            f"train.micro_batches is {train.micro_batches}; expected a divisor of train.batch_size, {train.batch_size}"
        )
    for name in ("vocab_size", "min_count"):
        _require(getattr(data, name) >= 1, f"data.{name}", getattr(data, name), "1 or more")
    if data.max_words is not None:
        _require(data.max_words >= 1, "data.max_words", data.max_words, "1 or more words, or none for all")
    for name in ("segment", "batch_size"):
        _require(getattr(run.eval, name) >= 1, f"eval.{name}", getattr(run.eval, name), "1 or more")
    if train.loss == "last" and run.model.n_target > 1:
        raise UserError(
            f"train.loss is last, but model.n_target is {run.model.n_target}: what follows a segment's last target is "
            f"not read; expected full or half, or model.n_target 1"
        )
    validate_lengths(run.eval.mem_len, run.eval.window, run.eval.clamp_len, "eval.")
    validate_temperature(run.eval.temperature, "eval.temperature")
    validate_no_positions(run.model.kind, run.eval, "eval.")
    if run.model.encoding == "shaw":
        _require_trained_distances(run.model, train)
    if has_absolute_positions(run.model):
        _require_no_memory(run.model, run.eval, "eval.")
        for name, segment in (("train.segment", train.segment), ("eval.segment", run.eval.segment)):
            _require(
                segment <= run.model.max_segment, name, segment, f"at most model.max_segment, {run.model.max_segment}"
            )
        if train.random_segments and run.model.max_segment < train.segment + RANDOM_LENGTHS:
            raise UserError(
                f"train.random_segments draws segments longer than train.segment, {train.segment}, but positions end "
                f"at model.max_segment, {run.model.max_segment}; expected at least {train.segment + RANDOM_LENGTHS}"
            )


def validate_temperature(temperature: float, name: str = "temperature") -> None:
    """A softmax's temperature is a number above 0.

    Raises:
        UserError: if it is not.
    """
    _require(0 < temperature < math.inf, name, temperature, "a number above 0 (1 leaves the distribution as it is)")


def _validate_averaging(train: TrainConfig) -> None:
    """The rules of the average of the weights."""
    begin, patience, mu = train.average_from, train.average_patience, train.average_mu
    if begin is not None and patience is not None:
        raise UserError(
            f"train.average_from is {begin} and train.average_patience {patience}; expected one of them: an average "
            f"begins at a step or when the validation stops improving"
        )
    if begin is not None:
        _require(0 <= begin < train.steps, "train.average_from", begin, f"a step below train.steps, {train.steps}")
    if patience is not None:
        _require(patience >= 1, "train.average_patience", patience, "1 or more evaluations")
        if not train.eval_every:
            raise UserError("train.average_patience needs evaluations while training, but train.eval_every is 0")
    if mu is not None:
        _require(0 < mu <= 1, "train.average_mu", mu, "above 0 and at most 1, or none for the plain mean")
        if begin is None and patience is None:
            raise UserError("train.average_mu is set, but nothing begins an average; set train.average_from as well")


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value}; expected {expected}")


def _from_dict(cls: type[Any], values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"configuration {prefix.rstrip('.') or 'file'}: expected an object, found {values!r}")
    hints = typing.get_type_hints(cls)
    unknown = [name for name in values if name not in hints]
    if unknown:
        raise UserError(f"configuration field {prefix}{unknown[0]} is not known to this version")
    arguments = {}
    for name, value in values.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            arguments[name] = _from_dict(typing.cast(type[Any], hint), value, f"{prefix}{name}.")
        else:
            arguments[name] = _checked(hint, value, f"{prefix}{name}")
    return cls(**arguments)


def _checked(hint: Any, value: Any, name: str) -> Any:
    """A JSON value as the field's type, if it is one."""
    if value is None and _allows_none(hint):
        return None
    expected = _without_none(hint)
    if typing.get_origin(expected) is tuple and isinstance(value, (list, tuple)):
        if all(type(item) is int for item in value):
            return tuple(value)
    elif typing.get_origin(expected) is Literal:
        if value in typing.get_args(expected):
            return value
    elif expected is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif type(value) is expected:
        return value
    raise UserError(f"configuration field {name} is {value!r}; expected {_described(expected)}")


def _allows_none(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)


def _without_none(hint: Any) -> Any:
    if not isinstance(hint, types.UnionType):
        return hint
    return next(each for each in typing.get_args(hint) if each is not type(None))


def _described(expected: Any) -> str:
    if typing.get_origin(expected) is Literal:
        return "one of " + ", ".join(typing.get_args(expected))
    if typing.get_origin(expected) is tuple:
        return "whole numbers separated by commas"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[expected]


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
