"""Works that the engine's thread is given, and the events that come back from it.

A work is text to read and lanes that go on from it. Its events arrive in an `Outbox`, which the event loop reads.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from txl.data.decoders import Decoder
from txl.files import JsonObject
from txl.generation.engine import Stream
from txl.generation.reading import PROMPT_SEGMENT, StreamState, TextReading
from txl.generation.sampling import Sampling
from txl.generation.text import StopStrings

CHECKPOINT_EVERY = 512
"""Tokens between two saved states of a kept stream, to which a fork can go back."""
PACE = 0.04
"""Seconds between two events of a stream: each costs as much as a token of a small model, and takes a processor away
from the step that runs at the time. 25 a second read as a flow."""


@dataclass(slots=True)
class ScoredToken:
    """A token of a text and what the model made of it."""

    id: int
    log_prob: float | None
    """Nats, of the model's own probabilities, before temperature and `top_k`; None for a text's first token."""
    top: list[tuple[int, float]] = field(default_factory=list)
    """The likeliest tokens at its place, the likeliest first, as far as they were asked for."""
    rank: int | None = None
    """1 for the likeliest; None where alternatives were not asked for."""
    attention: JsonObject | None = None
    piece: str = ""
    """Characters that it completes; empty for tokens that were read."""
    text: str = ""
    """Text that can be shown now that it was drawn: less than `piece` where that may begin a stop string."""


@dataclass(slots=True)
class ReadEvent:
    """Some of a text has been read."""

    work: int
    tokens: list[ScoredToken]
    """Empty unless scores were asked for."""
    read: int
    total: int


@dataclass(slots=True)
class DrawnEvent:
    """A token was drawn."""

    lane: int
    token: ScoredToken


@dataclass(slots=True)
class EndOfLaneEvent:
    """A lane has ended, with the rest of its text."""

    lane: int
    reason: str
    """"stop" or "length"."""
    text: str


@dataclass(slots=True)
class SavedEvent:
    """The state of a stream that is kept."""

    state: StreamState
    drawn: int


@dataclass(slots=True)
class FailedEvent:
    """Nothing more comes from a work, for a reason; `status` is that of HTTP."""

    message: str
    status: int = 500


@dataclass(slots=True)
class DoneEvent:
    """Nothing more comes from a work."""


Event = ReadEvent | DrawnEvent | EndOfLaneEvent | SavedEvent | FailedEvent | DoneEvent


class Outbox:
    """Events on their way from the engine's thread to the event loop that is running now.

    Args:
        progressive: pass events on as they come, at most once in `PACE` seconds; else only saved states, and the rest
            when nothing more comes from a work.
        n_work: works that put events here.
    """

    def __init__(self, progressive: bool, n_work: int = 1):
        self._loop, self._progressive, self._open = asyncio.get_running_loop(), progressive, n_work
        self._events: deque[Event] = deque()
        self._there, self._ended = asyncio.Event(), asyncio.Event()
        self._waits = self._waking = False

    def put(self, event: Event) -> None:
        """Hand an event over; called by the engine's thread."""
        last = isinstance(event, FailedEvent | DoneEvent)
        self._events.append(event)
        # Who takes a saved state lets go of the one before; if they waited for the end, memory would grow.
        passes = self._progressive or isinstance(event, SavedEvent)
        if last or (passes and self._waits and not self._waking):
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._wake, last)
            except RuntimeError:  # the loop has ended, and nobody is there to read
                self._events.clear()

    def _wake(self, last: bool) -> None:
        self._waking = False
        self._there.set()
        if last:
            self._ended.set()

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield what has come, until nothing more comes from any work, or one has failed."""
        while self._open > 0:
            batch = await self._take()
            self._open -= sum(isinstance(event, DoneEvent) for event in batch)
            if any(isinstance(event, FailedEvent) for event in batch):
                self._open = 0
            yield batch
            if self._open > 0 and self._progressive:
                self._ended.clear()
                with suppress(TimeoutError):  # tokens that come meanwhile go together
                    await asyncio.wait_for(self._ended.wait(), PACE)

    async def _take(self) -> list[Event]:
        """Return what has come since, at least one event."""
        self._waits = True  # before looking: what is put after it wakes this
        while not self._events:
            self._there.clear()
            await self._there.wait()
        self._waits = False
        return [self._events.popleft() for _ in range(len(self._events))]


@dataclass(eq=False)
class Lane:
    """One continuation of what a work has read."""

    number: int
    max_tokens: int
    seed: int
    sampling: Sampling
    decoder: Decoder
    stop: StopStrings
    drawn: int = 0
    """Tokens drawn with this seed before."""
    flush: bool = True
    """True: a character that is incomplete at the end is shown as U+FFFD; False: the next piece completes it."""
    stream: Stream | None = None
    made: int = 0


@dataclass(eq=False)
class Work:
    """Tokens to read, and how to go on from them.

    The prompt is read once for all lanes.
    """

    number: int
    ids: Tensor
    """int64 [n]; may be empty if `after` is given."""
    lanes: list[Lane]
    outbox: Outbox
    after: StreamState | None = None
    forbidden: tuple[int, ...] = ()
    score: bool = False
    """Score the tokens that are read, with an event each segment."""
    top: int | None = None
    """Alternatives reported for each token; None: log-probabilities are not reported."""
    attention: bool = False
    """Report how far back attention reached, for each token."""
    keep: bool = False
    """Save states on the way and at the end."""
    segment: int = PROMPT_SEGMENT
    cancelled: bool = False
    """Set by anyone; the work has left the engine before the next step."""
    arrived: float = field(default_factory=time.perf_counter)
    read: TextReading | StreamState | None = None
    waiting_lanes: deque[Lane] = field(default_factory=deque)
    running: int = 0
    checkpoint: int = 0

    @property
    def size(self) -> int:
        """Places in the queue."""
        return max(1, len(self.lanes))
