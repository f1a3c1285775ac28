"""Files and splits of a user's own text, which a path, folder or glob names, and of the Python standard library."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

from txl.data.compressed import COMPRESSED
from txl.data.formats import first_bad_byte, refuse_formats
from txl.data.named_splits import COMPRESSED_END, named_splits
from txl.data.pieces import SPLITS, TRAIN_END, VALID_END, Piece, Pieces, character_start, content_size, cut
from txl.errors import UserError

# Ends of the names of archives and compressed files that are not decompressed.
_UNREADABLE = re.compile(r"\.(zip|tar|tgz|tbz2?|txz|tzst|7z|rar|lz4|lzma|br|z)$|\.tar\.(gz|bz2|xz|zst)$", re.IGNORECASE)


def is_cut(text: str) -> bool:
    """Return whether a user's text is cut by position, because it has no files named after the splits."""
    try:
        return not Path(text).is_dir() or named_splits(Path(text), find_files(text)) is None
    except UserError:  # the folder has changed since
        return True


def user_pieces(text: str) -> Pieces:
    """Return the splits of a user's file, folder or glob.

    A folder with files or folders named train, valid (or validation, val, dev) and test has these splits. All other
    files are concatenated in the order of their paths and cut 90/5/5 by position, at the beginning of a UTF-8
    character.

    Raises:
        UserError: if the splits cannot be told apart, or a file is an archive or no text.
    """
    paths = find_files(text)
    named = named_splits(Path(text), paths) if Path(text).is_dir() else None
    refuse_no_text(paths if named is None else [*chain(*named.values())])
    if named is not None:
        return {split: [Piece(path) for path in files] for split, files in named.items()}
    sizes = [content_size(path) for path in paths]
    total = sum(sizes)
    if total == 0:
        raise UserError(f"{text}: empty", expected="some text")
    edges = [0, *(character_start(paths, sizes, int(share * total)) for share in (TRAIN_END, VALID_END)), total]
    if any(first >= end for first, end in pairwise(edges)):
        raise UserError(f"{text}: {total} bytes are too few to cut into train, valid and test")
    return {split: cut(paths, sizes, *bounds) for split, bounds in zip(SPLITS, pairwise(edges), strict=True)}


def find_files(text: str) -> list[Path]:
    """Return the files that a path, folder or glob names, sorted.

    In folders, hidden files and directories that this package writes (runs, reproductions, prepared corpora) are left
    out. A file or folder that is found through several links is read once.

    Raises:
        UserError: if nothing is found, or something cannot be read.
    """
    path, magic = Path(text), glob.has_magic(text)
    try:
        if path.is_file():
            return [path.absolute()]
        if path.is_dir():
            files = _without_links(sorted(_files_below(path)))
        elif not magic:
            path.stat()  # raises an error that gives the reason
            raise UserError(f"{text}: neither a file nor a folder", expected="text in a file, not a pipe or device")
        else:
            found = map(Path, sorted(glob.glob(text, recursive=True)))
            files = _without_links([path for path in found if path.is_file()])
            if not files or "**" in text:  # glob skips unreadable folders: listing them raises the error
                start = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
                list(_files_below(start)) if "**" in text else os.listdir(start)
    except (FileNotFoundError, NotADirectoryError):
        files = []
    except OSError as error:
        raise UserError(f"{str(error.filename or text)[:200]}: cannot be read ({error.strerror})") from None
    if not files:
        raise UserError(f"{text}: {'no file is there' if magic or path.is_dir() else 'no such file or folder'}")
    return files


def refuse_no_text(paths: Sequence[Path]) -> None:
    """Refuse files whose names are those of archives or of a compression that is not read, or that hold no text."""
    for path in paths:
        if _UNREADABLE.search(path.name) or (COMPRESSED_END.search(path.name) and path.suffix not in COMPRESSED):
            raise UserError(f"{path}: files of this kind are not read", expected=f"text, or {', '.join(COMPRESSED)}")
    refuse_formats(paths)


def _without_links(paths: list[Path]) -> list[Path]:
    """Return absolute paths in the same order; of several paths to one file only the first, or the one without link."""
    chosen: dict[str, Path] = {}
    for path in sorted(paths, key=Path.is_symlink):
        chosen.setdefault(os.path.realpath(path), path)
    only = set(chosen.values())
    return [path.absolute() for path in dict.fromkeys(paths) if path in only]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, without hidden files and what this package writes."""

    def fail(error: OSError) -> None:
        raise error  # else the files of a folder that cannot be read would be left out unnoticed

    ours = {
        "config.json": {"checkpoints", "log.jsonl"},
        "meta.json": {"train.tokens", "all.tokens"},
        "experiment.json": {"results", "locks"},
    }
    seen = set()
    for inside, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        status, names = os.stat(inside), {*folders, *files}
        is_ours = any(mark in names and beside & names for mark, beside in ours.items())
        if is_ours or (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        visible = (Path(inside) / name for name in files if not name.startswith("."))
        yield from (path for path in visible if path.is_file())


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

    def is_read(name: str) -> bool:
        # Behind a line end, a character that the end of a file cuts off is a bad byte, too.
        return sizes[name] > 0 and (unit == "byte" or first_bad_byte((root / name).read_bytes() + b"\n") is None)

    return {split: [Piece(root / name) for name in sorted(names[split]) if is_read(name)] for split in SPLITS}
