"""The decoding step in kernels: probabilities equal `StaticStep`'s in float64, whatever a slot holds.

On a CPU the kernels run in Triton's interpreter (`make triton`), on a GPU as compiled kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.kernel_devices import DEVICES
from tests.models.test_contract import SMALL, V, lively
from torch import Tensor

from txl.config import TransformerXLConfig
from txl.devices import Captured
from txl.generation import engine, fused_step, steps
from txl.generation.engine import DecodeEngine
from txl.generation.fused_step import FusedStep
from txl.generation.sampling import NO_NUMBERS, Sampling, chances, permitted
from txl.generation.steps import DrawSettings, Slots, StaticStep
from txl.models.transformer_xl import TransformerXL

pytestmark = pytest.mark.usefixtures("right_bfloat16")
ONE_LAYER = dataclasses.replace(SMALL, n_layer=1, n_head=2)
# Changes of the configuration, places of a ring, clamp_len.
SMALL_CASES: dict[str, tuple[dict[str, Any], int, int | None]] = {
    "two layers": ({"n_layer": 2}, 9, None),
    "odd width, several programs a head": ({"d_head": 41, "untie_r": True}, 70, None),
    "clamp, pre-norm and normalised heads": ({"pre_norm": True, "qk_norm": True, "d_head": 64}, 40, 5),
    "Shaw et al.": ({"encoding": "shaw", "max_distance": 4}, 11, None),
    "only the token itself": ({}, 1, None),
}
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 0.1}


def log_probs(
    kind: type[StaticStep], model: TransformerXL, n_lane: int, size: int, clamp_len: int | None, hidden: float
) -> Tensor:
    """Return the log-probabilities of two steps, [2,n,V] in float64; places not yet filled hold the number `hidden`."""
    like, config = model.softmax.bias, model.config
    slots = Slots(config.n_layer, n_lane, config.n_head, config.d_head, size - 1, like)
    # Some slots are not full yet, or empty; the rings of others have wrapped around.
    slots.read[:] = torch.tensor([size // 3, 2 * size + 5, 0])[torch.arange(n_lane) % 3] + torch.arange(n_lane) // 3
    generator, rows = torch.Generator(like.device).manual_seed(1), []
    filled = torch.arange(size, device=like.device) < slots.read[:, None]
    for ring in (*slots.keys, *slots.values):
        numbers = torch.randn(ring.shape, generator=generator, dtype=torch.float64, device=like.device)
        ring.copy_(torch.where(filled[None, :, :, None], numbers, hidden))
    step = kind(model, slots, clamp_len, captured=False)
    for tokens in torch.randint(V, (2, n_lane), generator=torch.Generator().manual_seed(2)):
        rows.append(step._log_probs(tokens.to(like.device))[0].double())
        slots.read += 1
    return torch.stack(rows)


def error(
    config: TransformerXLConfig, dtype: torch.dtype, device: str, n_lane: int, size: int, clamp_len: int | None
) -> float:
    """Return the largest difference of the kernels' log-probabilities from those of `StaticStep` in float64."""
    model = lively(config, dtype).to(device)
    exact = lively(config).to(device)
    exact.load_state_dict(model.state_dict())
    with torch.inference_mode():
        found = log_probs(FusedStep, model, n_lane, size, clamp_len, torch.nan)
        expected = log_probs(StaticStep, exact, n_lane, size, clamp_len, 0.0)
    return float((found - expected).abs().max())


@pytest.fixture(autouse=True)
def lanes_first(monkeypatch):
    """Lay rings out as on a GPU."""
    monkeypatch.setattr(steps, "runs_ahead", lambda _: True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("few", [True, False], ids=["few lanes", "many lanes"])
@pytest.mark.parametrize(("changes", "size", "clamp_len"), SMALL_CASES.values(), ids=list(SMALL_CASES))
def test_probabilities_are_those_of_the_step_in_float64(changes, size, clamp_len, few, device, monkeypatch):
    if not few:
        monkeypatch.setattr(fused_step, "_FEW", 0)
    config = dataclasses.replace(ONE_LAYER, **changes)
    assert error(config, torch.float32, device, 3, size, clamp_len) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("few", [True, False], ids=["few lanes", "many lanes"])
def test_in_bfloat16_they_differ_by_rounding(few, device, monkeypatch):
    if not few:
        monkeypatch.setattr(fused_step, "_FEW", 0)
    assert error(ONE_LAYER, torch.bfloat16, device, 2, 9, None) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(
    ("sizes", "n_lane", "dtype"),
    [
        ((8, 64, 512, 2048), 1, torch.bfloat16),
        ((8, 64, 512, 2048), 70, torch.bfloat16),
        ((8, 64, 512, 2048), 20, torch.float32),
        ((10, 41, 410, 2100), 8, torch.bfloat16),
    ],
)
def test_large_ones_too_and_with_the_same_bits(sizes, n_lane, dtype, device):
    config = dataclasses.replace(
        SMALL, n_layer=2, **dict(zip(("n_head", "d_head", "d_model", "d_inner"), sizes, strict=True))
    )
    model = lively(config, dtype).to(device)
    for parameter in model.parameters():
        parameter.data.mul_(0.1)
    exact = lively(config).to(device)
    exact.load_state_dict(model.state_dict())
    given = (n_lane, 2101, 820)
    with torch.inference_mode():
        found, again = (log_probs(FusedStep, model, *given, torch.nan) for _ in range(2))
        expected = log_probs(StaticStep, exact, *given, 0.0)
        before = log_probs(StaticStep, model, *given, 0.0)
    assert torch.equal(found, again)
    most = 2 * float((before - expected).abs().max()) + 1e-6
    assert float((found - expected).abs().max()) < most


@pytest.mark.parametrize("device", DEVICES[1:])
def test_the_engine_takes_the_kernels_where_it_records_steps(device):
    model = lively(SMALL, torch.float32).to(device)
    assert isinstance(DecodeEngine(model)._step, FusedStep)
    assert type(DecodeEngine(model, compile=False)._step) is StaticStep
    assert type(DecodeEngine(model, dtype=torch.float64)._step) is StaticStep


@pytest.mark.parametrize("device", DEVICES)
def test_drawn_tokens_are_those_that_pytorch_draws(device):
    """All kinds of settings draw in one launch; lanes without numbers, or with everything forbidden, draw nothing."""
    vocab_size, generator = 100, torch.Generator().manual_seed(0)
    kinds = [
        Sampling(),
        Sampling(top_k=None),
        Sampling(top_k=3, temperature=2.0),
        Sampling(top_p=0.5),
        Sampling(temperature=0),
        Sampling(temperature=0.3, top_k=50, top_p=0.9),
        Sampling(temperature=1e-12, top_k=500),
        Sampling(),
        Sampling(),
        Sampling(),
    ]
    n_lane = len(kinds)
    with torch.inference_mode():
        log_probs = (3 * torch.randn(n_lane, vocab_size, generator=generator)).log_softmax(dim=-1)
        log_probs[-1, 5], log_probs[-2, 4] = torch.nan, torch.nan  # the first one is forbidden
        keys = torch.randint(2**63 - 1, (3, n_lane), generator=generator)
        keys[1], keys[2] = torch.arange(n_lane) * 1000, (torch.arange(n_lane) != 1).long()
        model = lively(dataclasses.replace(ONE_LAYER), torch.float32)
        nevers: list[tuple[int, ...]] = [(3, 5, 7)] * n_lane
        nevers[-3] = tuple(range(vocab_size))
        expected = []
        for lane, (kind, never) in enumerate(zip(kinds, nevers, strict=True)):
            allowed, obstacle = permitted(log_probs[lane, None], torch.tensor(never))
            picked = kind.pick(allowed, chances(*keys[:2, lane, None].unbind(0)))
            expected.append((int(picked), int(obstacle)))
        assert [obstacle for _, obstacle in expected] == [0] * 7 + [1, 2, 0]
        model.vocab_size = vocab_size
        slots = Slots(1, n_lane, 2, 5, 3, log_probs.to(device))
        step = FusedStep(model.to(device), slots, None, captured=False)
        step._set_drawings(
            range(n_lane),
            [
                DrawSettings(kind, never, torch.tensor(never, device=device))
                for kind, never in zip(kinds, nevers, strict=True)
            ],
        )
        step._before.fill_(7)
        tokens, sent_keys = torch.full((n_lane,), -1, device=device), keys.clone().to(device)
        drawn = step._drawn_from(log_probs.to(device), sent_keys, tokens).cpu()
    draws = [lane for lane, (_, obstacle) in enumerate(expected) if obstacle == 0]
    assert drawn[1].tolist() == [obstacle for _, obstacle in expected]
    assert drawn[0, draws].tolist() == [expected[lane][0] for lane in draws]
    has_drawn = torch.tensor([int(lane in draws and lane != 1) for lane in range(n_lane)])
    assert tokens.cpu().tolist() == torch.where(has_drawn == 1, drawn[0], -1).tolist()
    assert torch.equal(sent_keys.cpu()[1] - keys[1], has_drawn)
    assert torch.equal(slots.read.cpu(), keys[2])
    assert torch.equal(step._before.cpu(), torch.full((n_lane,), -1))


@pytest.mark.parametrize("device", DEVICES[:1])
def test_streams_of_any_settings_draw_in_one_recorded_step(device, recording, monkeypatch):
    """Streams join and leave, and steps are taken ahead and undone; texts are those that each has alone in PyTorch."""
    monkeypatch.setattr(fused_step, "_STEADY", 1)
    model, ids = lively(ONE_LAYER, torch.float32), [1, 2, 3]
    settings: dict[int, dict[str, Any]] = {
        1: {"sampling": Sampling(), "forbidden": (3, 5)},
        2: {"sampling": Sampling(temperature=0)},
        3: {"sampling": Sampling(top_p=0.8), "forbidden": (4,)},
    }
    alone, states = {}, {}
    for seed, given in settings.items():
        decoder = DecodeEngine(model, mem_len=4, compile=False)
        stream = decoder.join(ids, seed=seed, **given)
        alone[seed] = [int(decoder.step()) for _ in range(6)]
        states[seed] = decoder.save(stream)
    recorded = recording()
    monkeypatch.setattr(engine, "StaticStep", FusedStep)
    decoder = DecodeEngine(model, mem_len=4, max_streams=2, compile=False)
    decoder.prepare()
    assert len(recorded) == 4  # one and two slots, with drawing and without
    step, found = decoder._step, {seed: [] for seed in settings}
    assert isinstance(step, FusedStep)

    def go_on(steps: int) -> None:
        for _ in range(steps):
            for stream, token in zip(decoder.streams, decoder.step().tolist(), strict=True):
                found[stream.seed].append(token)

    first = decoder.join(ids, seed=1, **settings[1])
    go_on(3)
    assert step._ahead is not None
    second = decoder.join(ids, seed=2, **settings[2])
    assert step._ahead is None
    go_on(3)
    assert step._ahead is not None
    decoder.leave(first)
    decoder.join(ids, seed=3, **settings[3])
    go_on(3)
    assert found == {1: alone[1], 2: alone[2], 3: alone[3][:3]}
    assert len(recorded) == 4
    assert step._ahead is not None
    state = decoder.save(second)
    assert (state.n_token, state.waiting) == (states[2].n_token, states[2].waiting)
    torch.testing.assert_close(state.keys, states[2].keys)
    torch.testing.assert_close(state.values, states[2].values)
    go_on(2)
    assert found[3] == alone[3][:5]
    assert isinstance(decoder._slots, Slots)
    with torch.inference_mode():
        for ring in (*decoder._slots.keys, *decoder._slots.values):
            ring[:, second.slot].fill_(torch.nan)
    decoder.step()
    if second.ended is None:  # its next token was drawn ahead
        decoder.step()
    assert second.ended == NO_NUMBERS
    assert len(decoder.step()) == 1


@pytest.mark.parametrize("device", DEVICES[:1])
def test_a_step_that_could_not_be_recorded_is_taken_once_later(device, recording, monkeypatch):
    model, ids = lively(ONE_LAYER, torch.float32), [1, 2, 3]
    alone = DecodeEngine(model, mem_len=4, compile=False)
    alone.join(ids, seed=1)
    recording()
    monkeypatch.setattr(engine, "StaticStep", FusedStep)
    decoder, real = DecodeEngine(model, mem_len=4, compile=False), Captured._record
    decoder.join(ids, seed=1)
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def warmed_up(self: Captured) -> Any:
        for _ in range(self._warm_up):
            self._function(*self.inputs)
        if failures:
            raise failures.pop()
        return real(self)

    monkeypatch.setattr(Captured, "_record", warmed_up)
    with pytest.raises(torch.OutOfMemoryError):
        decoder.step()
    assert [int(decoder.step()) for _ in range(3)] == [int(alone.step()) for _ in range(3)]
