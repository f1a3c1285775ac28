"""Text generation from a trained model (Appendix E), one token per step, in constant memory.

Shapes: B samples (lanes), P or T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from txl.config import Limit
from txl.data.detokenise import Convention, text_decoder
from txl.data.vocabulary import Vocabulary
from txl.devices import sent
from txl.errors import UserError
from txl.generation.engine import PROMPT_SEGMENT, DecodeEngine, decodes
from txl.generation.sampling import (
    REASONS,
    GenerationOptions,
    Sampling,
    chances,
    checked_forbidden,
    checked_seed,
    checked_tokens,
    permitted,
)
from txl.models.language_model import LanguageModel, State
from txl.models.structure import evaluation_view
from txl.models.transformer_xl import TransformerXL


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
        prompt: token ids, at least one; may be longer than the memory. The prompt is read once for all samples.
        max_tokens: number of tokens to generate.
        samples: number of continuations B. Sample b of seed s is the only sample of seed s + b.
        sampling: sampling settings; None: draw from the 40 likeliest tokens.
        seed: seed of the first sample; None: a new random seed at each call.
        mem_len, window, clamp_len: as in `LanguageModel.init_state`.
        forbidden: token ids that are never drawn.
        dtype, compile: as in `DecodeEngine`, which decodes a Transformer-XL; for other models `dtype` must be None.
    """
    options = GenerationOptions(
        max_tokens, samples, sampling or Sampling(), seed, (), False, mem_len, window, clamp_len, dtype, compile
    )
    return generate_tokens_with(model, prompt, options, forbidden)


def generate_tokens_with(
    model: LanguageModel, prompt: Sequence[int] | Tensor, options: GenerationOptions, forbidden: Sequence[int] = ()
) -> Iterator[Int64[Tensor, " B"]]:
    """Return the tokens of `generate_tokens` for one value of options; mistakes are refused before the first token."""
    ids = checked_tokens(prompt, model.vocab_size)
    forbidden = checked_forbidden(forbidden, model.vocab_size)
    seed = torch.Generator().seed() if options.seed is None else checked_seed(options.seed)
    state = model.init_state(1, options.mem_len, options.window, options.clamp_len)
    if decodes(model):
        return _decode(model, ids, options, seed, forbidden)
    if options.dtype is not None:
        raise UserError("only a Transformer-XL is converted", field="dtype", value=options.dtype, expected="none")
    return _continue(model, ids, state, options, seed, forbidden)


def _decode(
    model: TransformerXL, ids: Tensor, options: GenerationOptions, seed: int, forbidden: Sequence[int]
) -> Iterator[Tensor]:
    engine = DecodeEngine(
        model,
        max_streams=options.samples,
        dtype=options.dtype,
        compile=options.compile,
        mem_len=options.mem_len,
        window=options.window,
        clamp_len=options.clamp_len,
    )
    # The prompt is read once; the other samples are forks of its stream.
    first = engine.join(ids, seed=seed, sampling=options.sampling, forbidden=forbidden)
    for lane in range(1, engine.max_streams):
        engine.fork(first, seed=seed + lane)
    for _ in range(options.max_tokens):
        streams = engine.streams
        tokens = engine.step()
        # The engine ends a single stream; here it is an error, because the caller expects all samples.
        for stream in streams:
            if stream.ended is not None:
                raise UserError(stream.ended)
        yield tokens


def _continue(
    model: LanguageModel, ids: Tensor, state: State, options: GenerationOptions, seed: int, forbidden: Sequence[int]
) -> Iterator[Tensor]:
    """Yield tokens of a model that the decode engine cannot decode: a recurrent one, or one without memory."""
    device, n_lane, context = next(model.parameters()).device, options.samples, model.context
    seeds = torch.tensor([(seed + lane) % 2**63 for lane in range(n_lane)], device=device)
    never = sent(torch.tensor(list(forbidden)), device) if forbidden else None
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
        state = state.select(torch.zeros(n_lane, dtype=torch.int64))
        read = ids.expand(n_lane, -1)
    for number in range(options.max_tokens):
        # Entered at each step, so that the caller's gradient mode does not change between two steps.
        with torch.no_grad():
            if context is not None:
                # Without memory, the whole context is read again for every token.
                read = read[:, -context:]
            log_probs, after = model.log_probs(read, state)
            log_probs, obstacles = permitted(log_probs[:, -1], never)
            token = options.sampling.pick(log_probs, chances(seeds, torch.full_like(seeds, number)))
            if context is None:
                read, state = token[:, None], after
            else:
                read = torch.cat([read, token[:, None]], dim=1)
        drawn = torch.stack([token, obstacles]).cpu()  # the only wait for the device
        if obstacle := int(drawn[1].max()):
            raise UserError(REASONS[obstacle] or "")
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
        vocabulary: vocabulary that the model was trained with.
        prompt: text. Characters or words that the vocabulary lacks become `<unk>`; if the vocabulary has no `<unk>`,
            the error names them.
        top_k, top_p, temperature: see `Sampling`.
        stop: strings at which the text ends; they are not part of the text.
        forbid_unknown: True: never draw `<unk>`. False: draw it only if it is a word of the training text.
        model, max_tokens, seed, mem_len, window, clamp_len, dtype, compile: as in `generate_tokens`.
        detokenise: convention by which the training text was tokenised, which is undone in the pieces; the prompt must
            be tokenised by this convention too. None: the pieces stay as they are.
    """
    options = GenerationOptions(
        max_tokens, 1, Sampling(top_k, top_p, temperature), seed, stop, forbid_unknown, mem_len, window, clamp_len,
        dtype, compile, detokenise,
    )  # fmt: skip
    return generate_with(model, vocabulary, prompt, options)


def generate_with(
    model: LanguageModel, vocabulary: Vocabulary | None, prompt: str, options: GenerationOptions
) -> Iterator[str]:
    """Return the pieces of `generate` for one value of options."""
    # Here and not in the generator: mistakes are refused at once.
    steps, writer = _steps(model, vocabulary, prompt, options), _Writer(vocabulary, prompt, options)

    def pieces() -> Iterator[str]:
        for tokens in steps:
            if piece := writer.push_token(int(tokens[0])):
                yield piece
            if writer.found:
                return
        if piece := writer.finish():
            yield piece

    return pieces()


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
    options = GenerationOptions(
        max_tokens, samples, Sampling(top_k, top_p, temperature), seed, stop, forbid_unknown, mem_len, window,
        clamp_len, dtype, compile, detokenise,
    )  # fmt: skip
    return generate_samples_with(model, vocabulary, prompt, options)


def generate_samples_with(
    model: LanguageModel, vocabulary: Vocabulary | None, prompt: str, options: GenerationOptions
) -> list[str]:
    """Return the texts of `generate_samples` for one value of options."""
    texts, writers = list[str](), list[_Writer]()
    for tokens in _steps(model, vocabulary, prompt, options):
        if not writers:  # made here, because the first step refuses more samples than memory holds
            writers = [_Writer(vocabulary, prompt, options) for _ in range(options.samples)]
            texts = [""] * options.samples
        for lane, (token, writer) in enumerate(zip(tokens.tolist(), writers, strict=True)):
            texts[lane] += writer.push_token(token)
        if all(writer.found for writer in writers):
            break
    return [text + writer.finish() for text, writer in zip(texts, writers, strict=True)]


def _steps(
    model: LanguageModel, vocabulary: Vocabulary | None, prompt: str, options: GenerationOptions
) -> Iterator[Int64[Tensor, " B"]]:
    if vocabulary is None:
        problem = "this model has no vocabulary, so it cannot read or print text"
        raise UserError(problem, remedy="import it again with one, or in Python give ids to txl.generate_tokens")
    if not prompt:
        raise UserError("the prompt is empty", expected="at least one character to continue from")
    ids = torch.as_tensor(vocabulary.encode(prompt), dtype=torch.int64)
    return generate_tokens_with(model, ids, options, undrawable(vocabulary, options.forbid_unknown))


def undrawable(vocabulary: Vocabulary | None, forbid_unknown: bool = False) -> tuple[int, ...]:
    """Return the ids of the tokens that must not be drawn: `<unk>`, which has no text.

    With the word rule "whitespace", `<unk>` is a word of the training text, as in the benchmarks, and is drawn unless
    `forbid_unknown` is True.
    """
    if vocabulary is None or vocabulary.unk_id is None:
        return ()
    return () if vocabulary.draws_unknown and not forbid_unknown else (vocabulary.unk_id,)


class StopStrings:
    """Filter that holds text back while it may be the beginning of a stop string."""

    def __init__(self, strings: Sequence[str]):
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        if not all(self.strings):
            raise UserError("a stop string is empty", expected="at least one character")
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
        # The longest proper beginning of a stop string with which the held text ends stays held.
        keep = max(
            (
                length
                for string in self.strings
                for length in range(1, min(len(string), len(self.held) + 1))
                if self.held.endswith(string[:length])
            ),
            default=0,
        )
        cut = len(self.held) - keep
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown

    def flush(self) -> str:
        """Return the text held back, when generation ends."""
        shown, self.held = self.held, ""
        return shown


class _Writer(StopStrings):
    """Conversion of one continuation's tokens to the text that can be shown, up to a stop string."""

    def __init__(self, vocabulary: Vocabulary | None, prompt: str, options: GenerationOptions):
        assert vocabulary is not None  # `_steps` has refused None
        super().__init__(options.stop)
        self._decoder = text_decoder(vocabulary, options.detokenise, prompt)

    def push_token(self, token: int) -> str:
        """Return the text that can be shown now that a token was drawn."""
        return "" if self.found else self.push(self._decoder.push(token))

    def finish(self) -> str:
        """Return the rest of the text."""
        rest = "" if self.found else self.push(self._decoder.flush())
        return rest if self.found else rest + self.flush()
