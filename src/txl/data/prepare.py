"""From pieces of text to token files, in streams: memory does not grow with the text.

A prepared corpus is a directory with `meta.json`, `vocabulary.json`, `SPLIT.tokens` for each split, and (unless tokens
are bytes) the text of the validation and test splits as `SPLIT.text`. It is built under another name and renamed when
it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from txl.config import DataConfig
from txl.data.sources import Piece, Pieces
from txl.data.token_files import TokenWriter, token_dtype
from txl.data.vocabulary import (
    EOS,
    UNK,
    BpeVocabulary,
    ByteVocabulary,
    CharVocabulary,
    Vocabulary,
    WordVocabulary,
    words_and_ends,
)
from txl.errors import UserError

Progress = Callable[[str, int], None]
"""Called with what is being done and the bytes of text that have just been done."""
META_FORMAT = 1
BPE_CHUNK = 1 << 16
"""Characters given to the BPE library at once; tokens do not cross the chunks' edges."""


def prepare(
    directory: Path,
    name: str,
    pieces: Pieces,
    config: DataConfig,
    vocabulary: Vocabulary | None,
    progress: Progress,
) -> None:
    """Make the prepared corpus `directory`, or leave no trace.

    Args:
        directory: is made; if another process makes it meanwhile, theirs stays.
        name: of the corpus, for its record.
        pieces: the text of each split.
        config: the unit, and the settings of its vocabulary.
        vocabulary: the one to encode with; None: one made from the training split.
        progress: is told how far it is.

    Raises:
        UserError: if the text cannot be read in this unit, or the disk is full.
    """
    temporary: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        _build(temporary, name, pieces, config, vocabulary, progress)
        try:
            os.rename(temporary, directory)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    except OSError as error:
        raise UserError(
            f"preparing {name} in {directory.parent} failed: {error.strerror or error}; "
            f"nothing was kept; free the disk or choose another --data-dir"
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _build(
    directory: Path, name: str, pieces: Pieces, config: DataConfig, vocabulary: Vocabulary | None, progress: Progress
) -> None:
    if vocabulary is None:
        vocabulary = make_vocabulary(pieces["train"], config, progress)
    vocabulary.save(directory / "vocabulary.json")
    dtype = token_dtype(len(vocabulary))
    splits: dict[str, dict[str, Any]] = {}
    for split, split_pieces in pieces.items():
        text_hash, n_bytes = hashlib.sha256(), 0
        with ExitStack() as files:
            writer = files.enter_context(TokenWriter(directory / f"{split}.tokens", dtype, vocabulary.unk_id))
            keep = None
            if split != "train" and vocabulary.kind != "byte":  # byte tokens are the text
                keep = files.enter_context(open(directory / f"{split}.text", "wb")).write
            for piece in split_pieces:
                blocks = _Tee(piece, text_hash.update, keep)
                for ids, done in encode_piece(piece, blocks, vocabulary):
                    writer.write(ids)
                    progress(f"encoding {split}", done)
                n_bytes += blocks.n_bytes
        if writer.tokens == 0:
            raise UserError(f"{name}: the {split} split is empty; expected some text")
        splits[split] = {
            "tokens": writer.tokens,
            "bytes": n_bytes,
            "unknown": writer.unknown,
            "sha256_tokens": writer.sha256,
            "sha256_text": text_hash.hexdigest(),
        }
    vocabulary_hash = hashlib.sha256(json.dumps(vocabulary.to_json(), sort_keys=True).encode()).hexdigest()
    content = [vocabulary.kind, vocabulary_hash, *[f"{key} {value['sha256_tokens']}" for key, value in splits.items()]]
    meta = {
        "format": META_FORMAT,
        "name": name,
        "unit": vocabulary.kind,
        "vocabulary_size": len(vocabulary),
        "dtype": dtype.str,
        "splits": splits,
        "sha256_vocabulary": vocabulary_hash,
        "identity": hashlib.sha256("\n".join(content).encode()).hexdigest(),
    }
    (directory / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


class _Tee:
    """The blocks of a piece, which on the way are counted, hashed and (for some splits) written down."""

    def __init__(self, piece: Piece, update: Callable[[bytes], None], write: Callable[[bytes], Any] | None):
        self._piece, self._update, self._write = piece, update, write
        self.n_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        for block in self._piece.blocks():
            self.n_bytes += len(block)
            self._update(block)
            if self._write is not None:
                self._write(block)
            yield block


def make_vocabulary(pieces: list[Piece], config: DataConfig, progress: Progress) -> Vocabulary:
    """The vocabulary of a training split.

    Raises:
        UserError: if the text cannot be read in this unit.
    """
    if config.unit == "byte":
        return ByteVocabulary()
    if config.unit == "char":
        seen = np.zeros(0x110000, dtype=bool)
        for text, done in _texts(pieces):
            seen[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)] = True
            progress("collecting characters", done)
        return CharVocabulary(chr(code) for code in np.flatnonzero(seen))
    if config.unit == "word":
        counts: Counter[str] = Counter()
        for piece in pieces:
            for words, done in _words(piece, piece.blocks()):
                counts.update(words)
                progress("counting words", done)
        return word_vocabulary(counts, config.min_count, config.max_words)

    def chunks() -> Iterator[str]:
        for text, done in _texts(pieces):
            progress("learning byte pairs", done)
            yield from (text[start : start + BPE_CHUNK] for start in range(0, len(text), BPE_CHUNK))

    return BpeVocabulary.train(chunks(), config.vocab_size)


def word_vocabulary(counts: Counter[str], min_count: int, max_words: int | None) -> WordVocabulary:
    """`<eos>` first, as in the authors' code, then words by falling count; equal counts in the order of appearance.

    `<unk>` takes the place that its count gives it: its own occurrences and those of all words left out.
    """
    kept = {word: count for word, count in counts.items() if count >= min_count and word not in (EOS, UNK)}
    words = sorted(kept, key=lambda word: -kept[word])[:max_words]
    left_out = sum(counts.values()) - counts[EOS] - sum(kept[word] for word in words)
    place = next((number for number, word in enumerate(words) if kept[word] < left_out), len(words))
    return WordVocabulary([EOS, *words[:place], UNK, *words[place:]])


def encode_piece(piece: Piece, blocks: Any, vocabulary: Vocabulary) -> Iterator[tuple[np.ndarray, int]]:
    """Token ids of a piece of text, block by block, with the bytes that each block took.

    A character that a character vocabulary lacks becomes `<unk>`; a piece's last line has an `<eos>` even if nothing
    ends it.

    Raises:
        UserError: for text that is not UTF-8, or holds NUL bytes, in any unit but bytes.
    """
    if isinstance(vocabulary, ByteVocabulary):
        for block in blocks:
            yield np.frombuffer(block, dtype=np.uint8), len(block)
    elif isinstance(vocabulary, CharVocabulary):
        for text, done in _decoded(piece, blocks):
            yield vocabulary.encode_text(text), done
    elif isinstance(vocabulary, WordVocabulary):
        ids, unk = vocabulary.ids, vocabulary.unk_id
        for words, done in _words(piece, blocks):
            yield np.fromiter((ids.get(word, unk) for word in words), dtype=np.uint32, count=len(words)), done
    elif isinstance(vocabulary, BpeVocabulary):
        for text, done in _decoded(piece, blocks):
            chunks = [text[start : start + BPE_CHUNK] for start in range(0, len(text), BPE_CHUNK)]
            encoded = vocabulary.tokenizer.encode_batch_fast(chunks)
            yield np.array([each for one in encoded for each in one.ids], dtype=np.uint32), done
    else:
        raise TypeError(f"no encoding for a {type(vocabulary).__name__}")


def _texts(pieces: list[Piece]) -> Iterator[tuple[str, int]]:
    for piece in pieces:
        yield from _decoded(piece, piece.blocks())


def _decoded(piece: Piece, blocks: Any) -> Iterator[tuple[str, int]]:
    """Text of a piece, block by block; a character that is cut by a block's end goes to the next block."""
    offset, rest = piece.start, b""
    for block in blocks:
        data = rest + block
        zero = data.find(b"\0")
        if zero >= 0:
            raise UserError(
                f"{piece.path}: binary (a NUL byte at offset {offset + zero}); use the unit byte, or give a text"
            )
        try:
            text, rest = data.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                raise _not_utf8(piece, offset + error.start, data[error.start]) from None
            text, rest = data[: error.start].decode("utf-8"), data[error.start :]
        offset += len(data) - len(rest)
        yield text, len(block)
    if rest:
        raise _not_utf8(piece, offset, rest[0])


def _not_utf8(piece: Piece, offset: int, value: int) -> UserError:
    return UserError(
        f"{piece.path}: not UTF-8 (byte 0x{value:02X} at offset {offset}); convert it to UTF-8 or use the unit byte"
    )


def _words(piece: Piece, blocks: Any) -> Iterator[tuple[list[str], int]]:
    """Words and `<eos>` of a piece, block by block; a word that is cut by a block's end goes to the next block."""
    rest, ended = "", True
    for text, done in _decoded(piece, blocks):
        if not text:
            continue
        text = rest + text
        ended = text.endswith("\n")
        cut = max(text.rfind("\n"), text.rfind(" ")) + 1
        rest = text[cut:]
        yield words_and_ends(text[:cut]), done
    if rest or not ended:
        yield [*words_and_ends(rest), EOS], 0
