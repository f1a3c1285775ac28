"""Files of a public corpus: found in a folder or unpacked from an archive, and compared with the published ones."""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from txl.data.catalogue import Benchmark, Layout
from txl.data.compressed import open_file
from txl.data.sources import COMPRESSED, SPLITS, Piece, Pieces, character_start, content_size, cut
from txl.errors import UserError

ARCHIVES = (".zip", ".tgz", ".tar.gz", ".tar", ".tar.xz", ".tar.bz2")
"""File name endings of the archives that can be unpacked."""


def is_archive(path: Path) -> bool:
    """Return whether a file name has the ending of an archive."""
    return path.name.endswith(ARCHIVES)


def unpack(archive: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Unpack the wanted members of an archive into a folder, under their own paths.

    The archive is read to its end, because compressed formats store a checksum of the content there.

    Args:
        archive: zip or tar file.
        folder: existing target folder.
        wanted: function that receives a member's path, with "/" between its parts, and returns True to unpack it.

    Raises:
        UserError: if the archive is damaged or cannot be read.
        OSError: if the disk is full.
    """
    members = _zip_members(archive) if archive.suffix == ".zip" else _tar_members(archive)
    try:
        for name, content in members:
            path = PurePosixPath(name)
            # No member may be written outside of the folder.
            if path.is_absolute() or ".." in path.parts or not wanted(str(path)):
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with content() as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except RuntimeError as error:  # encrypted, or compressed in an unknown way (NotImplementedError)
        raise UserError(f"{archive}: cannot be read ({error})") from None
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{archive}: damaged ({error or type(error).__name__})") from None


_ZIP_END = 22 + 0xFFFF
"""Largest length in bytes of the last record of a .zip file, with its comment."""
Member = tuple[str, Callable[[], IO[bytes]]]


def _zip_members(archive: Path) -> Iterator[Member]:
    with open(archive, "rb") as content, zipfile.ZipFile(content) as file:
        content.seek(max(0, content.seek(0, os.SEEK_END) - _ZIP_END))
        count = int.from_bytes(content.read().rpartition(b"PK\5\6")[2][6:8], "little")
        if len(file.infolist()) != count != 0xFFFF:  # which zipfile does not compare
            raise zipfile.BadZipFile(f"its directory has {len(file.infolist())} of {count} members")
        for member in file.infolist():
            if not member.is_dir():
                yield member.filename, lambda member=member: _opened_member(file, member)


def _opened_member(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    try:
        return file.open(member)
    except OSError as error:  # a damaged offset
        raise zipfile.BadZipFile(f"{member.filename}: {error.strerror}") from None


def _tar_members(archive: Path) -> Iterator[Member]:
    # Stream mode reads a compressed archive only once, from beginning to end.
    with open_file(archive) as content, tarfile.open(fileobj=content, mode="r|") as file:
        for member in file:
            if member.isfile():
                yield member.name, lambda member=member: _opened_member_of_tar(file, member)
        # tarfile takes a damaged header for the end of the archive, behind which there are only zeros.
        while rest := file.fileobj.read(1 << 20):
            if rest.strip(b"\0"):
                raise tarfile.TarError("more follows the end of the archive, or the header of a member is damaged")


def _opened_member_of_tar(file: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = file.extractfile(member)
    if content is None:
        raise tarfile.TarError(f"{member.name} has no content")
    return content


Parts = dict[str, list[Path]]
"""Files of each part of a corpus; the parts are train, valid and test, or whole, and in lm1b vocabulary."""


def source_files(benchmark: Benchmark, source: Path) -> list[Path]:
    """Return the files or unopened archives that a corpus is made from, which show whether the source changed."""
    parts, archives = _look(benchmark, source)
    if not archives:
        _require(benchmark, source, parts)
    return sorted({path for paths in parts.values() for path in paths} | set(archives))


@contextmanager
def opened(benchmark: Benchmark, source: Path, scratch: Path) -> Iterator[Parts]:
    """Yield the parts of a corpus; archives are unpacked for the duration of the `with` block.

    Args:
        benchmark: public corpus, which names the files.
        source: folder, archive, or the only file of a one-file corpus.
        scratch: folder to unpack in; created if necessary.
    """
    parts, archives = _look(benchmark, source)
    if not archives:
        _require(benchmark, source, parts)
        yield parts
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{benchmark.name}.partial-", dir=scratch) as folder:
        for archive in archives:
            unpack(archive, Path(folder), lambda name: _is_wanted(benchmark, name))
        unpacked = _find(benchmark, Path(folder))
        # What the archive has wins: a file beside it may be of another text.
        parts = unpacked if _missing(benchmark, unpacked) is None else parts | unpacked
        _require(benchmark, source, parts)
        yield parts


def pieces_of(benchmark: Benchmark, parts: Parts, unit: str, strip: bool = False) -> Pieces:
    """Return the pieces of each split.

    A one-file corpus whose length differs from the published one is cut in the same proportions.

    Args:
        benchmark: public corpus, which gives the sizes of the splits of a one-file corpus.
        parts: files of the corpus.
        unit: unit of the tokens; only the unit byte may be cut inside a character.
        strip: True to remove white space at the ends of each split, as in the authors' text8.
    """
    if "whole" not in parts:
        pieces = {split: [Piece(path) for path in parts[split]] for split in SPLITS}
    else:
        sizes = [content_size(path) for path in parts["whole"]]
        total, expected = sum(sizes), sum(benchmark.cuts or ())
        train, valid, _ = benchmark.cuts or (0, 0, 0)
        edges = [train * total // expected, (train + valid) * total // expected]
        if unit != "byte":
            edges = [character_start(parts["whole"], sizes, edge) for edge in edges]
        bounds = zip([0, *edges], [*edges, total], strict=True)
        pieces = {
            split: cut(parts["whole"], sizes, first, end) for split, (first, end) in zip(SPLITS, bounds, strict=True)
        }
    return {split: _stripped(those) for split, those in pieces.items()} if strip else pieces


def file_differences(benchmark: Benchmark, parts: Parts) -> dict[str, str]:
    """Return differences between a corpus's files and the published ones, by part: in size, or if none, in hash."""
    found = {}
    for split, expected in _known_sizes(benchmark, parts).items():
        total = sum(content_size(path) for path in parts[split])
        if total != expected:
            found[split] = _off(f"{parts[split][0]} has", total, expected, "bytes")
    for part, known in ({} if found else benchmark.hashes).items():
        files = parts.get(part) or [path for each in ("whole", *SPLITS) for path in parts.get(each, [])]
        algorithm, digest = known.split(":")
        running = hashlib.new(algorithm)
        for path in files:
            for block in Piece(path).blocks():
                running.update(block)
        if running.hexdigest() != digest:
            what = files[0] if part in parts or len(files) == 1 else files[0].parent
            found[part] = f"the {algorithm} of {what} is {running.hexdigest()}, the published one is {digest}"
    return found


def _known_sizes(benchmark: Benchmark, parts: Parts) -> dict[str, int]:
    if benchmark.cuts is None:
        return {}
    if "whole" in parts:
        return {"whole": sum(benchmark.cuts)}
    return dict(zip(SPLITS, benchmark.cuts, strict=True))


def count_differences(
    known: dict[str, int], tokens: dict[str, int], sizes: tuple[int, int] | None, vocabulary_size: int
) -> list[str]:
    """Return a message for each count that differs from the known one.

    Args:
        known: expected number of tokens of each split.
        tokens: actual number of tokens of each split.
        sizes: smallest and largest expected vocabulary size; None: unknown.
        vocabulary_size: actual vocabulary size.
    """
    found = [
        _off(f"the {split} split has", tokens[split], expected, "tokens")
        for split, expected in known.items()
        if tokens[split] != expected
    ]
    if sizes is not None and not sizes[0] <= vocabulary_size <= sizes[1]:
        nearest = sizes[0] if vocabulary_size < sizes[0] else sizes[1]
        found.append(_off("the vocabulary has", vocabulary_size, nearest, "tokens"))
    return found


def _off(what: str, have: int, expected: int, unit: str) -> str:
    difference = abs(have - expected)
    return f"{what} {have:,} {unit}, {difference:,} too {'few' if have < expected else 'many'}: expected {expected:,}"


def _look(benchmark: Benchmark, source: Path) -> tuple[Parts, list[Path]]:
    """Return the parts found outside of archives, and the archives that may hold the missing parts."""
    if source.is_dir():
        parts = _find(benchmark, source)
        if _missing(benchmark, parts) is None:
            return parts, []
        return parts, [source / name for name in benchmark.archives if (source / name).is_file()][:1]
    if not source.is_file():
        raise UserError(f"{source}: no such file or folder; expected {_expected(benchmark)}")
    if is_archive(source):
        return _find(benchmark, source.parent, only=("vocabulary",)), [source]
    if any("whole" in layout for layout in benchmark.layouts):
        return {"whole": [source]}, []
    raise UserError(f"{source}: one file cannot be {benchmark.name}; expected {_expected(benchmark)}")


def _find(benchmark: Benchmark, folder: Path, only: tuple[str, ...] = ()) -> Parts:
    """Return the parts of the first layout that is complete in a folder, else of the most complete layout."""
    best: Parts = {}
    for layout in benchmark.layouts:
        parts = {}
        for part, names in layout.items():
            if only and part not in only:
                continue
            paths = next((found for name in names for found in _matching(benchmark, folder, name) if found), None)
            if paths:
                parts[part] = paths
        if len(parts) == len(layout):
            return parts
        if len(parts) > len(best):
            best = parts
    return best


def _matching(benchmark: Benchmark, folder: Path, name: str) -> Iterator[list[Path]]:
    for inside in benchmark.folders:
        for ending in ("", *COMPRESSED):
            if "*" in name:
                yield sorted((folder / inside).glob(name + ending))
            elif (folder / inside / (name + ending)).is_file():
                yield [folder / inside / (name + ending)]


def _is_wanted(benchmark: Benchmark, member: str) -> bool:
    """Return whether a path inside an archive may be one of the corpus's files."""
    member = member.removeprefix("./")
    return any(
        fnmatch(member, f"{inside}/{name}" if inside else name)
        for layout in benchmark.layouts
        for names in layout.values()
        for name in names
        for inside in benchmark.folders
    )


def _missing(benchmark: Benchmark, parts: Parts) -> Layout | None:
    """Return the missing parts of the most complete layout; None if a layout is complete."""
    lacks = [{part: names for part, names in layout.items() if part not in parts} for layout in benchmark.layouts]
    nearest = min(lacks, key=len)
    return nearest or None


def _require(benchmark: Benchmark, source: Path, parts: Parts) -> None:
    missing = _missing(benchmark, parts)
    if missing is None:
        return
    those = source.iterdir() if source.is_dir() else (path for paths in parts.values() for path in paths)
    here = sorted({path.name for path in those})
    if not here:
        raise UserError(f"{source}: no file of {benchmark.name} is there; expected {_expected(benchmark)}")
    held = f"it holds {', '.join(here[:6])}{' ...' if len(here) > 6 else ''}"
    lacks = " and ".join(f"{part} ({' or '.join(names[:2])})" for part, names in missing.items())
    raise UserError(f"{source}: no {lacks} of {benchmark.name} there, {held}; expected {_expected(benchmark)}")


def _expected(benchmark: Benchmark) -> str:
    files = [", ".join(names[0] for names in layout.values()) for layout in benchmark.layouts]
    return f"a folder with {' or with '.join([*files, *benchmark.archives[:1]])}"


def _stripped(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces of a split without a space at its beginning or end (text8 has at most one at each)."""
    pieces = [piece for piece in pieces if next(piece.blocks(), b"")]
    if not pieces:
        return pieces  # `prepare` refuses an empty split
    first, last = pieces[0], pieces[-1]
    if next(Piece(first.path, first.start, first.start + 1).blocks(), b"").isspace():
        pieces = [Piece(first.path, first.start + 1, first.end), *pieces[1:]]
    end = content_size(last.path) if last.end is None else last.end
    if next(Piece(last.path, end - 1, end).blocks(), b"").isspace():
        pieces = [*pieces[:-1], Piece(pieces[-1].path, pieces[-1].start, end - 1)]
    return pieces
