"""Configurations for a text and a number of minutes: the rule of `txl train --minutes`.

The rule computes an expected loss from shape, batch and steps, and chooses the lowest loss that the minutes allow.
Its constants come from complete runs (`results/dial.json`); `python -m benchmarks.dial fit` computes the fitted ones.

Letters: N parameters in layers; D training tokens, where repeated passes count less; U own tokens of the text: its
tokens, but fewer if the text repeats itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace

from txl.config import DataConfig, RunConfig, TransformerXLConfig, planned_name, validate, with_options
from txl.errors import UserError
from txl.presets import preset
from txl.units import duration, duration_text

# Layers and width of the model; heads have width 32, the feed-forward layer is three times as wide.
SHAPES = ((3, 96), (4, 128), (6, 192), (6, 256), (8, 384), (12, 512), (16, 768), (24, 1024))
BATCHES = (16, 32, 64, 128, 256)
SMALLEST = 50_000  # bytes of training text; the rule was measured on texts of 180,000 bytes and more
FEWEST_STEPS = 20
# Share of the minutes that is planned; the rest is for saving and for costs outside of the timed steps.
AIM = 0.97
_EVALUATIONS, _EVALUATION_SHARE = 8, 0.05  # number in a run, and their largest share of its time

# What was measured for each of the following is in docs/explanation/minutes.md.
# The expected loss is A / N**ALPHA + B / D**BETA, in nats per token above the part that no model can predict.
A, ALPHA, B, BETA = 17.0, 0.26, 92.0, 0.3
PASSES = 6.0  # after so many passes over the text, one more counts 1/e of the first
LANES = 64.0  # in n lanes a token counts (LANES + 16) / (LANES + n) times as much as in 16 lanes; assumed
MOST_WEIGHTS = 2.0  # largest N that counts, in parameters per own token of the text
MOST_PASSES = 60  # over the text's own tokens; training ends then even if time is left
DROPOUT = ((8, 0.0), (20, 0.1), (math.inf, 0.2))  # most passes for which a dropout rate is the best, and the rate
# Learning rate for 1,200 steps, and the power of the number of steps by which it falls from 300 to 3,600 steps.
RATE, RATE_STEPS, RATE_FALLS = 4e-3, (300, 1200, 3600), 1 / 3
ORDINARY = 3.0  # compression factor of ordinary text; a text with a larger factor counts as a shorter text
# Bytes per second at which any text is prepared in BPE tokens; only if this would take too long, a sample is timed.
SURELY_PREPARED = 1e5
# Size of the training text in bytes, and the size of the BPE vocabulary for smaller texts.
VOCABULARIES = ((500_000, 1024), (2_000_000, 2048), (math.inf, 4096))
MOST_COPYING = 2000  # most steps of a run that begins with heads that copy (`model.init induction`)


@dataclass(frozen=True)
class TextFacts:
    """Facts about the training split of a text."""

    bytes: int
    compressed_bytes: int  # as zstandard would compress it, which finds repetition at any earlier place within 128 MiB
    characters: int  # number of different ones; 0 if the text is not UTF-8 or holds NUL: then only bytes can be read
    sample: str = field(default="", repr=False)  # parts of all of the text that was looked at; a short text whole


@dataclass(frozen=True)
class TokenizedText:
    """Size of a text in tokens, with its facts and the size of its vocabulary."""

    facts: TextFacts
    train_tokens: int
    valid_tokens: int
    vocab_size: int

    @property
    def own_tokens(self) -> float:
        """Number U of training tokens, reduced if the text repeats itself."""
        return self.train_tokens * min(1.0, ORDINARY * self.facts.compressed_bytes / self.facts.bytes)


@dataclass(frozen=True)
class StepTimes:
    """Times of a configuration on a machine, in seconds."""

    step: float  # time of a training step; infinite if the machine's memory is too small
    evaluated_token: float  # time of an evaluation, divided by its tokens; infinite if the run has no evaluations


@dataclass(frozen=True)
class ChosenRun:
    """A configuration with its expected loss and time."""

    run: RunConfig
    expected: float  # expected loss, in nats per token above the part that no model can predict
    passes: float
    own_passes: float  # passes over the text's own tokens
    seconds: float  # planned time of training and evaluations in seconds
    speed: StepTimes
    ends_early: bool  # true if the run ends before the time is over, because more passes would not help
    tried: int = 1  # number of configurations that were timed


def base_run(minutes: float) -> RunConfig:
    """Return the configuration that all choices are based on: the recipe of stdlib-bpe, named after the minutes."""
    run = preset("stdlib-bpe")
    run.name = planned_name(minutes)
    return run


def data_for(text: TextFacts, seconds: float, bpe_seconds: Callable[[int], float]) -> DataConfig:
    """Return the unit for a text, and the size of a BPE vocabulary, for the case that the user asks for one.

    The unit is `bpe`, or `byte` if the file is not UTF-8 or BPE takes more than a quarter of the `seconds` to prepare.
    `bpe_seconds` estimates the time of preparing a BPE vocabulary of a size and its tokens.
    """
    vocab_size, most = next(size for least, size in VOCABULARIES if text.bytes < least), seconds / 4
    reads_bytes = not text.characters or (text.bytes / SURELY_PREPARED > most and bpe_seconds(vocab_size) > most)
    return DataConfig(unit="byte" if reads_bytes else "bpe", vocab_size=vocab_size)


def choose(
    base: RunConfig,
    text: TokenizedText,
    seconds: float,
    measure: Callable[[RunConfig], StepTimes],
    options: dict[str, str],
) -> ChosenRun:
    """Return the configuration with the lowest expected loss, from `base` and the user's options by dotted name.

    The search starts with the smallest shape and batch. It tries the next larger shape and the next larger batch, goes
    on from the better of the two, and ends when neither lowers the expected loss. `measure` times a configuration here.

    Raises:
        UserError: if time or memory are too small for the smallest model, or the options break a rule.
    """
    # The user's options may fix a part of the shape, or the batch: then several of these are the same.
    shapes = list(dict.fromkeys(_shape(layers, width, options) for layers, width in SHAPES))
    batches = BATCHES[:1] if "train.batch_size" in options else BATCHES
    count = 0

    def tried(shape: int, batch: int) -> ChosenRun:
        nonlocal count
        count += 1
        run = configured(base, *shapes[shape], batches[batch], options)
        choice = planned(run, text, seconds, measure(run), options)
        regularised = with_options(with_dropout(run, choice.own_passes), options)
        if regularised != run:  # dropout takes time; the rate is kept although fewer steps are left
            choice = planned(regularised, text, seconds, measure(regularised), options)
        return choice

    indices, best = (0, 0), tried(0, 0)
    if not math.isfinite(best.expected):
        problem = "this machine's memory is too small for the smallest model"
        raise UserError(problem, field="minutes", remedy="give a smaller model")
    check_steps(best, seconds)  # of the smallest model; larger ones would be timed in vain
    while True:
        larger = [(indices[0] + 1, indices[1]), (indices[0], indices[1] + 1)]
        choices = {(i, j): tried(i, j) for i, j in larger if i < len(shapes) and j < len(batches)}
        choices = {key: choice for key, choice in choices.items() if choice.run.train.steps >= FEWEST_STEPS}
        indices = min(choices, key=lambda key: choices[key].expected, default=(0, 0))
        if not choices or choices[indices].expected >= best.expected:
            break
        best = choices[indices]
    validate(best.run)
    return replace(best, tried=count)


def check_steps(choice: ChosenRun, seconds: float) -> None:
    """Refuse a choice with too few steps; `seconds` is the time left for training and evaluations."""
    if choice.run.train.steps < FEWEST_STEPS:
        problem = f"{duration(max(0.0, seconds))} remain for training, and a step takes {choice.speed.step:.2g} s"
        remedy = "give more minutes, or close other programs"
        raise UserError(problem, field="minutes", expected=f"time for {FEWEST_STEPS} steps or more", remedy=remedy)


def _shape(layers: int, width: int, options: dict[str, str]) -> tuple[int, int]:
    return int(options.get("model.n_layer", layers)), int(options.get("model.d_model", width))


def configured(base: RunConfig, layers: int, width: int, lanes: int, options: dict[str, str]) -> RunConfig:
    """Return a copy of `base` with a shape, a number of lanes and the user's options."""
    layers, width = _shape(layers, width, options)
    run = RunConfig.from_dict(base.to_dict())
    run.model = replace(
        run.model, n_layer=layers, d_model=width, n_head=max(1, width // 32), d_head=32, d_inner=3 * width
    )
    run.train.batch_size = lanes
    return with_options(run, options)


def with_copying(run: RunConfig, options: dict[str, str]) -> RunConfig:
    """Return the run with the user's options; a short one begins with heads that copy, where possible."""
    if isinstance(run.model, TransformerXLConfig):  # a run that is planned again may have become longer
        run = replace(run, model=replace(run.model, init="normal"))
    run = with_options(run, options)
    can_copy = isinstance(run.model, TransformerXLConfig) and run.model.induction_obstacle() is None
    if can_copy and run.train.steps <= MOST_COPYING and "model.init" not in options:
        return with_options(run, {"model.init": "induction"})
    return run


def with_dropout(run: RunConfig, own_passes: float) -> RunConfig:
    """Return a copy with the dropout rate that is best for a number of passes over the text's own tokens."""
    rate = next(rate for most, rate in DROPOUT if own_passes <= most)
    return replace(run, model=replace(run.model, dropout=rate))


def planned(
    run: RunConfig, text: TokenizedText, seconds: float, speed: StepTimes, options: dict[str, str]
) -> ChosenRun:
    """Return a configuration with the steps and evaluations that fit into `seconds`, and its expected loss.

    Evaluations that the user has set (`train.eval_every`, `train.eval_tokens`) take their part of the time.
    """
    if not math.isfinite(speed.step):
        return ChosenRun(run, math.inf, 0.0, 0.0, math.inf, speed, False)
    run = RunConfig.from_dict(run.to_dict())
    train, per_step = run.train, run.train.tokens_per_step
    own = with_options(run, options).train
    if "train.eval_tokens" in options:
        evaluated = min(own.eval_tokens or text.valid_tokens, text.valid_tokens)
    else:
        in_time = int(_EVALUATION_SHARE * seconds / _EVALUATIONS / speed.evaluated_token)
        evaluated = min(text.valid_tokens, max(100 * run.validation_lanes, in_time))
    one = evaluated * speed.evaluated_token
    if "train.eval_every" in options:  # the last step is always evaluated, unless no step is
        last, per_evaluation = (one, one / own.eval_every) if own.eval_every else (0.0, 0.0)
        in_time = int((seconds - last) / (speed.step + per_evaluation))
    else:
        in_time = int((seconds - _EVALUATIONS * one) / speed.step)
    useful = max(FEWEST_STEPS, int(MOST_PASSES * text.own_tokens / per_step))
    train.steps = max(1, min(in_time, useful))
    train.learning_rate = rate_of(train.steps)
    train.warmup_steps = max(1, round(0.05 * train.steps))
    train.eval_every = train.checkpoint_every = max(1, math.ceil(train.steps / _EVALUATIONS))
    train.eval_tokens = None if evaluated == text.valid_tokens else evaluated
    train.log_every = max(1, round(train.steps / 40))
    tokens = train.steps * per_step
    run = with_options(run, options)
    train = run.train
    seconds = train.steps * speed.step + (one * math.ceil(train.steps / train.eval_every) if train.eval_every else 0.0)
    train.planned_minutes = seconds / 60
    return ChosenRun(
        with_copying(run, options),
        expected_loss(run, text, train.steps),
        tokens / text.train_tokens,
        train.steps * per_step / text.own_tokens,
        seconds,
        speed,
        useful < in_time,
    )


def rate_of(steps: int) -> float:
    """Return the learning rate for a number of steps."""
    fewest, usual, most = RATE_STEPS
    return float(f"{RATE * (usual / min(max(steps, fewest), most)) ** RATE_FALLS:.2g}")


def expected_loss(run: RunConfig, text: TokenizedText, steps: int) -> float:
    """Return the expected loss, in nats per token above the part that no model can predict."""
    own = text.own_tokens
    size = min(run.model.parameter_count(0), MOST_WEIGHTS * own)
    tokens = steps * run.train.tokens_per_step
    worth = counted_tokens(tokens, own, PASSES)
    worth *= (LANES + BATCHES[0]) / (LANES + run.train.batch_size)
    return A / size**ALPHA + B / worth**BETA


def counted_tokens(tokens: float, own: float, passes: float) -> float:
    """Return how many tokens of training count, if a pass after `passes` passes over `own` tokens counts 1/e."""
    return passes * own * -math.expm1(-tokens / (passes * own))


def reasons(
    choice: ChosenRun, text: TokenizedText, minutes: float, prepared: float, options: Container[str] = ()
) -> tuple[str, str, str]:
    """Return three lines that describe a choice and its reasons: text, model and training.

    `minutes` and the names of `options` are those that the user gave; preparing the text took `prepared` seconds.
    """
    facts, model, train = text.facts, choice.run.model, choice.run.train
    script = f"{facts.characters:,} different characters" if facts.characters else "not UTF-8 text (see txl data info)"
    per_token = f"{facts.bytes / text.train_tokens:.2f} bytes per token"
    unit = {
        "byte": "bytes",
        "char": "characters",
        "bpe": f"a BPE vocabulary of {text.vocab_size:,}, {per_token}",
        "word": f"{text.vocab_size:,} words, {per_token}",
    }[choice.run.data.unit]
    if choice.run.data.unit == "byte" and facts.characters and "data.unit" not in options:
        unit += " (BPE would take too long to prepare)"
    extras = f", dropout {model.dropout:g}" if model.dropout else ""
    extras += ", heads that copy" if model.first_weights == "induction" else ""
    compared = f"lowest expected loss of {choice.tried} configurations timed"
    return (
        f"text: {facts.bytes:,} bytes to train on, {script}, compresses {facts.bytes / facts.compressed_bytes:.1f} "
        f"times: {unit}, prepared in {duration_text(prepared)}",
        f"model: {model.n_layer} layers of width {model.d_model}, {train.batch_size} x "
        f"{train.tokens_per_step // train.batch_size} tokens a step in {train.dtype}: {choice.speed.step:.3g} s a step "
        f"here; {compared if choice.tried > 1 else 'shape and batch were given'}",
        f"training: {train.steps:,} steps, {choice.passes:.3g} passes over the text{extras}, in "
        f"{duration_text(choice.seconds)} with evaluations, of the {minutes:g} minutes"
        + ("; more passes would not help, so it ends early" if choice.ends_early else ""),
    )
