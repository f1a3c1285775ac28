"""The Python standard library's own sources as a corpus: the text that every installation contains."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

from txl.data.formats import first_bad_byte
from txl.data.pieces import SPLITS, TRAIN_END, VALID_END, Piece, Pieces


def stdlib_files() -> list[Path]:
    """Return the Python standard library's own `.py` files, without installed packages, in the order of paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    foreign = {"site-packages", "dist-packages", "__pycache__"}
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - foreign)
        found.extend(Path(folder) / name for name in files if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def stdlib_pieces(unit: str = "byte") -> Pieces:
    """Return the pieces of the Python standard library's own `.py` files.

    Whole files are assigned to the splits, 90/5/5 by bytes, in the order of the sha256 of their path within the
    library. Within a split, files are sorted by path, so that the files of a package stay together. A few files, with
    which the library tests Python's reading of source files, are not UTF-8 text: only the unit byte reads them; other
    units leave them out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sizes = {path.relative_to(root).as_posix(): path.stat().st_size for path in stdlib_files()}
    middle, total = 0.0, sum(sizes.values())
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        middle += sizes[name] / 2
        names["train" if middle < TRAIN_END * total else "valid" if middle < VALID_END * total else "test"].append(name)
        middle += sizes[name] / 2
    # Behind a line end, a character that the end of a file cuts off is a bad byte, too.
    return {
        split: [
            Piece(root / name)
            for name in sorted(names[split])
            if sizes[name] and (unit == "byte" or first_bad_byte((root / name).read_bytes() + b"\n") is None)
        ]
        for split in SPLITS
    }
