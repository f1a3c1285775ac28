"""Probabilities of the next token for lanes of text side by side: by fixed weights, or weights that learn.

Encoder and decoder call the same methods in the same order with the same numbers, so they get the same probabilities to
the last bit: never the whole text at once on one side and token by token on the other.

Shapes: B lanes, T tokens of a segment, V tokens of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from txl.config import Lengths
from txl.generation.engine import DecodeEngine, decodes
from txl.models.language_model import LanguageModel, State
from txl.models.transformer_xl import TransformerXL

Learn = Callable[[Tensor, Tensor, State], object]
"""Updates weights by a segment that has been coded: tokens and targets int64 [B,T], and the state before it."""


class Predictor(ABC):
    """Source of the probabilities that symbols are coded by. Every lane reads one token a step."""

    any_threads = False
    """True if its numbers are the same with any number of threads; otherwise it runs with one."""

    @abstractmethod
    def predict(self) -> Tensor:
        """Return log-probabilities of each lane's next token, [B,V], given all that it has read."""

    @abstractmethod
    def read(self, tokens: Tensor, whole: bool) -> None:
        """Read the next token of every lane, int64 [B]; `whole`: all of them are tokens of the text."""

    @abstractmethod
    def end_block(self) -> None:
        """End a block. Its lanes follow one another in the text: the next block's first goes on from the last."""


class EnginePredictor(Predictor):
    """A Transformer-XL with fixed weights, through the decode engine."""

    def __init__(self, model: TransformerXL, lanes: int, start: int, lengths: Lengths):
        self._engine = DecodeEngine(model, max_streams=lanes, **lengths.options())
        self._streams = [self._engine.join([start]) for _ in range(lanes)]
        # The compiled step's sums have one order; a mixture of softmaxes is PyTorch's.
        self.any_threads = self._engine.compiled and model.mixture is None

    def predict(self) -> Tensor:
        """Predict as `Predictor.predict`."""
        return self._engine.advance(self._streams)

    def read(self, tokens: Tensor, whole: bool) -> None:
        """Read as `Predictor.read`."""
        self._engine.put_all(self._streams, tokens)

    def end_block(self) -> None:
        """End a block as `Predictor.end_block`."""
        self._streams.insert(0, self._streams.pop())


class ModelPredictor(Predictor):
    """Any language model as PyTorch computes it; with `learn`, its weights follow the text segment by segment.

    A model without memory reads its longest context anew for every token.

    Args:
        model: in evaluation mode.
        lanes: lanes B.
        start: the token before the text.
        lengths: memory length, window and clamp.
        segment: tokens T of each lane after which `learn` is called.
        learn: changes the weights; None: they are fixed.
    """

    def __init__(
        self,
        model: LanguageModel,
        lanes: int,
        start: int,
        lengths: Lengths,
        segment: int = 0,
        learn: Learn | None = None,
    ):
        self.model, self._segment, self._learn = model, segment, learn
        self._state = model.init_state(lanes, **lengths.options())
        self._before = self._state  # where the segment began
        self._last = torch.full((lanes,), start)
        self._tokens: list[Tensor] = []  # the segment's, as they were read
        self._window: list[Tensor] = []  # all that a model without memory reads

    def predict(self) -> Tensor:
        """Predict as `Predictor.predict`."""
        self._tokens.append(self._last)
        with torch.no_grad(), _without_onednn():
            if self.model.context is None:
                log_probs, self._state = self.model.log_probs(self._last[:, None], self._state)
            else:
                self._window = [*self._window, self._last][-self.model.context :]
                log_probs, _ = self.model.log_probs(torch.stack(self._window, dim=1), self._state)
        return log_probs[:, -1]

    def read(self, tokens: Tensor, whole: bool) -> None:
        """Read as `Predictor.read`."""
        self._last = tokens
        if self._learn is None:
            self._tokens.clear()
        elif not whole:
            self._update(len(self._tokens) - 1, tokens)
        elif len(self._tokens) == self._segment:
            self._update(self._segment, tokens)

    def end_block(self) -> None:
        """End a block as `Predictor.end_block`."""
        if self._learn is not None:
            self._update(len(self._tokens), self._last)
        lanes = len(self._last)
        order = torch.arange(-1, lanes - 1) % lanes
        self._last, self._state = self._last[order], self._state.select(order)
        self._before = self._state
        self._window = [each[order] for each in self._window]

    def _update(self, length: int, following: Tensor) -> None:
        """Learn from the first `length` tokens that the segment has read; `following` came after its last."""
        if length > 0:
            assert self._learn is not None
            read = torch.stack([*self._tokens, following], dim=1)
            self._learn(read[:, :length], read[:, 1 : length + 1], self._before)
        self._tokens.clear()
        self._before = self._state
        if self.model.context is not None:
            self._window.clear()


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Switch oneDNN off: its LSTM packs the weights anew at every call, which takes longer than reading one token."""
    flags: Any = torch.backends.mkldnn
    before, flags.enabled = flags.enabled, False
    try:
        yield
    finally:
        flags.enabled = before


def fixed_predictor(model: LanguageModel, lanes: int, start: int, lengths: Lengths) -> Predictor:
    """Return a model with fixed weights, in the fastest way there is."""
    if decodes(model):
        return EnginePredictor(model, lanes, start, lengths)
    return ModelPredictor(model, lanes, start, lengths)
