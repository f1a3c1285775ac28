"""Facts about a text and measurements of this machine, for which `txl.minutes.rule` chooses a run."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
import zstandard

from txl.config import RunConfig, validate, with_options
from txl.data.bpe import BPE_TRAINING_BYTES, BpeVocabulary
from txl.data.corpora import STDLIB, Corpus, open_corpus, own_files, refuse_unused, with_absolute_paths
from txl.data.lanes import LaneStream
from txl.data.pieces import BLOCK
from txl.data.user_text import stdlib_pieces, user_pieces
from txl.errors import UserError
from txl.minutes import rule
from txl.minutes.rule import StepTimes, TextFacts
from txl.runs.environment import memory_bytes
from txl.training.compilation import check_trainable
from txl.training.defaults import chosen_attention, fast_options
from txl.training.estimate import estimate
from txl.training.loop import check_validation_split, evaluate_in_training
from txl.training.parallel import TrainedModel
from txl.training.timing import median_seconds, seconds_of, training_workload

_LOOKED_AT = 64 * BLOCK  # bytes read from the beginning; the rest of a longer text is assumed to be similar
_SAMPLE = 1 << 19  # bytes of the text in `TextFacts.sample`
_FAR = 27  # base-2 logarithm of the largest distance, in bytes, over which repetition is found
_SAMPLE_CHUNK = 1 << 14  # characters passed to the BPE library at once while a sample is timed; its threads share them
_LONG_STEP_SHARE = 0.005  # of the minutes; a configuration whose first step takes longer is timed by that step alone
_MOST_MEMORY = 0.6  # largest estimated memory of a configuration, as a share of the machine's memory


@dataclass(frozen=True)
class MinutesRun:
    """The chosen run, and three lines with the reasons."""

    run: RunConfig
    lines: tuple[str, str, str]


def run_in_minutes(
    minutes: float,
    options: dict[str, str],
    device: str,
    data_dir: str | Path | None = None,
    *,
    began: float,
    quiet: bool = False,
) -> MinutesRun:
    """Choose units, shape, batch, dropout, steps and arithmetic for a text and a number of minutes.

    Args:
        minutes: time from `began` to the end of the last evaluation, in minutes.
        options: options of the user by dotted name, `data.corpus` included; the choice keeps their values.
        device: device that the run trains on.
        data_dir: directory of prepared corpora.
        began: reading of `time.perf_counter` when the command began.
        quiet: True to print no progress on standard error.

    Raises:
        UserError: if the text is too small, the time too short, or the options break a rule.
    """
    base = rule.base_run(minutes)
    base = with_options(base, fast_options(base, options, device))
    check_options(base, options, device)
    name = with_absolute_paths(with_options(base, options).data).corpus
    facts = text_facts(name)
    if facts.bytes < rule.SMALLEST:
        problem, remedy = f"has {facts.bytes:,} bytes to train on", "choose a preset (txl presets)"
        raise UserError(problem, value=name, expected=f"{rule.SMALLEST:,} or more", remedy=remedy)

    def bpe_seconds(vocab_size: int) -> float:
        return 0.0 if "data.unit" in options else measured_bpe(facts, int(options.get("data.vocab_size", vocab_size)))

    base.data = replace(rule.data_for(facts, 60 * minutes, bpe_seconds), corpus=name)
    data = with_options(base, options).data
    refuse_unused(data, options)
    looked = time.perf_counter()
    corpus = open_corpus(name, config=data, data_dir=data_dir, quiet=quiet)
    prepared = time.perf_counter() - looked
    tokens = {split: len(corpus.tokens(split)) for split in ("train", "valid")}
    text = rule.TokenizedText(facts, tokens["train"], tokens["valid"], len(corpus.vocabulary))
    smallest = rule.configured(base, *rule.SHAPES[0], rule.BATCHES[0], options)
    check_validation_split(smallest, corpus)
    _check_lanes(smallest, corpus)

    def left() -> float:
        return rule.AIM * 60 * minutes - (time.perf_counter() - began)

    longest = _LONG_STEP_SHARE * 60 * minutes

    def measure(run: RunConfig) -> StepTimes:
        return measured_speed(run, corpus, device, longest)

    choice = rule.choose(base, text, left(), measure, options)
    run, speed = with_fast_attention(choice.run, device, choice.speed, measure)
    seconds = left()  # measured again, because timing took some time
    choice = replace(rule.planned(run, text, seconds, speed, options), tried=choice.tried)
    rule.check_steps(choice, seconds)
    return MinutesRun(choice.run, rule.reasons(choice, text, minutes, prepared, options))


def with_fast_attention(
    run: RunConfig, device: str, speed: StepTimes, measure: Callable[[RunConfig], StepTimes]
) -> tuple[RunConfig, StepTimes]:
    """Return a run with the attention that is fastest on a GPU of a kind that nobody measured, and its times.

    Where the attention is known or given, run and `speed` are returned unchanged, and nothing is timed.
    """
    times: dict[str, StepTimes] = {}

    def step_seconds(tried: RunConfig) -> float:
        name = getattr(tried.model, "attention", "")
        times[name] = measure(tried)
        return times[name].step

    attention = chosen_attention(run, device, step_seconds)
    if attention is None or attention.name not in times:
        return run, speed
    return with_options(run, {"model.attention": attention.name}), times[attention.name]


def text_facts(corpus: str) -> TextFacts:
    """Return facts about the training split of a user's text (file, folder or glob) or the standard library's sources.

    Raises:
        UserError: if the text does not exist or cannot be read.
    """
    if corpus != STDLIB:
        own_files(corpus)  # if there is no such file, the error lists the named corpora
    pieces = (stdlib_pieces("bpe") if corpus == STDLIB else user_pieces(corpus))["train"]
    size = sum(sum(map(len, piece.blocks())) if piece.size is None else piece.size for piece in pieces)
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(3, enable_ldm=True, window_log=_FAR)
    ).compressobj()
    share = _SAMPLE / max(_SAMPLE, min(size, _LOOKED_AT))
    looked_at, compressed, is_text = 0, 0, True
    characters: set[str] = set()
    sample = []
    for piece in pieces:
        if looked_at >= _LOOKED_AT:
            break
        decoder = codecs.getincrementaldecoder("utf-8")()
        for block in chain(piece.blocks(), [b""]):
            if looked_at >= _LOOKED_AT:  # counted in bytes, because small files yield small blocks
                break
            looked_at += len(block)
            compressed += len(compressor.compress(block))
            try:
                text = decoder.decode(block, final=not block) if is_text else ""
            except UnicodeDecodeError:
                is_text, text = False, ""
            characters.update(text)
            sample.append(text[: math.ceil(share * len(text))])
    compressed += len(compressor.flush())
    n_character = len(characters) if is_text and "\0" not in characters else 0
    return TextFacts(size, round(compressed * size / max(1, looked_at)), n_character, "".join(sample))


def measured_bpe(facts: TextFacts, vocab_size: int) -> float:
    """Estimate the seconds of learning a BPE vocabulary and encoding a text, from two samples of different length."""

    def learn(chunks: list[str]) -> tuple[BpeVocabulary, float]:
        began = time.perf_counter()
        return BpeVocabulary.train(chunks, vocab_size), time.perf_counter() - began

    places = range(0, len(facts.sample), _SAMPLE_CHUNK)
    chunks = [facts.sample[place : place + _SAMPLE_CHUNK] for place in places]
    few, size = chunks[: max(1, len(chunks) // 4)], len(facts.sample.encode())
    (_, short), (vocabulary, long) = learn(few), learn(chunks)
    per_byte = max(0.0, long - short) / max(1, size - len("".join(few).encode()))
    began = time.perf_counter()
    vocabulary.encode_block(facts.sample)
    encoding = (time.perf_counter() - began) / size * facts.bytes
    return long + per_byte * max(0, min(facts.bytes, BPE_TRAINING_BYTES) - size) + encoding


def check_options(base: RunConfig, options: dict[str, str], device: str) -> None:
    """Refuse options that break a rule for every choice of steps and learning rate, or that the device lacks."""
    run = rule.configured(base, *rule.SHAPES[0], rule.BATCHES[0], {})
    run.train.steps, run.train.learning_rate = 10**9, 1.0
    run = with_options(run, options)
    validate(run)
    check_trainable(run, device)


def _check_lanes(run: RunConfig, corpus: Corpus) -> None:
    """Raise `UserError` if a lane of the training split is shorter than a segment."""
    LaneStream(corpus.tokens("train"), run.train.batch_size, run.train.segment)


def measured_speed(run: RunConfig, corpus: Corpus, device: str, longest: float) -> StepTimes:
    """Time training steps of a configuration on random tokens, and its evaluation on part of the validation split.

    Return infinite times if its lanes are shorter than a segment, or the machine's memory is too small for it. If the
    first step takes longer than `longest` seconds, no other step is timed.
    """
    too_large = StepTimes(math.inf, math.inf)
    try:
        _check_lanes(run, corpus)
    except UserError:
        return too_large
    if estimate(run, len(corpus.vocabulary), device).total_bytes > _MOST_MEMORY * memory_bytes(device):
        return too_large
    with suppress(torch.OutOfMemoryError):  # if another program uses a part of the GPU's memory
        return _timed(run, corpus, device, longest)
    torch.cuda.empty_cache()  # after the exception, which holds the model
    return too_large


def _timed(run: RunConfig, corpus: Corpus, device: str, longest: float) -> StepTimes:
    model, step = training_workload(run, len(corpus.vocabulary), device, must_compile=False)
    seconds = median_seconds(step, device, longest)
    if not run.train.eval_every:
        return StepTimes(seconds, math.inf)
    some = RunConfig.from_dict(run.to_dict())
    some.train.eval_tokens = min(len(corpus.tokens("valid")), 2 * run.eval.segment * run.validation_lanes)
    model, done = model.eval(), 0

    def evaluation() -> None:
        nonlocal done
        done = evaluate_in_training(model, some, corpus, TrainedModel(model), lambda: False).tokens

    evaluation()  # not timed, because the first evaluation converts the weights
    return StepTimes(seconds, seconds_of(evaluation, device) / done)
