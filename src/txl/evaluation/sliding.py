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
from txl.devices import awaited, sent
from txl.errors import UserError
from txl.evaluation.recorded import RecordedWindows
from txl.evaluation.stream import (
    EvaluationResult,
    Progress,
    Settings,
    TokenIds,
    check_ids,
    checked_ids,
    evaluation_mode,
    result_of,
)
from txl.models.language_model import LanguageModel, State

WINDOWS = 16  # windows that are computed at once, if nothing else is asked for
_MANY = 20  # batches of equal windows, from which on they are worth a recording


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
    target. Memory is not used. `batch_size` windows are computed at once; other arguments as for `txl.evaluate`.
    """
    settings = Settings(1, None, None, clamp_len, batch_size, max_tokens, True, dtype, temperature)
    return evaluate_sliding_with(model, tokens, context, settings, progress)


def evaluate_sliding_with(
    model: LanguageModel, tokens: TokenIds, context: int, settings: Settings, progress: Progress | None = None
) -> EvaluationResult:
    """Return the result of `evaluate_sliding` for one value of settings, whose segment and memory do not matter."""
    start = time.perf_counter()
    settings = replace(settings, segment=_positive(context), mem_len=0, window="none", exhaustive=True)
    ids = _ids(model, tokens, settings)
    n_first, n_target, n_scored = min(context, len(ids) - 1), len(ids) - 1, 0
    with evaluation_mode(model, settings.dtype) as view:
        empty = settings.init_state(view, 1)
        # One window has all targets with fewer than `context` tokens before them: it is the beginning of the text.
        windows = chain(
            window_losses(view, ids, np.arange(1, n_first + 1), [context], settings, empty),
            window_losses(view, ids, np.arange(n_first + 1, len(ids)), [context], settings, empty),
        )
        total = torch.zeros((), dtype=torch.float64, device=next(view.parameters()).device)
        for _, losses, _ in windows:
            total, n_scored = total + losses.sum(), n_scored + len(losses)
            if progress is not None:
                progress(n_scored, n_target)
    whole = (total.item(), n_scored)
    result = result_of(model, tokens, settings, empty.lengths, whole, time.perf_counter() - start)
    return replace(result, sliding=True)


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
    sees no more than a model without: memory filled earlier would pass on information from tokens beyond the context.

    Args:
        model, tokens, clamp_len, dtype: as for `txl.evaluate`.
        context: number of tokens c before each target.
        targets: indices t of the targets, each at least `context`; use equal targets for all contexts and models to
            compare.
        batch_size: number of windows computed at once.
        window: number of keys that each of the `context` tokens attends to, itself included, for a Transformer-XL;
            "none": all; None: the model's configuration.
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
    """Return `losses_at_context` by length for one or more contexts, at less cost than one by one.

    For a model that reads at most `model.context` tokens at once, the losses at longer contexts are equal to those at
    this limit, as the paper's row for its Transformer (128 throughout, Table 8) suggests.

    Contexts that begin at the same token are read as one window, because the loss after c tokens does not depend on
    later tokens. Targets therefore cost less if they are closer together than the longest context, at a distance that
    is a multiple or a divisor of the step between contexts.
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
    model: LanguageModel, tokens: TokenIds, contexts: Sequence[int], *, batch_size: int, max_tokens: int | None
) -> dict[int, float]:
    """Return the mean loss of `evaluate_sliding` in nats for several contexts, at the cost of the longest one."""
    settings = Settings(min(contexts), 0, "none", None, batch_size, max_tokens)
    losses = _losses_of(model, tokens, contexts, None, settings)
    return dict(zip(contexts, losses.mean(dim=0).tolist(), strict=True))


def _windowed(context: int, window: Limit, clamp_len: Limit, batch_size: int, dtype: str) -> Settings:
    """Return the settings for reading contexts without memory, through a window of keys."""
    # A state needs enough memory for its window, although this memory stays empty.
    mem_len = window - 1 if isinstance(window, int) else 0 if window == "none" else None
    return Settings(_positive(context), mem_len, window, clamp_len, batch_size, dtype=dtype)


def _positive(context: int) -> int:
    if context < 1:
        raise UserError(field="context", value=context, expected="1 or more")
    return context


def _ids(model: LanguageModel, tokens: TokenIds, settings: Settings) -> Int64[np.ndarray, " tokens"]:
    ids = checked_ids(tokens, settings.max_tokens).astype(np.int64)
    if len(ids) < 2:
        raise UserError(f"{len(ids)} tokens are given", expected="2 or more")
    check_ids(torch.from_numpy(ids), model.vocab_size)
    return ids


def _losses_of(
    model: LanguageModel,
    tokens: TokenIds,
    contexts: Sequence[int],
    targets: Sequence[int] | range | None,
    settings: Settings,
    progress: Progress | None = None,
) -> Float64[Tensor, "targets C"]:
    """Return the losses of targets (None: all of a stream) after each of C increasing contexts, on the CPU."""
    ids = _ids(model, tokens, settings)
    chosen, longest = np.asarray(range(1, len(ids)) if targets is None else targets, dtype=np.int64), contexts[-1]
    are_indices = targets is None or (chosen.ndim == 1 and len(chosen) > 0)
    if not are_indices or (targets is not None and not (chosen.min() >= longest and chosen.max() < len(ids))):
        raise UserError("a target is out of range", expected=f"one or more indices from {longest} to {len(ids) - 1}")
    losses = torch.empty(len(chosen) * len(contexts), dtype=torch.float64)
    with evaluation_mode(model, settings.dtype) as view:
        empty = settings.init_state(view, 1)
        for places, found, read in window_losses(view, ids, chosen, contexts, settings, empty):
            # On the CPU: the losses of all targets and contexts may be more than a GPU has room for.
            losses[places] = found.cpu()
            if progress is not None:
                progress(*read)
    return losses.view(len(chosen), len(contexts))


def window_losses(
    view: LanguageModel,
    ids: Int64[np.ndarray, " tokens"],
    targets: Int64[np.ndarray, " targets"],
    contexts: Sequence[int],
    settings: Settings,
    empty: State,
) -> Iterator[tuple[Int64[np.ndarray, " losses"], Float64[Tensor, " losses"], tuple[int, int]]]:
    """Read the windows of targets (indices in `ids`), at most `settings.batch_size` at a time, from the state `empty`.

    A context that reaches beyond the beginning of the stream is cut off there. Contexts that begin at the same token
    are read as one window, as long as the longest of these contexts.

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
        recorded = RecordedWindows(view, settings.temperature) if len(windows) >= _MANY * settings.batch_size else None
        state = empty.select(torch.zeros(min(len(windows), settings.batch_size), dtype=torch.int64))
        with awaited(device):
            for first in range(0, len(windows), settings.batch_size):
                lanes = windows[first : first + settings.batch_size]
                places = np.concatenate([losses_of[lane] for lane in lanes])
                tokens = ids[begins[lanes, None] + np.arange(length)]
                # The loss after c tokens of a window is that of the window's token c - 1, counted over all B*L tokens.
                at = np.searchsorted(lanes, window_of[places]) * length + seen[places] - 1
                inputs, at, wanted = (
                    sent(torch.from_numpy(array), device) for array in (tokens, at, following[places])
                )
                if recorded is not None and len(lanes) == settings.batch_size:
                    losses = recorded(inputs, at, wanted, state).double()
                else:
                    state = empty.select(torch.zeros(len(lanes), dtype=torch.int64))
                    losses = view.chosen_nll(inputs, at, wanted, state, settings.temperature).double()
                done += tokens.size
                yield places, losses, (done, total)
