"""The interface of vocabularies: they encode text to token ids and decode ids one at a time.

Shapes: N tokens, C characters of a text.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from txl.data.pieces import BYTE_ORDER_MARK, Blocks, Piece, decoded
from txl.data.words import EOS, UNK
from txl.errors import UserError
from txl.files import JsonObject, write_whole

_AT_ONCE = 1 << 16  # characters after which a text is cut at the next border, so that other threads run in between


class Decoder(ABC):
    """The interface of decoders, which turn token ids into text one token at a time."""

    @abstractmethod
    def push(self, token: int) -> str:
        """Return the text that one more token completes (may be empty)."""

    def flush(self) -> str:
        """Return the text that is still incomplete after the last token."""
        return ""


class BytesDecoder(Decoder):
    """Decoder of tokens that are UTF-8 bytes; a character spread over tokens is returned with its last byte."""

    def __init__(self, pieces: Sequence[bytes]):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the characters that this token completes."""
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        """Return U+FFFD if a character was left incomplete."""
        return self._decoder.decode(b"", final=True)


class Vocabulary(ABC):
    """The tokens of a model, numbered from 0."""

    kind: ClassVar[str]
    reads_all: ClassVar[bool] = False
    """True for bytes and BPE tokens: they spell any text, also characters that training never saw (see `seen`)."""
    pieces: Sequence[bytes] | None = None
    """The bytes of each token; None for words, whose text depends on what stands before them."""
    eos: str | None = None  # word that stands for the end of a line
    eos_id: int | None = None
    unk_id: int | None = None
    """Id of `<unk>`, which replaces symbols that the vocabulary lacks; None: text with such symbols is refused."""
    draws_unknown: bool = False  # `<unk>` is a word of the training text, which a model may generate
    boundary: str | None = None  # of a corpus of separate sentences (see `WordVocabulary`); None: running text
    normalise: bool = False  # a text's byte order mark is removed, and \\r\\n read as \\n; never for bytes
    lower: bool = False  # a text is read in lower case; only in vocabularies of characters and words
    is_text: bool = False  # the ids of a text are its bytes
    seen: frozenset[int] | None = None
    """Code points of the characters of a model's training text (bytes and BPE tokens only; None: not known). A byte
    that is not UTF-8 counts as U+DC80 to U+DCFF. Equality and hashes of vocabularies ignore this."""
    longest: int = 1  # characters of a token; not known for words
    border: re.Pattern[str] | None = None
    """Pattern of borders: if a text is cut before a match, the tokens of the parts are the tokens of the text."""

    @abstractmethod
    def __len__(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text: int64 [N]; symbols that the vocabulary lacks become `<unk>`.

        Raises:
            UserError: if a vocabulary without `<unk>` lacks symbols of the text, which the message names.
        """
        return self.encode_block(self.read(text))

    @abstractmethod
    def encode_block(self, text: str) -> np.ndarray:
        """Return the token ids of a block of a corpus, normalised before if required: integers [N]; see `encode`."""

    def texts(self, piece: Piece, blocks: Iterable[bytes]) -> Blocks:
        """Yield the text of a piece in blocks whose ends no token crosses, each with the bytes that were read for it.

        Raises:
            UserError: if the text is not UTF-8 or holds NUL bytes (not for bytes).
        """
        return decoded(piece, blocks)

    def places(self, text: str, ids: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the byte offsets at which each token of a block of text starts and ends: int64 [N] each.

        Args:
            text: the block.
            ids: its token ids: int64 [N].
            edges: offset in bytes of each character, and of the end: int64 [C+1].

        Raises:
            UserError: if the tokens do not spell the text.
        """
        ends = np.cumsum(self._lengths[ids])
        if (ends[-1] if len(ends) else 0) != edges[-1]:
            raise UserError("the vocabulary's tokens do not spell the text, so their places in it are not known")
        return np.concatenate([[0], ends[:-1]])[: len(ends)], ends

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        return np.array([len(piece) for piece in self.pieces or ()], dtype=np.int64)

    def knows(self, symbol: str) -> bool:
        """Return whether a word or character is neither `<unk>` nor (bytes and BPE) unseen in training."""
        return self.seen is None or ord(symbol) in self.seen

    def lacking(self, text: str) -> list[str]:
        """Return the words or characters that `encode` reads as `<unk>`, each once, in the order of the text."""
        return []

    def unseen(self, text: str) -> list[str]:
        """Return the characters of a text that the training text never had, each once, in the order of the text.

        Bytes and BPE tokens can be trained only on the characters of the training text: for other characters, the
        model's probabilities are noise. The list is empty for other units (see `lacking`) and if `seen` is None.
        """
        seen = self.seen
        return [] if seen is None else [char for char in dict.fromkeys(self.read(text)) if ord(char) not in seen]

    def _parts(self, text: str) -> Iterator[str]:
        """Yield a text in parts of about `_AT_ONCE` characters that end at borders."""
        start = 0
        while start < len(text):
            border = self.border.search(text, start + _AT_ONCE) if self.border else None
            end = border.start() if border else len(text)
            yield text[start:end]
            start = end

    def read(self, text: str) -> str:
        """Return a text as `encode` reads it: normalised if `normalise` is True."""
        return normalised(text) if self.normalise else text

    def _spells(self, ids: np.ndarray) -> bool:
        """Return whether tokens determine the text; a word, `<unk>` and a character of either case do not."""
        return self.pieces is not None and not self.lower and (self.unk_id is None or not (ids == self.unk_id).any())

    def spelled_bytes(self, ids: np.ndarray) -> int | None:
        """Return the length in bytes of the text of tokens [N]; None if the tokens do not determine the text."""
        return int(self._lengths[ids].sum()) if self._spells(ids) else None

    def spell(self, ids: np.ndarray) -> bytes | None:
        """Return the text of tokens [N]; None if the tokens do not determine the text."""
        return b"".join(map((self.pieces or ()).__getitem__, ids.tolist())) if self._spells(ids) else None

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, without the space that may come before a word."""
        return self.decoder().push(token).encode() if self.pieces is None else self.pieces[token]

    def line_ends(self) -> list[int]:
        """Return the ids of the tokens that end a line."""
        if self.pieces is None:
            return [] if self.eos_id is None else [self.eos_id]
        return [token for token, piece in enumerate(self.pieces) if piece.endswith(b"\n")]

    def line_end_id(self) -> int | None:
        """Return the id of the line end after which a text without context begins; None: no single token is one."""
        if self.pieces is None:
            return self.eos_id
        return next((token for token, piece in enumerate(self.pieces) if piece == b"\n"), None)

    def decoder(self, after: str = "") -> Decoder:
        """Return a decoder for tokens that follow the text `after`; bytes that are not UTF-8 become U+FFFD."""
        return BytesDecoder(self.pieces or ())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids."""
        decoder = self.decoder()
        return "".join([decoder.push(int(token)) for token in ids]) + decoder.flush()

    @abstractmethod
    def to_json(self) -> JsonObject:
        """Return the whole vocabulary as plain JSON values."""

    def _as_json(self, **values: object) -> JsonObject:
        """Return `values` with the entries that all kinds of vocabulary have; the format is the lowest possible one."""
        values |= {name: True for name in ("normalise", "lower") if getattr(self, name)}
        is_third = self.lower or "unk_id" in values or None in (values.get("eos", EOS), values.get("unk", UNK))
        lowest = 3 if is_third else 2 if self.normalise or "rule" in values else 1
        return {"format": lowest, "kind": self.kind, **values}

    def save(self, path: Path) -> None:
        """Write the vocabulary and `seen` as JSON; the file is either written completely or left unchanged."""
        values = self.to_json() | ({} if self.seen is None else {"seen": sorted(self.seen)})
        write_whole(path, json.dumps(values, ensure_ascii=False))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.to_json() == other.to_json()

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def check_symbols(symbols: list[str], kind: str) -> None:
    """Refuse the symbols of a vocabulary if one occurs twice or cannot be written in UTF-8."""
    if len(set(symbols)) != len(symbols):
        raise UserError(f"a {kind} vocabulary holds a {kind} twice")
    try:
        "".join(symbols).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"a {kind} vocabulary holds {error.object[error.start]!r}, which UTF-8 cannot write") from None


def normalised(text: str) -> str:
    """Return a text without a byte order mark, and with \\n for \\r\\n."""
    return text.removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n")


def utf8(text: str) -> bytes:
    """Return the UTF-8 form of a text; undecodable bytes of a command line (surrogates in `text`) are restored.

    Raises:
        UserError: if the text has half a surrogate pair that does not stand for an undecodable byte.
    """
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        what = f"half a surrogate pair (U+{ord(text[error.start]):04X} at character {error.start})"
        raise UserError(f"the text has {what}, which is no character; leave it out") from None
