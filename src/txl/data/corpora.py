"""Corpora by name or path, prepared once and then opened."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from txl.config import DataConfig
from txl.data.prepare import META_FORMAT, Progress, prepare
from txl.data.sources import BLOCK, Pieces, stdlib_pieces, user_pieces
from txl.data.token_files import Tokens, file_sha256
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError

UNITS = ("byte", "char", "word", "bpe")


@dataclasses.dataclass(frozen=True)
class NamedCorpus:
    """A corpus that can be opened by name."""

    name: str
    description: str
    unit: str
    """The unit in which it is read if nothing else is said."""
    pieces: Callable[[], Pieces]


def named_corpora() -> dict[str, NamedCorpus]:
    """All corpora that have a name."""
    stdlib = NamedCorpus(
        "stdlib", "the Python standard library's own .py files; on every machine, no download", "byte", stdlib_pieces
    )
    return {stdlib.name: stdlib}


def list_corpora() -> list[dict[str, str]]:
    """Name, description and natural unit of every named corpus."""
    return [
        {"name": each.name, "description": each.description, "unit": each.unit} for each in named_corpora().values()
    ]


class Corpus:
    """A prepared corpus: token files, vocabulary and what is known of them."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._meta = _read_meta(directory)
        self.vocabulary = Vocabulary.load(directory / "vocabulary.json")
        if len(self.vocabulary) != self._meta["vocabulary_size"]:
            raise UserError(f"{directory}: vocabulary.json does not belong to this corpus; delete the folder")

    @property
    def name(self) -> str:
        """Its name, or the path that the user gave."""
        return self._meta["name"]

    @property
    def unit(self) -> str:
        """What one token is."""
        return self._meta["unit"]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._meta["splits"])

    def tokens(self, split: str) -> Tokens:
        """The token ids of a split.

        Raises:
            UserError: naming the splits that there are.
        """
        record = self._record(split)
        return Tokens.open(self._path(split, "tokens"), np.dtype(self._meta["dtype"]), split, record["bytes"])

    def text_bytes(self, split: str) -> Iterator[bytes]:
        """The text of the validation or test split (of any split, if tokens are bytes), a block at a time.

        Raises:
            UserError: for the training split, whose text is not kept.
        """
        self._record(split)
        path = self._path(split, "tokens" if self.unit == "byte" else "text")
        if not path.is_file():
            raise UserError(f"{self.name}: the text of the {split} split is not kept; read it from its source")
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                yield block

    def info(self) -> dict[str, Any]:
        """Name, unit, vocabulary size, and for each split tokens, bytes, unknown tokens and hashes."""
        return {key: value for key, value in self._meta.items() if key not in ("format", "dtype")}

    def verify(self) -> None:
        """Compare the token files with their hashes.

        Raises:
            UserError: naming the file that was altered.
        """
        for split, record in self._meta["splits"].items():
            path = self._path(split, "tokens")
            if file_sha256(path) != record["sha256_tokens"]:
                raise UserError(f"{path}: altered since it was prepared; delete {self.directory} to prepare it anew")

    def _record(self, split: str) -> dict[str, Any]:
        if split not in self._meta["splits"]:
            raise UserError(f"{self.name} has no split {split!r}; expected one of {', '.join(self.splits)}")
        return self._meta["splits"][split]

    def _path(self, split: str, ending: str) -> Path:
        return self.directory / f"{split}.{ending}"


def open_corpus(
    name: str,
    unit: str | None = None,
    *,
    config: DataConfig | None = None,
    data_dir: str | Path | None = None,
    vocabulary: Vocabulary | None = None,
    quiet: bool = False,
) -> Corpus:
    """Open a corpus, and prepare it first if that has not been done.

    Args:
        name: of a corpus, or a file, folder or glob. A folder that holds files named train, valid and test has these
            splits; everything else is cut 90/5/5 by position.
        unit: what one token is: byte, char, word or bpe; None: that of `config`, else the corpus's own.
        config: settings of the vocabulary.
        data_dir: where prepared corpora live; None: the environment's TXL_DATA, else the user's cache.
        vocabulary: encode with this one, as another model's text must be; its kind is then the unit.
        quiet: no progress on standard error.

    Raises:
        UserError: if there is no such corpus, or it cannot be read in this unit.
    """
    named = named_corpora().get(name)
    if unit is None:
        unit = config.unit if config is not None else (named.unit if named else "byte")
    if vocabulary is not None:
        unit = vocabulary.kind
    if unit not in UNITS:
        raise UserError(f"unit is {unit!r}; expected one of {', '.join(UNITS)}")
    config = dataclasses.replace(config or DataConfig(), corpus=name, unit=unit)  # pyright: ignore[reportArgumentType]
    if config.source is not None:
        raise UserError(f"data.source is set, but {name} is not fetched from anywhere; leave it out")
    pieces = named.pieces() if named else _own_pieces(name)

    fingerprint = _fingerprint(name, pieces, config, vocabulary)
    label = name if named else Path(name).stem
    safe = "".join(each if each.isalnum() or each in "-_." else "_" for each in label).lstrip(".")[:40] or "text"
    directory = data_directory(data_dir) / f"{safe}-{unit}-{fingerprint[:16]}"
    if directory.is_dir():
        try:
            return Corpus(directory)
        except UserError as error:
            if not quiet:
                print(f"note: {error}; preparing {name} anew", file=sys.stderr)
            shutil.rmtree(directory, ignore_errors=True)
    with _shown(name, unit, pieces, quiet) as progress:
        prepare(directory, name, pieces, config, vocabulary, progress)
    return Corpus(directory)


def data_directory(data_dir: str | Path | None) -> Path:
    """Where prepared corpora live."""
    chosen = data_dir or os.environ.get("TXL_DATA") or platformdirs.user_cache_dir("transformer-xl")
    return Path(chosen).expanduser()


def _own_pieces(name: str) -> Pieces:
    try:
        return user_pieces(name)
    except UserError as error:
        # A bare word was probably meant as a name.
        if Path(name).exists() or any(mark in name for mark in "/\\.*?["):
            raise
        near = difflib.get_close_matches(name, named_corpora(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"named corpora: {', '.join(named_corpora())}"
        raise UserError(f"unknown corpus {name!r}, and {error}; {hint}") from None


def _fingerprint(name: str, pieces: Pieces, config: DataConfig, vocabulary: Vocabulary | None) -> str:
    """A hash of everything the prepared files depend on; files count by path, size and time of change."""
    files = []
    for split, parts in pieces.items():
        for piece in parts:
            status = piece.path.stat()
            files.append([split, str(piece.path), piece.start, piece.end, status.st_size, status.st_mtime_ns])
    settings: dict[str, Any] = {"unit": config.unit}
    if vocabulary is not None:
        settings["vocabulary"] = vocabulary.to_json()
    elif config.unit == "word":
        settings |= {"min_count": config.min_count, "max_words": config.max_words}
    elif config.unit == "bpe":
        settings |= {"vocab_size": config.vocab_size}
    everything = [META_FORMAT, name, files, settings]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def _read_meta(directory: Path) -> dict[str, Any]:
    """The record of a prepared corpus, after a look at whether its files are whole.

    Raises:
        UserError: if something is missing or has the wrong size.
    """
    try:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != META_FORMAT:
            raise UserError(f"{directory}: prepared by another version (format {meta['format']!r})")
        width = np.dtype(meta["dtype"]).itemsize
        for split, record in meta["splits"].items():
            path = directory / f"{split}.tokens"
            if path.stat().st_size != record["tokens"] * width:
                raise UserError(f"{path}: {path.stat().st_size} bytes, expected {record['tokens'] * width}")
        return meta
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{directory}: damaged ({type(error).__name__}: {error})") from None


@contextmanager
def _shown(name: str, unit: str, pieces: Pieces, quiet: bool) -> Iterator[Progress]:
    """A progress bar on a terminal, one line elsewhere, nothing if quiet."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        print(f"preparing {name} in {unit} tokens", file=sys.stderr)
    size = sum(
        (piece.end if piece.end is not None else piece.path.stat().st_size) - piece.start
        for parts in pieces.values()
        for piece in parts
    )
    bar = Bar(
        TextColumn("preparing {task.fields[name]}: {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=size, name=name)
        stage = ""

        def progress(doing: str, done: int) -> None:
            nonlocal stage
            if doing != stage and not (doing.startswith("encoding") and stage.startswith("encoding")):
                bar.update(task, completed=0)
            stage = doing
            bar.update(task, description=doing, advance=done)

        yield progress
