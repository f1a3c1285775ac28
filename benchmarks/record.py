"""Record the JSON output of a `txl` command, or the log of a run, with command, commit, date and hardware.

    python benchmarks/record.py results/bench-train.json bench train --json
    python benchmarks/record.py results/demo.json --run runs/demo make demo

The first form runs the command. The second form reads a run directory, and records the command that made it (here `make
demo`). The numbers in the README come from such files. Run it from a clean working tree: the commit is part of the
record.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path

from txl.cli import main
from txl.runs.directory import RunDirectory
from txl_lab.records import write


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


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} FILE COMMAND [OPTION ...] | FILE --run DIRECTORY COMMAND")
    target, first, *rest = sys.argv[1:]
    if first == "--run":
        record_run(Path(target), Path(rest[0]), shlex.join(rest[1:]))
    else:
        sys.exit(record(Path(target), [first, *rest]))
