"""Vocabularies of bytes and of characters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np

from txl.data.pieces import Blocks, Piece, escaped
from txl.data.vocabulary import Vocabulary, check_symbols, utf8
from txl.data.words import UNK
from txl.errors import UserError, named
from txl.files import JsonObject


class ByteVocabulary(Vocabulary):
    """Vocabulary of all 256 bytes, which can read every file, or only of `values` in the order of their ids."""

    kind = "byte"
    reads_all = True

    def __init__(self, values: Sequence[int] | None = None):
        self.values = list(range(256)) if values is None else [int(value) for value in values]
        if len(set(self.values)) != len(self.values) or not all(0 <= value < 256 for value in self.values):
            raise UserError("a byte vocabulary holds a byte twice, or something that is not a byte")
        self.pieces = [bytes([value]) for value in self.values]
        self.is_text = self.values == list(range(256))
        self._table = np.full(256, -1, dtype=np.int64)
        self._table[self.values] = np.arange(len(self.values))

    def __len__(self) -> int:
        return len(self.values)

    def encode_block(self, text: str) -> np.ndarray:
        """Return the bytes of the text's UTF-8 form (see `utf8`).

        Raises:
            UserError: if the vocabulary has fewer than 256 bytes and lacks bytes of the text, which the message names.
        """
        values = np.frombuffer(utf8(text), dtype=np.uint8)
        ids = self._table[values]
        if not self.is_text and (ids < 0).any():
            lacking = ", ".join(f"0x{value:02X}" for value in np.unique(values[ids < 0])[:8])
            raise UserError(f"the text has bytes that the vocabulary of {len(self)} lacks: {lacking}; leave them out")
        return ids

    def texts(self, piece: Piece, blocks: Iterable[bytes]) -> Blocks:
        """See `Vocabulary.texts`; bytes that are not UTF-8 become surrogates."""
        return escaped(blocks)

    def to_json(self) -> JsonObject:
        """Return the kind, and the bytes unless they are all 256."""
        return self._as_json(**({} if self.is_text else {"values": self.values}))


class CharVocabulary(Vocabulary):
    """Vocabulary of characters, in the order of their ids, and `<unk>`; not so (`unknown`) a benchmark's alphabet."""

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
        if not all(isinstance(character, str) and len(character) == 1 for character in self.characters):
            raise UserError("a character vocabulary holds something that is not one character")
        check_symbols(self.characters, "character")
        self.symbols = list(self.characters)  # and `<unk>`, in the order of their ids
        if unknown:
            if type(unk_id) is not int or not 0 <= unk_id <= len(self.characters):
                raise UserError(f"a character vocabulary's unk_id is {unk_id!r}; expected the id of <unk>")
            self.unk_id = unk_id
            self.symbols.insert(unk_id, UNK)
        self.pieces = [symbol.encode() for symbol in self.symbols]
        missing = unk_id if unknown else -1
        ids = {ord(symbol): number for number, symbol in enumerate(self.symbols) if number != self.unk_id}
        if lower:
            letters = ((code, chr(code).lower()) for code in range(sys.maxunicode + 1))
            ids |= {
                code: ids.get(ord(small), missing) for code, small in letters if small != chr(code) and small[1:] == ""
            }
        # The last entry of the table serves all higher code points.
        self._table = np.full(max(ids, default=0) + 2, missing, dtype=np.int64)
        self._table[list(ids)] = list(ids.values())

    def __len__(self) -> int:
        return len(self.symbols)

    def encode_block(self, text: str) -> np.ndarray:
        """Return one token id per character; see `Vocabulary.encode_block`."""
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        ids = self._table[np.minimum(codes, len(self._table) - 1)]
        if self.unk_id is None and (ids < 0).any():
            characters = sorted({text[place] for place in np.flatnonzero(ids < 0)})
            raise UserError(f"the text has characters that the vocabulary lacks: {named(characters)}; leave them out")
        return ids

    def places(self, text: str, ids: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Vocabulary.places`: each token is one character."""
        return edges[:-1], edges[1:]

    def knows(self, symbol: str) -> bool:
        """See `Vocabulary.knows`."""
        return not self.lacking(symbol)

    def lacking(self, text: str) -> list[str]:
        """Return the characters of a text that the vocabulary lacks."""
        text = self.read(text)
        unknown = [] if self.unk_id is None else np.flatnonzero(self.encode_block(text) == self.unk_id)
        return list(dict.fromkeys(text[place] for place in unknown))

    def to_json(self) -> JsonObject:
        """Return the characters in the order of their ids."""
        values: JsonObject = {"characters": self.characters}
        if self.unk_id != 0:
            values |= {"unknown": False} if self.unk_id is None else {"unk_id": self.unk_id}
        return self._as_json(**values)
