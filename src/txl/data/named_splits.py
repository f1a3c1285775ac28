"""Tell the splits of a folder of texts by the names of its files and folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from txl.data.sources import SPLITS
from txl.errors import UserError

_SPLIT_WORDS = {"train": "train", "valid": "valid|validation|val|dev", "test": "test"}
"""Words for each split in file and folder names, as regular expressions."""
_SPLIT_OF_FOLDER = {word: split for split, words in _SPLIT_WORDS.items() for word in words.split("|")}
_SPLIT_OF_FOLDER["training"] = "train"
COMPRESSED_END = re.compile(r"\.(gz|bz2|xz|zst)$", re.IGNORECASE)
_TEXT_END = re.compile(r"\.(txt|text|tokens|raw|jsonl?|csv|tsv)$", re.IGNORECASE)
_CODE_END = re.compile(r"\.(py|ipynb|sh|js|ts|c|cc|cpp|cu|h|java|go|rs|jl|lua|pl|rb|r)$", re.IGNORECASE)
"""Ends of file names of programs, which may happen to be called train and test."""

Splits = dict[str, list[Path]]
"""Files of each split."""


@dataclass(frozen=True)
class _Named:
    """A file with the word of a split in its name: `before`, the word, `after`."""

    path: Path
    split: str
    before: str
    after: str

    @property
    def is_text(self) -> bool:
        """Return whether the name ends like that of a text."""
        return _TEXT_END.search(self.after) is not None


def named_splits(folder: Path, paths: list[Path]) -> Splits | None:
    """Return the files of each split if their names tell the splits apart, else None.

    Capital letters do not matter. The first of these rules that applies is used: plain names, such as train.txt, in the
    folder itself; one text for each split in one folder, whatever the rest of its name; a single set of texts whose
    names differ only in the split, such as ptb.train.txt; folders named after splits; names with numbers, such as
    train1.txt; in the folder itself, a single set of other files that are not source code, such as train.en.

    Raises:
        UserError: if there are texts of two splits, but not a single set of all three. Concatenating and cutting them
            anew would train on text meant for testing.
    """
    root, named = folder.absolute(), _with_a_split_in_their_names(paths)
    plain = _by_split(
        (each.split, each.path) for each in named if each.path.parent == root and not each.before and each.is_text
    )
    texts = _by_split((each.split, each.path) for each in named if each.is_text or not each.after)
    for found in (plain, texts):
        if _one_file_each(found) and len({path.parent for (path,) in found.values()}) == 1:
            return found
    sets = [found for found in _sets([each for each in named if each.is_text]) if _number_of_splits(found) > 1]
    if not sets:
        in_folders = _splits_in_folders(folder, paths, plain)
        if in_folders is not None and _is_complete(in_folders, root):
            return in_folders
        sets = [in_folders] if in_folders is not None else _numbered(paths) or _sets_of_other_files(named, root)
    if _number_of_splits(plain) > 1:
        sets = [plain]
    elif len(sets) == 1 and _one_file_each(sets[0]):
        return sets[0]
    if sets:
        raise UserError(f"{folder}: {_mixed(root, sets)} (or give the files as a glob to split them by position)")
    return None


def _with_a_split_in_their_names(paths: list[Path]) -> list[_Named]:
    """Return the files whose names have a split's word between dots, dashes or underscores, such as ptb.train.txt."""
    return [
        _Named(path, split, found[1] or "", COMPRESSED_END.sub("", found[3] or ""))
        for path in paths
        for split, words in _SPLIT_WORDS.items()
        if (found := re.fullmatch(rf"(.*[._-])?({words})([._-].*)?", path.name, re.IGNORECASE))
    ]


def _sets(named: list[_Named]) -> list[Splits]:
    """Return the files in sets: those of one folder whose names differ only in the split."""
    sets: dict[tuple[Path, str, str], list[tuple[str, Path]]] = {}
    for each in named:
        key = each.path.parent, each.before.lower(), each.after.lower()
        sets.setdefault(key, []).append((each.split, each.path))
    return [_by_split(files) for files in sets.values()]


def _sets_of_other_files(named: list[_Named], root: Path) -> list[Splits]:
    """Return the complete sets of files in the folder itself that are no programs, such as train.en."""
    others = [each for each in named if each.path.parent == root and not _CODE_END.search(each.after)]
    return [found for found in _sets(others) if all(found.values())]


def _splits_in_folders(folder: Path, paths: list[Path], plain: Splits) -> Splits | None:
    """Return the files in folders named after splits, if `folder` itself has such folders, else None.

    Raises:
        UserError: if a folder further down has such folders, and `folder` does not have all three.
    """
    root = folder.absolute()
    parents = _split_folders(root, paths, plain)
    found = parents.pop(root, None)
    if parents and (found is None or not _is_complete(found, root)):
        parent = next(iter(parents))
        raise UserError(
            f"{folder}: {parent.relative_to(root)} in it has folders named after splits; give {parent} (or give "
            f"the files as a glob to split them by position)"
        )
    return found


def _is_complete(found: Splits, root: Path) -> bool:
    """Return whether every split has files, in one folder (or one file) of the root for each split."""
    tops = {path.relative_to(root).parts[0] for path in chain(*found.values())}
    return all(found.values()) and len(tops) == len(SPLITS)


def _one_file_each(found: Splits) -> bool:
    return all(len(files) == 1 for files in found.values())


def _number_of_splits(found: Splits) -> int:
    return sum(map(bool, found.values()))


def _split_folders(root: Path, paths: list[Path], plain: Splits) -> dict[Path, Splits]:
    """Return the files below folders named after splits, by the parent of these folders.

    In the root, a file such as train.txt (`plain`) counts as a folder of its split, if the split has none.
    The names `training` and `dev` have other uses too: the first counts only without a folder `train` beside it, the
    second only beside one. A parent counts if its folders are those of all splits, or of two splits with texts. Below
    the root, where folders have such names for many reasons, one of them must be for training; all of them must have a
    file that is not a program, or two of them a file whose name ends like that of a text.
    """
    below: dict[Path, list[tuple[str, Path]]] = {}
    for path in paths:
        folders = [folder.lower() for folder in path.relative_to(root).parts[:-1]]
        depth = next((depth for depth, folder in enumerate(folders) if folder in _SPLIT_OF_FOLDER), None)
        if depth is not None:
            below.setdefault(root.joinpath(*path.relative_to(root).parts[:depth]), []).append((folders[depth], path))
    if root in below:
        have = {_SPLIT_OF_FOLDER[folder] for folder, _ in below[root]}
        below[root] += [(split, path) for split, files in plain.items() if split not in have for path in files]

    def count(found: Splits, is_text: Callable[[str], bool]) -> int:
        names = ([COMPRESSED_END.sub("", path.name) for path in files] for files in found.values())
        return sum(any(map(is_text, each)) for each in names)

    parents = {}
    for parent, files in below.items():
        names = {name for name, _ in files}
        left_out = {"training"} if "train" in names else set() if "training" in names else {"dev"}
        found = _by_split((_SPLIT_OF_FOLDER[name], path) for name, path in files if name not in left_out)
        prose = count(found, lambda name: not _CODE_END.search(name))
        if parent == root:
            counts = all(found.values()) or prose > 1
        else:
            texts = count(found, lambda name: bool(_TEXT_END.search(name)))
            counts = bool(found["train"]) and (prose == len(SPLITS) or texts > 1)
        if counts:
            parents[parent] = found
    return parents


def _numbered(paths: list[Path]) -> list[Splits]:
    """Return the texts with a split and a number in their names, such as train1.txt, if a folder has two splits."""
    at: dict[Path, list[tuple[str, Path]]] = {}
    for path in paths:
        name = COMPRESSED_END.sub("", path.name)
        for split, words in _SPLIT_WORDS.items():
            if _TEXT_END.search(name) and re.fullmatch(rf"(.*[._-])?({words})\d+[._-].*", name, re.IGNORECASE):
                at.setdefault(path.parent, []).append((split, path))
    return [found for found in map(_by_split, at.values()) if _number_of_splits(found) > 1]


def _by_split(files: Iterable[tuple[str, Path]]) -> Splits:
    found: Splits = {split: [] for split in SPLITS}
    for split, path in files:
        found[split].append(path)
    return found


def _mixed(root: Path, several: list[Splits]) -> str:
    """Return the reason why the splits cannot be told apart."""
    held = {
        path.relative_to(root).as_posix(): words
        for found in several
        for words, files in zip(_SPLIT_WORDS.values(), found.values(), strict=True)
        for path in files
    }
    listed = f"holds {', '.join(list(held)[:6])}{' ...' if len(held) > 6 else ''}"
    missing = next((split for split in SPLITS if not several[0][split]), None)
    if missing is None or len(several) > 1:
        return f"{listed}, more than one for a split"
    name, words = next(iter(held.items()))
    expected = re.sub(f"training|{words}", missing, name, count=1, flags=re.IGNORECASE)
    return f"{listed}, but no {missing} split; expected {expected} too"
