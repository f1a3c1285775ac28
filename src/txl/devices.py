"""Asynchronous devices such as GPUs: copies to a device, numbers read from a device, and recorded functions.

A program launches kernels on a GPU and continues at once. Reading a number from the GPU waits for all kernels launched
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from txl.errors import Field, UserError


def runs_ahead(tensor: Tensor) -> bool:
    """Return whether reading a number of this tensor waits for a device: true on all devices but a CPU."""
    return tensor.device.type != "cpu"


def chosen_device(name: str | torch.device | None) -> str:
    """Return the name of the device to use: the named one, else a GPU if there is one, else the CPU."""
    chosen = str(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    return "cpu" if chosen.startswith("cpu:") else chosen  # there is one CPU


def check_device(device: str) -> None:
    """Refuse a device that cannot be used here."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        if "aten::" in reason:  # words for PyTorch's own developers
            reason = "this PyTorch has no such device"
        problem = f"cannot be used here: {reason}"
        raise UserError(problem, field="device", value=device, remedy=("use ", Field("device", "cpu"))) from None


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU tensor to a device; copies to a GPU use pinned memory, so that the program does not wait."""
    if torch.device(device).type != "cuda":
        return tensor.to(device, non_blocking=True)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def seed_generators(seed: int, device: str) -> None:
    """Seed the random numbers of the CPU, and also of the GPUs if the device is a GPU."""
    if device.startswith("cuda"):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class Captured:
    """Function of CUDA tensors, recorded once as a CUDA graph and replayed: hundreds of kernels cost one launch.

    All calls must have the shapes of the first call. The function may write to its own tensors and to its inputs. It
    must not wait for the device.

    Args:
        function: function of tensors that returns a tuple of tensors.
        warm_up: calls of the function before it is recorded, in which libraries initialise themselves. 0 if the caller
            has made such calls and the function must not be called again.
        beside: another graph that is never replayed at the same time; both graphs share memory for intermediate
            results.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], warm_up: int = 3, beside: Captured | None = None):
        self._function, self._warm_up, self._beside = function, warm_up, beside
        self._graph: torch.cuda.CUDAGraph | None = None
        self._replay: Callable[[], None] | None = None
        self.inputs: list[Tensor] = []
        """Input tensors of the graph; a call copies each argument into its input tensor, unless both are one object."""
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the function's results; the next call overwrites them."""
        if self._replay is None:
            self.record(*inputs)
        assert self._replay is not None
        for own, new in zip(self.inputs, inputs, strict=True):
            if own is not new:
                own.copy_(new, non_blocking=True)
        self._replay()
        return self.outputs

    def record(self, *inputs: Tensor) -> None:
        """Record the function, as the first call does; on its own, with inputs for which warm-up calls are harmless."""
        self.inputs = [tensor.clone() for tensor in inputs]
        self._replay = self._record()

    def _record(self) -> Callable[[], None]:
        """Record the function of `inputs`, set `outputs`, and return the function that computes the outputs again."""
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
    """Compute float32 products of a GPU in TF32 or in float32 within the block, and restore the settings after it.

    Without this setting, cuDNN uses TF32 (in LSTMs).
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
