"""Vocabularies: between text and token ids, for every unit, and back piece by piece.

Each is saved as plain JSON. Ids are int64 arrays in memory.
"""

from __future__ import annotations

import codecs
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from txl.errors import UserError

UNK = "<unk>"
EOS = "<eos>"
_FORMAT = 1


class Decoder(Protocol):
    """Turns token ids into text as they come."""

    def push(self, token: int) -> str:
        """The text that is complete after one more token (may be empty)."""
        ...

    def flush(self) -> str:
        """What was still incomplete, at the end of the text."""
        ...


class Vocabulary(ABC):
    """The tokens of a model, numbered from 0."""

    kind: ClassVar[str]
    unk_id: int | None = None
    """What stands for everything the vocabulary lacks, if anything does."""
    eos_id: int | None = None
    """The end of a line, if lines have one."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text: int64 [N].

        Raises:
            UserError: for a character vocabulary, naming the characters it lacks.
        """

    @abstractmethod
    def decoder(self, after: str = "") -> Decoder:
        """A decoder for tokens that follow the text `after`."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""
        decoder = self.decoder()
        return "".join([decoder.push(int(token)) for token in ids]) + decoder.flush()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.to_json() == other.to_json()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def from_json(values: Any) -> Vocabulary:
        """The inverse of `to_json`.

        Raises:
            UserError: if it is no vocabulary, or one of a future version.
        """
        try:
            if values["format"] != _FORMAT:
                raise UserError(f"vocabulary of format {values['format']!r}; this version reads format {_FORMAT}")
            if values["kind"] == "byte":
                return ByteVocabulary()
            if values["kind"] == "char":
                return CharVocabulary(values["characters"])
            if values["kind"] == "word":
                return WordVocabulary(values["words"])
            if values["kind"] == "bpe":
                return BpeVocabulary(Tokenizer.from_str(json.dumps(values["tokenizer"])))
        except UserError:
            raise
        except Exception as error:  # the tokenizers library raises plain Exceptions
            raise UserError(f"not a vocabulary: {type(error).__name__}: {error}") from None
        raise UserError(f"vocabulary of kind {values['kind']!r}; expected byte, char, word or bpe")

    def save(self, path: Path) -> None:
        """Write it as JSON; the file is whole or not there."""
        temporary = path.with_name(path.name + ".partial")
        temporary.write_text(json.dumps(self.to_json(), ensure_ascii=False), encoding="utf-8")
        os.replace(temporary, path)

    @staticmethod
    def load(path: Path) -> Vocabulary:
        """Read what `save` wrote.

        Raises:
            UserError: if the file is missing or no vocabulary.
        """
        try:
            return Vocabulary.from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; expected a vocabulary") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UserError(f"{path}: not JSON ({error})") from None
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


class _BytesDecoder:
    """UTF-8 from byte strings; a character that is spread over tokens appears with its last byte."""

    def __init__(self, pieces: Sequence[bytes]):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteVocabulary(Vocabulary):
    """All 256 bytes; every file can be read."""

    kind = "byte"

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> np.ndarray:
        """The bytes of the text's UTF-8 form (undecodable bytes of a command line come back as they were)."""
        return np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8).astype(np.int64)

    def decoder(self, after: str = "") -> Decoder:
        """UTF-8, with U+FFFD for what is none."""
        return _BytesDecoder([bytes([value]) for value in range(256)])

    def to_json(self) -> dict[str, Any]:
        """Nothing but its kind."""
        return {"format": _FORMAT, "kind": self.kind}


class _SymbolDecoder:
    def __init__(self, symbols: Sequence[str]):
        self._symbols = symbols

    def push(self, token: int) -> str:
        return self._symbols[token]

    def flush(self) -> str:
        return ""


class CharVocabulary(Vocabulary):
    """The characters of the training text in code-point order, after one `<unk>` for all others (id 0)."""

    kind = "char"
    unk_id = 0

    def __init__(self, characters: Iterable[str]):
        self.characters = sorted(characters)
        if not all(isinstance(each, str) and len(each) == 1 for each in self.characters):
            raise UserError("a character vocabulary holds something that is not one character")
        codes = np.array([ord(each) for each in self.characters], dtype=np.int64)
        self._table = np.zeros(0x110000 if len(codes) == 0 else int(codes.max()) + 2, dtype=np.uint32)
        self._table[codes] = np.arange(1, len(codes) + 1)

    def __len__(self) -> int:
        return len(self.characters) + 1

    def encode(self, text: str) -> np.ndarray:
        """One id a character.

        Raises:
            UserError: naming the characters that the vocabulary lacks.
        """
        ids = self.encode_text(text)
        if (ids == 0).any():
            lacking = sorted({text[place] for place in np.flatnonzero(ids == 0)})
            named = ", ".join(f"{each!r} (U+{ord(each):04X})" for each in lacking[:8])
            more = f" and {len(lacking) - 8} more" if len(lacking) > 8 else ""
            raise UserError(f"the text has characters that the vocabulary lacks: {named}{more}; leave them out")
        return ids

    def encode_text(self, text: str) -> np.ndarray:
        """One id a character, `<unk>` for what the vocabulary lacks."""
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        # The table's last entry is 0 and serves all code points beyond it.
        return self._table[np.minimum(codes, len(self._table) - 1)].astype(np.int64)

    def decoder(self, after: str = "") -> Decoder:
        """One character a token."""
        return _SymbolDecoder([UNK, *self.characters])

    def to_json(self) -> dict[str, Any]:
        """The characters."""
        return {"format": _FORMAT, "kind": self.kind, "characters": self.characters}


class _WordDecoder:
    def __init__(self, words: Sequence[str], after: str):
        self._words = words
        self._space = "" if not after or after[-1].isspace() else " "

    def push(self, token: int) -> str:
        word = self._words[token]
        if word == EOS:
            self._space = ""
            return "\n"
        text = self._space + word
        self._space = " "
        return text

    def flush(self) -> str:
        return ""


class WordVocabulary(Vocabulary):
    """Words between white space, `<eos>` for the end of a line, `<unk>` for every other word."""

    kind = "word"

    def __init__(self, words: Sequence[str]):
        self.words = list(words)
        self.ids = {word: number for number, word in enumerate(self.words)}
        if len(self.ids) != len(self.words):
            raise UserError("a word vocabulary holds a word twice")
        for symbol in (EOS, UNK):
            if symbol not in self.ids:
                raise UserError(f"a word vocabulary needs {symbol}")
        self.eos_id, self.unk_id = self.ids[EOS], self.ids[UNK]

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> np.ndarray:
        """One id a word, and `<eos>` where the text has a line's end."""
        unk = self.unk_id
        return np.array([self.ids.get(word, unk) for word in words_and_ends(text)], dtype=np.int64)

    def decoder(self, after: str = "") -> Decoder:
        """Words joined by spaces; `<eos>` is a line's end."""
        return _WordDecoder(self.words, after)

    def to_json(self) -> dict[str, Any]:
        """The words in the order of their ids."""
        return {"format": _FORMAT, "kind": self.kind, "words": self.words}


def words_and_ends(text: str) -> list[str]:
    """The words of a text, with `<eos>` for each line's end."""
    return text.replace("\n", f" {EOS} ").split()


class BpeVocabulary(Vocabulary):
    """Byte-level byte-pair encoding by the `tokenizers` library: lossless, nothing is unknown."""

    kind = "bpe"

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        byte_of = {symbol: value for value, symbol in enumerate(_byte_symbols())}
        ids = tokenizer.get_vocab()
        if sorted(ids.values()) != list(range(len(ids))):
            raise UserError("a bpe vocabulary whose ids are not 0, 1, 2 ... without gaps")
        self._pieces = [bytes(byte_of[symbol] for symbol in token) for token in sorted(ids, key=ids.__getitem__)]

    @staticmethod
    def train(texts: Iterable[str], vocab_size: int) -> BpeVocabulary:
        """A vocabulary of (at most) `vocab_size` tokens: the 256 bytes and the most useful merges.

        Raises:
            UserError: if there is no room for merges.
        """
        if vocab_size < 257:
            raise UserError(f"data.vocab_size is {vocab_size}; expected 257 or more (256 bytes and merges of them)")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
            special_tokens=[],
        )
        tokenizer.train_from_iterator(texts, trainer)
        return BpeVocabulary(tokenizer)

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, text: str) -> np.ndarray:
        """Token ids."""
        return np.array(self.tokenizer.encode(text).ids, dtype=np.int64)

    def decoder(self, after: str = "") -> Decoder:
        """UTF-8 across tokens."""
        return _BytesDecoder(self._pieces)

    def to_json(self) -> dict[str, Any]:
        """The tokenizer, as the library writes it."""
        return {"format": _FORMAT, "kind": self.kind, "tokenizer": json.loads(self.tokenizer.to_str())}


def _byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: its own, or the next free one from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    symbols, free = [], 0x100
    for value in range(256):
        if value in printable:
            symbols.append(chr(value))
        else:
            symbols.append(chr(free))
            free += 1
    return symbols
