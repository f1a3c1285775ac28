"""The sections of a configuration that all families share: data, training, evaluation.

Every field is an option: ``config.train.batch_size`` is ``--train.batch-size``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import ClassVar, Literal, TypedDict

from txl.config.values import LARGEST, Section, require, setting
from txl.errors import Field, UserError

Unit = Literal["byte", "char", "word", "bpe"]
LossName = Literal["full", "half", "last"]
WordRule = Literal["whitespace", "punctuation"]
Boundary = Literal["end", "both"]
# Choices of `txl.Adaptation`: rule, statistics, and the weights that dynamic evaluation changes.
AdaptationRule = Literal["rms", "sgd"]
StatisticsName = Literal["mean", "sum"]
AdaptedWeights = Literal["all", "feed-forward", "biases"]
# Largest number of tokens by which a segment of random length exceeds the mean: eight standard deviations.
RANDOM_LENGTHS = 40
# Window or clamp in a call: "none" is no limit, None is the configuration's value.
Limit = int | Literal["none"] | None


class LengthOptions(TypedDict):
    """Memory length, window and clamp as keyword arguments of the public functions; none is missing."""

    mem_len: int
    window: int | Literal["none"]
    clamp_len: int | Literal["none"]


@dataclass(frozen=True)
class Lengths:
    """Memory length, window and clamp. None is no limit here; `given` and `options` translate the word "none"."""

    mem_len: int = 0  # positions of memory carried from segment to segment
    window: int | None = None  # keys that a query attends to, itself included
    clamp_len: int | None = None  # largest distance that the model tells apart; larger ones count as this one

    @property
    def capacity(self) -> int:
        """Largest useful number of positions of memory: no query attends to positions beyond the window."""
        return self.mem_len if self.window is None else min(self.mem_len, self.window - 1)

    def given(self, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None) -> Lengths:
        """Return a copy with the given lengths; None keeps the present value."""
        limits = []
        for given, own in ((window, self.window), (clamp_len, self.clamp_len)):
            if isinstance(given, str) and given != "none":
                raise UserError(f"a window or clamp_len is {given!r}; expected a number or 'none'")
            limits.append(own if given is None else None if isinstance(given, str) else given)
        return Lengths(self.mem_len if mem_len is None else mem_len, *limits)

    def tested(self, mem_len: int | None = None, window: Limit = None, clamp_len: Limit = None) -> Lengths:
        """Return a copy with the given lengths for an evaluation: as `given`, with the rule of `same_length`."""
        return self.given(mem_len, same_length(mem_len, window), clamp_len)

    def options(self) -> LengthOptions:
        """Return the lengths as keyword arguments of the public functions, with "none" for no limit."""
        return {
            "mem_len": self.mem_len,
            "window": "none" if self.window is None else self.window,
            "clamp_len": "none" if self.clamp_len is None else self.clamp_len,
        }

    def validate(self, prefix: str = "") -> None:
        """Refuse the first length that breaks a rule, with `prefix` in front of its name."""
        for name, least, expected in (
            ("mem_len", 0, "0 (no memory) or more positions"),
            ("window", 1, "1 (a query that sees itself) or more keys, or none"),
            ("clamp_len", 0, "0 or more positions, or none"),
        ):
            length = getattr(self, name)
            is_whole = isinstance(length, Integral) and least <= int(length) <= LARGEST
            is_none = length is None and name != "mem_len"
            require(is_whole or is_none, f"{prefix}{name}", length, expected)
        if self.window is not None and self.mem_len < self.window - 1:
            raise UserError(
                f"{prefix}window {self.window} needs at least {self.window - 1} positions of memory, but "
                f"{prefix}mem_len is {self.mem_len}"
            )


def same_length(mem_len: int | None, window: Limit) -> Limit:
    """Return an evaluation's window: `mem_len` ("none" for 0) if only that is given, as the authors' `same_length`."""
    return window if window is not None or mem_len is None else mem_len or "none"


def validate_temperature(temperature: float, name: str = "temperature") -> None:
    """Check that a softmax's temperature is a number above 0."""
    require(0 < temperature < math.inf, name, temperature, "a number above 0 (1 leaves the distribution as it is)")


@dataclass
class DataConfig(Section):
    """The text of a run, and the unit in which it is read."""

    section: ClassVar[str] = "data"
    corpus: str = setting("stdlib", "name of a corpus, or your own file, folder or glob")
    unit: Unit = setting("byte", "unit of one token")
    source: str | None = setting(None, "folder or archive to take a named corpus from instead of downloading it")
    vocab_size: int = setting(8192, "number of tokens of a bpe vocabulary", at_least=1, at_most=2**24)
    min_count: int | None = setting(
        None,
        "words seen less often in training become <unk>; none: 2 in your own text, 1 in a named corpus",
        at_least=1,
        none="the usual",
        as_stored=True,
    )
    max_words: int | None = setting(
        None, "keep only this many of the most frequent words; none: all", at_least=1, none="all"
    )
    word_rule: WordRule | None = setting(
        None,
        "whitespace: white space separates words; punctuation: each punctuation mark is also a word of its own; none: "
        "punctuation in your own text, whitespace in a named corpus",
        as_stored=True,
    )
    normalise: bool | None = setting(
        None,
        "char, word, bpe: leave out byte order marks and read \\r\\n as \\n; none: yes for your own text, no for a "
        "named corpus",
        as_stored=True,
    )
    like_original: bool = setting(
        False, "prepare a named corpus as the authors' code does (enwik8 without newlines ...)"
    )
    boundary: Boundary = setting("end", "which <S> around a sentence of lm1b is predicted")
    verify: bool = setting(True, "refuse a named corpus whose counts or hashes are not the known ones")

    def validate(self) -> None:
        """Check the rules for the preparation of the text."""
        self.check_ranges()


@dataclass
class TrainConfig(Section):
    """The settings of training."""

    section: ClassVar[str] = "train"
    steps: int = setting(400_000, "updates of the weights", at_least=1)
    batch_size: int = setting(22, "lanes B read in parallel", at_least=1)
    micro_batches: int = setting(
        1, "parts of the lanes, each with its own forward and backward pass, to save memory", at_least=1
    )
    segment: int = setting(512, "tokens T of each lane in one step", at_least=1)
    backprop_segments: int = setting(
        1,
        "consecutive segments of a step, with gradients through the memory between them; 1: none flow into memory",
        at_least=1,
    )
    reset_memory: float = setting(
        0.0,
        "probability that a lane's memory is emptied before a step, so that the model also learns to begin a text",
        at_least=0,
        below=1,
    )
    loss: LossName = setting(
        "full", "positions of a segment that have a loss: all, the recent half (Table 6), or the last one"
    )
    epoch_shift: int = setting(
        0, "tokens by which each pass over the text begins later than the one before, so that segments begin elsewhere"
    )
    random_segments: bool = setting(False, "draw each segment's length around `segment`, as AWD-LSTM does")
    optimizer: Literal["adam", "adamw", "sgd", "muon"] = setting(
        "adam", "optimiser; muon: Muon for the layers' matrices, AdamW with the same learning rate for everything else"
    )
    momentum: float = setting(0.0, "sgd: Nesterov's momentum; 0: none", at_least=0, below=1)
    learning_rate: float = setting(2.5e-4, "peak learning rate", above=0)
    min_learning_rate: float = setting(
        0.0, "learning rate at the end of cosine and linear, floor of inverse_sqrt, steps and plateau", at_least=0
    )
    embedding_lr_factor: float = setting(1.0, "the embedding tables' learning rate, relative to the others'", above=0)
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant", "steps", "plateau"] = setting(
        "cosine",
        "learning rate after the warm-up. cosine: falls to min_learning_rate; linear: constant, then falls linearly "
        "to min_learning_rate over the last decay_share; inverse_sqrt: falls with the root of the step; constant; "
        "steps: divided by ten at decay_at; plateau: as linear, and divided by four after plateau_patience evaluations "
        "without a new best",
    )
    decay_share: float = setting(
        0.7, "linear and plateau: share of training, at its end, over which the rate falls", above=0, at_most=1
    )
    plateau_patience: int = setting(
        1,
        "plateau: evaluations in a row without a new best after which the learning rate is divided by four",
        at_least=1,
    )
    decay_at: tuple[int, ...] = setting((), "schedule steps: updates after which the learning rate is divided by ten")
    warmup_steps: int = setting(0, "steps of linear warm-up", at_least=0)
    beta1: float = setting(0.9, "Adam's first-moment decay", at_least=0, below=1)
    beta2: float = setting(0.999, "Adam's second-moment decay", at_least=0, below=1)
    eps: float = setting(1e-8, "Adam's epsilon", above=0)
    weight_decay: float = setting(
        0.0, "weight decay, on matrices only (adam: L2 in the gradient; adamw, muon: decoupled)", at_least=0
    )
    clip: float = setting(0.25, "largest norm of the gradient; 0: no clipping", at_least=0)
    average_from: int | None = setting(
        None, "average the weights from this step on and use the average; the schedule ends there; none: never"
    )
    average_patience: int | None = setting(
        None,
        "start to average when the validation loss is above the best of the evaluations made more than this many "
        "evaluations before; none: never",
        at_least=1,
    )
    average_mu: float | None = setting(
        None,
        "weight of the newest weights in the average; none: plain mean (1/n for the n-th)",
        above=0,
        at_most=1,
        none="the plain mean",
    )
    average_lr_factor: float = setting(1.0, "factor of the learning rate while weights are averaged", above=0)
    patience: int | None = setting(
        None,
        "stop after this many evaluations in a row without a new best; none: only after all steps",
        at_least=1,
        none="no early stop",
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = setting(
        "float32",
        "number format; bfloat16, float16: of matrix products only (autocast), float16 with dynamic loss scaling for "
        "GPUs without bfloat16; float64: of everything",
    )
    parallel: Literal["ddp", "fsdp"] = setting(
        "ddp",
        "several processes (torchrun): ddp keeps the whole model in each, fsdp shards it (FSDP2)",
        may_change=True,
    )
    compile: bool = setting(False, "compile the layers (torch.compile); on a CPU this needs a C++ compiler")
    capture: bool = setting(
        False, "record whole steps as a CUDA graph once the memory is full; needs an NVIDIA GPU", may_change=True
    )
    tf32: bool = setting(False, "compute a GPU's float32 matrix products in TF32, whose factors have 10 bits")
    seed: int = setting(
        1,
        "seed of weights, dropout, emptied lanes, random segment lengths and the order of sentences",
        at_least=0,
        at_most=LARGEST,
    )
    log_every: int = setting(100, "steps between lines of the log", at_least=1, may_change=True)
    eval_every: int = setting(
        4000, "steps between evaluations on the validation split; 0: never", at_least=0, may_change=True
    )
    eval_tokens: int | None = setting(
        None, "tokens of the validation split used while training; none: all", at_least=2, none="all"
    )
    eval_batch_size: int | None = setting(
        None, "lanes of the evaluations while training; none: eval.batch_size", at_least=1, none="eval.batch_size"
    )
    checkpoint_every: int = setting(4000, "steps between checkpoints; 0: only at the end", at_least=0, may_change=True)
    keep_checkpoints: int = setting(
        2, "how many of the newest checkpoints are kept, beside the best", at_least=1, may_change=True
    )
    async_checkpoints: bool = setting(
        True, "write checkpoints from a copy of the state, while training continues", may_change=True
    )
    on_save_error: Literal["stop", "continue"] = setting(
        "stop", "what to do when a checkpoint cannot be written (a full disk)", may_change=True
    )
    max_skipped: int = setting(
        10,
        "updates in a row that may be skipped because loss or gradient is not finite; with one more the run stops",
        at_least=0,
        may_change=True,
    )
    spike: float | None = setting(
        10.0,
        "a loss this many standard deviations above the recent mean is reported as a spike; none: never",
        above=0,
        none="no report",
    )
    on_spike: Literal["report", "rollback"] = setting(
        "report", "rollback: return to the last scheduled checkpoint and continue with the text after the spike"
    )
    max_rollbacks: int = setting(3, "times that a run goes back because of a spike", at_least=0)
    planned_minutes: float | None = setting(
        None,
        "planned minutes of training and its evaluations; if they will take a tenth longer, a run for minutes gets "
        "fewer steps",
        above=0,
        none="no plan",
        may_change=True,
    )
    tensorboard: bool = setting(
        False, "write the log's figures for TensorBoard too (needs its package)", may_change=True
    )

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens that one step reads in all lanes and segments; fewer at the end of a pass over the text."""
        return self.batch_size * self.segment * self.backprop_segments

    @property
    def step_lengths(self) -> tuple[int, ...] | None:
        """Lengths of the segments of one step; None if a step has one segment."""
        return None if self.backprop_segments == 1 else (self.segment,) * self.backprop_segments

    @property
    def averages(self) -> bool:
        """True if the weights are averaged in the later part of training."""
        return self.average_from is not None or self.average_patience is not None

    @property
    def follows_validation(self) -> bool:
        """True if the results of evaluations influence training; their schedule must then not change during a run."""
        return self.average_patience is not None or self.patience is not None or self.schedule == "plateau"

    def validate(self) -> None:
        """Check the rules for the settings of training."""
        self.check_ranges()
        one_segment = self.backprop_segments == 1
        self.require(one_segment or not self.capture, "capture", "false with several train.backprop_segments")
        but = f"train.reset_memory, {self.reset_memory}, makes steps differ"
        is_fixed = not (self.reset_memory and self.compile)
        self.require(is_fixed, "compile", ("false, or ", Field("train.reset_memory", 0)), but)
        # A shift lets passes over the text begin at different places; whole segments shift nothing.
        by_loss = {"full": 0, "half": self.segment - self.segment // 2, "last": 1}[self.loss]
        shift, added = self.epoch_shift, f", also with the {by_loss} of train.loss {self.loss} added" if by_loss else ""
        shifts = shift == 0 or (shift > 0 and shift % self.segment > 0 and (shift + by_loss) % self.segment > 0)
        expected = f"0, or a number that is no multiple of train.segment, {self.segment}{added}"
        self.require(shifts, "epoch_shift", expected)
        can_go_back = self.on_spike == "report" or self.checkpoint_every > 0
        self.require(can_go_back, "on_spike", "report", "train.checkpoint_every is 0")
        is_plateau, in_steps, chosen = (
            self.schedule == "plateau",
            bool(self.decay_at),
            f"train.schedule is {self.schedule}",
        )
        self.require(is_plateau or self.plateau_patience == 1, "plateau_patience", "plateau (or 1)", chosen)
        has_steps = self.schedule == "steps"
        self.require(has_steps or not in_steps, "decay_at", "steps (or no numbers)", chosen)
        self.require(in_steps or not has_steps, "schedule", "constant, or steps", "train.decay_at is empty")
        increases = all(first < second for first, second in pairwise((0, *self.decay_at)))  # perhaps beyond the end
        self.require(increases, "decay_at", "numbers of updates above 0 that increase strictly")
        patience = self.average_patience
        is_one = self.average_from is None or patience is None
        self.require(is_one, "average_from", "one of them", f"train.average_patience is {patience}")
        is_step = self.average_from is None or 0 <= self.average_from < self.steps
        self.require(is_step, "average_from", f"a step below train.steps, {self.steps}")
        for name, is_used in (
            ("average_mu", self.average_mu is not None),
            ("average_lr_factor", self.average_lr_factor != 1),
        ):
            self.require(self.averages or not is_used, name, "train.average_from", "nothing starts the averaging")
        evaluates, never = self.eval_every > 0, "train.eval_every is 0"
        self.require(evaluates or patience is None, "average_patience", "none", never)
        self.require(evaluates or self.patience is None, "patience", "none", never)
        self.require(evaluates or not is_plateau, "schedule", "another one", never)
        is_sgd = self.optimizer == "sgd"
        self.require(is_sgd or self.momentum == 0, "momentum", "sgd", f"train.optimizer is {self.optimizer}")
        rate = self.learning_rate
        self.require(self.min_learning_rate <= rate, "min_learning_rate", f"at most train.learning_rate, {rate}")
        divides = self.batch_size % self.micro_batches == 0
        self.require(divides, "micro_batches", f"a divisor of train.batch_size, {self.batch_size}")


@dataclass
class EvalConfig(Section):
    """Default settings of an evaluation; command-line options override them."""

    section: ClassVar[str] = "eval"
    segment: int = setting(128, "tokens of each lane in one step", at_least=1)
    mem_len: int = setting(512, "positions of memory")
    window: int | None = setting(None, "keys a query sees, itself included; none: all of memory and segment")
    clamp_len: int | None = setting(None, "largest distance; greater ones count as this one; none: no clamp")
    batch_size: int = setting(10, "lanes read in parallel", at_least=1)
    temperature: float = setting(1.0, "softmax temperature; above 1 flattens the distribution")

    @property
    def lengths(self) -> Lengths:
        """Memory length, window and clamp."""
        return Lengths(self.mem_len, self.window, self.clamp_len)

    def validate(self) -> None:
        """Check the rules for the settings of an evaluation."""
        self.check_ranges()
        self.lengths.validate("eval.")
        validate_temperature(self.temperature, "eval.temperature")
