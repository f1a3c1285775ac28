"""`/v1/completions`: continuation and scoring of texts, as in the OpenAI API."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from txl.files import JsonObject
from txl.generation.text import StopStrings
from txl.serving.exchange import Prompt, beside, event_stream, finite, read_prompt, while_connected
from txl.serving.requests import ApiError, body_of, dumps, json_response
from txl.serving.schemas import CompletionRequest, checked
from txl.serving.service import Service
from txl.serving.texts import TAIL, Texts
from txl.serving.work import Continuation, DrawnEvent, EndEvent, FailedEvent, Outbox, ReadEvent, ScoredToken, Work


class Choice:
    """One continuation of a prompt, filled event by event."""

    def __init__(self, index: int, prompt: Prompt, echo: bool, texts: Texts):
        self.index, self.prompt, self.echo, self._texts = index, prompt, echo, texts
        self.text = ""
        self.reason: str | None = None
        self.n_drawn = 0
        # Number of characters before the next token, and of those shown: a stop string may hold some back.
        self._at = self._shown = len(prompt.shown) if echo else 0
        self._entries: list[tuple[ScoredToken, bytes, int]] = []
        self._began = False

    def add(self, event: DrawnEvent | EndEvent) -> None:
        """Add a drawn token, or the end of the continuation."""
        if isinstance(event, DrawnEvent):
            token, text = event.token, event.token.text
            self.n_drawn += 1
            self._entries.append((token, *self._texts.place(token.id, token.piece, self._at)))
            self._at += len(token.piece)
        else:
            self.reason, text = event.reason, event.text
        self.text += text
        self._shown += len(text)

    def size(self, top: int | None) -> int:
        """Return about how many characters and log-probabilities the next part has."""
        shown = len(self.prompt.shown) if self.echo and not self._began else 0
        return (len(self.text) + len(self._entries) + shown) * (1 + (top or 0))

    def take(self, top: int | None) -> JsonObject | None:
        """Return the part added since the last call, as a choice of a response; None if nothing was added."""
        text, entries = self.text, []
        if self.echo and not self._began:
            text = self.prompt.shown + text
            entries = [(token, *part) for token, part in zip(self.prompt.scored, self.prompt.parts, strict=False)]
        n_listed = len(self._entries)
        if self.reason != "length":  # a token is listed when its text is shown, and a stop string may delay or cut it
            n_listed = next((n for n, (_, _, at) in enumerate(self._entries) if at >= self._shown), n_listed)
        entries += self._entries[:n_listed]
        if not text and not entries and self.reason is None:
            return None
        self.text, self._entries, self._began = "", self._entries[n_listed:], True
        # As the completions API lists tokens; `bytes` and `token_ids` are additions of this server.
        log_probs = None if top is None else {
            "tokens": [self._texts.shown(data) for _, data, _ in entries],
            "token_logprobs": [finite(token.log_prob) for token, _, _ in entries],
            "top_logprobs": [self._top(token, data) for token, data, _ in entries],
            "text_offset": [at for _, _, at in entries],
            "bytes": [list(data) for _, data, _ in entries],
            "token_ids": [token.id for token, _, _ in entries],
        }  # fmt: skip
        return {"text": text, "index": self.index, "logprobs": log_probs, "finish_reason": self.reason}

    def _top(self, token: ScoredToken, data: bytes) -> dict[str, float | None] | None:
        if token.log_prob is None:
            return None
        by_text: dict[str, float | None] = {}
        for candidate, log_prob in (*token.top, (token.id, token.log_prob)):
            # The token itself as in `tokens`: an unknown word is not called <unk> there.
            own = data if candidate == token.id else self._texts.vocabulary.bytes_of(candidate)
            by_text.setdefault(self._texts.shown(own), finite(log_prob))
        return by_text


class _Answer:
    """The answer to a request, filled event by event: `n` choices for each prompt, in the order of the prompts."""

    def __init__(self, prompts: list[Prompt], fields: CompletionRequest, service: Service):
        self._prompts, self._fields = prompts, fields
        repeated = (prompt for prompt in prompts for _ in range(fields.n))
        self._choices = [Choice(index, prompt, fields.echo, service.texts) for index, prompt in enumerate(repeated)]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_id,
            "system_fingerprint": service.fingerprint,
        }

    def _usage(self) -> dict[str, int]:
        n_read = sum(prompt.ids.numel() for prompt in self._prompts)
        n_drawn = sum(choice.n_drawn for choice in self._choices)
        return {"prompt_tokens": n_read, "completion_tokens": n_drawn, "total_tokens": n_read + n_drawn}

    async def chunks(self, outbox: Outbox) -> AsyncIterator[str]:
        """Yield the objects of an event stream, as events arrive."""
        async for batch in outbox.batches():
            for index in sorted(self._add(batch)):
                choice = self._choices[index]
                chunk = await beside(choice.size(self._fields.logprobs), functools.partial(self._chunk, choice))
                if chunk is not None:
                    yield chunk
            outbox.sent(batch)
        if self._fields.stream_options:
            yield dumps(self._head | {"choices": [], "usage": self._usage()})

    def _chunk(self, choice: Choice) -> str | None:
        part = choice.take(self._fields.logprobs)
        usage = {"usage": None} if self._fields.stream_options else {}
        return None if part is None else dumps(self._head | {"choices": [part]} | usage)

    async def collect(self, outbox: Outbox) -> None:
        """Collect all events of the works."""
        async for batch in outbox.batches():
            self._add(batch)

    def whole(self) -> Response:
        """Return the complete answer as one response."""
        choices = [choice.take(self._fields.logprobs) for choice in self._choices]
        return json_response(self._head | {"choices": choices, "usage": self._usage()})

    def size(self) -> int:
        """Return about how many characters and log-probabilities the complete answer has."""
        return sum(choice.size(self._fields.logprobs) for choice in self._choices)

    def _add(self, batch: Sequence[object]) -> set[int]:
        """Add events to choices and prompts; return the indices of the choices with new events."""
        changed = set()
        for event in batch:
            if isinstance(event, DrawnEvent | EndEvent):
                self._choices[event.continuation].add(event)
                changed.add(event.continuation)
            elif isinstance(event, ReadEvent):
                self._prompts[event.work].scored += event.tokens
            elif isinstance(event, FailedEvent):
                raise ApiError(event.status, event.message)
        return changed


async def completions(request: Request) -> Response:
    """Answer `POST /v1/completions`."""
    service: Service = request.app.state.service
    fields = checked(CompletionRequest, await body_of(request), service)
    prompts = await _prompts(request, fields)
    outbox = Outbox(fields.stream, len(prompts), service.limits.max_reported if fields.stream else None)
    works = [_work(number, prompt, fields, outbox, service) for number, prompt in enumerate(prompts)]
    service.scheduler.submit(works)
    answer = _Answer(prompts, fields, service)
    if fields.stream:
        return event_stream(answer.chunks(outbox), works, service)
    await while_connected(request, answer.collect(outbox), works)
    return await beside(answer.size(), answer.whole)


async def _prompts(request: Request, fields: CompletionRequest) -> list[Prompt]:
    limits, texts, value = request.app.state.service.limits, request.app.state.service.texts, fields.prompt
    is_ids = isinstance(value, list) and value and type(value[0]) is int
    values = value if isinstance(value, list) and value and not is_ids else [value]
    if len(values) * fields.n > limits.max_choices:
        message = f"{len(values)} prompts times n {fields.n}; expected at most {limits.max_choices} texts"
        raise ApiError(400, message)
    prompts = [await read_prompt(request, prompt, "prompt") for prompt in values]
    n_read = sum(prompt.ids.numel() for prompt in prompts) if fields.scores_prompts else 0
    n_drawn = 0 if fields.stream else len(values) * fields.max_tokens  # of an event stream only the unread part is held
    limits.check_reported(fields.n * (n_read + n_drawn), fields.logprobs)
    for prompt in prompts if fields.echo else []:
        if prompt.text is None:
            placed = functools.partial(texts.placed, prompt.ids.tolist())
            prompt.shown, prompt.parts = await beside(prompt.ids.numel(), placed)
        elif fields.scores_prompts:
            located = functools.partial(texts.located, prompt.text, prompt.ids)
            prompt.parts = await beside(len(prompt.text), located)
    return prompts


def _work(number: int, prompt: Prompt, fields: CompletionRequest, outbox: Outbox, service: Service) -> Work:
    """Return the work of one prompt, with its continuations."""
    continuations = []
    for sample in range(fields.n):
        if prompt.text is not None:
            decoder = service.texts.vocabulary.decoder(prompt.text)
        else:
            decoder = service.texts.decoder_after(prompt.ids[-TAIL:].tolist())
        index, seed, stop = number * fields.n + sample, fields.seed + sample, StopStrings(fields.stop)
        continuations.append(Continuation(index, fields.max_tokens, seed, fields.sampling, decoder, stop))
    return Work(
        number,
        prompt.ids,
        continuations,
        outbox,
        forbidden=fields.logit_bias,
        score=fields.scores_prompts,
        top=fields.logprobs,
        segment=service.segment if fields.scores_prompts else Work.segment,
    )
