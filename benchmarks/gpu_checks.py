"""Rows of `benchmarks.gpu` that check numbers on a GPU: gradients, equal bits, bfloat16 beside float32, first steps.

Shapes: B lanes, T tokens of a segment, M positions of memory.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_rows import Bench, Figures, TrainingCase
from torch import Tensor

import txl
from txl.config import ModelConfig, TransformerXLConfig, with_options
from txl.data.user_text import stdlib_files
from txl.evaluation import recorded
from txl.evaluation.perplexity import evaluate_with
from txl.evaluation.recorded import Recordings
from txl.evaluation.stream import Settings
from txl.models import build_model
from txl.models.family import FamilyModel
from txl.models.loss import Objective
from txl.runs.directory import RunDirectory
from txl.training.compilation import CapturedStep
from txl.training.optimisers import build_optimizer
from txl.training.step import StepInputs
from txl.training.trainer import Trainer
from txl_lab.speed import transformer_xl_of
from txl_lab.speed.budget import ranked_tokens

# B, T, and the fields of a small model. "partly" has a lane whose memory is half full, "first" none that is filled.
SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "enwik8": (3, 64, {"d_model": 128, "n_head": 2, "d_head": 64, "d_inner": 256, "mem_len": 64}),
    "ptb": (5, 70, {"d_model": 76, "n_head": 2, "d_head": 38, "d_inner": 142, "mem_len": 70}),
    "wt103": (2, 50, {"d_model": 82, "n_head": 2, "d_head": 41, "d_inner": 300, "mem_len": 50, "cutoffs": (20, 60)}),
    "first": (2, 37, {"d_model": 76, "n_head": 2, "d_head": 38, "d_inner": 142, "mem_len": 70}),
    "partly": (3, 64, {"d_model": 128, "n_head": 2, "d_head": 64, "d_inner": 256, "mem_len": 96}),
    "window": (2, 100, {"d_model": 64, "n_head": 1, "d_head": 64, "d_inner": 128, "mem_len": 60, "window": 45}),
    "wide": (2, 64, {"d_model": 256, "n_head": 2, "d_head": 128, "d_inner": 384, "mem_len": 64}),
}
V = 100
# Largest relative error of a parameter's gradient, and in bfloat16 its largest multiple of that of `shifted`.
FLOAT32_ERROR, BFLOAT16_ERROR, BFLOAT16_RATIO = 1e-3, 0.02, 2.0


def gradients(bench: Bench, shape: str, seeds: int = 3) -> Figures:
    """Compare the gradients of all parameters of a small model, by `triton` and by `shifted`, with float64 on a CPU.

    The error of a parameter's gradient is the norm of the difference, divided by the norm of the gradient in float64,
    or by a thousandth of the norm of the whole gradient where that is larger.
    """
    lanes, segment, fields = SHAPES[shape]
    plain = TransformerXLConfig(n_layer=3, dropout=0.0, dropatt=0.0, attention="shifted", **fields)
    worst: dict[str, dict[str, Any]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        exact = build_model(plain, V, "cpu").train()
        with torch.no_grad():
            for parameter in exact.parameters():  # biases and norms begin as zeros and ones, which hide mistakes
                parameter += 0.1 * torch.randn_like(parameter) * (parameter.std() if parameter.ndim > 1 else 1)
        weights, tokens = exact.state_dict(), torch.randint(V, (lanes, segment + 1))
        noise = exact.init_state(lanes).filled_with_noise().to_tensors()
        true = _gradients(exact.double(), tokens, shape, noise, "float64")
        scale = 1e-3 * torch.stack([each.norm() for each in true.values()]).norm()
        for dtype in ("float32", "bfloat16"):
            for attention in ("shifted", "triton"):
                config = dataclasses.replace(plain, attention=bench.attention(attention))
                model = build_model(config, V, bench.device, getattr(torch, dtype)).to(bench.device).train()
                model.load_state_dict(weights)
                found = _gradients(model, tokens, shape, noise, dtype)
                for name, gradient in true.items():
                    error = ((found[name] - gradient).norm() / max(gradient.norm(), scale)).item()
                    before = worst.get(f"{attention} {dtype}", {"error": -1.0})
                    if not error <= before["error"]:  # also if it is not a number
                        worst[f"{attention} {dtype}"] = {"error": error, "of": name, "seed": seed}
    errors = {name: row["error"] for name, row in worst.items()}
    limit = max(BFLOAT16_ERROR, BFLOAT16_RATIO * errors["shifted bfloat16"])
    agree = errors["triton float32"] <= FLOAT32_ERROR and errors["triton bfloat16"] <= limit
    return {"worst": worst, "agree": int(agree), "failures": [] if agree else [f"gradients of {shape}: {worst}"]}


def _gradients(
    model: FamilyModel, tokens: Tensor, shape: str, noise: dict[str, Tensor], dtype: str
) -> dict[str, Tensor]:
    """Return the loss, its gradients by parameter, and the new memory, all in float64 on the CPU."""
    device, lanes = next(model.parameters()).device, len(tokens)
    state = model.init_state(lanes)
    if shape != "first":
        state = state.filled_with_noise()
        for own, given in zip(state.to_tensors().values(), noise.values(), strict=True):
            own.copy_(given)
    if shape == "partly":
        read = torch.zeros(lanes, dtype=torch.bool)
        read[1] = True
        _, state = model.eval().nll(tokens[:, :40].to(device), tokens[:, 1:41].to(device), state.reset(read))
        state = state.detach()
        model.train()
    inputs, targets = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        loss, penalty, state = model.training_terms(inputs, targets, state, Objective("full"))
    (loss + penalty).backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    found |= {f"memory {name}": each for name, each in state.to_tensors().items() if each.is_floating_point()}
    return {name: each.detach().double().cpu() for name, each in ({"loss": loss} | found).items()}


def equal_bits(bench: Bench, preset: str, dtype: str = "bfloat16") -> Figures:
    """Make twelve steps twice, with dropout, the last ones recorded, and compare all weights bit by bit."""
    ends = list[dict[str, Tensor]]()
    for _ in range(2):
        run = bench.run(preset, dtype=dtype)
        own = run.model if bench.rehearsed else dataclasses.replace(transformer_xl_of(txl.preset(preset)), n_layer=3)
        run.model = dataclasses.replace(own, dropout=0.1, dropatt=0.1, attention=bench.attention("triton"))
        case = TrainingCase(bench, run, bench.vocabulary(preset), captured=True)
        for _ in range(12):
            case.step()
        ends.append({name: each.detach().cpu() for name, each in case.model.state_dict().items()})
    # As bits, because a value that is not a number differs from itself.
    unequal = [
        name
        for name, each in ends[0].items()
        if not torch.equal(each.view(torch.uint8), ends[1][name].view(torch.uint8))
    ]
    finite = all(bool(each.isfinite().all()) for each in ends[0].values())
    failures = [f"two runs differ in {len(unequal)} of {len(ends[0])} tensors: {unequal[:5]}"] if unequal else []
    failures += [] if finite else ["weights are not finite"]
    return {"tensors": len(ends[0]), "unequal": len(unequal), "failures": failures}


def beside_float32(bench: Bench, steps: int = 200) -> Figures:
    """Train a small model without dropout in bfloat16 with `triton`, and in float32 with `shifted`, from one seed."""
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        sources = b"".join(file.read_bytes() for file in stdlib_files())[: 60_000 if bench.rehearsed else 3_000_000]
        text.write_bytes(sources.decode("utf-8", "ignore").encode())
        for dtype, attention in (("bfloat16", "triton"), ("float32", "shifted")):
            run = bench.run("enwik8-12L", dtype=dtype, batch_size=4)
            if not bench.rehearsed:
                run.model = dataclasses.replace(run.model, n_layer=4)
            run.model = dataclasses.replace(run.model, attention=bench.attention(attention))
            options = {"steps": 4 if bench.rehearsed else steps, "warmup_steps": 20, "learning_rate": 5e-4}
            options |= {"eval_every": 1000, "eval_tokens": 2_000 if bench.rehearsed else 100_000, "capture": "true"}
            options |= {"checkpoint_every": 0}
            run = with_options(run, {f"train.{name}": str(value) for name, value in options.items()})
            run.data = txl.config.DataConfig(corpus=str(text), unit="byte")
            out = Path(folder) / dtype
            Trainer(run, out, device=bench.device, data_dir=Path(folder) / "data", quiet=True).fit()
            losses[dtype] = next(each["nll"] for each in RunDirectory(out).events() if each["event"] == "valid")
    difference = abs(losses["bfloat16"] - losses["float32"])
    failures = [] if difference < 0.01 else [f"after {steps} steps bfloat16 is {difference:.4f} nats from float32"]
    return {"nll": losses, "difference": difference, "failures": failures}


def first_steps(bench: Bench, seeds: int = 4) -> Figures:
    """Return the gradient norms of the first steps of `ptb`, from empty memory on: eager, then recorded."""
    norms, failures = list[list[float]](), list[str]()
    for seed in range(1, seeds + 1):
        run = bench.run("ptb", capture=True)
        own = run.model if bench.rehearsed else transformer_xl_of(txl.preset("ptb"))
        words = {"dropout_words": 0.2, "locked_dropout": True}
        run.model = dataclasses.replace(own, attention=bench.attention("triton"), **words)
        torch.manual_seed(seed)
        model = build_model(run.model, bench.vocabulary("ptb"), bench.device).to(bench.device).train()
        optimizer, step = build_optimizer(model, run.train), CapturedStep()
        states, of_seed = [model.init_state(run.train.batch_size)], list[float]()
        optimizer.set_rate(1e-6)
        for _ in range(7):
            tokens = ranked_tokens(model.vocab_size, run.train.batch_size, run.train.segment).to(bench.device)
            output = step(model, optimizer, StepInputs(tokens, tokens, states), run.train)
            states = output.states
            of_seed.append(output.result().grad_norm)
        norms.append(of_seed)
        if not all(norm < 100 for norm in of_seed):
            failures.append(f"gradient norms of seed {seed}: {of_seed}")
    return {"norms": norms, "largest": max(max(of_seed) for of_seed in norms), "failures": failures}


def evaluation(bench: Bench) -> Figures:
    """Time evaluations of Penn Treebank's 73,760 validation tokens as the preset trains: recorded, and a tenth eagerly.

    Losses of recorded and eager steps are compared: in float32 both call the modules, in bfloat16 recorded steps use
    the kernels of fused layers.
    """
    run = txl.preset("ptb")
    shape: ModelConfig = bench.run("ptb").model if bench.rehearsed else run.model
    torch.manual_seed(0)
    model = build_model(shape, bench.vocabulary("ptb"), bench.device, torch.bfloat16).to(bench.device)
    whole = 2_000 if bench.rehearsed else 73_760
    tokens = ranked_tokens(model.vocab_size, 1, whole)[0].numpy()
    segment = run.eval.segment
    memory = shape.mem_len + run.train.segment - segment
    settings = Settings(segment, memory, "none", batch_size=run.train.eval_batch_size or 10)
    seconds, differences, failures = dict[str, float](), dict[str, float](), list[str]()
    allowed = recorded.records
    for dtype, most in (("float32", 1e-5), ("bfloat16", 5e-3)):
        tenth = dataclasses.replace(settings, dtype=dtype, max_tokens=whole // 10)
        recorded.records = lambda model: False
        try:
            eager = evaluate_with(model, tokens, tenth)
        finally:
            recorded.records = allowed
        result = evaluate_with(model, tokens, tenth)
        seconds |= {f"tenth, eager {dtype}": eager.seconds, f"tenth, recorded {dtype}": result.seconds}
        differences[dtype] = abs(result.nll - eager.nll)
        if not differences[dtype] < most * eager.nll:
            failures.append(f"{dtype}: recorded steps have a loss of {result.nll}, eager steps of {eager.nll}")
    kept = Recordings()
    for time in range(3):  # as in training, which keeps its graphs
        result = evaluate_with(model, tokens, dataclasses.replace(settings, dtype="bfloat16"), recordings=kept)
        seconds[f"whole, time {time + 1}"] = result.seconds
    whole_seconds = seconds["whole, time 3"]
    return {"seconds": seconds, "differences": differences, "whole_seconds": whole_seconds, "failures": failures}
