"""Run a `txl` command that prints JSON and keep what it printed, with command, commit, date and hardware.

    python benchmarks/record.py results/bench-train.json bench train --json

The README's numbers come from files made this way. Run it from a clean working tree: the commit is part of the record.
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

from txl.cli import main
from txl.training.environment import describe_hardware, describe_software


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def record(path: Path, words: list[str]) -> int:
    """Run the command; on success write the record."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(words)
    if code != 0:
        return code
    changed = git("status", "--porcelain", "--untracked-files=no")
    value = {
        "command": f"txl {shlex.join(words)}",
        "commit": git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": describe_hardware("cpu"),
        "software": describe_software(),
        "output": json.loads(printed.getvalue()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} FILE COMMAND [OPTION ...]")
    sys.exit(record(Path(sys.argv[1]), sys.argv[2:]))
