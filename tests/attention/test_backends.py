"""The features of the backends, the choice of a backend, and the equality of their results."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import get_args

import pytest
import torch
from tests.conftest import small_run
from tests.models.test_contract import SMALL, B, lively, stream

from txl import devices
from txl.attention import BACKENDS, AttentionRefused, attention_backend, attention_note
from txl.attention.backends import FASTEST_ON_GPU
from txl.cli import main
from txl.config import AttentionName
from txl.config.transformer_xl import FORMER_ATTENTIONS
from txl.errors import UserError
from txl.models import build_model
from txl.models.transformer_xl import TransformerXL
from txl.native.build import compiled_code, why_not

PLAIN = dataclasses.replace(SMALL, dropout=0.0, dropatt=0.0)


def test_every_name_of_the_configuration_is_a_backend():
    assert set(get_args(AttentionName)) == {"auto", "fastest", *FORMER_ATTENTIONS, *BACKENDS}


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


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which `triton` was measured in bfloat16 alone, for heads of up to 256 features."""
    monkeypatch.setattr(devices, "compute_capability", lambda device: (8, 9) if device == "cuda:0" else None)
    monkeypatch.setitem(FASTEST_ON_GPU, ((8, 9), torch.bfloat16), "triton")

    def obstacle(*asked):
        fits = asked[0].d_head <= 256 and asked[2] in (None, torch.float32, torch.bfloat16)
        return None if fits else "cannot train it"

    monkeypatch.setitem(BACKENDS, "triton", dataclasses.replace(BACKENDS["triton"], obstacle=obstacle))


def test_auto_is_what_was_measured_on_the_gpu_and_shifted_elsewhere(gpu):
    def chosen(model=PLAIN, device="cuda:0", dtype: torch.dtype | None = torch.bfloat16):
        return attention_backend(model, device, dtype).name

    assert chosen() == build_model(PLAIN, 7, "cuda:0", torch.bfloat16).attention_name == "triton"
    assert chosen(dataclasses.replace(PLAIN, d_head=258)) == "shifted"
    assert chosen(device="cpu") == chosen(dtype=torch.float32) == chosen(dtype=None) == "shifted"
    assert chosen(dataclasses.replace(PLAIN, attention="reference")) == "reference"


def test_a_note_tells_where_nothing_was_measured(gpu):
    assert attention_note(PLAIN, "cuda:0", torch.bfloat16) is None
    note = attention_note(PLAIN, "cuda:0", torch.float32) or ""
    assert all(word in note for word in ("float32", "8.9", "shifted", "triton"))
    assert attention_note(PLAIN, "cuda:0", torch.float64) is None  # no other backend for GPUs computes in it
    assert attention_note(PLAIN, "cuda:0") is None  # the dtype is not known
    assert attention_note(PLAIN, "cuda:1", torch.float32) is None  # there is one GPU
    assert attention_note(PLAIN, "cpu", torch.float32) is None
    assert attention_note(dataclasses.replace(PLAIN, attention="shifted"), "cuda:0", torch.float32) is None


@pytest.mark.parametrize("name", FORMER_ATTENTIONS)
def test_the_name_of_a_former_backend_means_auto_and_says_so(name):
    model = dataclasses.replace(SMALL, attention=name, clamp_len=3, dropatt=0.1)
    built = build_model(model, 7)
    assert isinstance(built, TransformerXL)
    assert built.attention_name == "shifted"
    assert name in (built.attention_note or "")
    assert model.with_attention("triton").attention == "triton"  # a resumed run keeps what its log names


def test_an_unknown_name_is_refused():
    unknown = dataclasses.replace(PLAIN)
    unknown.attention = "flash"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r"flash; expected one of auto, fastest, reference, shifted, compiled, triton$"):
        attention_backend(unknown)


@pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")
@pytest.mark.parametrize(
    "changes",
    [{}, {"clamp_len": 3, "window": 6, "untie_r": True}, {"encoding": "shaw", "max_distance": 5}, {"qk_norm": True}],
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


def test_a_refusal_on_the_command_line_is_one_line_and_writes_nothing(story, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["train", "stdlib-tiny", "--out", str(out), "--data.corpus", str(story), "--model.attention", "triton"]
    assert main([*words, "--device", "cpu"]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert "triton cannot train on cpu" in error
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
    assert f"--model.attention {asked} cannot train in torch.float64" in said
    assert not out.exists()


def test_a_forced_backend_trains_and_is_logged(story, data_dir, tmp_path, capsys):
    options = {"model.dropout": "0", "model.dropatt": "0", "train.steps": "3", "train.eval_every": "0"}
    run = small_run(str(story), **options, **{"model.attention": "reference"})
    from txl.training.trainer import Trainer  # needs packages that the environment of Triton lacks

    Trainer(run, tmp_path, data_dir=data_dir, device="cpu").fit()
    assert "reference attention on cpu" in capsys.readouterr().err
    start = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert (start["event"], start["attention"]) == ("start", "reference")


def test_a_refusal_names_another_backend_and_can_be_pickled():
    refusal = AttentionRefused("compiled", "cannot train on cuda, only on cpu", "auto")
    assert refusal.reason == "model.attention compiled cannot train on cuda, only on cpu"
    again = pickle.loads(pickle.dumps(refusal))
    assert str(again) == str(refusal) == f"{refusal.reason}; use model.attention auto"


def test_the_documentation_says_what_the_declarations_say():
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "attention.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    told = {row[0].strip("`"): row[2:] for row in rows if row[0].strip("`") in BACKENDS}
    for name, each in BACKENDS.items():
        places = {"compiled": "CPU, float32 and bfloat16", "triton": "CUDA, float32 and bfloat16"}
        assert told[name] == [places.get(name, "everything")]
        assert (each.obstacle is not None) == (name in places)
