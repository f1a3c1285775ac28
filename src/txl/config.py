"""The configuration of a run: dataclasses, JSON in and out, and the rules that their values must obey.

Every field is an option of the command line: ``config.model.mem_len`` is ``--model.mem-len``.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from txl.errors import UserError

Unit = Literal["byte", "char", "word", "bpe"]
AttentionName = Literal["auto", "reference", "shifted"]


def _setting(default: Any, help: str) -> Any:
    """A dataclass field that carries the help text of its command-line option."""
    return field(default=default, metadata={"help": help})


@dataclass
class ModelConfig:
    """A Transformer-XL (Section 3 of the paper). Lengths count tokens, widths count features."""

    n_layer: int = _setting(12, "number of layers N")
    d_model: int = _setting(512, "width of the hidden states (even: R is half sines, half cosines)")
    n_head: int = _setting(8, "attention heads")
    d_head: int = _setting(64, "width of one head; n_head * d_head may differ from d_model")
    d_inner: int = _setting(2048, "width of the position-wise feed-forward's hidden layer")
    d_embed: int | None = _setting(None, "width of the token embedding; none: d_model")
    mem_len: int = _setting(512, "positions M of hidden states carried from segment to segment")
    window: int | None = _setting(None, "keys a query sees, itself included; none: all of memory and segment")
    clamp_len: int | None = _setting(None, "distances above this one count as it; none: no clamp")
    dropout: float = _setting(0.1, "dropout on embeddings, attention output, feed-forward and final hidden states")
    dropatt: float = _setting(0.0, "dropout on attention probabilities")
    dropout_r: float | None = _setting(None, "dropout on the sinusoid R; none: the same as dropout")
    pre_norm: bool = _setting(False, "LayerNorm before each sub-layer instead of after it")
    untie_r: bool = _setting(False, "one pair of biases u and v a layer instead of one pair for all")
    cutoffs: tuple[int, ...] = _setting((), "adaptive softmax: vocabulary ids at which a new cluster begins")
    div_val: int = _setting(1, "adaptive embedding: each cluster is this many times narrower than the one before")
    init_std: float = _setting(0.02, "standard deviation of the initial weights")
    proj_init_std: float = _setting(0.01, "standard deviation of the initial embedding projections")
    attention: AttentionName = _setting("auto", "attention backend; auto picks the fastest that supports the model")


@dataclass
class DataConfig:
    """Which text, and in which units it is read."""

    corpus: str = _setting("stdlib", "name of a corpus, or a file, folder or glob of the user's")
    unit: Unit = _setting("byte", "what one token is")
    source: str | None = _setting(None, "folder or archive to take a named corpus from instead of downloading it")
    vocab_size: int = _setting(8192, "number of tokens of a bpe vocabulary")
    min_count: int = _setting(1, "words seen less often in training become <unk>")
    max_words: int | None = _setting(None, "keep only this many of the most frequent words; none: all")


@dataclass
class TrainConfig:
    """How a model is trained."""

    steps: int = _setting(400_000, "updates of the weights")
    batch_size: int = _setting(22, "lanes B read in parallel")
    micro_batches: int = _setting(1, "parts the lanes are divided into, one forward and backward each, to save memory")
    segment: int = _setting(512, "tokens T of each lane in one step")
    random_segments: bool = _setting(False, "draw each segment's length around `segment`, as AWD-LSTM does")
    optimizer: Literal["adam", "adamw"] = _setting("adam", "optimiser")
    learning_rate: float = _setting(2.5e-4, "peak learning rate")
    min_learning_rate: float = _setting(0.0, "learning rate at the end of the cosine, floor of inverse_sqrt")
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = _setting("cosine", "shape after the warm-up")
    warmup_steps: int = _setting(0, "steps of linear warm-up")
    beta1: float = _setting(0.9, "Adam's first-moment decay")
    beta2: float = _setting(0.999, "Adam's second-moment decay")
    eps: float = _setting(1e-8, "Adam's epsilon")
    weight_decay: float = _setting(0.0, "weight decay, on matrices only (adam: L2 in the gradient; adamw: decoupled)")
    clip: float = _setting(0.25, "largest norm of the gradient; 0: no clipping")
    dtype: Literal["float32", "bfloat16"] = _setting("float32", "arithmetic of the matrix products (autocast)")
    seed: int = _setting(1, "seed of weights and dropout")
    log_every: int = _setting(100, "steps between lines of the log")
    eval_every: int = _setting(4000, "steps between evaluations on the validation split; 0: never")
    eval_tokens: int | None = _setting(None, "tokens of the validation split used while training; none: all")
    checkpoint_every: int = _setting(4000, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = _setting(2, "how many of the newest checkpoints are kept, beside the best")


@dataclass
class EvalConfig:
    """How a trained model is evaluated, if the command does not say otherwise."""

    segment: int = _setting(128, "tokens of each lane in one step")
    mem_len: int = _setting(512, "positions of memory")
    window: int | None = _setting(None, "keys a query sees, itself included; none: all of memory and segment")
    clamp_len: int | None = _setting(None, "distances above this one count as it; none: no clamp")
    batch_size: int = _setting(10, "lanes read in parallel")


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
