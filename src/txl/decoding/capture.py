"""A step recorded once as a CUDA graph and replayed: a token's hundreds of kernels cost one launch.

Shapes are the caller's; they must stay what they were at the first call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Captured:
    """A function of CUDA tensors of fixed shapes, which may write to tensors of its own, as a graph."""

    def __init__(self, function: Callable[..., Tensor]):
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._output: Tensor | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What the function gives; overwritten by the next call."""
        if self._graph is None:
            self._record(inputs)
        assert self._graph is not None
        assert self._output is not None
        for kept, new in zip(self._inputs, inputs, strict=True):
            kept.copy_(new)
        self._graph.replay()
        return self._output

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [each.clone() for each in inputs]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries set themselves up in the first calls, which a graph must not hold
            for _ in range(3):
                self._function(*self._inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._function(*self._inputs)
