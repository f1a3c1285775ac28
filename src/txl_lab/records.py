"""Records of measurements: a result with the command, commit, date, hardware and software that it comes from.

A script of `benchmarks/` ends with `measure_and_record(NAME, measure)`: it measures, and writes the record to the file
that its command line names, if any. Pages are made from the records in `results/` (`txl_lab.pages`).
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from txl.devices import keep_freed_memory
from txl.files import JsonObject
from txl.runs.environment import describe_hardware, describe_software

RESULTS = Path(__file__).parents[2] / "results"
_CASE = "-"  # first word of the command line of a process that measures one case


def header(command: str, device: str = "cpu") -> JsonObject:
    """Return a record's command, commit, date, hardware and software."""
    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        commit = git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # the tree may be a copy without its history
        commit = "unknown"
    return {
        "command": command,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": describe_hardware(device),
        "software": describe_software(),
    }


def git(*words: str) -> str:
    """Return what a command of git prints."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def write(path: Path, command: str, output: Any, device: str = "cpu") -> None:
    """Write the record of a measurement on a device."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(header(command, device) | {"output": output}, indent=1) + "\n", encoding="utf-8")


def measure_and_record(
    script: str, measure: Callable[..., Any], case: Callable[..., Any] | None = None, *, keeps_memory: bool = True
) -> None:
    """Run a script: measure, print the result if there is no file for it, and write the record if there is one.

    `case` measures one case in a process of its own (`run_alone`), from words. Freed memory is kept, as in training,
    except by measurements of memory.
    """
    if sys.argv[1:2] == [_CASE]:
        assert case is not None
        print(json.dumps(case(*sys.argv[2:])))
        return
    if keeps_memory:
        keep_freed_memory()
    output = measure(*sys.argv[2:])
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]), f"python -m benchmarks.{script} {shlex.join(sys.argv[1:])}", output)
    else:
        print(json.dumps(output, indent=1))


def run_alone(script: str, *words: str) -> Any:
    """Measure a case of a script in a new process, whose C library returns large buffers when they are freed."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script}", _CASE, *words],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def process_bytes(name: str) -> int:
    """Return a figure of this process in bytes: VmRSS is the memory held now, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
