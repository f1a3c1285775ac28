"""JSON record of a model's attention on a split of a corpus: the data of the figures, the page and the report."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import numpy as np

from txl.analysis.average_attention import (
    AttentionAverages,
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
from txl.errors import UserError
from txl.evaluation.perplexity import Progress
from txl.files import JsonObject
from txl.models.language_model import LanguageModel

FORMAT = 2
TOP = 0.2
"""Share of the tokens in reach that are marked in the text; "top 20%" in the paper."""


def analyse_attention(
    model: LanguageModel,
    vocabulary: Vocabulary,
    corpus: Corpus,
    *,
    split: str,
    checkpoint: str,
    lengths: Lengths,
    segment: int,
    batch_size: int | None = None,
    most_lanes: int = 10,
    max_tokens: int | None = None,
    min_keys: int | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    positions: Sequence[int] | None = None,
    rows: int = 16,
    seed: int = 1,
    far: int | None = None,
    terms: bool | None = None,
    progress: Progress | None = None,
) -> JsonObject:
    """Average a model's attention over a split, and return the record from which figures and page are drawn.

    Args:
        model, vocabulary: model and vocabulary of a run.
        corpus: corpus encoded with `vocabulary`.
        split: name of the split to read.
        checkpoint: name of the checkpoint, for the record.
        lengths: memory length, window and clamp.
        segment: number of tokens of each lane in one step.
        batch_size: number of lanes; None: at most `most_lanes`, with memory full in three quarters of each lane.
        max_tokens: number of tokens to read; None: all.
        min_keys, terms, progress: as in `average_attention`.
        layers: numbers of the layers, from 0; None: all.
        heads: heads to show in the text as (layer, head), both from 0; None: those of `AttentionAverages.farthest`.
        positions: indices in the split of the tokens whose attention is shown; None: one drawn where memory is full.
        rows: number of tokens shown up to each position.
        seed: seed for drawing the position.
        far: least distance that counts as far; None: half of the number of keys that a token sees.
    """
    found_attentions = attentions(model)
    _check_heads(heads, layers, len(found_attentions), found_attentions[0].n_head)
    tokens = corpus.tokens(split)
    if max_tokens is not None and max_tokens < 2:
        raise UserError(f"--tokens is {max_tokens}; expected 2 or more, or all")
    span = reach(model.init_state(1, **lengths.options()).lengths, segment)
    far = max(1, span // 2) if far is None else far
    if not 1 <= far < max(2, span):
        raise UserError(f"--far is {far}; expected 1 to {span - 1}: no token sees farther")
    n_read = min(len(tokens), max_tokens or len(tokens))
    lanes = _lanes(n_read, lengths, most_lanes) if batch_size is None else batch_size
    found = average_attention(
        model,
        tokens,
        **lengths.options(),
        segment=segment,
        batch_size=lanes,
        max_tokens=max_tokens,
        min_keys=min_keys,
        terms=terms,
        layers=layers,
        positions=[_drawn(n_read, lanes, rows, seed)] if positions is None else positions,
        rows=rows,
        progress=progress,
    )
    described = {"corpus": corpus.name, "split": split, "unit": corpus.unit, "checkpoint": checkpoint}
    return attention_record(
        found, far=far, heads=heads or found.farthest(), tokens=tokens, vocabulary=vocabulary, described=described
    )


def _check_heads(
    heads: Sequence[tuple[int, int]] | None, layers: Sequence[int] | None, n_layer: int, n_head: int
) -> None:
    for layer, head in heads or ():
        if not (0 <= layer < n_layer and 0 <= head < n_head):
            raise UserError(
                f"there is no head {layer + 1}:{head + 1}: this model has layers 1 to {n_layer} of {n_head} heads each"
            )
        if layers is not None and layer not in layers:
            raise UserError(f"--heads has {layer + 1}:{head + 1}, but layer {layer + 1} is not among --layers")


def _lanes(n_token: int, lengths: Lengths, most: int) -> int:
    """Return the largest number of lanes, at most `most`, with memory full in three quarters of each lane."""
    keys = lengths.mem_len + 1 if lengths.window is None else lengths.window
    return max(1, min(most, n_token // (4 * keys)))


def _drawn(n_token: int, batch_size: int, rows: int, seed: int) -> int:
    """Return a position drawn from the second half of a lane, where memory is as full as possible."""
    batch_size = max(1, batch_size)
    length = n_token // batch_size
    low = max(length // 2, rows - 1)
    if low > length - 2:
        raise UserError(
            f"{n_token} tokens in {batch_size} lanes leave {length} a lane, too few for --rows {rows}; "
            f"lower --batch or --rows, or read more tokens"
        )
    draw = random.Random(seed)
    return draw.randrange(batch_size) * length + draw.randint(low, length - 2)


def attention_record(
    found: AttentionAverages,
    *,
    far: int,
    heads: Sequence[tuple[int, int]],
    tokens: Tokens,
    vocabulary: Vocabulary,
    described: JsonObject,
) -> JsonObject:
    """Return averages and the attention at chosen positions as JSON values, with layers and heads numbered from 1.

    Args:
        found: averages, and the attention at the chosen positions.
        far: least distance that `share_beyond` counts.
        heads: heads whose attention at the chosen positions is recorded as (layer, head), both from 0.
        tokens: stream that was read.
        vocabulary: vocabulary of the model.
        described: corpus, split, unit and checkpoint, for the settings of the record.
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
