"""The kernels of a step on a GPU: launches and time by kernel and by class, each kernel counted once.

The profiler's trace is read, not its table of averages: that also holds ranges of annotations (`Optimizer.step#...`),
whose kernels would count twice. A replayed CUDA graph launches its nodes, so for a recorded step the launches are the
number of nodes of its graph, and copies of inputs beside it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from txl.training.timing import synchronize

SOURCES = Path(__file__).parent.parent / "src" / "txl"
# The first class whose expression is found in a kernel's name is its class; kernels of this project come before these.
CLASSES = {
    "matrix products": r"gemm|nvjet|cutlass|gemv|splitK|xmma|cublas",
    "softmax and loss": r"softmax|nll_loss|cross_entropy",
    "layer norm": r"layer_norm|LayerNorm|GammaBeta",
    "dropout": r"dropout|bernoulli|distribution_",
    "optimiser and clip": r"multi_tensor|[Aa]dam|lpnorm|foreach",
    "reductions": r"reduce_kernel",
    "fills": r"Memset|[Ff]ill",
    "copies from and to the host": r"HtoD|DtoH|Host",
    "casts and copies": r"copy|Memcpy|CatArray",
    "index": r"index|gather|scatter|[Ee]mbedding",
    "compiled by torch.compile": r"^triton_",
    "elementwise": r"elementwise|Elementwise",
}


def own_kernels() -> dict[str, str]:
    """Return the names of this project's Triton kernels, and the file of each."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        for name in re.findall(r"^@triton\.jit.*\ndef (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = path.stem
    return found


def class_of(kernel: str, own: dict[str, str]) -> str:
    """Return the class of a kernel by its name."""
    if kernel in own:
        return own[kernel]
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, kernel)), "others")


def kernels_of(step: Callable[[], Any], device: str) -> list[tuple[str, float]]:
    """Return name and microseconds of each kernel, copy and fill that a step launches; on a CPU its operators."""
    on_gpu = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    synchronize(device)
    with profile(activities=activities) as profiler:
        step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    return [(event["name"], float(event["dur"])) for event in events if event.get("cat") in kinds]


def table_of(kernels: list[tuple[str, float]], most: int = 40) -> dict[str, Any]:
    """Return launches and microseconds: of all, of each class, and of the `most` kernels that take longest."""
    launches, times = Counter[str](), defaultdict[str, float](float)
    own, classes = own_kernels(), dict[str, list[float]]()
    for name, microseconds in kernels:
        launches[name] += 1
        times[name] += microseconds
    for name, microseconds in times.items():
        of_class = classes.setdefault(class_of(name, own), [0, 0.0])
        of_class[0] += launches[name]
        of_class[1] += microseconds
    return {
        "launches": sum(launches.values()),
        "microseconds": sum(times.values()),
        "classes": [
            {"class": name, "launches": count, "microseconds": microseconds}
            for name, (count, microseconds) in sorted(classes.items(), key=lambda item: -item[1][1])
        ],
        "kernels": [
            {"name": name, "launches": launches[name], "microseconds": microseconds}
            for name, microseconds in sorted(times.items(), key=lambda item: -item[1])[:most]
        ],
    }
