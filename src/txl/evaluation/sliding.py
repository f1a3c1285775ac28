"""Evaluation by a window that slides by one token and is recomputed each time (Section 3.1; Al-Rfou et al. 2018).

The paper tests the vanilla Transformer in this way: every target is predicted from exactly the `context` tokens before
it, without memory. Such an evaluation costs `context` times as much as reading the text once.

Shapes: B windows, L tokens of a window, C context lengths of each target.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from txl.config import Limit
from txl.errors import UserError
from txl.evaluation.stream import (
    EvaluationResult,
    Progress,
    Settings,
    TokenIds,
    check_ids,
    checked_ids,
    evaluation_mode,
    result_of,
    sum_losses,
)
from txl.models.language_model import LanguageModel, State

WINDOWS = 16  # windows that are computed at once, if nothing else is asked for


def evaluate_sliding(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    context: int,
    batch_size: int = WINDOWS,
    max_tokens: int | None = None,
    clamp_len: Limit = None,
    dtype: str = "float32",
    temperature: float = 1.0,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Return the mean loss of a model over a stream, each target predicted from the `context` tokens before it.

    The first `context` targets are predicted from the fewer tokens before them. Every token except the first is a
    target.

    Args:
        model: any language model; memory is not used.
        tokens: tokens of a split, or any one-dimensional array or tensor of token ids.
        context: window length L in tokens.
        batch_size: number of windows B computed at once.
        max_tokens: number of tokens to read from the beginning of the stream; None: all.
        clamp_len: largest distance that the model tells apart; None: the model's configuration; "none": no clamp.
        dtype: "float32", or "bfloat16" for autocast.
        temperature: softmax temperature, as for `evaluate`.
        progress: called with the number of targets scored so far and their total number.
    """
    settings = Settings(1, None, None, clamp_len, batch_size, max_tokens, True, dtype, temperature)
    return evaluate_sliding_with(model, tokens, context, settings, progress)


def evaluate_sliding_with(
    model: LanguageModel, tokens: TokenIds, context: int, settings: Settings, progress: Progress | None = None
) -> EvaluationResult:
    """Return the result of `evaluate_sliding` for one value of settings, whose segment and memory do not matter."""
    start, context = time.perf_counter(), _positive("context", context)
    settings = replace(settings, segment=context, mem_len=0, window="none", exhaustive=True)
    ids = _ids(model, tokens, settings)
    n_first = min(context, len(ids) - 1)
    with evaluation_mode(model, settings.dtype) as view:
        empty = settings.init_state(view, 1)
        # One window has all targets with fewer than `context` tokens before them: it is the beginning of the text.
        windows = chain(
            window_losses(view, ids, np.arange(1, n_first + 1), [context], settings, empty),
            window_losses(view, ids, np.arange(n_first + 1, len(ids)), [context], settings, empty),
        )
        total = sum_losses(((losses, len(losses)) for _, losses, _ in windows), len(ids) - 1, progress)
    seconds = time.perf_counter() - start
    return replace(result_of(model, tokens, settings, empty.lengths, total, seconds), sliding=True)


def losses_at_context(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    context: int,
    targets: Sequence[int] | range,
    batch_size: int = WINDOWS,
    window: Limit = "none",
    clamp_len: Limit = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Float64[Tensor, " targets"]:
    """Return l(c,t) = -log P(x_t | x_{t-1}, ..., x_{t-c}) in nats for chosen targets, on the CPU (Appendix C).

    For each target, the model reads exactly `context` tokens, starting with empty memory. A model with memory therefore
    sees no more than a model without: memory filled earlier would pass on information from tokens beyond the context,
    layer by layer. Each target costs reading `context` tokens.

    Args:
        model: any language model; memory is not used.
        tokens: tokens of a split, or any one-dimensional array or tensor of token ids.
        context: number of tokens c before each target.
        targets: indices t of the targets, each at least `context`; use equal targets for all contexts and models to
            compare.
        batch_size: number of windows computed at once.
        window: number of keys that each of the `context` tokens attends to, itself included, for a Transformer-XL;
            "none": all; None: the model's configuration. Tokens before the window have an influence through several
            layers.
        clamp_len: largest distance that the model tells apart; None: the model's configuration; "none": no clamp.
        dtype: "float32", or "bfloat16" for autocast.
        progress: called with the number of tokens read so far and their total number.
    """
    settings = _windowed(context, window, clamp_len, batch_size, dtype)
    return _losses_of(model, tokens, [context], targets, settings, progress)[:, 0]


def losses_at_contexts(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    contexts: Sequence[int] | range,
    targets: Sequence[int] | range,
    batch_size: int = WINDOWS,
    window: Limit = "none",
    clamp_len: Limit = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> dict[int, Float64[Tensor, " targets"]]:
    """Return `losses_at_context` for several lengths, also for models that read at most `model.context` tokens at once.

    For a model with such a limit, the losses at longer contexts are equal to those at the limit, as the paper's row for
    its Transformer (128 throughout, Table 8) suggests.

    Contexts that begin at the same token are read as one window, because the loss after c tokens does not depend on
    later tokens. Targets therefore cost less if they are closer together than the longest context, at a distance that
    is a multiple or a divisor of the step between contexts.

    Args:
        contexts: context lengths c, one or more.
        model, tokens, targets, batch_size, window, clamp_len, dtype, progress: as for `losses_at_context`.

    Returns:
        losses in nats by context length, [targets] each.
    """
    if len(contexts) == 0:
        raise UserError("no contexts were given", expected="one or more lengths")
    # A model that reads at most n tokens cannot gain from more: its losses stay those at n.
    seen_at = {context: context if model.context is None else min(context, model.context) for context in contexts}
    read = sorted(set(seen_at.values()))
    settings = _windowed(read[0], window, clamp_len, batch_size, dtype)
    losses = _losses_of(model, tokens, read, targets, settings, progress)
    return {context: losses[:, read.index(seen)].clone() for context, seen in seen_at.items()}


def sliding_losses(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    contexts: Sequence[int],
    batch_size: int = WINDOWS,
    max_tokens: int | None = None,
) -> dict[int, float]:
    """Return the mean loss of `evaluate_sliding` in nats for several contexts, at the cost of the longest one.

    Args:
        model, tokens, batch_size, max_tokens: as for `evaluate_sliding`.
        contexts: window lengths L in tokens, one or more.
    """
    settings = Settings(_positive("context", min(contexts)), 0, "none", None, batch_size, max_tokens)
    ids = _ids(model, tokens, settings)
    losses = _read(model, ids, np.arange(1, len(ids)), contexts, settings)
    return dict(zip(contexts, losses.mean(dim=0).tolist(), strict=True))


def _windowed(context: int, window: Limit, clamp_len: Limit, batch_size: int, dtype: str) -> Settings:
    """Return the settings for reading contexts without memory, through a window of keys."""
    # A state needs enough memory for its window, although this memory stays empty.
    mem_len = window - 1 if isinstance(window, int) else 0 if window == "none" else None
    return Settings(_positive("context", context), mem_len, window, clamp_len, batch_size, dtype=dtype)


def _positive(name: str, number: int) -> int:
    if number < 1:
        raise UserError(field=name, value=number, expected="1 or more")
    return number


def _ids(model: LanguageModel, tokens: TokenIds, settings: Settings) -> Int64[np.ndarray, " tokens"]:
    """Return the token ids to read, all in the vocabulary."""
    ids = checked_ids(tokens, settings.max_tokens).astype(np.int64)
    if len(ids) < 2:
        raise UserError(f"tokens have shape {list(ids.shape)}", expected="2 tokens or more")
    check_ids(torch.from_numpy(ids), model.vocab_size)
    return ids


def _losses_of(
    model: LanguageModel,
    tokens: TokenIds,
    contexts: list[int],
    targets: Sequence[int] | range,
    settings: Settings,
    progress: Progress | None,
) -> Float64[Tensor, "targets C"]:
    """Return `losses_at_context` for C increasing context lengths that the model can read at once, on the CPU."""
    ids = _ids(model, tokens, settings)
    chosen, longest = np.asarray(targets, dtype=np.int64), contexts[-1]
    if chosen.ndim != 1 or len(chosen) == 0 or chosen.min() < longest or chosen.max() >= len(ids):
        raise UserError(
            f"targets do not all have {longest} tokens before them among {len(ids)} tokens",
            expected=f"one or more indices from {longest} to {len(ids) - 1}",
        )
    return _read(model, ids, chosen, contexts, settings, progress)


def _read(
    model: LanguageModel,
    ids: Int64[np.ndarray, " tokens"],
    targets: Int64[np.ndarray, " targets"],
    contexts: Sequence[int],
    settings: Settings,
    progress: Progress | None = None,
) -> Float64[Tensor, "targets C"]:
    """Return the loss of each target after each of C contexts, on the CPU."""
    losses = torch.empty(len(targets) * len(contexts), dtype=torch.float64)
    with evaluation_mode(model, settings.dtype) as view:
        empty = settings.init_state(view, 1)
        for places, found, read in window_losses(view, ids, targets, contexts, settings, empty):
            # On the CPU: the losses of all targets and contexts may be more than a GPU has room for.
            losses[places] = found.cpu()
            if progress is not None:
                progress(*read)
    return losses.view(len(targets), len(contexts))


def window_losses(
    view: LanguageModel,
    ids: Int64[np.ndarray, " tokens"],
    targets: Int64[np.ndarray, " targets"],
    contexts: Sequence[int],
    settings: Settings,
    empty: State,
) -> Iterator[tuple[Int64[np.ndarray, " losses"], Float64[Tensor, " losses"], tuple[int, int]]]:
    """Read the windows of targets, at most B at a time.

    A context that reaches beyond the beginning of the stream is cut off there. Contexts that begin at the same token
    are read as one window, as long as the longest of these contexts.

    Args:
        view: model in evaluation mode.
        ids: token ids of the stream.
        targets: indices of the targets in `ids`.
        contexts: C context lengths L in tokens, for each target.
        settings: number of windows B computed at once, and temperature.
        empty: state of one lane before each window.

    Yields:
        indices of the losses in [targets,C], flattened; the losses in nats; numbers of tokens read so far, and in all.
    """
    seen = np.minimum(contexts, targets[:, None])
    # A causal window of 900 tokens also holds the losses of all shorter contexts that begin where it begins.
    begins, window_of = np.unique((targets[:, None] - seen).ravel(), return_inverse=True)
    seen, following = seen.ravel(), np.repeat(ids[targets], len(contexts))
    lengths = np.zeros_like(begins)
    # A window is as long as the longest context that is read in it.
    np.maximum.at(lengths, window_of, seen)
    losses_of = np.split(np.argsort(window_of, kind="stable"), np.bincount(window_of).cumsum()[:-1])
    device, done, total = next(view.parameters()).device, 0, lengths.sum().item()
    # Windows of one length are read together, because a batch has one shape and no padding to mask.
    for length in np.unique(lengths).tolist():
        windows = np.flatnonzero(lengths == length)
        for first in range(0, len(windows), settings.batch_size):
            lanes = windows[first : first + settings.batch_size]
            places = np.concatenate([losses_of[lane] for lane in lanes])
            tokens = ids[begins[lanes, None] + np.arange(length)]
            # The loss after c tokens of a window is that of the window's token c - 1, counted over all B*L tokens.
            at = np.searchsorted(lanes, window_of[places]) * length + seen[places] - 1
            inputs, at, wanted = (torch.from_numpy(array).to(device) for array in (tokens, at, following[places]))
            state = empty.select(torch.zeros(len(lanes), dtype=torch.int64))
            losses = view.chosen_nll(inputs, at, wanted, state, settings.temperature).double()
            done += tokens.size
            yield places, losses, (done, total)
