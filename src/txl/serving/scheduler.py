"""Thread that owns the decode engine: works join and leave the running batch between two steps.

Everything else talks to it through `Scheduler.submit` and the events that it puts into a work's `Outbox`. A prompt is
read a segment at a time between the steps of the streams that are decoded, so that nobody waits for a long one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from txl.errors import UserError
from txl.files import JsonObject
from txl.generation.engine import DecodeEngine
from txl.generation.reading import PROMPT_SEGMENT, StreamState, TextReading
from txl.serving.attention_reach import AttentionWatch
from txl.serving.metrics import Metrics
from txl.serving.work import (
    CHECKPOINT_EVERY,
    DoneEvent,
    DrawnEvent,
    EndOfLaneEvent,
    FailedEvent,
    Lane,
    ReadEvent,
    SavedEvent,
    ScoredToken,
    Work,
)

_SCORED_AT_ONCE = 1 << 22
"""Log-probabilities computed at once while text is scored: rows times vocabulary."""
_logger = logging.getLogger(__name__)


class Unavailable(Exception):
    """The queue is full, or the server is stopping."""

    def __init__(self, message: str, status: int, retry_after: int):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Scheduler(threading.Thread):
    """Thread that steps an engine for all works that were submitted, until it is stopped.

    Args:
        engine: nobody else touches it.
        metrics: told of tokens and latencies.
        max_queue: most lanes that wait for a place.
        threads: threads that a step computes with.
    """

    def __init__(self, engine: DecodeEngine, metrics: Metrics, max_queue: int, threads: int):
        super().__init__(name="txl engine", daemon=True)
        self._threads = threads
        self.engine, self.metrics, self.max_queue = engine, metrics, max_queue
        self._inbox: SimpleQueue[Work | Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0
        self._accepting = True
        self._waiting: deque[Work] = deque()
        self._reading: deque[Work] = deque()
        self._ready: deque[Work] = deque()
        self._running: list[tuple[Work, Lane]] = []
        self._watch: AttentionWatch | None = None
        self._ending = False

    @property
    def queued(self) -> int:
        """Lanes that wait for a place."""
        return self._queued

    def submit(self, works: Sequence[Work]) -> None:
        """Queue works, all or none of them.

        Raises:
            Unavailable: if the queue is full, or the scheduler is stopping.
        """
        size = sum(work.size for work in works)
        with self._lock:
            if not self._accepting:
                raise Unavailable("the server is stopping", 503, 5)
            if not self.is_alive():
                raise Unavailable("the engine has failed; see the server's log", 503, 60)
            if self._queued and self._queued + size > self.max_queue:
                raise Unavailable(f"{self._queued} texts are waiting already; try again later", 429, 1)
            self._queued += size
            for work in works:
                self._inbox.put(work)

    def stop(self, grace: float) -> None:
        """Accept nothing more, let what runs go on for up to `grace` seconds, then end it; waits for the thread."""
        self._accepting = False
        self._inbox.put(self._end_when_done)
        self.join(grace)
        if self.is_alive():
            self._inbox.put(None)
            self.join(10)

    def _end_when_done(self) -> None:
        self._ending = True

    def run(self) -> None:
        """Take, read and decode works until the scheduler is stopped."""
        torch.set_num_threads(self._threads)
        try:
            while self._take():
                self._drop_cancelled()
                self._admit()
                self._read_some()
                self._enter_lanes()
                self._decode()
                self._gauges()
        except BaseException:
            _logger.exception("the engine's thread has failed")
            raise
        finally:
            with self._lock:
                self._accepting = False
            self._end_all()

    def _busy(self) -> bool:
        return bool(self._waiting or self._reading or self._ready or self._running)

    def _take(self) -> bool:
        """Take what has been submitted, waiting for it if there is nothing else to do; False to end."""
        while True:
            try:
                item = self._inbox.get(block=not (self._busy() or self._ending))
            except Empty:
                break
            if item is None:
                return False
            if callable(item):
                item()
            else:
                self._waiting.append(item)
        return not self._ending or self._busy()

    def _end_all(self) -> None:
        works = {*self._waiting, *self._reading, *self._ready, *(work for work, _ in self._running)}
        for work in works:
            if work.keep and not work.cancelled:
                self._save_at_end(work)
            work.outbox.put(FailedEvent("the server has stopped", 503))
        while True:
            try:
                item = self._inbox.get_nowait()
            except Empty:
                break
            if isinstance(item, Work):
                item.outbox.put(FailedEvent("the server has stopped", 503))
        for queue in (self._waiting, self._reading, self._ready, self._running):
            queue.clear()
        for stream in self.engine.streams:
            self.engine.leave(stream)
        self._gauges()

    def _drop_cancelled(self) -> None:
        for queue in (self._waiting, self._reading, self._ready):
            for work in [each for each in queue if each.cancelled]:
                queue.remove(work)
                if queue is self._waiting:
                    self._leave_queue(work.size)
                else:
                    self._leave_queue(len(work.waiting_lanes))
                    work.waiting_lanes.clear()
                if work.running == 0:
                    self._finish(work)
        if any(work.cancelled for work, _ in self._running):
            for work, lane in [each for each in self._running if each[0].cancelled]:
                self._leave(work, lane)
                if work.running == 0:
                    self._finish(work)

    def _leave_queue(self, size: int) -> None:
        with self._lock:
            self._queued -= size

    def _admit(self) -> None:
        """Begin to read for works that wait, while there are places."""
        while self._waiting and len(self._running) + len(self._reading) + len(self._ready) < self.engine.max_streams:
            work = self._waiting.popleft()
            try:
                self._begin(work)
            except Exception as error:
                self._leave_queue(work.size)
                work.outbox.put(FailedEvent(str(error), 400) if isinstance(error, UserError) else _failure(error))
                continue
            if not work.lanes:
                self._leave_queue(1)

    def _begin(self, work: Work) -> None:
        work.waiting_lanes = deque(work.lanes)
        if work.ids.numel() == 0:
            assert work.after is not None
            work.read, work.checkpoint = work.after, work.after.n_token
            self._ready.append(work)
            return
        if work.attention and self._watch is None:
            self._watch = AttentionWatch(self.engine)
        view = self._watch.view if work.attention and self._watch else None
        work.read = TextReading(self.engine.reader, work.ids, work.after, work.segment, view)
        work.checkpoint = 0 if work.after is None else work.after.n_token
        if work.score and (work.after is None or work.after.n_token == 0):
            work.outbox.put(ReadEvent(work.number, [ScoredToken(int(work.ids[0]), None)], 1, work.ids.numel()))
        self._reading.append(work)

    def _read_some(self) -> None:
        """Read segments of prompts, in turn, up to about one segment's tokens."""
        budget = PROMPT_SEGMENT
        while self._reading and budget > 0:
            work = self._reading[0]
            assert isinstance(work.read, TextReading)
            if not work.read.done:
                try:
                    budget -= self._read_segment(work, work.read)
                except Exception as error:
                    self._reading.popleft()
                    self._leave_queue(len(work.waiting_lanes))
                    work.outbox.put(_failure(error))
                    continue
            self._reading.popleft()
            (self._ready if work.read.done else self._reading).append(work)

    def _read_segment(self, work: Work, reading: TextReading) -> int:
        hidden, targets = reading.step()
        n_read = targets.shape[1]
        self.metrics.tokens_read.inc(n_read)
        tokens: list[ScoredToken] = []
        if work.score:
            tokens = self._scored(work, hidden, targets[0])
            if work.attention and self._watch is not None:
                for token, reach in zip(tokens, self._watch.take(), strict=True):
                    token.attention = reach
        total = work.ids.numel()
        work.outbox.put(ReadEvent(work.number, tokens, total - (reading.n_token - 1 - reading.read), total))
        if work.keep and not reading.done and reading.read + 1 - work.checkpoint >= CHECKPOINT_EVERY:
            work.checkpoint = reading.read + 1
            self._save(work, reading.state, 0)
        return n_read

    def _scored(self, work: Work, hidden: Tensor, targets: Tensor) -> list[ScoredToken]:
        """Return the targets with their log-probabilities: final hidden states [1,T,E], int64 [T]."""
        model = self.engine.model
        with torch.inference_mode():
            if work.top is None:
                losses = model.nll_of(hidden, targets[None])[0]
                return [ScoredToken(*each) for each in zip(targets.tolist(), (-losses).tolist(), strict=True)]
            rows = max(1, _SCORED_AT_ONCE // model.vocab_size)
            parts = [model.log_probs_of(some)[0] for some in hidden.split(rows, dim=1)]
            found: list[ScoredToken] = []
            for log_probs, some in zip(parts, targets.split(rows), strict=True):
                found += _details(log_probs, some, work.top)
        return found

    def _enter_lanes(self) -> None:
        """Give places to lanes whose prompt is read, a work after the other in turn; works without lanes are done."""
        for work in [each for each in self._ready if not each.waiting_lanes]:
            self._ready.remove(work)
            self._finish(work)
        while self._ready and len(self.engine.streams) < self.engine.max_streams:
            work = self._ready.popleft()
            self._enter(work, work.waiting_lanes.popleft())
            if work.waiting_lanes:
                self._ready.append(work)
            elif work.running == 0:
                self._finish(work)

    def _enter(self, work: Work, lane: Lane) -> None:
        """Give a lane a place in the engine; if that cannot be, the work has failed."""
        self._leave_queue(1)
        if lane.max_tokens == 0:
            work.outbox.put(EndOfLaneEvent(lane.number, "length", ""))
            return
        assert work.read is not None
        try:
            lane.stream = self.engine.enter(
                work.read, seed=lane.seed, drawn=lane.drawn, sampling=lane.sampling, forbidden=work.forbidden
            )
        except Exception as error:
            self._leave_queue(len(work.waiting_lanes))
            work.waiting_lanes.clear()
            work.cancelled = True
            work.outbox.put(_failure(error))
            return
        work.running += 1
        self._running.append((work, lane))

    def _decode(self) -> None:
        """Draw a token for every lane."""
        if not self._running:
            return
        running = self._running
        watched: dict[Lane, JsonObject] = {}
        streams = [lane.stream for _, lane in running if lane.stream is not None]
        try:
            for work, lane in running:
                if work.attention and lane.stream is not None:
                    self._watch = self._watch or AttentionWatch(self.engine)
                    watched[lane] = self._watch.of_next(lane.stream)
            log_probs = self.engine.advance(streams)
            drawn = self.engine.draw(log_probs, streams)
        except Exception as error:  # of all of them: there is no telling which one it came from
            failed = _failure(error)
            for stream in self.engine.streams:
                self.engine.leave(stream)
            self._running = []
            for work, lane in running:
                lane.stream, work.running, work.cancelled = None, work.running - 1, True
                work.outbox.put(failed)
            return
        self.metrics.steps.inc()
        self.metrics.tokens_generated.inc(len(drawn))
        ended = [row for row, stream in enumerate(streams) if stream.ended is not None]
        rows = [row for row in range(len(streams)) if row not in ended] if ended else range(len(streams))
        entries, self._running = running, [running[row] for row in rows]
        for row in ended:
            work, lane = entries[row]
            work.running, work.cancelled = work.running - 1, True
            work.outbox.put(FailedEvent(streams[row].ended or "", 500))
        for row, token in zip(rows, drawn.tolist(), strict=True):
            work, lane = entries[row]
            if work.top is not None or work.keep:
                with torch.inference_mode():
                    target = torch.tensor([token], device=log_probs.device)
                    [scored] = _details(log_probs[row : row + 1], target, work.top)
            else:
                scored = ScoredToken(token, None)
            scored.attention = watched.get(lane)
            self._drawn(work, lane, scored)

    def _drawn(self, work: Work, lane: Lane, token: ScoredToken) -> None:
        """Send a token of a lane on its way, and end the lane if it was the last."""
        if lane.made == 0:
            self.metrics.first_token.observe(time.perf_counter() - work.arrived)
        lane.made += 1
        token.piece = lane.decoder.push(token.id)
        token.text = lane.stop.push(token.piece)
        work.outbox.put(DrawnEvent(lane.number, token))
        if work.keep and lane.made % CHECKPOINT_EVERY == 0 and lane.stream is not None:
            self._save(work, partial(self.engine.save, lane.stream), lane.stream.drawn)
        if not lane.stop.found and lane.made < lane.max_tokens:
            return
        rest = ""
        if not lane.stop.found:
            rest = lane.stop.push(lane.decoder.flush()) if lane.flush else ""
        if not lane.stop.found:
            rest += lane.stop.flush()
        work.outbox.put(EndOfLaneEvent(lane.number, "stop" if lane.stop.found else "length", rest))
        self._leave(work, lane)
        if work.running == 0 and not work.waiting_lanes:
            self._finish(work)

    def _leave(self, work: Work, lane: Lane) -> None:
        """Take a lane out of the engine, its state saved if it is kept."""
        self._running = [each for each in self._running if each[1] is not lane]
        work.running -= 1
        stream = lane.stream
        if stream is None or stream.ended is not None:
            return
        if work.keep:
            self._save(work, partial(self.engine.save, stream), stream.drawn)
        self.engine.leave(stream)

    def _save_at_end(self, work: Work) -> None:
        """Save the state of a kept stream when its work ends, unless a lane has saved it."""
        lane = work.lanes[0] if work.lanes else None
        if lane is not None and lane.made:
            if lane.stream is not None and lane.stream in self.engine.streams:
                self._save(work, partial(self.engine.save, lane.stream), lane.stream.drawn)
        elif isinstance(work.read, TextReading):
            self._save(work, work.read.state, 0)

    def _save(self, work: Work, state: Callable[[], StreamState], drawn: int) -> None:
        """Hand over the state of a kept stream; where there is no memory for it, this work alone fails."""
        try:
            work.outbox.put(SavedEvent(state(), drawn))
        except Exception as error:
            work.cancelled = True
            work.outbox.put(_failure(error))

    def _finish(self, work: Work) -> None:
        if work.keep:
            self._save_at_end(work)
        work.read = None
        work.outbox.put(DoneEvent())

    def _gauges(self) -> None:
        self.metrics.running.set(len(self._running) + len(self._reading))
        self.metrics.queued.set(self._queued)


def _failure(error: Exception) -> FailedEvent:
    """Return what a client is told of an error; the log has all of it."""
    if isinstance(error, UserError):
        return FailedEvent(str(error), 500)
    _logger.exception("a text could not be read or continued")
    return FailedEvent("the server failed here; its log says why", 500)


def _details(log_probs: Tensor, targets: Tensor, top: int | None) -> list[ScoredToken]:
    """Log-probabilities [T,V] and targets int64 [T] as scored tokens, with so many alternatives.

    The number of a token is the same wherever it appears, to the last bit.
    """
    log_probs = log_probs.float()
    own = log_probs.gather(1, targets[:, None])
    if top is None:
        return [ScoredToken(*each) for each in zip(targets.tolist(), own[:, 0].tolist(), strict=True)]
    ranks = ((log_probs > own).sum(dim=1) + 1).tolist()
    values, ids = log_probs.topk(min(top, log_probs.shape[1]), dim=1)
    alternatives = [list(zip(*each, strict=True)) for each in zip(ids.tolist(), values.tolist(), strict=True)]
    rows = zip(targets.tolist(), own[:, 0].tolist(), alternatives, ranks, strict=True)
    return [ScoredToken(*each) for each in rows]
