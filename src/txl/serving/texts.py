"""Conversion between the texts of requests and token ids, and text forms of single tokens."""

from __future__ import annotations

import codecs
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl.data.located import located_tokens
from txl.data.pieces import BLOCK, Piece
from txl.data.vocabulary import Decoder, Vocabulary
from txl.errors import UserError
from txl.files import JsonObject
from txl.generation.sampling import checked_tokens
from txl.generation.text import undrawable

# Characters without a border for words: they are cut into tokens at once, which can keep other requests waiting.
_WHOLE = {"word": 1 << 16, "bpe": 1 << 18}
TAIL = 4  # last tokens from which a decoder can continue a text: no UTF-8 character has more bytes


class Texts:
    """A vocabulary, with the conversions that requests need."""

    def __init__(self, vocabulary: Vocabulary, name: str):
        self.vocabulary, self.name = vocabulary, name
        self.forbidden = undrawable(vocabulary)

    def encode(self, text: str) -> Tensor:
        """Return the token ids of a text, int64 [n] (UserError if the vocabulary cannot encode it)."""
        return torch.as_tensor(self.vocabulary.encode(text), dtype=torch.int64) if text else torch.zeros(0).long()

    def refuse_long(self, text: str, most: int) -> None:
        """Refuse a text (UserError) that surely has more than `most` tokens, or takes long to encode."""
        kind, border = self.vocabulary.kind, self.vocabulary.border
        most_whole = _WHOLE.get(kind, most)
        for start in range(0, len(text) - most_whole, most_whole):
            if border is not None and not border.search(text, start, start + most_whole):
                raise UserError(f"{most_whole:,} characters of the text are one word, or all white space; cut it")
        if kind != "word" and (least := len(self.vocabulary.read(text)) // self.vocabulary.longest) > most:
            raise UserError(f"the text has {least:,} tokens or more; at most {most:,} are read")

    def checked(self, ids: Sequence[int], what: str) -> Tensor:
        """Return token ids of a request as int64 [n] (UserError for none, or one outside of the vocabulary)."""
        try:
            values = np.fromiter(ids, np.int64, len(ids))  # a tenth of the time that PyTorch takes
        except OverflowError:
            values = np.array([-1])
        return checked_tokens(torch.from_numpy(values), len(self.vocabulary), what)

    def shown(self, data: bytes) -> str:
        """Return bytes as text; bytes that are not whole characters in the form of the OpenAI API: `bytes:\\xe2`."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in data)

    def decoder_after(self, ids: Sequence[int]) -> Decoder:
        """Return a decoder for the tokens after `ids`; the decoder completes a character that `ids` left incomplete."""
        decoder = self.vocabulary.decoder()
        for token in ids[-TAIL:]:
            decoder.push(int(token))
        return decoder

    def located(self, text: str, ids: Tensor) -> list[tuple[bytes, int]]:
        """Return each token's part of a text, and the index of the character at which the part begins.

        If the tokens do not spell the text, each token begins at the end of the token before it.
        """
        data = text.encode("utf-8", errors="surrogateescape")
        blocks, piece = io.BytesIO(data), Piece(Path(self.name))
        try:
            tokens = list(located_tokens(piece, iter(lambda: blocks.read(BLOCK), b""), self.vocabulary))
        except UserError:
            tokens = []
        tokens = tokens[: ids.numel()]  # `located_tokens` ends a file's last line; that of a prompt stays open
        if [token.id for token in tokens] != ids.tolist():
            return self.placed(ids.tolist())[1]
        # Index of the character that has each byte: a token may begin inside of one.
        begins = np.frombuffer(data, np.uint8) & 0xC0 != 0x80
        character = np.append(begins.cumsum() - 1, begins.sum())
        return [(token.text, int(character[token.start])) for token in tokens]

    def placed(self, ids: Sequence[int]) -> tuple[str, list[tuple[bytes, int]]]:
        """Return the complete characters of the tokens' text, and each token's bytes and place as in `located`."""
        decoder, parts, pieces, at = self.vocabulary.decoder(), [], [], 0
        for token in ids:
            pieces.append(decoder.push(token))
            parts.append(self.place(token, pieces[-1], at))
            at += len(pieces[-1])
        return "".join(pieces), parts

    def place(self, token: int, piece: str, at: int) -> tuple[bytes, int]:
        """Return a token's own bytes and the character index where they begin; its decoded `piece` begins at `at`."""
        data = self.vocabulary.bytes_of(token)
        if data and data[0] & 0xC0 == 0x80:  # the token begins inside a character
            return data, at
        # A piece may begin with a space, or with U+FFFD for a broken character, before the token's own characters.
        own = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)
        return data, at + max(0, len(piece) - len(own))

    def describe(self) -> JsonObject:
        """Return the JSON object of `/tokenizer_info`.

        `bos_token` is the end of a line (`<eos>` or the line feed), after which a text without context begins.
        `eos_token` is `<eos>` only, because clients add this token to their stop strings.
        """
        end = None if self.vocabulary.eos_id is None else self.vocabulary.eos
        return {
            "tokenizer_class": f"txl.{type(self.vocabulary).__name__}",
            "kind": self.vocabulary.kind,
            "vocab_size": len(self.vocabulary),
            "bos_token": "\n" if end is None and self.vocabulary.line_end_id() is not None else end,
            "eos_token": end,
            "pad_token": end,
            "unk_token": None if self.vocabulary.unk_id is None else "<unk>",
            "chat_template": None,
        }
