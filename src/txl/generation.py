"""Text from a trained model (Appendix E), one token a step, in memory that does not grow.

Shapes: B samples (lanes), V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from txl.data.vocabulary import Vocabulary
from txl.errors import UserError
from txl.evaluation.perplexity import evaluation_mode
from txl.models.language_model import LanguageModel, Limit

PROMPT_SEGMENT = 128
"""Tokens of the prompt read in one step."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: from the `top_k` likeliest (40 in the paper), cut to the nucleus `top_p`."""

    top_k: int | None = 40
    top_p: float | None = None
    temperature: float = 1.0
    """0 takes the likeliest token always."""

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}; expected 1 or more candidates, or none for the whole vocabulary")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; expected a probability above 0 and at most 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}; expected 0 (greedy) or a number above it")

    def draw(self, log_probs: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """One token a lane, lane b with the b-th generator: [B,V] -> int64 [B].

        Raises:
            UserError: if the probabilities are not numbers.
        """
        if not log_probs.amax(dim=-1).isfinite().all():
            raise UserError(
                "the model's probabilities are not numbers; its weights are damaged: use another checkpoint"
            )
        if self.temperature == 0:
            return log_probs.argmax(dim=-1)
        n_candidate = min(self.top_k or log_probs.shape[-1], log_probs.shape[-1])
        values, candidates = log_probs.topk(n_candidate, dim=-1)  # sorted, the likeliest first
        # Relative to the likeliest, so that no temperature is too low to divide by.
        probs = ((values - values[:, :1]).double() / self.temperature).softmax(dim=-1)
        if self.top_p is not None:
            # A candidate stays while those before it hold less than top_p; the first one always does.
            probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= self.top_p, 0.0)
        chosen = [
            torch.multinomial(lane, 1, generator=generator) for lane, generator in zip(probs, generators, strict=True)
        ]
        return candidates.gather(-1, torch.stack(chosen)).squeeze(-1)


def generate_tokens(
    model: LanguageModel[Any],
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
) -> Iterator[Tensor]:
    """Continue a prompt, several times at once: yields `max_tokens` times the next token of each sample, int64 [B].

    Args:
        model: any language model.
        prompt: token ids, at least one; may be longer than the memory. It is read once, for all samples.
        max_tokens: tokens to make.
        samples: continuations B. Sample b of seed s is the one that seed s + b gives alone.
        sampling: how tokens are drawn; by default from the 40 likeliest.
        seed: None draws a new one each time.
        mem_len, window, clamp_len: as in `LanguageModel.init_state`.
        forbidden: token ids that are never drawn.

    Raises:
        UserError: for an empty prompt, ids outside of the vocabulary, or counts below 1.
    """
    sampling = sampling or Sampling()
    ids = torch.as_tensor(prompt, dtype=torch.int64).reshape(-1)
    if ids.numel() == 0:
        raise UserError("the prompt is empty; expected at least one token to continue from")
    if int(ids.min()) < 0 or int(ids.max()) >= model.vocab_size:
        raise UserError(f"the prompt has token ids outside of the model's vocabulary, 0 to {model.vocab_size - 1}")
    if max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}; expected 1 or more")
    if samples < 1:
        raise UserError(f"samples is {samples}; expected 1 or more")
    state = model.init_state(1, mem_len=mem_len, window=window, clamp_len=clamp_len)
    return _continue(model, ids, state, max_tokens, samples, sampling, seed, list(forbidden))


def _continue(
    model: LanguageModel[Any],
    ids: Tensor,
    state: Any,
    max_tokens: int,
    samples: int,
    sampling: Sampling,
    seed: int | None,
    forbidden: list[int],
) -> Iterator[Tensor]:
    device = next(model.parameters()).device
    first_seed = torch.Generator().seed() if seed is None else seed
    generators = [torch.Generator(device).manual_seed((first_seed + lane) % 2**63) for lane in range(samples)]
    context = getattr(model, "context", None)  # whoever has the methods of the interface need not inherit from it
    with evaluation_mode(model):
        ids = ids.to(device)[None]
        if context is None:
            # All but the prompt's last token only fill the memory; `nll` does that without a [T,V] matrix of
            # probabilities where the softmax is adaptive.
            for start in range(0, ids.shape[1] - 1, PROMPT_SEGMENT):
                end = min(start + PROMPT_SEGMENT, ids.shape[1] - 1)
                _, state = model.nll(ids[:, start:end], ids[:, start + 1 : end + 1], state)
            ids = ids[:, -1:]
        state = state.select(torch.zeros(samples, dtype=torch.int64))
        read = ids.expand(samples, -1)
    for _ in range(max_tokens):
        # Entered anew at each step, so that a caller who stops half-way does not leave the model in evaluation mode.
        with evaluation_mode(model):
            if context is not None:
                read = read[:, -context:]
            log_probs, after = model.log_probs(read, state)
            log_probs = log_probs[:, -1]
            if context is None:
                state = after
            if forbidden:
                log_probs = log_probs.index_fill(-1, torch.tensor(forbidden, device=device), float("-inf"))
            token = sampling.draw(log_probs, generators)
            # Without memory, all that fits is read anew for every token.
            read = token[:, None] if context is None else torch.cat([read, token[:, None]], dim=1)
        yield token.clone()


def generate(
    model: LanguageModel[Any],
    vocabulary: Vocabulary | None,
    prompt: str,
    *,
    max_tokens: int,
    top_k: int | None = 40,
    top_p: float | None = None,
    temperature: float = 1.0,
    seed: int | None = None,
    stop: Sequence[str] = (),
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
) -> Iterator[str]:
    """Continue a prompt and yield the text piece by piece as it is made, the prompt not among it.

    Args:
        model: any language model.
        vocabulary: the one it was trained with.
        prompt: text; characters that the vocabulary lacks are an error that names them.
        max_tokens: tokens to make.
        top_k, top_p, temperature: see `Sampling`.
        seed: the same seed gives the same text.
        stop: strings at which the text ends; they are not part of it.
        mem_len, window, clamp_len: as in `LanguageModel.init_state`.

    Raises:
        UserError: for an empty prompt, or settings that make no sense.
    """
    tokens = generate_tokens(
        model,
        encode_prompt(vocabulary, prompt),
        max_tokens=max_tokens,
        sampling=Sampling(top_k, top_p, temperature),
        seed=seed,
        mem_len=mem_len,
        window=window,
        clamp_len=clamp_len,
        forbidden=_undrawable(vocabulary),
    )
    return _pieces(tokens, vocabulary, prompt, StopStrings(stop))


def generate_samples(
    model: LanguageModel[Any],
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
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
) -> list[str]:
    """Several continuations of a prompt, computed together until all have ended; arguments and errors as `generate`."""
    stops = [StopStrings(stop) for _ in range(samples)]
    steps = generate_tokens(
        model,
        encode_prompt(vocabulary, prompt),
        max_tokens=max_tokens,
        samples=samples,
        sampling=Sampling(top_k, top_p, temperature),
        seed=seed,
        mem_len=mem_len,
        window=window,
        clamp_len=clamp_len,
        forbidden=_undrawable(vocabulary),
    )
    assert vocabulary is not None  # encode_prompt has refused None
    decoders = [vocabulary.decoder(after=prompt) for _ in range(samples)]
    texts = [""] * samples
    for tokens in steps:
        for lane, (token, decoder, held) in enumerate(zip(tokens.tolist(), decoders, stops, strict=True)):
            if not held.found:
                texts[lane] += held.push(decoder.push(token))
        if all(held.found for held in stops):
            break
    for lane, (decoder, held) in enumerate(zip(decoders, stops, strict=True)):
        if not held.found:
            texts[lane] += held.push(decoder.flush())
        if not held.found:
            texts[lane] += held.flush()
    return texts


def encode_prompt(vocabulary: Vocabulary | None, prompt: str) -> Tensor:
    """The prompt's token ids, int64 [P].

    Raises:
        UserError: if there is no vocabulary, the prompt is empty, or it holds what the vocabulary lacks.
    """
    if vocabulary is None:
        raise UserError("this model has no vocabulary, so it cannot read or print text; use token ids instead")
    if not prompt:
        raise UserError("the prompt is empty; give at least one character to continue from")
    return torch.as_tensor(vocabulary.encode(prompt), dtype=torch.int64)


def _undrawable(vocabulary: Vocabulary | None) -> tuple[int, ...]:
    """The unknown character: no text can be made of it. (An unknown word is a word of the benchmarks' texts.)"""
    if vocabulary is None or vocabulary.kind != "char" or vocabulary.unk_id is None:
        return ()
    return (vocabulary.unk_id,)


class StopStrings:
    """Holds text back while it may be the beginning of a string at which generation ends."""

    def __init__(self, strings: Sequence[str]):
        strings = [strings] if isinstance(strings, str) else list(strings)
        if not all(strings):
            raise UserError("a stop string is empty; expected at least one character")
        self.strings = strings
        self.held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be shown now; `found` is set once a stop string has been met."""
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
        """What was held back, at the end of the text."""
        shown, self.held = self.held, ""
        return shown

    def _overlap(self, string: str) -> int:
        """Length of the longest proper beginning of `string` with which the held text ends."""
        longest = min(len(string) - 1, len(self.held))
        return next((n for n in range(longest, 0, -1) if self.held.endswith(string[:n])), 0)


def _pieces(steps: Iterator[Tensor], vocabulary: Vocabulary | None, prompt: str, stop: StopStrings) -> Iterator[str]:
    """Text of the first lane's tokens, up to a stop string."""
    assert vocabulary is not None  # encode_prompt has refused None
    decoder = vocabulary.decoder(after=prompt)
    for tokens in steps:
        piece = stop.push(decoder.push(int(tokens[0])))
        if piece:
            yield piece
        if stop.found:
            return
    piece = stop.push(decoder.flush())
    if not stop.found:
        piece += stop.flush()
    if piece:
        yield piece
