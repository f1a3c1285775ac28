"""Works for the engine's thread, and the events with which the thread reports results.

A work is text to read, and continuations of the text. The work's events are put into an `Outbox`, from which the event
loop takes them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from txl.data.vocabulary import Decoder
from txl.files import JsonObject
from txl.generation.engine import PROMPT_SEGMENT, Stream, StreamState, TextReading
from txl.generation.sampling import Sampling
from txl.generation.text import StopStrings

CHECKPOINT_EVERY = 512  # tokens between two saved states of a kept stream, to which a fork can go back
# Seconds between two events of an event stream: an event costs as much as a token of a small model, and takes processor
# time from the running step; 25 events a second still look like a continuous flow.
PACE = 0.04
_AT_ONCE = 1 << 12  # log-probabilities from which the event loop serves other requests in between


@dataclass(slots=True)
class ScoredToken:
    """A token of a text, with the model's scores."""

    id: int
    # In nats, from the model's own probabilities before temperature and `top_k`; None for a text's first token and for
    # drawn tokens whose score is not needed.
    log_prob: float | None
    top: list[tuple[int, float]] = field(default_factory=list)  # likeliest ids with their log-probabilities, if asked
    rank: int | None = None  # 1 for the likeliest token; None if alternatives were not requested
    attention: JsonObject | None = None
    piece: str = ""  # characters that the token completes; not set for the prompt tokens of a completion
    text: str = ""  # what can be shown once the token is drawn; what may begin a stop string is held back


@dataclass(slots=True)
class ReadEvent:
    """A segment of a work's text has been read: `read` of `total` tokens so far; `tokens` if scores were requested."""

    work: int
    tokens: list[ScoredToken]
    read: int
    total: int


@dataclass(slots=True)
class DrawnEvent:
    """A token of a continuation was drawn."""

    continuation: int
    token: ScoredToken


@dataclass(slots=True)
class EndEvent:
    """A continuation has ended by a stop string ("stop") or by its length ("length"); `text` is the rest to show."""

    continuation: int
    reason: str
    text: str


@dataclass(slots=True)
class SavedEvent:
    """The state of a kept stream, and the number of tokens drawn with its seed."""

    state: StreamState
    drawn: int


@dataclass(slots=True)
class FailedEvent:
    """The end of a work that failed, with the reason; `status` is the HTTP status."""

    message: str
    status: int = 500


@dataclass(slots=True)
class DoneEvent:
    """The end of a work that did not fail."""


Event = ReadEvent | DrawnEvent | EndEvent | SavedEvent | FailedEvent | DoneEvent


def n_reported(event: Event) -> int:
    """Return the number of log-probabilities in an event, with one for each token that has none."""
    tokens = event.tokens if isinstance(event, ReadEvent) else [event.token] if isinstance(event, DrawnEvent) else []
    return sum(1 + len(token.top) for token in tokens)


class Outbox:
    """Queue that passes events of `n_work` works from the engine's thread to the current event loop.

    They pass as they arrive, at most once in `PACE` seconds, if `progressive`, else when a state is saved or a work
    ends. With `most_unread` log-probabilities that the client has not received, the engine waits for the client.
    """

    def __init__(self, progressive: bool, n_work: int = 1, most_unread: int | None = None):
        self._loop, self._progressive, self._n_open = asyncio.get_running_loop(), progressive, n_work
        self._most_unread = most_unread
        self._n_put = self._n_sent = 0  # two counts, because each is changed by one thread only
        self._events: deque[Event] = deque()
        self._arrived, self._ended = asyncio.Event(), asyncio.Event()
        self._is_waiting = self._is_waking = False

    def put(self, event: Event) -> None:
        """Add an event; called by the engine's thread."""
        is_last = isinstance(event, FailedEvent | DoneEvent)
        self._n_put += n_reported(event)
        self._events.append(event)
        # The receiver of a saved state releases the one before; if states waited for the end, memory would grow.
        passes = self._progressive or isinstance(event, SavedEvent)
        if is_last or (passes and self._is_waiting and not self._is_waking):
            self._is_waking = True
            with suppress(RuntimeError):  # the event loop has ended: events have no reader
                self._loop.call_soon_threadsafe(self._wake, is_last)

    def _wake(self, is_last: bool) -> None:
        self._is_waking = False
        self._arrived.set()
        if is_last:
            self._ended.set()

    def sent(self, batch: list[Event]) -> None:
        """Note that the client has received a batch of events; called by the event loop."""
        self._n_sent += sum(map(n_reported, batch))

    @property
    def is_overfull(self) -> bool:
        """True if the client has not received so many log-probabilities that the engine waits."""
        return self._most_unread is not None and self._n_put - self._n_sent >= self._most_unread

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield the events that have arrived, some at a time, until all works have ended or one has failed."""
        while self._n_open > 0:
            self._is_waiting = True  # set before the check, so that a later `put` wakes this task
            while not self._events:
                self._arrived.clear()
                await self._arrived.wait()
            self._is_waiting = False
            batch, size = [], 0
            while self._events and size < _AT_ONCE:
                batch.append(self._events.popleft())
                size += n_reported(batch[-1])
            self._n_open -= sum(isinstance(event, DoneEvent) for event in batch)
            if any(isinstance(event, FailedEvent) for event in batch):
                self._n_open = 0
            yield batch
            if size >= _AT_ONCE:
                await asyncio.sleep(0)  # the turn of other requests
            elif self._n_open > 0 and self._progressive:
                self._ended.clear()
                with suppress(TimeoutError):  # tokens that arrive meanwhile are sent together
                    await asyncio.wait_for(self._ended.wait(), PACE)


@dataclass(eq=False)
class Continuation:
    """One continuation of the text that a work has read."""

    number: int  # among the continuations of a request
    max_tokens: int
    seed: int
    sampling: Sampling
    decoder: Decoder
    stop: StopStrings
    drawn: int = 0  # tokens drawn with this seed before
    flush: bool = True  # an incomplete character at the end is shown as U+FFFD; False: a later token may complete it
    stream: Stream | None = None  # the engine's, once there is a place for it
    n_drawn: int = 0


@dataclass(eq=False)
class Work:
    """Tokens to read once, int64 [n] (none if `after` is given), and the continuations of the text."""

    number: int
    ids: Tensor
    continuations: list[Continuation]
    outbox: Outbox
    after: StreamState | None = None
    forbidden: tuple[int, ...] = ()
    score: bool = False  # score the tokens that are read, and report them in one event for each segment
    top: int | None = None  # alternatives reported for each token; None: log-probabilities are not reported
    attention: bool = False  # report for each token how far back attention reached
    keep: bool = False  # save the states of a kept stream, every `CHECKPOINT_EVERY` tokens and at the end
    segment: int = PROMPT_SEGMENT
    cancelled: bool = False  # set by any thread: the work is removed from the engine before the next step
    arrived: float = field(default_factory=time.perf_counter)
    # The state of the work in the scheduler: what was read, and how many continuations have no place yet and have one.
    read: TextReading | StreamState | None = None
    waiting: deque[Continuation] = field(default_factory=deque)
    running: int = 0
    checkpoint: int = 0

    @property
    def size(self) -> int:
        """Number of places in the queue that the work takes."""
        return max(1, len(self.continuations))
