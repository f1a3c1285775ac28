"""`txl dynamic`, and `txl eval --dynamic`."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import shutil
from typing import Any

import pytest

import txl
from txl.cli import main
from txl.data.corpora import open_corpus
from txl.runs.directory import RunDirectory

QUICK = ["--max-tokens", "300", "--statistics-segments", "20"]
EVERY_SEGMENT = ["--statistics-segments", "all", "--statistics-batch", "40", "--segment", "64"]


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run, because commands append to the log."""
    return shutil.copytree(trained, tmp_path / "run")


def test_tunes_measures_and_records(run, data_dir, capsys):
    words = ["dynamic", str(run), "--tune-tokens", "400", *QUICK, "--data-dir", str(data_dir)]
    grid = ["--learning-rates", "1e-4,5e-4", "--decays", "0,0.01"]
    weights = [each.read_bytes() for each in sorted(run.rglob("*.safetensors"))]
    assert main([*words, *grid, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tuning, static, dynamic = found["tuning"], found["static"], found["dynamic"]
    assert tuning["split"] == "valid"
    assert tuning["tokens"] == 399
    losses = [each["nll"] for each in tuning["tried"]]
    assert tuning["best_nll"] == min(losses) < tuning["static_nll"]
    assert static["dynamic"] is None
    assert dynamic["dynamic"] == tuning["adaptation"] | {"statistics_segments": 20, "statistics_batch_size": 1}
    assert {static["batch_size"], dynamic["batch_size"]} == {1}
    assert dynamic["nll"] < static["nll"]
    assert found["times_static"] > 0
    events = [json.loads(line)["event"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert events[-3:] == ["dynamic", "eval", "eval"]
    assert weights == [each.read_bytes() for each in sorted(run.rglob("*.safetensors"))]

    assert main([*words, *grid]) == 0
    printed = capsys.readouterr().out
    assert "dynamic evaluation by rms (learning rate 0.000" in printed
    assert "the best learning rate lies at the end of the values that were tried; try more: --learning-rates" in printed
    # The report keeps the result of the trained weights.
    assert main(["report", str(run), "--data-dir", str(data_dir)]) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--rule", "sgd", "--batch", "3", "--segment", "7", "--dtype", "bfloat16", "--checkpoint", "latest"],
        ["--epsilon", "1e-4", "--weights", "biases", "--statistics-batch", "2", "--mem-len", "5", "--clamp-len", "3"],
        ["--cache-size", "50", "--cache-theta", "0.1", "--cache-lambda", "0.1", "--temperature", "1.3"],
        [*EVERY_SEGMENT, "--split", "valid", "--tune-on", "test", "--max-tokens", "300"],
    ],
)
def test_the_printed_command_gives_the_reported_number(options, run, data_dir, capsys):
    words = ["dynamic", str(run), "--learning-rates", "0.0012345678", "--decays", "0.01", "--tune-tokens", "100"]
    statistics = [] if "sgd" in options else QUICK[2:]
    words += [*QUICK[:2], *statistics, *options, "--data-dir", str(data_dir)]
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    printed = capsys.readouterr().out.partition("to measure this again: txl ")[2]
    assert main([*shlex.split(printed), "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["nll"] == found["dynamic"]["nll"]


def test_a_run_whose_attention_cannot_train_here_adapts_by_another(run, data_dir, capsys):
    words = ["eval", str(run), "--dynamic", "sgd", "--dynamic-learning-rate", "0.1", "--max-tokens", "300", "--json"]
    words += ["--data-dir", str(data_dir), "--device", "cpu"]
    assert main(words) == 0
    wanted = json.loads(capsys.readouterr().out)["nll"]
    config = json.loads((run / "config.json").read_text())
    config["model"]["attention"] = "triton"
    (run / "config.json").write_text(json.dumps(config))
    assert main(words) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["nll"] == wanted
    assert "note: model.attention triton cannot train on cpu, only on cuda; the attention of auto" in told.err


def test_a_tuning_that_diverges_on_the_test_split_is_recorded(run, data_dir, capsys, monkeypatch):
    from txl.evaluation import dynamic, tuning  # tuning keeps the real function

    real = tuning.adapt_with

    def diverges(*given):
        return dataclasses.replace(real(*given), nll=math.nan)

    monkeypatch.setattr(dynamic, "adapt_with", diverges)
    words = ["dynamic", str(run), "--tune-tokens", "400", *QUICK, "--data-dir", str(data_dir)]
    assert main([*words, "--learning-rates", "1e-4", "--decays", "0"]) == 2
    assert "use a smaller --learning-rates" in capsys.readouterr().err
    assert RunDirectory(run).events()[-1]["event"] == "dynamic"


def test_published_settings(run, data_dir, capsys):
    words = ["eval", str(run), "--dynamic-preset", "enwik8-24L", "--data-dir", str(data_dir), "--json"]
    assert main([*words, "--max-tokens", "300", "--dynamic-statistics-segments", "2", "--clamp-len", "9"]) == 0
    found = json.loads(capsys.readouterr().out)
    read = {"statistics_segments": 2, "statistics_batch_size": 1}
    assert found["dynamic"] == dataclasses.asdict(txl.Adaptation("rms", 1.2e-5, 24.0, 1e-4, "sum")) | read
    lengths = [found[name] for name in ("segment", "mem_len", "window", "clamp_len", "batch_size")]
    assert lengths == [128, 3800, 3801, 9, 1]
    every = ["--dynamic-statistics-segments", "all", "--dynamic-statistics-batch", "40"]
    assert main([*words, "--max-tokens", "300", *every]) == 0
    # As many segments of 128 tokens as each lane has, not the preset's 140.
    assert json.loads(capsys.readouterr().out)["dynamic"]["statistics_segments"] < 20


def test_gradient_statistics_of_another_text_are_those_of_training(run, story, data_dir, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text(story.read_text(encoding="utf-8")[500:9000], encoding="utf-8", newline="")
    words = ["eval", str(run), "--dynamic", "rms", "--dynamic-learning-rate", "5e-4", "--data-dir", str(data_dir)]
    words += ["--dynamic-statistics-segments", "9", "--data.corpus", str(other), "--max-tokens", "300", "--json"]
    assert main(words) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    model, vocabulary = txl.load(run)
    data = RunDirectory(run).config().data
    trained_on = open_corpus(data.corpus, config=data, data_dir=data_dir)
    settings: dict[str, Any] = {"segment": 8, "mem_len": 16, "window": 16}
    statistics = txl.gradient_statistics(model, trained_on.tokens("train"), segments=9, **settings)
    read = open_corpus(str(other), config=data, data_dir=data_dir, vocabulary=vocabulary).tokens("test")
    expected = txl.evaluate_dynamically(
        model, read, txl.Adaptation("rms", 5e-4), statistics, max_tokens=300, **settings
    )
    assert found["nll"] == expected.nll


RMS = ["eval", "--dynamic", "rms", "--dynamic-learning-rate", "0.1"]
SGD = ["eval", "--dynamic", "sgd", "--dynamic-learning-rate", "0.1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "--dynamic", "rms"], "--dynamic was given without --dynamic-learning-rate"),
        (["eval", "--dynamic", "adam"], "--dynamic"),
        (["eval", "--dynamic-decay", "0.1"], "--dynamic-decay was given without --dynamic"),
        (["eval", "--dynamic-statistics-segments", "all"], "--dynamic-statistics-segments was given without --dynamic"),
        (["eval", "--dynamic-preset", "no"], "expected one of enwik8-24L"),
        (["eval", "--dynamic", "sgd", "--dynamic-preset", "enwik8-24L"], "the preset's rule is rms"),
        ([*RMS, "--sliding", "8"], "--dynamic and --sliding were both given"),
        ([*RMS, "--mem-lens", "8,16"], "--dynamic and --mem-lens were both given"),
        ([*RMS, "--dynamic-statistics-segments", "0"], "statistics_segments is 0"),
        ([*RMS, "--dynamic-statistics-batch", "0"], "--dynamic-statistics-batch: "),
        ([*RMS, "--batch", "0"], "--batch: "),
        ([*SGD, "--dynamic-epsilon", "0.1"], "--dynamic-epsilon was given, but sgd"),
        ([*SGD, "--dynamic-decay", "-1"], "decay is -1.0"),
        ([*SGD[:-1], "1e30"], "the weights diverged while adapting"),
        (["dynamic", "--split", "valid"], "both name the split valid"),
        (["dynamic", "--tune-tokens", "1"], "--tune-tokens is 1; expected 2 or more"),
        (["dynamic", "--split", "no"], "no split 'no'"),
        (["dynamic", "--learning-rates", "a"], "expected numbers separated by commas"),
        (["dynamic", "--rule", "sgd", "--learning-rates=-1"], "learning_rate is -1.0"),
        (["dynamic", "--rule", "sgd", "--epsilon", "1"], "--epsilon was given, but sgd"),
    ],
)
def test_mistakes_are_one_line(words, message, trained, data_dir, capsys):
    assert main([words[0], str(trained), *words[1:], "--data-dir", str(data_dir)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]
