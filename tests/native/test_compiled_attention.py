"""Attention in the compiled library, with and without gradients: outputs and all gradients equal the reference's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from txl.attention import (
    BACKENDS,
    KeyScope,
    Operands,
    attention_backend,
    attention_note,
    reference_attention,
    shifted_attention,
)
from txl.attention.backends import attention_without_gradients, compiled_attention
from txl.config import TransformerXLConfig
from txl.errors import UserError
from txl.native import attention as module
from txl.native import build
from txl.native.attention import FEWEST_QUERIES, reading_attention, training_attention
from txl.native.build import compiled_code, library, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")

# B, T, M, H, D, window, filled: below and above a vector, the queries of a tile, and the keys of a block.
SHAPES = {
    "one query, one key": (1, 1, 0, 1, 3, None, None),
    "one query": (2, 1, 7, 3, 16, None, None),
    "no memory": (2, 33, 0, 1, 7, None, None),
    "narrower than a vector": (3, 17, 5, 2, 5, None, None),
    "odd width, lanes of several lengths": (3, 64, 331, 2, 41, 301, (0, 331, 13)),
    "window shorter than a segment": (2, 101, 40, 3, 33, 7, (40, 0)),
    "window of one": (1, 20, 20, 1, 32, 1, None),
    "several blocks": (1, 131, 190, 2, 64, None, None),
    "window that hides whole blocks": (1, 97, 300, 1, 128, 29, None),
    "wide": (1, 37, 30, 1, 131, None, None),
    "more heads and lanes than tasks": (5, 19, 3, 67, 8, None, None),
    "all memory hidden": (2, 24, 40, 2, 64, None, (0, 0)),
}
# Also the queries of a task, for attention without gradients.
LARGE = {
    "long memory, lanes of several lengths": (3, 64, 640, 2, 41, 600, (0, 640, 13)),
    "several blocks, more queries than a task has": (1, 300, 1700, 2, 64, None, None),
    "window that hides whole blocks": (1, 600, 1100, 1, 128, 300, None),
}
READ = {name: shape for name, shape in SHAPES.items() if shape[1] >= FEWEST_QUERIES} | LARGE
DTYPES = (torch.float32, torch.bfloat16)
NAMES = ("output", "query", "key", "value", "position", "u", "v")


def operands(shape, dtype) -> tuple[list[Tensor], KeyScope, Tensor]:
    """Return operands that are not contiguous in memory, their scope, and a gradient of the output."""
    B, T, M, H, D, window, filled = shape
    torch.manual_seed(0)
    query = torch.randn(T, B, H, D).transpose(0, 1)
    key, value = (torch.randn(H, B, M + T + 3, D)[:, :, 2:-1].permute(1, 2, 0, 3) for _ in range(2))
    position = torch.randn(H, M + T + 5, D)[:, 5:].transpose(0, 1)
    above = torch.randn(B, T, D, H).transpose(2, 3)
    numbers = [each.to(dtype) for each in (query, key, value, position)]
    return [*numbers, torch.randn(H, D), torch.randn(D, H).T], KeyScope(M, window, filled), above.to(dtype)


def ours(numbers: Any, scope: KeyScope, dropout: float = 0.0) -> Tensor:
    filled = None if scope.filled is None else torch.tensor(scope.filled)
    return training_attention(numbers, window=scope.window, filled=filled, dropout=dropout)


def with_gradients(attend: Callable[[Any], Tensor], numbers, above) -> list[Tensor]:
    """Return the output of `attend` and the gradients of all `numbers`."""
    leaves = [each.detach().requires_grad_() for each in numbers]
    output = attend(leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, above)]


def exact(attend: Callable[[Any], Tensor], numbers, above) -> list[Tensor]:
    return with_gradients(attend, [each.double() for each in numbers], above.double())


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of found - expected, divided by the norm of expected or by 1, whichever is larger."""
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1)).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_outputs_and_all_gradients_are_the_reference_s(shape, dtype):
    """Errors are at most PyTorch's + 1e-3 (bfloat16) or twice PyTorch's + 1e-6 (float32, recomputed weights)."""
    numbers, scope, above = operands(shape, dtype)
    expected = exact(lambda leaves: reference_attention(Operands(*leaves), scope), numbers, above)
    found = with_gradients(lambda leaves: ours(leaves, scope), numbers, above)
    theirs = with_gradients(lambda leaves: shifted_attention(Operands(*leaves), scope), numbers, above)
    assert [each.dtype for each in found] == [dtype] * 5 + [torch.float32] * 2
    for name, our, their, right in zip(NAMES, found, theirs, expected, strict=True):
        assert our.shape == right.shape
        allowed = 1e-6 + 2 * distance(their, right) if dtype == torch.float32 else 1e-3 + distance(their, right)
        assert distance(our, right) <= allowed, name
        assert distance(our, right) < (3e-6 if dtype == torch.float32 else 7e-3), name


def read(numbers: Any, scope: KeyScope) -> Tensor:
    with torch.no_grad():
        found = reading_attention(numbers, scope.window, scope.filled)
    assert found is not None
    return found


def skip_if_unusable(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not library().txl_attends_bfloat16():  # pyright: ignore
        pytest.skip("this processor does not multiply bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", READ.values(), ids=list(READ))
def test_without_gradients_it_is_the_reference_s(shape, dtype):
    skip_if_unusable(dtype)
    numbers, scope, _ = operands(shape, dtype)
    found = read(numbers, scope)
    assert found.dtype == dtype
    assert found.is_contiguous()
    expected = reference_attention(Operands(*(each.double() for each in numbers)), scope)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 70, 4, 32), (1, 331, 1, 41), (3, 8, 2, 64), (1, 700, 1, 41)])
def test_without_positions_it_is_plain_causal_attention(shape, dtype):
    skip_if_unusable(dtype)
    torch.manual_seed(0)
    query, key, value, above = (torch.randn(shape).to(dtype) for _ in range(4))

    def plain(leaves: Any) -> Tensor:
        query, key, value = leaves
        zeros = query.new_zeros(shape[1:])
        return reference_attention(Operands(query, key, value, zeros, zeros[0], zeros[0]), KeyScope(0))

    def without(leaves: Any) -> Tensor:
        return training_attention(leaves)

    expected = exact(plain, [query, key, value], above)
    found = with_gradients(without, [query, key, value], above)
    for our, right in zip(found, expected, strict=True):
        assert distance(our, right) < (2e-6 if dtype == torch.float32 else 7e-3)
    assert distance(read([query, key, value], KeyScope(0)), expected[0]) < (2e-6 if dtype == torch.float32 else 7e-3)


# ------------------------------------------------------------------------------------------------------------- dropout


def philox(counter: Tensor, seed: int, rounds: int = 7) -> Tensor:
    """Return the words of Philox4x32 (Salmon et al. 2011); counter and words are int64 [...,4], 32 bits each."""
    low = 2**32 - 1
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = seed & low, seed >> 32

    def product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
        """Return the high and low 32 bits of a 64-bit product, without overflow of int64."""
        upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
        total = upper + (lower >> 16)
        return total >> 16, ((total & 0xFFFF) << 16) | (lower & 0xFFFF)

    for _ in range(rounds):
        (high0, low0), (high1, low1) = product(c0, 0xD2511F53), product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack([c0, c1, c2, c3], dim=-1)


def factors(seed: int, n_lane: int, n_head: int, n_query: int, n_key: int, dropout: float) -> Tensor:
    """Return the factors by which dropout multiplies the attention weights, [B,H,T,S]."""
    key = torch.arange(n_key)
    counter, word = key // 64 * 16 + key % 16, key // 16 % 4
    grid = torch.meshgrid(torch.arange(n_lane), torch.arange(n_head), torch.arange(n_query), counter, indexing="ij")
    words = philox(torch.stack([grid[3], grid[2], grid[1], grid[0]], dim=-1), seed)
    drawn = words.gather(-1, word.expand(words.shape[:-1])[..., None])[..., 0]
    return (drawn >= round(dropout * 2**32)).double() / (1 - dropout)


def test_the_generator_is_philox():
    """The published words for a counter and a key of zeros, after 7 and after 10 rounds."""
    zeros = philox(torch.zeros(4, dtype=torch.int64), 0)
    assert zeros.tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    ten = philox(torch.zeros(4, dtype=torch.int64), 0, rounds=10)
    assert ten.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def masked_reference(leaves: list[Tensor], scope: KeyScope, mask: Tensor) -> Tensor:
    """Return attention with weights multiplied by `mask` [B,H,T,S]; one-hot values give the unmasked weights."""
    query, key, value, *others = leaves
    n_key = key.shape[1]
    shown = torch.eye(n_key, dtype=query.dtype, device=query.device)[None, :, None].expand(
        len(query), -1, query.shape[2], -1
    )
    weights = reference_attention(Operands(query, key, shown, *others), scope)  # [B,T,H,S]
    return torch.einsum("bthS,bhtS,bShd->bthd", weights, mask, value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.1, 0.5])
@pytest.mark.parametrize("shape", ["narrower than a vector", "odd width, lanes of several lengths", "several blocks"])
def test_dropout_is_drawn_again_by_the_backward_pass(shape, dropout, dtype, monkeypatch):
    """Outputs and gradients equal the reference's with the mask that the generator yields for the seed."""
    numbers, scope, above = operands(SHAPES[shape], dtype)
    n_lane, n_query, n_head, _ = numbers[0].shape
    seed = 0x1234_5678_9ABC_DEF1
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(seed))
    mask = factors(seed, n_lane, n_head, n_query, numbers[1].shape[1], dropout)
    expected = exact(lambda leaves: masked_reference(leaves, scope, mask), numbers, above)
    found = with_gradients(lambda leaves: ours(leaves, scope, dropout), numbers, above)
    for name, our, right in zip(NAMES, found, expected, strict=True):
        assert distance(our, right) < (3e-6 if dtype == torch.float32 else 7e-3), name


def test_dropout_drops_its_share_and_follows_pytorch_s_generator():
    n = 4000
    query, key = torch.zeros(1, 1, 1, 8), torch.zeros(1, n, 1, 8)
    value = torch.ones(1, n, 1, 8)
    shares = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        kept = training_attention((query, key, value), dropout=0.3)
        shares.append(kept[0, 0, 0, 0].item() * 0.7)
    assert shares[0] == shares[1] != shares[2]
    assert all(math.isclose(share, 0.7, abs_tol=5 * math.sqrt(0.21 / n)) for share in shares)
    state = torch.get_rng_state()
    training_attention((query, key, value))
    assert torch.equal(state, torch.get_rng_state())


# ------------------------------------------------------------------------------------------------------ to the last bit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["odd width, lanes of several lengths", "more heads and lanes than tasks"])
def test_nothing_depends_on_the_number_of_threads(shape, dtype):
    numbers, scope, above = operands(SHAPES[shape], dtype)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            torch.manual_seed(0)
            found.append(with_gradients(lambda leaves: ours(leaves, scope, 0.2), numbers, above))
            if dtype == torch.float32:
                found[-1].append(read(numbers, scope))
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_memory_left_by_others_is_not_read():
    """A call returns the same bits after another call has filled the reused memory with NaN."""
    numbers, scope, above = operands(SHAPES["odd width, lanes of several lengths"], torch.float32)
    before = with_gradients(lambda leaves: ours(leaves, scope), numbers, above)
    poisoned = [torch.full_like(each, torch.nan) for each in numbers]
    assert all(each.isnan().any() for each in with_gradients(lambda leaves: ours(leaves, scope), poisoned, above))
    after = with_gradients(lambda leaves: ours(leaves, scope), numbers, above)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_scores_far_apart_do_not_overflow():
    numbers, scope, above = operands((1, 40, 290, 2, 16, None, None), torch.float32)
    numbers = [numbers[0] * 1000, numbers[1] * 10, *numbers[2:]]
    found = with_gradients(lambda leaves: ours(leaves, scope), numbers, above)
    assert all(each.isfinite().all() for each in found)
    expected = exact(lambda leaves: reference_attention(Operands(*leaves), scope), numbers, above)
    for each in (found[0], read(numbers, scope)):
        assert distance(each, expected[0]) < 1e-2  # scores of 1e5 in float32


def test_nothing_depends_on_the_other_lanes():
    numbers, scope, _ = operands((5, 70, 600, 2, 33, 500, (600, 0, 3, 70, 600)), torch.float32)
    together = read(numbers, scope)
    for lane in range(5):
        alone = [each[lane : lane + 1] for each in numbers[:3]] + numbers[3:]
        assert torch.equal(together[lane : lane + 1], read(alone, KeyScope(600, 500, scope.filled[lane : lane + 1])))  # pyright: ignore


@pytest.mark.parametrize("which", range(4))
def test_what_is_not_a_number_stays_so(which):
    numbers, scope, _ = operands((1, 40, 600, 1, 16, None, None), torch.float32)
    numbers[which][0, 0] = torch.nan
    assert read(numbers, scope).isnan().any(dim=-1).any()


def test_without_gradients_what_it_does_not_do_is_pytorch_s(monkeypatch):
    numbers, _, _ = operands((1, FEWEST_QUERIES, 5, 1, 16, None, None), torch.float32)
    assert reading_attention(numbers) is None  # gradients are required
    with torch.no_grad():
        assert reading_attention(numbers) is not None
        assert reading_attention([each.double() for each in numbers]) is None
        assert reading_attention([numbers[0][:, 1:], *numbers[1:]]) is None
        with compiled_code(False):
            assert reading_attention(numbers) is None
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert reading_attention(numbers) is None


def test_lanes_whose_memory_a_tensor_describes_are_read_alike():
    numbers, scope, _ = operands((2, 9, 8, 2, 5, None, (0, 4)), torch.float32)
    as_tensor = KeyScope(scope.memory, scope.window, None, torch.tensor(scope.filled))
    with torch.no_grad():
        expected = reference_attention(Operands(*numbers), scope)
        for each in (scope, as_tensor):
            torch.testing.assert_close(attention_without_gradients(Operands(*numbers), each), expected)


# ----------------------------------------------------------------------------------------- other environments, refusals


def test_a_processor_that_does_not_multiply_bfloat16_computes_in_float32(monkeypatch):
    monkeypatch.setattr(module, "_computed_in", lambda dtype: torch.float32)
    numbers, scope, above = operands(SHAPES["narrower than a vector"], torch.bfloat16)
    expected = exact(lambda leaves: reference_attention(Operands(*leaves), scope), numbers, above)
    found = with_gradients(lambda leaves: ours(leaves, scope), numbers, above)
    assert [each.dtype for each in found] == [torch.bfloat16] * 5 + [torch.float32] * 2
    assert all(distance(our, right) < 7e-3 for our, right in zip(found, expected, strict=True))


def test_torch_compile_keeps_it_as_one_operation():
    torch.library.opcheck(
        module._attend,  # pyright: ignore[reportPrivateUsage]
        (operands(SHAPES["narrower than a vector"], torch.float32)[0], None, None, None, 0.0),
        test_utils=("test_schema", "test_faketensor"),
    )
    numbers, scope, above = operands(SHAPES["narrower than a vector"], torch.float32)
    traced = torch.compile(
        lambda leaves: compiled_attention(Operands(*leaves), scope) * 2, backend="aot_eager", fullgraph=True
    )
    once = with_gradients(lambda leaves: compiled_attention(Operands(*leaves), scope) * 2, numbers, above)
    assert all(torch.equal(one, other) for one, other in zip(once, with_gradients(traced, numbers, above), strict=True))


def test_a_frozen_operand_gets_no_gradient():
    numbers, scope, _ = operands(SHAPES["narrower than a vector"], torch.float32)
    numbers[0].requires_grad_()
    ours(numbers, scope).sum().backward()
    assert numbers[0].grad is not None
    assert all(each.grad is None for each in numbers[1:])


def test_what_it_cannot_do_is_refused_with_the_reason(monkeypatch):
    model = TransformerXLConfig(attention="compiled")
    assert attention_backend(model, "cpu").name == "compiled"
    with pytest.raises(UserError, match="compiled cannot train on cuda:0, only on cpu; use model.attention shifted"):
        attention_backend(model, "cuda:0")
    numbers, scope, _ = operands(SHAPES["narrower than a vector"], torch.float32)
    numbers = [each.double().requires_grad_() for each in numbers]
    with pytest.raises(UserError, match=r"cannot train in torch.float64"):
        compiled_attention(Operands(*numbers), scope)
    with torch.no_grad():
        BACKENDS["compiled"](Operands(*numbers), scope)
    monkeypatch.setattr(build, "_load", lambda: (None, "no C++ compiler found (c++)"))
    with pytest.raises(UserError, match=r"needs the compiled library \(no C\+\+ compiler found \(c\+\+\)\)"):
        attention_backend(model, "cpu")
    assert attention_backend(model).name == "compiled"  # without a device, the library is not checked
    fastest = TransformerXLConfig(attention="fastest")
    assert attention_backend(fastest, "cpu").name == "shifted"
    note = "model.attention fastest (compiled) needs the compiled library (no C"
    assert (attention_note(fastest, "cpu") or "").startswith(note)
    assert attention_note(fastest, "cuda:0") is None  # compiled attention is for CPUs only
    assert library() is None
