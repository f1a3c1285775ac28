"""Measure the time of a segment's parts without gradients, and compare their speed with the machine's matrix rate.

    python -m benchmarks.segment_profile results/segment-profile.json

The shapes are those of `benchmarks.peers`. The parts are linear layers, attention (its four terms, softmax and weighted
sum), the softmax over the vocabulary with the losses, and the rest (normalisation, activations, embedding, memory). The
time of a part excludes the parts that it calls. The operations of a part are those of its matrix products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import txl
from txl.models.family import FamilyModel
from txl.models.layers import Linear
from txl.models.transformer_xl import RelativeMultiHeadAttention, TransformerXL
from txl_lab.records import measure_and_record
from txl_lab.speed import transformer_xl_of
from txl_lab.speed.budget import ranked_tokens
from txl_lab.speed.operations import matmul_rate

# Preset, V, B, T, M
SHAPES = [("enwik8-12L", 204, 1, 80, 2100), ("enwik8-12L", 204, 1, 256, 2100), ("wt103-base", 267_735, 10, 64, 640)]
STEPS = 15


class Stopwatch:
    """Timer of the parts of a step; the time of a part excludes the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within: list[str] = []
        self._since = 0.0

    def _pass(self) -> None:
        now = time.perf_counter()
        if self._within:
            self.seconds[self._within[-1]] = self.seconds.get(self._within[-1], 0.0) + now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block for this part."""
        self._pass()
        self._within.append(name)
        try:
            yield
        finally:
            self._pass()
            self._within.pop()

    def watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed as a part."""

        def timed(*arguments: Any, **named: Any) -> Any:
            with self.part(name):
                return function(*arguments, **named)

        return timed


@contextmanager
def watching(watch: Stopwatch, model: TransformerXL) -> Iterator[None]:
    """Time the model's parts within the block."""
    attentions = [each for each in model.modules() if isinstance(each, RelativeMultiHeadAttention)]
    plain = attentions[0].attend
    with (
        mock.patch.object(Linear, "forward", watch.watched("linear layers", Linear.forward)),
        mock.patch.object(FamilyModel, "nll_of", watch.watched("softmax", FamilyModel.nll_of)),
    ):
        for each in attentions:
            each.attend = watch.watched("attention", plain)
        try:
            yield
        finally:
            for each in attentions:
                each.attend = plain


def operations(model: TransformerXL, n_lane: int, segment: int, memory: int) -> dict[str, int]:
    """Return the operations of the parts that consist of matrix products."""
    shape, rows = model.config, n_lane * segment
    width = shape.n_head * shape.d_head
    linear = 4 * shape.d_model * width + 2 * shape.d_model * shape.d_inner
    return {
        "linear layers": 2 * rows * linear * shape.n_layer,
        "attention": 3 * 2 * rows * (memory + segment) * width * shape.n_layer,
    }


def profiled(
    preset: str, vocab_size: int, n_lane: int, segment: int, memory: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Measure one shape."""
    torch.manual_seed(0)
    model = TransformerXL(transformer_xl_of(txl.preset(preset)), vocab_size).to(dtype).eval()
    state = model.init_state(n_lane, mem_len=memory).filled_with_noise()
    tokens = ranked_tokens(vocab_size, n_lane, segment)
    steps: list[dict[str, float]] = []
    for _ in range(STEPS + 2):
        watch = Stopwatch()
        with torch.no_grad(), watching(watch, model), watch.part("rest"):
            _, state = model.nll(tokens, tokens, state)
        steps.append(watch.seconds)
    parts = {name: statistics.median(step[name] for step in steps[2:]) for name in steps[0]}
    rate, total = matmul_rate(dtype, "cpu"), sum(parts.values())
    counted = operations(model, n_lane, segment, memory)
    return {
        "preset": preset,
        "vocab_size": vocab_size,
        "batch_size": n_lane,
        "segment": segment,
        "memory": memory,
        "dtype": str(dtype).removeprefix("torch."),
        "share": {name: seconds / total for name, seconds in parts.items()},
        "fraction_of_matmul_rate": {name: counted[name] / parts[name] / rate for name in counted},
        "seconds": total,
        "matmul_rate": rate,
    }


def measure() -> dict[str, Any]:
    """Measure all shapes in both dtypes."""
    return {"rows": [profiled(*shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]}


if __name__ == "__main__":
    measure_and_record("segment_profile", measure)
