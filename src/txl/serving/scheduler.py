"""Thread that owns the decode engine: works join and leave the running batch between two steps.

Other threads submit works with `Scheduler.submit`, and receive events through each work's `Outbox`. Prompts are read a
segment at a time between the steps of the running continuations, so that a long prompt does not stop other texts.

Shapes: T queries or targets of a segment, S keys, E width of hidden states, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from txl.analysis.observation import AttentionInputs, observed
from txl.errors import UserError
from txl.files import JsonObject
from txl.generation.engine import PROMPT_SEGMENT, DecodeEngine, Stream, TextReading
from txl.generation.sampling import NO_NUMBERS
from txl.models.structure import evaluation_view
from txl.serving.requests import ApiError, Metrics
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

ENGINE_FAILED = "the engine has failed; see the server's log"
_SCORED_AT_ONCE = 1 << 22  # log-probabilities (rows times vocabulary) computed at once when text is scored
_MOST = 0.9  # share of the attention that `reach` covers
_PAUSE = 0.005  # seconds between two checks whether a client has received more of its event stream
_logger = logging.getLogger(__name__)


class Scheduler(threading.Thread):
    """Thread that steps an engine, with `threads` threads, for all submitted works, until the thread is stopped.

    At most `max_queue` continuations wait for a place; an empty queue accepts any number at once.
    """

    def __init__(self, engine: DecodeEngine, metrics: Metrics, max_queue: int, threads: int):
        super().__init__(name="txl engine", daemon=True)
        self.engine, self.metrics, self.max_queue, self._threads = engine, metrics, max_queue, threads
        self._inbox: SimpleQueue[Work | None] = SimpleQueue()  # None wakes the thread
        self._lock = threading.Lock()  # of the two below, which other threads read
        self._queued, self._accepting = 0, True
        self._is_ending = self._is_aborting = False
        # A work waits, is read, is ready to be continued, and is running as long as it has continuations in the engine.
        self._waiting: deque[Work] = deque()
        self._reading: deque[Work] = deque()
        self._ready: deque[Work] = deque()
        self._running: list[tuple[Work, Continuation]] = []
        self._watch: AttentionWatch | None = None

    def submit(self, works: Sequence[Work]) -> None:
        """Queue works, all or none (ApiError if the queue is full, or the scheduler is stopping or has failed)."""
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
            while True:
                self._take(wait=True)
                if self._is_aborting or (self._is_ending and not self._busy()):
                    break
                self._drop_cancelled()
                self._admit()
                has_read = self._read()
                self._enter()
                if not self._decode() and not has_read and self._busy():
                    time.sleep(_PAUSE)  # all works wait for their clients
                self._gauges()
        except BaseException:
            _logger.exception("the engine's thread has failed")
            raise
        finally:
            with self._lock:
                self._accepting = False
            self._take(wait=False)
            for work in {*self._waiting, *self._reading, *self._ready, *(work for work, _ in self._running)}:
                self._finish(work, FailedEvent("the server has stopped", 503))
            for queue in (self._waiting, self._reading, self._ready, self._running):
                queue.clear()
            for stream in self.engine.streams:
                self.engine.leave(stream)
            self._gauges()

    def _busy(self) -> bool:
        return bool(self._waiting or self._reading or self._ready or self._running)

    def _take(self, wait: bool) -> None:
        """Queue the submitted works; if `wait` is true and nothing else is to do, wait for one."""
        with suppress(Empty):
            while True:
                work = self._inbox.get(block=wait and not (self._busy() or self._is_ending))
                if work is not None:
                    self._waiting.append(work)

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

    def _leave_queue(self, size: int) -> None:
        with self._lock:
            self._queued -= size

    def _admit(self) -> None:
        """Start to read the prompts of waiting works, while places are free."""
        while self._waiting and len(self._running) + len(self._reading) + len(self._ready) < self.engine.max_streams:
            work = self._waiting.popleft()
            work.waiting, work.checkpoint = deque(work.continuations), work.after.n_token if work.after else 0
            if not work.continuations:
                self._leave_queue(1)
            if work.ids.numel() == 0:
                work.read = work.after
                self._ready.append(work)
                continue
            try:
                view = None
                if work.attention:
                    self._watch = self._watch or AttentionWatch(self.engine)
                    view = self._watch.view
                work.read = TextReading(self.engine, work.ids, work.after, work.segment, view)
            except Exception as error:
                self._leave_queue(len(work.waiting))
                work.outbox.put(FailedEvent(str(error), 400) if isinstance(error, UserError) else _failure(error))
                continue
            if work.score and work.checkpoint == 0:
                work.outbox.put(ReadEvent(work.number, [ScoredToken(int(work.ids[0]), None)], 1, work.ids.numel()))
            self._reading.append(work)

    def _read(self) -> bool:
        """Read segments of the prompts in turn, about `PROMPT_SEGMENT` tokens in all; return False if none was read."""
        budget, n_paused, has_read = PROMPT_SEGMENT, 0, False
        while n_paused < len(self._reading) and budget > 0:
            work = self._reading[0]
            reading, total = work.read, work.ids.numel()
            assert isinstance(reading, TextReading)
            if work.outbox.is_overfull:
                self._reading.rotate(-1)
                n_paused += 1
                continue
            n_paused, has_read = 0, True
            try:
                if not reading.done:
                    hidden, targets = reading.step()
                    budget -= targets.shape[1]
                    self.metrics.tokens_read.inc(targets.shape[1])
                    tokens = self._scored(work, hidden, targets[0]) if work.score else []
                    n_read = total - (reading.n_token - 1 - reading.read)
                    work.outbox.put(ReadEvent(work.number, tokens, n_read, total))
            except Exception as error:
                self._reading.popleft()
                self._leave_queue(len(work.waiting))
                work.outbox.put(_failure(error))
                continue
            if work.keep and not reading.done and reading.read + 1 - work.checkpoint >= CHECKPOINT_EVERY:
                work.checkpoint = reading.read + 1
                self._save(work, reading)
            if not reading.done:
                self._reading.rotate(-1)
                continue
            self._reading.popleft()
            if work.waiting:
                self._ready.append(work)
            else:
                self._finish(work)
        return has_read

    def _scored(self, work: Work, hidden: Tensor, targets: Tensor) -> list[ScoredToken]:
        """Return scored tokens of targets int64 [T], from final hidden states [1,T,E]."""
        model, tokens = self.engine.model, list[ScoredToken]()
        rows = len(targets) if work.top is None else max(1, _SCORED_AT_ONCE // model.vocab_size)
        with torch.inference_mode():
            for states, some in zip(hidden.split(rows, dim=1), targets.split(rows), strict=True):
                scores = -model.nll_of(states, some[None])[0] if work.top is None else model.log_probs_of(states)[0]
                if scores.isnan().any():
                    raise UserError(NO_NUMBERS)
                if work.top is None:
                    tokens = [ScoredToken(*pair) for pair in zip(some.tolist(), scores.tolist(), strict=True)]
                else:
                    tokens += _details(scores, some, work.top)
        if work.attention and self._watch is not None:
            for token, reach in zip(tokens, self._watch.take(), strict=True):
                token.attention = reach
        return tokens

    def _enter(self) -> None:
        """Give places to continuations of works that have been read, in turn; if the engine refuses, a work fails."""
        while self._ready and len(self.engine.streams) < self.engine.max_streams:
            work = self._ready.popleft()
            continuation = work.waiting.popleft()
            self._leave_queue(1)
            assert work.read is not None
            try:
                if continuation.max_tokens == 0:
                    work.outbox.put(EndEvent(continuation.number, "length", ""))
                else:
                    continuation.stream = self.engine.enter(
                        work.read,
                        seed=continuation.seed,
                        drawn=continuation.drawn,
                        sampling=continuation.sampling,
                        forbidden=work.forbidden,
                    )
                    work.running += 1
                    self._running.append((work, continuation))
            except Exception as error:
                self._leave_queue(len(work.waiting))
                work.waiting.clear()
                work.cancelled = True
                work.outbox.put(_failure(error))
            if work.waiting:
                self._ready.append(work)
            elif work.running == 0:
                self._finish(work)

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
            for (work, continuation), stream in zip(running, streams, strict=True):
                if work.attention:
                    self._watch = self._watch or AttentionWatch(self.engine)
                    reach[continuation] = self._watch.of_next(stream)
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

    def _leave(self, work: Work, continuation: Continuation) -> None:
        """Remove a continuation from the engine, after saving its state if it is to be kept; the last ends its work."""
        self._running = [pair for pair in self._running if pair[1] is not continuation]
        work.running -= 1
        stream = continuation.stream
        if stream is not None and stream.ended is None:
            if work.keep:
                self._save(work, stream)
            self.engine.leave(stream)
        if work.running == 0 and not work.waiting:
            self._finish(work)

    def _save(self, work: Work, source: Stream | TextReading) -> None:
        """Report the state of a kept stream in an event; if there is no memory for the state, only this work fails."""
        try:
            is_stream = isinstance(source, Stream)
            state = self.engine.save(source) if is_stream else source.state()
            work.outbox.put(SavedEvent(state, source.drawn if is_stream else 0))
        except Exception as error:
            work.cancelled = True
            work.outbox.put(_failure(error))

    def _finish(self, work: Work, event: DoneEvent | FailedEvent | None = None) -> None:
        """Report the end of a work, after the state of a kept stream unless `_leave` has saved it."""
        if work.keep:
            drawing = [continuation for continuation in work.continuations if continuation.n_drawn]
            if drawing and drawing[0].stream in self.engine.streams:
                self._save(work, drawing[0].stream)
            elif not drawing and isinstance(work.read, TextReading):
                self._save(work, work.read)
        work.read = None
        work.outbox.put(event or DoneEvent())

    def _gauges(self) -> None:
        self.metrics.running.set(len(self._running) + len(self._reading))
        self.metrics.queued.set(self._queued)


def _failure(error: Exception) -> FailedEvent:
    """Return an error as an event for the client; log errors other than `UserError` with their traceback."""
    if isinstance(error, UserError):
        return FailedEvent(str(error))
    _logger.exception("a text could not be read or continued")
    return FailedEvent("the server failed here; its log says why")


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


class AttentionWatch:
    """A view of an engine's model that tells how far back a token's attention reached, over all layers and heads.

    The cost is one more computation of a segment's attention scores, in PyTorch, layer by layer.
    """

    def __init__(self, engine: DecodeEngine):
        self._engine = engine
        self.view = evaluation_view(engine.model)  # reads segments like the engine's model
        self._weights: list[Tensor] = []  # [T,S] of each layer of the segment read last

        def saw(layer: int, inputs: AttentionInputs) -> None:
            if layer == 0:
                self._weights.clear()
            self._weights.append(inputs.weights().float().mean(dim=0))

        self._stack = ExitStack()  # kept open, since closing the stack ends the recording
        self._stack.enter_context(observed(self.view, saw))

    def take(self) -> list[JsonObject]:
        """Return the attention summaries of the segment read last, one for each query.

        `mean`: mean distance in tokens; `reach`: distance within which nine tenths of the attention lie; `histogram`:
        share of the attention at distance 0, at 1, at 2 and 3, at 4 to 7, and so on.
        """
        weights = torch.stack(self._weights).mean(dim=0).double()
        self._weights.clear()
        n_query, n_key = weights.shape
        # A query's own key is at distance 0; for the last query, this is the last key.
        distance = torch.arange(n_key, device=weights.device)
        key = n_key - n_query + torch.arange(n_query, device=weights.device)[:, None] - distance
        shares = weights.gather(1, key.clamp(min=0)).masked_fill(key < 0, 0.0)
        shares /= shares.sum(dim=1, keepdim=True)
        means, reaches = (shares * distance).sum(dim=1), (shares.cumsum(dim=1) < _MOST).sum(dim=1)
        bins = torch.frexp(distance.double()).exponent
        return [
            {
                "mean": round(mean, 2),
                "reach": reach,
                "histogram": [round(part, 4) for part in torch.bincount(bins, row).tolist()],
            }
            for mean, reach, row in zip(means.tolist(), reaches.tolist(), shares, strict=True)
        ]

    def of_next(self, stream: Stream) -> JsonObject:
        """Return the attention summary for the prediction that a stream's next step makes."""
        state = self._engine.save(stream)
        with torch.inference_mode():
            waiting = torch.tensor([[state.waiting]], device=self.view.softmax.bias.device)
            self.view.hidden_states(waiting, self._engine.memory_of(state, self.view))
        return self.take()[0]
