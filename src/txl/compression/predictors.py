"""Probabilities of the next token for parallel lanes of text, by fixed weights or by weights that learn.

Encoder and decoder call the same methods in the same order with the same numbers, so that their probabilities are equal
to the last bit. The encoder therefore reads token by token like the decoder, not the whole text at once.

Shapes: B lanes, T tokens of a segment, V tokens of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from txl.config import Lengths
from txl.generation.engine import DecodeEngine
from txl.models.language_model import LanguageModel, State
from txl.models.transformer_xl import TransformerXL


class Predictor(ABC):
    """Source of the probabilities for coding symbols. Every lane reads one token per step."""

    any_threads = False  # probabilities do not depend on the number of threads; else the predictor runs with one

    @abstractmethod
    def predict(self) -> Tensor:
        """Return log-probabilities of each lane's next token, [B,V], given all tokens that the lane has read."""

    @abstractmethod
    def read(self, tokens: Tensor, whole: bool) -> None:
        """Read the next token of every lane, int64 [B]; `whole` is true if all these tokens belong to the text."""

    @abstractmethod
    def end_block(self) -> None:
        """End a block: the first lane of the next block continues the text of this block's last lane."""


class EnginePredictor(Predictor):
    """A Transformer-XL with fixed weights, computed by the decode engine."""

    def __init__(self, model: TransformerXL, lanes: int, start: int, lengths: Lengths):
        self._engine = DecodeEngine(model, max_streams=lanes, **lengths.options())
        self._streams = [self._engine.join([start]) for _ in range(lanes)]
        # The compiled step adds in a fixed order; a mixture of softmaxes is computed by PyTorch, which does not.
        self.any_threads = self._engine.compiled and model.mixture is None

    def predict(self) -> Tensor:
        """Take a step of the engine."""
        return self._engine.advance(self._streams)

    def read(self, tokens: Tensor, whole: bool) -> None:
        """Give the streams their next tokens."""
        self._engine.put_all(self._streams, tokens)

    def end_block(self) -> None:
        """Move the last stream to the front."""
        self._streams.insert(0, self._streams.pop())


class ModelPredictor(Predictor):
    """Any language model in evaluation mode, computed by PyTorch; one without memory reads its context at each token.

    After every `segment` tokens of each lane, `learn` may change the weights, given tokens and targets of the segment,
    int64 [B,T], and the state before it; None: fixed weights. `start` is the token before the text.
    """

    def __init__(
        self,
        model: LanguageModel,
        lanes: int,
        start: int,
        lengths: Lengths,
        segment: int = 0,
        learn: Callable[[Tensor, Tensor, State], object] | None = None,
    ):
        self.model, self._segment, self._learn = model, segment, learn
        self._state = self._before = model.init_state(lanes, **lengths.options())  # now, and before the segment
        self._last = torch.full((lanes,), start)
        self._tokens: list[Tensor] = []  # tokens of the segment read so far
        self._window: list[Tensor] = []  # context of a model without memory

    def predict(self) -> Tensor:
        """Let the model read the last token; a model without memory also the tokens before."""
        self._tokens.append(self._last)
        # Without oneDNN, whose LSTM packs the weights in every call, which takes longer than reading one token.
        flags: Any = torch.backends.mkldnn
        before, flags.enabled = flags.enabled, False
        try:
            with torch.no_grad():
                if self.model.context is None:
                    log_probs, self._state = self.model.log_probs(self._last[:, None], self._state)
                else:
                    self._window = [*self._window, self._last][-self.model.context :]
                    log_probs, _ = self.model.log_probs(torch.stack(self._window, dim=1), self._state)
        finally:
            flags.enabled = before
        return log_probs[:, -1]

    def read(self, tokens: Tensor, whole: bool) -> None:
        """Read a token of every lane, and learn at the end of a segment or of the last whole column."""
        self._last = tokens
        if self._learn is None:
            self._tokens.clear()
        elif not whole:
            self._update(len(self._tokens) - 1, tokens)
        elif len(self._tokens) == self._segment:
            self._update(self._segment, tokens)

    def end_block(self) -> None:
        """Learn from the rest of the block, and move the state of every lane to the next lane."""
        if self._learn is not None:
            self._update(len(self._tokens), self._last)
        order = torch.arange(len(self._last)).roll(1)
        self._last, self._state = self._last[order], self._state.select(order)
        self._before = self._state
        self._window = [tokens[order] for tokens in self._window]

    def _update(self, length: int, following: Tensor) -> None:
        """Learn from the first `length` tokens of the segment; `following` is the token after those read so far."""
        if length > 0:
            assert self._learn is not None
            read = torch.stack([*self._tokens, following], dim=1)
            self._learn(read[:, :length], read[:, 1 : length + 1], self._before)
        self._tokens.clear()
        self._before = self._state
        if self.model.context is not None:
            self._window.clear()
