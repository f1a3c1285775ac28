"""Thread that owns the decode engine: works join and leave the running batch between two steps.

Other threads submit works with `Scheduler.submit`, and receive events through each work's `Outbox`. Prompts are read a
segment at a time between the steps of the decoded streams, so that a long prompt does not stop other texts.
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
from txl.generation.sampling import NO_NUMBERS
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
"""Largest number of log-probabilities (rows times vocabulary) computed at once when text is scored."""
_PAUSE = 0.005
"""Seconds between two checks whether a client has received more of its event stream."""
_logger = logging.getLogger(__name__)


class Unavailable(Exception):
    """Error: the queue is full, the server is stopping, or the engine has failed."""

    def __init__(self, message: str, status: int, retry_after: int):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Scheduler(threading.Thread):
    """Thread that steps an engine for all submitted works, until the thread is stopped.

    Args:
        engine: decode engine that only this thread steps.
        metrics: metrics in which tokens and latencies are counted.
        max_queue: largest number of lanes that wait for a place; an empty queue accepts any number at once.
        threads: number of threads that compute a step.
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

    def submit(self, works: Sequence[Work]) -> None:
        """Queue works, all or none of them.

        Raises:
            Unavailable: if the queue is full, or the scheduler is stopping or has failed.
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
        """Accept no more works, let the accepted works run for up to `grace` seconds, then end them and the thread."""
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
                has_read = self._read_some()
                self._enter_lanes()
                if not self._decode() and not has_read and self._busy():
                    time.sleep(_PAUSE)  # all works wait for their clients
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
        """Queue the submitted works, waiting for one if nothing else is to do; return False if the thread must end."""
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
        """Start to read the prompts of waiting works, while places are free."""
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

    def _read_some(self) -> bool:
        """Read segments of the prompts in turn, about `PROMPT_SEGMENT` tokens in all; return False if none was read."""
        budget, n_paused, has_read = PROMPT_SEGMENT, 0, False
        while n_paused < len(self._reading) and budget > 0:
            work = self._reading[0]
            assert isinstance(work.read, TextReading)
            if work.outbox.is_overfull:
                self._reading.rotate(-1)
                n_paused += 1
                continue
            n_paused, has_read = 0, True
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
        return has_read

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
        """Return scored tokens of targets int64 [T], from final hidden states [1,T,E]."""
        model = self.engine.model
        with torch.inference_mode():
            if work.top is None:
                losses = model.nll_of(hidden, targets[None])[0]
                if losses.isnan().any():
                    raise UserError(NO_NUMBERS)
                return [ScoredToken(*each) for each in zip(targets.tolist(), (-losses).tolist(), strict=True)]
            rows = max(1, _SCORED_AT_ONCE // model.vocab_size)
            parts = [model.log_probs_of(some)[0] for some in hidden.split(rows, dim=1)]
            found: list[ScoredToken] = []
            for log_probs, some in zip(parts, targets.split(rows), strict=True):
                if log_probs.isnan().any():
                    raise UserError(NO_NUMBERS)
                found += _details(log_probs, some, work.top)
        return found

    def _enter_lanes(self) -> None:
        """Give places to lanes whose prompt has been read, one lane per work in turn; finish works without lanes."""
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
        """Give a lane a place in the engine; if the engine raises an error, the work fails."""
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

    def _decode(self) -> bool:
        """Draw a token for every running lane that does not wait for its client; return False if there is none."""
        running: list[tuple[Work, Lane]] = []
        paused: list[tuple[Work, Lane]] = []
        for each in self._running:  # each is asked once: the event loop changes the answer meanwhile
            (paused if each[0].outbox.is_overfull else running).append(each)
        if not running:
            return False
        watched: dict[Lane, JsonObject] = {}
        streams = [lane.stream for _, lane in running if lane.stream is not None]
        try:
            for work, lane in running:
                if work.attention and lane.stream is not None:
                    self._watch = self._watch or AttentionWatch(self.engine)
                    watched[lane] = self._watch.of_next(lane.stream)
            log_probs = self.engine.advance(streams)
            drawn = self.engine.draw(log_probs, streams)
        except Exception as error:  # fails all works: the error does not tell which of them caused it
            failed = _failure(error)
            for stream in self.engine.streams:
                self.engine.leave(stream)
            self._running = []
            for work, lane in (*running, *paused):
                lane.stream, work.running, work.cancelled = None, work.running - 1, True
                work.outbox.put(failed)
            return True
        self.metrics.steps.inc()
        self.metrics.tokens_generated.inc(len(drawn))
        ended = [row for row, stream in enumerate(streams) if stream.ended is not None]
        rows = [row for row in range(len(streams)) if row not in ended] if ended else range(len(streams))
        entries, self._running = running, [*(running[row] for row in rows), *paused]
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
        return True

    def _drawn(self, work: Work, lane: Lane, token: ScoredToken) -> None:
        """Report a drawn token of a lane in an event, and end the lane if the token was the last."""
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
        """Remove a lane from the engine; first save its state if the work has `keep` set."""
        self._running = [each for each in self._running if each[1] is not lane]
        work.running -= 1
        stream = lane.stream
        if stream is None or stream.ended is not None:
            return
        if work.keep:
            self._save(work, partial(self.engine.save, stream), stream.drawn)
        self.engine.leave(stream)

    def _save_at_end(self, work: Work) -> None:
        """Save the state of a kept stream when its work ends, unless `_leave` has saved the state."""
        lane = work.lanes[0] if work.lanes else None
        if lane is not None and lane.made:
            if lane.stream is not None and lane.stream in self.engine.streams:
                self._save(work, partial(self.engine.save, lane.stream), lane.stream.drawn)
        elif isinstance(work.read, TextReading):
            self._save(work, work.read.state, 0)

    def _save(self, work: Work, state: Callable[[], StreamState], drawn: int) -> None:
        """Report the state of a kept stream in an event; if there is no memory for the state, only this work fails."""
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
    """Return an error as an event for the client; log errors other than `UserError` with their traceback."""
    if isinstance(error, UserError):
        return FailedEvent(str(error), 500)
    _logger.exception("a text could not be read or continued")
    return FailedEvent("the server failed here; its log says why", 500)


def _details(log_probs: Tensor, targets: Tensor, top: int | None) -> list[ScoredToken]:
    """Return targets int64 [T] as scored tokens with `top` alternatives each, from log-probabilities [T,V].

    A token has the same log-probability as a target and as an alternative, to the last bit.
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
