"""Preparation of token files from pieces of text, block by block: memory use does not grow with the text.

A prepared corpus is a directory with `meta.json`, `vocabulary.json`, `SPLIT.tokens` for each split, and (unless tokens
are plain bytes) the text of the validation and test splits as `SPLIT.text`. The directory is built under a temporary
name and renamed when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from txl.config import DataConfig, WordRule
from txl.data.bpe import BpeVocabulary
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.located import SentenceMarks
from txl.data.pieces import BYTE_ORDER_MARK, Piece, Pieces, content_size, decoded, naming, whole_line_ends, whole_words
from txl.data.prepared import META_FORMAT, Corpus, NotRead, json_sha256, keeps_text, token_dtype, write_meta
from txl.data.progress import StageProgress, preparing, say
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.data.words import EOS, UNK, holds_word, words_and_ends
from txl.errors import Field, UserError
from txl.files import JsonObject, is_full, make_scratch

STALE_AFTER = 86_400.0  # seconds after which a half-prepared directory is taken for the remains of a killed process
_ELSEWHERE = ("choose another ", Field("data_dir"))
MOST_WORDS = 16_000_000  # different words that are held in memory (about 2 GB)


@dataclass(frozen=True)
class Recipe:
    """Settings that, together with the text, determine the token files."""

    unit: str
    vocab_size: int = 8192  # of bpe
    min_count: int | None = 1  # words that occur less often become `<unk>`; None: see `word_rule`
    max_words: int | None = None  # number of most frequent words that are kept
    word_rule: WordRule | None = "whitespace"
    """Rule for cutting words. If None, the text decides: a text in which `<unk>` or WikiText's `@-@` stands alone is
    already cut into words, so the rule is "whitespace", else "punctuation". If `min_count` is None, it is 1 (all words
    are kept) for a text in which `<unk>` stands alone, else 2."""
    normalise: bool = False  # byte order marks are removed, and \\r\\n is read as \\n; never for bytes
    vocabulary: Vocabulary | None = None  # None: make one from the text
    counted: tuple[str, ...] = ("train",)  # splits from which the vocabulary is made
    closed: bool = (
        False  # a vocabulary of only the bytes or characters that occur, most frequent first, without `<unk>`
    )
    rewrite: str | None = None  # of the bytes, after normalising: "drop newlines" or "lower case"
    record: JsonObject = field(default_factory=dict)  # further entries of the corpus's record

    def settings(self) -> JsonObject:
        """Return the settings that determine the token files, as JSON values; settings of other units are left out."""
        values: JsonObject = {"unit": self.unit, "rewrite": self.rewrite}
        if self.normalise:
            values |= {"normalise": True}
        if self.vocabulary is not None:
            return values | {"vocabulary": self.vocabulary.to_json()}
        values |= {"counted": self.counted, "closed": self.closed}
        if self.unit == "word":
            values |= {"min_count": self.min_count, "max_words": self.max_words}
            if self.word_rule != "whitespace":
                values |= {"word_rule": self.word_rule}
        elif self.unit == "bpe":
            values |= {"vocab_size": self.vocab_size}
        return values


def normalises(config: DataConfig, vocabulary: Vocabulary | None, *, by_default: bool) -> bool:
    """Return whether a text is normalised: False for bytes, else as configured, as `vocabulary` is, or `by_default`."""
    usual = by_default if vocabulary is None else vocabulary.normalise
    return config.unit != "byte" and (usual if config.normalise is None else config.normalise)


def prepared_before(directory: Path, name: str, quiet: bool) -> Corpus | None:
    """Open a prepared corpus; None if there is none, or if it is damaged and therefore removed, with a printed note."""
    if not directory.is_dir():
        return None
    try:
        return Corpus(directory)
    except NotRead:
        raise
    except UserError as error:
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists():
            raise UserError((error, ", and it cannot be removed"), remedy=_ELSEWHERE) from None
        say(f"note: {error}; preparing {name} anew", quiet)
        return None


def stamps_of(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of each file; a text with unchanged stamps is not prepared again."""
    statuses = [(path, path.stat()) for path in files]
    return [(str(path.absolute()), status.st_size, status.st_mtime_ns) for path, status in statuses]


def not_written(what: str, folder: Path, error: OSError) -> UserError:
    """Return the error for a folder that could not be written to."""
    remedy = ("free the disk or ", *_ELSEWHERE) if is_full(error) else _ELSEWHERE
    return UserError(f"{what} {folder} failed: {error.strerror or error}; nothing was kept", remedy=remedy)


def prepare(
    directory: Path,
    name: str,
    pieces: Callable[[], Pieces],
    recipe: Recipe,
    quiet: bool,
    check: Callable[[JsonObject], None] = lambda meta: None,
) -> Corpus:
    """Create and open the prepared corpus `directory`, or leave no files behind on failure.

    If another process creates it in the meantime, the other process's directory is kept. Files left by a killed process
    (kill -9) are removed by a later call, once they are a day old. `check` receives the record before the corpus can be
    opened; it may add entries, or raise a UserError to refuse the corpus.

    Raises:
        UserError: if the text cannot be read in this unit, the disk is full, or `check` refuses the corpus.
    """
    temporary: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        for left in directory.parent.glob(".*.partial-*"):
            with suppress(OSError):  # another process may have finished and renamed the directory
                if time.time() - left.stat().st_mtime > STALE_AFTER:
                    shutil.rmtree(left, ignore_errors=True)
        temporary = make_scratch(directory.parent, directory.name)
        with preparing(name, recipe.unit, quiet) as progress:
            meta = _build(temporary, name, pieces(), recipe, progress)
        check(meta)
        write_meta(temporary, meta)
        try:
            os.rename(temporary, directory)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    except BrokenPipeError:  # nobody reads the progress
        raise
    except OSError as error:
        raise not_written(f"preparing {name} in", directory.parent, error) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return Corpus(directory)


class _Reader:
    """Reader of the blocks of a split's pieces, which normalises, counts, hashes and perhaps keeps them."""

    def __init__(self, pieces: list[Piece], recipe: Recipe):
        self.pieces, self._recipe = pieces, recipe
        sizes = [piece.size for piece in pieces]
        self.size = None if None in sizes else sum(size for size in sizes if size is not None)
        self.n_bytes = self.byte_order_marks = self.line_ends = 0
        self.hash = hashlib.sha256()
        self.keep: Callable[[bytes], object] = lambda block: None

    def blocks(self, piece: Piece) -> Iterator[bytes]:
        for block in self._normalised(piece) if self._recipe.normalise else piece.blocks():
            if self._recipe.rewrite == "drop newlines":
                block = block.replace(b"\n", b"")
            elif self._recipe.rewrite == "lower case":
                block = block.lower()
            self.n_bytes += len(block)
            self.hash.update(block)
            self.keep(block)
            yield block

    def _normalised(self, piece: Piece) -> Iterator[bytes]:
        """Yield the bytes of a piece without byte order marks and with \\n for \\r\\n, and count both."""
        begins = piece.start == 0
        for text, _ in whole_line_ends(piece, decoded(piece, piece.blocks())):
            if begins and text:
                begins = False
                self.byte_order_marks += text.startswith(BYTE_ORDER_MARK)
                text = text.removeprefix(BYTE_ORDER_MARK)
            self.line_ends += text.count("\r\n")
            yield text.replace("\r\n", "\n").encode()

    def encoded(self, vocabulary: Vocabulary) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the token ids block by block, each with the number of bytes read for it."""
        marks = SentenceMarks(vocabulary)
        for piece in self.pieces:
            with naming(piece):
                for text, done in vocabulary.texts(piece, self.blocks(piece)):
                    ids = vocabulary.encode_block(text)
                    yield np.insert(ids, marks.places(ids), marks.eos_id) if vocabulary.boundary else ids, done


def _build(directory: Path, name: str, pieces: Pieces, recipe: Recipe, progress: StageProgress) -> JsonObject:
    """Write the vocabulary, token files and texts of a corpus, and return its record."""
    vocabulary = recipe.vocabulary
    if vocabulary is None:
        vocabulary = _make_vocabulary([piece for split in recipe.counted for piece in pieces[split]], recipe, progress)
    text = json.dumps(vocabulary.to_json(), ensure_ascii=False)
    (directory / "vocabulary.json").write_text(text, encoding="utf-8")
    dtype, normalised = token_dtype(len(vocabulary)), dict.fromkeys(("byte_order_marks", "line_ends"), 0)
    splits: dict[str, JsonObject] = {}
    for split, parts in pieces.items():
        reader, tokens, unknown, sha256 = _Reader(parts, recipe), 0, 0, hashlib.sha256()
        with ExitStack() as files:
            file = files.enter_context(open(directory / f"{split}.tokens", "wb"))
            if keeps_text(split, vocabulary):
                reader.keep = files.enter_context(open(directory / f"{split}.text", "wb")).write
            for ids, done in reader.encoded(vocabulary):
                block = np.ascontiguousarray(ids, dtype=dtype)
                unknown += 0 if vocabulary.unk_id is None else int((block == vocabulary.unk_id).sum())
                tokens += len(block)
                sha256.update(block.data)
                file.write(block.data)
                progress(f"encoding {split}", done, reader.size)
        splits[split] = {
            "tokens": tokens,
            "bytes": reader.n_bytes,
            "unknown": unknown,
            "sha256_tokens": sha256.hexdigest(),
            "sha256_text": reader.hash.hexdigest(),
        }
        for change in normalised:
            normalised[change] += getattr(reader, change)
    if empty := next((split for split, record in splits.items() if record["tokens"] == 0), None):
        raise UserError(f"{name}: the {empty} split is empty", expected="some text")
    vocabulary_hash = json_sha256(vocabulary.to_json())
    hashes = [f"{split} {record['sha256_tokens']}" for split, record in splits.items()]
    return {
        "format": META_FORMAT,
        "name": name,
        "unit": vocabulary.kind,
        "vocabulary_size": len(vocabulary),
        "splits": splits,
        **recipe.record,
        **({"normalised": normalised} if any(normalised.values()) else {}),
        "sha256_vocabulary": vocabulary_hash,
        "identity": hashlib.sha256("\n".join([vocabulary.kind, vocabulary_hash, *hashes]).encode()).hexdigest(),
    }


def _make_vocabulary(pieces: list[Piece], recipe: Recipe, progress: StageProgress) -> Vocabulary:
    """Return the vocabulary of the pieces of the training text, in the unit of the recipe."""
    reader = _Reader(pieces, recipe)
    counts: Counter[Any] = Counter()  # in the order of first occurrence
    if recipe.unit == "byte":
        for block in (block for piece in pieces for block in reader.blocks(piece)) if recipe.closed else ():
            counts.update(block)
            progress("counting bytes", len(block), reader.size)
        return ByteVocabulary([value for value, _ in counts.most_common()] if recipe.closed else None)

    if recipe.unit == "word":
        rule, min_count = recipe.word_rule, recipe.min_count
        if rule is None or min_count is None:
            has_unknown, has_hyphen = (
                holds_word((block for piece in pieces for block in piece.blocks()), word) for word in (UNK, "@-@")
            )
            rule = rule or ("whitespace" if has_unknown or has_hyphen else "punctuation")
            min_count = min_count or (1 if has_unknown else 2)
        for piece in pieces:
            for text, done in whole_words(piece, reader.blocks(piece)):
                counts.update(words_and_ends(text, EOS, rule))
                progress("counting words", done, reader.size)
                if len(counts) > MOST_WORDS:
                    problem = f"the training text has more than {MOST_WORDS:,} different words"
                    raise UserError(problem, remedy="use the unit bpe or char for it")
        return WordVocabulary.of_counts(counts, min_count, recipe.max_words, rule, recipe.normalise)

    def texts(stage: str) -> Iterator[str]:
        for piece in pieces:
            for text, done in decoded(piece, reader.blocks(piece)):
                progress(stage, done, reader.size)
                yield text

    if recipe.unit == "char":
        for text in texts("counting characters"):
            counts.update(text)
        characters = [character for character, _ in counts.most_common()] if recipe.closed else sorted(counts)
        return CharVocabulary(characters, unknown=not recipe.closed, normalise=recipe.normalise)

    def told() -> Iterator[str]:
        yield from texts("reading for BPE tokens")
        progress("learning BPE tokens", 0, None)  # the library learns after it has read everything

    n_bytes = sum((content_size(piece.path) if piece.end is None else piece.end) - piece.start for piece in pieces)
    return BpeVocabulary.train(told(), recipe.vocab_size, n_bytes=n_bytes, normalise=recipe.normalise)
