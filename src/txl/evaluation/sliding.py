"""Evaluation by a window that slides by one token, everything in it recomputed (Section 3.1; Al-Rfou et al. 2018).

This is how the paper tests the vanilla Transformer: every target is predicted from exactly the `context` tokens before
it, which no memory has to carry. It costs `context` times what reading the text once does.

Shapes: B windows, L tokens of a window.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from txl.errors import UserError
from txl.evaluation.perplexity import EvaluationResult, Progress, bytes_per_token, check_ids, evaluation_mode
from txl.models.language_model import LanguageModel


def evaluate_sliding(
    model: LanguageModel[Any],
    tokens: Any,
    *,
    context: int,
    batch_size: int = 16,
    max_tokens: int | None = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> EvaluationResult:
    """The mean loss of a model over a stream, each target predicted from the `context` tokens before it.

    The first `context` targets have no more than what there is before them. Every token but the first is a target.

    Args:
        model: any language model; those with memory are used without it.
        tokens: a split's tokens, or any one-dimensional array or tensor of token ids.
        context: tokens L of the window.
        batch_size: windows B computed at once.
        max_tokens: read only this many tokens of the stream.
        dtype: "float32", or "bfloat16" for autocast.
        progress: is told how far the evaluation is.

    Raises:
        UserError: for settings that make no sense, too few tokens, or a window longer than the model allows.
    """
    if context < 1 or batch_size < 1:
        raise UserError(f"context is {context} and batch_size {batch_size}; expected 1 or more of each")
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype is {dtype!r}; expected float32 or bfloat16")
    ids = np.asarray(tokens)[:max_tokens]
    if ids.ndim != 1 or len(ids) < 2:
        raise UserError(f"tokens have shape {list(ids.shape)}; expected one dimension and 2 tokens or more")
    check_ids(torch.from_numpy(ids.astype(np.int64)), model.vocab_size)
    device = next(model.parameters()).device
    total, n_target = torch.zeros((), dtype=torch.float64, device=device), len(ids) - 1
    begin = time.perf_counter()
    with evaluation_mode(model), torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):

        def losses(starts: np.ndarray, length: int) -> torch.Tensor:
            windows = torch.from_numpy(ids[starts[:, None] + np.arange(length + 1)].astype(np.int64)).to(device)
            state = model.init_state(len(starts), mem_len=0, window="none")
            return model.nll(windows[:, :-1], windows[:, 1:], state)[0].double()

        done = min(context, n_target)
        total += losses(np.zeros(1, dtype=np.int64), done).sum()
        while done < n_target:
            if progress is not None:
                progress(done, n_target)
            starts = np.arange(done, min(done + batch_size, n_target)) - context + 1
            total += losses(starts, context)[:, -1].sum()
            done += len(starts)
    if progress is not None:
        progress(done, n_target)
    return EvaluationResult(
        nll=total.item() / done,
        tokens=done,
        dropped=0,
        bytes_per_token=bytes_per_token(tokens, len(ids)),
        seconds=time.perf_counter() - begin,
        segment=context,
        mem_len=0,
        window=None,
        clamp_len=None,
        batch_size=batch_size,
        exhaustive=True,
        dtype=dtype,
        temperature=1.0,
        sliding=True,
    )
