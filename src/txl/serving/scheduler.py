"""Thread that owns the decode engine: works join and leave the running batch between two steps.

Other threads submit works with `Scheduler.submit`, and receive events through each work's `Outbox`. Prompts are read a
segment at a time between the steps of the running continuations, so that a long prompt does not stop other texts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from txl.errors import UserError
from txl.files import JsonObject
from txl.generation.engine import PROMPT_SEGMENT, DecodeEngine, Stream, TextReading
from txl.generation.sampling import NO_NUMBERS
from txl.serving.attention_reach import AttentionWatch
from txl.serving.metrics import Metrics
from txl.serving.requests import ApiError
from txl.serving.work import (
    CHECKPOINT_EVERY,
    Continuation,
    DoneEvent,
    DrawnEvent,
    EndEvent,
    FailedEvent,
    ReadEvent,
    SavedEvent,
    ScoredToken,
    Work,
)

_SCORED_AT_ONCE = 1 << 22  # log-probabilities (rows times vocabulary) computed at once when text is scored
ENGINE_FAILED = "the engine has failed; see the server's log"
_PAUSE = 0.005  # seconds between two checks whether a client has received more of its event stream
_logger = logging.getLogger(__name__)


class Scheduler(threading.Thread):
    """Thread that steps an engine for all submitted works, until the thread is stopped.

    Args:
        engine: decode engine that only this thread steps.
        metrics: metrics in which tokens and latencies are counted.
        max_queue: largest number of continuations that wait for a place; an empty queue accepts any number at once.
        threads: number of threads that compute a step.
    """

    def __init__(self, engine: DecodeEngine, metrics: Metrics, max_queue: int, threads: int):
        super().__init__(name="txl engine", daemon=True)
        self._threads = threads
        self.engine, self.metrics, self.max_queue = engine, metrics, max_queue
        self._inbox: SimpleQueue[Work | None] = SimpleQueue()  # None wakes the thread
        self._lock = threading.Lock()  # of the two below, which other threads read
        self._queued = 0
        self._accepting = True
        self._is_ending = self._is_aborting = False
        # A work waits, is read, is ready to be continued, and is running as long as it has continuations in the engine.
        self._waiting: deque[Work] = deque()
        self._reading: deque[Work] = deque()
        self._ready: deque[Work] = deque()
        self._running: list[tuple[Work, Continuation]] = []
        self._watch: AttentionWatch | None = None

    def submit(self, works: Sequence[Work]) -> None:
        """Queue works, all or none of them.

        Raises:
            ApiError: if the queue is full, or the scheduler is stopping or has failed.
        """
        size = sum(work.size for work in works)
        with self._lock:
            if not self._accepting:
                raise ApiError(503, "the server is stopping", headers={"Retry-After": "5"})
            if not self.is_alive():
                raise ApiError(503, ENGINE_FAILED, headers={"Retry-After": "60"})
            if self._queued and self._queued + size > self.max_queue:
                message = f"{self._queued} texts are waiting already; try again later"
                raise ApiError(429, message, headers={"Retry-After": "1"})
            self._queued += size
            for work in works:
                self._inbox.put(work)

    def stop(self, grace: float) -> None:
        """Accept no more works, let the accepted works run for up to `grace` seconds, then end them and the thread."""
        self._accepting, self._is_ending = False, True
        self._inbox.put(None)
        self.join(grace)
        if self.is_alive():
            self._is_aborting = True
            self._inbox.put(None)
            self.join(10)

    def run(self) -> None:
        """Take, read and decode works until the scheduler is stopped."""
        torch.set_num_threads(self._threads)
        try:
            while self._goes_on():
                self._drop_cancelled()
                self._admit()
                has_read = self._read_some()
                self._enter_continuations()
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

    def _goes_on(self) -> bool:
        """Queue the submitted works, waiting for one if nothing else is to do; return False if the thread must end."""
        self._take(wait=True)
        return not self._is_aborting and (not self._is_ending or self._busy())

    def _take(self, wait: bool) -> None:
        with suppress(Empty):
            while True:
                work = self._inbox.get(block=wait and not (self._busy() or self._is_ending))
                if work is not None:
                    self._waiting.append(work)

    def _end_all(self) -> None:
        self._take(wait=False)
        for work in {*self._waiting, *self._reading, *self._ready, *(work for work, _ in self._running)}:
            if work.keep and not work.cancelled:
                self._save_at_end(work)
            work.outbox.put(FailedEvent("the server has stopped", 503))
        for queue in (self._waiting, self._reading, self._ready, self._running):
            queue.clear()
        for stream in self.engine.streams:
            self.engine.leave(stream)
        self._gauges()

    def _drop_cancelled(self) -> None:
        for queue in (self._waiting, self._reading, self._ready):
            for work in [work for work in queue if work.cancelled]:
                queue.remove(work)
                self._leave_queue(work.size if queue is self._waiting else len(work.waiting))
                work.waiting.clear()
                if work.running == 0:
                    self._finish(work)
        for work, continuation in [(work, continuation) for work, continuation in self._running if work.cancelled]:
            self._leave(work, continuation)
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
            if not work.continuations:
                self._leave_queue(1)

    def _begin(self, work: Work) -> None:
        work.waiting = deque(work.continuations)
        if work.ids.numel() == 0:
            assert work.after is not None
            work.read, work.checkpoint = work.after, work.after.n_token
            self._ready.append(work)
            return
        if work.attention and self._watch is None:
            self._watch = AttentionWatch(self.engine)
        view = self._watch.view if work.attention and self._watch else None
        work.read = TextReading(self.engine, work.ids, work.after, work.segment, view)
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
                    self._leave_queue(len(work.waiting))
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
            self._save(work, reading)
        return n_read

    def _scored(self, work: Work, hidden: Tensor, targets: Tensor) -> list[ScoredToken]:
        """Return scored tokens of targets int64 [T], from final hidden states [1,T,E]."""
        model = self.engine.model
        with torch.inference_mode():
            if work.top is None:
                losses = model.nll_of(hidden, targets[None])[0]
                if losses.isnan().any():
                    raise UserError(NO_NUMBERS)
                return [ScoredToken(*scores) for scores in zip(targets.tolist(), (-losses).tolist(), strict=True)]
            rows = max(1, _SCORED_AT_ONCE // model.vocab_size)
            tokens: list[ScoredToken] = []
            for states, some in zip(hidden.split(rows, dim=1), targets.split(rows), strict=True):
                log_probs = model.log_probs_of(states)[0]
                if log_probs.isnan().any():
                    raise UserError(NO_NUMBERS)
                tokens += _details(log_probs, some, work.top)
        return tokens

    def _enter_continuations(self) -> None:
        """Give places to continuations of works that have been read, in turn; finish works that have none."""
        for work in [work for work in self._ready if not work.waiting]:
            self._ready.remove(work)
            self._finish(work)
        while self._ready and len(self.engine.streams) < self.engine.max_streams:
            work = self._ready.popleft()
            self._enter(work, work.waiting.popleft())
            if work.waiting:
                self._ready.append(work)
            elif work.running == 0:
                self._finish(work)

    def _enter(self, work: Work, continuation: Continuation) -> None:
        """Give a continuation a place in the engine; if the engine raises an error, the work fails."""
        self._leave_queue(1)
        if continuation.max_tokens == 0:
            work.outbox.put(EndEvent(continuation.number, "length", ""))
            return
        assert work.read is not None
        try:
            continuation.stream = self.engine.enter(
                work.read,
                seed=continuation.seed,
                drawn=continuation.drawn,
                sampling=continuation.sampling,
                forbidden=work.forbidden,
            )
        except Exception as error:
            self._leave_queue(len(work.waiting))
            work.waiting.clear()
            work.cancelled = True
            work.outbox.put(_failure(error))
            return
        work.running += 1
        self._running.append((work, continuation))

    def _decode(self) -> bool:
        """Draw a token for each continuation that does not wait for its client; return False if there is none."""
        running: list[tuple[Work, Continuation]] = []
        paused: list[tuple[Work, Continuation]] = []
        for pair in self._running:  # the question is asked once: the event loop changes the answer meanwhile
            (paused if pair[0].outbox.is_overfull else running).append(pair)
        if not running:
            return False
        reach: dict[Continuation, JsonObject] = {}
        streams = [continuation.stream for _, continuation in running if continuation.stream is not None]
        try:
            for work, continuation in running:
                if work.attention and continuation.stream is not None:
                    self._watch = self._watch or AttentionWatch(self.engine)
                    reach[continuation] = self._watch.of_next(continuation.stream)
            log_probs = self.engine.advance(streams)
            drawn = self.engine.draw(log_probs, streams)
        except Exception as error:  # fails all works: the error does not tell which of them caused it
            for stream in self.engine.streams:
                self.engine.leave(stream)
            self._running, failure = [], _failure(error)
            for work, continuation in (*running, *paused):
                continuation.stream = None
                self._fail(work, failure)
            return True
        self.metrics.steps.inc()
        self.metrics.tokens_generated.inc(len(drawn))
        rows = [row for row, stream in enumerate(streams) if stream.ended is None]
        self._running = [*(running[row] for row in rows), *paused]
        for (work, _), stream in zip(running, streams, strict=True):
            if stream.ended is not None:
                self._fail(work, FailedEvent(stream.ended))
        for row, token in zip(rows, drawn.tolist(), strict=True):
            work, continuation = running[row]
            scored = ScoredToken(token, None)
            if work.top is not None or work.keep:
                with torch.inference_mode():
                    target = torch.tensor([token], device=log_probs.device)
                    [scored] = _details(log_probs[row : row + 1], target, work.top)
            scored.attention = reach.get(continuation)
            self._drawn(work, continuation, scored)
        return True

    def _fail(self, work: Work, failure: FailedEvent) -> None:
        """End a work one of whose continuations has left the engine by an error."""
        work.running, work.cancelled = work.running - 1, True
        work.outbox.put(failure)

    def _drawn(self, work: Work, continuation: Continuation, token: ScoredToken) -> None:
        """Report a drawn token of a continuation in an event, and end the continuation if the token was the last."""
        stop, stream = continuation.stop, continuation.stream
        if continuation.n_drawn == 0:
            self.metrics.first_token.observe(time.perf_counter() - work.arrived)
        continuation.n_drawn += 1
        token.piece = continuation.decoder.push(token.id)
        token.text = stop.push(token.piece)
        work.outbox.put(DrawnEvent(continuation.number, token))
        if work.keep and continuation.n_drawn % CHECKPOINT_EVERY == 0 and stream is not None:
            self._save(work, stream)
        if not stop.found and continuation.n_drawn < continuation.max_tokens:
            return
        rest = "" if stop.found or not continuation.flush else stop.push(continuation.decoder.flush())
        rest += "" if stop.found else stop.flush()  # the last character may have completed a stop string
        work.outbox.put(EndEvent(continuation.number, "stop" if stop.found else "length", rest))
        self._leave(work, continuation)
        if work.running == 0 and not work.waiting:
            self._finish(work)

    def _leave(self, work: Work, continuation: Continuation) -> None:
        """Remove a continuation from the engine; first save its state if the work has `keep` set."""
        self._running = [pair for pair in self._running if pair[1] is not continuation]
        work.running -= 1
        stream = continuation.stream
        if stream is None or stream.ended is not None:
            return
        if work.keep:
            self._save(work, stream)
        self.engine.leave(stream)

    def _save_at_end(self, work: Work) -> None:
        """Save the state of a kept stream when its work ends, unless `_leave` has saved the state."""
        for continuation in work.continuations:
            if continuation.n_drawn:
                if continuation.stream in self.engine.streams:
                    self._save(work, continuation.stream)
                return
        if isinstance(work.read, TextReading):
            self._save(work, work.read)

    def _save(self, work: Work, source: Stream | TextReading) -> None:
        """Report the state of a kept stream in an event; if there is no memory for the state, only this work fails."""
        try:
            if isinstance(source, Stream):
                work.outbox.put(SavedEvent(self.engine.save(source), source.drawn))
            else:
                work.outbox.put(SavedEvent(source.state(), 0))
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
        return [ScoredToken(*scores) for scores in zip(targets.tolist(), own[:, 0].tolist(), strict=True)]
    ranks = ((log_probs > own).sum(dim=1) + 1).tolist()
    values, ids = log_probs.topk(min(top, log_probs.shape[1]), dim=1)
    alternatives = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    rows = zip(targets.tolist(), own[:, 0].tolist(), alternatives, ranks, strict=True)
    return [ScoredToken(*row) for row in rows]
