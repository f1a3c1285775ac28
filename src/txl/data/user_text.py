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
from txl.data.pieces import SPLITS, TRAIN_END, VALID_END, Piece, Pieces, character_start, content_size, cut
from txl.errors import UserError

# Ends of the names of archives and compressed files that are not decompressed.
_UNREADABLE = re.compile(r"\.(zip|tar|tgz|tbz2?|txz|tzst|7z|rar|lz4|lzma|br|z)$|\.tar\.(gz|bz2|xz|zst)$", re.IGNORECASE)
_COMPRESSED_END = re.compile(r"\.(gz|bz2|xz|zst)$", re.IGNORECASE)
# Words for each split in the names of files and folders, and patterns of file names with such a word between dots,
# dashes or underscores, such as ptb.train.txt, with or without a number.
_WORDS = {"train": "train", "valid": "valid|validation|val|dev", "test": "test"}
_OF_FOLDER = {word: split for split, words in _WORDS.items() for word in words.split("|")} | {"training": "train"}
_NAMES = {split: re.compile(rf"(.*[._-])?(?:{words})(\d*)([._-].*)?") for split, words in _WORDS.items()}
_TEXT_END = re.compile(r"\.(txt|text|tokens|raw|jsonl?|csv|tsv)$")
# Ends of the names of programs, which may happen to be called train and test.
_CODE_END = re.compile(r"\.(py|ipynb|sh|js|ts|c|cc|cpp|cu|h|java|go|rs|jl|lua|pl|rb|r)$")
_Splits = dict[str, list[Path]]


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
        if _UNREADABLE.search(path.name) or (_COMPRESSED_END.search(path.name) and path.suffix not in COMPRESSED):
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


def named_splits(folder: Path, paths: list[Path]) -> _Splits | None:
    """Return the files of each split if their names tell the splits apart, else None.

    The names are those of the folder's own files and folders; capital letters do not matter. Folders such as train,
    and plain names such as train.txt, come first; else there may be one set of files whose names differ only in the
    split, such as ptb.train.txt.

    Raises:
        UserError: if there are texts of two splits, but not a single set of all three, or if a folder further down has
            such files. Concatenating and cutting them anew would train on text meant for testing.
    """
    root = folder.absolute()
    below: dict[Path, list[Path]] = {root: []}
    for path in paths:
        for parent in path.parents:
            below.setdefault(parent, []).append(path)
            if parent == root:
                break
    by_position = "(or give the files as a glob to split them by position)"
    sets = _sets(root, below.pop(root))
    if len(sets) == 1 and all(sets[0].values()):
        tops = {path.relative_to(root).parts[0] for path in chain(*sets[0].values())}
        if len(tops) == len(SPLITS):
            return sets[0]
    if sets:
        listed = ", ".join(path.relative_to(root).as_posix() for path in chain(*sets[0].values()))
        missing = next((split for split in SPLITS if not sets[0][split]), None)
        fault = "more than one for a split" if missing is None or len(sets) > 1 else f"but no {missing} split"
        raise UserError(f"{folder}: holds {listed[:200]}, {fault}", remedy=by_position)
    for inside, held in sorted(below.items()):
        for splits in _sets(inside, held):
            is_prose = all(
                any(not _CODE_END.search(_name(path)) for path in files) for files in splits.values() if files
            )
            if splits["train"] and is_prose:
                told = f"{inside.relative_to(root)} in it has folders or files named after splits"
                raise UserError(f"{folder}: {told}", remedy=f"give {inside} {by_position}")
    return None


def _sets(folder: Path, paths: list[Path]) -> list[_Splits]:
    """Return the sets of files of all three splits, or texts of two, that the names in a folder tell apart.

    Folders and texts with plain names make up one set; if it is complete, it is the only one. The names `training` and
    `dev` of folders have other uses too: the first counts only without a folder `train` beside it, the second only
    beside one.
    """
    folders: dict[str, list[Path]] = {}
    plain: _Splits = {split: [] for split in SPLITS}
    sets = {("", "", ""): plain}
    for path in paths:
        top, *inside = path.relative_to(folder).parts
        if inside:
            folders.setdefault(top.lower(), []).append(path)
        elif not _CODE_END.search(_name(path)):
            for split, pattern in _NAMES.items():
                if match := pattern.fullmatch(_name(path)):
                    before, number, after = (group or "" for group in match.groups())
                    is_plain = before == number == "" and _TEXT_END.fullmatch(after) is not None
                    rest = ("", "", "") if is_plain else (before, number, after)
                    sets.setdefault(rest, {split: [] for split in SPLITS})[split].append(path)
    left_out = "training" if "train" in folders else "" if "training" in folders else "dev"
    in_folders: _Splits = {}
    for name, held in folders.items():
        if name in _OF_FOLDER and name != left_out:
            in_folders.setdefault(_OF_FOLDER[name], []).extend(held)
    plain.update(in_folders)
    if all(plain.values()):
        return [plain]
    texts = [sum(any(_TEXT_END.search(_name(path)) for path in held) for held in one.values()) for one in sets.values()]
    return [one for one, count in zip(sets.values(), texts, strict=True) if count > 1 or all(one.values())]


def _name(path: Path) -> str:
    return _COMPRESSED_END.sub("", path.name.lower())


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
