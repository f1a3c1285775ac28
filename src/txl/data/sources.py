"""Sources of text: plain or compressed files, and the pieces of files that make up a split."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import zstandard

from txl.errors import UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 1 << 20
"""Bytes read at a time."""
SPLITS = ("train", "valid", "test")
WHOLE = "all"
"""Name of the only split of a text that is read as a whole."""
TRAIN_END, VALID_END = 0.90, 0.95
COMPRESSED = (".gz", ".xz", ".zst")
_COMPRESSED_BLOCK = 1 << 10
"""Compressed bytes of a .zst file read at a time; repetitive text grows ten thousandfold when decompressed."""
_SPLIT_WORDS = {"train": "train", "valid": "valid|validation|val|dev", "test": "test"}
"""Words for each split in file and folder names, as regular expressions."""
_SPLIT_OF_FOLDER = {word: split for split, words in _SPLIT_WORDS.items() for word in words.split("|")}
_SPLIT_OF_FOLDER["training"] = "train"
_COMPRESSED_END = re.compile(r"\.(gz|xz|zst)$", re.IGNORECASE)
_TEXT_END = re.compile(r"\.(txt|text|tokens|raw|jsonl?|csv|tsv)$", re.IGNORECASE)
_CODE_END = re.compile(r"\.(py|ipynb|sh|js|ts|c|cc|cpp|cu|h|java|go|rs|jl|lua|pl|rb|r)$", re.IGNORECASE)
"""Ends of file names of programs, which may happen to be called train and test."""
_UNREADABLE = re.compile(r"\.(bz2|zip|tar|tgz|tbz2?|txz|tzst|7z|rar|lz4|lzma|br|z)$|\.tar\.(gz|xz|zst)$", re.IGNORECASE)
"""Ends of file names of archives and compressed files that are not decompressed."""


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` (None: the file's end) of a file's decompressed content."""

    path: Path
    start: int = 0
    end: int | None = None

    @property
    def size(self) -> int | None:
        """Size in bytes; None if it is unknown without decompressing the file."""
        if self.end is not None:
            return self.end - self.start
        return None if self.path.suffix in COMPRESSED else self.path.stat().st_size - self.start

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes of the piece, at most a megabyte at a time."""
        with open_file(self.path) as file:
            try:
                self._skip(file)
                left = None if self.end is None else self.end - self.start
                while left is None or left > 0:
                    block = file.read(BLOCK if left is None else min(BLOCK, left))
                    if not block:
                        break
                    if left is not None:
                        left -= len(block)
                    yield block
            except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
                raise UserError(f"{self.path}: cannot be read ({error}); it may be incomplete") from None

    def _skip(self, file: IO[bytes]) -> None:
        """Move `file` to the start of the piece."""
        if self.path.suffix not in COMPRESSED:
            file.seek(self.start)
            return
        skipped = 0
        while skipped < self.start:
            part = file.read(min(BLOCK, self.start - skipped))
            if not part:
                break
            skipped += len(part)


Pieces = dict[str, list[Piece]]
"""The pieces of each split, in order."""


def open_file(path: Path) -> IO[bytes]:
    """Open a file's content for reading, decompressed if its name ends in .gz, .xz or .zst."""
    try:
        if path.suffix == ".gz":
            return cast(IO[bytes], gzip.open(path, "rb"))
        if path.suffix == ".xz":
            return lzma.open(path, "rb")
        if path.suffix == ".zst":
            return cast(IO[bytes], io.BufferedReader(_ZstdFile(path), BLOCK))
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


class _ZstdFile(io.RawIOBase):
    """Decompressed content of a .zst file. (The library's own reader does not detect a truncated file.)"""

    def __init__(self, path: Path):
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")
        self._in_frame = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._in_frame = False
            data = data or self._file.read(_COMPRESSED_BLOCK)
            if not data:
                if self._in_frame:
                    raise EOFError("the compressed file ends early")
                return 0
            self._in_frame = True
            self._ready = memoryview(self._frame.decompress(data))
        count = min(memoryview(buffer).nbytes, len(self._ready))
        memoryview(buffer).cast("B")[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


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
    found = [path.relative_to(root).as_posix() for path in stdlib_files()]
    sizes = {name: (root / name).stat().st_size for name in found}
    order = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
    total, seen = sum(sizes.values()), 0
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name in order:
        middle = seen + sizes[name] / 2
        split = "train" if middle < TRAIN_END * total else "valid" if middle < VALID_END * total else "test"
        names[split].append(name)
        seen += sizes[name]
    return {
        split: [
            Piece(root / name)
            for name in sorted(names[split])
            if sizes[name] and (unit == "byte" or _is_utf8(root / name))
        ]
        for split in SPLITS
    }


def _is_utf8(path: Path) -> bool:
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def is_cut(text: str) -> bool:
    """Return whether a user's text is cut by position, because it has no files named after the splits.

    A text that an earlier version has cut, and whose splits cannot be told apart, counts as cut.
    """
    try:
        return not Path(text).is_dir() or _named_splits(Path(text), find_files(text)) is None
    except UserError:
        return True


def user_pieces(text: str) -> Pieces:
    """Return the splits of a user's file, folder or glob.

    A folder with files or folders named train, valid (or validation, val, dev) and test has these splits. All other
    files are concatenated in the order of their paths and cut 90/5/5 by position, at the beginning of a UTF-8
    character.

    Raises:
        UserError: if the splits cannot be told apart, or a file is of a kind that is not read, such as .zip.
    """
    paths = find_files(text)
    named = _named_splits(Path(text), paths) if Path(text).is_dir() else None
    refuse_archives(paths if named is None else chain(*named.values()))
    if named is not None:
        return {split: [Piece(path) for path in found] for split, found in named.items()}
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
    try:
        if path.is_file():
            return [path.absolute()]
        if path.is_dir():
            found = _each_once(sorted(_files_below(path)))
            if not found:
                raise UserError(f"{text}: the folder holds no files")
            return found
        if not glob.has_magic(text):
            path.stat()  # raises an error that gives the reason
            if path.exists():
                raise UserError(f"{text}: neither a file nor a folder; expected text in a file, not a pipe or device")
        found = _each_once([path for path in map(Path, sorted(glob.glob(text, recursive=True))) if path.is_file()])
        if not found or "**" in text:  # glob skips unreadable folders: listing them raises the error
            before = _folder_before_magic(path)
            list(_files_below(before)) if "**" in text else os.listdir(before)
    except (FileNotFoundError, NotADirectoryError):
        found = []
    except OSError as error:
        raise UserError(f"{str(error.filename or text)[:200]}: cannot be read ({error.strerror})") from None
    if not found:
        kind = "matches no file" if glob.has_magic(text) else "no such file or folder"
        raise UserError(f"{text}: {kind}")
    return found


def refuse_archives(paths: Iterable[Path]) -> None:
    """Refuse files whose names are those of archives, or of a compression that is not read."""
    for path in paths:
        if _UNREADABLE.search(path.name) or (_COMPRESSED_END.search(path.name) and path.suffix not in COMPRESSED):
            raise UserError(f"{path}: files of this kind are not read; expected text, or .gz, .xz or .zst")


def _each_once(paths: list[Path]) -> list[Path]:
    """Return absolute paths in the same order; of several paths to one file only the first, or the one without link."""
    chosen: dict[str, Path] = {}
    for path in sorted(paths, key=Path.is_symlink):
        chosen.setdefault(os.path.realpath(path), path)
    kept = set(chosen.values())
    return [path.absolute() for path in dict.fromkeys(paths) if path in kept]


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


def _folder_before_magic(path: Path) -> Path:
    """Return the folder where a glob starts: the nearest parent without wildcards."""
    return next(each for each in path.parents if not glob.has_magic(str(each)))


def content_size(path: Path) -> int:
    """Return the size in bytes of a file's decompressed content."""
    if path.suffix not in COMPRESSED:
        return path.stat().st_size
    return sum(len(block) for block in Piece(path).blocks())


def _named_splits(folder: Path, paths: list[Path]) -> dict[str, list[Path]] | None:
    """Return the files of each split if their names tell the splits apart, else None.

    Capital letters do not matter. The first of these rules that applies is used: plain names, such as train.txt, in the
    folder itself; one text for each split in one folder, whatever the rest of its name; a single set of texts whose
    names differ only in the split, such as ptb.train.txt; folders named after splits; names with numbers, such as
    train1.txt; in the folder itself, a single set of other files that are not source code, such as train.en.

    Raises:
        UserError: if there are texts of two splits, but not a single set of all three. Concatenating and cutting them
            anew would train on text meant for testing.
    """
    named = [
        (split, found[1] or "", _COMPRESSED_END.sub("", found[3] or ""), path)
        for path in paths
        for split, words in _SPLIT_WORDS.items()
        if (found := re.fullmatch(rf"(.*[._-])?({words})([._-].*)?", path.name, re.IGNORECASE))
    ]
    root = folder.absolute()
    plain = _by_split(
        (split, path)
        for split, before, after, path in named
        if path.parent == root and not before and _TEXT_END.search(after)
    )
    matching = _by_split((split, path) for split, _, after, path in named if not after or _TEXT_END.search(after))
    for found in (plain, matching):
        if all(len(each) == 1 for each in found.values()) and len({path.parent for (path,) in found.values()}) == 1:
            return found
    sets: dict[tuple[Path, str, str], list[tuple[str, Path]]] = {}
    for split, before, after, path in named:
        sets.setdefault((path.parent, before.lower(), after.lower()), []).append((split, path))
    texts = [_by_split(files) for (_, _, after), files in sets.items() if _TEXT_END.search(after)]
    several = [found for found in texts if sum(map(bool, found.values())) > 1]
    if not several:
        parents = _split_folders(root, paths, plain)
        below = parents.pop(root, _by_split([]))
        folders = {path.relative_to(root).parts[0] for path in chain(*below.values())}
        if all(below.values()) and len(folders) == len(SPLITS):
            return below
        for parent in parents:
            raise UserError(
                f"{folder}: {parent.relative_to(root)} in it has folders named after splits; give {parent} (or give "
                f"the files as a glob to split them by position)"
            )
        several = [below] if any(below.values()) else []
    several = several or _numbered(paths)
    if not several:
        others = [
            _by_split(files) for (at, _, after), files in sets.items() if at == root and not _CODE_END.search(after)
        ]
        several = [found for found in others if all(found.values())]
    several = [plain] if sum(map(bool, plain.values())) > 1 else several
    if len(several) == 1 and several[0] is not plain and all(len(each) == 1 for each in several[0].values()):
        return several[0]
    if several:
        mixed = _mixed(root, several)
        raise UserError(f"{folder}: {mixed} (or give the files as a glob to split them by position)")
    return None


def _split_folders(root: Path, paths: list[Path], plain: dict[str, list[Path]]) -> dict[Path, dict[str, list[Path]]]:
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

    def count(found: dict[str, list[Path]], is_text: Callable[[str], bool]) -> int:
        names = ([_COMPRESSED_END.sub("", path.name) for path in files] for files in found.values())
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


def _numbered(paths: list[Path]) -> list[dict[str, list[Path]]]:
    """Return the texts with a split and a number in their names, such as train1.txt, if a folder has two splits."""
    at: dict[Path, list[tuple[str, Path]]] = {}
    for path in paths:
        name = _COMPRESSED_END.sub("", path.name)
        for split, words in _SPLIT_WORDS.items():
            if _TEXT_END.search(name) and re.fullmatch(rf"(.*[._-])?({words})\d+[._-].*", name, re.IGNORECASE):
                at.setdefault(path.parent, []).append((split, path))
    return [found for found in map(_by_split, at.values()) if sum(map(bool, found.values())) > 1]


def _by_split(files: Iterable[tuple[str, Path]]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for split, path in files:
        found[split].append(path)
    return found


def _mixed(root: Path, several: list[dict[str, list[Path]]]) -> str:
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


def cut(paths: list[Path], sizes: list[int], first: int, end: int) -> list[Piece]:
    """Return the pieces between two byte positions of the concatenated files."""
    pieces, start = [], 0
    for path, size in zip(paths, sizes, strict=True):
        inner_first, inner_end = max(first - start, 0), min(end - start, size)
        if inner_first < inner_end:
            pieces.append(Piece(path, inner_first, inner_end))
        start += size
    return pieces


def character_start(paths: list[Path], sizes: list[int], position: int) -> int:
    """Return `position`, or the next byte position (at most three further) outside of a UTF-8 character."""
    following = b"".join(
        block for piece in cut(paths, sizes, position, min(position + 4, sum(sizes))) for block in piece.blocks()
    )
    for ahead, value in enumerate(following):
        if not 0x80 <= value <= 0xBF:
            return position + ahead
    # Four continuation bytes: the text is not UTF-8. Fewer: the text ends inside the character.
    return position + len(following) if len(following) < 4 else position
