"""`txl cache`, and `txl eval` with a cache."""

from __future__ import annotations

import json
import shutil

import pytest

from txl.cli import main


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run, whose log may grow."""
    return shutil.copytree(trained, tmp_path / "run")


def test_tunes_measures_and_records(run, data_dir, capsys):
    where = ["--data-dir", str(data_dir)]
    words = ["cache", str(run), "--size", "200", "--max-tokens", "1500", *where]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tuning, without, cached = found["tuning"], found["without"], found["with"]
    assert tuning["split"] == "valid"
    assert tuning["best_nll"] < tuning["plain_nll"]
    assert (cached["cache_size"], cached["cache_theta"], cached["cache_lambda"]) == (
        200,
        tuning["theta"],
        tuning["weight"],
    )
    assert without["cache_size"] is None
    assert cached["nll"] < without["nll"]
    settings = ["--cache-size", "200", "--cache-theta", str(tuning["theta"]), "--cache-lambda", str(tuning["weight"])]
    assert main(["eval", str(run), "--max-tokens", "1500", "--json", *settings, *where]) == 0
    assert json.loads(capsys.readouterr().out)["nll"] == cached["nll"]
    events = [json.loads(line)["event"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert events[-4:] == ["cache", "eval", "eval", "eval"]

    assert main([*words, "--thetas", "0,0.1", "--lambdas", "0.1,0.2"]) == 0
    printed = capsys.readouterr().out
    assert "with a continuous cache of 200 tokens" in printed
    assert f"txl eval {run} --cache-size 200 --cache-theta" in printed
    # The report's result stays the model's own.
    assert main(["report", str(run), *where]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cache", "--size", "0"], "size is 0"),
        (["cache", "--lambdas", "0.1,1"], "lambda is 1.0"),
        (["cache", "--thetas", "a"], "list of numbers"),
        (["cache", "--split", "valid"], "both valid"),
        (["cache", "--split", "no"], "no split 'no'"),
        (["eval", "--cache-size", "5"], "needs --cache-theta and --cache-lambda too"),
        (["eval", "--cache-size", "5", "--cache-theta", "-1", "--cache-lambda", "0.1"], "theta is -1.0"),
    ],
)
def test_mistakes_are_one_line(words, message, trained, data_dir, capsys):
    assert main([words[0], str(trained), *words[1:], "--data-dir", str(data_dir)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]
