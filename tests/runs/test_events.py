"""Events of log.jsonl: all code that writes or reads a log uses one list of names and fields."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.conftest import small_run

import txl
from txl.cli import main
from txl.runs.directory import RunDirectory
from txl.runs.events import EVENTS, EventName, TrainEvent, fields_of, select


def test_a_log_takes_no_other_field(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.append(EventName.ROLLBACK, 4, from_step=7)
    with pytest.raises(AssertionError, match="to_step"):
        directory.append(EventName.ROLLBACK, 4, to_step=7)
    (line,) = directory.events()
    assert line.keys() == {"event", "step", "time", "from_step"}


def _copy_with_measurements(trained: Path, tmp_path: Path, data_dir: Path) -> Path:
    """Return a copy of a run whose log also has an evaluation, a sweep and a sample."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    few = ("--max-tokens", "300", "--data-dir", str(data_dir))
    for words in (("eval", str(run), *few), ("eval", str(run), *few, "--mem-lens", "0,4")):
        assert main([*words]) == 0
    assert main(["generate", str(run), "--prompt", "a", "--max-tokens", "3"]) == 0
    return run


def test_lines_without_fields_or_figures_are_left_out(trained, data_dir, tmp_path, capsys):
    """Each line of a log is damaged, in one field at a time; readers must count it as torn, or must not need the field."""
    run = _copy_with_measurements(trained, tmp_path, data_dir)
    log = run / "log.jsonl"
    whole = log.read_text().splitlines()
    last = {json.loads(line)["event"]: json.loads(line) for line in whole}
    damaged = [{"event": name, "step": 12} for name in last]
    for event in last.values():
        required = EVENTS[event["event"]].__required_keys__
        damaged += [{key: value for key, value in event.items() if key != name} for name in required]
        damaged += [event | {name: ["x"]} for name, value in event.items() if type(value) in (int, float)]
        damaged += [event | {name: 5} for name, value in event.items() if isinstance(value, (dict, list, str))]
    damaged += [last["sweep"] | {"rows": [{}]}, last["sweep"] | {"rows": [3]}]
    damaged += [last["train"] | {"tokens": True}, last["train"] | {"loss": "x"}]
    log.write_text("\n".join([*whole, *map(json.dumps, damaged)]) + "\n")
    log_read = RunDirectory(run).log()
    assert (log_read.events, log_read.torn) == ([json.loads(line) for line in whole], len(damaged))
    capsys.readouterr()
    assert main(["report", str(run), "--data-dir", str(data_dir)]) == 0
    note = capsys.readouterr().err
    assert note.startswith(f"note: {log}: ")
    assert note.endswith(f": {len(damaged)}\n")


def test_lines_of_unknown_events_are_kept(trained, tmp_path):
    run = RunDirectory(shutil.copytree(trained, tmp_path / "run"))
    whole = run.events()
    with open(run.path / "log.jsonl", "a") as log:
        log.write('{"event": "new", "step": 1, "time": 0}\n')
    assert (run.log().events, run.log().torn) == ([*whole, {"event": "new", "step": 1, "time": 0}], 0)


def test_a_run_writes_events_with_all_their_fields_and_no_others(tmp_path, data_dir, story, capsys):
    out = tmp_path / "run"
    options = {"train.average_from": "3", "train.steps": "6", "train.eval_every": "3", "train.checkpoint_every": "3"}
    txl.Trainer(small_run(str(story), **options), out, data_dir=data_dir, quiet=True).fit()
    more = small_run(str(story), **options | {"train.steps": "8"})
    txl.Trainer(more, out, data_dir=data_dir, quiet=True, extend=True).fit()
    for words in (
        ("eval", "--max-tokens", "300"),
        ("eval", "--max-tokens", "300", "--mem-lens", "0,4"),
        ("cache", "--size", "20", "--max-tokens", "300", "--thetas", "0.1", "--lambdas", "0.1"),
        ("generate", "--prompt", "a", "--max-tokens", "3"),
    ):
        own = () if words[0] == "generate" else ("--data-dir", str(data_dir))
        assert main([words[0], str(out), *words[1:], *own]) == 0, capsys.readouterr().err
    lines = RunDirectory(out).events()
    for line in lines:
        name = EventName(line["event"])
        given = line.keys() - {"event", "step", "time"}
        assert given <= fields_of(name), line
        assert given >= EVENTS[name].__required_keys__ - {"event", "step", "time"}, line
    assert {line["event"] for line in lines} == {
        "start", "train", "valid", "checkpoint", "average", "resume", "extend", "end", "eval", "sweep", "cache", "sample",
    }  # fmt: skip
    assert [line["step"] for line in select(lines, TrainEvent)] == [3, 6, 8]
