"""`/v1/completions`: continuation and scoring of texts, as in the OpenAI API."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from txl.data.decoders import Decoder
from txl.files import JsonObject
from txl.generation.sampling import Sampling
from txl.generation.text import StopStrings
from txl.serving.exchange import Prompt, beside, event_stream, finite, locate, read_prompt, while_connected
from txl.serving.requests import ApiError, Fields, dumps, fields_of, json_response
from txl.serving.service import Service
from txl.serving.texts import TAIL, Texts
from txl.serving.work import DrawnEvent, EndOfLaneEvent, Event, FailedEvent, Lane, Outbox, ReadEvent, ScoredToken, Work

_CONTROLS = ("max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "echo", "logprobs", "logit_bias")
_NEUTRAL = {
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "best_of": (1,),
    "suffix": ("",),
}
"""Unsupported fields, with the values that are accepted because they request no effect."""
KNOWN = frozenset(("model", "prompt", "user", "stream", "stream_options", *_CONTROLS, *_NEUTRAL))


class Choice:
    """One continuation of a prompt, filled event by event."""

    def __init__(self, index: int, prompt: Prompt, echo: bool, texts: Texts):
        self.index, self.prompt, self.echo, self._texts = index, prompt, echo, texts
        self.text = ""
        self.reason: str | None = None
        self.made = 0
        self._at = self._shown = len(prompt.shown) if echo else 0
        self._entries: list[tuple[ScoredToken, bytes, int]] = []
        self._began = False

    def add(self, event: DrawnEvent | EndOfLaneEvent) -> None:
        """Add a drawn token, or the end of the lane."""
        if isinstance(event, EndOfLaneEvent):
            self.reason = event.reason
            self._extend(event.text)
            return
        token = event.token
        self.made += 1
        self._entries.append((token, *self._texts.place(token.id, token.piece, self._at)))
        self._at += len(token.piece)
        self._extend(token.text)

    def _extend(self, text: str) -> None:
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
        if self.reason == "length":
            ready = len(self._entries)
        else:  # a token is listed when its text is shown, and a stop string may delay or cut off the text
            ready = next((n for n, each in enumerate(self._entries) if each[2] >= self._shown), len(self._entries))
        entries += self._entries[:ready]
        if not text and not entries and self.reason is None:
            return None
        self.text, self._entries, self._began = "", self._entries[ready:], True
        return {
            "text": text,
            "index": self.index,
            "logprobs": None if top is None else _logprobs(entries, self._texts),
            "finish_reason": self.reason,
        }


def _logprobs(entries: Sequence[tuple[ScoredToken, bytes, int]], texts: Texts) -> JsonObject:
    """Return tokens as the completions API lists them; `bytes` and `token_ids` are additions of this server."""
    tops: list[dict[str, float] | None] = []
    for token, data, _ in entries:
        if token.log_prob is None:
            tops.append(None)
            continue
        named: dict[str, float] = {}
        for each, log_prob in (*token.top, (token.id, token.log_prob)):
            # The token itself as in `tokens`: an unknown word is not called <unk> there.
            named.setdefault(texts.shown(data if each == token.id else texts.bytes_of(each)), finite(log_prob))
        tops.append(named)
    return {
        "tokens": [texts.shown(data) for _, data, _ in entries],
        "token_logprobs": [None if token.log_prob is None else finite(token.log_prob) for token, _, _ in entries],
        "top_logprobs": tops,
        "text_offset": [at for _, _, at in entries],
        "bytes": [list(data) for _, data, _ in entries],
        "token_ids": [token.id for token, _, _ in entries],
    }


@dataclass(frozen=True)
class _Asked:
    """Settings of a request, shared by all prompts of the request."""

    n: int
    """Number of continuations of each prompt."""
    max_tokens: int
    top: int | None
    """Number of alternatives listed for each token; None: no log-probabilities."""
    echo: bool
    progressive: bool
    usage: bool
    """True: an event stream ends with the token counts."""
    sampling: Sampling
    seed: int
    stop: list[str]
    forbidden: tuple[int, ...]
    """Tokens that are never drawn."""

    @property
    def scores_prompts(self) -> bool:
        """True if the tokens of the prompts are scored and listed too."""
        return self.echo and self.top is not None


def _asked(fields: Fields, service: Service) -> _Asked:
    service.check_model(fields.text("model"))
    for name, neutral in _NEUTRAL.items():
        fields.only(name, *neutral)
    fields.text("user")  # must be a string; no effect
    limits, progressive = service.limits, fields.flag("stream")
    return _Asked(
        n=fields.whole("n", 1, 1, limits.max_choices),
        max_tokens=fields.whole("max_tokens", limits.default_tokens, 0, limits.max_tokens),
        top=fields.whole("logprobs", None, 0, limits.max_logprobs),
        echo=fields.flag("echo"),
        progressive=progressive,
        usage=_include_usage(fields, progressive),
        sampling=fields.sampling(),
        seed=fields.seed(),
        stop=fields.strings("stop", 4),
        forbidden=fields.forbidden(service.texts.forbidden, len(service.texts.vocabulary)),
    )


class _Answer:
    """The answer to a request, filled event by event: `n` choices for each prompt, in the order of the prompts."""

    def __init__(self, prompts: list[Prompt], asked: _Asked, service: Service):
        self._prompts, self._asked = prompts, asked
        each = (prompt for prompt in prompts for _ in range(asked.n))
        self._choices = [Choice(index, prompt, asked.echo, service.texts) for index, prompt in enumerate(each)]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_id,
            "system_fingerprint": service.fingerprint,
        }

    def usage(self) -> dict[str, int]:
        """Return the token counts: read, drawn, and total."""
        read, made = sum(each.ids.numel() for each in self._prompts), sum(each.made for each in self._choices)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    async def chunks(self, outbox: Outbox) -> AsyncIterator[str]:
        """Yield the objects of an event stream, as events arrive."""
        async for batch in outbox.batches():
            for index in sorted(self._take_in(batch)):
                choice = self._choices[index]
                chunk = await beside(choice.size(self._asked.top), functools.partial(self._chunk, choice))
                if chunk is not None:
                    yield chunk
            outbox.sent(batch)
        if self._asked.usage:
            yield dumps(self._head | {"choices": [], "usage": self.usage()})

    def _chunk(self, choice: Choice) -> str | None:
        made = choice.take(self._asked.top)
        if made is None:
            return None
        return dumps(self._head | {"choices": [made]} | ({"usage": None} if self._asked.usage else {}))

    async def arrive(self, outbox: Outbox) -> None:
        """Collect all events of the works."""
        async for batch in outbox.batches():
            self._take_in(batch)

    async def whole(self) -> Response:
        """Return the complete answer as one response."""
        top = self._asked.top

        def answer() -> Response:
            choices = [choice.take(top) for choice in self._choices]
            return json_response(self._head | {"choices": choices, "usage": self.usage()})

        return await beside(sum(choice.size(top) for choice in self._choices), answer)

    def _take_in(self, batch: list[Event]) -> set[int]:
        """Add events to choices and prompts; return the indices of the choices with new events."""
        touched = set()
        for event in batch:
            if isinstance(event, DrawnEvent | EndOfLaneEvent):
                self._choices[event.lane].add(event)
                touched.add(event.lane)
            elif isinstance(event, ReadEvent):
                self._prompts[event.work].scored += event.tokens
            elif isinstance(event, FailedEvent):
                raise ApiError(event.status, event.message)
        return touched


async def completions(request: Request) -> Response:
    """Answer `POST /v1/completions`."""
    service: Service = request.app.state.service
    fields = await fields_of(request, KNOWN)
    asked = _asked(fields, service)
    prompts = await _prompts(request, fields, asked)
    outbox = Outbox(asked.progressive, len(prompts), service.limits.max_reported if asked.progressive else None)
    works = [_work(number, prompt, asked, outbox, service) for number, prompt in enumerate(prompts)]
    service.submit(works)
    answer = _Answer(prompts, asked, service)
    if asked.progressive:
        return event_stream(answer.chunks(outbox), works, service)
    await while_connected(request, answer.arrive(outbox), works)
    return await answer.whole()


def _work(number: int, prompt: Prompt, asked: _Asked, outbox: Outbox, service: Service) -> Work:
    """Return the work of one prompt, with one lane for each continuation."""
    lanes = []
    for sample in range(asked.n):
        decoder, stop = _decoder(service.texts, prompt), StopStrings(asked.stop)
        index, seed = number * asked.n + sample, asked.seed + sample
        lanes.append(Lane(index, asked.max_tokens, seed, asked.sampling, decoder, stop))
    return Work(
        number,
        prompt.ids,
        lanes,
        outbox,
        forbidden=asked.forbidden,
        score=asked.scores_prompts,
        top=asked.top,
        segment=service.segment if asked.scores_prompts else Work.segment,
    )


def _include_usage(fields: Fields, progressive: bool) -> bool:
    options = fields.raw("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not progressive:
        raise ApiError(400, "stream_options must be an object and requires stream: true", param="stream_options")
    return Fields(options, frozenset({"include_usage"})).flag("include_usage")


async def _prompts(request: Request, fields: Fields, asked: _Asked) -> list[Prompt]:
    service: Service = request.app.state.service
    value = fields.raw("prompt")
    many = value if isinstance(value, list) and value and not _is_ids(value) else [value]
    most = service.limits.max_choices
    if len(many) * asked.n > most:
        raise ApiError(400, f"{len(many)} prompts times n {asked.n}; expected at most {most} texts")
    prompts = [await read_prompt(request, each, "prompt") for each in many]
    read = sum(each.ids.numel() for each in prompts) if asked.scores_prompts else 0
    made = 0 if asked.progressive else len(many) * asked.max_tokens  # only the unread part of an event stream is held
    service.limits.check_reported(asked.n * (read + made), asked.top)
    for prompt in prompts:
        await locate(prompt, service, asked.echo, asked.scores_prompts)
    return prompts


def _is_ids(value: list[object]) -> bool:
    return isinstance(value[0], int) and not isinstance(value[0], bool)


def _decoder(texts: Texts, prompt: Prompt) -> Decoder:
    if prompt.text is not None:
        return texts.vocabulary.decoder(prompt.text)
    return texts.decoder_after(prompt.ids[-TAIL:].tolist())
