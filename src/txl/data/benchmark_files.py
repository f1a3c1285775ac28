"""Files of a public corpus: found in a folder or unpacked from an archive, and compared with the published ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from txl.data.archives import ARCHIVES, unpack
from txl.data.benchmarks import Benchmark, Layout
from txl.data.compressed import COMPRESSED
from txl.data.pieces import SPLITS, Piece, Pieces, character_start, content_size, cut
from txl.errors import UserError

Parts = dict[str, list[Path]]
"""Files of each part of a corpus; the parts are train, valid and test, or whole, and in lm1b vocabulary."""


def source_files(benchmark: Benchmark, source: Path) -> list[Path]:
    """Return the files or unopened archives that a corpus is made from, which show whether the source changed."""
    parts, archive = _look(benchmark, source)
    return sorted({path for paths in parts.values() for path in paths} | ({archive} if archive else set()))


@contextmanager
def opened(benchmark: Benchmark, source: Path, scratch: Path) -> Iterator[Parts]:
    """Yield the parts of a corpus; an archive is unpacked for the duration of the `with` block.

    Args:
        benchmark: public corpus, which names the files.
        source: folder, archive, or the only file of a one-file corpus.
        scratch: folder to unpack in; created if necessary.
    """
    parts, archive = _look(benchmark, source)
    if archive is None:
        yield parts
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{benchmark.name}.partial-", dir=scratch) as folder:
        unpack(archive, Path(folder), lambda name: _is_wanted(benchmark, name))
        unpacked = _find(benchmark, Path(folder))
        # What the archive has wins: a file beside it may be of another text.
        parts = parts | unpacked if _missing(benchmark, unpacked) else unpacked
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
        total, (train, valid, test) = sum(sizes), benchmark.cuts or (0, 0, 0)
        edges = [share * total // (train + valid + test) for share in (train, train + valid)]
        if unit != "byte":
            edges = [character_start(parts["whole"], sizes, edge) for edge in edges]
        bounds = zip(SPLITS, [0, *edges], [*edges, total], strict=True)
        pieces = {split: cut(parts["whole"], sizes, first, end) for split, first, end in bounds}
    return {split: _stripped(those) for split, those in pieces.items()} if strip else pieces


def _stripped(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces of a split without a space at its beginning or end (text8 has at most one at each)."""
    pieces = [piece for piece in pieces if next(piece.blocks(), b"")]
    if not pieces:
        return pieces  # `prepare` refuses an empty split
    first, last = pieces[0], pieces[-1]
    if next(Piece(first.path, first.start, first.start + 1).blocks(), b"").isspace():
        pieces[0] = Piece(first.path, first.start + 1, first.end)
    end = content_size(last.path) if last.end is None else last.end
    if next(Piece(last.path, end - 1, end).blocks(), b"").isspace():
        pieces[-1] = Piece(pieces[-1].path, pieces[-1].start, end - 1)
    return pieces


def file_differences(benchmark: Benchmark, parts: Parts) -> dict[str, str]:
    """Return differences between a corpus's files and the published ones, by part: in size, or if none, in hash."""
    known_sizes = dict(zip(SPLITS, benchmark.cuts or (), strict=False))
    if known_sizes and "whole" in parts:
        known_sizes = {"whole": sum(known_sizes.values())}
    sizes = {part: sum(map(content_size, parts[part])) for part in known_sizes}
    differences = {
        part: _off(f"{parts[part][0]} has", sizes[part], size, "bytes")
        for part, size in known_sizes.items()
        if sizes[part] != size
    }
    for part, known in ({} if differences else benchmark.hashes).items():
        files = parts.get(part) or [path for name in ("whole", *SPLITS) for path in parts.get(name, [])]
        algorithm, digest = known.split(":")
        running = hashlib.new(algorithm)
        for path in files:
            for block in Piece(path).blocks():
                running.update(block)
        if running.hexdigest() != digest:
            what = files[0] if part in parts or len(files) == 1 else files[0].parent
            differences[part] = f"the {algorithm} of {what} is {running.hexdigest()}, the published one is {digest}"
    return differences


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
    differences = [
        _off(f"the {split} split has", tokens[split], expected, "tokens")
        for split, expected in known.items()
        if tokens[split] != expected
    ]
    if sizes is not None and not sizes[0] <= vocabulary_size <= sizes[1]:
        nearest = sizes[0] if vocabulary_size < sizes[0] else sizes[1]
        differences.append(_off("the vocabulary has", vocabulary_size, nearest, "tokens"))
    return differences


def _off(what: str, have: int, expected: int, unit: str) -> str:
    difference = abs(have - expected)
    return f"{what} {have:,} {unit}, {difference:,} too {'few' if have < expected else 'many'}: expected {expected:,}"


def _look(benchmark: Benchmark, source: Path) -> tuple[Parts, Path | None]:
    """Return the parts found outside of an archive, and the archive that may hold the missing parts.

    Raises:
        UserError: if parts are missing and there is no archive.
    """
    if source.is_dir():
        parts = _find(benchmark, source)
        archives = [source / name for name in benchmark.archives if (source / name).is_file()]
        if archives and _missing(benchmark, parts):
            return parts, archives[0]
        _require(benchmark, source, parts)
        return parts, None
    if not source.is_file():
        raise UserError(f"{source}: no such file or folder; expected {_expected(benchmark)}")
    if source.name.endswith(ARCHIVES):
        beside = _find(benchmark, source.parent)
        return {part: beside[part] for part in ("vocabulary",) if part in beside}, source
    if any("whole" in layout for layout in benchmark.layouts):
        return {"whole": [source]}, None
    raise UserError(f"{source}: one file cannot be {benchmark.name}; expected {_expected(benchmark)}")


def _find(benchmark: Benchmark, folder: Path) -> Parts:
    """Return the parts of the first layout that is complete in a folder, else of the most complete layout."""
    layouts: list[Parts] = []
    for layout in benchmark.layouts:
        paths = {part: next(filter(None, _matching(benchmark, folder, names)), []) for part, names in layout.items()}
        if all(paths.values()):
            return paths
        layouts.append({part: files for part, files in paths.items() if files})
    return max(layouts, key=len)


def _matching(benchmark: Benchmark, folder: Path, names: tuple[str, ...]) -> Iterator[list[Path]]:
    for name in names:
        for inside in benchmark.folders:
            for ending in ("", *COMPRESSED):
                paths = (folder / inside).glob(name + ending) if "*" in name else [folder / inside / (name + ending)]
                yield sorted(path for path in paths if path.is_file())


def _is_wanted(benchmark: Benchmark, member: str) -> bool:
    """Return whether a path inside an archive may be one of the corpus's files."""
    names = {name for layout in benchmark.layouts for names in layout.values() for name in names}
    patterns = [f"{inside}/{name}".removeprefix("/") for name in names for inside in benchmark.folders]
    return any(fnmatch(member.removeprefix("./"), pattern) for pattern in patterns)


def _missing(benchmark: Benchmark, parts: Parts) -> Layout:
    """Return the missing parts of the most complete layout, with their names; empty if a layout is complete."""
    lacks = [{part: names for part, names in layout.items() if part not in parts} for layout in benchmark.layouts]
    return min(lacks, key=len)


def _require(benchmark: Benchmark, source: Path, parts: Parts) -> None:
    missing = _missing(benchmark, parts)
    if not missing:
        return
    paths = source.iterdir() if source.is_dir() else (path for files in parts.values() for path in files)
    names = sorted({path.name for path in paths})
    if not names:
        raise UserError(f"{source}: no file of {benchmark.name} is there; expected {_expected(benchmark)}")
    held = f"it holds {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}"
    lacks = " and ".join(f"{part} ({' or '.join(names[:2])})" for part, names in missing.items())
    raise UserError(f"{source}: no {lacks} of {benchmark.name} there, {held}; expected {_expected(benchmark)}")


def _expected(benchmark: Benchmark) -> str:
    files = [", ".join(names[0] for names in layout.values()) for layout in benchmark.layouts]
    return f"a folder with {' or with '.join([*files, *benchmark.archives[:1]])}"
