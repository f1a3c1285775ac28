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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import IO
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
from txl.files import JsonObject
from txl.models.language_model import LanguageModel, State
from txl.models.structure import evaluation_view

_logger = logging.getLogger(__name__)
_LN2 = math.log(2)
_LONGEST_PATH = 4096  # characters of a text that may be the path of a file instead
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
# Columns of the table that `txl score` writes.
COLUMNS = (
    "index", "start", "end", "word", "token", "unknown", "surprisal", "word_surprisal", "memory", "context",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenSurprisal:
    """A token of a text and its surprisal."""

    index: int
    """Number of the token, from 0."""
    start: int
    """Byte offset in the text at which the token begins."""
    end: int
    """Byte offset after the token's last byte; equal to `start` for a mark that is not part of the text."""
    word: int | None
    """Number of the token's word (see `txl.data.located`); None: the token belongs to no word."""
    text: bytes
    """Bytes of the text that the token covers."""
    unknown: bool
    """True: the vocabulary lacks the token, and the surprisal is that of `<unk>`."""
    surprisal: float | None
    """Surprisal in bits; None for a token with nothing before it (the first one, if there is no prompt)."""
    word_surprisal: float | None
    """Surprisal of the whole word in bits, at its last token; None elsewhere, and if any of its tokens has none."""
    memory: int
    """Number of memory positions, carried over from earlier segments, that the prediction sees directly."""
    context: int
    """Number of tokens that the prediction sees directly, in memory and in the token's own segment."""


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
        model: any language model; it is evaluated without dropout, and may be trained at the same time.
        vocabulary: vocabulary of the model.
        text: text as a string; or path of a file (.gz, .bz2, .xz and .zst are decompressed); or binary file opened for
            reading. The text is encoded like a corpus; characters and words that the vocabulary lacks become `<unk>`.
        segment: number of tokens T in one step; None: 128, or the model's longest segment if that is shorter. A model
            without memory sees only the segment.
        mem_len: number of memory positions; None: the model's configuration.
        window: number of keys that a query attends to. None: `mem_len` if given ("none" if that is 0), otherwise the
            model's configuration. "none": all keys in memory and segment.
        clamp_len: largest distance that the model tells apart; None: the model's configuration; "none": no clamp.
        sliding: number of tokens from which each token is predicted, recomputed for each token without memory, as in
            `txl.evaluate_sliding`; `segment`, `mem_len` and `window` are then ignored.
        prompt: text that is read before `text` and not scored, so that the first token of `text` has a context.
        temperature: softmax temperature X: probabilities are proportional to p^(1/X).
        dtype: "float32", or "bfloat16" for autocast.
        normalise: True: skip a byte order mark and read \\r\\n as one line end (never applied to byte vocabularies).
            None: as the vocabulary's training text was read.
    """
    if segment is None:
        segment = min(128, model.context or 128)
    name, length = ("segment", segment) if sliding is None else ("sliding", sliding)
    if length < 1:
        raise UserError(field=name, value=length, expected="1 token or more")
    if model.context is not None and length > model.context:
        most = f"at most {model.context}, the most tokens that this model reads at once (model.max_segment)"
        raise UserError(field=name, value=length, expected=most)
    if prompt and vocabulary.boundary is not None:
        raise UserError(
            "this vocabulary marks the beginning of every sentence, the first too", remedy="leave the prompt out"
        )
    if sliding is None:
        settings = Settings(segment, mem_len, window, clamp_len, 1, dtype=dtype, temperature=temperature)
    else:
        settings = Settings(sliding, 0, "none", clamp_len, WINDOWS, dtype=dtype, temperature=temperature)
    before = (
        [LocatedToken(int(token), -1, -1, None, False, b"") for token in vocabulary.encode(prompt)] if prompt else []
    )
    tokens = chain(before, _not_empty(_located(text, vocabulary, normalise)))
    view = evaluation_view(model)
    state = settings.init_state(view, 1)
    read = _read if sliding is None else _slide
    return _with_words(_rows(read(view, tokens, state, settings), vocabulary))


def _located(text: str | Path | IO[bytes], vocabulary: Vocabulary, normalise: bool | None) -> Iterator[LocatedToken]:
    if isinstance(text, Path):
        return located_tokens(Piece(text), _checked(text, Piece(text).blocks()), vocabulary, normalise)
    if isinstance(text, str) and len(text) <= _LONGEST_PATH and os.path.isfile(text):
        _logger.warning("note: the text is %r itself; to score the file of this name, give a pathlib.Path", text)
    file = io.BytesIO(utf8(text)) if isinstance(text, str) else text
    path = Path("the text" if isinstance(text, str) else str(getattr(file, "name", "the text")))
    blocks = _checked(path, iter(lambda: file.read(BLOCK), b""))
    return located_tokens(Piece(path), blocks, vocabulary, normalise)


def _checked(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the blocks of a text; refuse a first block of a format that is no text."""
    for number, block in enumerate(blocks):
        if number == 0:
            refuse_format(path, block)
        yield block


def _not_empty(tokens: Iterator[LocatedToken]) -> Iterator[LocatedToken]:
    first = next(tokens, None)
    if first is None:
        raise UserError("the text is empty", expected="some text")
    yield first
    yield from tokens


@dataclass(frozen=True)
class _Scored:
    """A token, its loss in nats, and the numbers of memory positions and of all tokens that its prediction saw."""

    token: LocatedToken
    nll: float | None
    memory: int
    context: int


# Gradients are disabled segment by segment, not around the loops: the caller's code runs between two rows.


def _read(view: LanguageModel, tokens: Iterator[LocatedToken], state: State, settings: Settings) -> Iterator[_Scored]:
    """Score tokens as `txl.evaluate` does with one lane."""
    device, step = next(view.parameters()).device, nll_step(view, settings.temperature)
    last = next(tokens)
    yield _Scored(last, None, 0, 0)
    n_read = 0
    while targets := list(islice(tokens, settings.segment)):
        seen = _seen(state, len(targets), n_read)
        ids = torch.tensor([[last.id, *(token.id for token in targets)]])
        check_ids(ids, view.vocab_size)
        ids = ids.to(device)
        with without_gradients(device, settings.dtype):
            nll, state = step(ids[:, :-1], ids[:, 1:], state, torch.ones_like(ids[:, 1:], dtype=torch.bool))
        for token, loss, (memory, context) in zip(targets, nll[0].double().tolist(), seen, strict=True):
            yield _Scored(token, loss, memory, context)
        last, n_read = targets[-1], n_read + len(targets)


def _slide(view: LanguageModel, tokens: Iterator[LocatedToken], empty: State, settings: Settings) -> Iterator[_Scored]:
    """Score tokens as `txl.evaluate_sliding` does: the first `context` targets have fewer tokens before them."""
    device, context = next(view.parameters()).device, settings.segment
    first = next(tokens)
    yield _Scored(first, None, 0, 0)
    # The first `context` targets share one window, the beginning of the text.
    ids, n_most = [first.id], context
    while targets := list(islice(tokens, n_most)):
        ids = ids[-context:] + [token.id for token in targets]
        check_ids(torch.tensor(ids), view.vocab_size)
        places = np.arange(len(ids) - len(targets), len(ids))
        with without_gradients(device, settings.dtype):
            windows = window_losses(view, np.array(ids, dtype=np.int64), places, [context], settings, empty)
            losses = torch.cat([losses for _, losses, _ in windows]).tolist()
        for token, loss, place in zip(targets, losses, places.tolist(), strict=True):
            yield _Scored(token, loss, 0, min(place, context))
        # Some batches at a time, so that memory does not grow with the text.
        n_most = 4 * WINDOWS


def _seen(state: State, n_token: int, n_read: int) -> list[tuple[int, int]]:
    """Return the numbers of memory positions and of all tokens that each prediction of the next segment sees."""
    if state.length is None:  # a recurrent state has no positions: it may hold something of every token
        return [(0, n_read + place + 1) for place in range(n_token)]
    # A window includes the query's own key; what is left of it lies in the segment and then in memory.
    window = math.inf if state.lengths.window is None else state.lengths.window
    keys = [int(min(window, state.length + place + 1)) for place in range(n_token)]
    return [(max(0, count - place - 1), count) for place, count in enumerate(keys)]


def _rows(scored: Iterable[_Scored], vocabulary: Vocabulary) -> Iterator[tuple[TokenSurprisal, bool]]:
    """Yield rows without word sums, each with True if the token holds more than white space."""
    of_text = (item for item in scored if item.token.start >= 0)  # not those of the prompt
    for index, item in enumerate(of_text):
        token, nll = item.token, item.nll
        if nll is not None and not math.isfinite(nll):
            raise UserError(
                f"the loss of token {index} is {nll}, not a finite number: the model's weights are damaged",
                remedy="use another checkpoint",
            )
        unknown = vocabulary.unk_id is not None and token.id == vocabulary.unk_id
        # The first token has nothing before it, so that no probability is defined.
        bits = None if nll is None else nll / _LN2
        row = TokenSurprisal(
            index, token.start, token.end, token.word, token.text, unknown, bits, None, item.memory, item.context
        )
        yield row, token.is_text


def _with_words(rows: Iterable[tuple[TokenSurprisal, bool]]) -> Iterator[TokenSurprisal]:
    """Yield rows, with the surprisal of each word added at the word's last token."""
    for word, members in groupby(rows, key=lambda pair: pair[0].word):
        # One row is held back, so that a word, which may be a whole text, is never in memory at once.
        last: TokenSurprisal | None = None
        total: float | None = 0.0
        has_text = False
        for row, is_text in members:
            if last is not None:
                yield last
            last = row
            # White space before a word counts to the word: byte-level BPE cannot tell them apart.
            total = None if total is None or row.surprisal is None else total + row.surprisal
            has_text |= is_text and word is not None
        assert last is not None
        yield replace(last, word_surprisal=total if has_text else None)


@dataclass
class TextTotals:
    """Counts over the tokens of a scored text."""

    tokens: int = 0
    scored: int = 0
    """Number of tokens that have a surprisal."""
    bits: float = 0.0
    """Sum of the surprisals in bits."""
    unknown: int = 0
    line_ends: int = 0
    """Number of \\r\\n inside a token, which were each read as one line end."""
    returns: int = 0
    """Number of \\r that are tokens of their own and unknown."""
    first_unknown: bool = False
    """True if the first token is unknown."""

    def add(self, row: TokenSurprisal) -> None:
        """Count one more token."""
        self.tokens += 1
        if row.surprisal is not None:
            self.bits, self.scored = self.bits + row.surprisal, self.scored + 1
        self.unknown += row.unknown
        self.line_ends += row.text.count(b"\r\n")
        self.returns += row.unknown and row.text == b"\r"
        self.first_unknown |= row.unknown and row.index == 0


def line_end_note(total: TextTotals, has_mark: bool, normalise: bool, kind: str) -> str | None:
    """Return a note on the treatment of a text's byte order mark and \\r\\n; None if it makes no difference.

    Args:
        total: counts over the whole text.
        has_mark: True if the text begins with a byte order mark.
        normalise: True if the byte order mark was skipped and \\r\\n was read as one line end.
        kind: kind of the vocabulary.
    """
    if normalise:
        told = normalised_note("the text", int(has_mark), total.line_ends)
        return None if told is None else f"{told} (normalise false reads it as it is)"
    has_mark = has_mark and (kind == "bpe" or total.first_unknown)
    if kind == "byte" or not (has_mark or total.returns):
        return None
    parts = ["a byte order mark"] * has_mark
    parts += [f"{total.returns:,} \\r that the vocabulary lacks"] * (total.returns > 0)
    return f"the text has {' and '.join(parts)}; normalise true reads it without"


def tsv_line(row: TokenSurprisal) -> str:
    """Return a row of the table as a line of tab-separated values, in the order of `COLUMNS`."""
    values = (
        str(row.index), str(row.start), str(row.end), "" if row.word is None else str(row.word), escaped(row.text),
        str(int(row.unknown)), _number(row.surprisal), _number(row.word_surprisal), str(row.memory), str(row.context),
    )  # fmt: skip
    return "\t".join(values) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.12g}"  # so that sums over long texts agree to six decimals


def json_line(row: TokenSurprisal) -> str:
    """Return a row of the table as one line of JSON, an object with `COLUMNS` as keys."""
    values: JsonObject = {name: getattr(row, name) for name in COLUMNS if name != "token"}
    for name in ("surprisal", "word_surprisal"):
        values[name] = None if values[name] is None else float(_number(values[name]))
    values["token"] = escaped(row.text)
    return json.dumps({name: values[name] for name in COLUMNS}, ensure_ascii=False) + "\n"


def escaped(text: bytes) -> str:
    """Return the bytes of a token as text without line breaks, from which the bytes can be recovered.

    Backslash, tab, line feed and carriage return become \\\\, \\t, \\n, \\r. Bytes that form no whole character become
    \\xNN. Other control, format and private characters, and line separators, become \\uNNNN or \\UNNNNNNNN.
    """
    if text.isalnum():
        return text.decode()  # ASCII, the usual case
    return "".join(map(_shown, text.decode("utf-8", errors="surrogateescape")))


def _shown(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if character in _ESCAPES:
        return _ESCAPES[character]
    if category(character)[0] == "C" or category(character) in ("Zl", "Zp"):
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character
