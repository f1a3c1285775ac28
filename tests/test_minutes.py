"""The rule of `txl train --minutes`: its choice for many sizes of text and times, on made-up machines."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from txl.config import RunConfig, TransformerXLConfig, validate
from txl.errors import UserError
from txl.minutes import measured as measuring
from txl.minutes import rule
from txl.minutes.measured import measured_bpe, text_facts
from txl.minutes.rule import (
    MOST_PASSES,
    ChosenRun,
    StepTimes,
    TextFacts,
    TokenizedText,
    base_run,
    choose,
    data_for,
    expected_loss,
    reasons,
)
from txl.presets import preset

SIZES = (180_000, 2_000_000, 10_000_000, 100_000_000)
MINUTES = (2, 10, 30, 120, 360)


def _machine(run: RunConfig, rate: float = 4e10, overhead: float = 0.01) -> StepTimes:
    """Return the step times of a machine with `rate` operations a second, half as many in training with dropout."""
    assert isinstance(run.model, TransformerXLConfig)
    tokens, weights = run.train.batch_size * run.train.segment, run.model.parameter_count(2048)
    slower = 2 if run.model.dropout else 1
    return StepTimes(overhead + slower * 6 * weights * tokens / rate, 2 * weights / rate)


def _text(size: int, unit: str = "bpe", repeats: float = 1.0) -> TokenizedText:
    facts = TextFacts(size, round(size / 3 / repeats), 90)
    per_token = 3 if unit == "bpe" else 1
    return TokenizedText(facts, size // per_token, size // per_token // 18, 2048 if unit == "bpe" else 256)


def _choice(size: int, minutes: float, rate: float = 4e10, repeats: float = 1.0, **given: str) -> ChosenRun:
    base = base_run(minutes)
    base.data = data_for(TextFacts(size, size // 3, 90), 60 * minutes, lambda _: size / 2e6)
    options = {name.replace("__", "."): value for name, value in given.items()}
    return choose(base, _text(size, base.data.unit, repeats), 60 * minutes, lambda run: _machine(run, rate), options)


def _weights(run: RunConfig) -> int:
    return run.model.parameter_count(0)


@pytest.mark.parametrize(
    ("size", "minutes", "given"),
    [
        *((size, minutes, {}) for size, minutes in itertools.product(SIZES, MINUTES)),
        (10_000_000, 5, {"train__eval_every": "10"}),
        (10_000_000, 5, {"train__eval_tokens": "none"}),
        (10_000_000, 5, {"train__eval_every": "50", "train__eval_tokens": "20000"}),
        (10_000_000, 5, {"train__eval_every": "0"}),
        (10_000_000, 5, {"train__eval_every": "100000", "train__eval_tokens": "none"}),
    ],
)
def test_a_choice_is_valid_and_in_time(size: int, minutes: float, given: dict[str, str]):
    """Evaluations that the user sets are part of the time."""
    choice = _choice(size, minutes, 4e10, 1.0, **given)
    validate(choice.run)
    train, speed = choice.run.train, _machine(choice.run)
    one = (train.eval_tokens or _text(size, choice.run.data.unit).valid_tokens) * speed.evaluated_token
    evaluations = math.ceil(train.steps / train.eval_every) if train.eval_every else 0
    taken = train.steps * speed.step + evaluations * one
    assert taken <= 60 * minutes
    assert choice.ends_early or taken > 0.9 * 60 * minutes - one
    assert choice.passes <= 1.001 * MOST_PASSES
    assert train.planned_minutes == pytest.approx(taken / 60, rel=0.06)


@pytest.mark.parametrize("size", SIZES)
def test_more_time_never_chooses_a_smaller_model_nor_expects_more_loss(size: int):
    choices = [_choice(size, minutes) for minutes in MINUTES]
    same_unit = [choice for choice in choices if choice.run.data.unit == choices[-1].run.data.unit]
    assert [_weights(each.run) for each in same_unit] == sorted(_weights(each.run) for each in same_unit)
    assert [each.expected for each in same_unit] == sorted((each.expected for each in same_unit), reverse=True)


@pytest.mark.parametrize("minutes", MINUTES)
def test_a_faster_machine_chooses_no_smaller_model(minutes: float):
    weights = [_weights(_choice(10_000_000, minutes, rate).run) for rate in (1e10, 4e10, 1e12, 1e14)]
    assert weights == sorted(weights)
    assert weights[-1] > weights[0]


def test_a_choice_has_the_recipe_of_the_preset():
    chosen, recipe = _choice(10_000_000, 10).run, preset("stdlib-bpe")
    differing = {name for name, value in asdict(chosen.model).items() if value != asdict(recipe.model)[name]}
    assert differing <= {"n_layer", "d_model", "n_head", "d_inner", "dropout"}
    for name in ("optimizer", "schedule", "reset_memory", "beta2", "clip", "segment"):
        assert getattr(chosen.train, name) == getattr(recipe.train, name), name


def test_a_small_text_gets_dropout_and_ends_early():
    small, large = _choice(180_000, 360), _choice(100_000_000, 10)
    assert small.run.model.dropout > large.run.model.dropout == 0
    assert [small.ends_early, large.ends_early] == [True, False]
    assert small.run.train.eval_every <= small.run.train.steps / 8 + 1, "the best checkpoint may be an early one"


def test_a_text_that_repeats_counts_as_a_shorter_one():
    again = _choice(2_000_000, 120, repeats=20)
    assert again.ends_early
    assert again.passes == pytest.approx(MOST_PASSES / 20, rel=0.01)
    assert again.run.model.dropout > 0


def test_text_that_takes_long_to_cut_into_byte_pairs_is_read_in_bytes():
    facts = TextFacts(100_000_000, 30_000_000, 90)
    estimated: list[int] = []

    def fifty_seconds(vocab_size: int) -> float:
        estimated.append(vocab_size)
        return 50.0

    assert [data_for(facts, seconds, fifty_seconds).unit for seconds in (120, 199, 201)] == ["byte", "byte", "bpe"]
    assert estimated == [4096] * 3
    for size, vocab_size in ((400_000, 1024), (1_000_000, 2048), (3_000_000, 4096)):
        data = data_for(TextFacts(size, size // 3, 90), 600, fifty_seconds)
        assert (data.unit, data.vocab_size) == ("bpe", vocab_size)
    data = data_for(TextFacts(2_000_000_000, 600_000_000, 90), 120, lambda _: 1e9)
    assert (data.unit, data.vocab_size) == ("byte", 4096), "a user may still ask for byte pairs"
    assert data_for(facts, 36_000, fifty_seconds).unit == "bpe"
    assert data_for(TextFacts(1000, 300, 0), 36_000, fifty_seconds).unit == "byte", "what is not text is read in bytes"
    assert len(estimated) == 3, "no sample is timed if any text of the size would be in time"


def test_the_time_of_byte_pairs_is_extrapolated_from_two_samples(monkeypatch: pytest.MonkeyPatch):
    """Here learning takes 1 s, and 2 s per megabyte of at most 100; encoding takes 3 s per megabyte."""
    now = [0.0]

    class Vocabulary:
        @staticmethod
        def train(chunks: list[str], vocab_size: int) -> Vocabulary:
            assert vocab_size == 999
            now[0] += 1 + 2e-6 * len("".join(chunks).encode())
            return Vocabulary()

        def encode_block(self, text: str) -> None:
            now[0] += 3e-6 * len(text.encode())

    monkeypatch.setattr(measuring, "BpeVocabulary", Vocabulary)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    sample = "añb" * 100_000
    for megabytes, seconds in ((0.4, 1 + 0.8 + 1.2), (8, 1 + 16 + 24), (1000, 1 + 200 + 3000)):
        facts = TextFacts(round(megabytes * 1e6), 1000, 3, sample)
        assert measured_bpe(facts, 999) == pytest.approx(seconds, rel=1e-6)


def test_the_time_of_byte_pairs_is_that_of_the_library():
    assert 0 < measured_bpe(TextFacts(10**6, 10**5, 3, "abc " * 20_000), 300) < 600


def test_given_options_are_kept():
    run = _choice(2_000_000, 10, model__n_layer="5", model__d_model="64", train__batch_size="8").run
    assert isinstance(run.model, TransformerXLConfig)
    assert (run.model.n_layer, run.model.d_model, run.model.n_head, run.model.d_inner) == (5, 64, 2, 192)
    assert run.train.batch_size == 8
    assert _choice(180_000, 360, model__dropout="0.35").run.model.dropout == 0.35


@pytest.mark.parametrize("given", [{"model__d_model": "256"}, {"model__d_model": "192", "train__batch_size": "16"}])
def test_a_given_width_does_not_end_the_search_for_layers(given: dict[str, str]):
    timed = []

    def machine(run: RunConfig) -> StepTimes:
        timed.append((run.model.n_layer, run.train.batch_size, run.model.dropout))
        return _machine(run, 1e12)

    options = {name.replace("__", "."): value for name, value in given.items()}
    choice = choose(base_run(600), _text(100_000_000), 36_000, machine, options)
    assert choice.run.model.n_layer > 6
    assert len(timed) == len(set(timed)), "a configuration is timed once"


def test_the_expected_loss_falls_with_steps_and_ends_where_the_text_is_used_up():
    run = _choice(180_000, 10).run
    losses = [expected_loss(run, _text(180_000), steps) for steps in (10, 100, 1000, 10_000, 10**6, 10**7)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-2] == pytest.approx(losses[-1], rel=1e-6)


@pytest.mark.parametrize("seconds", [-1.0, 0.5])
def test_without_time_the_smallest_model_alone_is_timed(seconds: float):
    timed: list[RunConfig] = []

    def measure(run: RunConfig) -> StepTimes:
        timed.append(run)
        return StepTimes(0.1, 1e-4)

    with pytest.raises(UserError, match=r"remain for training, and a step takes 0\.1 s"):
        choose(base_run(1), _text(10_000_000), seconds, measure, {})
    assert len(timed) == 1


def test_a_model_with_too_few_steps_is_not_chosen():
    def measure(run: RunConfig) -> StepTimes:
        assert isinstance(run.model, TransformerXLConfig)
        return StepTimes(0.1 if (run.model.d_model, run.train.batch_size) == (96, 16) else 5.0, 1e-5)

    choice = choose(base_run(1), _text(10_000_000), 60, measure, {})
    assert choice.run.train.steps > 100


def test_a_model_that_does_not_fit_into_memory_is_not_chosen():
    def measure(run: RunConfig) -> StepTimes:
        assert isinstance(run.model, TransformerXLConfig)
        return _machine(run, 1e14) if run.model.d_model <= 192 else StepTimes(math.inf, math.inf)

    choice = choose(base_run(60), _text(10_000_000), 3600, measure, {})
    assert choice.run.model.d_model == 192
    with pytest.raises(UserError, match="memory is too small"):
        choose(base_run(60), _text(10_000_000), 3600, lambda _: StepTimes(math.inf, math.inf), {})


def test_the_constants_are_those_that_the_curves_give():
    dial = pytest.importorskip("benchmarks.dial", reason="needs benchmarks/, which only the repository contains")
    recorded = json.loads((Path(__file__).parent.parent / "results" / "dial.json").read_text(encoding="utf-8"))
    fitted = dial.fit(recorded["output"]["curves"])
    for name in ("A", "ALPHA", "B", "PASSES"):
        assert getattr(rule, name) == pytest.approx(fitted[name], rel=0.01), name


# Facts of a text.


def test_facts_of_a_text(tmp_path: Path):
    text = "".join(random.Random(1).choices("añbcdefgh €", k=200_000))
    (tmp_path / "once.txt").write_text(text, encoding="utf-8")
    (tmp_path / "often.txt").write_text(4 * text, encoding="utf-8")
    (tmp_path / "binary").write_bytes(random.Random(1).randbytes(100_000))
    once, often, binary = (text_facts(str(tmp_path / name)) for name in ("once.txt", "often.txt", "binary"))
    assert once.characters == 11
    assert once.bytes == pytest.approx(0.9 * len(text.encode()), abs=4)
    assert often.compressed_bytes < 1.2 * once.compressed_bytes, "repetition is found far behind"
    assert binary.characters == 0
    assert text.startswith(once.sample)
    assert len(once.sample.encode()) == once.bytes
    assert (len(often.sample.encode()), binary.sample) == (pytest.approx(1 << 19, rel=0.01), "")
    assert often.sample[-1000:] in text
    (tmp_path / "cut").mkdir()
    half = text.encode()[: text.encode().index("ñ".encode()) + 1]
    for name, content in (("train", half), ("valid", b"a"), ("test", b"a")):
        (tmp_path / "cut" / f"{name}.txt").write_bytes(content)
    assert text_facts(str(tmp_path / "cut")).characters == 0


def test_a_short_run_begins_with_heads_that_copy():
    run = base_run(2)
    for before in ("normal", "induction"):  # a run that is planned again may have become longer
        for steps, init in ((rule.MOST_COPYING, "induction"), (rule.MOST_COPYING + 1, "normal")):
            assert isinstance(run.model, TransformerXLConfig)
            run.model = replace(run.model, init=before)
            run.train.steps = steps
            assert rule.with_copying(run, {}).model.first_weights == init
    short = _choice(2_000_000, 2)
    assert short.run.model.first_weights == "induction"
    assert "heads that copy" in reasons(short, _text(2_000_000), 2, 0.0)[2]


@pytest.mark.parametrize(
    ("option", "value"),
    [("n_layer", "1"), ("pre_norm", "false"), ("tie_embeddings", "false"), ("d_embed", "64"), ("init", "xavier")],
)
def test_the_user_s_options_come_before_heads_that_copy(option: str, value: str):
    given: dict[str, Any] = {f"model__{option}": value}
    chosen = _choice(2_000_000, 2, **given).run
    validate(chosen)
    assert chosen.model.first_weights == (value if option == "init" else "normal")
