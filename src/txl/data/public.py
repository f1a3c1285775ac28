"""Public corpora: prepared from a folder, an archive or a download, verified, and opened."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from txl.config import Boundary, DataConfig
from txl.data.catalogue import Benchmark
from txl.data.download import fetch, forget
from txl.data.layouts import Parts, count_differences, file_differences, opened, pieces_of, source_files
from txl.data.prepare import Recipe, normalises, not_written, prepare, prepared_before, stamps_of
from txl.data.prepared import META_FORMAT, Corpus
from txl.data.progress import preparing, say
from txl.data.sources import SPLITS, Piece
from txl.data.vocabulary import Vocabulary, WordVocabulary
from txl.errors import UserError
from txl.files import JsonObject, reason_of


class _NotTheCorpus(UserError):
    """Error for a source that is damaged or differs from the published corpus."""


class PublicCorpus:
    """A public corpus, and the settings for opening it.

    Args:
        benchmark: description of the corpus: files, counts and hashes.
        config: data settings: the unit and the settings of the vocabulary.
        folder: directory of prepared corpora and downloads.
        source: folder or archive to read the corpus from; None: the prepared corpus if there is one, else a download.
        vocabulary: vocabulary to encode with; None: the corpus's own.
        like_original: True to prepare the corpus as the authors' code does.
        boundary: predicted boundary tokens of a sentence: "end" or "both" (see `open_corpus`).
        verify: True to refuse a text that differs from the known corpus.
        quiet: True to write nothing to standard error.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        config: DataConfig,
        folder: Path,
        *,
        source: Path | None,
        vocabulary: Vocabulary | None,
        like_original: bool,
        boundary: str,
        verify: bool,
        quiet: bool,
    ):
        self.benchmark, self.config, self.folder, self.source = benchmark, config, folder, source
        self.vocabulary, self.like_original, self.boundary = vocabulary, like_original, boundary
        self.verify, self.quiet = verify, quiet
        self._is_natural = config.unit == benchmark.unit and vocabulary is None
        if boundary not in get_args(Boundary):
            raise UserError(f"data.boundary is {boundary!r}; expected one of {', '.join(get_args(Boundary))}")
        cut_down = cut_down_by(config) if config.unit == "word" else []
        self._is_natural = self._is_natural and "word_rule" not in cut_down
        self._is_whole = not cut_down
        if benchmark.sentences and cut_down:
            raise UserError(f"data.{cut_down[0]} is set, but {benchmark.name} has a fixed vocabulary; leave it out")

    def open(self) -> Corpus:
        """Open the corpus; prepare the corpus first if necessary.

        Raises:
            UserError: if the corpus cannot be read or downloaded, or differs from the known one.
        """
        settings = json.dumps([META_FORMAT, self.benchmark.name, self._settings()], sort_keys=True)
        key = hashlib.sha256(settings.encode()).hexdigest()[:16]
        prefix = f"{self.benchmark.name}-{self.config.unit}-{key}"
        if self.source is None:
            return self._opened_before(prefix) or self._prepare(self.folder / f"{prefix}-download")
        stamps = stamps_of(source_files(self.benchmark, self.source))
        stamp = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:8]
        directory = self.folder / f"{prefix}-{stamp}"
        corpus = prepared_before(directory, self.benchmark.name, self.quiet)
        return self._prepare(directory) if corpus is None else self._said(corpus)

    def _opened_before(self, prefix: str) -> Corpus | None:
        """Return the corpus if it was prepared already, from a download or any source; else None.

        Raises:
            UserError: if several different texts were prepared, and none of them is the published one.
        """
        found = [
            corpus
            for directory in sorted(self.folder.glob(f"{prefix}-*"))
            if (corpus := prepared_before(directory, self.benchmark.name, self.quiet)) is not None
        ]
        for corpus in found:
            if not corpus.info().get("differences"):
                return corpus
        if len({corpus.info()["identity"] for corpus in found}) > 1:
            raise UserError(
                f"{len(found)} different texts were prepared as {self.benchmark.name}, and none is the published one; "
                f"name one with data.source"
            )
        return self._said(found[0]) if found else None

    def _said(self, corpus: Corpus) -> Corpus:
        """Return a corpus that was prepared before; print a note if it differs from the published one."""
        if differences := corpus.info().get("differences"):
            say(f"note: this is not the published {self.benchmark.name}: {'; '.join(differences)}", self.quiet)
        return corpus

    def _settings(self) -> JsonObject:
        """Return the settings that, together with the text, determine the token files."""
        recipe = self._recipe(None)
        values = recipe.settings() | {"strip": self._strips, "verify": self.verify}
        return values | ({"boundary": self.boundary} if self.benchmark.sentences else {})

    @property
    def _strips(self) -> bool:
        return self.like_original and self.benchmark.name == "text8" and self.config.unit == "char"

    def _prepare(self, directory: Path) -> Corpus:
        downloads = self.folder / "downloads" / self.benchmark.name
        if self.source is not None:
            return self._prepare_from(self.source, directory)
        if Path(self.benchmark.name).exists():
            say(
                f"note: {self.benchmark.name} is downloaded; to take it from ./{self.benchmark.name} set "
                f"data.source to it",
                self.quiet,
            )
        try:
            fetch(self.benchmark.routes, downloads, quiet=self.quiet)
        except OSError as error:
            raise not_written(f"getting {self.benchmark.name} into", self.folder, error) from None
        try:
            return self._prepare_from(downloads, directory)
        except _NotTheCorpus as error:
            forget(downloads)
            raise UserError(f"{error}; the download was removed, so that the same command fetches it anew") from None

    def _prepare_from(self, source: Path, directory: Path) -> Corpus:
        benchmark = self.benchmark
        with ExitStack() as stack:
            try:
                parts = stack.enter_context(opened(benchmark, source, self.folder))
            except OSError as error:
                if isinstance(error, PermissionError) and self.folder not in Path(error.filename or "").parents:
                    raise UserError(f"{error.filename or source}: cannot be read ({reason_of(error)})") from None
                raise not_written(f"getting {self.benchmark.name} into", self.folder, error) from None
            except UserError as error:
                raise _NotTheCorpus(str(error)) from None
            wrong = file_differences(benchmark, parts)
            self._judge([text for part, text in wrong.items() if part in ("all", "vocabulary") or benchmark.cuts])
            recipe = self._recipe(parts)
            progress = stack.enter_context(preparing(benchmark.name, self.config.unit, self.quiet))
            prepare(
                directory,
                benchmark.name,
                lambda: pieces_of(benchmark, parts, self.config.unit, self._strips),
                recipe,
                progress,
                lambda meta: self._check(meta, wrong),
            )
        return Corpus(directory)

    def _recipe(self, parts: Parts | None) -> Recipe:
        """Return the recipe for the tokens; without `parts`, the recipe lacks a vocabulary read from a file (lm1b)."""
        benchmark, config = self.benchmark, self.config
        vocabulary = self.vocabulary
        record: JsonObject = {"like_original": self.like_original}
        sentences = benchmark.sentences and config.unit == "word"
        if sentences and vocabulary is None and parts is not None:
            vocabulary = read_words(parts["vocabulary"][0], self.boundary)
        counted, closed, rewrite = ("train",), False, None
        if self._is_natural:
            closed = benchmark.name == "text8" or (benchmark.name == "enwik8" and self.like_original)
            if self.like_original and benchmark.name != "wikitext-103":
                counted = SPLITS
        if self.like_original:
            rewrite = {"enwik8": "drop newlines", "ptb": "lower case"}.get(benchmark.name)
        if isinstance(vocabulary, WordVocabulary) and vocabulary.boundary is not None:
            record["boundary"] = vocabulary.boundary
        return Recipe(
            config.unit,
            config.vocab_size,
            config.min_count or 1,
            config.max_words,
            config.word_rule or "whitespace",
            normalise=normalises(config, self.vocabulary, by_default=False),
            vocabulary=vocabulary,
            counted=counted,
            closed=closed,
            rewrite=rewrite,
            record=record,
        )

    def _check(self, meta: JsonObject, wrong: dict[str, str]) -> None:
        """Compare the counts with the known ones, and record all differences in `meta`."""
        benchmark = self.benchmark
        found = []
        if self._is_natural:
            tokens = {split: record["tokens"] for split, record in meta["splits"].items()}
            known, sizes = benchmark.tokens, benchmark.vocabulary if self._is_whole else None
            if benchmark.sentences and self.boundary == "both":
                known = benchmark.tokens_both
            if self.like_original:
                sizes = benchmark.original_vocabulary or sizes
                known = {} if benchmark.cuts else known
            found = count_differences(known, tokens, sizes, meta["vocabulary_size"])
        self._judge(found or list(wrong.values()))
        meta["differences"] = [*found, *wrong.values()]

    def _judge(self, differences: list[str]) -> None:
        if not differences:
            return
        where = self.source if self.source is not None else "the download"
        text = "; ".join(differences)
        if self.verify:
            hint = "for your own text in this layout, set --verify false"
            raise _NotTheCorpus(f"{where} is not {self.benchmark.name}: {text}{f'; {hint}' if self.source else ''}")
        say(f"note: {where} is not {self.benchmark.name}: {text}", self.quiet)


def cut_down_by(config: DataConfig) -> list[str]:
    """Return the names of the active settings that leave out words or cut words at punctuation."""
    names = [name for name in ("min_count", "max_words") if getattr(config, name) not in (1, None)]
    return [*names, "word_rule"] if config.word_rule == "punctuation" else names


def read_words(path: Path, boundary: str) -> WordVocabulary:
    """Read One Billion Word's vocabulary file: one word per line, optionally followed by a count."""
    try:
        lines = b"".join(Piece(path).blocks()).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (at offset {error.start}); expected a vocabulary, a word a line") from None
    words = list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
    try:
        return WordVocabulary(words, eos="<S>", unk="<UNK>", boundary=boundary)
    except UserError as error:
        raise UserError(f"{path}: {error}; expected One Billion Word's 1b_word_vocab.txt") from None
