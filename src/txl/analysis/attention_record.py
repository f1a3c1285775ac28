"""JSON record of a model's attention on a split of a corpus: the data of the figures, the page and the report."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from txl.analysis.average_attention import (
    AttentionAverages,
    AttentionPlan,
    Close,
    average_attention,
    mean_distance,
    reach,
    share_beyond,
)
from txl.analysis.observation import attentions
from txl.config import Lengths
from txl.data.prepared import Corpus, Tokens
from txl.data.vocabulary import Vocabulary
from txl.errors import Field, UserError
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

    Args:
        model, vocabulary: model and vocabulary of a run.
        corpus: corpus encoded with `vocabulary`.
        split: name of the split to read.
        settings: lengths, segments, number of tokens, and the largest number of lanes.
        plan: layers, heads, positions and terms to show.
        checkpoint: name of the checkpoint, for the record.
        progress: as in `average_attention`.
    """
    layers = attentions(model)
    _check_heads(plan, len(layers), layers[0].n_head)
    tokens = corpus.tokens(split)
    lengths = settings.init_state(model, 1).lengths
    span = reach(lengths, settings.segment)
    far = max(1, span // 2) if plan.far is None else plan.far
    if not 1 <= far < max(2, span):
        raise UserError(field="far", value=far, expected=f"1 to {span - 1}: no token sees farther")
    n_read = min(len(tokens), settings.max_tokens or len(tokens))
    lanes = _lanes(n_read, lengths, settings.batch_size) if plan.lanes is None else plan.lanes
    settings = replace(settings, batch_size=lanes)
    positions = [_drawn(n_read, lanes, plan.rows, plan.seed)] if plan.positions is None else plan.positions
    averages = average_attention(model, tokens, settings, replace(plan, positions=positions), progress)
    heads = plan.heads or averages.farthest()
    described = {"corpus": corpus.name, "split": split, "unit": corpus.unit, "checkpoint": checkpoint}
    return _record(averages, far, described) | {
        "positions": [_position(close, averages.layers, heads, tokens, vocabulary) for close in averages.close]
    }


def _check_heads(plan: AttentionPlan, n_layer: int, n_head: int) -> None:
    for layer, head in plan.heads or ():
        if not (0 <= layer < n_layer and 0 <= head < n_head):
            raise UserError(
                f"there is no head {layer + 1}:{head + 1}: this model has layers 1 to {n_layer} of {n_head} heads each"
            )
        if plan.layers is not None and layer not in plan.layers:
            raise UserError(
                (Field("heads"), f" has {layer + 1}:{head + 1}, but layer {layer + 1} is not among ", Field("layers"))
            )


def _lanes(n_token: int, lengths: Lengths, most: int) -> int:
    """Return the largest number of lanes, at most `most`, with memory full in three quarters of each lane."""
    keys = lengths.mem_len + 1 if lengths.window is None else lengths.window
    return max(1, min(most, n_token // (4 * keys)))


def _drawn(n_token: int, batch_size: int, rows: int, seed: int) -> int:
    """Return a position drawn from the second half of a lane, where memory is as full as possible."""
    length = n_token // batch_size
    low = max(length // 2, rows - 1)
    if low > length - 2:
        raise UserError(
            f"{n_token} tokens in {batch_size} lanes leave {length} a lane, too few for {rows} rows",
            remedy="use fewer lanes or rows, or read more tokens",
        )
    draw = random.Random(seed)
    return draw.randrange(batch_size) * length + draw.randint(low, length - 2)


def _record(averages: AttentionAverages, far: int, described: JsonObject) -> JsonObject:
    """Return the averages as JSON values, with layers and heads numbered from 1.

    Args:
        averages: averages of the chosen layers.
        far: least distance that `share_beyond` counts.
        described: corpus, split, unit and checkpoint, for the settings of the record.
    """
    distance, beyond = mean_distance(averages.weights), share_beyond(averages.weights, far)
    n_head = averages.weights.shape[1]
    rows = [
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
    ]
    counts = {"queries": averages.queries, "min_keys": averages.min_keys, "far": far}
    return {
        "format": FORMAT,
        "settings": {**described, **averages.settings, **counts},
        "heads": rows,
        "even": {
            "mean_distance": _short(float(mean_distance(averages.even))),
            "share_beyond": _short(float(share_beyond(averages.even, far))),
            "effective_keys": _short(averages.even_keys),
        },
        "farthest": [[layer + 1, head + 1] for layer, head in averages.farthest()],
        "terms": {
            name: [_shortened(weights) for layer in means for weights in layer]
            for name, means in averages.terms.items()
        },
    }


def marked(weights: np.ndarray, keys: int) -> list[int]:
    """Return the rising indices of the tokens in reach (the last `keys`) with the largest weights, a share `TOP`."""
    first = len(weights) - keys
    # Among equal weights, the nearest tokens are preferred, which are the last ones.
    order = np.lexsort((-np.arange(keys), -weights[first:]))
    return sorted((first + order[: math.ceil(TOP * keys)]).tolist())


def token_texts(vocabulary: Vocabulary, ids: Iterable[int]) -> list[str]:
    """Return the text that each token completes; joined, these texts are the text of all tokens."""
    decoder = vocabulary.decoder()
    texts = [decoder.push(int(token)) for token in ids]
    if texts:
        texts[-1] += decoder.flush()
    return texts


def _position(
    close: Close, layers: tuple[int, ...], heads: Sequence[tuple[int, int]], tokens: Tokens, vocabulary: Vocabulary
) -> JsonObject:
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
