"""Pages and plots that are made from the records in `results/`, and checked against them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from txl.reporting.plots import save_figure
from txl_lab.records import RESULTS

Record = dict[str, Any]
DOCS = RESULTS.parent / "docs"


@dataclass(frozen=True)
class RecordedPlot:
    """A plot of records, in a file that contains a digest of what it shows."""

    path: Path
    shown: list[Any]  # contents of the plot, ready for JSON
    size: tuple[float, float]  # width and height in inches
    draw: Callable[[Figure], None]

    @property
    def digest(self) -> str:
        """Digest that the plot's file contains, which shows if the plot matches its records."""
        return hashlib.sha256(json.dumps(self.shown).encode()).hexdigest()[:16]

    @property
    def is_current(self) -> bool:
        """True if the file exists and matches the records."""
        return self.path.is_file() and self.digest in self.path.read_text(encoding="utf-8")

    def write(self) -> None:
        """Draw the plot into its file."""
        save_figure(self.draw, self.path, self.size, self.digest)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows))


def read_record(results: Path, name: str) -> Record:
    """Return the record with a name, the file's without extension."""
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def write_or_check(script: str, write: Callable[[], None], check: Callable[[], list[str]]) -> None:
    """Run a script that makes a page: write it, or with `--check` end with code 1 if files do not match the records."""
    if sys.argv[1:] == ["--check"]:
        if wrong := check():
            sys.exit(f"not what results/ gives: {', '.join(wrong)}; run python -m benchmarks.{script}")
    elif sys.argv[1:]:
        sys.exit(f"usage: python -m benchmarks.{script} [--check]")
    else:
        write()
