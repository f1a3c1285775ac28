"""How many operators a training step on a GPU dispatches: a proxy for its kernel launches, which may not grow.

The step is that of a GPU, made on a CPU: Triton's kernels are counted instead of launched, so the numbers in the tensors
mean nothing, and Triton is not needed. Operators that only make views or reserve memory do not count; every other one is
about one launch (a few launch several). All layers are alike, so a layer is the difference between models of two and of
three layers.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import txl
from txl.attention import triton_attention
from txl.config import TransformerXLConfig
from txl.models import build_model, loss
from txl.models.transformer_xl import TransformerXL
from txl.training.optimisers import build_optimizer
from txl.training.state import WeightAverage
from txl.training.step import StepInputs, training_step

SOURCE = Path(txl.__file__).parent
# Operators of a layer (of `stdlib-bpe` with pre-norm and qk_norm), and of all else in a step with Adam: embedding, loss,
# clip, optimiser, memory, and for `ptb` the average.
MOST = {"ptb": (27, 142), "enwik8-12L": (27, 111), "stdlib-bpe": (33, 108)}
WIDTHS = {"ptb": {"d_model": 38, "n_head": 2, "d_head": 19, "d_inner": 71, "mem_len": 7}}
WIDTHS["enwik8-12L"] = WIDTHS["stdlib-bpe"] = {"d_model": 64, "n_head": 2, "d_head": 32, "d_inner": 96, "mem_len": 8}
V = 50


class Counting(TorchDispatchMode):
    """Counter of dispatched operators that compute or copy, and of kernels that `Stub` stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        is_view = bool(returned) and all(of.alias_info is not None and not of.alias_info.is_write for of in returned)
        name = func._schema.name.removeprefix("aten::")
        if not is_view and not name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "lift")):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Stub:
    """A kernel that is counted and not launched."""

    def __init__(self, name: str, found: Counter[str]):
        self._name, self._found = name, found

    def __getitem__(self, grid: object) -> Stub:
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        in_backward = torch._C._current_graph_task_id() >= 0  # there autograd makes the device current
        assert in_backward or self._found["device"] > 0, f"{self._name}: not on the device of its tensors"
        self._found[self._name] += 1


@contextmanager
def on_device(found: Counter[str], _: Tensor) -> Iterator[None]:
    """Stand for `torch.cuda.device_of`: Triton launches on the current device."""
    found["device"] += 1
    yield
    found["device"] -= 1


def operators(preset: str, n_layer: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the operators of a training step of a small model with the preset's options, and of the average."""
    run = txl.preset(preset)
    assert isinstance(run.model, TransformerXLConfig)
    run.model = dataclasses.replace(run.model, n_layer=n_layer, attention="shifted", **WIDTHS[preset])
    run.train = dataclasses.replace(run.train, dtype="bfloat16", batch_size=2, optimizer="adam")
    model = build_model(run.model, V).train()
    assert isinstance(model, TransformerXL)
    optimizer, average = build_optimizer(model, run.train), WeightAverage(model)
    tokens = torch.randint(V, (2, run.model.mem_len))
    inputs = StepInputs(tokens, tokens, [model.init_state(2).filled_with_noise()], void=torch.tensor(False))
    counting = Counting()
    with monkeypatch.context() as patch:
        language = MagicMock(constexpr=lambda value: value)

        def kernel(function: Any = None, **options: Any) -> Any:
            return kernel if function is None else Stub(function.__name__, counting.found)

        stand_in = MagicMock(language=language, jit=kernel, cdiv=lambda a, b: -(-a // b))
        stand_in.next_power_of_2 = lambda value: 1 << (value - 1).bit_length()
        for path in SOURCE.rglob("*.py"):
            if "\nimport triton\n" not in path.read_text(encoding="utf-8"):
                continue
            package, name = ".".join(path.relative_to(SOURCE.parent).parent.parts), path.stem
            patch.delitem(sys.modules, f"{package}.{name}", raising=False)
            with patch.context() as importing:  # PyTorch, too, would take the stand-in for Triton
                importing.setitem(sys.modules, "triton", stand_in)
                importing.setitem(sys.modules, "triton.language", language)
                module = import_module(f"{package}.{name}")
            patch.setattr(sys.modules[package], name, module, raising=False)
            patch.setitem(sys.modules, f"{package}.{name}", module)
        autocast, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        patch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": autocast("cpu"))
        patch.setattr(torch, "get_autocast_dtype", lambda kind: dtype("cpu"))
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(torch.cuda, "device_of", partial(on_device, counting.found))
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(loss, "_has_kernels", lambda device: True)
        patch.setattr(triton_attention, "_why_not_here", lambda *given: None)
        patch.setattr(type(model), "why_not_fused", lambda model, *given: None)
        patch.setattr("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"])
        with counting:  # twice, because moments are made and the average copied in the first step
            for _ in range(2):
                counting.found.clear()
                output = training_step(model, optimizer, inputs, run.train)
                if run.train.averages:
                    average.update(model, output.skipped)
    return counting.found


@pytest.mark.parametrize("preset", MOST)
def test_a_step_dispatches_no_more_operators(preset, monkeypatch):
    two, three = (operators(preset, n_layer, monkeypatch) for n_layer in (2, 3))
    layer, most = three - two, MOST[preset]
    rest = two.total() - 2 * layer.total()
    n_layer = txl.preset(preset).model.n_layer
    print(f"{preset}: {layer.total()} in a layer, {rest} beside, {n_layer * layer.total() + rest} in all {two}")
    assert "_local_scalar_dense" not in three, "the host reads a number, and waits for the device"
    assert layer.total() <= most[0], layer
    assert rest <= most[1], two
