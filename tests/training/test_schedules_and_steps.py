from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import txl.training.optimisers as optimisers
from txl.config import ModelConfig, RecurrentConfig, TrainConfig, TransformerConfig, TransformerXLConfig, VanillaConfig
from txl.errors import UserError
from txl.models import build_model
from txl.models.family import FamilyModel
from txl.models.transformer_xl import TransformerXL
from txl.training.optimisers import build_optimizer, load_optimizer_tensors, optimizer_tensors
from txl.training.schedule import learning_rate
from txl.training.step import StepInputs, training_step

BASE = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.1)


def test_warm_up_is_linear_and_reaches_the_peak():
    assert [learning_rate(step, BASE) for step in range(10)] == pytest.approx([0.1 * n for n in range(1, 11)])


def test_cosine_begins_where_the_warm_up_ends_and_is_half_way_in_the_middle():
    assert learning_rate(10, BASE) == 1.0
    assert learning_rate(55, BASE) == pytest.approx(0.55)
    assert learning_rate(100, BASE) == pytest.approx(0.1)
    assert learning_rate(99, BASE) > 0.1
    rates = [learning_rate(step, BASE) for step in range(9, 101)]
    assert rates == sorted(rates, reverse=True)


def test_a_line_falls_over_the_last_share_of_all_updates():
    linear = dataclasses.replace(BASE, schedule="linear", decay_share=0.4)
    expected = {0: 0.1, 9: 1.0, 10: 1.0, 59: 1.0, 60: 1.0, 80: 0.55, 90: 0.325, 100: 0.1, 10**6: 0.1}
    assert {step: learning_rate(step, linear) for step in expected} == pytest.approx(expected)
    # The rate falls from the end of the warm-up at the earliest, however large the share.
    assert learning_rate(55, dataclasses.replace(linear, decay_share=1.0)) == pytest.approx(0.55)
    averaged = dataclasses.replace(linear, average_from=50)
    assert [learning_rate(step, averaged) for step in (30, 40, 50, 80)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert learning_rate(0, TrainConfig(steps=1, schedule="linear")) == TrainConfig().learning_rate


def test_inverse_square_root_and_constant():
    inverse = dataclasses.replace(BASE, schedule="inverse_sqrt")
    assert learning_rate(9, inverse) == pytest.approx(1.0)
    assert learning_rate(39, inverse) == pytest.approx(0.5)
    assert learning_rate(10**6, inverse) == 0.1
    constant = dataclasses.replace(BASE, schedule="constant")
    assert {learning_rate(step, constant) for step in (9, 10, 50, 500)} == {1.0}


def test_steps_divide_the_rate_by_ten_after_so_many_updates():
    steps = dataclasses.replace(BASE, schedule="steps", decay_at=(20, 50), min_learning_rate=0.0)
    expected = {9: 1.0, 10: 1.0, 19: 1.0, 20: 0.1, 49: 0.1, 50: 0.01, 10**6: 0.01}
    assert {step: learning_rate(step, steps) for step in expected} == pytest.approx(expected)
    assert learning_rate(4, steps) == 0.5  # in the warm-up
    assert learning_rate(50, dataclasses.replace(steps, min_learning_rate=0.05)) == 0.05


def small_model(**changes) -> TransformerXL:
    torch.manual_seed(0)
    shape = TransformerXLConfig(n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6, dropout=0.0)
    return TransformerXL(dataclasses.replace(shape, **changes), 11)


def test_weight_decay_acts_on_matrices_only():
    model = small_model()
    optimizer = build_optimizer(model, TrainConfig(weight_decay=0.5, optimizer="adamw", learning_rate=0.1))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and name not in ("u", "v")
        expected = before[name] * (0.95 if is_matrix else 1.0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0), ("adamw", 0.0), ("muon", 0.0)]
)
def test_a_parameter_may_have_its_first_gradient_later_than_others(optimizer, momentum):
    """A tail cluster has no gradient before its first target. Its moments begin there, and are restored exactly."""
    shape = RecurrentConfig(kind="lstm", n_layer=1, d_model=8, dropout=0.0)
    shape = dataclasses.replace(shape, cutoffs=(5,), div_val=2, tie_projections="none", tie_embeddings=False)
    train = TrainConfig(optimizer=optimizer, momentum=momentum, learning_rate=0.1, weight_decay=0.01, clip=0)
    late = ("softmax.own_projections.1", "softmax.own_tables.1")
    runs = []

    def copy_of(weights, moments):
        torch.manual_seed(0)
        model = build_model(shape, 11).train()
        if weights:
            model.load_state_dict(weights)
        optimiser = build_optimizer(model, train)
        load_optimizer_tensors(optimiser, model, moments)
        runs.append((model, optimiser))

    def step(model, optimiser, targets):
        tokens = torch.arange(4)[None]
        inputs = StepInputs(tokens, torch.tensor([targets]), [model.init_state(1)])
        training_step(model, optimiser, inputs, train)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    copy_of({}, {})
    model, optimiser = runs[0]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after_one = step(model, optimiser, [1, 2, 3, 4])
    assert all(torch.equal(after_one[name], weights[name]) for name in late)
    copy_of(after_one, {name: tensor.clone() for name, tensor in optimizer_tensors(optimiser, model).items()})
    copy_of(after_one, {})
    whole, gone_on, begun = (step(model, optimiser, [1, 7, 3, 10]) for model, optimiser in runs)
    assert all(torch.equal(whole[name], gone_on[name]) for name in whole)
    for name in late:
        assert not torch.equal(whole[name], after_one[name])
        torch.testing.assert_close(whole[name], begun[name], rtol=1e-6, atol=0)  # equal to a first step


ATTENTION = [f"attention.{name}_proj" for name in "qkvo"]
FEED_FORWARD = ["feed_forward.inner", "feed_forward.outer"]
MATRICES: dict[str, tuple[ModelConfig, dict[str, tuple[int, int]]]] = {
    "relative": (
        TransformerXLConfig(cutoffs=(5,), div_val=2, untie_r=True, n_softmax=2),
        dict.fromkeys([*ATTENTION, "attention.r_proj", *FEED_FORWARD], (1, 1)),
    ),
    "shaw": (TransformerXLConfig(encoding="shaw", max_distance=4), dict.fromkeys([*ATTENTION, *FEED_FORWARD], (1, 1))),
    "learned": (
        VanillaConfig(max_segment=6, layer_losses=True, n_target=2),
        dict.fromkeys([*ATTENTION, *FEED_FORWARD], (1, 1)),
    ),
    "lstm": (
        RecurrentConfig(kind="lstm", weight_drop=0.2, tie_embeddings=False),
        dict.fromkeys(["lstm.weight_ih_l0", "lstm.weight_hh_l0"], (4, 1)),
    ),
    "qrnn": (RecurrentConfig(kind="qrnn", kernel_sizes=(2,), d_hidden=12), {"convolution": (3, 2)}),
}


def model_for_muon(name: str) -> FamilyModel:
    torch.manual_seed(0)
    shape = MATRICES[name][0]
    small = {"n_layer": 2, "d_model": 8, "dropout": 0.0} | (
        {"n_head": 2, "d_head": 6, "d_inner": 12} if isinstance(shape, TransformerConfig) else {}
    )
    return build_model(dataclasses.replace(shape, **small), 11).train()


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Return the result of five Newton-Schulz iterations with Jordan's coefficients, in float64."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("name", MATRICES)
def test_muon_orthogonalises_the_layers_matrices_one_by_one_and_adam_has_the_rest(name):
    model = model_for_muon(name)
    train = TrainConfig(optimizer="muon", learning_rate=0.01, beta2=0.95, eps=1e-30, weight_decay=0.1)
    optimizer = build_optimizer(model, train)
    expected = {
        f"layers.{layer}.{matrix}" + ("" if "_l0" in matrix else ".weight"): parts
        for matrix, parts in MATRICES[name][1].items()
        for layer in range(2)
    }
    assert model.layer_matrices() == expected
    random = torch.Generator().manual_seed(1)
    moments = {matrix: torch.zeros_like(model.get_parameter(matrix)).double() for matrix in expected}
    for number in range(2):
        optimizer.set_rate(0.01)
        before = {each: parameter.detach().double() for each, parameter in model.named_parameters()}
        gradients = {}
        for each, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random)
            gradients[each] = parameter.grad.double()
        optimizer.step()
        for each, parameter in model.named_parameters():
            decayed = before[each] * (0.999 if parameter.ndim > 1 and each[-2:] not in ("u", "v", ".u", ".v") else 1.0)
            moved = parameter.detach().double() - decayed
            if each not in expected:
                if number == 0:  # Adam's first update is as large as the learning rate, whatever the gradient
                    torch.testing.assert_close(moved, -0.01 * gradients[each].sign(), rtol=1e-4, atol=1e-6)
                continue
            moments[each] = 0.95 * moments[each] + 0.05 * gradients[each]
            update = 0.05 * gradients[each] + 0.95 * moments[each]  # Nesterov momentum
            rows, columns = expected[each]
            for here, there in zip(moved.chunk(rows), update.chunk(rows), strict=True):
                for part, direction in zip(here.chunk(columns, 1), there.chunk(columns, 1), strict=True):
                    wanted = -0.01 * 0.2 * max(part.shape) ** 0.5 * orthogonalised(direction)
                    assert (part - wanted).norm() < 0.03 * wanted.norm()  # computed in bfloat16


@pytest.mark.parametrize("most", [1, 100, 1 << 22])
@pytest.mark.parametrize("in_bfloat16", [True, False])
def test_muon_is_pytorch_s_whatever_is_orthogonalised_at_once(most, in_bfloat16, monkeypatch):
    """A batch holds one matrix, some matrices of one shape, or all matrices of one shape."""
    monkeypatch.setattr(optimisers, "_MOST_AT_ONCE", most)
    monkeypatch.setattr(optimisers, "multiplies_bfloat16", lambda device: in_bfloat16)
    ours, theirs = model_for_muon("relative"), model_for_muon("relative")
    train = TrainConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.1)
    names = ours.layer_matrices()
    optimizer = build_optimizer(ours, train)
    peer = torch.optim.Muon(
        [theirs.get_parameter(name) for name in names], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    random, before = torch.Generator().manual_seed(1), {}
    for _ in range(3):
        before = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
        for name, parameter in ours.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random)
            theirs.get_parameter(name).grad = parameter.grad.clone()
        optimizer.step()
        peer.step()
    for name in names:
        here, there = (model.get_parameter(name).detach() for model in (ours, theirs))
        moved = (there - before[name]).norm()
        assert (here - there).norm() < (1e-3 if in_bfloat16 else 0.05) * moved, name


@pytest.mark.parametrize("most", [1, 100, 1 << 22])
@pytest.mark.parametrize("name", MATRICES)
def test_muon_on_a_gpu_updates_as_on_a_cpu_unless_its_flag_is_set(name, most, monkeypatch):
    """Here on a CPU. With the flag set, gradients that are not finite change neither weights nor momenta."""
    monkeypatch.setattr(optimisers, "_MOST_AT_ONCE", most)
    monkeypatch.setattr(optimisers, "multiplies_bfloat16", lambda device: False)
    train = TrainConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.1)
    models = [model_for_muon(name) for _ in range(2)]
    optimizers = [build_optimizer(model, train) for model in models]
    optimizers[1].skips_on_device = True
    random = torch.Generator().manual_seed(1)
    for skipped in (False, True, False):
        before = [each.clone() for each in (*models[1].parameters(), *momenta(optimizers[1]))]
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            ours.grad = torch.randn(ours.shape, generator=random)
            theirs.grad = ours.grad * math.nan if skipped else ours.grad.clone()
        optimizers[1].step(torch.tensor(skipped))
        if skipped:
            after = (*models[1].parameters(), *momenta(optimizers[1]))
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))
        else:
            optimizers[0].step()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def momenta(optimizer: optimisers.Optimizer) -> list[torch.Tensor]:
    return [each["momentum_buffer"] for each in optimizer.state.values() if "momentum_buffer" in each]


def test_muon_s_state_survives_as_tensors_and_goes_on_exactly():
    train = TrainConfig(optimizer="muon", learning_rate=0.01)
    models = [model_for_muon("lstm") for _ in range(2)]
    optimizers = [build_optimizer(model, train) for model in models]
    tokens = torch.randint(11, (2, 6))
    saved: dict[str, torch.Tensor] = {}
    for number in range(3):
        if number == 1:
            models[1].load_state_dict(models[0].state_dict())
            saved = {name: value.clone() for name, value in optimizer_tensors(optimizers[0], models[0]).items()}
            kinds = {name.rpartition("/")[2] for name in saved if name.startswith("layers.0.lstm.weight")}
            assert kinds == {"momentum_buffer"}
            load_optimizer_tensors(optimizers[1], models[1], saved)
        for model, optimizer in zip(models[: 2 if number else 1], optimizers, strict=False):
            optimizer.set_rate(0.02)
            torch.manual_seed(number)  # for the weight dropout
            training_step(model, optimizer, StepInputs(tokens, tokens, [model.init_state(2)]), train)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    name, moment = "layers.0.lstm.weight_ih_l0", saved["layers.0.lstm.weight_ih_l0/momentum_buffer"]
    for damaged in ({f"{name}/exp_avg": moment}, {f"{name}/momentum_buffer": moment[:1]}, {"foreign/exp_avg": moment}):
        with pytest.raises(UserError, match="belongs to another model"):
            load_optimizer_tensors(optimizers[1], models[1], saved | damaged)


def test_the_embedding_s_learning_rate_is_in_proportion_to_the_others():
    """Adam's first update is as large as the learning rate, whatever the gradient."""
    model = small_model()
    optimizer = build_optimizer(model, TrainConfig(embedding_lr_factor=2.0, eps=1e-30, clip=0))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.set_rate(0.01)
    tokens = torch.randint(11, (2, 6))
    training_step(model, optimizer, StepInputs(tokens, tokens, [model.init_state(2)]), TrainConfig(clip=0))
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - before[name]).abs().max().item()
        assert moved == pytest.approx(0.02 if name == "embedding.tables.0" else 0.01, rel=1e-3), name


def test_the_reported_loss_leaves_regularisers_out_but_the_update_does_not():
    tokens = torch.randint(11, (2, 6))
    results, weights = [], []
    for strength in (0.0, 0.5):
        model = small_model(activation_reg=strength)
        optimizer = build_optimizer(model, TrainConfig(learning_rate=0.1))
        results.append(
            training_step(model, optimizer, StepInputs(tokens, tokens, [model.init_state(2)]), TrainConfig())
        )
        weights.append(model.get_parameter("layers.0.feed_forward.outer.weight").detach().clone())
    assert results[0].result().loss == results[1].result().loss
    assert not torch.equal(*weights)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_the_batch_with_their_own_memory_equal_the_whole(parts):
    config = TrainConfig(learning_rate=0.01, clip=0.25)
    models = [small_model().double() for _ in range(2)]
    optimizers = [build_optimizer(model, config) for model in models]
    states: Any = [[models[0].init_state(4)], [models[1].init_state(4 // parts) for _ in range(parts)]]
    stream = torch.randint(11, (4, 31), generator=torch.Generator().manual_seed(1))
    for start in range(0, 30, 6):
        tokens, targets = stream[:, start : start + 6], stream[:, start + 1 : start + 7]
        results = [
            training_step(model, optimizer, StepInputs(tokens, targets, state), config)
            for model, optimizer, state in zip(models, optimizers, states, strict=True)
        ]
        states = [result.states for result in results]
        whole, in_parts = (result.result() for result in results)
        assert whole.loss == pytest.approx(in_parts.loss, abs=1e-12)
        assert whole.grad_norm == pytest.approx(in_parts.grad_norm, abs=1e-10)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    whole = torch.cat([state.hidden[1] for state in states[1]])
    torch.testing.assert_close(whole, states[0][0].hidden[1], rtol=0, atol=1e-10)


def test_clipping_limits_the_gradient_but_reports_its_norm():
    model = small_model()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = TrainConfig(clip=0.01, optimizer="sgd", learning_rate=1.0)
    tokens = torch.randint(11, (2, 6))
    inputs = StepInputs(tokens, tokens, [model.init_state(2)])
    result = training_step(model, build_optimizer(model, config), inputs, config).result()
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]).norm()
    assert result.grad_norm > 0.1
    assert moved == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_muon_orthogonalises_float64_weights_in_float64(on_gpu, monkeypatch):
    monkeypatch.setattr(optimisers, "multiplies_bfloat16", lambda device: True)
    model = model_for_muon("relative").double()
    optimizer = build_optimizer(model, TrainConfig(optimizer="muon", learning_rate=0.01))
    name = next(name for name, stacked in model.layer_matrices().items() if stacked == (1, 1))
    matrix = model.get_parameter(name)
    before, matrix.grad = matrix.detach().clone(), torch.randn(matrix.shape, dtype=torch.float64)
    optimizer.skips_on_device = on_gpu
    optimizer.step(torch.tensor(False))
    wide = matrix.grad if matrix.shape[0] <= matrix.shape[1] else matrix.grad.T
    # The first Nesterov momentum is a multiple of the gradient.
    move = optimisers.orthogonalised(wide[None])[0]
    move = move if wide is matrix.grad else move.T
    wanted = 0.01 * 0.2 * max(matrix.shape) ** 0.5 * move
    torch.testing.assert_close(before - matrix.detach(), wanted, rtol=1e-5, atol=1e-9)


def test_an_update_that_is_not_finite_is_not_made():
    model = small_model()
    model.softmax.bias.data[3] = math.nan
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = build_optimizer(model, TrainConfig())
    tokens = torch.randint(11, (2, 6))
    result = training_step(model, optimizer, StepInputs(tokens, tokens, [model.init_state(2)]), TrainConfig())
    assert not result.result().updated
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items() if k != "softmax.bias")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimiser_s_state_of_another_model_is_refused():
    model = small_model()
    optimizer = build_optimizer(model, TrainConfig())
    tokens = torch.randint(11, (2, 6))
    training_step(model, optimizer, StepInputs(tokens, tokens, [model.init_state(2)]), TrainConfig())
    saved = optimizer_tensors(optimizer, model)
    for changed in ({"foreign/exp_avg": torch.zeros(1)}, {"softmax.bias/exp_avg": torch.zeros(3)}):
        with pytest.raises(UserError, match="belongs to another model"):
            load_optimizer_tensors(optimizer, model, saved | changed)
