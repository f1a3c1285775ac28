"""The kernels for GPUs: outputs and all gradients equal the reference's, at odd sizes.

On a CPU the kernels run in Triton's interpreter (`make triton`), on a GPU as compiled kernels.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.attention.test_backends import PLAIN
from tests.kernel_devices import DEVICES
from tests.models.test_contract import B, lively, nll_in_segments, stream
from tests.native.test_compiled_attention import (
    NAMES,
    distance,
    exact,
    factors,
    masked_reference,
    operands,
    with_gradients,
)
from torch import Tensor

from txl.attention import BACKENDS, Operands, attention_backend, reference_attention, triton_attention
from txl.errors import UserError

# B, T, M, H, D, window, filled. Tiles have 32 queries and keys in float32, 64 in bfloat16.
SHAPES = {
    "one query, one key": (1, 1, 0, 1, 3, None, None),
    "no memory": (1, 33, 0, 1, 7, None, None),
    "odd width, lanes of several lengths": (2, 34, 41, 2, 41, 37, (41, 7)),
    "window shorter than a tile": (1, 37, 30, 1, 33, 7, None),
    "window of one": (1, 20, 20, 1, 32, 1, None),
    "several tiles": (1, 67, 35, 1, 64, None, None),
    "all memory hidden": (1, 24, 70, 1, 16, None, (0,)),
    "wide": (1, 37, 30, 1, 101, None, None),
    "edges of tiles": (2, 33, 31, 1, 17, 33, (31, 3)),
}
LARGE = {
    "enwik8": (2, 512, 512, 8, 64, None, None),
    "wt103-base": (3, 150, 150, 10, 41, 151, (150, 0, 77)),
    "wide and long": (1, 300, 1000, 4, 128, 1001, None),
}
pytestmark = pytest.mark.usefixtures("right_bfloat16")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}


def on(device: str, numbers: list[Tensor]) -> list[Tensor]:
    return [each.to(device) for each in numbers]


def errors(device: str, shape: tuple, dtype: torch.dtype) -> dict[str, float]:
    """Return the distances of the output and of every gradient from the reference in float64, by name."""
    numbers, scope, above = operands(shape, dtype)
    expected = exact(
        lambda leaves: reference_attention(Operands(*leaves), scope), on(device, numbers), above.to(device)
    )
    found = with_gradients(
        lambda leaves: triton_attention.kernel_attention(Operands(*leaves), scope),
        on(device, numbers),
        above.to(device),
    )
    assert [each.dtype for each in found] == [dtype] * 5 + [torch.float32] * 2
    assert [each.shape for each in found] == [each.shape for each in expected]
    return {name: distance(our, right) for name, our, right in zip(NAMES, found, expected, strict=True)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_outputs_and_all_gradients_are_the_reference_s(shape, dtype, device):
    found = errors(device, shape, dtype)
    assert all(error < TOLERANCE[dtype] for error in found.values()), str(found)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", LARGE.values(), ids=list(LARGE))
def test_large_ones_too(shape, dtype, device):
    found = errors(device, shape, dtype)
    assert all(error < TOLERANCE[dtype] for error in found.values()), str(found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", [(0, 4), (1, 3), (2, 5)], ids=str)
def test_some_of_the_gradients_from_one_that_is_expanded(wanted, device):
    numbers, scope, above = operands((2, 33, 30, 1, 17, None, (30, 3)), torch.float32)
    numbers, above = on(device, numbers), above[..., :1].to(device).expand_as(above)

    def some(attend: Any, numbers: list[Tensor]) -> list[Tensor]:
        leaves = [each.detach().requires_grad_(place in wanted) for place, each in enumerate(numbers)]
        output = attend(Operands(*leaves), scope)
        grads = torch.autograd.grad(output, [leaves[place] for place in wanted], above.to(leaves[0]))
        return list(grads)

    expected = some(reference_attention, [each.double() for each in numbers])
    for our, right in zip(some(triton_attention.kernel_attention, numbers), expected, strict=True):
        assert distance(our, right) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "dropout", "size"),
    [(torch.float32, 0.1, 2**30), (torch.bfloat16, 0.5, 2**30), (torch.float32, 0.3, 1)],
)
def test_dropout_is_drawn_from_a_weight_s_place_in_both_passes(dropout, dtype, size, device, monkeypatch):
    """Outputs and gradients equal the reference's with the mask that Philox yields for the seed, as on CPUs."""
    monkeypatch.setattr(triton_attention, "GROUP_BYTES", size)
    numbers, scope, above = operands((2, 33, 36, 2, 9, None, (36, 5)), dtype)
    n_lane, n_query, n_head, _ = numbers[0].shape
    seed = 0x1234_5678_9ABC_DEF1
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor([seed], device=device))
    mask = factors(seed, n_lane, n_head, n_query, numbers[1].shape[1], dropout).to(device)
    numbers, above = on(device, numbers), above.to(device)
    expected = exact(lambda leaves: masked_reference(leaves, scope, mask), numbers, above)
    found = with_gradients(
        lambda leaves: triton_attention.kernel_attention(Operands(*leaves), scope, dropout=dropout), numbers, above
    )
    for name, our, right in zip(NAMES, found, expected, strict=True):
        assert distance(our, right) < TOLERANCE[dtype], name


# B, T, M, H, D, window, filled, and the bytes of a group of lanes: all, some lanes, or one head of one lane.
DIRECT = {
    "one query, one key": (1, 1, 0, 1, 41, None, None, 2**30),
    "one query": (2, 1, 7, 2, 38, None, (7, 2), 2**30),
    "no memory, three blocks": (2, 130, 0, 2, 38, None, None, 2**30),
    "window that hides whole tiles": (1, 70, 150, 1, 64, 40, None, 2**30),
    "groups of two lanes": (3, 66, 40, 2, 38, None, (40, 0, 13), 250_000),
    "groups of one head": (2, 34, 70, 3, 41, 71, (70, 5), 1),
    "groups of two heads": (2, 18, 20, 3, 128, None, (3, 20), 2 * 3 * 18 * 48 * 4),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("padded_keys", [False, True])
@pytest.mark.parametrize("shape", DIRECT.values(), ids=list(DIRECT))
def test_gradients_are_written_whole_into_the_given_views(shape, padded_keys, dtype, device, monkeypatch):
    """All of it equals the reference, with NaN in all memory that is not written: also the groups of lanes."""
    *sizes, size = shape
    B, T, M, H, D, window, _ = sizes
    numbers, scope, above = operands(tuple(sizes), dtype)
    numbers, above = on(device, numbers), above.to(device)
    expected = exact(lambda leaves: reference_attention(Operands(*leaves), scope), numbers, above)
    monkeypatch.setattr(triton_attention, "GROUP_BYTES", size)
    wide, S = D + -D % 16, M + T
    P = triton_attention.aligned(S) if padded_keys else S

    def padded(rows: Tensor, into: Tensor) -> Tensor:
        into.zero_()[: len(rows), ..., :D] = rows
        return into

    def made(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    query, key, value, position, u, v = numbers
    pairs, above = made(P, B, H, 2, wide), padded(above.transpose(0, 1), made(T, B, H, wide))
    rows = (
        padded((query + u).to(dtype).transpose(0, 1), made(T, B, H, wide)),
        padded((query + v).to(dtype).transpose(0, 1), made(T, B, H, wide)),
        padded(key.transpose(0, 1), pairs[..., 0, :]),
        padded(value.transpose(0, 1), pairs[..., 1, :]),
        padded(position, made(P, 3, H, wide)[:, 1]),
    )
    oldest = scope.oldest(query.device)
    oldest = None if oldest is None else oldest.to(torch.int32)
    call = triton_attention.AttentionCall(D, S if window is None else window, oldest, None, 0.0, S)
    grad_pairs, grad_position = made(P, B, H, 2, wide), made(P, 2, H, wide)[:, 0]
    grads = grad_pairs[..., 0, :], grad_pairs[..., 1, :], grad_position
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # new memory then has NaN
    try:
        assert torch.empty_like(above).isnan().all()
        out, lse = triton_attention.attend(*rows, call)
        of_u, of_v = triton_attention.attend_backward(above, out, lse, *rows, call, *grads)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all((grad[S:] == 0).all() for grad in grads)
    found = [out, of_u.float() + of_v.float(), *(grad[:S] for grad in grads)]
    for name, our, right in zip(NAMES, found, expected, strict=False):
        our = our if name == "position" else our.transpose(0, 1)
        assert distance(our[..., :D], right) < TOLERANCE[dtype], name
        assert (our[..., D:] == 0).all(), name
    for name, our, right in zip("uv", (of_u, of_v), expected[-2:], strict=True):
        assert distance(our.float().sum((0, 1))[:, :D], right) < TOLERANCE[dtype], name


@pytest.mark.parametrize(("n_lane", "n_head", "fitting"), [(22, 8, 200), (22, 8, 100), (4, 8, 3), (1, 1, 0)])
def test_groups_of_lanes_are_of_one_size_and_fit(n_lane, n_head, fitting, monkeypatch):
    monkeypatch.setattr(triton_attention, "GROUP_BYTES", 10 * fitting)
    lanes, heads = triton_attention._group(n_lane, n_head, 10)
    assert lanes * heads <= max(1, fitting)
    assert heads == n_head or lanes == 1
    assert (lanes, heads) == {200: (22, 8), 100: (11, 8), 3: (1, 3), 0: (1, 1)}[fitting]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "changes", [{"clamp_len": 3, "window": 6, "untie_r": True}, {"encoding": "shaw", "max_distance": 5}], ids=str
)
def test_it_trains_the_same_model(changes, device, monkeypatch):
    """Losses and all gradients equal the reference's in a segment after two of three lanes were reset."""
    if device == "cpu":
        monkeypatch.setattr(triton_attention, "why_not_triton", lambda *_: None)
    tokens, targets = (each.to(device) for each in stream(20))
    results = []
    for attention in ("triton", "reference"):
        dtype = torch.float64 if attention == "reference" else torch.float32
        model = lively(dataclasses.replace(PLAIN, attention=attention, n_layer=1, **changes)).to(device, dtype).train()
        _, state = model.nll(tokens[:, :12], targets[:, :12], model.init_state(B))
        nll, _ = model.nll(tokens[:, 12:], targets[:, 12:], state.reset(torch.tensor([True, False, True])))
        grads = torch.autograd.grad(nll.double().mean(), list(model.parameters()))
        results.append([nll.double().flatten(), torch.cat([grad.double().flatten() for grad in grads])])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_memory_left_by_others_is_not_read(device):
    """A call returns the same bits after another call has filled the reused memory with NaN."""
    numbers, scope, above = operands((1, 19, 20, 1, 41, 17, (13,)), torch.float32)
    numbers, above = on(device, numbers), above.to(device)

    def ours(leaves: Any) -> Tensor:
        return triton_attention.kernel_attention(Operands(*leaves), scope)

    before = with_gradients(ours, numbers, above)
    poisoned = [torch.full_like(each, torch.nan) for each in numbers]
    assert all(each.isnan().any() for each in with_gradients(ours, poisoned, above))
    after = with_gradients(ours, numbers, above)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_traced_as_it_runs(device):
    """The shapes, strides and dtypes declared to `torch.compile` and captured graphs are those of the real outputs."""
    (query, key, value, position, u, v), _, _ = operands((2, 5, 4, 1, 8, None, None), torch.bfloat16)
    numbers = on(device, [query, key, value, position, u, v])
    oldest, seed = torch.tensor([0, 3], dtype=torch.int32, device=device), torch.tensor([7], device=device)
    arguments = (numbers, oldest, seed, 9, 0.1)
    checks = ("test_schema", "test_faketensor")
    out, lse = triton_attention._attend(*arguments)
    backward = (out, out, lse, *arguments)
    for operator, given in ((triton_attention._attend, arguments), (triton_attention._attend_backward, backward)):
        found = torch.library.opcheck(operator, given, test_utils=checks, raise_exception=False)
        assert found == dict.fromkeys(checks, "SUCCESS")


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_compiled_without_a_break(device, monkeypatch):
    monkeypatch.setattr(triton_attention, "why_not_triton", lambda *_: None)
    numbers, scope, above = operands((2, 5, 4, 1, 8, None, (4, 2)), torch.float32)
    numbers, above = on(device, numbers), above.to(device)

    def ours(leaves: Any) -> Tensor:
        return triton_attention.triton_attention(Operands(*leaves), scope)

    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for one, other in zip(with_gradients(ours, numbers, above), with_gradients(compiled, numbers, above), strict=True):
        assert torch.equal(one, other)


def test_it_trains_on_a_gpu_alone_but_is_read_everywhere():
    config = dataclasses.replace(PLAIN, attention="triton")
    with pytest.raises(UserError, match="triton cannot train on cpu, only on cuda; use model.attention shifted"):
        attention_backend(config, "cpu")
    ours, shifted = lively(config), lively(PLAIN)
    tokens, targets = stream()
    with torch.no_grad():
        found, _ = nll_in_segments(ours, tokens, targets, 8)
        assert torch.equal(found, nll_in_segments(shifted, tokens, targets, 8)[0])
    with pytest.raises(UserError, match="cannot train on cpu"):
        ours.train().training_loss(tokens, targets, ours.init_state(B))


SHARED_MEMORY = {7: 65_536, 8: 101_376, 9: 232_448, 99: 65_536}
"""Bytes that a block may use, by the first number of the capability; 99: a device that does not exist."""


@pytest.mark.parametrize(
    ("d_head", "dtype", "capability", "reason"),
    [
        (64, torch.bfloat16, (9, 0), None),
        (41, torch.float32, (8, 9), None),
        (64, torch.float64, (9, 0), "cannot train in torch.float64, only in float32 and bfloat16"),
        (64, torch.bfloat16, (7, 5), r"needs compute capability 8.0 or above \(this GPU has 7.5\)"),
        (257, torch.bfloat16, (9, 0), "has no room for heads of 257 features in torch.bfloat16"),
        (129, torch.float32, (9, 0), "has no room for heads of 129 features in torch.float32"),
        (128, torch.float32, (8, 9), None),
        (128, torch.float32, (99, 0), r"needs 69,632 bytes of shared memory .* \(cuda has 65,536\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(d_head, dtype, capability, reason, monkeypatch):
    monkeypatch.setattr(triton_attention, "_why_not_here", triton_attention._why_not_here.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = SimpleNamespace(shared_memory_per_block_optin=SHARED_MEMORY[capability[0]])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    refusal = BACKENDS["triton"].refusal(dataclasses.replace(PLAIN, attention="triton", d_head=d_head), "cuda", dtype)
    if reason is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert re.fullmatch(f"model.attention triton {reason}; use model.attention shifted", str(refusal))


@pytest.mark.parametrize("device", DEVICES[1:])
def test_segments_without_gradients_go_through_it(device):
    numbers, scope, _ = operands(LARGE["wt103-base"], torch.bfloat16)
    expected = reference_attention(Operands(*(each.double() for each in numbers)), scope)
    with torch.no_grad():
        found = triton_attention.triton_attention(Operands(*on(device, numbers)), scope)
    assert distance(found.cpu(), expected) < TOLERANCE[torch.bfloat16]
