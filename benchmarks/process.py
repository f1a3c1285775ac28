"""Measurement of memory: each case runs in a separate process, whose memory the system records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def status(name: str) -> int:
    """Return a figure of this process in bytes: VmRSS is the memory held now, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def run_alone(module: str, *words: str) -> dict[str, Any]:
    """Return a module's JSON output from a new process, whose C library returns large buffers when they are freed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)
