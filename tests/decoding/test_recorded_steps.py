"""Steps of the engine as CUDA graphs, and one wait for the device per token; on a CPU, graphs are imitated."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from tests.decoding.test_engine import by_the_model, random_tokens
from tests.models.test_contract import VARIANTS, lively
from tests.waiting import AHEAD, Waits

from txl.devices import Captured
from txl.generation.engine import DecodeEngine
from txl.generation.sampling import NO_NUMBERS, Sampling
from txl.generation.steps import Slots, StaticStep
from txl.generation.text import generate_tokens


def test_recorded_steps_give_the_same_texts(recording, monkeypatch):
    """Streams join and leave, with different or equal draw settings; each power of two of slots has one graph."""
    model, ids = lively(VARIANTS["adaptive, narrower clusters"]), random_tokens(30, 3)
    monkeypatch.setattr("txl.generation.steps._ALIKE", 4)
    greedy = Sampling(temperature=0)
    alone = {}
    for seed, sampling in ((1, Sampling()), (2, Sampling()), (3, greedy), (4, Sampling())):
        given: dict[str, Any] = {"seed": seed, "sampling": sampling, "forbidden": (3, 5)}
        alone[seed] = list(generate_tokens(model, ids[:6], max_tokens=40, compile=False, mem_len=6, window=7, **given))
    recorded = recording()
    engine = DecodeEngine(model, max_streams=5, mem_len=6, window=7, compile=False)
    found: dict[int, list[int]] = {seed: [] for seed in alone}

    def go_on(steps: int) -> None:
        for _ in range(steps):
            tokens = engine.step().tolist()
            for stream, token in zip(engine.streams, tokens, strict=True):
                found[stream.seed].append(token)

    streams = {}
    for seed, sampling, steps in ((1, Sampling(), 9), (2, Sampling(), 8), (3, greedy, 5)):
        streams[seed] = engine.join(ids[:6], seed=seed, sampling=sampling, forbidden=(3, 5))
        go_on(steps)
    engine.leave(streams[3])
    streams[4] = engine.join(ids[:6], seed=4, forbidden=(3, 5))
    go_on(10)
    assert {seed: len(tokens) for seed, tokens in found.items()} == {1: 32, 2: 23, 3: 5, 4: 10}
    for seed, tokens in found.items():
        assert tokens == [int(each[0]) for each in alone[seed][: len(tokens)]]
    assert len(recorded) == 5  # 1 and 4 slots without drawing; 1, 2 and 4 slots with drawing
    assert engine.save(streams[4]).n_token == 16


def test_a_prepared_engine_records_nothing_later(recording):
    model, ids = lively(VARIANTS["post-norm"]), [1, 2, 3]
    alone = list(generate_tokens(model, ids, max_tokens=3, seed=1, forbidden=(2,), compile=False))
    recorded = recording()
    engine = DecodeEngine(model, max_streams=3, compile=False)
    engine.prepare(forbidden=(2,))
    assert len(recorded) == 6  # one, two and three slots, with drawing and without
    for seed in (1, 2, 3):
        engine.join(ids, seed=seed, forbidden=(2,))
    assert [int(engine.step()[0]) for _ in range(3)] == [int(tokens[0]) for tokens in alone]
    assert len(recorded) == 6


def test_a_recorded_step_ends_a_stream_that_nothing_can_be_drawn_for(recording, monkeypatch):
    monkeypatch.setattr("txl.generation.steps._ALIKE", 1)
    recording()
    engine = DecodeEngine(lively(VARIANTS["post-norm"]), max_streams=2, compile=False)
    first, second = engine.join([1, 2], seed=1), engine.join([1, 2], seed=1)
    for _ in range(3):
        assert len(engine.step()) == 2
    assert isinstance(engine._slots, Slots)
    with torch.inference_mode():
        for ring in (*engine._slots.keys, *engine._slots.values):
            ring[:, second.slot] = math.nan
    assert engine.step().shape == (1,)
    assert engine.streams == (first,)
    assert second.ended == NO_NUMBERS
    assert engine.step().shape == (1,)


@pytest.mark.parametrize("captured", [True, False])
def test_a_step_is_recorded_as_a_graph_only_where_that_is_wanted(captured, monkeypatch):
    monkeypatch.setattr(Captured, "_record", lambda self: 1 / 0)
    model = lively(VARIANTS["post-norm"], torch.float32)
    slots = Slots(model.config.n_layer, 1, model.config.n_head, model.config.d_head, 7, model.softmax.bias)
    with torch.inference_mode():
        step = StaticStep(model, slots, None, captured)
        with pytest.raises(ZeroDivisionError) if captured else contextlib.nullcontext():
            assert step(torch.zeros(1, dtype=torch.int64), torch.tensor([0]), 1).shape[0] == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_is_waited_for_once(variant, monkeypatch):
    """A step computes everything up to the drawn tokens without reading a number from the device."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    engine = DecodeEngine(lively(VARIANTS[variant]).to(AHEAD), max_streams=3, compile=False)
    for seed, sampling in ((1, Sampling()), (2, Sampling(top_k=None, top_p=0.5)), (3, Sampling(temperature=0))):
        engine.join([1, 2, 3], seed=seed, sampling=sampling, forbidden=(4,))
    with Waits():
        log_probs = engine.advance()
        assert engine._draw(log_probs, list(engine.streams)).shape == (2, 3)
    with pytest.raises(NotImplementedError, match="meta"):
        engine.draw(log_probs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_graph_gives_the_model_s_own_probabilities():
    model = lively(VARIANTS["adaptive, narrower clusters"], torch.float32).cuda()
    ids = random_tokens(30, 9)
    engine = DecodeEngine(model, max_streams=2, mem_len=6, window=7)
    stream = engine.join(ids[:10])
    expected = by_the_model(model, ids.cuda(), mem_len=6, window=7)
    for step in range(10, 30):
        torch.testing.assert_close(engine.advance()[0], expected[step - 1], rtol=0, atol=1e-4)
        engine.put(stream, int(ids[step]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_with_and_without_drawing_give_the_same_texts(variant):
    """Three streams draw 80 tokens without graphs, and with graphs that include drawing from token 33 on."""
    model, texts = lively(VARIANTS[variant], torch.float64).cuda(), []
    for compile in (False, True):
        engine = DecodeEngine(model, max_streams=4, mem_len=9, window=6, compile=compile)
        for seed in range(3):
            engine.join(random_tokens(11, seed), seed=seed, forbidden=(2,))
        texts.append(torch.stack([engine.step() for _ in range(80)]))
        engine.leave(engine.streams[1])
        texts.append(torch.stack([engine.step() for _ in range(5)]))
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[3])
