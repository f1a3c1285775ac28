"""The evaluation protocol: the targets that are scored, the context of each target, and the reported values."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import small_run

import txl
from txl.config import DataConfig, TransformerXLConfig, VanillaConfig
from txl.data.prepared import Tokens
from txl.errors import UserError
from txl.evaluation.perplexity import evaluate, evaluate_memory_lengths
from txl.evaluation.stream import Lanes
from txl.models import build_model
from txl.models.family import FamilyModel
from txl.models.language_model import LanguageModel
from txl.models.vanilla import NoMemory

V = 13


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = build_model(
        TransformerXLConfig(n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=16, mem_len=6, dropout=0.3), V
    )
    return spread(model, 0.4).double()


def spread(model: FamilyModel, deviation: float) -> FamilyModel:
    """Draw weights that are so large that every token read changes the losses."""
    for parameter in model.parameters():
        parameter.data.normal_(0, deviation)
    return model


def token_stream(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, length).astype(np.uint8)


def scored_targets(n_token: int, batch_size: int, segment: int, exhaustive: bool) -> Counter[int]:
    """Count how often each token of a text is scored, from the segments themselves (token id = index in the text)."""
    stream = np.arange(n_token)
    found: Counter[int] = Counter()
    for inputs, targets, counts in Lanes.cut(n_token, batch_size, exhaustive).segments(stream, segment):
        assert torch.equal(targets[counts], inputs[counts] + 1)
        found.update(targets[counts].tolist())
    return found


@given(n_token=st.integers(2, 200), batch_size=st.integers(1, 12), segment=st.integers(1, 50))
def test_exhaustive_scores_every_target_exactly_once(n_token, batch_size, segment):
    if n_token // batch_size < 2:
        return
    assert scored_targets(n_token, batch_size, segment, exhaustive=True) == Counter(range(1, n_token))


@given(n_token=st.integers(2, 200), batch_size=st.integers(1, 12), segment=st.integers(1, 50))
def test_equal_lanes_score_all_but_their_first_tokens_and_the_remainder(n_token, batch_size, segment):
    if n_token // batch_size < 2:
        return
    length = n_token // batch_size
    expected = [p for p in range(length * batch_size) if p % length != 0]
    assert scored_targets(n_token, batch_size, segment, exhaustive=False) == Counter(expected)


def slow_mean(model, tokens, batch_size, segment, **lengths) -> float:
    """Return the mean nll by the protocol, computed lane after lane and summed in Python."""
    model.eval()
    length, total, count = len(tokens) // batch_size, 0.0, 0
    for lane in range(batch_size):
        ids = torch.from_numpy(tokens[lane * length : (lane + 1) * length].astype(np.int64))[None]
        state = model.init_state(1, **lengths)
        for start in range(0, length - 1, segment):
            end = min(start + segment, length - 1)
            nll, state = model.nll(ids[:, start:end], ids[:, start + 1 : end + 1], state)
            total, count = total + nll.sum().item(), count + nll.numel()
    return total / count


@pytest.mark.parametrize("lengths", [{"mem_len": 6, "window": 6}, {"mem_len": 0, "window": "none"}, {"mem_len": 11}])
def test_result_equals_the_protocol_written_out(model, lengths):
    tokens = token_stream(107)
    window = lengths.get("window", lengths["mem_len"])
    result = evaluate(model, tokens, segment=5, batch_size=3, **lengths)
    expected = slow_mean(model, tokens, 3, 5, mem_len=lengths["mem_len"], window=window)
    assert math.isclose(result.nll, expected, abs_tol=1e-12)
    assert (result.tokens, result.dropped) == (3 * 34, 106 - 3 * 34)
    assert math.isclose(result.bpc, expected / math.log(2), abs_tol=1e-12)
    assert math.isclose(result.ppl, math.exp(expected), abs_tol=1e-12)


def test_memory_alone_sets_the_window_and_none_switches_it_off(model):
    tokens = token_stream(60)
    assert evaluate(model, tokens, mem_len=9, batch_size=1).window == 9
    assert evaluate(model, tokens, mem_len=9, window="none", batch_size=1).window is None
    assert evaluate(model, tokens, mem_len=0, batch_size=1).window is None
    unset = evaluate(model, tokens, batch_size=1)
    assert (unset.mem_len, unset.window) == (6, None)


def test_with_an_exact_window_neither_segment_nor_dropout_matters(model):
    tokens = token_stream(90)
    model.train()
    results = [evaluate(model, tokens, segment=segment, mem_len=7, batch_size=2) for segment in (1, 4, 90)]
    assert model.training
    assert max(result.nll for result in results) - min(result.nll for result in results) < 1e-12


def test_bits_per_byte_is_bits_a_token_over_bytes_a_token(model):
    tokens = Tokens(token_stream(100), "test", 300)
    result = evaluate(model, tokens, batch_size=1)
    assert result.bits_per_byte is not None
    assert math.isclose(result.bits_per_byte, result.bpc / 3, rel_tol=1e-12)
    assert evaluate(model, token_stream(100), batch_size=1).bits_per_byte is None
    assert evaluate(model, tokens, batch_size=1, max_tokens=50).bits_per_byte is None  # no vocabulary counts them
    bytes_ = Tokens(token_stream(100), "test", 100)  # every token is a byte
    assert evaluate(model, bytes_, batch_size=1, max_tokens=50).bits_per_byte is not None


@pytest.mark.parametrize("unit", ["byte", "char", "word", "bpe"])
def test_what_is_reported_of_a_part_is_counted_over_that_part(unit, tmp_path):
    """Counts cover only the tokens read. Half of the test split is in Greek, which the training split lacks."""
    seen, unseen = "one two three " * 20 + "\n", "άλφα " * 60
    for split, text in {"train": seen * 20, "valid": seen, "test": seen + unseen}.items():
        (tmp_path / f"{split}.txt").write_text(text)
    corpus = txl.open_corpus(str(tmp_path), unit, config=DataConfig(vocab_size=260), data_dir=tmp_path / "cache")
    tokens = corpus.tokens("test")
    model = txl.build_model(small_run("x").model, corpus.vocabulary)
    for n_read in (7, 61, len(tokens) - 30, len(tokens)):
        result = txl.evaluate(model, tokens, batch_size=1, max_tokens=n_read)
        ids = np.asarray(tokens)[:n_read]
        assert result.unknown == (0 if tokens.unk_id is None else (ids == tokens.unk_id).sum())
        text = seen + unseen
        if unit == "word":
            expected = len(text.encode()) if n_read == len(tokens) else place_of_word(text, n_read)
        elif unit == "bpe":
            expected = len(corpus.vocabulary.decode(ids).replace("\ufffd", "").encode())
        else:
            expected = n_read if unit == "byte" else len(text[:n_read].encode())
        assert result.bytes_per_token is not None
        slack = 1 if unit == "bpe" else 0  # the part may end inside a character
        assert abs(result.bytes_per_token * n_read - expected) <= slack + 1e-6


def place_of_word(text: str, number: int) -> int:
    """Return the byte offset at which word `number` begins; a line end counts as a word."""
    return [len(text[: match.start()].encode()) for match in re.finditer(r"\n|\S+", text)][number]


def test_bfloat16_is_near_float32_but_not_the_same():
    torch.manual_seed(0)
    model = build_model(TransformerXLConfig(n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=32, mem_len=6), V)
    spread(model, 0.2)
    exact = evaluate(model, token_stream(400), batch_size=2)
    low = evaluate(model, token_stream(400), batch_size=2, dtype="bfloat16")
    assert 0 < abs(exact.nll - low.nll) < 0.02
    assert low.dtype == "bfloat16"


def test_losses_are_summed_in_float64():
    class Constant(LanguageModel[NoMemory]):
        """A model whose losses float32 cannot sum: from 2**24 on, adding 1 changes nothing."""

        vocab_size = V

        def __init__(self):
            super().__init__()
            self.anchor = torch.nn.Parameter(torch.zeros(1))

        def init_state(self, batch_size, mem_len=None, window=None, clamp_len=None):
            return NoMemory(batch_size)

        def nll(self, tokens, targets, state):
            nll = torch.ones(tokens.shape)
            nll[0, 0] = 2.0**24
            return nll, state

        def log_probs(self, tokens, state):
            raise NotImplementedError

    result = evaluate(Constant(), token_stream(1002), segment=1001, batch_size=1)
    assert result.nll * result.tokens == pytest.approx(2**24 + 1000, abs=1e-3)


def test_sweep_scores_the_same_targets_at_each_length(model):
    seen = []
    results = evaluate_memory_lengths(
        model, token_stream(80), [0, 3, 8], segment=4, batch_size=2, on_result=seen.append
    )
    assert [result.mem_len for result in results] == [0, 3, 8]
    assert len({result.tokens for result in results}) == 1
    assert len({result.nll for result in results}) == 3
    assert seen == results


def test_a_sweep_is_refused_before_its_first_evaluation():
    vanilla, seen = build_model(VanillaConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8), V), []
    with pytest.raises(UserError, match="mem_len is 4"):
        evaluate_memory_lengths(vanilla, token_stream(80), [0, 4], segment=4, batch_size=2, on_result=seen.append)
    assert seen == []


def test_tensors_lists_and_prefixes_are_streams_too(model):
    tokens = token_stream(80)
    whole = evaluate(model, tokens, batch_size=1, max_tokens=40)
    assert evaluate(model, torch.from_numpy(tokens[:40]), batch_size=1).nll == whole.nll
    assert evaluate(model, tokens[:40].tolist(), batch_size=1).nll == whole.nll
    assert whole.tokens == 39


def test_progress_runs_to_the_end(model):
    calls = []
    evaluate(model, token_stream(53), segment=7, batch_size=2, exhaustive=True, progress=lambda *c: calls.append(c))
    assert calls[-1] == (52, 52)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"segment": 0}, "segment is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 40}, "60 tokens in 40 lanes leave 1 a lane"),
        ({"mem_len": -1}, "mem_len is -1"),
        ({"mem_len": 3, "window": 9}, "window 9 needs at least 8 positions"),
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"dtype": "float16"}, "dtype is float16"),
        ({"temperature": 0.0}, "temperature is 0.0; expected a number above 0"),
        ({"temperature": math.nan}, "temperature is nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(model, settings, message):
    with pytest.raises(UserError, match=message):
        evaluate(model, token_stream(60), **settings)
    assert model.training


@pytest.mark.parametrize("cutoffs", [(), (4, 9)])
def test_temperature_flattens_the_whole_distribution(cutoffs):
    torch.manual_seed(0)
    shape = TransformerXLConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=16, mem_len=6, cutoffs=cutoffs)
    model = spread(build_model(shape, V).double().eval(), 0.6)
    stream = token_stream(60)
    settings: dict[str, Any] = {"segment": 60, "batch_size": 1}
    log_probs, _ = model.log_probs(torch.from_numpy(stream[None, :-1].astype(np.int64)), model.init_state(1))
    probs = log_probs[0].exp() ** (1 / 1.7)
    picked = (probs / probs.sum(dim=-1, keepdim=True))[torch.arange(59), torch.from_numpy(stream[1:].astype(np.int64))]
    found = evaluate(model, stream, temperature=1.7, **settings)
    assert found.nll == pytest.approx(-picked.log().mean().item(), abs=1e-12)
    assert found.temperature == 1.7
    assert evaluate(model, stream, temperature=1.0, **settings).nll != pytest.approx(found.nll, abs=1e-3)
    flat = evaluate(model, stream, temperature=1e9, **settings)
    assert flat.nll == pytest.approx(math.log(V), abs=1e-6)


def test_ids_that_are_no_whole_numbers_are_refused():
    model = build_model(TransformerXLConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=4), 7)
    with pytest.raises(UserError, match="float64.*expected one dimension of whole numbers"):
        evaluate(model, [0.9, 1.7, 2.2, 3.0])
