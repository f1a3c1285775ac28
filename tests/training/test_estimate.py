"""Estimates of --dry-run, compared with the models themselves and with the memory that the system reports."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import pytest
import torch
from tests.forking import SERVER

from txl.config import RunConfig, with_options
from txl.models import build_model
from txl.native import build
from txl.presets import presets
from txl.training.estimate import estimate, parameters_by_part
from txl.training.optimisers import build_optimizer, optimizer_tensors
from txl.training.state import WeightAverage
from txl.training.step import StepInputs, training_step
from txl_lab.speed.budget import peak_bytes

M_MMAP_THRESHOLD = -3
"""Number of the setting in glibc's malloc.h."""


def train(run: RunConfig, steps: int, vocab_size: int) -> None:
    torch.manual_seed(0)
    model, train = build_model(run.model, vocab_size).train(), run.train
    if train.dtype == "float64":
        model.double()
    optimizer = build_optimizer(model, train)
    states = [model.init_state(train.batch_size // train.micro_batches) for _ in range(train.micro_batches)]
    average = None if train.average_from is None else WeightAverage(model)
    for _ in range(steps):
        tokens = torch.randint(256, (train.batch_size, train.segment))
        if average is not None:
            average.prepare()
        states = training_step(model, optimizer, StepInputs(tokens, tokens, states, average=average), train).states


def kilobytes(name: str) -> int:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))


def measure(options: dict[str, str], vocab_size: int, measured: Any) -> None:
    """Send the peak memory of this process, less its memory after training a tiny model, in bytes."""
    # Every large tensor gets a mapping of its own, so the system counts the live tensors, without fragmentation.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    torch.set_num_threads(1)
    run = with_options(RunConfig(), options)
    small = {"model.n_layer": "1", "model.d_model": "8", "model.d_inner": "8", "train.segment": "4"}
    small["model.mem_len"] = str(min(4, run.model.lengths().mem_len))
    if run.model.constant_state:
        small = {"model.d_model": "8", "model.d_hidden": "8", "train.segment": "4"}
    train(with_options(run, small), 2, 256)
    before = kilobytes("VmRSS")
    lengths = run.model.lengths()
    train(run, 2 + -(-lengths.capacity // run.train.segment), vocab_size)  # until memory is full, and a step more
    measured.put(1024 * (kilobytes("VmHWM") - before))


SHAPE = {
    "model.n_layer": "4",
    "model.d_model": "128",
    "model.n_head": "4",
    "model.d_head": "32",
    "model.mem_len": "128",
    "train.segment": "128",
}
CASES = {
    "dropout everywhere": {"model.d_inner": "512", "model.dropatt": "0.1", "train.batch_size": "8"},
    "compiled attention": {
        "model.d_inner": "128", "model.attention": "compiled", "model.dropout": "0", "model.mem_len": "600",
        "train.batch_size": "8",
    },
    "two parts, float64": {
        "model.d_inner": "512", "train.batch_size": "12", "train.micro_batches": "2", "train.dtype": "float64",
    },
    "normalised heads, bfloat16": {
        "model.d_inner": "128", "model.d_head": "64", "model.qk_norm": "true", "model.dropout": "0",
        "train.batch_size": "8", "train.dtype": "bfloat16",
    },
    "large vocabulary": {"train.batch_size": "8", "train.average_from": "0"},
    "vanilla, dropout inside the feed-forward alone": {
        "model.encoding": "learned", "model.mem_len": "0", "model.d_inner": "1024", "model.dropout": "0",
        "model.dropout_inner": "0.5", "train.batch_size": "16",
    },
}  # fmt: skip
RECURRENT = {
    "model.mem_len": "0", "model.d_hidden": "384", "model.d_model": "128", "model.n_layer": "3",
    "train.batch_size": "32", "train.segment": "128",
}  # fmt: skip
RECURRENT_CASES = {
    "awd-lstm": {"model.kind": "lstm", "model.weight_drop": "0.5", "model.locked_dropout": "true"},
    "qrnn, wide kernels": {"model.kind": "qrnn", "model.kernel_sizes": "4", "model.weight_drop": "0.1"},
    "SGD with momentum": {
        "model.kind": "lstm", "model.d_hidden": "1024", "train.batch_size": "4", "train.optimizer": "sgd",
        "train.momentum": "0.9",
    },
}  # fmt: skip
TOLERANCE = 0.15
KEPT_BY_LIBRARY = 22 * 2**20
"""Most bytes that oneDNN keeps for products in bfloat16, for models of any size; 17 to 19 MB on EPYCs with AVX512-BF16."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs /proc and glibc's mallopt")
@pytest.mark.parametrize("case", [*CASES, *RECURRENT_CASES])
def test_memory_is_what_a_run_takes(case):
    options = SHAPE | CASES[case] if case in CASES else RECURRENT | RECURRENT_CASES[case]
    vocab_size = 100_000 if case == "large vocabulary" else 256
    measured = SERVER.SimpleQueue()
    process = SERVER.Process(target=measure, args=(options, vocab_size, measured))
    process.start()
    process.join()
    assert process.exitcode == 0
    estimated = estimate(with_options(RunConfig(), options), vocab_size).total_bytes
    kept = KEPT_BY_LIBRARY if options.get("train.dtype") == "bfloat16" else 0
    assert estimated == pytest.approx(measured.get(), rel=TOLERANCE, abs=kept)


def test_the_attention_of_the_device_is_counted():
    run = with_options(RunConfig(), SHAPE | {"model.attention": "fastest"})
    shifted = estimate(with_options(run, {"model.attention": "shifted"}), 256).total_bytes
    assert estimate(run, 256, "cuda").total_bytes == shifted
    if build.why_not() is None:
        assert estimate(run, 256, "cpu").total_bytes < shifted


@pytest.mark.parametrize(
    "options",
    [
        {"train.optimizer": "adam"},
        {"train.optimizer": "adamw"},
        {"train.optimizer": "sgd"},
        {"train.optimizer": "sgd", "train.momentum": "0.9"},
        {"train.optimizer": "muon"},
    ],
)
def test_the_optimiser_keeps_what_its_kind_keeps(options):
    run = with_options(RunConfig(), SHAPE | options)
    model = build_model(run.model, 256)
    optimizer = build_optimizer(model, run.train)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = optimizer_tensors(optimizer, model)
    kept = [value for name, value in tensors.items() if not name.endswith("/step")]
    assert estimate(run, 256).memory_bytes["optimiser"] == sum(each.nbytes for each in kept)


def test_layers_beyond_the_third_are_like_the_third():
    """Only two and three layers are traced. With few tokens gradients would grow as fast as activations are freed."""
    run = with_options(RunConfig(), SHAPE | {"model.cutoffs": "100", "train.batch_size": "16", "model.n_layer": "5"})
    assert estimate(run, 256).total_bytes == pytest.approx(peak_bytes(run, 256), rel=0.02)


@pytest.mark.parametrize("name", ["enwik8-12L", "enwik8-24L"])
def test_parts_add_up_to_the_published_parameter_counts(name):
    costs = estimate(presets()[name].make(), presets()[name].vocab_size)
    assert costs.total_parameters == {"enwik8-12L": 41_055_436, "enwik8-24L": 277_231_820}[name]
    assert costs.tokens_per_step == {"enwik8-12L": 22 * 512, "enwik8-24L": 64 * 768}[name]


def test_each_parameter_is_counted_where_it_belongs():
    options = {
        "model.n_layer": "3", "model.d_model": "10", "model.n_head": "2", "model.d_head": "7", "model.d_inner": "13",
        "model.untie_r": "true", "model.cutoffs": "5,11", "model.div_val": "2", "model.tie_projections": "none",
    }  # fmt: skip
    model = build_model(with_options(RunConfig(), options).model, 17)
    assert parameters_by_part(model) == {
        "embedding": 5 * 10 + 6 * 5 + 6 * 2 + 10 * (10 + 5 + 2),
        "attention": 3 * 5 * 10 * 14,
        "u and v": 3 * 2 * 2 * 7,
        "feed-forward": 3 * (10 * 13 + 13 + 13 * 10 + 10),
        "layer norm": 3 * 2 * 2 * 10,
        "softmax": 17 + 2 * 10 + 2 + 10 * (10 + 5 + 2),
    }


def test_a_recorded_step_keeps_activations_of_its_own():
    run = with_options(RunConfig(), SHAPE)
    recorded = with_options(run, {"train.capture": "true"})
    parts, beside = (estimate(each, 256).memory_bytes for each in (recorded, run))
    assert parts == beside | {"activations": 2 * beside["activations"]}
