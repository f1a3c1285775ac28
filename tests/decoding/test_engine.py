"""The decode engine: results equal to the model's, and streams that do not affect one another."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_contract import VARIANTS, V, lively
from tests.models.test_structure import adapt
from torch import Tensor, nn

import txl
from txl.errors import UserError
from txl.generation.engine import DecodeEngine
from txl.generation.sampling import Sampling, chances
from txl.generation.steps import Slots
from txl.models.transformer_xl import TransformerXL
from txl.native.build import why_not

LENGTHS = [
    pytest.param({"mem_len": 40}, id="memory-of-everything"),
    pytest.param({"mem_len": 6, "window": 7}, id="window"),
    pytest.param({"mem_len": 9, "window": 6, "clamp_len": 2}, id="narrower-window-and-clamp"),
    pytest.param({"mem_len": 5, "window": "none"}, id="short-memory"),
    pytest.param({"mem_len": 0, "window": 1}, id="only-itself"),
]
needs_compiler = pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")
STEPS = [pytest.param(False, id="pytorch"), pytest.param(True, id="compiled", marks=needs_compiler)]


def by_the_model(model: TransformerXL, ids: Tensor, **lengths) -> Tensor:
    """Return log-probabilities after each token, from hidden states: with gradients, no compiled code is used."""
    state, parts = model.init_state(1, **lengths), []
    for token in ids:
        part, state = model.log_probs(token.view(1, 1), state)
        parts.append(part[0, 0].detach())
    return torch.stack(parts)


def random_tokens(n: int, seed: int) -> Tensor:
    return torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("compile", STEPS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_token_by_token_the_model_s_own_probabilities(variant, lengths, compile):
    # Both dtypes of the compiled step, each with some of the lengths.
    dtype, tolerance = (torch.float32, 1e-5) if "clamp_len" in lengths else (torch.float64, 1e-10)
    model = lively(VARIANTS[variant], dtype)
    # Without a window, a prompt longer than memory depends on its segments; this prompt fits into memory.
    long_prompt = 4 if lengths.get("window") == "none" else 13
    texts = {long_prompt: random_tokens(32, 1), 1: random_tokens(20, 2)}
    engine = DecodeEngine(model, max_streams=3, compile=compile, **lengths)
    shape = VARIANTS[variant]
    assert engine.compiled is (compile and shape.attention != "reference" and shape.encoding == "relative")
    streams = {engine.join(ids[:prompt]): (ids, prompt) for prompt, ids in texts.items()}
    found: list[list[Tensor]] = [[], []]
    for step in range(19):
        for row, log_probs in enumerate(engine.advance()):
            found[row].append(log_probs)
        for stream, (ids, prompt) in streams.items():
            engine.put(stream, int(ids[prompt + step]))
    for rows, (ids, prompt) in zip(found, streams.values(), strict=True):
        expected = by_the_model(model, ids, **lengths)[prompt - 1 : prompt + 18]
        torch.testing.assert_close(torch.stack(rows), expected, rtol=0, atol=tolerance)


def drawn(engine: DecodeEngine, stream, n: int) -> list[int]:
    return [int(engine.step()[engine.streams.index(stream)]) for _ in range(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compile", STEPS)
@pytest.mark.parametrize("variant", ["post-norm", "adaptive, narrower clusters"])
def test_the_same_text_alone_and_among_streams_that_come_and_go(variant, compile, dtype):
    model = lively(VARIANTS[variant], torch.float32)
    prompt = random_tokens(30, 3)

    def engine(max_streams):
        return DecodeEngine(model, max_streams=max_streams, dtype=dtype, compile=compile, mem_len=6, window=7)

    alone = engine(4)
    expected = drawn(alone, alone.join(prompt, seed=11), 60)

    together = engine(4)
    other = together.join(random_tokens(9, 4), seed=5)
    together.step()
    stream = together.join(prompt, seed=11)
    found = drawn(together, stream, 20)
    third = together.join(random_tokens(50, 5), seed=11, sampling=Sampling(3, 0.9, 0.7), forbidden=[1])
    found += drawn(together, stream, 10)
    together.leave(other)
    found += drawn(together, stream, 10)
    together.join(random_tokens(2, 6), seed=6)
    together.leave(third)
    found += drawn(together, stream, 20)
    assert found == expected
    assert len(set(expected)) > 3


@needs_compiler
@pytest.mark.parametrize("variant", ["post-norm", "adaptive, narrower clusters"])
def test_compiled_probabilities_are_the_same_to_the_last_bit_in_any_company(variant):
    model = lively(VARIANTS[variant], torch.float32)
    texts = [random_tokens(12, seed) for seed in range(11)]

    def read(chosen):
        engine = DecodeEngine(model, max_streams=len(chosen), mem_len=6, window=7)
        streams = [engine.join(texts[number][:7]) for number in chosen]
        parts = []
        for step in range(7, 12):
            parts.append(engine.advance())
            for stream, number in zip(streams, chosen, strict=True):
                engine.put(stream, int(texts[number][step]))
        return torch.stack(parts)

    whole = read(range(11))  # more rows than the library computes at once
    for number in (0, 4, 10):
        assert torch.equal(read([number])[:, 0], whole[:, number])


@pytest.mark.parametrize("compile", STEPS)
def test_a_fork_goes_on_like_a_stream_that_joined_by_itself(compile):
    model = lively(VARIANTS["post-norm"], torch.float64)
    prompt = random_tokens(20, 7)
    engine = DecodeEngine(model, max_streams=2, compile=compile, mem_len=6, window=7)
    first = engine.join(prompt, seed=1)
    second = engine.fork(first, seed=2)
    both = torch.stack([engine.step() for _ in range(25)])
    for row, seed in ((0, 1), (1, 2)):
        other = DecodeEngine(model, max_streams=2, compile=compile, mem_len=6, window=7)
        assert drawn(other, other.join(prompt, seed=seed), 25) == both[:, row].tolist()
    assert second in engine.streams


@pytest.mark.parametrize("compile", STEPS)
def test_bfloat16_weights_within_their_rounding(compile):
    model = lively(VARIANTS["untied biases"], torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    engine = DecodeEngine(model, dtype=torch.bfloat16, compile=compile, mem_len=20)
    ids = random_tokens(20, 8)
    stream = engine.join(ids[:10])
    expected = by_the_model(model, ids, mem_len=20)
    for step in range(10, 20):
        torch.testing.assert_close(engine.advance()[0].float(), expected[step - 1], rtol=0, atol=0.1)
        engine.put(stream, int(ids[step]))
    assert model.softmax.bias.dtype == torch.float32


@pytest.mark.parametrize("compile", STEPS)
def test_a_long_stream_takes_no_more_memory_and_does_not_drift(compile):
    model = lively(VARIANTS["post-norm"], torch.float32)
    engine = DecodeEngine(model, compile=compile, mem_len=6, window=7)
    stream, slots = engine.join([1], seed=3), engine._slots
    assert isinstance(slots, Slots)
    places = [each.data_ptr() for each in (*slots.keys, *slots.values)]
    text = drawn(engine, stream, 4000 if compile else 1500)
    assert places == [each.data_ptr() for each in (*slots.keys, *slots.values)]
    # Three layers with window 7 reach 18 tokens back, so the last 30 tokens are enough.
    expected = by_the_model(model, torch.tensor(text[-30:]), mem_len=6, window=7)[-1]
    torch.testing.assert_close(engine.advance()[0], expected, rtol=0, atol=1e-5)


def test_chances_are_uniform_and_differ_by_seed_and_number():
    numbers = torch.arange(20_000)
    by_number, by_seed = chances(torch.full_like(numbers, 7), numbers), chances(numbers, torch.full_like(numbers, 7))
    for found in (by_number, by_seed):
        assert found.min() >= 0
        assert found.max() < 1
        counts = torch.histc(found, bins=20, min=0, max=1)
        assert ((counts - 1000).square().sum() / 1000) < 45  # chi-squared, 19 degrees of freedom: 1 in 1,000
        assert len(found.unique()) == 20_000
    assert torch.corrcoef(torch.stack([by_number, by_seed]))[0, 1].abs() < 0.03
    # First number for seed 1234567 of the reference implementation, Sebastiano Vigna's splitmix64.c.
    from txl.generation.sampling import _mixed

    assert int(_mixed(torch.tensor(1234567))) % 2**64 == 6457827717110365317


def test_what_the_documentation_shows(trained):
    text = (Path(__file__).parents[2] / "docs/how-to/generate.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(block.replace("runs/mine", str(trained)).replace("range(100)", "range(3)"), names)
    assert names["tokens"].shape == (2,)
    assert names["engine"].streams == (names["b"], names["c"])


def test_mistakes_are_named_in_one_line():
    model = lively(VARIANTS["post-norm"], torch.float32)
    with pytest.raises(UserError, match="max_streams is 0; expected 1 or more"):
        DecodeEngine(model, max_streams=0)
    with pytest.raises(UserError, match="dtype is torch.int8; expected"):
        DecodeEngine(model, dtype=torch.int8)
    with pytest.raises(UserError, match="window 9 needs"):
        DecodeEngine(model, mem_len=3, window=9)
    with torch.device("meta"):
        vanilla = txl.build_model(txl.preset("enwik8-vanilla-12L").model, 5)
    with pytest.raises(UserError, match="needs a Transformer-XL"):
        DecodeEngine(vanilla)
    engine = DecodeEngine(model)
    with pytest.raises(UserError, match="the prompt is empty"):
        engine.join([])
    with pytest.raises(UserError, match="outside of the model's vocabulary, 0 to 16"):
        engine.join([17])
    stream = engine.join([1])
    with pytest.raises(UserError, match="all 1 places are taken"):
        engine.join([1])
    with pytest.raises(UserError, match="expected each of them once"):
        engine.advance([stream, stream])
    engine.advance()
    with pytest.raises(UserError, match="has read all its tokens"):
        engine.advance()
    engine.leave(stream)
    with pytest.raises(UserError, match="has left it"):
        engine.leave(stream)
    assert engine.step().shape == (0,)


def test_a_change_of_the_weights_is_refused_and_a_converted_copy_does_not_mind():
    model = lively(VARIANTS["post-norm"], torch.float32)
    engine, copied = DecodeEngine(model), DecodeEngine(model, dtype=torch.float64)
    for each in (engine, copied):
        each.join([1, 2])
    with torch.no_grad():
        model.softmax.bias.add_(1)
    with pytest.raises(UserError, match="the model has changed"):
        engine.step()
    copied.step()


CHANGES = {
    "load_state_dict, assigned": lambda model: model.load_state_dict(
        {name: each * 1.5 for name, each in model.state_dict().items()}, assign=True
    ),
    "another parameter": lambda model: setattr(
        model.layers[0].attention.q_proj, "weight", nn.Parameter(torch.randn(15, 10))
    ),
    "another module": adapt,
    "another softmax": lambda model: setattr(model, "softmax", copy.deepcopy(model.softmax)),
    "moved": lambda model: model.double(),
    "a hook": lambda model: model.layers[1].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("compile", STEPS)
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_replaced_in_the_model_is_noticed(change, compile):
    """Earlier versions noticed only in-place changes, and otherwise returned log-probabilities of other weights."""
    model = lively(VARIANTS["post-norm"], torch.float32)
    engine = DecodeEngine(model, compile=compile)
    engine.join([1, 2])
    engine.step()
    CHANGES[change](model)
    with pytest.raises(UserError, match="changed since the engine was made"):
        engine.step()
    with pytest.raises(UserError, match="the model has changed"):
        engine.advance()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("what", ["hook", "LoRA"])
def test_a_model_with_hooks_or_other_modules_is_decoded_through_them(what, dtype, caplog):
    """Earlier versions did not call hooks on layers and attention."""
    model, called = lively(VARIANTS["post-norm"], torch.float64), []
    if what == "LoRA":
        adapt(model)
    else:
        model.layers[1].register_forward_hook(lambda module, given, output: (called.append(1), output * 1.5)[1])
    texts = [random_tokens(20, 1), random_tokens(20, 2)]
    expected = torch.stack([by_the_model(model, ids, mem_len=6, window=7) for ids in texts])
    called.clear()
    engine = DecodeEngine(model, max_streams=3, mem_len=6, window=7, dtype=dtype)
    (record,) = caplog.records
    assert "decoding calls the model's modules for one stream at a time: layers.1" in record.message
    assert not engine.compiled
    streams = [engine.join(ids[:10]) for ids in texts]
    twin = engine.fork(streams[0], seed=9)
    for step in range(10, 20):
        found = engine.advance()
        torch.testing.assert_close(
            found[:2].double(), expected[:, step - 1], rtol=0, atol=1e-10 if dtype == torch.float64 else 1
        )
        assert torch.equal(found[2], found[0])
        for stream, ids in zip((*streams, twin), (*texts, texts[0]), strict=True):
            engine.put(stream, int(ids[step]))
    assert len(called) == (0 if what == "LoRA" else 2 + 10 * 3)  # 2 prompts, then 10 steps of 3 streams
    model.layers[0].register_forward_hook(lambda *_: called.append(2))
    engine.leave(twin)
    engine.step()
    assert called.count(2) == 2


@pytest.mark.parametrize(
    ("join", "message"),
    [
        ({"forbidden": range(V)}, "all 17 tokens of the vocabulary are forbidden"),
        ({"forbidden": [3, 17]}, "forbidden has id 17, outside of the model's vocabulary, 0 to 16"),
        ({"forbidden": [-1]}, "forbidden has id -1"),
        ({"forbidden": ["a"]}, "forbidden token id is 'a'; expected a whole number"),
        ({"prompt": [1, -1]}, "outside of the model's vocabulary"),
        ({"prompt": [1.5]}, "expected token ids, whole numbers"),
        ({"prompt": ["a"]}, "not made of token ids"),
        ({"sampling": {"top_k": 3}}, "expected a txl.Sampling"),
        ({"seed": 1.5}, "seed is 1.5; expected a whole number"),
    ],
)
def test_what_no_step_could_do_is_refused_by_join(join, message):
    engine = DecodeEngine(lively(VARIANTS["post-norm"], torch.float32), max_streams=2)
    engine.join([1, 2], seed=1)
    with pytest.raises(UserError, match=message):
        engine.join(**{"prompt": [1]} | join)
    assert len(engine.streams) == 1
    assert engine.step().shape == (1,)
    if join.keys() & {"forbidden", "prompt", "seed"}:
        with pytest.raises(UserError, match=message):
            txl.generate_tokens(engine.model, **{"prompt": [1], "max_tokens": 1} | join)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("compile", STEPS)
def test_a_stream_that_cannot_go_on_ends_alone(compile, dtype):
    """In earlier versions, such a stream stopped all other streams permanently."""
    config = dataclasses.replace(VARIANTS["post-norm"], tie_embeddings=False)
    model = lively(config, torch.float32)
    model.softmax.bias.data[9] = -torch.inf
    reference = DecodeEngine(model, max_streams=3, compile=compile, dtype=dtype, mem_len=6, window=7)
    expected = drawn(reference, reference.join([1, 2], seed=4, forbidden=[5, 9]), 1)
    model.embedding.tables[0].data[5] = torch.nan  # after reading token 5, probabilities are not numbers
    engine = DecodeEngine(model, max_streams=3, compile=compile, dtype=dtype, mem_len=6, window=7)
    damaged = engine.join([5, 5, 1], seed=1)
    good = engine.join([1, 2], seed=4, forbidden=[5, 9])
    stuck = engine.join([1, 2], seed=4, forbidden=[each for each in range(V) if each != 9])
    tokens = engine.step()
    assert (engine.streams, tokens.tolist()) == ((good,), expected[:1])
    assert "weights are damaged" in (damaged.ended or "")
    assert "every token that is not forbidden has probability 0" in (stuck.ended or "")
    assert good.ended is None
    with pytest.raises(UserError, match="the stream has ended: the model's probabilities are not numbers"):
        engine.leave(damaged)
    others = [engine.join([3], seed=seed, forbidden=[5]) for seed in (6, 7)]  # in slots of ended streams
    for _ in range(20):
        assert engine.step().shape == (3,)
    assert engine.streams == (good, *others)
    with pytest.raises(UserError, match="every token that is not forbidden"):
        list(txl.generate_tokens(model, [1], max_tokens=3, forbidden=[each for each in range(V) if each != 9]))
