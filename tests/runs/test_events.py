"""Events of log.jsonl: all code that writes or reads a log uses one list of names and fields."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import small_run

import txl
from txl.cli import main
from txl.runs.directory import RunDirectory
from txl.runs.events import EVENTS, EventName, TrainEvent, fields_of, select

SOURCE = Path(txl.__file__).parent
NAMES = frozenset(EventName)
SPLITS = {"train", "valid", "test"}


def _names_in(node: ast.AST) -> set[str]:
    return {str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant) and each.value in NAMES}


def _is_event(node: ast.AST) -> bool:
    """Return whether an expression is `X["event"]`, `X.get("event")`, or a variable named `event`."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "event"
    if isinstance(node, ast.Call):
        return [each.value for each in node.args if isinstance(each, ast.Constant)][:1] == ["event"]
    return isinstance(node, ast.Name) and node.id == "event"


def _bare_names(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Yield the lines that use event names as plain strings, and the names; the context identifies event names."""
    for node in ast.walk(tree):
        names: set[str] = set()
        if isinstance(node, ast.Compare) and any(map(_is_event, (node.left, *node.comparators))):
            names = _names_in(node)
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            is_key = [isinstance(key, ast.Constant) and key.value == "event" for key in node.keys]
            names = set().union(*(_names_in(value) for (_, value), of in zip(pairs, is_key, strict=True) if of))
        elif isinstance(node, (ast.Set, ast.Tuple, ast.List)) and len(node.elts) > 1:
            names = _names_in(node)
            all_names = all(isinstance(each, ast.Constant) and each.value in NAMES for each in node.elts)
            names = names if all_names and not names <= SPLITS else set()
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            reads = any(isinstance(each, ast.Name) and each.id == "events" for each in node.args)
            if (called in ("append", "record") and len(node.args) + len(node.keywords) > 1) or reads:
                names = set().union(*map(_names_in, node.args))
            elif any(map(_is_event, node.args)):  # {"eval": ...}.get(event["event"])
                names = _names_in(node.func)
        if names:
            yield node.lineno, names  # pyright: ignore


def test_no_name_of_an_event_is_a_bare_string():
    found = []
    for path in SOURCE.rglob("*.py"):
        if path != SOURCE / "runs" / "events.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [f"{path.relative_to(SOURCE)}:{line}: {names}" for line, names in _bare_names(tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        'log.record("save failed", 3, reason="")',
        'directory.append("end", 3)',
        'x = [e for e in events if e["event"] == "stop"]',
        'x = e.get("event") in ("start", "resume")',
        'kinds = ("train", "checkpoint")',
        '_count(events, "skipped")',
        '{"eval": 1}.get(e["event"])',
        'line = {"event": "import"}',
        'if event != "resume": pass',
    ],
)
def test_a_bare_name_is_found(code):
    assert list(_bare_names(ast.parse(code)))


def test_every_event_has_its_fields():
    assert EVENTS.keys() == NAMES
    assert all(kind.__doc__ for kind in EVENTS.values())


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
    left_out = f"note: {log}: {len(damaged)} lines left out, torn by a crash or without all fields"
    assert capsys.readouterr().err == f"{left_out}\n"


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
