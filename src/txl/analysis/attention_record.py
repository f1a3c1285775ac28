"""What was found about a model's attention, as plain JSON values: what the figures, the page and the report show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from txl.analysis.attention import AttentionAverages, Close, mean_distance, share_beyond
from txl.data.vocabulary import Vocabulary

FORMAT = 2
TOP = 0.2
"""Share of the tokens in reach that are marked in the text: "top 20%" in the paper."""


def attention_record(
    found: AttentionAverages,
    *,
    far: int,
    heads: Sequence[tuple[int, int]],
    tokens: Any,
    vocabulary: Vocabulary,
    described: dict[str, Any],
) -> dict[str, Any]:
    """Everything as JSON values; layers and heads are numbered from 1.

    Args:
        found: the averages.
        far: distance from which on `share_beyond` counts.
        heads: (layer, head), from 0, whose attention at the chosen positions is kept.
        tokens: the stream that was read.
        vocabulary: the model's.
        described: corpus, split, unit, checkpoint.
    """
    distance, beyond = mean_distance(found.weights), share_beyond(found.weights, far)
    n_head = found.weights.shape[1]
    rows = [
        {
            "layer": layer + 1,
            "head": head + 1,
            "number": layer * n_head + head,
            "mean_distance": _short(distance[row, head]),
            "share_beyond": _short(beyond[row, head]),
            "effective_keys": _short(found.effective_keys[row, head]),
            "average": _shortened(found.weights[row, head]),
        }
        for row, layer in enumerate(found.layers)
        for head in range(n_head)
    ]
    settings = {**described, **found.settings, "queries": found.queries, "min_keys": found.min_keys, "far": far}
    return {
        "format": FORMAT,
        "settings": settings,
        "heads": rows,
        "even": {
            "mean_distance": _short(float(mean_distance(found.even))),
            "share_beyond": _short(float(share_beyond(found.even, far))),
            "effective_keys": _short(found.even_keys),
        },
        "farthest": [[layer + 1, head + 1] for layer, head in found.farthest()],
        "terms": {
            name: [_shortened(weights) for layer in means for weights in layer] for name, means in found.terms.items()
        },
        "positions": [_position(each, found.layers, heads, tokens, vocabulary) for each in found.close],
    }


def marked(weights: np.ndarray, keys: int, share: float = TOP) -> list[int]:
    """Indices, in rising order, of the given share of tokens in reach (the last `keys`) with the largest weights."""
    first = len(weights) - keys
    # Of equal weights the nearest tokens, which come last.
    order = np.lexsort((-np.arange(keys), -weights[first:]))
    return sorted((first + order[: math.ceil(share * keys)]).tolist())


def token_texts(vocabulary: Vocabulary, ids: Any) -> list[str]:
    """The text that each token completes; joined, they are the text of the tokens."""
    decoder = vocabulary.decoder()
    texts = [decoder.push(int(token)) for token in ids]
    if texts:
        texts[-1] += decoder.flush()
    return texts


def _position(
    close: Close, layers: tuple[int, ...], heads: Sequence[tuple[int, int]], tokens: Any, vocabulary: Vocabulary
) -> dict[str, Any]:
    *texts, following = token_texts(vocabulary, tokens[close.first_key : close.position + 2])
    return {
        "position": close.position,
        "first": close.first_key,
        "keys": close.keys.tolist(),
        "texts": texts,
        "next": following,
        "heads": [
            {
                "layer": layer + 1,
                "head": head + 1,
                "weights": [_shortened(row) for row in close.weights[layers.index(layer), head]],
                "marked": marked(close.weights[layers.index(layer), head, -1], int(close.keys[-1])),
            }
            for layer, head in heads
        ],
    }


def _short(number: float) -> float:
    return float(f"{number:.6g}")


def _shortened(numbers: np.ndarray) -> list[float]:
    return [_short(number) for number in numbers.tolist()]
