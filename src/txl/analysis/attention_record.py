"""JSON record of a model's attention on a split of a corpus: the data of the figures, the page and the report."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from txl.analysis.average_attention import AttentionPlan, Close, average_attention, mean_distance, reach, share_beyond
from txl.analysis.observation import attentions
from txl.data.prepared import Corpus, Tokens
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError
from txl.evaluation.stream import Progress, Settings
from txl.files import JsonObject
from txl.models.language_model import LanguageModel

FORMAT = 2
TOP = 0.2  # share of the tokens in reach that are marked in the text; "top 20%" in the paper


def analyse_attention(
    model: LanguageModel,
    vocabulary: Vocabulary,
    corpus: Corpus,
    split: str,
    settings: Settings,
    plan: AttentionPlan,
    *,
    checkpoint: str,
    progress: Progress | None = None,
) -> JsonObject:
    """Average a model's attention over a split, and return the record from which figures and page are drawn.

    Layers and heads count from 1 in the record, other than in the plan. The corpus is encoded with `vocabulary`; the
    settings have the largest number of lanes.
    """
    layers = attentions(model)
    n_layer, n_head = len(layers), layers[0].n_head
    for layer, head in plan.heads or ():
        if not (0 <= layer < n_layer and 0 <= head < n_head) or (plan.layers is not None and layer not in plan.layers):
            expected = f"heads of the chosen among layers 1 to {n_layer} of {n_head} heads each"
            raise UserError(field="heads", value=f"{layer + 1}:{head + 1}", expected=expected)
    tokens = corpus.tokens(split)
    lengths = settings.init_state(model, 1).lengths
    span = reach(lengths, settings.segment)
    far = max(1, span // 2) if plan.far is None else plan.far
    if not 1 <= far < max(2, span):
        raise UserError(field="far", value=far, expected=f"1 to {span - 1}: no token sees farther")
    n_read, lanes = min(len(tokens), settings.max_tokens or len(tokens)), plan.lanes
    if lanes is None:  # memory is full in three quarters of each lane
        keys = lengths.mem_len + 1 if lengths.window is None else lengths.window
        lanes = max(1, min(settings.batch_size, n_read // (4 * keys)))
    settings = replace(settings, batch_size=lanes)
    positions = plan.positions
    if positions is None:  # one in the second half of a lane, where memory is as full as possible
        length = n_read // lanes
        low = max(length // 2, plan.rows - 1)
        if low > length - 2:
            raise UserError(
                f"{n_read} tokens in {lanes} lanes leave {length} a lane, too few for {plan.rows} rows",
                remedy="use fewer lanes or rows, or read more tokens",
            )
        draw = random.Random(plan.seed)
        positions = [draw.randrange(lanes) * length + draw.randint(low, length - 2)]
    averages = average_attention(model, tokens, settings, replace(plan, positions=positions), progress)
    farthest = averages.farthest()
    distance, beyond = mean_distance(averages.weights), share_beyond(averages.weights, far)
    return {
        "format": FORMAT,
        "settings": {
            "corpus": corpus.name,
            "split": split,
            "unit": corpus.unit,
            "checkpoint": checkpoint,
            **averages.settings,
            "queries": averages.queries,
            "min_keys": averages.min_keys,
            "far": far,
        },
        "heads": [
            {
                "layer": layer + 1,
                "head": head + 1,
                "number": layer * n_head + head,
                "mean_distance": _short(distance[row, head]),
                "share_beyond": _short(beyond[row, head]),
                "effective_keys": _short(averages.effective_keys[row, head]),
                "average": _shortened(averages.weights[row, head]),
            }
            for row, layer in enumerate(averages.layers)
            for head in range(n_head)
        ],
        "even": {
            "mean_distance": _short(float(mean_distance(averages.even))),
            "share_beyond": _short(float(share_beyond(averages.even, far))),
            "effective_keys": _short(averages.even_keys),
        },
        "farthest": [[layer + 1, head + 1] for layer, head in farthest],
        "terms": {
            name: [_shortened(weights) for layer in means for weights in layer]
            for name, means in averages.terms.items()
        },
        "positions": [
            _position(close, averages.layers, plan.heads or farthest, tokens, vocabulary) for close in averages.close
        ],
    }


def _position(
    close: Close, layers: tuple[int, ...], heads: Sequence[tuple[int, int]], tokens: Tokens, vocabulary: Vocabulary
) -> JsonObject:
    # The text that each token completes; joined, these texts are the text of all tokens.
    decoder = vocabulary.decoder()
    *texts, following = [decoder.push(int(token)) for token in tokens[close.first_key : close.position + 2]]
    shown = []
    for layer, head in heads:
        weights = close.weights[layers.index(layer), head]
        rows, chosen = [_shortened(row) for row in weights], marked(weights[-1], int(close.keys[-1]))
        shown.append({"layer": layer + 1, "head": head + 1, "weights": rows, "marked": chosen})
    return {
        "position": close.position,
        "first": close.first_key,
        "keys": close.keys.tolist(),
        "texts": texts,
        "next": following + decoder.flush(),
        "heads": shown,
    }


def marked(weights: np.ndarray, keys: int) -> list[int]:
    """Return the rising indices of the tokens in reach (the last `keys`) with the largest weights, a share `TOP`."""
    first = len(weights) - keys
    # Among equal weights, the nearest tokens are preferred, which are the last ones.
    order = np.lexsort((-np.arange(keys), -weights[first:]))
    return sorted((first + order[: math.ceil(TOP * keys)]).tolist())


def _short(number: float) -> float:
    return float(f"{number:.6g}")


def _shortened(numbers: np.ndarray) -> list[float]:
    return [_short(number) for number in numbers.tolist()]
