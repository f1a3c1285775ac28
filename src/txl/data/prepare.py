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
from txl.data.blocks import Blocks, Normaliser, decoded, naming, whole_words
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.counting import bpe_vocabulary, word_vocabulary
from txl.data.located import SentenceMarks
from txl.data.pieces import Piece, Pieces
from txl.data.prepared import (
    META_FORMAT,
    Corpus,
    NotRead,
    TokenWriter,
    keeps_text,
    token_dtype,
    vocabulary_sha256,
    write_meta,
)
from txl.data.progress import say
from txl.data.vocabulary import Vocabulary
from txl.data.words import EOS, UNK, holds_word, words_and_ends
from txl.errors import Field, UserError
from txl.files import JsonObject, is_full, make_scratch

StageProgress = Callable[[str, int, int | None], None]
"""Function that receives the name of the stage, the bytes of text newly processed, and all bytes (None: unknown)."""
STALE_AFTER = 86_400.0  # seconds after which a half-prepared directory is taken for the remains of a killed process
_ELSEWHERE = ("choose another ", Field("data_dir"))
MOST_WORDS = 16_000_000  # different words that are held in memory (about 2 GB)


@dataclass(frozen=True)
class Recipe:
    """Settings that, together with the text, determine the token files."""

    unit: str
    vocab_size: int = 8192
    """Number of tokens of a bpe vocabulary."""
    min_count: int | None = 1
    """Words that occur less often become `<unk>`; None: see `word_rule`."""
    max_words: int | None = None
    """Number of most frequent words that are kept; None: all."""
    word_rule: WordRule | None = "whitespace"
    """Rule for cutting words. If None, the text decides: a text in which `<unk>` or WikiText's `@-@` stands alone is
    already cut into words, so the rule is "whitespace", else "punctuation". If `min_count` is None, it is 1 (all words
    are kept) for a text in which `<unk>` stands alone, else 2."""
    normalise: bool = False
    """True if byte order marks are removed and \\r\\n is read as \\n; always False for bytes."""
    vocabulary: Vocabulary | None = None
    """Vocabulary to encode with; None: make one from the text."""
    counted: tuple[str, ...] = ("train",)
    """Splits from which the vocabulary is made."""
    closed: bool = False
    """True for a vocabulary of only the bytes or characters that occur, most frequent first, without `<unk>`."""
    rewrite: str | None = None
    """Change to the bytes, after normalising and before encoding: "drop newlines" or "lower case"; None: no change."""
    record: JsonObject = field(default_factory=dict)
    """Further entries of the corpus's record."""

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
    if config.unit == "byte":
        return False
    if config.normalise is not None:
        return config.normalise
    return by_default if vocabulary is None else vocabulary.normalise


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
    progress: StageProgress,
    check: Callable[[JsonObject], None] | None = None,
) -> None:
    """Create the prepared corpus `directory`, or leave no files behind on failure.

    Files left by a killed process (kill -9) are removed by a later call, once they are a day old.

    Args:
        directory: directory to create; if another process creates it in the meantime, the other process's directory is
            kept.
        name: name of the corpus, for the record.
        pieces: function that returns the pieces of each split.
        recipe: settings for turning the text into tokens.
        progress: function that receives the progress.
        check: function that receives the record before the corpus can be opened; it may add entries, or raise a
            UserError to refuse the corpus.

    Raises:
        UserError: if the text cannot be read in this unit, the disk is full, or `check` refuses the corpus.
    """
    temporary: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _sweep(directory.parent)
        temporary = make_scratch(directory.parent, directory.name)
        meta = _build(temporary, name, pieces(), recipe, progress)
        if check is not None:
            check(meta)
        write_meta(temporary, meta)
        try:
            os.rename(temporary, directory)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    except OSError as error:
        raise not_written(f"preparing {name} in", directory.parent, error) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove the half-prepared directories of killed processes."""
    for path in folder.glob(".*.partial-*"):
        with suppress(OSError):  # another process may have finished and renamed the directory
            if time.time() - path.stat().st_mtime > STALE_AFTER:
                shutil.rmtree(path, ignore_errors=True)


class _Reader:
    """Reader of the blocks of a split's pieces, which counts, hashes and (for some splits) stores the bytes."""

    def __init__(self, pieces: list[Piece], recipe: Recipe):
        self.pieces = pieces
        self._rewrite = recipe.rewrite
        self.normaliser = Normaliser() if recipe.normalise else None
        sizes = [piece.size for piece in pieces]
        self.size = None if None in sizes else sum(size for size in sizes if size is not None)
        self.n_bytes = 0
        self.hash = hashlib.sha256()
        self.keep: Callable[[bytes], object] | None = None

    def blocks(self, piece: Piece) -> Iterator[bytes]:
        for block in piece.blocks() if self.normaliser is None else self.normaliser.blocks(piece):
            if self._rewrite == "drop newlines":
                block = block.replace(b"\n", b"")
            elif self._rewrite == "lower case":
                block = block.lower()
            self.n_bytes += len(block)
            self.hash.update(block)
            if self.keep is not None:
                self.keep(block)
            yield block

    def texts(self) -> Blocks:
        """Yield the text of all pieces block by block, each with the number of bytes read for it."""
        for piece in self.pieces:
            yield from decoded(piece, self.blocks(piece))

    def encoded(self, vocabulary: Vocabulary) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the token ids block by block, each with the number of bytes read for it.

        A character or word that the vocabulary lacks becomes `<unk>`. In words, the last line of a piece has an `<eos>`
        even without a line end.

        Raises:
            UserError: if the text is not UTF-8 or holds NUL bytes (in all units except bytes), or if a vocabulary
                without `<unk>` lacks symbols of the text.
        """
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
    readers = {split: _Reader(parts, recipe) for split, parts in pieces.items()}
    splits = {split: _write_split(directory, split, reader, vocabulary, progress) for split, reader in readers.items()}
    for split, record in splits.items():
        if record["tokens"] == 0:
            raise UserError(f"{name}: the {split} split is empty", expected="some text")
    vocabulary_hash = vocabulary_sha256(vocabulary)
    hashes = [f"{split} {record['sha256_tokens']}" for split, record in splits.items()]
    return {
        "format": META_FORMAT,
        "name": name,
        "unit": vocabulary.kind,
        "vocabulary_size": len(vocabulary),
        "splits": splits,
        **recipe.record,
        **_normalised([reader.normaliser for reader in readers.values() if reader.normaliser is not None]),
        "sha256_vocabulary": vocabulary_hash,
        "identity": hashlib.sha256("\n".join([vocabulary.kind, vocabulary_hash, *hashes]).encode()).hexdigest(),
    }


def _normalised(normalisers: list[Normaliser]) -> JsonObject:
    """Return the numbers of byte order marks and line ends changed by normalising, for the record."""
    marks = sum(normaliser.byte_order_marks for normaliser in normalisers)
    line_ends = sum(normaliser.line_ends for normaliser in normalisers)
    return {"normalised": {"byte_order_marks": marks, "line_ends": line_ends}} if marks or line_ends else {}


def _write_split(
    directory: Path, split: str, reader: _Reader, vocabulary: Vocabulary, progress: StageProgress
) -> JsonObject:
    """Write a split's token file, and the text if it is kept; return the split's record."""
    with ExitStack() as files:
        writer = TokenWriter(directory / f"{split}.tokens", token_dtype(len(vocabulary)), vocabulary.unk_id)
        files.enter_context(writer)
        if keeps_text(split, vocabulary):
            reader.keep = files.enter_context(open(directory / f"{split}.text", "wb")).write
        for ids, done in reader.encoded(vocabulary):
            writer.write(ids)
            progress(f"encoding {split}", done, reader.size)
    return {
        "tokens": writer.tokens,
        "bytes": reader.n_bytes,
        "unknown": writer.unknown,
        "sha256_tokens": writer.sha256,
        "sha256_text": reader.hash.hexdigest(),
    }


def _make_vocabulary(pieces: list[Piece], recipe: Recipe, progress: StageProgress) -> Vocabulary:
    """Return the vocabulary of the pieces of the training text, in the unit of the recipe."""
    reader = _Reader(pieces, recipe)
    counts: Counter[Any] = Counter()  # in the order of first occurrence
    if recipe.unit == "byte":
        if not recipe.closed:
            return ByteVocabulary()
        for block in (block for piece in pieces for block in reader.blocks(piece)):
            counts.update(block)
            progress("counting bytes", len(block), reader.size)
        return ByteVocabulary([value for value, _ in counts.most_common()])
    if recipe.unit == "char":
        for text, done in reader.texts():
            counts.update(text)
            progress("counting characters", done, reader.size)
        characters = [character for character, _ in counts.most_common()] if recipe.closed else sorted(counts)
        return CharVocabulary(characters, unknown=not recipe.closed, normalise=recipe.normalise)
    if recipe.unit == "word":
        rule, min_count = _how_words_are_cut(recipe, pieces)
        for piece in pieces:
            for text, done in whole_words(piece, reader.blocks(piece)):
                counts.update(words_and_ends(text, EOS, rule))
                progress("counting words", done, reader.size)
                if len(counts) > MOST_WORDS:
                    problem = f"the training text has more than {MOST_WORDS:,} different words"
                    raise UserError(problem, remedy="use the unit bpe or char for it")
        return word_vocabulary(counts, min_count, recipe.max_words, rule, recipe.normalise)

    def texts() -> Iterator[str]:
        for text, done in reader.texts():
            progress("reading for BPE tokens", done, reader.size)
            yield text
        progress("learning BPE tokens", 0, None)  # the library learns after it has read everything

    return bpe_vocabulary(pieces, recipe.vocab_size, texts(), recipe.normalise)


def _how_words_are_cut(recipe: Recipe, pieces: list[Piece]) -> tuple[WordRule, int]:
    """Return the word rule and `min_count`, as configured or derived from the text (see `Recipe.word_rule`)."""
    if recipe.word_rule is not None and recipe.min_count is not None:
        return recipe.word_rule, recipe.min_count
    has_unknown, has_hyphen = (
        holds_word((block for piece in pieces for block in piece.blocks()), word) for word in (UNK, "@-@")
    )
    rule: WordRule = "whitespace" if has_unknown or has_hyphen else "punctuation"
    return recipe.word_rule or rule, recipe.min_count or (1 if has_unknown else 2)
