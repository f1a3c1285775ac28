"""Record the JSON output of a `txl` command, or the log of a run, with command, commit, date and hardware.

    python benchmarks/record.py results/bench-train.json bench train --json
    python benchmarks/record.py results/demo.json --run runs/demo make demo

The first form runs the command. The second form reads a run directory, and records the command that made it (here `make
demo`). The numbers in the README come from such files. Run it from a clean working tree: the commit is part of the
record.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from txl.cli import main
from txl.runs.directory import RunDirectory
from txl.runs.environment import describe_hardware, describe_software


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def record(path: Path, words: list[str]) -> int:
    """Run the command, and write the record if the command succeeds."""
    sys.argv = ["txl", *words]  # pages state the command that made them
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(words)
    if code == 0:
        write(path, f"txl {shlex.join(words)}", json.loads(printed.getvalue()))
    return code


def record_run(path: Path, directory: Path, command: str) -> None:
    """Write the record of a finished run: its start, its last training line, and every measurement."""
    events = RunDirectory(directory).events()
    kept = [event for event in events if event["event"] in ("valid", "eval", "sweep", "compression", "end", "demo")]
    start = next(event for event in events if event["event"] == "start")
    last = [event for event in events if event["event"] == "train"][-1]
    for event in (start, last, *kept):
        event.pop("time", None)
    start["command"][0] = "txl"  # instead of the program's path on this machine
    for one_elsewhere in ("hardware", "software"):
        start.pop(one_elsewhere, None)
    write(path, command, {"start": start, "last_training_line": last, "measurements": kept})


def write(path: Path, command: str, output: Any, device: str = "cpu") -> None:
    """Write one record of a measurement on a device."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    value = {
        "command": command,
        "commit": git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": describe_hardware(device),
        "software": describe_software(),
        "output": output,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_if_asked(module: str, output: Any) -> None:
    """Write the record to the file given on a benchmark's command line, if any."""
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]), f"python -m benchmarks.{module} {sys.argv[1]}", output)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} FILE COMMAND [OPTION ...] | FILE --run DIRECTORY COMMAND")
    target, first, *rest = sys.argv[1:]
    if first == "--run":
        record_run(Path(target), Path(rest[0]), shlex.join(rest[1:]))
    else:
        sys.exit(record(Path(target), [first, *rest]))
