"""Files of a public corpus: found in a folder or unpacked from an archive, and compared with the published ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from txl.data.benchmarks import Benchmark
from txl.data.compressed import ARCHIVES, COMPRESSED, unpack
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
    """Yield the parts of a corpus; an archive is unpacked below `scratch` for the duration of the `with` block."""
    parts, archive = _look(benchmark, source)
    if archive is None:
        yield parts
        return
    scratch.mkdir(parents=True, exist_ok=True)
    names = {name for layout in benchmark.layouts for names in layout.values() for name in names}
    patterns = [f"{inside}/{name}".removeprefix("/") for name in names for inside in benchmark.folders]
    with TemporaryDirectory(prefix=f".{benchmark.name}.partial-", dir=scratch) as folder:
        unpack(archive, Path(folder), lambda name: any(fnmatch(name.removeprefix("./"), part) for part in patterns))
        unpacked = _find(benchmark, Path(folder))
        # What the archive has wins: a file beside it may be of another text.
        parts = parts | unpacked if _missing(benchmark, unpacked) else unpacked
        _require(benchmark, source, parts)
        yield parts


def pieces_of(benchmark: Benchmark, parts: Parts, unit: str, strip: bool = False) -> Pieces:
    """Return the pieces of each split, with `strip` without white space at its ends, as in the authors' text8.

    A one-file corpus whose length differs from the published one is cut in the same proportions; in other units than
    byte, at the beginning of a character.
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
    for held in pieces.values() if strip else ():
        held[:] = [piece for piece in held if next(piece.blocks(), b"")]
        if held:  # `prepare` refuses an empty split; text8 has at most one space at each end
            first, last = held[0], held[-1]
            end = content_size(last.path) if last.end is None else last.end
            if next(Piece(first.path, first.start, first.start + 1).blocks(), b"").isspace():
                held[0] = Piece(first.path, first.start + 1, first.end)
            if next(Piece(last.path, end - 1, end).blocks(), b"").isspace():
                held[-1] = Piece(held[-1].path, held[-1].start, end - 1)
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
    """Return a message for each number of tokens, and for the vocabulary size, that differs from the known ones."""
    wrong = [(split, expected) for split, expected in known.items() if tokens[split] != expected]
    differences = [_off(f"the {split} split has", tokens[split], expected, "tokens") for split, expected in wrong]
    if sizes is not None and not sizes[0] <= vocabulary_size <= sizes[1]:
        nearest = min(sizes, key=lambda size: abs(size - vocabulary_size))
        differences.append(_off("the vocabulary has", vocabulary_size, nearest, "tokens"))
    return differences


def _off(what: str, have: int, expected: int, unit: str) -> str:
    difference = f"{abs(have - expected):,} too {'few' if have < expected else 'many'}"
    return f"{what} {have:,} {unit}, {difference}: expected {expected:,}"


def _look(benchmark: Benchmark, source: Path) -> tuple[Parts, Path | None]:
    """Return the parts found outside of an archive, and the archive that may hold the missing parts."""
    if source.is_dir():
        parts = _find(benchmark, source)
        archives = [source / name for name in benchmark.archives if (source / name).is_file()]
        if archives and _missing(benchmark, parts):
            return parts, archives[0]
        _require(benchmark, source, parts)
        return parts, None
    if source.is_file() and source.name.endswith(ARCHIVES):
        beside = _find(benchmark, source.parent)
        return {part: beside[part] for part in ("vocabulary",) if part in beside}, source
    if source.is_file() and any("whole" in layout for layout in benchmark.layouts):
        return {"whole": [source]}, None
    problem = f"one file cannot be {benchmark.name}" if source.is_file() else "no such file or folder"
    raise _lacks(benchmark, source, problem)


def _find(benchmark: Benchmark, folder: Path) -> Parts:
    """Return the parts of the first layout that is complete in a folder, else of the most complete layout."""

    def matching(names: tuple[str, ...]) -> Iterator[list[Path]]:
        for name in names:
            for inside in benchmark.folders:
                for ending in ("", *COMPRESSED):
                    wanted = folder / inside / f"{name}{ending}"
                    paths = wanted.parent.glob(wanted.name) if "*" in name else [wanted]
                    yield sorted(path for path in paths if path.is_file())

    layouts: list[Parts] = []
    for layout in benchmark.layouts:
        paths = {part: next(filter(None, matching(names)), []) for part, names in layout.items()}
        if all(paths.values()):
            return paths
        layouts.append({part: files for part, files in paths.items() if files})
    return max(layouts, key=len)


def _missing(benchmark: Benchmark, parts: Parts) -> list[str]:
    """Return the missing parts of the most complete layout; empty if a layout is complete."""
    return min(([part for part in layout if part not in parts] for layout in benchmark.layouts), key=len)


def _require(benchmark: Benchmark, source: Path, parts: Parts) -> None:
    if missing := _missing(benchmark, parts):
        raise _lacks(benchmark, source, f"no {' and no '.join(missing)} file of {benchmark.name} is there")


def _lacks(benchmark: Benchmark, source: Path, problem: str) -> UserError:
    files = [", ".join(names[0] for names in layout.values()) for layout in benchmark.layouts]
    expected = f"a folder with {' or with '.join([*files, *benchmark.archives[:1]])}"
    return UserError(f"{source}: {problem}", expected=expected)
