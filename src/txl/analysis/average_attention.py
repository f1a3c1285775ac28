"""Attention of a model's heads by relative position, averaged over a stream of text (Appendix D).

Each matrix of weights is summed along its diagonals as soon as it is computed. Only the sums are kept: one number for
every layer, head and distance.

Shapes: B lanes, T tokens of a segment, S keys, N layers, H heads, L distances (0 is the token itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from txl.analysis.observation import AttentionInputs, attentions, known_terms, observed
from txl.attention.shifted import shifted_view
from txl.config import Lengths, Limit
from txl.errors import UserError
from txl.evaluation.perplexity import Lanes, Progress, TokenIds, checked_segments, evaluation_mode
from txl.files import JsonObject
from txl.models.language_model import LanguageModel


@dataclass(frozen=True)
class Close:
    """Attention weights of some neighbouring tokens, one row per token, without averaging (Figure 6)."""

    position: int
    """Index in the stream of the token of the last row."""
    first_key: int
    """Index in the stream of the token of the first column."""
    weights: np.ndarray
    """float32 [N,H,rows,columns]: weight of the column's token for the row's token; 0 for a token that is not seen."""
    keys: np.ndarray
    """int64 [rows]: number of tokens that the row's token sees, up to and including itself."""


@dataclass(frozen=True)
class AttentionAverages:
    """Attention distributions averaged over the tokens of a stream, by distance."""

    layers: tuple[int, ...]
    """Numbers of the N layers, from 0."""
    weights: np.ndarray
    """float64 [N,H,L]: mean weight of the token at each distance; the sum over distances is 1."""
    effective_keys: np.ndarray
    """float64 [N,H]: exp of the mean entropy of the distributions, the number of keys that a head effectively uses."""
    even: np.ndarray
    """float64 [L]: `weights` of a hypothetical head that divides its attention evenly among all keys that it sees."""
    even_keys: float
    """`effective_keys` of the head with even attention."""
    terms: dict[str, np.ndarray]
    """Like `weights`, with the softmax of a single term: "a", "b" and "d", as far as the model has these terms."""
    queries: int
    """Number of tokens averaged over."""
    min_keys: int
    """Least number of keys that a token had to see to be averaged over."""
    settings: JsonObject
    """Values of mem_len, window, clamp_len, segment, batch_size and tokens."""
    close: tuple[Close, ...]

    def farthest(self) -> list[tuple[int, int]]:
        """Return the head with the largest mean distance in each third of the layers as (layer, head), both from 0.

        The paper shows three such heads, from the first, eighth and last layer of its model.
        """
        distance, chosen = mean_distance(self.weights), []
        for part in np.array_split(np.arange(len(self.layers)), 3):
            if len(part):
                row, head = np.unravel_index(distance[part].argmax(), distance[part].shape)
                chosen.append((self.layers[part[row]], int(head)))
        return chosen


def mean_distance(weights: np.ndarray) -> np.ndarray:
    """Return the mean distance of a head's attention in tokens, from its weights by distance: [...,L] -> [...]."""
    return weights @ np.arange(weights.shape[-1])


def share_beyond(weights: np.ndarray, distance: int) -> np.ndarray:
    """Return the share of a head's attention on tokens at `distance` or farther: [...,L] -> [...]."""
    return weights[..., distance:].sum(axis=-1)


def reach(lengths: Lengths, segment: int) -> int:
    """Return the largest number of keys that a token sees, itself included, in segments of `segment` tokens."""
    return lengths.window or lengths.mem_len + segment


def average_attention(
    model: LanguageModel,
    tokens: TokenIds,
    *,
    segment: int = 128,
    mem_len: int | None = None,
    window: Limit = None,
    clamp_len: Limit = None,
    batch_size: int = 4,
    max_tokens: int | None = None,
    min_keys: int | None = None,
    terms: bool | None = None,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] = (),
    rows: int = 16,
    progress: Progress | None = None,
) -> AttentionAverages:
    """Average the attention of every head over the tokens of a stream, by distance.

    Args:
        model: any Transformer.
        tokens: tokens of a split, or any one-dimensional array or tensor of token ids.
        segment, mem_len, window, clamp_len, batch_size: as in `txl.evaluate`, except that None always means the model's
            configuration.
        max_tokens: number of tokens to read from the beginning of the stream; None: all.
        min_keys: least number of keys, itself included, that a token must see to be averaged over; None: the number
            that full memory, or the window, always provides, which excludes the beginning of the stream, where memory
            is not yet full. For a model without memory: 1.
        terms: True: also average the terms (a), (b) and (d), each with its own softmax (Figure 7); None: average the
            terms that the model has.
        layers: numbers of the layers, from 0; None: all.
        positions: indices in the stream of tokens for which all weights are kept, with the tokens before them as rows.
        rows: number of tokens kept for each of `positions`.
        progress: called with the number of tokens read so far and their total number.
    """
    n_head = attentions(model)[0].n_head
    chosen = _chosen_layers(model, layers)
    names = _chosen_terms(model, terms)
    for name, value in (("segment", segment), ("rows", rows)):
        if value < 1:
            raise UserError(f"{name} is {value}; expected 1 or more")
    ids = np.asarray(tokens)[:max_tokens]
    if ids.ndim != 1:
        raise UserError(f"tokens have shape {list(ids.shape)}; expected one dimension")
    lanes = Lanes.cut(len(ids), batch_size)
    state = model.init_state(batch_size, mem_len=mem_len, window=window, clamp_len=clamp_len)
    lengths = state.lengths
    span = reach(lengths, segment)
    everywhere = 1 if model.context is not None else lengths.window or lengths.mem_len + 1
    needed = everywhere if min_keys is None else min_keys
    longest = lanes.end[0] - lanes.first[0]
    if min_keys is not None and not 1 <= min_keys <= min(span, longest):
        raise UserError(
            field="min_keys", value=min_keys, expected=f"1 to {min(span, longest)}: no token sees more keys"
        )
    if not 1 <= needed <= min(span, longest):
        raise UserError(
            f"no token sees {needed} keys: a lane has {longest} tokens (of {len(ids)} in {batch_size} lanes) and a "
            f"token sees at most {span}; lower --mem-len or --batch, or read more tokens"
        )
    close = [_Close(position, min(rows, position + 1), span, lanes, chosen, n_head) for position in positions]
    sums = _Sums(chosen, n_head, span, needed, names, close)
    done, read = 0, 0
    with evaluation_mode(model) as model, observed(model, sums.observe):
        for inputs, _, _ in checked_segments(model, lanes, ids, segment):
            sums.starts = [first - 1 + read for first in lanes.first]
            _, state = model.hidden_states(inputs, state)
            read += inputs.shape[1]
            done += inputs.numel()
            if progress is not None:
                progress(done, lanes.n_target)
    if not sums.queries.any():
        raise UserError(
            f"no token of a lane's {longest} sees {needed} keys, because of where segments begin; lower --min-keys, or "
            f"read more tokens"
        )
    settings = {**asdict(lengths), "segment": segment, "batch_size": batch_size, "tokens": len(ids)}
    return sums.result(settings)


def _chosen_layers(model: LanguageModel, layers: Sequence[int] | None) -> tuple[int, ...]:
    n_layer = len(attentions(model))
    chosen = tuple(range(n_layer)) if layers is None else tuple(sorted(set(layers)))
    for layer in chosen:
        if not 0 <= layer < n_layer:
            raise UserError(f"there is no layer {layer + 1}: this model has layers 1 to {n_layer}")
    if not chosen:
        raise UserError("no layers were chosen; expected one or more")
    return chosen


def _chosen_terms(model: LanguageModel, wanted: bool | None) -> str:
    known = known_terms(model)
    if wanted and not known:
        raise UserError(
            f"the terms of Figure 7 cannot be told apart here: this model's positions are absolute "
            f"({model.config.chosen_by}) and go into its hidden states, not into terms of the score"
        )
    return "" if wanted is False else "".join(name for name in known if name != "c")


class _Close:
    """Collector of one `Close` over the segments that contain its rows."""

    def __init__(self, position: int, rows: int, span: int, lanes: Lanes, layers: tuple[int, ...], n_head: int):
        self.position, self.rows = position, rows
        self.first_row = position - rows + 1
        starts = [first - 1 for first in lanes.first]
        found = [lane for lane, start in enumerate(starts) if start <= position < lanes.end[lane] - 1]
        if not found or self.first_row < starts[found[0]]:
            raise UserError(
                f"position {position} was not read, or lies within {rows} tokens of a lane's beginning; lanes begin at "
                f"{', '.join(map(str, starts[:8]))}{' ...' if len(starts) > 8 else ''} and "
                f"end at {lanes.end[-1] - 2}: choose another position, or --batch 1"
            )
        self.lane = found[0]
        self.first_key = max(starts[self.lane], self.first_row - span + 1)
        self.weights = np.zeros((len(layers), n_head, rows, position + 1 - self.first_key), dtype=np.float32)
        self.keys = np.zeros(rows, dtype=np.int64)

    def add(self, layer: int, weights: Tensor, start: int, memory: int, keys: Tensor) -> None:
        """Copy the part of the rows from the weights [H,T,S] of a segment that begins at token `start`.

        Args:
            layer: index of the layer among the chosen layers.
            weights: weights of the lane that contains the rows.
            start: index in the stream of the segment's first token.
            memory: number of keys before the segment.
            keys: [T], number of keys that each token sees.
        """
        low, high = max(self.first_row, start), min(self.position + 1, start + weights.shape[1])
        if low >= high:
            return
        first = max(self.first_key, start - memory)
        block = weights[:, low - start : high - start, first - start + memory : self.position + 1 - start + memory]
        at = first - self.first_key
        rows = slice(low - self.first_row, high - self.first_row)
        self.weights[layer, :, rows, at : at + block.shape[-1]] = block.cpu().float().numpy()
        self.keys[rows] = keys[low - start : high - start].numpy()

    def result(self) -> Close:
        """Return the collected weights without the columns that no row sees."""
        unseen = int((self.first_row + np.arange(self.rows) - self.keys + 1).min()) - self.first_key
        return Close(self.position, self.first_key + unseen, self.weights[..., unseen:], self.keys)


class _Sums:
    """Sums of attention over tokens, for every chosen layer."""

    def __init__(
        self,
        layers: tuple[int, ...],
        n_head: int,
        span: int,
        min_keys: int,
        terms: str,
        close: list[_Close],
    ):
        self.rows = {layer: row for row, layer in enumerate(layers)}
        self.by_name = {name: np.zeros((len(layers), n_head, span)) for name in ("all", *terms)}
        self.entropy = np.zeros((len(layers), n_head))
        self.queries = np.zeros(span + 1, dtype=np.int64)
        """Number of counted tokens, by the number of keys that a token sees."""
        self.min_keys, self.close = min_keys, close
        self.starts: list[int] = []
        """Index in the stream of the first token of each lane's current segment."""

    def observe(self, layer: int, inputs: AttentionInputs) -> None:
        """Add the attention of one layer on one segment."""
        if layer not in self.rows:
            return
        row, scope = self.rows[layer], inputs.scope
        n_lane, n_query, n_head = inputs.query.shape[:3]
        keys = torch.arange(scope.memory + 1, scope.memory + n_query + 1)
        if scope.window is not None:
            keys = keys.clamp(max=scope.window)
        first = int((keys < self.min_keys).sum())  # the number of keys never falls within a segment
        if row == 0:
            self.queries += n_lane * np.bincount(keys[first:].numpy(), minlength=len(self.queries))
        for name, sums in self.by_name.items():
            weights = inputs.weights("abcd" if name == "all" else name)
            if name == "all":
                entropy = torch.special.entr(weights[:, first:]).sum((1, 2), dtype=torch.float64)
                self.entropy[row] += entropy.view(n_head, n_lane).sum(1).cpu().numpy()
                for each in self.close:
                    lane = weights.view(n_head, n_lane, n_query, -1)[:, each.lane]
                    each.add(row, lane, self.starts[each.lane], scope.memory, keys)
            by_distance = sums_by_distance(weights, n_head, first)
            n_distance = min(by_distance.shape[1], sums.shape[2])  # beyond the window all weights are 0
            sums[row, :, :n_distance] += by_distance[:, :n_distance].cpu().numpy()

    def result(self, settings: JsonObject) -> AttentionAverages:
        """Return the means."""
        queries = int(self.queries.sum())
        terms = {name: sums / queries for name, sums in self.by_name.items() if name != "all"}
        keys = np.arange(1, len(self.queries))
        share = self.queries[1:] / queries
        return AttentionAverages(
            layers=tuple(self.rows),
            weights=self.by_name["all"] / queries,
            effective_keys=np.exp(self.entropy / queries),
            even=(share / keys)[::-1].cumsum()[::-1],  # a token that sees n keys gives 1/n to each distance below n
            even_keys=float(np.exp(share @ np.log(keys))),
            terms=terms,
            queries=queries,
            min_keys=self.min_keys,
            settings=settings,
            close=tuple(each.result() for each in self.close),
        )


def sums_by_distance(weights: Tensor, n_head: int, first: int = 0) -> Tensor:
    """Sum attention weights over lanes and queries by distance: [H*B,T,S] -> float64 [H,S], distance 0 first.

    The weights are written through the shifted view of a buffer, which is the inverse of the shift of Appendix B: the
    buffer's columns are then distances. Hidden keys have weight 0, which fills the corners that the view runs over.

    Args:
        weights: attention weights; 0 where a query does not see a key.
        n_head: number of heads H.
        first: index of the first query to include.
    """
    n_matrix, n_query, n_key = weights.shape
    buffer = weights.new_zeros(n_head, n_matrix // n_head * n_query, n_key + 1)
    shifted_view(buffer, n_matrix // n_head, n_query).copy_(weights)
    rows = buffer.view(n_head, n_matrix // n_head, n_query, n_key + 1)[:, :, first:, 1:]
    return rows.sum((1, 2), dtype=torch.float64).flip(-1)
