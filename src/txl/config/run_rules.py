"""The rules that a whole configuration must obey, apart from those that depend on the data."""

from __future__ import annotations

import math
from itertools import pairwise

from txl.config.kinds import validate_no_positions
from txl.config.model_rules import (
    has_absolute_positions,
    longest_distance,
    require_no_memory,
    validate_lengths,
    validate_model,
)
from txl.config.sections import DataConfig, EvalConfig, ModelConfig, RunConfig, TrainConfig
from txl.config.values import LARGEST, require
from txl.errors import UserError

RANDOM_LENGTHS = 40
"""By how much segments of random length may be longer than their mean: eight standard deviations."""


def validate(run: RunConfig) -> None:
    """The rules of a whole configuration, apart from those that depend on the data.

    Raises:
        UserError: naming the first field that breaks one.
    """
    validate_model(run.model)
    _validate_training(run.train)
    _validate_data(run.data)
    _validate_evaluation(run.eval)
    validate_no_positions(run.model.kind, run.eval, "eval.")
    if run.train.loss == "last" and run.model.n_target > 1:
        raise UserError(
            f"train.loss is last, but model.n_target is {run.model.n_target}: what follows a segment's last target is "
            f"not read; expected full or half, or model.n_target 1"
        )
    if run.model.encoding == "shaw":
        _require_trained_distances(run.model, run.train)
    if has_absolute_positions(run.model):
        _require_positions_in_reach(run)


def validate_temperature(temperature: float, name: str = "temperature") -> None:
    """A softmax's temperature is a number above 0.

    Raises:
        UserError: if it is not.
    """
    require(0 < temperature < math.inf, name, temperature, "a number above 0 (1 leaves the distribution as it is)")


def _validate_training(train: TrainConfig) -> None:
    """The rules of how it is trained."""
    for name in ("steps", "batch_size", "micro_batches", "segment", "log_every", "keep_checkpoints"):
        require(getattr(train, name) >= 1, f"train.{name}", getattr(train, name), "1 or more")
    at_least_0 = ("warmup_steps", "eval_every", "checkpoint_every", "weight_decay", "clip", "min_learning_rate", "seed")
    for name in (*at_least_0, "max_skipped", "max_rollbacks"):
        require(0 <= getattr(train, name) < math.inf, f"train.{name}", getattr(train, name), "0 or more")
    shifts = train.epoch_shift == 0 or train.epoch_shift % train.segment
    require(
        train.epoch_shift >= 0 and bool(shifts),
        "train.epoch_shift",
        train.epoch_shift,
        f"0, or a number that is no multiple of train.segment, {train.segment}: whole segments shift nothing",
    )
    require(train.seed <= LARGEST, "train.seed", train.seed, f"at most {LARGEST}")
    for name in ("learning_rate", "embedding_lr_factor", "average_lr_factor"):
        require(0 < getattr(train, name) < math.inf, f"train.{name}", getattr(train, name), "a number above 0")
    if train.spike is not None:
        require(0 < train.spike < math.inf, "train.spike", train.spike, "standard deviations above 0, or none")
    if train.on_spike == "rollback" and not train.checkpoint_every:
        raise UserError("train.on_spike rollback needs checkpoints to go back to, but train.checkpoint_every is 0")
    _validate_decay(train)
    _validate_averaging(train)
    require(0 <= train.momentum < 1, "train.momentum", train.momentum, "from 0 up to but not including 1")
    if train.momentum > 0 and train.optimizer != "sgd":
        raise UserError(f"train.momentum is {train.momentum}, but train.optimizer is {train.optimizer}; expected sgd")
    require(train.eps > 0, "train.eps", train.eps, "a number above 0")
    for name in ("beta1", "beta2"):
        require(
            0 <= getattr(train, name) < 1, f"train.{name}", getattr(train, name), "from 0 up to but not including 1"
        )
    if train.eval_tokens is not None:
        require(train.eval_tokens >= 2, "train.eval_tokens", train.eval_tokens, "2 or more tokens, or none for all")
    if train.eval_batch_size is not None:
        require(train.eval_batch_size >= 1, "train.eval_batch_size", train.eval_batch_size, "1 lane or more, or none")
    if train.min_learning_rate > train.learning_rate:
        raise UserError(
            f"train.min_learning_rate is {train.min_learning_rate}; expected at most train.learning_rate, "
            f"{train.learning_rate}"
        )
    if train.batch_size % train.micro_batches:
        raise UserError(
            f"train.micro_batches is {train.micro_batches}; expected a divisor of train.batch_size, {train.batch_size}"
        )


def _validate_data(data: DataConfig) -> None:
    """The rules of how a text is prepared."""
    require(data.vocab_size >= 1, "data.vocab_size", data.vocab_size, "1 or more")
    if data.min_count is not None:
        require(data.min_count >= 1, "data.min_count", data.min_count, "1 or more, or none")
    if data.max_words is not None:
        require(data.max_words >= 1, "data.max_words", data.max_words, "1 or more words, or none for all")


def _validate_evaluation(evaluation: EvalConfig) -> None:
    """The rules of how it is tested."""
    for name in ("segment", "batch_size"):
        require(getattr(evaluation, name) >= 1, f"eval.{name}", getattr(evaluation, name), "1 or more")
    validate_lengths(evaluation.mem_len, evaluation.window, evaluation.clamp_len, "eval.")
    validate_temperature(evaluation.temperature, "eval.temperature")


def _require_positions_in_reach(run: RunConfig) -> None:
    """Absolute positions are those within a segment, and there are only so many."""
    train, most = run.train, run.model.max_segment
    require_no_memory(run.model, run.eval, "eval.")
    for name, segment in (("train.segment", train.segment), ("eval.segment", run.eval.segment)):
        require(segment <= most, name, segment, f"at most model.max_segment, {most}")
    if train.random_segments and most < train.segment + RANDOM_LENGTHS:
        raise UserError(
            f"train.random_segments draws segments longer than train.segment, {train.segment}, but positions end "
            f"at model.max_segment, {most}; expected at least {train.segment + RANDOM_LENGTHS}"
        )


def _require_trained_distances(model: ModelConfig, train: TrainConfig) -> None:
    """Every learned vector of a distance is met in training; one that is not would be noise in a longer evaluation."""
    farthest = longest_distance(model, train.segment)
    if model.max_distance > farthest:
        raise UserError(
            f"model.max_distance is {model.max_distance}, but training sees no distance above {farthest} (mem_len "
            f"{model.mem_len}, segment {train.segment}), so that farther vectors would stay untrained; expected at "
            f"most {farthest}"
        )


def _validate_decay(train: TrainConfig) -> None:
    """The rules of a learning rate that is divided at given steps; those that training does not reach are none."""
    if train.schedule != "steps" and train.decay_at:
        raise UserError(
            f"train.decay_at is {list(train.decay_at)}, but train.schedule is {train.schedule}; expected steps (or no "
            f"numbers)"
        )
    if train.schedule == "steps" and not train.decay_at:
        raise UserError("train.schedule is steps, but train.decay_at names none; give one or more, or use constant")
    if any(first >= second for first, second in pairwise((0, *train.decay_at))):
        raise UserError(
            f"train.decay_at is {list(train.decay_at)}; expected numbers of updates above 0 that increase strictly"
        )


def _validate_averaging(train: TrainConfig) -> None:
    """The rules of the average of the weights."""
    begin, patience, mu = train.average_from, train.average_patience, train.average_mu
    if begin is not None and patience is not None:
        raise UserError(
            f"train.average_from is {begin} and train.average_patience {patience}; expected one of them: an average "
            f"begins at a step or when the validation stops improving"
        )
    if begin is not None:
        require(0 <= begin < train.steps, "train.average_from", begin, f"a step below train.steps, {train.steps}")
    if patience is not None:
        require(patience >= 1, "train.average_patience", patience, "1 or more evaluations")
        if not train.eval_every:
            raise UserError("train.average_patience needs evaluations while training, but train.eval_every is 0")
    if mu is not None:
        require(0 < mu <= 1, "train.average_mu", mu, "above 0 and at most 1, or none for the plain mean")
        if begin is None and patience is None:
            raise UserError("train.average_mu is set, but nothing begins an average; set train.average_from as well")
