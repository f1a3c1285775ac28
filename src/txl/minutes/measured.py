"""Choice of a run for a text, this machine and a number of minutes: `txl train --minutes`.

The rule is in `txl.minutes.rule`. This module examines and prepares the text, and measures the machine's speed.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from txl.config import RunConfig, validate, with_options
from txl.data.bpe import BpeVocabulary
from txl.data.corpora import Corpus, open_corpus, refuse_unused, with_absolute_paths
from txl.data.counting import BPE_TRAINING_BYTES
from txl.data.lanes import LaneStream
from txl.errors import UserError
from txl.minutes.facts import TextFacts, text_facts
from txl.minutes.rule import (
    AIM,
    BATCHES,
    SHAPES,
    SMALLEST,
    StepTimes,
    TokenizedText,
    base_run,
    check_steps,
    choose,
    configured,
    data_for,
    planned,
    reasons,
)
from txl.minutes.timing import seconds_of, training_workload
from txl.runs.environment import memory_bytes, multiplies_bfloat16
from txl.training.building import check_trainable
from txl.training.compilation import can_capture
from txl.training.estimate import estimate
from txl.training.parallel import TrainedModel
from txl.training.validation import check_validation_split, evaluate_in_training

# Least time in seconds, and least number of steps, for which each configuration is timed. On an H200, the choice among
# 13 configurations took 42 s with a second for each.
_TIMED_SECONDS, _TIMED_SECONDS_ON_GPU, _TIMED_STEPS = 1.0, 0.2, 3
# Characters passed to the BPE library at once while a sample is timed; its threads share them.
_SAMPLE_CHUNK = 1 << 14
# Share of the minutes; a configuration whose first step takes longer is timed by that step alone.
_LONG_STEP_SHARE = 0.005
# Largest estimated memory of a configuration, as a share of the machine's memory.
_MOST_MEMORY = 0.6


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
    base = base_run(minutes, multiplies_bfloat16(device))
    base.train.capture = can_capture(with_options(base, options), device)
    data = with_absolute_paths(with_options(base, options).data)
    _check_options(base, options, device)
    facts = text_facts(data.corpus)
    if facts.bytes < SMALLEST:
        problem = f"has {facts.bytes:,} bytes to train on"
        remedy = "choose a preset (txl presets)"
        raise UserError(problem, value=data.corpus, expected=f"{SMALLEST:,} or more", remedy=remedy)

    def bpe_seconds(vocab_size: int) -> float:
        return 0.0 if "data.unit" in options else measured_bpe(facts, int(options.get("data.vocab_size", vocab_size)))

    base.data = replace(data_for(facts, 60 * minutes, bpe_seconds), corpus=data.corpus)
    refuse_unused(with_options(base, options).data, options)
    looked = time.perf_counter()
    corpus = open_corpus(data.corpus, config=with_options(base, options).data, data_dir=data_dir, quiet=quiet)
    prepared = time.perf_counter() - looked
    splits = {name: len(corpus.tokens(name)) for name in ("train", "valid")}
    text = TokenizedText(facts, splits["train"], splits["valid"], len(corpus.vocabulary))
    smallest = configured(base, *SHAPES[0], BATCHES[0], options)
    check_validation_split(smallest, corpus)
    _check_lanes(smallest, corpus)

    longest = _LONG_STEP_SHARE * 60 * minutes

    def left() -> float:
        return AIM * 60 * minutes - (time.perf_counter() - began)

    def measure(run: RunConfig) -> StepTimes:
        return measured_speed(run, corpus, device, longest)

    choice = choose(base, text, left(), measure, options)
    seconds = left()  # measured again, because timing took some time
    choice = replace(planned(choice.run, text, seconds, choice.speed, options), tried=choice.tried)
    check_steps(choice, seconds)
    return MinutesRun(choice.run, reasons(choice, text, minutes, prepared, options))


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


def _check_options(base: RunConfig, options: dict[str, str], device: str) -> None:
    """Refuse options that break a rule for every choice of steps and learning rate, or that the device lacks."""
    run = configured(base, *SHAPES[0], BATCHES[0], {})
    run.train.steps, run.train.learning_rate = 10**9, 1.0
    run = with_options(run, options)
    validate(run)
    check_trainable(run, device)


def _check_lanes(run: RunConfig, corpus: Corpus) -> None:
    """Raise `UserError` if a lane of the training split is shorter than a segment."""
    LaneStream(corpus.tokens("train"), run.train.batch_size, run.train.segment)


def measured_speed(run: RunConfig, corpus: Corpus, device: str, longest: float) -> StepTimes:
    """Time training steps of a configuration on random tokens, and its evaluation on part of the validation split.

    Return infinite times if its lanes are shorter than a segment, or the machine's memory is too small for it.

    Args:
        run: configuration to time.
        corpus: corpus with the validation split.
        device: device that trains and evaluates.
        longest: time in seconds; if the first step takes longer, no other step is timed.
    """
    vocab_size = len(corpus.vocabulary)
    too_large = StepTimes(math.inf, math.inf)
    try:
        _check_lanes(run, corpus)
    except UserError:
        return too_large
    if estimate(run, vocab_size, device).total_bytes > _MOST_MEMORY * memory_bytes(device):
        return too_large
    with suppress(torch.OutOfMemoryError):  # if another program uses a part of the GPU's memory
        return _timed(run, corpus, device, longest)
    torch.cuda.empty_cache()  # after the exception, which holds the model
    return too_large


def _timed(run: RunConfig, corpus: Corpus, device: str, longest: float) -> StepTimes:
    model, step = training_workload(run, len(corpus.vocabulary), device, must_compile=False)
    steps = [seconds_of(step, device)]
    if steps[0] < longest:
        seconds_of(step, device)
        steps = [seconds_of(step, device) for _ in range(_TIMED_STEPS)]
        least = _TIMED_SECONDS_ON_GPU if device.startswith("cuda") else _TIMED_SECONDS
        while sum(steps) < least:
            steps.append(seconds_of(step, device))
    if not run.train.eval_every:
        return StepTimes(median(steps), math.inf)
    some = RunConfig.from_dict(run.to_dict())
    some.train.eval_tokens = min(len(corpus.tokens("valid")), 2 * run.eval.segment * run.validation_lanes)
    model, done = model.eval(), 0

    def evaluation() -> None:
        nonlocal done
        done = evaluate_in_training(model, some, corpus, TrainedModel(model), lambda: False).tokens

    evaluation()  # not timed, because the first evaluation converts the weights
    return StepTimes(median(steps), seconds_of(evaluation, device) / done)
