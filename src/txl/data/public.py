"""Public corpora: prepared from a folder, an archive or a download, verified, and opened.

Files are downloaded under a temporary name and renamed when their hash is correct. An interrupted transfer is repeated
from the beginning.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from txl.config import DataConfig
from txl.data.benchmark_files import Parts, count_differences, file_differences, opened, pieces_of, source_files
from txl.data.benchmarks import Benchmark, Download
from txl.data.pieces import SPLITS, Piece
from txl.data.prepare import Recipe, normalises, not_written, prepare, prepared_before, stamps_of
from txl.data.prepared import META_FORMAT, Corpus, json_sha256
from txl.data.progress import progress_bar, say
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import Field, UserError
from txl.files import JsonObject, file_sha256, follow_umask, reason_of, write_whole

_TRIES = 3
TIMEOUT = 30.0  # seconds without received data after which an attempt is given up


class _NotTheCorpus(UserError):
    """Error for a source that is damaged or differs from the published corpus."""


@dataclass(frozen=True)
class PublicCorpus:
    """A public corpus, and the settings for opening it."""

    benchmark: Benchmark
    config: DataConfig
    folder: Path  # of prepared corpora and downloads
    source: Path | None  # None: the prepared corpus if there is one, else a download
    vocabulary: Vocabulary | None  # to encode with; None: the corpus's own
    quiet: bool

    def open(self) -> Corpus:
        """Open the corpus; prepare the corpus first if necessary.

        Raises:
            UserError: if the corpus cannot be read or downloaded, or differs from the known one, or if several
                different texts were prepared, none of them is the published one, and no source is named.
        """
        benchmark, config = self.benchmark, self.config
        cut_down = cut_down_by(config) if config.unit == "word" else []
        if benchmark.sentences and cut_down:
            but, name = f"{benchmark.name} has a fixed vocabulary", cut_down[0]
            raise UserError(field=f"data.{name}", value=getattr(config, name), but=but, remedy="leave it out")
        settings = self._recipe(None).settings() | {"strip": self._strips, "verify": config.verify}
        settings |= {"boundary": config.boundary} if benchmark.sentences else {}
        prefix = f"{benchmark.name}-{config.unit}-{json_sha256([META_FORMAT, benchmark.name, settings])[:16]}"
        if self.source is None:
            directories = sorted(self.folder.glob(f"{prefix}-*"))
        else:
            stamps = stamps_of(source_files(benchmark, self.source))
            directories = [self.folder / f"{prefix}-{json_sha256(stamps)[:8]}"]
        before = [prepared_before(directory, benchmark.name, self.quiet) for directory in directories]
        corpora = [corpus for corpus in before if corpus is not None]
        if not corpora:
            if self.source is None:
                return self._download(self.folder / f"{prefix}-download")
            return self._prepare(self.source, directories[0])
        published = [corpus for corpus in corpora if not corpus.info().get("differences")]
        if not published and len({corpus.info()["identity"] for corpus in corpora}) > 1:
            told = f"{len(corpora)} different texts were prepared as {benchmark.name}, and none is the published one"
            raise UserError(told, remedy="name one with data.source")
        corpus = [*published, *corpora][0]
        if differences := corpus.info().get("differences"):
            say(f"note: this is not the published {benchmark.name}: {'; '.join(differences)}", self.quiet)
        return corpus

    def _download(self, directory: Path) -> Corpus:
        name, downloads = self.benchmark.name, self.folder / "downloads" / self.benchmark.name
        try:
            fetch(self.benchmark.routes, downloads, quiet=self.quiet)
        except OSError as error:
            raise not_written(f"getting {name} into", self.folder, error) from None
        try:
            return self._prepare(downloads, directory)
        except _NotTheCorpus as error:
            for path in filter(Path.is_file, downloads.glob("*")):
                path.unlink(missing_ok=True)
            anew = "the download was removed, so that the same command fetches it anew"
            raise UserError((error,), remedy=anew) from None

    def _prepare(self, source: Path, directory: Path) -> Corpus:
        benchmark, unit = self.benchmark, self.config.unit
        with ExitStack() as stack:
            try:
                parts = stack.enter_context(opened(benchmark, source, self.folder))
            except OSError as error:
                if isinstance(error, PermissionError) and self.folder not in Path(error.filename or "").parents:
                    raise UserError(f"{error.filename or source}: cannot be read ({reason_of(error)})") from None
                raise not_written(f"getting {benchmark.name} into", self.folder, error) from None
            except UserError as error:
                raise _NotTheCorpus((error,)) from None
            wrong = file_differences(benchmark, parts)
            # Other differences are told better by the counts of tokens.
            self._judge([text for part, text in wrong.items() if part in ("all", "vocabulary") or benchmark.cuts])

            def check(meta: JsonObject) -> None:
                found = self._count_differences(meta)
                self._judge(found or list(wrong.values()))
                meta["differences"] = [*found, *wrong.values()]

            def pieces():
                return pieces_of(benchmark, parts, unit, self._strips)

            return prepare(directory, benchmark.name, pieces, self._recipe(parts), self.quiet, check)

    @property
    def _strips(self) -> bool:
        return self.config.like_original and self.benchmark.original_strips and self.config.unit == self.benchmark.unit

    @property
    def _is_natural(self) -> bool:
        """True if the tokens are those of the published results."""
        is_own = self.config.unit == self.benchmark.unit and self.vocabulary is None
        return is_own and not (self.config.unit == "word" and self.config.word_rule == "punctuation")

    def _recipe(self, parts: Parts | None) -> Recipe:
        """Return the recipe for the tokens; without `parts`, the recipe lacks a vocabulary read from a file (lm1b)."""
        benchmark, config, vocabulary = self.benchmark, self.config, self.vocabulary
        if benchmark.sentences and config.unit == "word" and vocabulary is None and parts is not None:
            vocabulary = read_words(parts["vocabulary"][0], config.boundary)
        record: JsonObject = {"like_original": config.like_original}
        if vocabulary is not None and vocabulary.boundary is not None:
            record["boundary"] = vocabulary.boundary
        closed_by = ("always", "original") if config.like_original else ("always",)
        counts_all = self._is_natural and config.like_original and benchmark.original_counts_all
        return Recipe(
            config.unit,
            config.vocab_size,
            config.min_count or 1,
            config.max_words,
            config.word_rule or "whitespace",
            normalise=normalises(config, self.vocabulary, by_default=False),
            vocabulary=vocabulary,
            counted=SPLITS if counts_all else ("train",),
            closed=self._is_natural and benchmark.closed in closed_by,
            rewrite=benchmark.original_rewrite if config.like_original else None,
            record=record,
        )

    def _count_differences(self, meta: JsonObject) -> list[str]:
        """Return the differences of the counts of tokens from the known ones."""
        benchmark, config = self.benchmark, self.config
        if not self._is_natural:
            return []
        known = benchmark.tokens_both if benchmark.sentences and config.boundary == "both" else benchmark.tokens
        sizes = None if config.unit == "word" and cut_down_by(config) else benchmark.vocabulary
        if config.like_original:
            sizes = benchmark.original_vocabulary or sizes
            known = {} if benchmark.cuts else known
        tokens = {split: record["tokens"] for split, record in meta["splits"].items()}
        return count_differences(known, tokens, sizes, meta["vocabulary_size"])

    def _judge(self, differences: list[str]) -> None:
        """Refuse a source that differs from the published corpus; print the differences if it is not verified."""
        if not differences:
            return
        where = "the download" if self.source is None else self.source
        what = f"{where} is not {self.benchmark.name}: {'; '.join(differences)}"
        if self.config.verify:
            hint = ("for your own text in this layout, set ", Field("data.verify", False)) if self.source else ""
            raise _NotTheCorpus(what, remedy=hint)
        say(f"note: {what}", self.quiet)


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


def fetch(
    routes: tuple[tuple[Download, ...], ...], folder: Path, *, quiet: bool = False, timeout: float = TIMEOUT
) -> None:
    """Download the files of the first route that works.

    Files that the folder has already, with the right hash, are not downloaded again. An attempt is given up after
    `timeout` seconds without received data.

    Raises:
        UserError: if no route works; the message gives the reason for each route.
        OSError: if the files cannot be written.
    """
    from requests.exceptions import RequestException

    failures = []
    for route in routes:
        for download in route:
            try:
                _fetch_file(download, folder, quiet, timeout)
            except UserError:  # the hash cannot be recorded: no other route would help
                raise
            except (RequestException, ValueError) as error:  # pooch raises a ValueError for a wrong hash
                reason = " ".join(str(error).split())[:300]
                failures.append(f"{download.url}, tried {_TRIES} times: {reason or type(error).__name__}")
                break
        else:
            return
    by_hand = ("try again later, or fetch the files yourself and give their folder with ", Field("data.source"))
    raise UserError(f"cannot download: {'; '.join(failures)}", remedy=by_hand)


def _fetch_file(file: Download, folder: Path, quiet: bool, timeout: float) -> None:
    import pooch

    pooch.get_logger().setLevel("WARNING")  # this module prints what pooch would log at the level "INFO"
    name, url, record = file.file_name, file.url, folder / f"{file.file_name}.sha256"
    known = file.hash or (f"sha256:{record.read_text().strip()}" if record.is_file() else None)
    files = pooch.create(folder, "", registry={name: known}, urls={name: url}, retry_if_failed=_TRIES - 1)
    tell = functools.cache(say)  # once, not at each try

    def transfer(*to: Any, **options: Any) -> None:
        tell(f"downloading {url}", quiet)
        # Without content encoding, Content-Length is the length of the file, so that a truncated transfer is detected.
        headers = {"Accept-Encoding": "identity", "User-Agent": "transformer-xl"}
        with progress_bar(quiet) as bar:
            task = bar.add_task("download", total=None, name=name, doing="downloading")
            meter: Any = SimpleNamespace(total=0)  # with the interface that pooch uses
            meter.update = lambda done: bar.update(task, advance=done, total=meter.total or None)
            meter.reset = lambda: bar.update(task, completed=0)
            meter.close = bar.stop
            pooch.HTTPDownloader(meter, chunk_size=1 << 18, timeout=timeout, headers=headers)(*to, **options)

    files.fetch(name, downloader=transfer)
    follow_umask(folder / name)
    if known is None:  # no source publishes the hash: that of the first download is recorded
        digest = file_sha256(folder / name)
        write_whole(record, digest + "\n")
        say(f"note: no published hash of {name} is known; recorded sha256 {digest}", quiet)
