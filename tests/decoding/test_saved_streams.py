"""Streams as values: saved, extended by one segment at a time, and continued in another engine."""

from __future__ import annotations

import pytest
import torch
from tests.decoding.test_engine import LENGTHS, STEPS, by_the_model, drawn, random_tokens
from tests.models.test_contract import VARIANTS, lively

from txl.errors import UserError
from txl.generation.engine import DecodeEngine, TextReading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compile", STEPS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_saved_stream_goes_on_bit_for_bit(lengths, compile, dtype):
    """A stream continues in another engine; with compiled code, in other slots and as several copies of one state."""
    model = lively(VARIANTS["post-norm"])
    first, second = (DecodeEngine(model, max_streams=n, compile=compile, dtype=dtype, **lengths) for n in (3, 3))
    if compile:
        second.join(random_tokens(5, 7), seed=9)
    stream = first.join(random_tokens(11, 1), seed=4)
    drawn(first, stream, 13)
    state = first.save(stream)
    assert state.n_token == 24
    held = min(23, first.model.init_state(1, **lengths).capacity)
    assert all(each.shape[1] == held for each in (*state.keys, *state.values))
    twins = [second.enter(state, seed=4, drawn=13) for _ in range(1 + compile)]
    for _ in range(20):
        expected = int(first.step()[0])
        found = second.step()
        assert [int(found[second.streams.index(twin)]) for twin in twins] == [expected] * len(twins)
    again = first.save(stream), second.save(twins[0])
    for ours, theirs in zip((*again[0].keys, *again[0].values), (*again[1].keys, *again[1].values), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("compile", STEPS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_text_read_into_a_saved_stream_is_the_stream_s_text(lengths, compile):
    """Segments read after saved keys and values, without hidden states, have the results of the whole text."""
    model = lively(VARIANTS["post-norm"], torch.float64)
    engine = DecodeEngine(model, max_streams=2, compile=compile, **lengths)
    ids = random_tokens(40, 3)
    if lengths.get("window") == "none":
        ids = ids[:6]  # without a window, segments matter if memory is shorter than the text
    expected = by_the_model(model, ids, **lengths)
    state, found = engine.empty_state(), []
    for start in range(0, len(ids), 7):
        reading = TextReading(engine, ids[start : start + 7], state, segment=3)
        while not reading.done:
            hidden, targets = reading.step()
            with torch.inference_mode():
                log_probs = model.log_probs_of(hidden)[0]
            assert targets.shape[1] <= 3
            found += log_probs.gather(1, targets[0, :, None])[:, 0].tolist()
        state = reading.state()
    assert state.n_token == len(ids)
    wanted = expected[:-1].gather(1, ids[1:, None])[:, 0].tolist()
    assert found == pytest.approx(wanted, abs=1e-10)
    stream = engine.enter(state)
    torch.testing.assert_close(engine.advance([stream])[0], expected[-1], rtol=0, atol=1e-10)


def test_a_stream_of_a_shorter_memory_does_not_see_what_others_left():
    model = lively(VARIANTS["post-norm"])
    short, longer = (DecodeEngine(model, max_streams=2, mem_len=length, window=length) for length in (4, 9))
    stream = short.join(random_tokens(7, 1), seed=4)
    few = short.save(stream)
    drawn(short, stream, 9)
    many = short.save(stream)
    with pytest.raises(UserError, match="holds 3 positions of memory, but this engine's streams see 6"):
        longer.enter(few)
    with pytest.raises(UserError, match="holds 3 positions of memory, but this engine's streams see 8"):
        longer.enter(many)
    with pytest.raises(UserError, match="read for an engine with another mem_len"):
        longer.enter(TextReading(short, random_tokens(1, 1)))
    assert not longer.streams
    text = longer.join(random_tokens(30, 2), seed=4)
    kept = short.enter(longer.save(text), seed=4)  # the newest positions are enough
    short.leave(stream)
    found = [int(short.step()[0]) for _ in range(8)]
    fresh = DecodeEngine(model, max_streams=1, mem_len=4, window=4)
    same = fresh.enter(longer.save(text), seed=4)
    assert found == drawn(fresh, same, 8)
    assert short.save(kept).keys[0].shape[1] == 3


def test_what_a_saved_stream_is_refused():
    model = lively(VARIANTS["post-norm"])
    engine = DecodeEngine(model)
    with pytest.raises(UserError, match="empty"):
        engine.enter(engine.empty_state())
    assert not engine.streams
    with pytest.raises(UserError, match="not read to its end"):
        engine.enter(TextReading(engine, random_tokens(9, 1)))
    assert not engine.streams
    stream = engine.join(random_tokens(3, 1))
    state = engine.save(stream)
    engine.advance()
    with pytest.raises(UserError, match="put"):
        engine.save(stream)
    with pytest.raises(UserError, match="places are taken"):
        engine.enter(TextReading(engine, random_tokens(1, 1)))
    model.layers[0].register_forward_hook(lambda *_: None)
    listened = DecodeEngine(model)
    with pytest.raises(UserError, match="cannot be saved"):
        listened.enter(state)
    assert not listened.streams
    with pytest.raises(UserError, match="cannot be saved"):
        listened.save(listened.join(random_tokens(3, 1)))
