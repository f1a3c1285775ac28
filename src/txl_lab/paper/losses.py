"""Losses of a trained model at an attention length, for models with and without memory."""

from __future__ import annotations

from dataclasses import replace

from txl.config import RunConfig
from txl.data.prepared import Tokens
from txl.evaluation.perplexity import evaluate_with
from txl.evaluation.sliding import evaluate_sliding
from txl.evaluation.stream import EvaluationResult, Settings
from txl.models.family import FamilyModel

WINDOWS = 64  # number of windows that a sliding evaluation computes at once


def loss_at(
    model: FamilyModel, run: RunConfig, tokens: Tokens, length: int, max_tokens: int | None
) -> EvaluationResult:
    """Return the mean loss of all tokens except the first, at an attention length.

    A model that was trained with memory gets a memory and a window of this length. A model that was trained without
    memory reads windows of this length that slide by one token. A recurrent network carries its state and needs no
    length.
    """
    if not run.model.carries_state:
        return evaluate_sliding(model, tokens, context=length, batch_size=WINDOWS, max_tokens=max_tokens)
    mem_len = 0 if run.model.constant_state else length
    return loss_as_tested(model, run, tokens, Settings(mem_len=mem_len, clamp_len=run.eval.clamp_len), max_tokens)


def loss_as_tested(
    model: FamilyModel, run: RunConfig, tokens: Tokens, lengths: Settings, max_tokens: int | None
) -> EvaluationResult:
    """Return the mean loss of all tokens except the first, with the given lengths and the run's other test settings.

    If only part of the split is read, it is read in one lane. Several lanes would each begin with an empty memory, and
    in short lanes a long memory would never fill, whereas a sliding window always has its full length.
    """
    settings = replace(
        lengths,
        segment=run.eval.segment,
        batch_size=run.eval.batch_size if max_tokens is None else 1,
        max_tokens=max_tokens,
        exhaustive=True,
        temperature=run.eval.temperature,
    )
    return evaluate_with(model, tokens, settings)


def described(run: RunConfig, length: int) -> str:
    """Return in words how `loss_at` reads."""
    if run.model.constant_state:
        return "state carried along"
    return f"attention length {length}" + ("" if run.model.mem_len else ", sliding by one token")
