"""Evaluation by a window that slides by one token and is recomputed each time (Section 3.1; Al-Rfou et al. 2018).

The paper tests the vanilla Transformer in this way: every target is predicted from exactly the `context` tokens before
it, without memory. Such an evaluation costs `context` times as much as reading the text once.

Shapes: B windows, L tokens of a window, C context lengths of each target.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from txl.config import Limit, validate_temperature
from txl.errors import UserError
from txl.evaluation.perplexity import (
    EvaluationResult,
    Progress,
    TokenIds,
    arithmetic,
    check_ids,
    checked_ids,
    counted_over,
    evaluation_mode,
)
from txl.models.language_model import LanguageModel, State


def evaluate_sliding(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    context: int,
    batch_size: int = 16,
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
        progress: called with the number of targets scored so far and their total number; not for a text without
            targets beyond the first window.
    """
    validate_temperature(temperature)
    ids = _checked_ids(model, tokens, max_tokens, context, batch_size, dtype)
    counts = counted_over(tokens, ids)
    device = next(model.parameters()).device
    begin, first = time.perf_counter(), min(context, len(ids) - 1)
    with evaluation_mode(model, dtype) as model:
        start = torch.from_numpy(ids[: first + 1]).to(device)[None]
        state = without_memory(model, clamp_len)
        done, n_target = first, len(ids) - 1
        total = model.nll_at(start[:, :-1], start[:, 1:], state, temperature)[0].double().sum()
        later = np.arange(first + 1, len(ids))
        for losses in window_losses(model, ids, context, later, batch_size, state, temperature):
            total += losses.sum()
            done += len(losses)
            if progress is not None:
                progress(done, n_target)
    return EvaluationResult(
        nll=total.item() / n_target,
        tokens=n_target,
        dropped=0,
        seconds=time.perf_counter() - begin,
        segment=context,
        mem_len=0,
        window=None,
        clamp_len=state.lengths.clamp_len,
        batch_size=batch_size,
        exhaustive=True,
        dtype=arithmetic(model, dtype),
        temperature=temperature,
        sliding=True,
        **counts,
        **model.cache_settings,
    )


def losses_at_context(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    context: int,
    targets: Sequence[int] | range,
    batch_size: int = 16,
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
    return _exact_losses(model, tokens, [context], targets, batch_size, window, clamp_len, dtype, progress)[:, 0]


def losses_at_contexts(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    contexts: Sequence[int] | range,
    targets: Sequence[int] | range,
    batch_size: int = 16,
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
        raise UserError("no contexts were given; expected one or more lengths")
    held = {context: context if model.context is None else min(context, model.context) for context in contexts}
    read = sorted(set(held.values()))
    losses = _exact_losses(model, tokens, read, targets, batch_size, window, clamp_len, dtype, progress)
    return {context: losses[:, read.index(seen)].clone() for context, seen in held.items()}


def sliding_losses(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    contexts: Sequence[int],
    batch_size: int = 16,
    max_tokens: int | None = None,
) -> dict[int, float]:
    """Return the mean loss of `evaluate_sliding` in nats for several contexts, at the cost of the longest one.

    Args:
        model, tokens, batch_size, max_tokens: as for `evaluate_sliding`.
        contexts: window lengths L in tokens, one or more.
    """
    ids = _checked_ids(model, tokens, max_tokens, min(contexts), batch_size, "float32")
    losses = _losses_behind(model, ids, np.arange(1, len(ids)), contexts, batch_size)
    return dict(zip(contexts, losses.mean(dim=0).tolist(), strict=True))


def _exact_losses(
    model: LanguageModel,
    tokens: TokenIds,
    contexts: list[int],
    targets: Sequence[int] | range,
    batch_size: int,
    window: Limit,
    clamp_len: Limit,
    dtype: str,
    progress: Progress | None,
) -> Float64[Tensor, "targets C"]:
    """Return `losses_at_context` for C increasing context lengths that the model can read at once, on the CPU."""
    ids = _checked_ids(model, tokens, None, contexts[0], batch_size, dtype)
    chosen, longest = np.asarray(targets, dtype=np.int64), contexts[-1]
    if chosen.ndim != 1 or len(chosen) == 0 or chosen.min() < longest or chosen.max() >= len(ids):
        raise UserError(
            f"targets do not all have {longest} tokens before them among {len(ids)} tokens; expected one or more "
            f"indices from {longest} to {len(ids) - 1}"
        )
    return _losses_behind(model, ids, chosen, contexts, batch_size, window, clamp_len, dtype, progress)


def _losses_behind(
    model: LanguageModel,
    ids: Int64[np.ndarray, " tokens"],
    targets: Int64[np.ndarray, " targets"],
    contexts: Sequence[int],
    batch_size: int,
    window: Limit = "none",
    clamp_len: Limit = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Float64[Tensor, "targets C"]:
    """Return the loss of each target after each of C contexts, cut off at the beginning of the stream, on the CPU.

    Contexts that begin at the same token are read as one window, as long as the longest of these contexts.
    """
    seen = np.minimum(contexts, targets[:, None])
    begins, read_in = np.unique((targets[:, None] - seen).ravel(), return_inverse=True)
    shape, seen, following = seen.shape, seen.ravel(), np.repeat(ids[targets], len(contexts))
    lengths = np.zeros_like(begins)
    np.maximum.at(lengths, read_in, seen)
    losses_of = np.split(np.argsort(read_in, kind="stable"), np.bincount(read_in).cumsum()[:-1])
    found, done, total = torch.empty(len(seen), dtype=torch.float64), 0, lengths.sum().item()
    device = next(model.parameters()).device
    with evaluation_mode(model, dtype) as model:
        empty = without_memory(model, clamp_len, window)
        for length in np.unique(lengths).tolist():
            of_length = np.flatnonzero(lengths == length)
            for first in range(0, len(of_length), batch_size):
                lanes = of_length[first : first + batch_size]
                losses = np.concatenate([losses_of[lane] for lane in lanes])
                read = ids[begins[lanes, None] + np.arange(length)]
                at = np.searchsorted(lanes, read_in[losses]) * length + seen[losses] - 1
                read, at, wanted = (torch.from_numpy(each).to(device) for each in (read, at, following[losses]))
                state = empty.select(torch.zeros(len(lanes), dtype=torch.int64))
                found[losses] = model.chosen_nll(read, at, wanted, state).double().cpu()
                done += read.numel()
                if progress is not None:
                    progress(done, total)
    return found.view(shape)


def _checked_ids(
    model: LanguageModel, tokens: TokenIds, max_tokens: int | None, context: int, batch_size: int, dtype: str
) -> np.ndarray:
    """Check the settings, and return the tokens to read, int64 [tokens]."""
    for name, number in (("context", context), ("batch_size", batch_size)):
        if number < 1:
            raise UserError(f"{name} is {number}; expected 1 or more")
    ids = checked_ids(tokens, max_tokens, dtype).astype(np.int64)
    if len(ids) < 2:
        raise UserError(f"tokens have shape {list(ids.shape)}; expected 2 tokens or more")
    check_ids(torch.from_numpy(ids), model.vocab_size)
    return ids


def without_memory(model: LanguageModel, clamp_len: Limit, window: Limit = "none") -> State:
    """Return an empty state of one lane, for texts that are read in a single segment."""
    # A state needs enough memory for its window, although this memory stays empty.
    mem_len = window - 1 if isinstance(window, int) else 0 if window == "none" else None
    return model.init_state(1, mem_len=mem_len, window=window, clamp_len=clamp_len)


def window_losses(
    model: LanguageModel,
    ids: np.ndarray,
    context: int,
    targets: np.ndarray,
    batch_size: int,
    empty: State,
    temperature: float = 1.0,
) -> Iterator[Float64[Tensor, " windows"]]:
    """Yield the losses of at most B targets at a time, each predicted from the `context` tokens before it.

    Args:
        model: model in evaluation mode.
        ids: token ids of the stream, int64.
        context: window length L in tokens.
        targets: indices of the targets in `ids`.
        batch_size: number of windows B computed at once.
        empty: state of one lane before each window (`without_memory`).
        temperature: softmax temperature, as for `evaluate`.
    """
    device = next(model.parameters()).device
    for start in range(0, len(targets), batch_size):
        chosen = targets[start : start + batch_size]
        windows = torch.from_numpy(ids[chosen[:, None] + np.arange(-context, 1)]).to(device)
        state = empty.select(torch.zeros(len(chosen), dtype=torch.int64))
        last = torch.arange(1, len(chosen) + 1, device=device) * context - 1
        yield model.chosen_nll(windows[:, :-1], last, windows[:, -1], state, temperature).double()
