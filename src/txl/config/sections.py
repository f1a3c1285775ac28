"""The sections of a configuration. Every field is an option: ``config.model.mem_len`` is ``--model.mem-len``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from txl.config.kinds import Kind
from txl.config.values import from_plain

Unit = Literal["byte", "char", "word", "bpe"]
AttentionName = Literal["auto", "reference", "shifted", "compiled", "factorised", "flex"]
LossName = Literal["full", "half", "last"]
Encoding = Literal["relative", "shaw", "learned", "sinusoid"]


def _setting(default: Any, help: str) -> Any:
    """A dataclass field that carries the help text of its command-line option."""
    return field(default=default, metadata={"help": help})


@dataclass
class ModelConfig:
    """A Transformer-XL (Section 3 of the paper), or what it is compared with. Lengths count tokens, widths features.

    Fields that a kind of model does not have keep their defaults (`txl.config.kinds`).
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
    epoch_shift: int = _setting(
        0, "tokens by which each pass over the text begins later than the one before, so that segments begin elsewhere"
    )
    random_segments: bool = _setting(False, "draw each segment's length around `segment`, as AWD-LSTM does")
    optimizer: Literal["adam", "adamw", "sgd"] = _setting("adam", "optimiser")
    momentum: float = _setting(0.0, "sgd: Nesterov's momentum; 0: none")
    learning_rate: float = _setting(2.5e-4, "peak learning rate")
    min_learning_rate: float = _setting(0.0, "learning rate at the end of the cosine, floor of inverse_sqrt and steps")
    embedding_lr_factor: float = _setting(1.0, "the embedding tables' learning rate, relative to the others'")
    schedule: Literal["cosine", "inverse_sqrt", "constant", "steps"] = _setting("cosine", "shape after the warm-up")
    decay_at: tuple[int, ...] = _setting((), "schedule steps: updates after which the learning rate is divided by ten")
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
        return from_plain(cls, values, prefix="")
