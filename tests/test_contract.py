"""What users' scripts rely on: names of Python, options, keys of JSON and of files, routes. None may go unnoticed.

After a change that was decided, `TXL_WRITE_CONTRACT=1 pytest tests/test_contract.py` writes `contract.json` anew; its
diff shows what users lose.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import txl
from txl.cli import main

PROMISED = Path(__file__).with_name("contract.json")
COMMANDS = (
    "attention bench compress data decompress demo eval export generate import presets recl report reproduce samples score "
    "serve status train"
).split()


def _options(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    return " ".join(sorted(set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w.-]*", capsys.readouterr().out))))


def _parameters(name: str) -> str:
    """Return the parameters of a public name, in order, with their default values."""
    try:
        parameters = inspect.signature(getattr(txl, name)).parameters.values()
    except (TypeError, ValueError):
        return ""
    return ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters)


def _keys(value: Any, name: str = "") -> set[str]:
    """Return the paths of all keys in a JSON value; the elements of a list share one path."""
    if isinstance(value, dict):
        return {path for key, inner in value.items() for path in {f"{name}.{key}", *_keys(inner, f"{name}.{key}")}}
    return {path for inner in value for path in _keys(inner, name)} if isinstance(value, list) else set()


def _printed(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*command, "--json"]) == 0
    return " ".join(sorted(_keys(json.loads(capsys.readouterr().out))))


def _files_of(run: Path) -> dict[str, str]:
    """Return the keys of a run's files and of each kind of event in its log, and the names in its checkpoints."""
    checkpoint = run / "checkpoints" / (run / "latest").read_text().strip()
    events = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    keys = {
        f"log.jsonl {event}": set().union(*(_keys(line) for line in events if line["event"] == event))
        for event in ("checkpoint", "end", "start", "train", "valid")  # other tests may have added others
    }
    for path in (run / "config.json", run / "vocabulary.json", checkpoint / "manifest.json"):
        keys[path.name] = _keys(json.loads(path.read_text(encoding="utf-8")))
    keys["checkpoint"] = {path.name for path in checkpoint.iterdir()}
    keys["run directory"] = {path.name for path in run.iterdir() if path.suffix in ("", ".json", ".jsonl")}
    return {name: " ".join(sorted(paths)) for name, paths in keys.items()}


def current(trained: Path, story: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the names that there are now, in the shape of `contract.json`."""
    run = shutil.copytree(trained, folder / "run")
    few = ["--max-tokens", "300"]
    return {
        "python": {name: _parameters(name) for name in sorted(vars(txl)["__all__"])},
        "options": {command: _options(command, capsys) for command in COMMANDS},
        "files": _files_of(run),
        "json": {
            "eval": _printed(["eval", str(run), *few], capsys),
            "eval --dynamic": _printed(["eval", str(run), *few, "--dynamic", "sgd", "--dynamic-learning-rate", "1e-4"], capsys),
            "generate": _printed(["generate", str(run), "--prompt", "The ", "--max-tokens", "3"], capsys),
            "status": _printed(["status", str(run)], capsys),
            "data info": _printed(["data", "info", str(story)], capsys),
            "train --dry-run": _printed(["train", "stdlib-tiny", "--dry-run"], capsys),
            "presets": _printed(["presets"], capsys),
        },
    }  # fmt: skip


def test_nothing_that_scripts_rely_on_has_gone(trained, story, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    names = current(trained, story, tmp_path, capsys)
    if os.environ.get("TXL_WRITE_CONTRACT"):
        PROMISED.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    assert names == json.loads(PROMISED.read_text(encoding="utf-8"))
