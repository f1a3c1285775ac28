"""`txl cache`, and `txl eval` with a cache."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest

from txl.cli import main


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run, because commands append to the log."""
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
    # The report keeps the result of the model without a cache.
    assert main(["report", str(run), *where]) == 0


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ([], 1.3),
        (["--batch", "3", "--segment", "7", "--dtype", "bfloat16", "--checkpoint", "latest"], 1.3),
        (["--split", "train", "--mem-len", "5", "--window", "4", "--clamp-len", "3", "--device", "cpu"], 1.3),
        (["--batch", "2", "--temperature", "0.8", "--data.corpus", "other"], 0.8),
    ],
)
def test_the_printed_command_gives_the_reported_number(options, temperature, run, story, data_dir, tmp_path, capsys):
    """The run's temperature applies unless one is given. The result without the cache equals that of `txl eval`."""
    config = json.loads((run / "config.json").read_text())
    config["eval"]["temperature"] = 1.3
    (run / "config.json").write_text(json.dumps(config))
    if "other" in options:
        other = tmp_path / "another story.txt"  # the space in the name must be quoted
        other.write_text(story.read_text(encoding="utf-8")[500:9000], encoding="utf-8")
        options = [*options[:-1], str(other)]
    given = [*options, "--max-tokens", "600", "--data-dir", str(data_dir)]
    # Values that a command with three printed digits would change.
    words = ["cache", str(run), "--size", "50", "--thetas", "0.1234567", "--lambdas", "0.1000003", *given]
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert {found[each]["temperature"] for each in ("with", "without")} == {temperature}
    assert main(words) == 0
    printed = capsys.readouterr().out.partition("to measure this again: txl ")[2]
    assert main([*shlex.split(printed), "--json"]) == 0, capsys.readouterr().err
    again = json.loads(capsys.readouterr().out)
    assert again["nll"] == found["with"]["nll"]
    assert main(["eval", str(run), *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nll"] == found["without"]["nll"]
    # The printed command also reproduces the loss on the tuning split.
    tuned_on = [*shlex.split(printed), "--split", found["tuning"]["split"], "--json"]
    assert main(tuned_on) == 0
    assert json.loads(capsys.readouterr().out)["nll"] == pytest.approx(found["tuning"]["best_nll"], abs=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cache", "--size", "0"], "size is 0"),
        (["cache", "--size", str(2**32 + 1)], "expected 1 to 4294967296"),
        (["cache", "--size", "99999999999999999999999"], "expected a whole number from"),
        (["cache", "--max-tokens", "-5"], "--max-tokens is -5"),
        (["cache", "--temperature", "0"], "temperature is 0"),
        (["cache", "--lambdas", "0.1,1"], "lambda is 1.0"),
        (["cache", "--thetas", "a"], "expected numbers separated by commas"),
        (["cache", "--split", "valid"], "both name the split valid"),
        (["cache", "--split", "no"], "no split 'no'"),
        (["eval", "--cache-size", "5"], "--cache-size was given without --cache-theta"),
        (["eval", "--cache-size", "5", "--cache-theta", "-1", "--cache-lambda", "0.1"], "theta is -1.0"),
    ],
)
def test_mistakes_are_one_line(words, message, trained, data_dir, capsys):
    assert main([words[0], str(trained), *words[1:], "--data-dir", str(data_dir)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]
