"""Decoders from token ids to text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from txl.config import WordRule
from txl.data.words import unjoined


class Decoder(Protocol):
    """Protocol of decoders, which turn token ids into text one token at a time."""

    def push(self, token: int) -> str:
        """Return the text that one more token completes (may be empty)."""
        ...

    def flush(self) -> str:
        """Return the text that is still incomplete after the last token."""
        ...


class BytesDecoder:
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


class WordDecoder:
    """Decoder that joins words after the text `after` by spaces, except at joiners; the word `eos` is a line end."""

    def __init__(self, words: Sequence[str], eos: str | None, after: str, rule: WordRule = "whitespace"):
        self._words, self._eos, self._rule = words, eos, rule
        self._space = "" if not after or after[-1].isspace() else " "

    def push(self, token: int) -> str:
        """Return the token's word, preceded by a space if there is one."""
        word = self._words[token]
        if word == self._eos:
            self._space = ""
            return "\n"
        joins_before, word, joins_after = unjoined(word) if self._rule == "punctuation" else (False, word, False)
        text = word if joins_before else self._space + word
        self._space = "" if joins_after else " "
        return text

    def flush(self) -> str:
        """Return nothing: every token is complete."""
        return ""
