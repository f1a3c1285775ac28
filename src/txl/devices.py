"""Work of a device that runs ahead of the program, as a GPU does: what it is given, what it is asked, what it repeats.

A program hands kernels to a GPU and goes on; to read a number of it is to wait for everything handed over before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def runs_ahead(tensor: Tensor) -> bool:
    """Return whether to read a number of this tensor is to wait: everywhere but on a CPU."""
    return tensor.device.type != "cpu"


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU's tensor to a device; to a GPU from pinned memory, so that nobody waits."""
    if torch.device(device).type != "cuda":
        return tensor.to(device, non_blocking=True)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


class Late:
    """Numbers that a device computes, read when they are asked for.

    Args:
        numbers: of one dimension; later changes of them do not count.
    """

    def __init__(self, numbers: Tensor):
        numbers = numbers.detach()
        self._read: list[float] | None = None
        self._done: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._numbers = numbers.clone()

    def read(self) -> list[float]:
        """Return the numbers; waits for those of a GPU."""
        if self._read is None:
            if self._done is not None:
                self._done.synchronize()
            self._read = self._numbers.tolist()
        return self._read


def seed_generators(seed: int, device: str) -> None:
    """Seed the random numbers of the CPU, and of the GPUs if the device is one."""
    if device.startswith("cuda"):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class Captured:
    """A function of CUDA tensors, recorded once as a graph and replayed: hundreds of kernels cost one launch.

    Shapes must stay those of the first call. The function may write to tensors of its own, and to its inputs. It must
    not wait for the device.

    Args:
        function: of tensors, to a tuple of tensors.
        warm_up: calls before it is recorded, in which libraries set themselves up; 0 where such calls were made, and
            the function must not be called again.
        beside: another graph, never replayed at the same time, whose memory for results in between is used.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], warm_up: int = 3, beside: Captured | None = None):
        self._function, self._warm_up, self._beside = function, warm_up, beside
        self._graph: torch.cuda.CUDAGraph | None = None
        self._replay: Callable[[], None] | None = None
        self.inputs: list[Tensor] = []
        """The graph's own; a call copies into them what is not one of them already."""
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the function's results; the next call overwrites them."""
        if self._replay is None:
            self.record(*inputs)
        assert self._replay is not None
        for kept, new in zip(self.inputs, inputs, strict=True):
            if kept is not new:
                kept.copy_(new, non_blocking=True)
        self._replay()
        return self.outputs

    def record(self, *inputs: Tensor) -> None:
        """Record the function; by itself where the first call is to have no effect but its own."""
        self.inputs = [each.clone() for each in inputs]
        self._replay = self._record()

    def _record(self) -> Callable[[], None]:
        """Record the function of `inputs` and set `outputs`; return what computes them again."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(self._warm_up):
                self._function(*self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        pool = None if self._beside is None or self._beside._graph is None else self._beside._graph.pool()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.outputs = self._function(*self.inputs)
        return self._graph.replay


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Compute float32 products of a GPU in TF32, or in float32, within the block; as before after it.

    cuDNN's, in an LSTM, would be in TF32 unless told otherwise.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
