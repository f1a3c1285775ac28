"""Measure the growth of a step's cost with T, M, layers, batch and vocabulary, and the machine's roofline.

    python -m benchmarks.scaling results/scaling.json

Every axis starts from one small model and doubles one size, with all other sizes fixed. Growth is time relative to the
first point of the axis, compared with the relative number of counted operations. Where the two ratios differ, costs
other than arithmetic matter. All measurements are made in one run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import txl
from txl.config import RunConfig
from txl_lab.records import measure_and_record
from txl_lab.speed import transformer_xl_of
from txl_lab.speed.operations import bytes_read_once, matmul_rate, read_bandwidth
from txl_lab.speed.workloads import Speed, bench_evaluation, bench_training

BASE = {"segment": 128, "memory": 128, "layers": 2, "batch": 2, "vocabulary": 204}
AXES = {
    "segment": (32, 64, 128, 256, 512, 1024),
    "memory": (128, 256, 512, 1024, 2048, 4096),
    "layers": (1, 2, 4, 8),
    "batch": (1, 2, 4, 8, 16),
    "vocabulary": (204, 2_000, 20_000, 200_000),
}
SIZES = (128, 256, 512, 1024, 2048)  # sizes of the square matrix products of the roofline
# Workloads of the full shape of enwik8-12L, which are compared with the roofline
WORKLOADS = {
    "one-token step": {"segment": 1, "memory": 2100, "batch": 1},
    "segment evaluation": {"segment": 80, "memory": 2100, "batch": 1},
    "training step": {"segment": 128, "memory": 128, "batch": 4},
}
STEPS = 5


def run_of(point: dict[str, int], dtype: str) -> RunConfig:
    """Return a configuration with enwik8-12L's widths at one point of the axes, without window, clamp or dropout."""
    run = txl.preset("enwik8-12L")
    shape = {"mem_len": point["memory"], "n_layer": point["layers"], "window": None, "clamp_len": None}
    model = dataclasses.replace(run.model, dropout=0.0, dropatt=0.0, dropout_r=0.0, **shape)
    lanes = {"batch_size": point["batch"], "segment": point["segment"]}
    train = dataclasses.replace(run.train, dtype=dtype, **lanes)
    test = dataclasses.replace(run.eval, mem_len=point["memory"], window=None, clamp_len=None, **lanes)
    return dataclasses.replace(run, model=model, train=train, eval=test)


def timed(kind: str, point: dict[str, int], dtype: str = "float32") -> Speed:
    """Time one workload at one point."""
    run = run_of(point, dtype)
    if kind == "training step":
        return bench_training(run, point["vocabulary"], STEPS, "cpu")
    return bench_evaluation(run, point["vocabulary"], STEPS, "cpu", dtype)


def growth(axis: str, values: tuple[int, ...]) -> list[dict[str, Any]]:
    """Measure the points of one axis, for a training step and for the evaluation of a segment."""
    rows = []
    for value in values:
        point = BASE | {axis: value}
        row: dict[str, Any] = {"axis": axis, "value": value}
        for kind in ("training step", "evaluation"):
            speed = timed(kind, point)
            row[kind] = {"seconds": speed.step_seconds, "operations": speed.operations_per_step}
        rows.append(row)
        print(row, flush=True)
    return rows


def roofline() -> dict[str, Any]:
    """Measure the matrix rates by size and precision, and the bandwidth of reading memory."""
    rates = {
        dtype: {size: matmul_rate(getattr(torch, dtype), "cpu", size) for size in SIZES}
        for dtype in ("float32", "bfloat16")
    }
    return {"matmul_rate": rates, "bandwidth": read_bandwidth()}


def workload(name: str) -> dict[str, Any]:
    """Measure one workload of enwik8-12L: its operations, the bytes that it has to read, and its time."""
    point = BASE | {"layers": txl.preset("enwik8-12L").model.n_layer} | WORKLOADS[name]
    speed = timed(name if name == "training step" else "evaluation", point)
    model = txl.TransformerXL(transformer_xl_of(run_of(point, "float32")), point["vocabulary"])
    return {
        "name": name,
        "operations": speed.operations_per_step,
        "bytes_read_once": bytes_read_once(model, point["memory"] * point["batch"]),
        "seconds": speed.step_seconds,
    }


def measure(most: str = f"{2**62}") -> dict[str, Any]:
    """Measure everything; `most` limits the values of an axis to a multiple of its first one."""
    machine, workloads = roofline(), [workload(name) for name in WORKLOADS]
    axes = {}
    for axis, values in AXES.items():
        axes[axis] = growth(axis, tuple(value for value in values if value <= int(most) * values[0]))
    return {"shape": "enwik8-12L's widths", "base": BASE, "roofline": machine, "workloads": workloads, "axes": axes}


if __name__ == "__main__":
    measure_and_record("scaling", measure)
