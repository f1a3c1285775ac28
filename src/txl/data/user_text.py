"""A user's own text: the files that a path, folder or glob names, and their splits."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

from txl.data.compressed import COMPRESSED
from txl.data.formats import refuse_formats
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
        raise UserError(f"{text}: empty; expected some text")
    edges = [0, *(character_start(paths, sizes, int(share * total)) for share in (TRAIN_END, VALID_END)), total]
    if any(first >= end for first, end in pairwise(edges)):
        raise UserError(f"{text}: {total} bytes are too few to cut into train, valid and test")
    return {
        split: cut(paths, sizes, first, end) for split, first, end in zip(SPLITS, edges[:-1], edges[1:], strict=True)
    }


def find_files(text: str) -> list[Path]:
    """Return the files that a path, folder or glob names, sorted.

    In folders, hidden files and directories that this package writes (runs, reproductions, prepared corpora) are left
    out. A file or folder that is found through several links is read once.

    Raises:
        UserError: if nothing is found, or something cannot be read.
    """
    path = Path(text)
    files: list[Path] = []
    try:
        if path.is_file():
            return [path.absolute()]
        if path.is_dir():
            files = _without_links(sorted(_files_below(path)))
            if not files:
                raise UserError(f"{text}: the folder holds no files")
            return files
        if not glob.has_magic(text):
            path.stat()  # raises an error that gives the reason
            raise UserError(f"{text}: neither a file nor a folder; expected text in a file, not a pipe or device")
        files = _without_links([path for path in map(Path, sorted(glob.glob(text, recursive=True))) if path.is_file()])
        if not files or "**" in text:  # glob skips unreadable folders: listing them raises the error
            start = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
            list(_files_below(start)) if "**" in text else os.listdir(start)
    except (FileNotFoundError, NotADirectoryError):
        files = []
    except OSError as error:
        raise UserError(f"{str(error.filename or text)[:200]}: cannot be read ({error.strerror})") from None
    if not files:
        raise UserError(f"{text}: {'matches no file' if glob.has_magic(text) else 'no such file or folder'}")
    return files


def refuse_no_text(paths: Sequence[Path]) -> None:
    """Refuse files whose names are those of archives or of a compression that is not read, or that hold no text."""
    endings = f"{', '.join(COMPRESSED[:-1])} or {COMPRESSED[-1]}"
    for path in paths:
        if _UNREADABLE.search(path.name) or (COMPRESSED_END.search(path.name) and path.suffix not in COMPRESSED):
            raise UserError(f"{path}: files of this kind are not read; expected text, or {endings}")
    refuse_formats(paths)


def _without_links(paths: list[Path]) -> list[Path]:
    """Return absolute paths in the same order; of several paths to one file only the first, or the one without link."""
    chosen: dict[str, Path] = {}
    for path in sorted(paths, key=Path.is_symlink):
        chosen.setdefault(os.path.realpath(path), path)
    only = set(chosen.values())
    return [path.absolute() for path in dict.fromkeys(paths) if path in only]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, without hidden files and what this package writes.

    Raises:
        OSError: if a folder cannot be read; its files would otherwise be left out unnoticed.
    """

    def fail(error: OSError) -> None:
        raise error

    seen = set()
    for inside, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders.sort()
        status = os.stat(inside)
        if (status.st_dev, status.st_ino) in seen or _is_ours({*folders, *names}):
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = (Path(inside) / name for name in names if not name.startswith("."))
        yield from (path for path in files if path.is_file())


def _is_ours(names: set[str]) -> bool:
    """Return whether a folder that contains `names` is a run, a reproduction or a prepared corpus."""
    marks = {
        "config.json": {"checkpoints", "log.jsonl"},
        "meta.json": {"train.tokens", "all.tokens"},
        "experiment.json": {"results", "locks"},
    }
    return any(name in names and beside & names for name, beside in marks.items())
