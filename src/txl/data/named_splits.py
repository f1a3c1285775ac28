"""Tell the splits of a folder of texts by the names of its files and folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from txl.data.pieces import SPLITS
from txl.errors import UserError

# Words for each split in the names of files and folders, as regular expressions.
_WORDS = {"train": "train", "valid": "valid|validation|val|dev", "test": "test"}
_OF_FOLDER = {word: split for split, words in _WORDS.items() for word in words.split("|")} | {"training": "train"}
# The word of a split between dots, dashes or underscores, such as ptb.train.txt, with or without a number.
_NAMES = {split: re.compile(rf"(.*[._-])?(?:{words})(\d*)([._-].*)?", re.IGNORECASE) for split, words in _WORDS.items()}
COMPRESSED_END = re.compile(r"\.(gz|bz2|xz|zst)$", re.IGNORECASE)
_TEXT_END = re.compile(r"\.(txt|text|tokens|raw|jsonl?|csv|tsv)$", re.IGNORECASE)
# Ends of the names of programs, which may happen to be called train and test.
_CODE_END = re.compile(r"\.(py|ipynb|sh|js|ts|c|cc|cpp|cu|h|java|go|rs|jl|lua|pl|rb|r)$", re.IGNORECASE)

Splits = dict[str, list[Path]]  # files of each split


class _Named(NamedTuple):
    """A file whose name is made of `before`, the word of a split, `number` and `after`."""

    path: Path
    split: str
    before: str
    number: str
    after: str

    @property
    def is_text(self) -> bool:
        """True if the name ends like that of a text."""
        return _TEXT_END.search(self.after) is not None

    @property
    def rest(self) -> Hashable:
        """Folder and name without the split."""
        return self.path.parent, self.before.lower(), self.after.lower()


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
    root = folder.absolute()
    named = [
        _Named(path, split, match[1] or "", match[2], COMPRESSED_END.sub("", match[3] or ""))
        for path in paths
        for split, name in _NAMES.items()
        if (match := name.fullmatch(path.name))
    ]
    whole = [file for file in named if not file.number]
    texts = [file for file in whole if file.is_text]
    plain = _by_split((file.split, file.path) for file in texts if file.path.parent == root and not file.before)
    for splits in (plain, _by_split((file.split, file.path) for file in whole if file.is_text or not file.after)):
        if _has_one_file_each(splits) and len({path.parent for (path,) in splits.values()}) == 1:
            return splits
    sets = _sets(texts, lambda file: file.rest)
    if not sets:
        in_folders = _in_folders(folder, paths, plain)
        if in_folders is not None and _is_complete(in_folders, root):
            return in_folders
        sets = (
            [in_folders]
            if in_folders is not None
            else _sets([file for file in named if file.number and file.is_text], lambda file: file.path.parent)
        )
    if not sets:
        others = [file for file in whole if file.path.parent == root and not _CODE_END.search(file.after)]
        sets = [splits for splits in _sets(others, lambda file: file.rest) if all(splits.values())]
    if _number_of_splits(plain) > 1:
        sets = [plain]
    elif len(sets) == 1 and _has_one_file_each(sets[0]):
        return sets[0]
    if sets:
        raise UserError(f"{folder}: {_mixed(root, sets)} (or give the files as a glob to split them by position)")
    return None


def _by_split(files: Iterable[tuple[str, Path]]) -> Splits:
    splits: Splits = {split: [] for split in SPLITS}
    for split, path in files:
        splits[split].append(path)
    return splits


def _sets(files: list[_Named], common: Callable[[_Named], Hashable]) -> list[Splits]:
    """Return the files in sets of those that have something in common, without the sets of a single split."""
    sets: dict[Hashable, list[tuple[str, Path]]] = {}
    for file in files:
        sets.setdefault(common(file), []).append((file.split, file.path))
    return [splits for splits in map(_by_split, sets.values()) if _number_of_splits(splits) > 1]


def _has_one_file_each(splits: Splits) -> bool:
    return all(len(files) == 1 for files in splits.values())


def _number_of_splits(splits: Splits) -> int:
    return sum(map(bool, splits.values()))


def _is_complete(splits: Splits, root: Path) -> bool:
    """Return whether every split has files, in one folder (or one file) of the root for each split."""
    tops = {path.relative_to(root).parts[0] for path in chain(*splits.values())}
    return all(splits.values()) and len(tops) == len(SPLITS)


def _in_folders(folder: Path, paths: list[Path], plain: Splits) -> Splits | None:
    """Return the files in folders named after splits, if `folder` itself has such folders, else None.

    In `folder` itself, a file such as train.txt (`plain`) counts as a folder of its split, if the split has none.

    Raises:
        UserError: if a folder further down has such folders, and `folder` does not have all three.
    """
    root = folder.absolute()
    below: dict[Path, list[tuple[str, Path]]] = {}
    for path in paths:
        names = path.relative_to(root).parts[:-1]
        depth = next((depth for depth, name in enumerate(names) if name.lower() in _OF_FOLDER), None)
        if depth is not None:
            below.setdefault(root.joinpath(*names[:depth]), []).append((names[depth].lower(), path))
    if root in below:
        present = {_OF_FOLDER[name] for name, _ in below[root]}
        below[root] += [(split, path) for split, files in plain.items() if split not in present for path in files]
    parents = {parent: splits for parent, files in below.items() if (splits := _of_folders(files, parent == root))}
    splits = parents.pop(root, None)
    if parents and (splits is None or not _is_complete(splits, root)):
        parent = next(iter(parents))
        raise UserError(
            f"{folder}: {parent.relative_to(root)} in it has folders named after splits; give {parent} (or give "
            f"the files as a glob to split them by position)"
        )
    return splits


def _of_folders(files: list[tuple[str, Path]], in_root: bool) -> Splits | None:
    """Return the splits of the files below folders with these names, None if the folders are not those of splits.

    The names `training` and `dev` have other uses too: the first counts only without a folder `train` beside it, the
    second only beside one. The folders count if they are those of all splits, or of two splits with texts. Below the
    root, where folders have such names for many reasons, one of them must be for training; all of them must have a
    file that is not a program, or two of them a file whose name ends like that of a text.
    """
    names = {name for name, _ in files}
    left_out = "training" if "train" in names else None if "training" in names else "dev"
    splits = _by_split((_OF_FOLDER[name], path) for name, path in files if name != left_out)

    def splits_with(is_text: Callable[[str], object]) -> int:
        return sum(any(is_text(COMPRESSED_END.sub("", path.name)) for path in paths) for paths in splits.values())

    prose = splits_with(lambda name: not _CODE_END.search(name))
    if in_root:
        counts = all(splits.values()) or prose > 1
    else:
        counts = splits["train"] and (prose == len(SPLITS) or splits_with(_TEXT_END.search) > 1)
    return splits if counts else None


def _mixed(root: Path, sets: list[Splits]) -> str:
    """Return the reason why the splits cannot be told apart."""
    names = {
        path.relative_to(root).as_posix(): words
        for splits in sets
        for words, files in zip(_WORDS.values(), splits.values(), strict=True)
        for path in files
    }
    listed = f"holds {', '.join(list(names)[:6])}{' ...' if len(names) > 6 else ''}"
    missing = next((split for split in SPLITS if not sets[0][split]), None)
    if missing is None or len(sets) > 1:
        return f"{listed}, more than one for a split"
    name, words = next(iter(names.items()))
    expected = re.sub(f"training|{words}", missing, name, count=1, flags=re.IGNORECASE)
    return f"{listed}, but no {missing} split; expected {expected} too"
