"""`torch.compile` in training: equal results and parameter names, or eager layers and one line with the reason."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import small_run
from tests.models.test_contract import SMALL, B, lively, stream
from torch import nn

from txl.cli import main
from txl.config import RecurrentConfig
from txl.models import build_model
from txl.training import trainer as trainer_module
from txl.training.compilation import compile_layers
from txl.training.trainer import Trainer

QRNN = RecurrentConfig(kind="qrnn", n_layer=4, d_model=8, d_hidden=12, kernel_sizes=(2, 1), dropout=0.0)


@pytest.fixture(scope="module")
def compiler() -> None:
    model = lively(dataclasses.replace(SMALL, n_layer=1))
    if (reason := compile_layers(model, "cpu")) is not None:
        pytest.skip(f"no working compiler here: {reason}")


def test_compiled_layers_give_the_same_losses_and_gradients(compiler):
    """The first segment has no memory, the second has memory: each compiles to a graph of its own."""
    config = dataclasses.replace(SMALL, n_layer=2, dropout=0.0, dropatt=0.0)
    tokens, targets = stream()
    results = []
    for compiled in (False, True):
        model = lively(config).train()
        names = list(model.state_dict())
        if compiled:
            assert compile_layers(model, "cpu") is None
        assert list(model.state_dict()) == names
        state, losses = model.init_state(B), []
        for start in (0, 7):
            loss, state = model.training_loss(tokens[:, start : start + 7], targets[:, start : start + 7], state)
            losses.append(loss)
        results.append([torch.stack(losses), *torch.autograd.grad(losses[0] + losses[1], list(model.parameters()))])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)


def test_compiled_layers_drop_attention_weights(compiler):
    """PyTorch 2.13 compiles `bernoulli_` of an empty tensor to NaN where gradients are computed."""
    tokens, targets = stream()
    model = lively(dataclasses.replace(SMALL, n_layer=1, dropout=0.0, dropatt=0.5)).train()
    assert compile_layers(model, "cpu") is None
    losses = torch.stack([model.training_loss(tokens[:, :7], targets[:, :7], model.init_state(B))[0] for _ in range(3)])
    assert losses.isfinite().all()
    assert len(losses.unique()) == 3
    losses.sum().backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())


def test_a_compiled_run_has_the_same_checkpoint_and_nearly_the_same_weights(compiler, story, data_dir, tmp_path):
    weights = []
    for compiled in ("false", "true"):
        options = {"model.dropout": "0.0", "model.dropatt": "0.0", "model.mem_len": "0", "eval.mem_len": "0"}
        options |= {"eval.window": "none", "train.steps": "3", "train.average_from": "1", "train.compile": compiled}
        run = small_run(str(story), **options)
        Trainer(run, tmp_path / compiled, data_dir=data_dir, quiet=True, device="cpu").fit()
        start = json.loads((tmp_path / compiled / "log.jsonl").read_text().splitlines()[0])
        assert start["compiled"] is (compiled == "true")
        weights.append(load_file(tmp_path / compiled / "checkpoints" / "step-00000003" / "model.safetensors"))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-4)


def test_without_a_compiler_one_line_says_so_and_training_goes_on(story, data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trainer_module, "compile_layers", lambda model, device: "no g++ here")
    run = small_run(str(story), **{"train.compile": "true", "train.steps": "2"})
    Trainer(run, tmp_path / "run", data_dir=data_dir, device="cpu").fit()
    assert (
        capsys.readouterr().err.count("train.compile: no working compiler here (no g++ here); the layers run eagerly")
        == 1
    )
    start = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert start["compiled"] is False


def test_a_missing_compiler_is_found_missing():
    code = (
        "import txl; from txl.models import build_model; from txl.training.compilation import compile_layers\n"
        "model = build_model(txl.preset('stdlib-tiny').model, 5)\n"
        "print(compile_layers(model, 'cpu')); print(any(each._compiled_call_impl for each in model.layers))"
    )
    environment = os.environ | {"PATH": "/nowhere", "CXX": "/nowhere/g++"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    reason, compiled = done.stdout.strip().splitlines()
    assert "ompiler" in reason
    assert compiled == "False"


def test_the_bench_tells_what_compiling_gains(compiler, capsys):
    small = ["--model.n-layer", "1", "--model.d-model", "16", "--model.n-head", "2", "--model.d-head", "8"]
    small += ["--model.d-inner", "16", "--model.mem-len", "8", "--train.segment", "8", "--train.batch-size", "2"]
    words = ["bench", "train", "--dtype", "float32", "--steps", "1", "--device", "cpu", *small]
    assert main([*words, "--compile"]) == 0
    assert "times as fast as eager ones in float32" in capsys.readouterr().out
    assert main([*words, "--train.compile"]) == 2
    assert "use --compile" in capsys.readouterr().err


def test_a_qrnn_of_random_lengths_stays_compiled(monkeypatch):
    """Earlier, the recurrence's loop was traced: every length made a graph, and after 8 graphs layers ran eagerly."""
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    real, compiled = nn.Module.compile, torch.compile
    # The probe of the compiler has no options; layers are compiled with some.
    monkeypatch.setattr(torch, "compile", lambda call, **options: compiled(call, **options) if options else call)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: real(self, backend=counting, **options))
    torch._dynamo.reset()
    # As in the presets: a first layer that reads two tokens, inner layers, and a last layer of a different width.
    model = build_model(QRNN, 11).train()
    assert compile_layers(model, "cpu") is None
    state, made = model.init_state(2), []
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length in (13, 7, 9, 11, 17, 8, 12, 19, 5, 23, 14):
            tokens = torch.randint(11, (2, length))
            loss, state = model.training_loss(tokens, tokens, state)
            loss.backward()
            made.append(len(graphs))
        with torch.no_grad():
            model.eval()
            for length in (16, 3):
                tokens = torch.randint(11, (3, length))
                model.nll(tokens, tokens, model.init_state(3))
    assert made == [made[0]] * len(made)  # later lengths compile no new graph


def test_a_compiled_qrnn_has_the_same_losses_and_gradients(compiler):
    results = []
    for compiled in (False, True):
        torch.manual_seed(4)
        model = build_model(dataclasses.replace(QRNN, n_layer=1, kernel_sizes=(2,)), 11).double().train()
        if compiled:
            assert compile_layers(model, "cpu") is None
        tokens = torch.randint(11, (2, 16), generator=torch.Generator().manual_seed(5))
        state, losses = model.init_state(2), []
        for start, end in ((0, 7), (7, 16)):
            loss, state = model.training_loss(tokens[:, start:end], tokens[:, start:end], state)
            losses.append(loss)
        results.append([torch.stack(losses), *torch.autograd.grad(losses[0] + losses[1], list(model.parameters()))])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)
