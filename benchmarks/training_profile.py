"""Measure the shares of a training step's time: matrix products, conversions and copies, the rest.

    python -m benchmarks.training_profile results/training-profile.json

The shapes are those of `benchmarks.peers` and of the demo, with the attention that is fastest on this machine. Times
are the operations' own times in PyTorch's profiler.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import txl
from txl.minutes.timing import training_workload
from txl_lab.records import measure_and_record
from txl_lab.speed import transformer_xl_of

STEPS = 5
# Preset, vocabulary, lanes, and T = M
SHAPES = (("enwik8-12L", 204, 4, 128), ("enwik8-12L", 204, 4, 512), ("stdlib-bpe", 2048, 16, 128))


def _operation(name: str) -> tuple[str, ...]:
    """Return all names under which the profiler lists an operation of the compiled library."""
    generated = f"GeneratedBackwardFor_txl_{name}_default"
    return f"txl::{name}", f"txl::{name}_backward", generated, f"{generated}Backward"


PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "mkldnn::_linear_pointwise"),
    "attention": _operation("attention"),
    "copies and conversions": ("aten::copy_", "aten::cat", "aten::fill_"),
    "norms of heads": _operation("rms_norm"),
    "loss": _operation("cross_entropy"),
    "optimiser and clipping": ("aten::_fused_adam_", "aten::linalg_vector_norm", "aten::_foreach_mul_"),
}


def profiled(preset: str, vocab_size: int, lanes: int, length: int, dtype: str) -> dict[str, Any]:
    """Return the shares for one shape."""
    run = txl.preset(preset)
    changed = {"dropout": 0.0, "dropatt": 0.0, "mem_len": length, "attention": "fastest"}
    run.model = dataclasses.replace(transformer_xl_of(run), **changed)
    run.train = dataclasses.replace(
        run.train, batch_size=lanes, segment=length, dtype=dtype, micro_batches=1, optimizer="adam"
    )
    model, step = training_workload(run, vocab_size, "cpu")
    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            step()
    seconds = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    total = sum(seconds.values())
    share = {part: sum(seconds.get(name, 0) for name in names) / total for part, names in PARTS.items()}
    share["rest"] = 1 - sum(share.values())
    return {
        "preset": preset,
        "batch_size": lanes,
        "segment": length,
        "memory": length,
        "dtype": dtype,
        "attention": model.attention_name,
        "share": share,
    }


def touch_memory() -> None:
    """Make the process own more memory than a step needs.

    The profiler allocates memory between the steps' buffers. These buffers would then cause page faults in every step,
    which does not happen without a profiler.
    """
    parts = [torch.zeros(1 << 24) for _ in range(48)]
    del parts


def measure() -> dict[str, Any]:
    """Measure all shapes in both dtypes."""
    touch_memory()
    return {"rows": [profiled(*shape, dtype) for shape in SHAPES for dtype in ("float32", "bfloat16")]}


if __name__ == "__main__":
    measure_and_record("training_profile", measure)
