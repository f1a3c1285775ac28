"""Measurement of how far back a token's attention reached, averaged over all layers and heads.

Shapes: T queries of a segment, S keys, H heads, C distances.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from txl.analysis.observation import AttentionInputs, observed
from txl.files import JsonObject
from txl.generation.engine import DecodeEngine, Stream
from txl.models.structure import evaluation_view

_MOST = 0.9  # share of the attention that `reach` covers


class AttentionWatch:
    """A view of an engine's model that records attention weights, for streams that request `attention`.

    The results of the engine's model do not change. The cost is one more computation of a segment's attention scores,
    in PyTorch, layer by layer.
    """

    def __init__(self, engine: DecodeEngine):
        self._engine = engine
        self.view = evaluation_view(engine.model)  # reads segments like the engine's model
        self._sum: Tensor | None = None
        self._stack = ExitStack()  # kept open, since closing the stack ends the recording
        self._stack.enter_context(observed(self.view, self._saw))

    def _saw(self, layer: int, inputs: AttentionInputs) -> None:
        weights = inputs.weights().float().mean(dim=0)  # [T,S]
        self._sum = weights if layer == 0 or self._sum is None else self._sum + weights

    def take(self) -> list[JsonObject]:
        """Return the attention summaries of the segment read last, one for each query."""
        assert self._sum is not None
        weights, self._sum = self._sum / self.view.config.n_layer, None
        n_query, n_key = weights.shape
        # A query's own key is at distance 0; for the last query, this is the last key.
        distance = torch.arange(n_key, device=weights.device)
        key = n_key - n_query + torch.arange(n_query, device=weights.device)[:, None] - distance
        by_distance = weights.gather(1, key.clamp(min=0)).masked_fill(key < 0, 0.0)
        return [summary(row) for row in by_distance]

    def of_next(self, stream: Stream) -> JsonObject:
        """Return the attention summary for the prediction that a stream's next step makes."""
        state = self._engine.save(stream)
        with torch.inference_mode():
            waiting = torch.tensor([[state.waiting]], device=self.view.softmax.bias.device)
            self.view.hidden_states(waiting, self._engine.memory_of(state, self.view))
        return self.take()[0]


def summary(by_distance: Tensor) -> JsonObject:
    """Return the attention summary of one query, from attention weights by distance [C], which sum to 1.

    `mean`: mean distance in tokens; `reach`: distance within which nine tenths of the attention lie; `histogram`: share
    of the attention at distance 0, at 1, at 2 and 3, at 4 to 7, and so on.
    """
    sums = by_distance.double().cumsum(0)
    total = float(sums[-1])
    mean = float((by_distance.double() * torch.arange(len(by_distance), device=by_distance.device)).sum())
    edges = [0, 1]
    while edges[-1] < len(by_distance):
        edges.append(2 * edges[-1])
    ends = [float(sums[min(edge, len(by_distance)) - 1]) for edge in edges[1:]]
    parts = [end - start for start, end in zip([0.0, *ends[:-1]], ends, strict=True)]
    return {
        "mean": round(mean / total, 2),
        "reach": int((sums < _MOST * total).sum()),
        "histogram": [round(part / total, 4) for part in parts],
    }
