"""The features of the backends, the choice of a backend, and the equality of their results."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from tests.models.test_contract import SMALL, B, lively, nll_in_segments, stream

from txl.attention import BACKENDS, AttentionRefused, attention_backend, attention_note
from txl.attention.backends import FASTEST_ON
from txl.cli import main
from txl.config import AttentionName, TransformerXLConfig
from txl.errors import UserError
from txl.models import build_model
from txl.native.build import compiled_code, why_not

PLAIN = dataclasses.replace(SMALL, dropout=0.0, dropatt=0.0)
"""A configuration that the factorised form supports."""


def test_every_name_of_the_configuration_is_a_backend():
    assert set(get_args(AttentionName)) == {"auto", "fastest", *BACKENDS}


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:1", "mps"])
@pytest.mark.parametrize("model", [PLAIN, SMALL, dataclasses.replace(SMALL, clamp_len=3)])
def test_auto_and_fastest_find_one_for_every_model(model, device):
    for choice in ("auto", "fastest"):
        found = attention_backend(dataclasses.replace(model, attention=choice), device)
        is_fast = choice == "fastest" and device in (None, "cpu") and why_not() is None
        assert found.name == ("compiled" if is_fast else "shifted")
        assert found.refusal(model, device) is None


@pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")
def test_compiled_attention_is_refused_where_compiled_code_is_forbidden():
    compiled = dataclasses.replace(PLAIN, attention="compiled")
    with compiled_code(False):
        assert attention_backend(dataclasses.replace(PLAIN, attention="fastest"), "cpu").name == "shifted"
        with pytest.raises(UserError, match=r"needs the compiled library \(`compiled_code\(False\)` forbids it\)"):
            attention_backend(compiled, "cpu")
    assert attention_backend(compiled, "cpu").name == "compiled"


def test_auto_takes_what_was_measured_on_the_gpu_and_says_where_nothing_was(monkeypatch):
    assert attention_note(PLAIN, "cuda") is None  # no GPU is present
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA T1")
    note = attention_note(PLAIN, "cuda:0", torch.bfloat16)
    assert note == (
        "no attention backend was timed in bfloat16 on NVIDIA T1; shifted is used, --model.attention triton may be faster"
    )
    assert attention_note(PLAIN, "cuda:0") is None  # the dtype is not known
    assert attention_note(PLAIN, "cuda:1", torch.bfloat16) is None
    assert attention_note(PLAIN, "cpu", torch.bfloat16) is None
    assert attention_note(dataclasses.replace(PLAIN, attention="shifted"), "cuda:0", torch.bfloat16) is None
    monkeypatch.setitem(FASTEST_ON, ("NVIDIA T1", torch.bfloat16), "factorised")
    assert attention_note(PLAIN, "cuda:0", torch.bfloat16) is None
    assert attention_backend(PLAIN, "cuda:0", torch.bfloat16).name == "factorised"
    assert attention_backend(SMALL, "cuda:0", torch.bfloat16).name == "shifted"  # SMALL has dropout of attention
    assert attention_backend(PLAIN, "cpu", torch.bfloat16).name == "shifted"
    assert attention_backend(PLAIN, "cuda:0", torch.float32).name == "shifted"
    note = attention_note(PLAIN, "cuda:0", torch.float32)
    assert note is not None
    assert "was timed in float32 on NVIDIA T1" in note
    assert attention_note(PLAIN, "cuda:0", torch.float64) is None  # no other backend for GPUs computes in it


def test_an_unknown_name_is_refused():
    unknown = dataclasses.replace(PLAIN)
    unknown.attention = "flash"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        UserError,
        match=r"'flash'; expected one of auto, fastest, reference, shifted, compiled, triton, factorised, flex",
    ):
        attention_backend(unknown)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dropout": 0.1}, r"no dropout on R \(model.dropout_r is 0.1\); set it to 0"),
        ({"dropout_r": 0.2}, r"no dropout on R \(model.dropout_r is 0.2\)"),
        ({"dropout_qkv": 0.2}, r"no dropout on W_kR R \(model.dropout_qkv is 0.2\)"),
        ({"dropatt": 0.3}, r"no dropout on attention \(model.dropatt is 0.3\)"),
        ({"clamp_len": 4}, r"no clamp \(clamp_len is 4\); set it to none"),
        ({"clamp_len": 0}, r"no clamp \(clamp_len is 0\)"),
    ],
)
@pytest.mark.parametrize("name", ["factorised", "flex"])
def test_the_factorised_form_says_what_it_cannot_do(name, changes, reason):
    model = dataclasses.replace(PLAIN, attention=name, **changes)
    with pytest.raises(UserError, match=f"^model.attention {name} has {reason}.*--model.attention shifted$"):
        build_model(model, 7)
    for other in ("reference", "shifted", "auto"):
        build_model(dataclasses.replace(model, attention=other), 7)


def test_dropout_elsewhere_is_no_reason_to_refuse():
    model = build_model(dataclasses.replace(PLAIN, dropout=0.1, dropout_r=0.0, attention="factorised"), 7)
    assert model.attention_name == "factorised"


def test_flex_attention_trains_on_a_gpu_alone_but_is_read_everywhere():
    config = dataclasses.replace(PLAIN, attention="flex")
    assert attention_backend(config, "cuda:0").name == "flex"
    with pytest.raises(UserError, match="flex cannot train on cpu, only on cuda"):
        attention_backend(config, "cpu")
    flex, shifted = lively(config), lively(PLAIN)
    tokens, targets = stream()
    with torch.no_grad():
        found, _ = nll_in_segments(flex, tokens, targets, 8)
        assert torch.equal(found, nll_in_segments(shifted, tokens, targets, 8)[0])
    with pytest.raises(UserError, match="cannot train on cpu"):
        flex.train().training_loss(tokens, targets, flex.init_state(B))


@pytest.mark.parametrize("changes", [{}, {"pre_norm": True}, {"untie_r": True}, {"window": 6}], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "autocast"])
def test_the_factorised_form_trains_the_same_model(changes, dtype):
    """Losses and all gradients equal the reference's, over segments with a memory that grows."""
    tokens, targets = stream(40)
    kind = torch.float64 if dtype == "float64" else torch.float32
    tolerance = {"float64": 1e-10, "float32": 1e-4, "autocast": 0.1}[dtype]
    results = []
    for attention in ("factorised", "reference"):
        exact = attention == "reference"
        config = dataclasses.replace(PLAIN, attention=attention, **changes)
        model = lively(config).to(torch.float64 if exact else kind).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast" and not exact):
            nll, _ = nll_in_segments(model, tokens, targets, 5)
        grads = torch.autograd.grad(nll.double().mean(), list(model.parameters()))
        results.append([nll.double().flatten(), torch.cat([grad.double().flatten() for grad in grads])])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < tolerance


@pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clamp_len": 3, "window": 6, "untie_r": True},
        {"encoding": "shaw", "max_distance": 5},
        {"qk_norm": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "autocast"])
def test_compiled_attention_trains_the_same_model(changes, dtype):
    """Losses and all gradients equal the reference's in a segment after two of three lanes were reset."""
    tokens, targets = stream(40)
    results = []
    for attention in ("compiled", "reference"):
        exact = attention == "reference"
        config = dataclasses.replace(PLAIN, attention=attention, **changes)
        model = lively(config).to(torch.float64 if exact else torch.float32).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast" and not exact):
            _, state = model.nll(tokens[:, :17], targets[:, :17], model.init_state(B))
            state = state.reset(torch.tensor([True, False, True]))
            nll, _ = model.nll(tokens[:, 17:], targets[:, 17:], state)
        grads = torch.autograd.grad(nll.double().mean(), list(model.parameters()))
        results.append([nll.double().flatten(), torch.cat([grad.double().flatten() for grad in grads])])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < (1e-5 if dtype == "float32" else 0.1)


def test_lanes_that_were_reset_train_the_same():
    tokens, targets = stream()
    losses = []
    for attention in ("factorised", "reference"):
        model = lively(dataclasses.replace(PLAIN, attention=attention)).train()
        _, state = model.nll(tokens[:, :9], targets[:, :9], model.init_state(B))
        losses.append(model.nll(tokens[:, 9:], targets[:, 9:], state.reset(torch.tensor([True, False, True])))[0])
    torch.testing.assert_close(*losses, rtol=0, atol=1e-10)


def test_a_clamp_that_a_state_brings_is_refused_where_gradients_flow():
    model = lively(dataclasses.replace(PLAIN, attention="factorised"))
    tokens, targets = stream()
    state = model.init_state(B, clamp_len=4)
    with pytest.raises(UserError, match="has no clamp"):
        model.nll(tokens, targets, state)
    expected, _ = lively(PLAIN).nll(tokens, targets, lively(PLAIN).init_state(B, clamp_len=4))
    with torch.no_grad():
        torch.testing.assert_close(model.nll(tokens, targets, state)[0], expected, rtol=0, atol=1e-10)


def test_tables_are_no_weights_and_do_not_stop_a_copy():
    model = lively(dataclasses.replace(PLAIN, attention="factorised")).train()
    tokens, targets = stream()
    loss, _ = model.training_loss(tokens, targets, model.init_state(B))
    assert model.state_dict().keys() == lively(PLAIN).state_dict().keys()
    again, _ = copy.deepcopy(model).training_loss(tokens, targets, model.init_state(B))
    assert torch.equal(loss, again)


def test_a_refusal_on_the_command_line_is_one_line_and_writes_nothing(story, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["train", "stdlib-tiny", "--out", str(out), "--data.corpus", str(story), "--model.dropout", "0.1"]
    assert main([*words, "--model.attention", "factorised", "--device", "cpu"]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert "no dropout on R" in error
    assert main([*words, "--model.attention", "flex", "--model.dropout", "0", "--device", "cpu"]) == 2
    assert "flex cannot train on cpu" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")
@pytest.mark.parametrize(
    ("preset", "name", "asked"),
    [
        ("stdlib-tiny", "fastest", "fastest (compiled)"),
        ("stdlib-tiny", "compiled", "compiled"),
        ("enwik8-vanilla-small", "compiled", "compiled"),
    ],
)
def test_a_dtype_that_attention_lacks_is_refused_before_the_text_is_read(
    preset, name, asked, story, data_dir, tmp_path, capsys
):
    out = tmp_path / "run"
    words = ["train", preset, "--out", str(out), "--data.corpus", str(story), "--data-dir", str(data_dir)]
    assert main([*words, "--model.attention", name, "--train.dtype", "float64", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        rf"txl: error: model.attention {re.escape(asked)} cannot train in torch.float64; set train.dtype to float32, "
        r"or use --model.attention (shifted|auto)\n",
        said,
    )
    assert not out.exists()


def test_a_forced_backend_trains_and_is_logged(story, data_dir, tmp_path, capsys):
    out = tmp_path / "run"
    small = {
        "n-layer": 1,
        "d-model": 16,
        "n-head": 2,
        "d-head": 8,
        "d-inner": 16,
        "mem-len": 8,
        "dropout": 0,
        "dropatt": 0,
    }
    words = ["train", "stdlib-tiny", "--out", str(out), "--data.corpus", str(story), "--data-dir", str(data_dir)]
    words += [word for name, value in small.items() for word in (f"--model.{name}", str(value))]
    words += ["--train.steps", "3", "--train.segment", "8", "--train.batch-size", "2", "--train.eval-every", "0"]
    assert main([*words, "--train.warmup-steps", "0", "--model.attention", "factorised", "--device", "cpu"]) == 0
    assert "factorised attention on cpu" in capsys.readouterr().err
    start = json.loads((out / "log.jsonl").read_text().splitlines()[0])
    assert (start["event"], start["attention"]) == ("start", "factorised")


def test_declarations_say_what_they_mean():
    assert not any(BACKENDS[name].clamp_len for name in ("factorised", "flex"))
    shaw = TransformerXLConfig(encoding="shaw", dropout=0.0)
    assert "needs the sinusoid R" in str(BACKENDS["flex"].refusal(shaw))
    normed = dataclasses.replace(PLAIN, qk_norm=True)
    for name in ("factorised", "flex"):
        assert "has no norm of W_kR R (model.qk_norm is true)" in str(BACKENDS[name].refusal(normed))
    assert "cannot train in torch.float64" in str(BACKENDS["flex"].refusal(PLAIN, "cuda", torch.float64))


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("cannot train on cuda, only on cpu", "cannot train on cuda, only on cpu; use --model.attention auto"),
        (
            "cannot train in torch.float16; set train.dtype to float32",
            "cannot train in torch.float16; set train.dtype to float32, or use --model.attention auto",
        ),
    ],
)
def test_another_backend_is_the_last_remedy_of_a_refusal(why, message):
    refusal = AttentionRefused("compiled", why, "auto")
    assert str(refusal) == f"model.attention compiled {message}"
    assert refusal.reason == f"model.attention compiled {why}"
    again = pickle.loads(pickle.dumps(refusal))
    assert (str(again), again.reason) == (str(refusal), refusal.reason)


def test_the_documentation_says_what_the_declarations_say():
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "attention.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    told = {row[0].strip("`"): row[2:] for row in rows if row[0].strip("`") in BACKENDS}
    yes = {True: "yes", False: "no"}
    for name, each in BACKENDS.items():
        where = "everything"
        if each.devices is not None:
            (device,) = each.devices
            where = f"{device.upper()}, float32 and bfloat16"
        assert told[name] == [where, yes[each.clamp_len], yes[each.dropatt], yes[each.dropout_r]]
