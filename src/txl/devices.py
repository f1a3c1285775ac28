"""The devices that compute: choice of one, copies to GPUs and recorded functions on them, the CPU and its memory.

A program launches kernels on a GPU and continues at once. Reading a number from the GPU waits for all kernels launched
before.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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


def compute_capability(device: torch.device | str | None) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU of this machine, such as (9, 0); None for any other device."""
    try:
        place = torch.device(device or "cpu")
    except RuntimeError:  # no name of a device, which `check_device` refuses
        return None
    if place.type != "cuda" or torch.version.cuda is None or (place.index or 0) >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_capability(place)


def records_on(device: torch.device) -> bool:
    """Return whether functions of tensors on a device can be `Captured`: on the current NVIDIA GPU."""
    return device.type == "cuda" and device.index == torch.cuda.current_device()


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


@functools.cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """Return a GPU's stream for recordings, one for all: graphs share memory only within one stream."""
    return torch.cuda.Stream(device)


class Captured:
    """Function of tensors on the current GPU, recorded as a CUDA graph and replayed: hundreds of kernels, one launch.

    All calls must have the shapes of the first call. The function may write to its own tensors and to its inputs. It
    must not wait for the device.

    Args:
        function: what is recorded.
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
        """Set `outputs`, and return the function that computes them again from `inputs`."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(self._warm_up):
                self._function(*self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        pool = None if self._beside is None or self._beside._graph is None else self._beside._graph.pool()
        # What Python's collector of cycles destroys may wait for the device, which would spoil the recording.
        stream, collects = _recording_stream(torch.cuda.current_device()), gc.isenabled()
        gc.disable()
        try:
            # PyTorch's own stream for recordings is that of the first GPU that recorded.
            with torch.cuda.graph(self._graph, pool, stream, capture_error_mode="thread_local"):
                self.outputs = self._function(*self.inputs)
        finally:
            if collects:
                gc.enable()
        return self._graph.replay


@contextmanager
def awaited(device: torch.device) -> Iterator[None]:
    """Wait for a GPU at the end of the block, also after an error: recorded steps must not be destroyed as they run."""
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


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


def keep_freed_memory() -> bool:
    """Tell glibc to keep the buffers that a step frees, instead of returning them to the system.

    By default glibc maps each large buffer again at every step; the page faults take up to a third of a training step
    on a CPU. The setting affects the whole process, so programs call this function and importing `txl` does not.

    Returns:
        True if glibc accepted the setting; False if it did not, or if the C library is not glibc.
    """
    library, largest = _glibc(), 2**31 - 1
    # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
    return library is not None and all([library.mallopt(-3, largest), library.mallopt(-1, largest)])


def return_freed_memory() -> None:
    """Return the memory that is free now to the system, also after `keep_freed_memory`; without glibc, do nothing."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "gnu_get_libc_version") else None


def cpu_lines() -> list[str]:
    """Return the lines of /proc/cpuinfo, of all cores; empty on other systems, or if the file is hidden."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def cpu_fields() -> dict[str, str]:
    """Return the fields of the last core."""
    fields = (line.split(":", 1) for line in cpu_lines() if ":" in line)
    return {key.strip(): value.strip() for key, value in fields}


def cpu_flags() -> frozenset[str]:
    """Return the names of the processor's instruction sets and other features, such as avx2."""
    return frozenset(cpu_fields().get("flags", "").split())
