"""`txl recl` on a Transformer-XL run and a vanilla run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import small_run

import txl
from txl.cli import main
from txl.config import Limit
from txl.evaluation.effective_context import spread_targets

VANILLA = {
    "model.encoding": "learned", "model.max_segment": "24", "model.mem_len": "0", "model.window": "none",
    "eval.mem_len": "0", "eval.window": "none", "eval.segment": "24", "train.segment": "24",
}  # fmt: skip


@pytest.fixture(scope="module")
def group(story, data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    txl.Trainer(small_run(str(story)), folder / "recurrent", data_dir=data_dir, quiet=True).fit()
    txl.Trainer(small_run(str(story), **VANILLA), folder / "vanilla", data_dir=data_dir, quiet=True).fit()
    return folder


@pytest.fixture
def unscored(monkeypatch):
    """Make the computation of losses fail: refusals must come before scoring."""

    def scored(*_, **__):
        raise AssertionError("scored before it was refused")

    monkeypatch.setattr("txl.evaluation.sliding.losses_at_contexts", scored)


def copied(run: Path, path: Path, section: str, **changes: Any) -> Path:
    """Copy a run, and change its configuration."""
    shutil.copytree(run, path)
    config = json.loads((path / "config.json").read_text())
    config[section] |= changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_group_of_a_vanilla_and_a_recurrent_model(group, data_dir, story, capsys):
    runs = [str(group / "recurrent"), str(group / "vanilla")]
    words = ["recl", *runs, "--step", "8", "--longest", "24", "--targets", "50", "--r", "0.2,1"]
    words += ["--data-dir", str(data_dir)]
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    tokens = txl.open_corpus(str(story), data_dir=data_dir).tokens("test")
    targets = spread_targets(len(tokens), 24, 50, 8)
    assert len(targets) >= 50
    assert (found["context_lengths"], found["targets"]) == ([8, 16, 24], len(targets))
    assert [each["name"] for each in found["models"]] == ["recurrent", "vanilla"]
    losses = {}
    for each, path in zip(found["models"], runs, strict=True):
        model, _ = txl.load(path)
        losses[each["name"]] = {
            length: txl.losses_at_context(model, tokens, context=length, targets=targets) for length in (8, 16, 24)
        }
        for length, values in losses[each["name"]].items():
            assert each["ppl"][str(length)] == pytest.approx(torch.as_tensor(values).mean().exp().item())
    for r in (0.2, 1.0):
        expected = txl.relative_effective_context_length(losses, r)
        assert {each["name"]: each["recl"][str(r)] for each in found["models"]} == expected
    assert len(found["perplexity_gains"]["0.2"]) == 3
    assert main(words) == 0
    assert "r = 0.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "0"], "--step: "),
        (["--step", "8", "--longest", "15"], "two context lengths"),
        (["--r", "2"], "r is 2.0"),
        (["--r", "0.1,0.5,0.10"], "--r has 0.1 twice"),
        (["--r", "x"], "numbers separated by commas"),
        (["--threshold", "nan"], "threshold is nan"),
        (["--threshold", "1"], "threshold is 1.0"),
        (["--clamp-len", "4"], "none of these models uses relative distances"),
        (["--window", "4"], "--window is 4, but no model here is a Transformer-XL"),
        (["--window", "0"], "--window is 0; expected 1 key or more, or none"),
        (["--split", "dev"], "no split 'dev'"),
        (["--out", "FILE"], "expected a folder"),
        (["--out", "FILE/below/it"], "Not a directory"),
        (["--out", "/proc/recl"], "cannot be written"),
        (["--step", "1", "--longest", str(2**53)], "do not fit"),
        (["--step", "8", "--longest", "10000000"], "do not fit"),
        (["--step", "8", "--longest", "16", "--targets", "10000000"], "do not fit"),
    ],
)
def test_one_line_for_what_cannot_be(group, data_dir, options, message, unscored, tmp_path, capsys):
    (tmp_path / "FILE").write_text("x")
    options = [each.replace("FILE", str(tmp_path / "FILE")) for each in options]
    words = ["recl", str(group / "vanilla"), "--step", "8", "--longest", "24", "--targets", "30", *options]
    assert main([*words, "--data-dir", str(data_dir)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error.splitlines()[-1]


def test_a_model_is_held_at_the_most_that_it_reads(group, data_dir, story, tmp_path, capsys):
    runs, out = [str(group / "recurrent"), str(group / "vanilla")], tmp_path / "recl"
    words = ["recl", *runs, "--step", "20", "--longest", "60", "--targets", "30", "--data-dir", str(data_dir)]
    assert main([*words, "--out", str(out), "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    recurrent, vanilla = found["models"]
    assert (recurrent["longest_context"], vanilla["longest_context"]) == (None, 24)
    model, _ = txl.load(runs[1])
    tokens = txl.open_corpus(str(story), data_dir=data_dir).tokens("test")
    held = txl.losses_at_context(model, tokens, context=24, targets=spread_targets(len(tokens), 60, 30, 20))
    assert vanilla["ppl"]["40"] == vanilla["ppl"]["60"] == pytest.approx(held.mean().exp().item())
    assert vanilla["ppl"]["20"] != vanilla["ppl"]["40"]
    assert all(length in (20, 24) for length in vanilla["recl"].values())
    note = "vanilla reads at most 24 tokens at once: longer contexts were cut to 24"
    assert note in (out / "recl.html").read_text(encoding="utf-8")
    assert main([*words, "--threshold", "0"]) == 0
    assert note in capsys.readouterr().out.replace("\n", " ")
    assert main([*words[:2], *words[3:]]) == 0
    assert "held" not in capsys.readouterr().out


def test_distances_are_clamped_as_in_the_run_s_test(group, story, data_dir, tmp_path, capsys):
    clamped = copied(group / "recurrent", tmp_path / "clamped", "eval", clamp_len=3)
    words = [*recl(str(clamped), str(group / "vanilla")), "--data-dir", str(data_dir), "--json"]
    model, _ = txl.load(clamped)
    tokens = txl.open_corpus(str(story), data_dir=data_dir).tokens("test")
    settings = {"context": 24, "targets": spread_targets(len(tokens), 24, 30, 8)}
    ppl = {}
    cases: tuple[tuple[list[str], Limit], ...] = (
        ([], 3), (["--clamp-len", "5"], 5), (["--clamp-len", "none"], "none")
    )  # fmt: skip
    for given, clamp_len in cases:
        assert main([*words, *given]) == 0, capsys.readouterr().err
        found = json.loads(capsys.readouterr().out)["models"]
        ppl[clamp_len] = found[0]["ppl"]["24"]
        expected = txl.losses_at_context(model, tokens, clamp_len=clamp_len, **settings)
        assert ppl[clamp_len] == pytest.approx(expected.mean().exp().item())
        assert [each["clamp_len"] for each in found] == [None if clamp_len == "none" else clamp_len, None]
    assert len(set(ppl.values())) == 3


def test_a_window_is_that_of_models_that_have_one(group, data_dir, story, capsys):
    words = [*recl(str(group / "recurrent"), str(group / "vanilla")), "--data-dir", str(data_dir), "--json"]
    tokens = txl.open_corpus(str(story), data_dir=data_dir).tokens("test")
    settings = {"context": 24, "targets": spread_targets(len(tokens), 24, 30, 8)}
    windows: dict[str, Limit] = {"recurrent": 5, "vanilla": "none"}
    assert main([*words, "--window", "5"]) == 0, capsys.readouterr().err
    for found, (name, window) in zip(json.loads(capsys.readouterr().out)["models"], windows.items(), strict=True):
        model, _ = txl.load(group / name)
        losses = txl.losses_at_context(model, tokens, window=window, **settings)
        assert found["ppl"]["24"] == pytest.approx(losses.mean().exp().item())
        assert found["window"] == (5 if window == 5 else None)


def test_the_folder_one_is_in_has_its_name(group, data_dir, monkeypatch, capsys):
    monkeypatch.chdir(group / "vanilla")
    assert main([*recl(".", str(group / "recurrent")), "--data-dir", str(data_dir), "--json"]) == 0
    names = [each["name"] for each in json.loads(capsys.readouterr().out)["models"]]
    assert sorted(names) == ["recurrent", "vanilla"]


def test_a_damaged_run_is_found_before_another_is_scored(group, data_dir, tmp_path, unscored, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(group / "vanilla", damaged)
    for weights in damaged.glob("checkpoints/*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-7])
    assert main([*recl(str(group / "recurrent"), str(damaged)), "--data-dir", str(data_dir)]) == 2
    assert "truncated" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_given_twice_is_refused(group, data_dir, capsys):
    run = str(group / "vanilla")
    for again in (run, str(group / "recurrent" / ".." / "vanilla")):
        assert main(["recl", run, again, "--data-dir", str(data_dir)]) == 2
        assert "given twice" in capsys.readouterr().err
    assert main([*recl(run), "--longest", "30", "--data-dir", str(data_dir)]) == 2
    assert "--longest is 30; expected two context lengths or more, multiples of --step 8" in capsys.readouterr().err


def recl(*words: str) -> list[str]:
    return ["recl", *words, "--step", "8", "--longest", "24", "--targets", "30"]


def test_the_page_its_figures_and_its_numbers(group, data_dir, tmp_path, capsys):
    out = tmp_path / "made" / "recl"
    runs = [str(group / "recurrent"), str(group / "vanilla")]
    assert main([*recl(*runs), "--out", str(out), "--json", "--data-dir", str(data_dir)]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert json.loads((out / "recl.json").read_text(encoding="utf-8")) == found
    kinds = ["perplexity", *(f"{kind}-r{r}" for kind in ("relative-gain", "gains") for r in ("0.1", "0.5", "1.0"))]
    expected = {"recl.html", "recl.json", *(f"{kind}.{ending}" for kind in kinds for ending in ("svg", "png"))}
    assert {each.name for each in out.iterdir()} == expected
    assert (out / "gains-r0.1.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "recl.html").read_text(encoding="utf-8")
    for each in found["models"]:
        numbers = "".join(f'<td class="number">{value:,}</td>' for value in each["recl"].values())
        assert f"{each['parameters']:,}</td>{numbers}" in page
    assert page.count("<figure>") == 7
    assert "<img" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    # The relative gain of a step decides. Each step is one of the pairs whose perplexity gain Figure 3 shows.
    for r, steps in found["relative_gains"].items():
        pairs = {(pair["short"], pair["long"]): pair["gain"] for pair in found["perplexity_gains"][r]}
        for each in found["models"]:
            name = each["name"]
            stops = [step["short"] for step in steps if step["gain"][name] < 0.01]
            assert each["recl"][r] == (stops or [24])[0]
            for step in steps:
                gain = pairs[step["short"], step["long"]][name]
                assert (gain > 0) == (step["gain"][name] > 0)


def test_models_that_cannot_be_compared(group, data_dir, story, tmp_path, unscored, monkeypatch, capsys):
    where = ["--data-dir", str(data_dir)]
    characters, other = tmp_path / "characters", tmp_path / "other"
    txl.Trainer(small_run(str(story), **{"data.unit": "char"}), characters, data_dir=data_dir, quiet=True).fit()
    (tmp_path / "other.txt").write_bytes(story.read_bytes()[::-1].translate(bytes(range(128)) * 2))
    txl.Trainer(small_run(str(tmp_path / "other.txt")), other, data_dir=data_dir, quiet=True).fit()
    out = ["--out", str(tmp_path / "recl")]
    vanilla = str(group / "vanilla")
    for named in ([], ["--data.corpus", str(story)]):
        assert main([*recl(vanilla, str(characters), *named), *where, *out]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert f"{characters} has another vocabulary than {vanilla}" in error
        assert "different corpora" not in error
    assert main([*recl(vanilla, str(other)), *where, *out]) == 2
    error = capsys.readouterr().err
    assert "different corpora" in error
    assert len(error.splitlines()) == 1
    assert main([*recl(vanilla, str(other), "--data.unit", "byte"), *where, *out]) == 2
    assert "--data.corpus" in capsys.readouterr().err
    assert not (tmp_path / "recl").exists()
    monkeypatch.undo()
    assert main([*recl(vanilla, str(other), "--data.corpus", str(story)), *where]) == 0
    # The same text under another name is the same corpus.
    shutil.copy(story, tmp_path / "copy.txt")
    same = copied(group / "recurrent", tmp_path / "same", "data", corpus=str(tmp_path / "copy.txt"))
    assert main([*recl(vanilla, str(same)), *where]) == 0
