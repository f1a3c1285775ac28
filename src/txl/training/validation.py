"""Evaluations on the validation split during training."""

from __future__ import annotations

from collections.abc import Callable

from txl.config import RunConfig
from txl.data.corpora import Corpus
from txl.errors import Field, UserError
from txl.evaluation.perplexity import evaluate_with
from txl.evaluation.stream import EvaluationResult, Lanes, Settings
from txl.models.language_model import LanguageModel
from txl.training.parallel import TrainedModel


class ValidationStopped(Exception):
    """Exception for a stop that was requested during an evaluation."""


def check_validation_split(run: RunConfig, corpus: Corpus) -> None:
    """Refuse a validation split that cannot be evaluated, at the start rather than after thousands of steps."""
    if run.train.eval_every:
        tokens = corpus.tokens("valid")
        limit = run.train.eval_tokens
        try:
            Lanes.cut(len(tokens) if limit is None else min(limit, len(tokens)), run.validation_lanes)
        except UserError as error:
            lanes = Field("eval.batch_size" if run.train.eval_batch_size is None else "train.eval_batch_size")
            without = (" (", lanes, "), or leave these evaluations out with ", Field("train.eval_every", 0))
            raise UserError(("validation split: ", error, *without)) from None


def evaluate_in_training(
    model: LanguageModel, run: RunConfig, corpus: Corpus, trained: TrainedModel, stop: Callable[[], object]
) -> EvaluationResult:
    """Evaluate on the validation split with attention as long as in training: memory and segment have the same sum.

    The evaluation draws no random numbers and does not touch the lanes' memory, so later steps do not depend on it.

    Args:
        model: model to evaluate: the one that is trained, or the average of its weights.
        run: configuration of the run.
        corpus: corpus whose validation split is read.
        trained: model that is trained, in all processes.
        stop: function called repeatedly; the evaluation ends when its result is true.

    Raises:
        ValidationStopped: if `stop` returned something true.
    """
    train = run.train
    segment = min(run.eval.segment, train.segment) if run.model.mem_len else train.segment

    def progress(done: int, total: int) -> None:
        if stop():
            raise ValidationStopped

    settings = Settings(
        segment=segment,
        mem_len=run.model.mem_len + train.segment - segment,  # the last token of a segment sees as far as in training
        window=run.model.window or "none",
        batch_size=run.validation_lanes,
        max_tokens=train.eval_tokens,
        dtype="bfloat16" if train.dtype == "bfloat16" else "float32",
    )
    with trained.whole():
        return evaluate_with(model, corpus.tokens("valid"), settings, progress, trained.processes)
