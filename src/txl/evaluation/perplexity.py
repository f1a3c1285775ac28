"""Perplexity and bits per character of a split, measured as the authors do, at any memory length.

The protocol: the token stream is cut into B contiguous lanes of equal length (the remainder is dropped); each lane
starts with empty memory; its first token is never a target; the last, short segment counts by its length; the loss is
the mean over targets in nats. With `exhaustive`, neighbouring lanes overlap by one token: every token except the first
of the stream is a target, and nothing is dropped.

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy.typing import ArrayLike
from torch import Tensor, nn

from txl.config import Limit, same_length, validate_temperature
from txl.data.prepared import Tokens
from txl.errors import UserError
from txl.files import JsonObject
from txl.models.language_model import LanguageModel
from txl.models.structure import ModuleT, evaluation_view
from txl.processes import Processes
from txl.runs.events import EvaluationFigures

TokenIds = Tokens | ArrayLike
"""Tokens of a split, or any one-dimensional array, tensor or list of token ids."""
Settings = dict[str, Any]
"""Keyword arguments of `evaluate`, or of functions that call it, as callers collect them."""
Progress = Callable[[int, int], None]
"""Callback that receives the number of targets scored so far and their total number."""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation, and its settings."""

    nll: float
    """Mean negative log-likelihood, in nats per token."""
    tokens: int
    """Number of targets scored, each exactly once."""
    dropped: int
    """Number of targets of the split that were not scored (the first token of the split is no target)."""
    bytes_per_token: float | None
    """Mean number of text bytes per token read; None if the text is not known."""
    seconds: float
    segment: int
    mem_len: int
    window: int | None
    clamp_len: int | None
    batch_size: int
    exhaustive: bool
    dtype: str
    temperature: float
    sliding: bool = False
    """True: each target was predicted from its own window of `segment` tokens (`evaluate_sliding`)."""
    cache_size: int | None = None
    """Number of pairs in a continuous cache (`txl.ContinuousCache`); like theta and lambda, None without a cache."""
    cache_theta: float | None = None
    cache_lambda: float | None = None
    unknown: int | None = None
    """Number of tokens read that are `<unk>`; None if the vocabulary is not known."""
    dynamic: JsonObject | None = None
    """Rule and settings of dynamic evaluation (`txl.evaluate_dynamically`); None if the weights were fixed."""

    @property
    def ppl(self) -> float:
        """Perplexity per token: exp of the mean loss."""
        return math.exp(self.nll) if self.nll < 700 else math.inf

    @property
    def bpc(self) -> float:
        """Bits per token; bits per character or per byte if a token is a character or a byte."""
        return self.nll / math.log(2)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text: mean bits per token divided by mean bytes per token of the text read.

        With <unk> in the vocabulary, the value is a lower bound, as it lacks the cost of spelling out unknown words.
        """
        return None if self.bytes_per_token is None else self.bpc / self.bytes_per_token

    @property
    def tokens_per_second(self) -> float:
        """Number of targets scored per second."""
        return self.tokens / self.seconds

    def to_dict(self) -> EvaluationFigures:
        """Return all figures and settings, ready for JSON."""
        derived = ("ppl", "bpc", "bits_per_byte", "tokens_per_second")
        return cast("EvaluationFigures", asdict(self) | {name: getattr(self, name) for name in derived})


@dataclass(frozen=True)
class Lanes:
    """The division of a token stream into lanes: lane b scores tokens first[b] to end[b] - 1."""

    first: tuple[int, ...]
    end: tuple[int, ...]
    longest: int = 0
    """Number of targets in the longest lane of all processes."""

    @classmethod
    def cut(cls, n_token: int, batch_size: int, exhaustive: bool = False) -> Lanes:
        """Divide a stream of `n_token` tokens into lanes."""
        if batch_size < 1:
            raise UserError(field="batch", value=batch_size, expected="1 lane or more")
        if n_token // batch_size < 2:
            raise UserError(
                f"{n_token} tokens in {batch_size} lanes leave {n_token // batch_size} a lane; a lane needs 2 "
                f"(one to read, one to predict): use a smaller batch or more text"
            )
        if exhaustive:
            edges = [1 + (n_token - 1) * lane // batch_size for lane in range(batch_size + 1)]
            lengths = [end - first for first, end in pairwise(edges)]
            return cls(tuple(edges[:-1]), tuple(edges[1:]), max(lengths))
        length = n_token // batch_size
        starts = [lane * length for lane in range(batch_size)]
        return cls(tuple(start + 1 for start in starts), tuple(start + length for start in starts), length - 1)

    def share(self, processes: Processes) -> Lanes:
        """Return the lanes of this process. All processes get equally many lanes; some lanes may have no target."""
        missing = -len(self.first) % processes.count
        padded = Lanes(self.first + (1,) * missing, self.end + (1,) * missing)
        mine = processes.share(len(padded.first))
        return Lanes(padded.first[mine.start : mine.stop], padded.end[mine.start : mine.stop], self.longest)

    @property
    def n_target(self) -> int:
        """Number of targets in all lanes."""
        return sum(self.end) - sum(self.first)

    def segments(
        self, tokens: np.ndarray, segment: int
    ) -> Iterator[tuple[Int64[Tensor, "B T"], Int64[Tensor, "B T"], Bool[Tensor, "B T"]]]:
        """Yield inputs, targets and the mask of targets that count (lanes may differ in length by one token)."""
        for start in range(0, self.longest, segment):
            width = min(segment, self.longest - start)
            block = np.zeros((len(self.first), width + 1), dtype=np.int64)
            counts = np.zeros((len(self.first), width), dtype=bool)
            for lane, (first, end) in enumerate(zip(self.first, self.end, strict=True)):
                stop = min(first + start + width, end)
                read = tokens[first + start - 1 : stop]
                block[lane, : len(read)] = read
                counts[lane, : max(0, len(read) - 1)] = True
            both = torch.from_numpy(block)
            yield both[:, :-1], both[:, 1:], torch.from_numpy(counts)


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
        mem_len: number of memory positions; None: the model's configuration.
        window: number of keys that a query attends to. None: `mem_len` if given ("none" if that is 0), as the authors'
            `same_length`, otherwise the model's configuration. "none": all keys in memory and segment.
        clamp_len: largest distance that the model tells apart; None: the model's configuration; "none": no clamp.
        batch_size: number of lanes B.
        max_tokens: number of tokens to read from the beginning of the stream; None: all.
        exhaustive: also score the targets that the lanes would drop.
        dtype: "float32", or "bfloat16" for autocast.
        temperature: softmax temperature X: probabilities are proportional to p^(1/X), as the authors tested on Penn
            Treebank (1.08). A value other than 1 requires the probabilities of the whole vocabulary, and so more time
            and memory. A continuous cache is mixed in afterwards.
        progress: called with the number of this process's targets scored so far and their total number.
        processes: processes that evaluate together, each a part of the lanes; all processes return the whole result.
    """
    ids = checked_ids(tokens, max_tokens, dtype, segment=segment, temperature=temperature)
    window = same_length(mem_len, window)
    lanes = Lanes.cut(len(ids), batch_size, exhaustive)
    mine = lanes.share(processes)
    state = model.init_state(len(mine.first), mem_len=mem_len, window=window, clamp_len=clamp_len)
    lengths = state.lengths
    device = next(model.parameters()).device
    counted = counted_over(tokens, ids)

    total = torch.zeros((), dtype=torch.float64, device=device)
    done = 0
    start = time.perf_counter()
    with evaluation_mode(model, dtype) as model:
        for inputs, targets, counts in checked_segments(model, mine, ids, segment):
            nll, state = model.nll_at(inputs, targets, state, temperature)
            total += nll.double().masked_fill(~counts.to(device), 0.0).sum()
            done += int(counts.sum())
            if progress is not None:
                progress(done, mine.n_target)
    nats, scored = processes.sum(total.item(), done)  # waits for the device
    mean, done = nats / scored, int(scored)
    return EvaluationResult(
        nll=mean,
        tokens=done,
        dropped=len(ids) - 1 - done,
        seconds=time.perf_counter() - start,
        segment=segment,
        batch_size=batch_size,
        exhaustive=exhaustive,
        dtype=arithmetic(model, dtype),
        temperature=temperature,
        **asdict(lengths),
        **counted,
        **model.cache_settings,
    )


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
    for mem_len in mem_lens:
        window = same_length(mem_len, settings.get("window"))
        model.init_state(1, mem_len=mem_len, window=window, clamp_len=settings.get("clamp_len"))
    results = []
    for mem_len in mem_lens:
        result = evaluate(model, tokens, mem_len=mem_len, **settings)
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


def checked_ids(
    tokens: TokenIds, max_tokens: int | None, dtype: str, *, segment: int = 1, temperature: float = 1.0
) -> np.ndarray:
    """Return the first `max_tokens` ids of `tokens`, one-dimensional, after checking the settings of an evaluation."""
    if segment < 1:
        raise UserError(field="segment", value=segment, expected="1 token or more")
    if dtype not in ("float32", "bfloat16"):
        raise UserError(field="dtype", value=dtype, expected="float32 or bfloat16")
    validate_temperature(temperature)
    if max_tokens is not None and max_tokens < 2:
        raise UserError(field="max_tokens", value=max_tokens, expected="2 tokens or more")
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise UserError(f"tokens have shape {list(ids.shape)}; expected one dimension")
    if ids.dtype.kind not in "iu" and len(ids):
        raise UserError(f"tokens are {ids.dtype}; expected whole numbers, as the vocabulary encodes them")
    return ids[:max_tokens]


@contextmanager
def evaluation_mode(model: ModuleT, dtype: str = "float32") -> Iterator[ModuleT]:
    """Yield a view of the model without dropout, with gradients disabled; the mode of the model itself is unchanged.

    Inference mode is not used, because autocast would then convert every weight at every use instead of once.

    Args:
        model: any module with weights.
        dtype: "float32", or "bfloat16" for autocast inside.
    """
    device = next(model.parameters()).device
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        yield evaluation_view(model)


def arithmetic(model: nn.Module, dtype: str) -> str:
    """Return the dtype of a model's products for `evaluation_mode`: bfloat16 in autocast, else that of the weights."""
    return dtype if dtype == "bfloat16" else str(next(model.parameters()).dtype).removeprefix("torch.")


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Refuse token ids that are not in the vocabulary."""
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise UserError(
            f"the tokens hold id {lowest if lowest < 0 else highest}, the model's vocabulary ends at {vocab_size - 1}; "
            f"encode the text with the model's own vocabulary"
        )


def checked_segments(
    model: LanguageModel, lanes: Lanes, ids: np.ndarray, segment: int
) -> Iterator[tuple[Int64[Tensor, "B T"], Int64[Tensor, "B T"], Bool[Tensor, "B T"]]]:
    """Yield `Lanes.segments` with checked ids, inputs and targets on the model's device.

    The mask of targets that count stays on the CPU, where counting these targets does not have to wait for a GPU.
    """
    device = next(model.parameters()).device
    for inputs, targets, counts in lanes.segments(ids, segment):
        check_ids(inputs, model.vocab_size)
        check_ids(targets, model.vocab_size)
        yield inputs.to(device), targets.to(device), counts


def counted_over(tokens: TokenIds, ids: np.ndarray) -> JsonObject:
    """Return `bytes_per_token` and `unknown` for an `EvaluationResult` over `ids`, the first or all of `tokens`."""
    unknown = None
    if isinstance(tokens, Tokens):
        unknown = 0 if tokens.unk_id is None else int((ids == tokens.unk_id).sum())
    return {"bytes_per_token": bytes_per_token(tokens, len(ids)), "unknown": unknown}


def bytes_per_token(tokens: TokenIds, n_read: int) -> float | None:
    """Return the mean number of text bytes per token of the first `n_read` tokens; None if the text is not known."""
    if not isinstance(tokens, Tokens) or not tokens.n_bytes:
        return None
    if n_read == len(tokens) or tokens.n_bytes == len(tokens):
        return tokens.n_bytes / len(tokens)
    part = tokens.bytes_of_first(n_read)
    return part / n_read if part else None
