"""Where the time of a training step goes: matrix products, conversions and copies, the rest.

    python -m benchmarks.training_profile results/training-profile.json

The shapes are those of `benchmarks.peers`. Times are those that PyTorch's profiler gives each operation itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from benchmarks.record import write_if_asked
from torch.profiler import ProfilerActivity, profile

import txl
from txl.allocator import keep_freed_memory
from txl.benchmarking.workloads import transformer_xl_of
from txl.models.transformer_xl import TransformerXL
from txl.training.optimisers import build_optimizer
from txl.training.step import training_step

VOCABULARY, LANES, STEPS = 204, 4, 3
LENGTHS = (128, 512)
"""T = M."""
PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "copies and conversions": ("aten::copy_", "aten::cat", "aten::fill_"),
    "softmax and masks": ("aten::_softmax", "aten::_softmax_backward_data", "aten::masked_fill_"),
    "optimiser and clipping": ("aten::_fused_adam_", "aten::linalg_vector_norm", "aten::_foreach_mul_"),
}


def measure(length: int, dtype: str) -> dict[str, Any]:
    """Shares of one shape."""
    torch.manual_seed(0)
    run = txl.preset("enwik8-12L")
    shape = dataclasses.replace(transformer_xl_of(run), dropout=0.0, dropatt=0.0, mem_len=length)
    model = TransformerXL(shape, VOCABULARY).train()
    train = dataclasses.replace(run.train, batch_size=LANES, segment=length, dtype=dtype, micro_batches=1)
    optimizer = build_optimizer(model, train)
    states = [model.init_state(LANES).filled_with_noise()]

    def step() -> None:
        nonlocal states
        tokens = torch.randint(VOCABULARY, (LANES, length))
        states = training_step(model, optimizer, tokens, tokens, states, train).states

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
        "preset": "enwik8-12L",
        "batch_size": LANES,
        "segment": length,
        "memory": length,
        "dtype": dtype,
        "share": share,
    }


def main() -> None:
    """All shapes in both dtypes."""
    keep_freed_memory()
    rows = [measure(length, dtype) for length in LENGTHS for dtype in ("float32", "bfloat16")]
    for row in rows:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in row["share"].items())
        print(f"T = M = {row['segment']} {row['dtype']}: {shares}")
    write_if_asked("training_profile", {"rows": rows})


if __name__ == "__main__":
    main()
