"""Vocabularies of all units: they encode text to token ids and decode ids one at a time.

A vocabulary is saved as plain JSON. In memory, ids are int64 arrays.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, get_args

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from txl.config import WordRule
from txl.data.decoders import BytesDecoder, Decoder, SymbolDecoder, WordDecoder
from txl.data.words import EOS, UNK, unjoined, words_and_ends
from txl.errors import UserError, named
from txl.files import JsonObject, is_utf8, read_json, write_whole

BYTE_ORDER_MARK = "\ufeff"
BPE_CHUNK = 1 << 16
"""Characters of a corpus passed to the BPE library at once; tokens do not cross the ends of these chunks."""
_LONG = 1 << 14
"""Characters from which BPE encodes a text outside of the interpreter's lock. This starts the library's own threads,
and a later fork of the process then prints a warning of the library."""
_AT_ONCE = 1 << 16
"""Characters of a text after which it is cut at the next border, so that other threads run in between."""
_WORD_BORDER = re.compile(r"\s")
_BPE_BORDER = re.compile(r"(?<=\S)[ \t\r\n]")
_FORMATS = (1, 2, 3)
"""Formats that can be read. Format 2 adds `normalise` and `rule`, format 3 `lower`, `unk_id`, and words without `<eos>`
or `<unk>`: earlier readers would ignore or refuse them."""
BPE_LONGEST = 1 << 10
"""Characters of a piece of text (a word, a number ...) in which BPE merges are learned; longer pieces are cut. The time
that the library takes grows with the square of this length. For DNA, protein and Chinese without marks, 4,096 tokens
learned in pieces of 256, 1,024 and 4,096 characters give the same number of tokens and entropy within 0.2%; learning
takes 1, 1.2 and 2 to 3.7 times as long."""
_RUN = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")
"""Piece of text as the BPE library cuts it, apart from a space before it; signs such as ½ count as letters here."""


class Vocabulary(ABC):
    """The tokens of a model, numbered from 0."""

    kind: ClassVar[str]
    unk_id: int | None = None
    """Id of `<unk>`, which replaces symbols that the vocabulary lacks; None: text with such symbols is refused."""
    eos_id: int | None = None
    """Id of the token for the end of a line; None: there is no such token."""
    normalise: bool = False
    """True if a text's byte order mark is removed and \\r\\n is read as \\n; always False for bytes."""
    lower: bool = False
    """True if a text is read in lower case; only in vocabularies of characters and words."""
    seen: frozenset[int] | None = None
    """Code points of the characters of a model's training text (bytes and BPE tokens only; None: not known). A byte
    that is not UTF-8 counts as U+DC80 to U+DCFF. Equality and hashes of vocabularies ignore this."""

    border: re.Pattern[str] | None = None
    """Pattern of borders: if a text is cut before a match, the tokens of the parts are the tokens of the text."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text: int64 [N]; symbols that the vocabulary lacks become `<unk>`.

        Raises:
            UserError: if a vocabulary without `<unk>` lacks symbols of the text, which the message names.
        """

    def lacking(self, text: str) -> list[str]:
        """Return the words or characters that `encode` reads as `<unk>`, each once, in the order of the text."""
        return []

    def unseen(self, text: str) -> list[str]:
        """Return the characters of a text that the training text never had, each once, in the order of the text.

        Bytes and BPE tokens can be trained only on the characters of the training text: for other characters, the
        model's probabilities are noise. The list is empty for other units (see `lacking`) and if `seen` is None.
        """
        characters = dict.fromkeys(self.read(text)) if self.seen is not None else {}
        return [each for each in characters if ord(each) not in (self.seen or ())]

    def _parts(self, text: str) -> Iterator[str]:
        """Yield a text in parts of about `_AT_ONCE` characters that end at borders."""
        start = 0
        while start < len(text):
            found = self.border.search(text, start + _AT_ONCE) if self.border else None
            end = found.start() if found else len(text)
            yield text[start:end]
            start = end

    def read(self, text: str) -> str:
        """Return a text as `encode` reads it: normalised if `normalise` is True."""
        return normalised(text) if self.normalise else text

    def spelled_bytes(self, ids: np.ndarray) -> int | None:
        """Return the length in bytes of the text of tokens [N]; None if the tokens do not determine the text."""
        return None

    def spell(self, ids: np.ndarray) -> bytes | None:
        """Return the text of tokens [N]; None if the tokens do not determine the text."""
        return None

    @abstractmethod
    def decoder(self, after: str = "") -> Decoder:
        """Return a decoder for tokens that follow the text `after`."""

    @abstractmethod
    def to_json(self) -> JsonObject:
        """Return the whole vocabulary as plain JSON values."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids."""
        decoder = self.decoder()
        return "".join([decoder.push(int(token)) for token in ids]) + decoder.flush()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.to_json() == other.to_json()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def from_json(values: JsonObject, remedy: str = "") -> Vocabulary:
        """Build a vocabulary from the result of `to_json`; `remedy` tells what to do if the values are damaged."""
        try:
            if values["format"] not in _FORMATS:
                raise UserError(
                    f"vocabulary of format {values['format']!r}; this version reads formats 1 to {_FORMATS[-1]}"
                )
            normalise, lower = values.get("normalise", False), values.get("lower", False)
            if values["kind"] == "byte":
                return ByteVocabulary(values.get("values"))
            if values["kind"] == "char":
                return CharVocabulary(
                    values["characters"],
                    unknown=values.get("unknown", True),
                    unk_id=values.get("unk_id", 0),
                    lower=lower,
                    normalise=normalise,
                )
            if values["kind"] == "word":
                return WordVocabulary(
                    values["words"],
                    eos=values.get("eos", EOS),
                    unk=values.get("unk", UNK),
                    boundary=values.get("boundary"),
                    rule=values.get("rule", "whitespace"),
                    lower=lower,
                    normalise=normalise,
                )
            if values["kind"] == "bpe":
                return BpeVocabulary(_read_tokenizer(values["tokenizer"]), normalise=normalise)
        except UserError:
            raise
        except Exception:  # the tokenizers library raises plain Exceptions
            raise UserError("not a vocabulary" + (f"; {remedy}" if remedy else "")) from None
        raise UserError(f"vocabulary of kind {values['kind']!r}; expected byte, char, word or bpe")

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

    @staticmethod
    def load(path: Path, remedy: str = "") -> Vocabulary:
        """Read a vocabulary that `save` wrote; `remedy` tells what to do if it is damaged."""
        try:
            values = read_json(path, remedy)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; expected a vocabulary") from None
        try:
            vocabulary = Vocabulary.from_json(values, remedy)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        if (seen := values.get("seen")) is not None:
            if not isinstance(seen, list) or not all(
                type(each) is int and 0 <= each <= sys.maxunicode for each in seen
            ):
                raise UserError(f"{path}: seen is not a list of code points{f'; {remedy}' if remedy else ''}")
            vocabulary.seen = frozenset(seen)
        return vocabulary


class ByteVocabulary(Vocabulary):
    """Vocabulary of all 256 bytes, which can read every file, or only of the bytes that a benchmark counts.

    Args:
        values: bytes in the order of their ids; None: all 256, each with its value as id.
    """

    kind = "byte"

    def __init__(self, values: Sequence[int] | None = None):
        self.values = list(range(256)) if values is None else [int(value) for value in values]
        if len(set(self.values)) != len(self.values) or not all(0 <= value < 256 for value in self.values):
            raise UserError("a byte vocabulary holds a byte twice, or something that is not a byte")
        self.is_complete = self.values == list(range(256))
        self._table = np.full(256, -1, dtype=np.int64)
        self._table[self.values] = np.arange(len(self.values))

    def __len__(self) -> int:
        return len(self.values)

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of the text's UTF-8 form (see `utf8`).

        Raises:
            UserError: if the vocabulary has fewer than 256 bytes and lacks bytes of the text, which the message names.
        """
        return self.encode_bytes(utf8(text))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Return one token id per byte: int64 [N]."""
        values = np.frombuffer(data, dtype=np.uint8)
        ids = self._table[values]
        if not self.is_complete and (ids < 0).any():
            lacking = np.unique(values[ids < 0]).tolist()
            named = ", ".join(f"0x{value:02X}" for value in lacking[:8]) + (" and more" if len(lacking) > 8 else "")
            raise UserError(f"the text has bytes that the vocabulary of {len(self)} lacks: {named}; leave them out")
        return ids

    def spelled_bytes(self, ids: np.ndarray) -> int:
        """Return the number of tokens, each of which is one byte."""
        return len(ids)

    def spell(self, ids: np.ndarray) -> bytes:
        """See `Vocabulary.spell`."""
        return np.array(self.values, dtype=np.uint8)[ids].tobytes()

    def decoder(self, after: str = "") -> Decoder:
        """Return a UTF-8 decoder that replaces invalid bytes by U+FFFD."""
        return BytesDecoder([bytes([value]) for value in self.values])

    def to_json(self) -> JsonObject:
        """Return the kind, and the bytes unless they are all 256."""
        return self._as_json(**({} if self.is_complete else {"values": self.values}))


class CharVocabulary(Vocabulary):
    """Vocabulary of characters and `<unk>`; a benchmark's closed alphabet has no `<unk>`.

    Args:
        characters: characters in the order of their ids, without `<unk>`.
        unknown: True for a vocabulary with `<unk>`.
        unk_id: id of `<unk>`, if there is one.
        lower: value of `Vocabulary.lower`.
        normalise: value of `Vocabulary.normalise`.
    """

    kind = "char"

    def __init__(
        self,
        characters: Iterable[str],
        *,
        unknown: bool = True,
        unk_id: int = 0,
        lower: bool = False,
        normalise: bool = False,
    ):
        self.characters = list(characters)
        self.lower, self.normalise = lower, normalise
        if not all(isinstance(each, str) and len(each) == 1 for each in self.characters):
            raise UserError("a character vocabulary holds something that is not one character")
        _check_symbols(self.characters, "character")
        self.symbols = list(self.characters)
        """Characters and `<unk>` in the order of their ids."""
        if unknown:
            if type(unk_id) is not int or not 0 <= unk_id <= len(self.characters):
                raise UserError(f"a character vocabulary's unk_id is {unk_id!r}; expected the id of <unk>")
            self.unk_id = unk_id
            self.symbols.insert(unk_id, UNK)
        missing = unk_id if unknown else -1
        ids = {ord(each): number for number, each in enumerate(self.symbols) if number != self.unk_id}
        if lower:
            ids |= {capital: ids.get(small, missing) for capital, small in _small_letters().items()}
        # The last entry of the table serves all higher code points.
        self._table = np.full(max(ids, default=0) + 2, missing, dtype=np.int64)
        self._table[list(ids)] = list(ids.values())

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, text: str) -> np.ndarray:
        """Return one token id per character, `<unk>` for characters that the vocabulary lacks: int64 [N].

        Raises:
            UserError: if a vocabulary without `<unk>` lacks characters of the text, which the message names.
        """
        return self.encode_text(self.read(text))

    def encode_text(self, text: str) -> np.ndarray:
        """Return the token ids of a block of text that is already normalised if required: int64 [N]."""
        ids = self._lookup(text)
        if self.unk_id is None and (ids < 0).any():
            characters = sorted({text[place] for place in np.flatnonzero(ids < 0)})
            raise UserError(f"the text has characters that the vocabulary lacks: {named(characters)}; leave them out")
        return ids

    def lacking(self, text: str) -> list[str]:
        """Return the characters of a text that the vocabulary lacks."""
        text = self.read(text)
        return list(dict.fromkeys(text[place] for place in np.flatnonzero(self._lookup(text) == self.unk_id)))

    def _lookup(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        return self._table[np.minimum(codes, len(self._table) - 1)]

    def spelled_bytes(self, ids: np.ndarray) -> int | None:
        """Return the length of the characters in UTF-8 bytes; None if a character or its case is unknown."""
        if self.lower or (self.unk_id is not None and (ids == self.unk_id).any()):
            return None
        lengths = np.array([len(each.encode("utf-8")) for each in self.symbols], dtype=np.int64)
        return int(lengths[ids].sum())

    def spell(self, ids: np.ndarray) -> bytes | None:
        """Return the text in UTF-8; None if a character or its case is unknown."""
        if self.lower or (self.unk_id is not None and (ids == self.unk_id).any()):
            return None
        return utf8("".join([self.symbols[token] for token in ids.tolist()]))

    def decoder(self, after: str = "") -> Decoder:
        """Return a decoder of tokens that are one character each."""
        return SymbolDecoder(self.symbols)

    def to_json(self) -> JsonObject:
        """Return the characters in the order of their ids."""
        values: JsonObject = {"characters": self.characters}
        if self.unk_id != 0:
            values |= {"unknown": False} if self.unk_id is None else {"unk_id": self.unk_id}
        return self._as_json(**values)


class _WordIds(dict[str, int]):
    """Ids of words, and the id of `<unk>` for all others (runs in C; a `get` method would take twice the time)."""

    unknown = -1

    def __missing__(self, word: str) -> int:
        return self.unknown


class WordVocabulary(Vocabulary):
    """Vocabulary of words (see `txl.data.words`), with `<eos>` for line ends and `<unk>` for all other words.

    Args:
        words: words in the order of their ids.
        eos: word that stands for the end of a line; None: line ends are white space like any other.
        unk: word that stands for all words that the vocabulary lacks; None: a text with such words is refused.
        boundary: boundaries in a corpus of separate sentences, one per line, each with `eos` (`<S>`) at both ends.
            "end": one `eos` between two sentences, so that the beginning of a sentence is given and its end is
            predicted; "both": two, so that the beginning of the next sentence is predicted too. None: running text,
            `eos` after each line.
        rule: rule for cutting a text into words.
        lower: value of `Vocabulary.lower`.
        normalise: value of `Vocabulary.normalise`.
    """

    kind = "word"
    border = _WORD_BORDER

    def __init__(
        self,
        words: Sequence[str],
        *,
        eos: str | None = EOS,
        unk: str | None = UNK,
        boundary: str | None = None,
        rule: WordRule = "whitespace",
        lower: bool = False,
        normalise: bool = False,
    ):
        self.words = list(words)
        self.rule: WordRule = rule
        self.lower, self.normalise = lower, normalise
        _check_symbols(self.words, "word")
        self.ids = _WordIds(zip(self.words, range(len(self.words)), strict=True))
        for symbol in (eos, unk):
            if symbol is not None and symbol not in self.ids:
                raise UserError(f"a word vocabulary needs {symbol}")
        if boundary not in (None, "end", "both") or (boundary is not None and eos is None):
            raise UserError(f"a word vocabulary's boundary is {boundary!r}; expected end or both, and a word for it")
        if rule not in get_args(WordRule):
            raise UserError(f"a word vocabulary's rule is {rule!r}; expected one of {', '.join(get_args(WordRule))}")
        if rule == "punctuation" and (eos, unk) != (EOS, UNK):
            raise UserError(f"a word vocabulary of the rule punctuation has {EOS} and {UNK}, not {eos} and {unk}")
        self.eos, self.unk, self.boundary = eos, unk, boundary
        self.eos_id = None if eos is None else self.ids[eos]
        if unk is not None:
            self.unk_id = self.ids.unknown = self.ids[unk]

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> np.ndarray:
        """Return one token id per word and line end (`<eos>`), with the boundaries of separate sentences: int64 [N].

        Raises:
            UserError: if a vocabulary without `<unk>` lacks words of the text, which the message names.
        """
        parts = [self.encode_words(self.cut(part)) for part in self._parts(self.read(text))]
        ids = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        if self.boundary is None:
            return ids
        if self.boundary == "both":
            ids = np.repeat(ids, np.where(ids == self.eos_id, 2, 1))
        return np.concatenate([np.array([self.eos_id], dtype=np.int64), ids])

    def cut(self, text: str) -> list[str]:
        """Return the words of a text, in lower case if `lower` is True, with `eos` for each line end."""
        return words_and_ends(text.lower() if self.lower else text, self.eos, self.rule)

    def lacking(self, text: str) -> list[str]:
        """Return the words of a text that the vocabulary lacks, without the joiners of marks."""
        if self.unk_id is None:
            return []
        words = dict.fromkeys(word for word in self.cut(self.read(text)) if word not in self.ids)
        return [unjoined(word)[1] if self.rule == "punctuation" else word for word in words]

    def encode_words(self, words: list[str]) -> np.ndarray:
        """Return the id of each word: int64 [N]; `encode` states the error."""
        ids = np.fromiter(map(self.ids.__getitem__, words), dtype=np.int64, count=len(words))
        if self.unk_id is None and (ids < 0).any():
            lacking = dict.fromkeys(words[place] for place in np.flatnonzero(ids < 0))
            raise UserError(f"the text has words that the vocabulary lacks: {named(lacking)}; leave them out")
        return ids

    def decoder(self, after: str = "") -> Decoder:
        """Return a decoder that joins words by spaces, and marks by their joiners; `<eos>` becomes a line end."""
        return WordDecoder(self.words, self.eos, after, self.rule)

    def to_json(self) -> JsonObject:
        """Return the words in the order of their ids."""
        values: JsonObject = {"words": self.words}
        if (self.eos, self.unk, self.boundary) != (EOS, UNK, None):
            values |= {"eos": self.eos, "unk": self.unk, "boundary": self.boundary}
        if self.rule != "whitespace":
            values |= {"rule": self.rule}
        return self._as_json(**values)


class BpeVocabulary(Vocabulary):
    """Vocabulary of byte-level byte-pair encoding by the `tokenizers` library: lossless, without `<unk>`."""

    kind = "bpe"

    def __init__(self, tokenizer: Tokenizer, *, normalise: bool = False):
        self.tokenizer, self.normalise = tokenizer, normalise
        byte_of = {symbol: value for value, symbol in enumerate(byte_symbols())}
        ids = tokenizer.get_vocab()
        if sorted(ids.values()) != list(range(len(ids))):
            raise UserError("a bpe vocabulary whose ids are not 0, 1, 2 ... without gaps")
        self.pieces = [bytes(byte_of[symbol] for symbol in token) for token in sorted(ids, key=ids.__getitem__)]
        self._lengths = np.array([len(piece) for piece in self.pieces], dtype=np.int64)
        # In this form, as `train` makes it, white space begins a new piece, or continues white space.
        cut = tokenizer.pre_tokenizer
        is_usual = isinstance(cut, pre_tokenizers.ByteLevel) and cut.use_regex and not cut.add_prefix_space
        if is_usual and tokenizer.normalizer is None and not tokenizer.get_added_tokens_decoder():
            self.border = _BPE_BORDER

    @staticmethod
    def train(texts: Iterable[str], vocab_size: int, *, normalise: bool = False) -> BpeVocabulary:
        """Learn a vocabulary of at most `vocab_size` tokens: the 256 bytes and the most useful merges."""
        if vocab_size < 257:
            raise UserError(f"data.vocab_size is {vocab_size}; expected 257 or more (256 bytes and merges of them)")
        tokenizer = byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
            special_tokens=[],
        )
        tokenizer.train_from_iterator(map(_without_long_pieces, texts), trainer)
        return BpeVocabulary(tokenizer, normalise=normalise)

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text: int64 [N]; each byte that is not UTF-8 (see `utf8`) is a separate token."""
        found = [np.empty(0, dtype=np.int64)]
        text = utf8(self.read(text)).decode("utf-8", errors="surrogateescape")
        for whole in [text] if is_utf8(text) else re.split("([\udc80-\udcff])", text):
            if "\udc80" <= whole <= "\udcff":
                found.append(np.array([self.pieces.index(utf8(whole))]))
                continue
            for part in self._parts(whole):
                if len(part) < _LONG:
                    ids = self.tokenizer.encode(part).ids
                else:  # `encode` would keep all other threads waiting
                    ids = self.tokenizer.encode_batch_fast([part])[0].ids
                found.append(np.fromiter(ids, np.int64, len(ids)))
        return np.concatenate(found)

    def encode_block(self, text: str) -> np.ndarray:
        """Return the token ids of a block of a corpus: uint32 [N]. Chunks keep the encoding of long blocks fast."""
        chunks = [text[start : start + BPE_CHUNK] for start in range(0, len(text), BPE_CHUNK)]
        encoded = self.tokenizer.encode_batch_fast(chunks)
        return np.concatenate([np.array(one.ids, dtype=np.uint32) for one in encoded] or [np.empty(0, np.uint32)])

    def n_bytes(self, ids: np.ndarray) -> np.ndarray:
        """Return the length in bytes of the text of each token: int64 [N]."""
        return self._lengths[ids]

    def spelled_bytes(self, ids: np.ndarray) -> int:
        """Return the sum of `n_bytes`."""
        return int(self.n_bytes(ids).sum())

    def spell(self, ids: np.ndarray) -> bytes:
        """See `Vocabulary.spell`."""
        return b"".join([self.pieces[token] for token in ids.tolist()])

    def decoder(self, after: str = "") -> Decoder:
        """Return a UTF-8 decoder for characters that may be spread over tokens."""
        return BytesDecoder(self.pieces)

    def to_json(self) -> JsonObject:
        """Return the tokenizer in the JSON form of the `tokenizers` library."""
        return self._as_json(tokenizer=json.loads(self.tokenizer.to_str()))


def byte_level(model: models.BPE) -> Tokenizer:
    """Return a byte-level BPE tokenizer with the tokens and merges of `model`."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _read_tokenizer(values: JsonObject) -> Tokenizer:
    """Return a tokenizer from its JSON form, after checking that its tokens and merges are all that is its own.

    Anything else, such as a huge padding, could change the ids or end the process.
    """
    if values["model"].get("continuing_subword_prefix"):  # the library may panic at it
        raise UserError("a bpe vocabulary's tokenizer has a model that is not plain byte-level BPE")
    tokenizer = Tokenizer.from_str(json.dumps(values))
    stated, plain = (json.loads(each.to_str()) for each in (tokenizer, byte_level(models.BPE())))
    plain["model"] |= {name: stated["model"].get(name) for name in ("vocab", "merges")}
    for name in plain | stated:
        if stated.get(name) != plain.get(name):
            raise UserError(f"a bpe vocabulary's tokenizer has a {name} that is not plain byte-level BPE")
    return tokenizer


def _check_symbols(symbols: list[str], kind: str) -> None:
    """Refuse the symbols of a vocabulary if one occurs twice or cannot be written in UTF-8."""
    if len(set(symbols)) != len(symbols):
        raise UserError(f"a {kind} vocabulary holds a {kind} twice")
    try:
        "".join(symbols).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"a {kind} vocabulary holds {error.object[error.start]!r}, which UTF-8 cannot write") from None


@functools.cache
def _small_letters() -> dict[int, int]:
    """Return the code point of the small letter for that of each capital that has a single one."""
    letters = ((code, chr(code).lower()) for code in range(sys.maxunicode + 1))
    return {code: ord(small) for code, small in letters if len(small) == 1 and ord(small) != code}


def _without_long_pieces(text: str) -> list[str]:
    """Cut a text within its pieces of more than `BPE_LONGEST` characters, and nowhere else."""
    bounds = [0]
    for place in range(BPE_LONGEST, len(text), BPE_LONGEST):  # a longer piece spans one of these places
        if _RUN.fullmatch(text, place - 1, place + 1):
            after = _RUN.match(text, place, place + BPE_LONGEST)
            before = _RUN.match(text[place - BPE_LONGEST : place][::-1])
            if after is not None and before is not None and len(after[0]) + len(before[0]) > BPE_LONGEST:
                bounds.append(place)
    return [text[start:end] for start, end in pairwise([*bounds, len(text)])]


def line_end_id(vocabulary: Vocabulary) -> int | None:
    """Return the id of the token that ends a line, after which a text without context begins; None: there is none."""
    if vocabulary.kind == "word" or vocabulary.eos_id is not None:
        return vocabulary.eos_id
    try:
        (token,) = vocabulary.encode("\n").tolist()
    except UserError:
        return None
    return None if token == vocabulary.unk_id else token


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
        code = ord(text[error.start])
        raise UserError(
            f"the text has half a surrogate pair (U+{code:04X} at character {error.start}), which is no character; "
            f"leave it out"
        ) from None


def byte_symbols() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte: the byte's own, or the next free one
    from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    symbols, free = [], 0x100
    for value in range(256):
        if value in printable:
            symbols.append(chr(value))
        else:
            symbols.append(chr(free))
            free += 1
    return symbols
