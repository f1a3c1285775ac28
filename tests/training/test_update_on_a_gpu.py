"""What a recorded step does around the passes on a GPU: few kernels, and the numbers of the CPU's arithmetic."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.waiting import AHEAD
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import txl
from txl.config import TrainConfig
from txl.models import build_model
from txl.models.language_model import State
from txl.training import state as state_module
from txl.training.compilation import WARM, CapturedStep
from txl.training.optimisers import Optimizer, build_optimizer
from txl.training.parallel import TrainedModel
from txl.training.state import WeightAverage, average_weights
from txl.training.step import StepInputs

# PyTorch's limits of one launch for lists of tensors (ATen/native/cuda/MultiTensorApply.cuh): tensors by number of
# lists, blocks, elements of a block.
MOST_TENSORS, MOST_BLOCKS, BLOCK = {1: 110, 2: 64, 3: 48, 4: 36}, 320, 65536
NO_KERNEL = (
    "view",
    "split",
    "unbind",
    "transpose",
    "detach",
    "empty",
    "expand",
    "unsqueeze",
    "select",
    "alias",
    "t.default",
)


def launches(n_list: int, tensors: Sequence[Tensor]) -> int:
    """Return an estimate of the number of launches of an operator on lists of tensors."""
    blocks = sum(math.ceil(tensor.numel() / BLOCK) for tensor in tensors)
    return math.ceil(len(tensors) / MOST_TENSORS[n_list]) + blocks // MOST_BLOCKS


class Launches(TorchDispatchMode):
    """Mode that estimates the number of kernels that a GPU would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.by_name: dict[str, int] = {}

    def add(self, name: str, count: int) -> None:
        self.count += count
        self.by_name[name] = self.by_name.get(name, 0) + count

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result, name = func(*args, **(kwargs or {})), str(func).removeprefix("aten.")
        lists = [part for part in args if isinstance(part, list) and part and isinstance(part[0], Tensor)]
        if name.startswith("_foreach_norm"):
            self.add(name, 2 * launches(1, lists[0]) + 1)  # norms of blocks, zeros for them, norms of tensors
        elif name.startswith("_foreach"):
            self.add(name, launches(len(lists) + isinstance(result, list), lists[0]))
        elif name.startswith(("cat", "stack")):
            self.add(name, math.ceil(len(lists[0]) / 128))
        elif not name.startswith(NO_KERNEL):
            self.add(name, 1)
        return result


class NoPasses(TrainedModel):
    """A model whose passes compute nothing; the memory stays."""

    def training_terms(self, tokens: Tensor, targets: Tensor, state: State, objective: Any = None) -> Any:
        loss = torch.zeros((), device=tokens.device, requires_grad=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter)
        return loss, loss.detach(), state


def test_a_recorded_step_of_penn_treebank_launches_few_kernels_around_its_passes(monkeypatch):
    """The whole step of CapturedStep counts, except the passes: clip, skip, Adam, average of the weights, memory.

    The count is an estimate: one kernel for an operator, and by PyTorch's limits for operators on lists.
    """
    run = txl.preset("ptb")
    model = build_model(run.model, 10_000).to(AHEAD).train()
    config = dataclasses.replace(run.train, capture=True, random_segments=False)
    optimizer, average = build_optimizer(model, config), WeightAverage(model)
    assert len(list(model.parameters())) > 200
    taken = Launches()

    def fused(parameters: list[Tensor], *_: object, grad_scale: Tensor | None, found_inf: Tensor | None, **__: object):
        assert grad_scale is not None
        assert found_inf is not None
        taken.add("adam", launches(4, parameters))

    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "_fused_adam_", fused)
    monkeypatch.setattr(torch, "_fused_sgd_", lambda averages, *_, **__: taken.add("average", launches(2, averages)))
    step, states = CapturedStep(), [model.init_state(20).filled_with_noise()]
    tokens = torch.zeros(20, 70, dtype=torch.int64, device=AHEAD)
    for number in range(WARM):
        void = torch.zeros((), dtype=torch.bool, device=AHEAD)
        average.prepare()
        inputs = StepInputs(tokens, tokens, states, average=average, void=void)
        if number < WARM - 1:
            states = step(NoPasses(model), optimizer, inputs, config).states
            taken.count, taken.by_name = 0, {}
            continue
        with taken:
            step(NoPasses(model), optimizer, inputs, config)
    assert taken.count <= 60, taken.by_name


@pytest.mark.parametrize("clip", [0.0, 0.1, 100.0])
@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_gradients_divided_by_the_optimiser_are_clipped_alike(name, clip, monkeypatch):
    """The way of a GPU, computed on a CPU, gives the norm and the weights of the CPU's way; so does a skipped update."""
    config = TrainConfig(optimizer=name, clip=clip, weight_decay=0.1, learning_rate=0.01)
    results = []
    for divides in (False, True):
        torch.manual_seed(3)
        model: Any = build_model(txl.preset("stdlib-tiny").model, 20).train()
        optimizer = build_optimizer(model, config)
        monkeypatch.setattr(optimizer, "_divides", divides)
        monkeypatch.setattr(optimizer, "_muon_dtype", torch.float32)  # bfloat16 enlarges differences in rounding
        norms, generator = [], torch.Generator().manual_seed(5)
        for number in range(6):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator) / 50
            norm, divisor = optimizer.clip(model.parameters(), clip)
            assert (divisor is not None) is (divides and clip > 0)
            optimizer.step(torch.tensor(number == 2), divisor)
            norms.append(norm)
        results.append([torch.stack(norms), *model.parameters(), *_moments(optimizer)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)


def _moments(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for state in optimizer.state.values() for tensor in state.values()]


def test_an_average_on_a_gpu_is_that_of_a_cpu(monkeypatch):
    """The kernel of SGD, computed on a CPU, gives the plain mean, leaves out a skipped update, and keeps the weights."""
    results = []
    for is_gpu in (False, True):
        monkeypatch.setattr(state_module, "runs_ahead", lambda tensor, is_gpu=is_gpu: is_gpu)
        model: Any = nn.Linear(5, 3)
        average, generator = WeightAverage(model), torch.Generator().manual_seed(5)
        for number in range(9):
            newest = torch.randn(3, 5, generator=generator)
            model.weight.data.copy_(newest)
            average.prepare()
            average.update(model, torch.tensor(number in (3, 4)))
            average.count -= number in (3, 4)
            assert torch.equal(model.weight, newest)
        results.append(average.model.get_parameter("weight"))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_averages_stay_as_they_are_if_the_update_is_skipped(monkeypatch):
    monkeypatch.setattr(state_module, "runs_ahead", lambda tensor: True)
    average, newest = torch.randn(7), torch.randn(7)
    for skipped in (True, False):
        before = average.clone()
        average_weights([average], [newest], torch.tensor(0.5), torch.tensor(skipped))
        assert torch.equal(average, before) is skipped
