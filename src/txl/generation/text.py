"""Text generation from a trained model (Appendix E), one token per step, in constant memory.

Shapes: B samples (lanes), P or T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from txl.config import Limit
from txl.data.decoders import Decoder
from txl.data.detokenise import Convention, text_decoder
from txl.data.vocabulary import Vocabulary, WordVocabulary
from txl.devices import sent
from txl.errors import UserError
from txl.generation.engine import DecodeEngine, decodes
from txl.generation.reading import PROMPT_SEGMENT
from txl.generation.sampling import (
    REASONS,
    Sampling,
    chances,
    checked_forbidden,
    checked_seed,
    checked_tokens,
    permitted,
)
from txl.models.language_model import LanguageModel, State
from txl.models.structure import evaluation_view


def generate_tokens(
    model: LanguageModel,
    prompt: Sequence[int] | Tensor,
    *,
    max_tokens: int,
    samples: int = 1,
    sampling: Sampling | None = None,
    seed: int | None = None,
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
    forbidden: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    compile: bool = True,
) -> Iterator[Int64[Tensor, " B"]]:
    """Continue a prompt with several samples: yield the next token of each sample, on the CPU, `max_tokens` times.

    Args:
        model: any language model.
        prompt: token ids, at least one; may be longer than the memory. The prompt is read once for all samples.
        max_tokens: number of tokens to generate.
        samples: number of continuations B. Sample b of seed s is the only sample of seed s + b.
        sampling: sampling settings; None: draw from the 40 likeliest tokens.
        seed: seed of the first sample; None: a new random seed at each call.
        mem_len, window, clamp_len: as in `LanguageModel.init_state`.
        forbidden: token ids that are never drawn.
        dtype, compile: as in `DecodeEngine`, which decodes a Transformer-XL; `dtype` must be None for other models.
    """
    sampling = sampling or Sampling()
    ids = checked_tokens(prompt, model.vocab_size)
    forbidden = checked_forbidden(forbidden, model.vocab_size)
    if max_tokens < 1:
        raise UserError(field="max_tokens", value=max_tokens, expected="1 or more")
    if samples < 1:
        raise UserError(field="samples", value=samples, expected="1 or more")
    first_seed = torch.Generator().seed() if seed is None else checked_seed(seed)
    state = model.init_state(1, mem_len, window, clamp_len)
    if decodes(model):
        lengths = state.lengths.options()
        make = functools.partial(DecodeEngine, model, max_streams=samples, dtype=dtype, compile=compile, **lengths)
        return _decode(make, ids, max_tokens, first_seed, sampling, forbidden)
    if dtype is not None:
        raise UserError(f"dtype is {dtype}; only a Transformer-XL is converted for generation")
    return _continue(model, ids, state, max_tokens, samples, sampling, first_seed, forbidden)


def _decode(
    make: Callable[[], DecodeEngine],
    ids: Tensor,
    max_tokens: int,
    first_seed: int,
    sampling: Sampling,
    forbidden: Sequence[int],
) -> Iterator[Tensor]:
    engine = make()
    first = engine.join(ids, seed=first_seed, sampling=sampling, forbidden=forbidden)
    for lane in range(1, engine.max_streams):
        engine.fork(first, seed=first_seed + lane)
    for _ in range(max_tokens):
        streams = engine.streams
        tokens = engine.step()
        for stream in streams:
            if stream.ended is not None:
                raise UserError(stream.ended)
        yield tokens


def _continue(
    model: LanguageModel,
    ids: Tensor,
    state: State,
    max_tokens: int,
    samples: int,
    sampling: Sampling,
    first_seed: int,
    forbidden: Sequence[int],
) -> Iterator[Tensor]:
    device = next(model.parameters()).device
    seeds = torch.tensor([(first_seed + lane) % 2**63 for lane in range(samples)], device=device)
    never = sent(torch.tensor(list(forbidden)), device) if forbidden else None
    context = model.context
    model = evaluation_view(model)
    with torch.no_grad():
        ids = ids.to(device)[None]
        if context is None:
            # The prompt's tokens before the last one only fill the memory. With an adaptive softmax, `nll` does this
            # without a [T,V] matrix of probabilities.
            for start in range(0, ids.shape[1] - 1, PROMPT_SEGMENT):
                end = min(start + PROMPT_SEGMENT, ids.shape[1] - 1)
                _, state = model.nll(ids[:, start:end], ids[:, start + 1 : end + 1], state)
            ids = ids[:, -1:]
        state = state.select(torch.zeros(samples, dtype=torch.int64))
        read = ids.expand(samples, -1)
    for number in range(max_tokens):
        # Entered at each step, so that the caller's gradient mode does not change between two steps.
        with torch.no_grad():
            if context is not None:
                read = read[:, -context:]
            log_probs, after = model.log_probs(read, state)
            if context is None:
                state = after
            log_probs, obstacles = permitted(log_probs[:, -1], never)
            token = sampling.pick(log_probs, chances(seeds, torch.full_like(seeds, number)))
            # Without memory, the whole context is read again for every token.
            read = token[:, None] if context is None else torch.cat([read, token[:, None]], dim=1)
        drawn = torch.stack([token, obstacles]).cpu()  # the only wait for the device
        for obstacle in drawn[1].tolist():
            if (reason := REASONS[obstacle]) is not None:
                raise UserError(reason)
        yield drawn[0].clone()


def generate(
    model: LanguageModel,
    vocabulary: Vocabulary | None,
    prompt: str,
    *,
    max_tokens: int,
    top_k: int | None = 40,
    top_p: float | None = None,
    temperature: float = 1.0,
    seed: int | None = None,
    stop: Sequence[str] = (),
    forbid_unknown: bool = False,
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
    dtype: torch.dtype | None = None,
    compile: bool = True,
    detokenise: Convention | None = None,
) -> Iterator[str]:
    """Continue a prompt and yield the new text piece by piece as it is generated, without the prompt.

    Args:
        model: any language model.
        vocabulary: vocabulary that the model was trained with.
        prompt: text. Characters or words that the vocabulary lacks become `<unk>`; if the vocabulary has no `<unk>`,
            the error names them.
        max_tokens: number of tokens to generate.
        top_k, top_p, temperature: see `Sampling`.
        seed: seed of the drawn tokens; the same seed gives the same text. None: a new random seed.
        stop: strings at which the text ends; they are not part of the text.
        forbid_unknown: True: never draw `<unk>`. False: draw it only if it is a word of the training text (see
            `undrawable`).
        mem_len, window, clamp_len: as in `LanguageModel.init_state`.
        dtype, compile: as in `generate_tokens`.
        detokenise: convention by which the training text was tokenised, which is undone in the pieces; the prompt must
            be tokenised by this convention too. None: the pieces stay as they are.
    """
    ids = encode_prompt(vocabulary, prompt)
    assert vocabulary is not None  # encode_prompt has refused None
    writer = _Writer(text_decoder(vocabulary, detokenise, prompt), StopStrings(stop))
    tokens = generate_tokens(
        model,
        ids,
        max_tokens=max_tokens,
        sampling=Sampling(top_k, top_p, temperature),
        seed=seed,
        mem_len=mem_len,
        window=window,
        clamp_len=clamp_len,
        forbidden=undrawable(vocabulary, forbid_unknown),
        dtype=dtype,
        compile=compile,
    )
    return _pieces(tokens, writer)


def generate_samples(
    model: LanguageModel,
    vocabulary: Vocabulary | None,
    prompt: str,
    *,
    samples: int,
    max_tokens: int,
    top_k: int | None = 40,
    top_p: float | None = None,
    temperature: float = 1.0,
    seed: int | None = None,
    stop: Sequence[str] = (),
    forbid_unknown: bool = False,
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
    dtype: torch.dtype | None = None,
    compile: bool = True,
    detokenise: Convention | None = None,
) -> list[str]:
    """Return several continuations of a prompt, computed together; arguments and errors as in `generate`."""
    ids = encode_prompt(vocabulary, prompt)
    assert vocabulary is not None  # encode_prompt has refused None
    StopStrings(stop)  # refuses an empty string
    steps = generate_tokens(
        model,
        ids,
        max_tokens=max_tokens,
        samples=samples,
        sampling=Sampling(top_k, top_p, temperature),
        seed=seed,
        mem_len=mem_len,
        window=window,
        clamp_len=clamp_len,
        forbidden=undrawable(vocabulary, forbid_unknown),
        dtype=dtype,
        compile=compile,
    )
    texts, writers = list[str](), list[_Writer]()
    for tokens in steps:
        if not writers:  # made here, because the first step refuses more samples than memory holds
            writers = [_Writer(text_decoder(vocabulary, detokenise, prompt), StopStrings(stop)) for _ in range(samples)]
            texts = [""] * samples
        for lane, (token, writer) in enumerate(zip(tokens.tolist(), writers, strict=True)):
            texts[lane] += writer.push(token)
        if all(writer.ended for writer in writers):
            break
    return [text + writer.finish() for text, writer in zip(texts, writers, strict=True)]


def encode_prompt(vocabulary: Vocabulary | None, prompt: str) -> Int64[Tensor, " P"]:
    """Return a prompt's token ids, after checking that the prompt is not empty."""
    if vocabulary is None:
        raise UserError(
            "this model has no vocabulary, so it cannot read or print text",
            remedy="import it again with its vocabulary, or in Python give token ids to txl.generate_tokens",
        )
    if not prompt:
        raise UserError("the prompt is empty; give at least one character to continue from")
    return torch.as_tensor(vocabulary.encode(prompt), dtype=torch.int64)


def undrawable(vocabulary: Vocabulary | None, forbid_unknown: bool = False) -> tuple[int, ...]:
    """Return the ids of the tokens that must not be drawn: `<unk>`, which has no text.

    With the word rule "whitespace", `<unk>` is a word of the training text, as in the benchmarks, and is drawn unless
    `forbid_unknown` is True.
    """
    if vocabulary is None or vocabulary.unk_id is None:
        return ()
    is_word = isinstance(vocabulary, WordVocabulary) and vocabulary.rule == "whitespace"
    return () if is_word and not forbid_unknown else (vocabulary.unk_id,)


class StopStrings:
    """Filter that holds text back while it may be the beginning of a stop string."""

    def __init__(self, strings: Sequence[str]):
        strings = [strings] if isinstance(strings, str) else list(strings)
        if not all(strings):
            raise UserError("a stop string is empty; expected at least one character")
        self.strings = strings
        self.held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text and return the part that can be shown now; set `found` at a stop string."""
        self.held += text
        ends = [place for place in (self.held.find(string) for string in self.strings) if place >= 0]
        if ends:
            self.found = True
            shown, self.held = self.held[: min(ends)], ""
            return shown
        keep = max((self._overlap(string) for string in self.strings), default=0)
        cut = len(self.held) - keep
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown

    def flush(self) -> str:
        """Return the text held back, when generation ends."""
        shown, self.held = self.held, ""
        return shown

    def _overlap(self, string: str) -> int:
        """Return the length of the longest proper prefix of `string` that the held text ends with."""
        longest = min(len(string) - 1, len(self.held))
        return next((n for n in range(longest, 0, -1) if self.held.endswith(string[:n])), 0)


class _Writer:
    """Conversion of one continuation's tokens to the text that can be shown, up to a stop string."""

    def __init__(self, decoder: Decoder, stop: StopStrings):
        self._decoder, self._stop = decoder, stop

    @property
    def ended(self) -> bool:
        """True after a stop string was found."""
        return self._stop.found

    def push(self, token: int) -> str:
        """Return the text that can be shown now that a token was drawn."""
        return "" if self.ended else self._stop.push(self._decoder.push(token))

    def finish(self) -> str:
        """Return the rest of the text."""
        rest = "" if self.ended else self._stop.push(self._decoder.flush())
        return rest if self.ended else rest + self._stop.flush()


def _pieces(steps: Iterator[Tensor], writer: _Writer) -> Iterator[str]:
    """Yield the text of the first lane's tokens, up to a stop string."""
    for tokens in steps:
        if piece := writer.push(int(tokens[0])):
            yield piece
        if writer.ended:
            return
    if piece := writer.finish():
        yield piece
