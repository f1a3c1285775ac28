"""Perplexity and bits per character of a split, measured as the authors do, at any memory length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from txl.config import Limit
from txl.evaluation.recorded import Recordings
from txl.evaluation.stream import EvaluationResult, Progress, Settings, TokenIds, evaluation_mode, nll_step, read_lanes
from txl.models.language_model import LanguageModel
from txl.processes import Processes


def evaluate(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    segment: int = 128,
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
    batch_size: int = 10,
    max_tokens: int | None = None,
    exhaustive: bool = False,
    dtype: str = "float32",
    temperature: float = 1.0,
    progress: Progress | None = None,
    processes: Processes = Processes(),  # noqa: B008 (a value)
) -> EvaluationResult:
    """Return the mean loss of a model over a stream of tokens.

    Unset lengths default to the model's configuration, as in training; the command `txl eval` uses the run's test
    settings instead.

    Args:
        model: any language model; it is evaluated without dropout, and may be trained at the same time.
        tokens: tokens of a split, or any one-dimensional array or tensor of token ids.
        segment: number of tokens T of each lane in one step; with a window it does not change the result.
        mem_len: number of memory positions.
        window: number of keys that a query attends to. None: `mem_len` if given ("none" if that is 0), as the authors'
            `same_length`, otherwise the model's configuration. "none": all keys in memory and segment.
        clamp_len: largest distance that the model tells apart; "none": no clamp.
        batch_size: number of lanes B.
        max_tokens: number of tokens to read from the beginning of the stream; None: all.
        exhaustive: also score the targets that the lanes would drop.
        dtype: "float32", or "bfloat16" for autocast.
        temperature: softmax temperature X: probabilities are proportional to p^(1/X), as the authors tested on Penn
            Treebank (1.08). A value other than 1 needs more time and memory. A continuous cache is mixed in afterwards.
        progress: called with the number of this process's targets scored so far and their total number.
        processes: processes that evaluate together, each a part of the lanes; all processes return the whole result.
    """
    settings = Settings(segment, mem_len, window, clamp_len, batch_size, max_tokens, exhaustive, dtype, temperature)
    return evaluate_with(model, tokens, settings, progress, processes)


def evaluate_with(
    model: LanguageModel,
    tokens: TokenIds,
    settings: Settings,
    progress: Progress | None = None,
    processes: Processes = Processes(),  # noqa: B008 (a value)
    recordings: Recordings | None = None,
) -> EvaluationResult:
    """Return the mean loss of a model over a stream of tokens, as `evaluate`.

    `recordings` of earlier evaluations of the same model save the time in which a GPU's steps are recorded.
    """
    # Around the whole stream, so that autocast converts each weight once and not once a segment.
    with evaluation_mode(model, settings.dtype) as view:
        step = nll_step(view, settings.temperature, recordings)
        return read_lanes(view, tokens, settings, step, progress=progress, processes=processes)


def evaluate_memory_lengths(
    model: LanguageModel,
    tokens: TokenIds,
    mem_lens: Sequence[int],
    *,
    on_result: Callable[[EvaluationResult], None] | None = None,
    **settings: Any,
) -> list[EvaluationResult]:
    """Evaluate the same targets at several memory lengths, and call `on_result` with each result once it is computed.

    `settings` are keyword arguments of `evaluate`.

    Raises:
        UserError: before the first evaluation, if the model cannot have one of the memory lengths.
    """
    callbacks = {name: settings.pop(name) for name in ("progress", "processes") if name in settings}
    results = []
    for result in evaluate_at_lengths(model, tokens, mem_lens, Settings(**settings), **callbacks):
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


def evaluate_at_lengths(
    model: LanguageModel,
    tokens: TokenIds,
    mem_lens: Sequence[int],
    settings: Settings,
    progress: Progress | None = None,
    processes: Processes = Processes(),  # noqa: B008 (a value)
) -> Iterator[EvaluationResult]:
    """Yield the results of `evaluate_memory_lengths`."""
    at_length = [replace(settings, mem_len=mem_len) for mem_len in mem_lens]
    # All lengths are tried before the first evaluation, which may take hours.
    for changed in at_length:
        changed.init_state(model, 1)
    for changed in at_length:
        yield evaluate_with(model, tokens, changed, progress, processes)
