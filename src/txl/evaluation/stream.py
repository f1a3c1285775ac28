"""The evaluation stream: the one loop that reads a text in lanes, segment by segment, and sums the losses.

The protocol is the authors': the token stream is cut into B contiguous lanes of equal length (the remainder is
dropped); each lane starts with empty memory; its first token is never a target; the last, short segment counts by its
length; the loss is the mean over targets in nats. With `exhaustive`, neighbouring lanes overlap by one token: every
token except the first of the stream is a target, and nothing is dropped.

`Settings` says how a text is read, a `Step` what happens to each segment of it, and `read_lanes` does the rest:

    with evaluation_mode(model, settings.dtype) as view:
        result = read_lanes(view, tokens, settings, nll_step(view, settings.temperature))

Shapes: B lanes, T tokens of a segment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import ArrayLike
from torch import Tensor

from txl.config import Lengths, Limit, same_length, validate_temperature
from txl.data.prepared import Tokens
from txl.devices import awaited, sent
from txl.errors import UserError
from txl.evaluation.recorded import Recordings
from txl.files import JsonObject
from txl.models.language_model import LanguageModel, State
from txl.models.structure import ModuleT, evaluation_view
from txl.processes import Processes
from txl.runs.events import EvaluationFigures

TokenIds = Tokens | ArrayLike  # a split's tokens, or any one-dimensional array, tensor or list of token ids
Progress = Callable[[int, int], None]  # receives the number of targets scored so far and their total number
# A visitor of the stream: receives tokens and targets of a segment on the model's device, the state before them, and
# the mask of targets that count; returns the loss of each target in nats, and the next state.
Step = Callable[
    [Int64[Tensor, "B T"], Int64[Tensor, "B T"], State, Bool[Tensor, "B T"]], tuple[Float[Tensor, "B T"], State]
]


@dataclass(frozen=True)
class Settings:
    """Settings by which a text is read, one value for all evaluations; the fields are those of `txl.evaluate`."""

    segment: int = 128
    mem_len: int | None = None
    window: Limit = None
    clamp_len: Limit = None
    batch_size: int = 10
    max_tokens: int | None = None
    exhaustive: bool = False
    dtype: str = "float32"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("segment", 1), ("batch_size", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(field=name, value=value, expected=f"{least} or more")
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(field="dtype", value=self.dtype, expected="float32 or bfloat16")
        validate_temperature(self.temperature)

    def init_state(self, model: LanguageModel, n_lane: int) -> State:
        """Return empty memory of these lengths for `n_lane` lanes."""
        window = same_length(self.mem_len, self.window)
        return model.init_state(n_lane, mem_len=self.mem_len, window=window, clamp_len=self.clamp_len)


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation, and its settings."""

    nll: float  #: mean negative log-likelihood, in nats per token
    tokens: int  #: number of targets scored, each exactly once
    dropped: int  #: number of targets of the split that were not scored (the first token of the split is no target)
    bytes_per_token: float | None  #: mean number of text bytes per token read; None if the text is not known
    seconds: float
    segment: int
    mem_len: int
    window: int | None
    clamp_len: int | None
    batch_size: int
    exhaustive: bool
    dtype: str
    temperature: float
    sliding: bool = False  #: each target was predicted from its own window of `segment` tokens (`evaluate_sliding`)
    cache_size: int | None = None  #: number of pairs in a continuous cache; like theta and lambda, None without one
    cache_theta: float | None = None
    cache_lambda: float | None = None
    unknown: int | None = None  #: number of tokens read that are `<unk>`; None if the vocabulary is not known
    dynamic: JsonObject | None = None  #: rule and settings of dynamic evaluation; None if the weights were fixed

    @property
    def ppl(self) -> float:
        """Perplexity per token: exp of the mean loss."""
        return math.exp(self.nll) if self.nll < 700 else math.inf  # exp of 710 overflows a float64

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
    longest: int = 0  # number of targets in the longest lane of all processes

    @classmethod
    def cut(cls, n_token: int, batch_size: int, exhaustive: bool = False) -> Lanes:
        """Divide a stream of `n_token` tokens into lanes."""
        length = n_token // batch_size
        if length < 2:
            raise UserError(
                f"{n_token} tokens in {batch_size} lanes leave {length} a lane",
                expected="2 a lane",
                remedy="use fewer lanes or more text",
            )
        if exhaustive:
            # Token 0 has nothing before it. The others are divided as evenly as possible: a lane begins by reading the
            # last target of the lane before.
            edges = [1 + (n_token - 1) * lane // batch_size for lane in range(batch_size + 1)]
            return cls(tuple(edges[:-1]), tuple(edges[1:]), max(end - first for first, end in pairwise(edges)))
        starts = range(0, batch_size * length, length)
        return cls(tuple(start + 1 for start in starts), tuple(start + length for start in starts), length - 1)

    def share(self, processes: Processes) -> Lanes:
        """Return the lanes of this process. All processes get equally many lanes; some lanes may have no target."""
        # Sharded weights are gathered by all processes together: all must read equally many segments of equal shape.
        padding = (1,) * (-len(self.first) % processes.count)
        mine = processes.share(len(self.first) + len(padding))
        first, end = ((*edge, *padding)[mine.start : mine.stop] for edge in (self.first, self.end))
        return Lanes(first, end, self.longest)

    def segments(
        self, ids: np.ndarray, segment: int
    ) -> Iterator[tuple[Int64[Tensor, "B T"], Int64[Tensor, "B T"], Bool[Tensor, "B T"]]]:
        """Yield inputs, targets and the mask of targets that count (lanes may differ in length by one token)."""
        for start in range(0, self.longest, segment):
            width = min(segment, self.longest - start)
            # A lane that is one token shorter ends with a token 0 that does not count.
            block = np.zeros((len(self.first), width + 1), dtype=np.int64)
            counted = np.zeros((len(self.first), width), dtype=bool)
            for lane, (first, end) in enumerate(zip(self.first, self.end, strict=True)):
                read = ids[first + start - 1 : min(first + start + width, end)]
                block[lane, : len(read)] = read
                counted[lane, : max(0, len(read) - 1)] = True
            both = torch.from_numpy(block)
            yield both[:, :-1], both[:, 1:], torch.from_numpy(counted)


def read_lanes(
    model: LanguageModel,
    tokens: TokenIds,
    settings: Settings,
    step: Step,
    *,
    segments: int | None = None,
    progress: Progress | None = None,
    processes: Processes = Processes(),  # noqa: B008 (a value)
) -> EvaluationResult:
    """Read a text in lanes, and return the mean of the losses that a step computes.

    Every evaluation in lanes is a step of this loop: fixed weights (`evaluate`), weights that adapt, a grid of caches,
    sums of squared gradients, attention. `segments` limits the number of segments of each lane that are read;
    `progress` and `processes` are as in `evaluate`.
    """
    start = time.perf_counter()
    ids = checked_ids(tokens, settings.max_tokens)
    lanes = Lanes.cut(len(ids), settings.batch_size, settings.exhaustive).share(processes)
    state = settings.init_state(model, len(lanes.first))
    lengths, device = state.lengths, next(model.parameters()).device
    n_target, n_scored = sum(lanes.end) - sum(lanes.first), 0
    if segments is not None:
        n_target = min(n_target, segments * settings.segment * settings.batch_size)
    # In float64, because a float32 sum of 2^24 nats no longer grows by 1. The sum stays on the device: reading it would
    # wait for a GPU in every step.
    total = torch.zeros((), dtype=torch.float64, device=device)
    with awaited(device):
        for inputs, targets, counted in islice(lanes.segments(ids, settings.segment), segments):
            # Checked and counted before the copy to a GPU, where looking at them would wait for the device.
            check_ids(inputs, model.vocab_size)
            check_ids(targets, model.vocab_size)
            n_scored += int(counted.sum())
            mask = sent(counted, device)
            nll, state = step(sent(inputs, device), sent(targets, device), state, mask)
            # Masked, not selected: a GPU would have to tell how many are left.
            total = total + nll.double().masked_fill(~mask, 0.0).sum()
            if progress is not None:
                progress(n_scored, n_target)
    whole = processes.sum(total.item(), n_scored)
    return result_of(model, tokens, settings, lengths, whole, time.perf_counter() - start)


def result_of(
    model: LanguageModel,
    tokens: TokenIds,
    settings: Settings,
    lengths: Lengths,
    total: tuple[float, float] | list[float],
    seconds: float,
) -> EvaluationResult:
    """Return the result of an evaluation from the lengths of its state, and the sum and number of its losses."""
    ids = np.asarray(tokens)[: settings.max_tokens]
    unknown = bytes_per_token = None
    if isinstance(tokens, Tokens):
        unknown = 0 if tokens.unk_id is None else int((ids == tokens.unk_id).sum())
        if tokens.n_bytes and (len(ids) == len(tokens) or tokens.n_bytes == len(tokens)):
            bytes_per_token = tokens.n_bytes / len(tokens)
        elif tokens.n_bytes:
            # A prefix may have longer or shorter tokens than the whole, so the bytes are counted over what was read.
            bytes_per_token = (tokens.bytes_of_first(len(ids)) or 0) / len(ids) or None
    weights = str(next(model.parameters()).dtype).removeprefix("torch.")
    # The sums are divided once, at the end: a mean of means would weight the last, short segment like a full one.
    return EvaluationResult(
        nll=total[0] / total[1],
        tokens=int(total[1]),
        dropped=len(ids) - 1 - int(total[1]),
        bytes_per_token=bytes_per_token,
        seconds=seconds,
        segment=settings.segment,
        batch_size=settings.batch_size,
        exhaustive=settings.exhaustive,
        dtype="bfloat16" if settings.dtype == "bfloat16" else weights,
        temperature=settings.temperature,
        unknown=unknown,
        **asdict(lengths),
        **model.cache_settings,
    )


def nll_step(model: LanguageModel, temperature: float, recordings: Recordings | None = None) -> Step:
    """Return the step that scores each target with the weights of a model, as they are.

    On a GPU the step is recorded where shapes repeat: each call may overwrite the state that the call before returned.
    """
    recorded = recordings or Recordings()

    def step(inputs: Tensor, targets: Tensor, state: State, counted: Tensor) -> tuple[Tensor, State]:
        return recorded.nll_at(model, inputs, targets, state, temperature)

    return step


def checked_ids(tokens: TokenIds, max_tokens: int | None) -> np.ndarray:
    """Return the first `max_tokens` ids of `tokens`, one-dimensional whole numbers."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise UserError(f"tokens are {ids.dtype} of shape {list(ids.shape)}", expected="one dimension of whole numbers")
    return ids[:max_tokens]


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Refuse token ids that are not in the vocabulary; on a GPU they would fail later, without a message."""
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise UserError(
            f"the tokens hold id {lowest if lowest < 0 else highest}, the model's vocabulary ends at {vocab_size - 1}",
            remedy="encode the text with the model's own vocabulary",
        )


@contextmanager
def evaluation_mode(model: ModuleT, dtype: str = "float32") -> Iterator[ModuleT]:
    """Yield a view of the model without dropout, inside `without_gradients`; the model's own mode is unchanged."""
    with without_gradients(next(model.parameters()).device, dtype):
        yield evaluation_view(model)


@contextmanager
def without_gradients(device: torch.device, dtype: str) -> Iterator[None]:
    """Disable gradients within the block, and compute products in `dtype`: "float32", or "bfloat16" for autocast."""
    # Not inference mode: autocast keeps converted weights only if they could have gradients, and would convert every
    # weight at every use.
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        yield
