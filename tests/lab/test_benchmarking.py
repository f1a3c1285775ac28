"""The formula counts the operations that a model performs; `txl bench` prints all promised results."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from txl.attention import KeyScope
from txl.cli import main
from txl.config import TransformerXLConfig
from txl.devices import keep_freed_memory, return_freed_memory
from txl.errors import UserError
from txl.models import build_model
from txl.models.loss import Objective
from txl.native.build import compiled_code
from txl_lab.speed.operations import forward_operations, matmul_rate, read_bandwidth, training_operations, visible_pairs

SHAPE = TransformerXLConfig(n_layer=3, d_model=14, n_head=3, d_head=5, d_inner=22, mem_len=11, dropout=0.0)
V, B, T = 19, 2, 7


def products(counted: FlopCounterMode) -> dict[str, int]:
    """Return the operations of attention's batched products, and those of all others."""
    found = {"attention": 0, "others": 0}
    for operator, count in counted.get_flop_counts()["Global"].items():
        found["attention" if "bmm" in str(operator) else "others"] += count
    return found


def expected(forward: int, batch_size: int, memory: int) -> dict[str, int]:
    """Return what `products` finds in a forward pass: masked pairs are multiplied, and a column of padding."""
    width = 2 * batch_size * SHAPE.n_head * SHAPE.d_head * SHAPE.n_layer
    return {
        "attention": width * (3 * T * (memory + T) + T),
        "others": forward - 3 * width * visible_pairs(T, memory),
    }


@pytest.mark.parametrize(("memory", "window"), [(0, None), (11, None), (11, 1), (11, 9), (11, 30), (0, 3)])
def test_visible_pairs_are_those_of_the_mask(memory, window):
    assert visible_pairs(T, memory, window) == KeyScope(memory, window).mask(T).sum()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("memory", "n_softmax"), [(0, 1), (11, 1), (11, 3)])
def test_the_formula_counts_what_a_profiler_counts(memory, n_softmax, frozen):
    shape = dataclasses.replace(SHAPE, n_softmax=n_softmax)
    model = build_model(shape, V).train(not frozen)
    state = model.init_state(B)
    if memory:
        state = state.filled_with_noise()
    tokens = torch.randint(V, (B, T))
    with torch.no_grad(), compiled_code(False):  # PyTorch's profiler does not count compiled code
        _, state = model.nll(tokens, tokens, state)  # frozen: caches keys, values and W_kR R
        with FlopCounterMode(display=False) as forward:
            model.nll(tokens, tokens, state if memory else model.init_state(B))
    counted = expected(forward_operations(shape, V, B, T, memory, frozen=frozen), B, memory)
    # An empty memory has no W_kR R cached yet.
    counted["others"] += SHAPE.n_layer * 2 * T * SHAPE.d_model * 15 if frozen and not memory else 0
    assert products(forward) == counted


@pytest.mark.parametrize("loss_name", ["full", "half", "last"])
@pytest.mark.parametrize("memory", [0, 11])
def test_a_training_step_has_three_forward_passes_less_gradients_of_constants(loss_name, memory):
    shape = dataclasses.replace(SHAPE, attention="shifted")
    model, objective = build_model(shape, V), Objective(loss_name)
    tokens, state = torch.randint(V, (B, T)), model.init_state(B)
    with FlopCounterMode(display=False) as both:
        state = state.filled_with_noise() if memory else state
        model.training_loss(tokens, tokens, state, objective)[0].backward()
    counted, scored = products(both), objective.counted(T)
    attention, others = expected(forward_operations(shape, V, B, T, memory, scored=scored), B, memory).values()
    assert counted["attention"] == 3 * attention
    of_memory = SHAPE.n_layer * 2 * B * memory * SHAPE.d_model * 15 * 2
    of_positions = SHAPE.n_layer * 2 * (memory + T) * SHAPE.d_model * 15
    assert counted["others"] == 3 * others - of_memory - of_positions
    useful = counted["others"] + 3 * SHAPE.n_layer * 2 * B * 15 * 3 * visible_pairs(T, memory)
    assert training_operations(shape, V, B, T, memory, scored=scored) == useful
    assert training_operations(shape, V, B, T, memory, scored=scored, learned=memory) == useful + of_memory


def test_the_useful_work_of_the_paper_s_smallest_model():
    """By hand: 12 layers of 0.2373 for their products and 0.0798 for attention, and 0.0071 for the softmax, in 1e12."""
    shape = TransformerXLConfig(n_layer=12, d_model=512, n_head=8, d_head=64, d_inner=2048, mem_len=512)
    assert training_operations(shape, 204, 22, 512, 512) == pytest.approx(3.812e12, rel=1e-3)


def test_models_that_the_formula_does_not_describe_are_refused():
    for shape in (TransformerXLConfig(cutoffs=(3,)), TransformerXLConfig(d_embed=8)):
        with pytest.raises(UserError, match="plain softmax"):
            forward_operations(shape, 100, 1, 1, 0)


def test_memory_is_full_and_of_the_model_s_dtype():
    model = build_model(SHAPE, V).double()
    state = model.init_state(B, window=5).filled_with_noise()
    assert (state.length, state.hidden[0].dtype) == (4, torch.float64)


def test_the_rates_are_rates():
    assert matmul_rate(torch.float32, "cpu", size=64, seconds=0.01) > 1e6
    assert read_bandwidth("cpu", size=1 << 16) > 1e7


@pytest.mark.parametrize("workload", ["train", "eval"])
def test_a_bench_tells_speed_fraction_and_circumstances(workload, capsys):
    words = ["bench", workload, "stdlib-tiny", "--steps", "1", "--dtype", "float32", "--json"]
    small = ["--model.n-layer=1", "--model.mem-len=16"]
    small += (
        ["--train.batch-size=2", "--train.segment=8"]
        if workload == "train"
        else ["--eval.mem-len=16", "--eval.window=16"]
    )
    assert main([*words, *small]) == 0
    printed = json.loads(capsys.readouterr().out)
    (result,) = printed["results"]
    assert result["tokens_per_second"] == pytest.approx(
        result["batch_size"] * result["segment"] / result["step_seconds"]
    )
    assert 0 < result["fraction_of_matmul_rate"] < 1.5
    assert result["mem_len"] == (16 if workload == "train" else 15)
    assert printed["hardware"]["cores"] >= 1
    assert printed["config"]["model"]["n_layer"] == 1


def test_with_freed_memory_kept_training_steps_cause_no_page_faults():
    code = """
import resource, sys, torch
from txl.devices import keep_freed_memory
from txl.config import TrainConfig, TransformerXLConfig
from txl.models import build_model
from txl.training.optimisers import build_optimizer
from txl.training.step import StepInputs, training_step
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
config = TrainConfig()
model = build_model(TransformerXLConfig(n_layer=2, d_model=128, n_head=8, d_head=16, d_inner=256, mem_len=256), 64)
optimizer, states = build_optimizer(model, config), [model.init_state(4)]
faults = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tokens = torch.randint(64, (4, 256))
    states = training_step(model, optimizer, StepInputs(tokens, tokens, states), config).states
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(kept), sum(faults[6:]))
"""
    found = {}
    for mode in ("keep", "default"):
        done = subprocess.run([sys.executable, "-c", code, mode], capture_output=True, text=True, check=True)
        found[mode] = [int(part) for part in done.stdout.split()]
    if not found["keep"][0]:
        pytest.skip("this C library is not glibc")
    assert found["keep"][1] < found["default"][1] / 4  # measured: 1/60 to 1/10


def test_freed_memory_that_was_kept_can_be_returned():
    code = """
import re
from txl.devices import keep_freed_memory, return_freed_memory
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
kept, before = keep_freed_memory(), resident()
data = [bytearray(1 << 20) for _ in range(200)]
last = bytearray(1 << 20)
del data
freed = resident()
return_freed_memory()
print(int(kept), freed - before, resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, freed, returned = map(int, done.stdout.split())
    if not kept:
        pytest.skip("this C library is not glibc")
    assert freed > 190
    assert returned < 20


def test_keep_freed_memory_says_no_elsewhere(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert keep_freed_memory() is False
    return_freed_memory()


def test_table9_measures_both_models_at_every_length(capsys):
    small = ["--model.n-layer", "2", "--model.d-model", "16", "--model.n-head", "2", "--model.d-head", "8"]
    words = ["bench", "table9", "--lengths", "800,60", "--segment", "16", "--steps", "1", *small]
    assert main([*words, "--model.d-inner", "32", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["attention_length"] for row in found["results"]] == [800, 60]
    assert [row["published"] for row in found["results"]] == [363, None]
    for row in found["results"]:
        assert row["ratio"] == pytest.approx(row["vanilla_seconds"] / row["transformer_xl_seconds"])
        assert row["ratio"] > 1
    # 2 layers, E 16, A 16, F 32, V 204; frozen weights; all pairs of 800 tokens; one position of the softmax.
    layer = 800 * (4 * 2 * 16 * 16 + 2 * 2 * 16 * 32) + 2 * 2 * 16 * (800 * 801 // 2)
    assert found["results"][0]["vanilla_operations"] == 2 * layer + 2 * 16 * 204
    assert main([*words, "--model.d-inner", "32", "--device", "cpu"]) == 0
    assert "363 in the paper" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--lengths", "0"], ["--segment", "0"], ["--steps", "0"], ["enwik8-vanilla-12L"], ["--lengths", "x"]]
)
def test_table9_refuses_what_cannot_be_measured(words, capsys):
    assert main(["bench", "table9", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
