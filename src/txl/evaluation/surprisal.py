"""Surprisal of every token of a text: -log2 of its probability given the tokens before it.

The text is one lane, read segment by segment with memory as in `txl.evaluate`; the surprisals therefore add up to the
total loss of that evaluation in bits. Only one block of the text and one segment are held at a time, so a text can have
any length.

Shapes: T tokens of a segment.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import IO, Any
from unicodedata import category

import numpy as np
import torch

from txl.config import Limit
from txl.data.formats import refuse_format
from txl.data.lacking import normalised_note
from txl.data.located import LocatedToken, located_tokens
from txl.data.pieces import BLOCK, Piece
from txl.data.vocabulary import Vocabulary, utf8
from txl.errors import UserError
from txl.evaluation.sliding import WINDOWS, window_losses
from txl.evaluation.stream import Settings, check_ids, nll_step, without_gradients
from txl.models.language_model import LanguageModel, State
from txl.models.structure import evaluation_view

_logger = logging.getLogger(__name__)
_LONGEST_PATH = 4096  # characters of a text that may be the path of a file instead
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
# Columns of the table that `txl score` writes.
COLUMNS = (
    "index", "start", "end", "word", "token", "unknown", "surprisal", "word_surprisal", "memory", "context",
)  # fmt: skip
# A token, its loss in nats, and the numbers of memory positions and of all tokens that its prediction saw.
_Scored = tuple[LocatedToken, float | None, int, int]


@dataclass(frozen=True, slots=True)
class TokenSurprisal:
    """A token of a text and its surprisal."""

    index: int  #: number of the token, from 0
    start: int  #: byte offset in the text at which the token begins
    end: int  #: byte offset after the token's last byte; `start` for a mark that is not part of the text
    word: int | None  #: number of the token's word (see `txl.data.located`); None: the token belongs to no word
    text: bytes  #: bytes of the text that the token covers
    unknown: bool  #: True: the vocabulary lacks the token, and the surprisal is that of `<unk>`
    surprisal: float | None  #: in bits; None if nothing is before the token (the first one, if there is no prompt)
    word_surprisal: float | None
    """Surprisal of the whole word in bits, at its last token; None elsewhere, and if any of its tokens has none."""
    memory: int  #: number of memory positions, carried over from earlier segments, that the prediction sees directly
    context: int  #: number of tokens that the prediction sees directly, in memory and in the token's own segment


def surprisals(
    model: LanguageModel,
    vocabulary: Vocabulary,
    text: str | Path | IO[bytes],
    *,
    segment: int | None = None,
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
    sliding: int | None = None,
    prompt: str = "",
    temperature: float = 1.0,
    dtype: str = "float32",
    normalise: bool | None = None,
) -> Iterator[TokenSurprisal]:
    """Yield the surprisal of each token of a text, in order.

    Unset lengths default to the model's configuration, as in `txl.evaluate`.

    Args:
        model, mem_len, window, clamp_len, temperature, dtype: as for `txl.evaluate`.
        vocabulary: vocabulary of the model.
        text: text as a string; or path of a file (.gz, .bz2, .xz and .zst are decompressed); or binary file opened for
            reading. The text is encoded like a corpus; characters and words that the vocabulary lacks become `<unk>`.
        segment: number of tokens T in one step; None: 128, or the model's longest segment if that is shorter. A model
            without memory sees only the segment.
        sliding: number of tokens from which each token is predicted, recomputed for each token without memory, as in
            `txl.evaluate_sliding`; `segment`, `mem_len` and `window` are then ignored.
        prompt: text that is read before `text` and not scored, so that the first token of `text` has a context.
        normalise: True: skip a byte order mark and read \\r\\n as one line end (never applied to byte vocabularies).
            None: as the vocabulary's training text was read.
    """
    if segment is None:
        segment = min(128, model.context or 128)
    name, length = ("segment", segment) if sliding is None else ("sliding", sliding)
    if length < 1 or (model.context is not None and length > model.context):
        most = "" if model.context is None else f", at most {model.context} (model.max_segment)"
        raise UserError(field=name, value=length, expected=f"1 token or more{most}")
    if prompt and vocabulary.boundary is not None:
        raise UserError("this vocabulary marks the beginning of every sentence", remedy="leave the prompt out")
    settings = Settings(segment, mem_len, window, clamp_len, 1, dtype=dtype, temperature=temperature)
    if sliding is not None:
        settings = Settings(sliding, 0, "none", clamp_len, WINDOWS, dtype=dtype, temperature=temperature)
    before = vocabulary.encode(prompt) if prompt else ()
    tokens = (LocatedToken(int(token), -1, -1, None, False, b"") for token in before)
    view = evaluation_view(model)
    tokens, state = chain(tokens, _located(text, vocabulary, normalise)), settings.init_state(view, 1)
    return _rows(_scored(view, tokens, state, settings, sliding is not None), vocabulary)


def _located(text: str | Path | IO[bytes], vocabulary: Vocabulary, normalise: bool | None) -> Iterator[LocatedToken]:
    if isinstance(text, str) and len(text) <= _LONGEST_PATH and os.path.isfile(text):
        _logger.warning("note: the text is %r itself; to score the file of this name, give a pathlib.Path", text)
    file = io.BytesIO(utf8(text)) if isinstance(text, str) else text
    piece = Piece(file if isinstance(file, Path) else Path(str(getattr(file, "name", "the text"))))
    blocks = piece.blocks() if isinstance(file, Path) else iter(lambda: file.read(BLOCK), b"")
    head = next(blocks, b"")
    refuse_format(piece.path, head)
    tokens = located_tokens(piece, chain([head], blocks) if head else (), vocabulary, normalise)
    first = next(tokens, None)
    if first is None:
        raise UserError("the text is empty")
    yield first
    yield from tokens


def _scored(
    view: LanguageModel, tokens: Iterator[LocatedToken], state: State, settings: Settings, slides: bool
) -> Iterator[_Scored]:
    """Score tokens as `txl.evaluate` does with one lane, or `txl.evaluate_sliding` with windows of `segment` tokens."""
    device, step = next(view.parameters()).device, nll_step(view, settings.temperature)
    first = next(tokens)
    yield first, None, 0, 0
    # If the window slides, the first targets share one window, the beginning of the text.
    ids, n_read, n_most = [first.id], 0, settings.segment
    while targets := list(islice(tokens, n_most)):
        ids = ids[-settings.segment if slides else -1 :] + [token.id for token in targets]
        check_ids(torch.tensor(ids), view.vocab_size)
        place = len(ids) - len(targets)
        # Gradients are disabled segment by segment, not around the loop: the caller's code runs between two rows.
        with without_gradients(device, settings.dtype):
            if slides:
                chosen = np.arange(place, len(ids))
                windows = window_losses(
                    view, np.array(ids, dtype=np.int64), chosen, [settings.segment], settings, state
                )
                losses = torch.cat([losses for _, losses, _ in windows]).tolist()
                seen = [(0, min(at, settings.segment)) for at in chosen.tolist()]
                n_most = 4 * WINDOWS  # some batches at a time, so that memory does not grow with the text
            else:
                # A recurrent state may hold something of every token.
                seen = [(0, n_read + at) for at in range(1, len(targets) + 1)]
                if state.length is not None:
                    # A window includes the query's own key; what is left of it lies in the segment and then in memory.
                    window = state.lengths.window or math.inf
                    keys = [int(min(window, state.length + at)) for at in range(1, len(targets) + 1)]
                    seen = [(max(0, count - at), count) for at, count in enumerate(keys, start=1)]
                both = torch.tensor([ids], device=device)
                nll, state = step(both[:, :-1], both[:, 1:], state, torch.ones_like(both[:, 1:], dtype=torch.bool))
                losses = nll[0].double().tolist()
        for token, loss, (memory, context) in zip(targets, losses, seen, strict=True):
            yield token, loss, memory, context
        n_read += len(targets)


def _rows(scored: Iterator[_Scored], vocabulary: Vocabulary) -> Iterator[TokenSurprisal]:
    """Yield the rows of a text without its prompt, with the surprisal of each word at the word's last token."""
    index, of_text = 0, (item for item in scored if item[0].start >= 0)
    for word, members in groupby(of_text, key=lambda item: item[0].word):
        # One row is held back, so that a word, which may be a whole text, is never in memory at once.
        last: TokenSurprisal | None = None
        total: float | None = 0.0
        has_text = False
        for token, nll, memory, context in members:
            if last is not None:
                yield last
            if nll is not None and not math.isfinite(nll):
                problem = f"the loss of token {index} is {nll}: the model's weights are damaged"
                raise UserError(problem, remedy="use another checkpoint")
            bits = None if nll is None else nll / math.log(2)
            unknown = vocabulary.unk_id is not None and token.id == vocabulary.unk_id
            last = TokenSurprisal(index, token.start, token.end, word, token.text, unknown, bits, None, memory, context)
            # White space before a word counts to the word: byte-level BPE cannot tell them apart.
            total = None if total is None or bits is None else total + bits
            has_text |= token.is_text and word is not None
            index += 1
        assert last is not None
        yield replace(last, word_surprisal=total if has_text else None)


@dataclass
class TextTotals:
    """Counts over the tokens of a scored text."""

    tokens: int = 0
    scored: int = 0  # tokens that have a surprisal
    bits: float = 0.0  # sum of the surprisals
    unknown: int = 0
    line_ends: int = 0  # \r\n inside a token, which were each read as one line end

    def add(self, row: TokenSurprisal) -> None:
        """Count one more token."""
        self.tokens += 1
        if row.surprisal is not None:
            self.bits, self.scored = self.bits + row.surprisal, self.scored + 1
        self.unknown += row.unknown
        self.line_ends += row.text.count(b"\r\n")


def line_end_note(total: TextTotals, has_mark: bool, normalise: bool) -> str | None:
    """Return a note on a text's byte order mark and \\r\\n that were not read as they are; None without any."""
    told = normalised_note("the text", int(has_mark), total.line_ends) if normalise else None
    return None if told is None else f"{told} (normalise false reads it as it is)"


def _cells(row: TokenSurprisal) -> dict[str, Any]:
    cells = {name: escaped(row.text) if name == "token" else getattr(row, name) for name in COLUMNS}
    for name in ("surprisal", "word_surprisal"):
        if cells[name] is not None:
            cells[name] = float(f"{cells[name]:.12g}")  # so that sums over long texts agree to six decimals
    return cells


def tsv_line(row: TokenSurprisal) -> str:
    """Return a row of the table as a line of tab-separated values, in the order of `COLUMNS`."""
    shown = []
    for cell in _cells(row).values():
        number = f"{cell:.12g}" if isinstance(cell, float | bool) else str(cell)
        shown.append("" if cell is None else number)
    return "\t".join(shown) + "\n"


def json_line(row: TokenSurprisal) -> str:
    """Return a row of the table as one line of JSON, an object with `COLUMNS` as keys."""
    return json.dumps(_cells(row), ensure_ascii=False) + "\n"


def escaped(text: bytes) -> str:
    """Return the bytes of a token as text without line breaks, from which the bytes can be recovered.

    Backslash, tab, line feed and carriage return become \\\\, \\t, \\n, \\r. Bytes that form no whole character become
    \\xNN. Other control, format and private characters, and line separators, become \\uNNNN or \\UNNNNNNNN.
    """
    if text.isalnum():
        return text.decode()  # ASCII, the usual case
    shown = ""
    for character in text.decode("utf-8", errors="surrogateescape"):
        code, kind = ord(character), category(character)
        if 0xDC80 <= code <= 0xDCFF:
            shown += f"\\x{code - 0xDC00:02x}"
        elif character not in _ESCAPES and (kind[0] == "C" or kind in ("Zl", "Zp")):
            shown += f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
        else:
            shown += _ESCAPES.get(character, character)
    return shown
