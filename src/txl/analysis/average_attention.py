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

from txl.analysis.observation import AttentionInputs, attentions, observed
from txl.attention.shifted import shifted_view
from txl.config import Lengths
from txl.errors import UserError
from txl.evaluation.stream import Lanes, Progress, Settings, TokenIds, checked_ids, evaluation_mode, read_lanes
from txl.files import JsonObject
from txl.models.language_model import LanguageModel, State


@dataclass(frozen=True)
class AttentionPlan:
    """Choice of the attention that is averaged and that is shown in the text. Layers and heads count from 0."""

    layers: Sequence[int] | None = None  # None: all
    # Least number of keys, itself included, that a token must see to be averaged over. None: the number that full
    # memory, or the window, always provides, which excludes the beginning of the stream, where memory is not yet full;
    # for a model without memory: 1.
    min_keys: int | None = None
    # True: also average the terms (a), (b) and (d), each with its own softmax (Figure 7); None: those the model has.
    terms: bool | None = None
    far: int | None = None  # least distance that counts as far; None: half of the number of keys that a token sees
    heads: Sequence[tuple[int, int]] | None = None  # (layer, head) to show in the text; None: those farthest
    positions: Sequence[int] | None = None  # tokens whose attention is shown; None: one drawn where memory is full
    rows: int = 16  # number of tokens shown up to each position
    seed: int = 1  # draws the position
    lanes: int | None = None  # None: at most `Settings.batch_size`, with memory full in three quarters of each lane

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UserError(field="rows", value=self.rows, expected="1 or more")


DEFAULT_PLAN = AttentionPlan()


class Close:
    """Attention weights of some neighbouring tokens, one row per token, without averaging (Figure 6)."""

    def __init__(self, position: int, rows: int, span: int, lanes: Lanes, n_layer: int, n_head: int):
        self.position = position  # index in the stream of the token of the last row
        rows = min(rows, position + 1)
        self.first_row = position - rows + 1
        starts = [first - 1 for first in lanes.first]
        inside = [lane for lane, start in enumerate(starts) if start <= position < lanes.end[lane] - 1]
        if not inside or self.first_row < starts[inside[0]]:
            raise UserError(
                f"position {position} was not read, or lies within {rows} tokens of a lane's beginning; lanes begin at "
                f"{', '.join(map(str, starts[:8]))}{' ...' if len(starts) > 8 else ''} and end at {lanes.end[-1] - 2}",
                remedy="choose another position, or read one lane",
            )
        self.lane = inside[0]
        self.first_key = max(starts[self.lane], self.first_row - span + 1)  # token of the first column
        # float32 [N,H,rows,columns]: weight of the column's token for the row's; 0 for a token that is not seen.
        self.weights = np.zeros((n_layer, n_head, rows, position + 1 - self.first_key), dtype=np.float32)
        self.keys = np.zeros(rows, dtype=np.int64)  # number of tokens that the row's token sees, itself included

    def add(self, layer: int, weights: Tensor, start: int, memory: int, keys: Tensor) -> None:
        """Copy the rows' part of a lane's weights [H,T,S] on a segment from token `start`, behind `memory` keys.

        The layer is an index among the chosen ones; `keys` [T] is the number of keys that each token sees.
        """
        low, high = max(self.first_row, start), min(self.position + 1, start + weights.shape[1])
        if low >= high:
            return
        first = max(self.first_key, start - memory)
        block = weights[:, low - start : high - start, first - start + memory : self.position + 1 - start + memory]
        at, rows = first - self.first_key, slice(low - self.first_row, high - self.first_row)
        self.weights[layer, :, rows, at : at + block.shape[-1]] = block.cpu().float().numpy()
        self.keys[rows] = keys[low - start : high - start].numpy()

    def trim(self) -> None:
        """Drop the columns that no row sees."""
        unseen = int((self.first_row + np.arange(len(self.keys)) - self.keys + 1).min()) - self.first_key
        self.first_key += unseen
        self.weights = self.weights[..., unseen:]


class AttentionAverages:
    """Attention distributions averaged over the tokens of a stream, by distance; sums until `finish` is called."""

    def __init__(self, layers: tuple[int, ...], n_head: int, span: int, min_keys: int, terms: str, close: list[Close]):
        self.layers = layers  # numbers of the N layers, from 0
        # float64 [N,H,L]: mean weight of the token at each distance; the sum over distances is 1.
        self.weights = np.zeros((len(layers), n_head, span))
        # Like `weights`, with the softmax of "a", "b" or "d" alone, as far as the model has it.
        self.terms = {name: np.zeros_like(self.weights) for name in terms}
        # float64 [N,H]: exp of the mean entropy, the number of keys that a head effectively uses.
        self.effective_keys = np.zeros((len(layers), n_head))
        # float64 [L]: `weights` of a hypothetical head that divides its attention evenly among all keys that it sees;
        # until the end, the number of tokens that see 1, 2, ... keys. Its `effective_keys`.
        self.even, self.even_keys = np.zeros(span), 0.0
        self.queries = 0  # number of tokens averaged over
        self.min_keys = min_keys  # least number of keys that a token had to see to be averaged over
        self.close = close
        self.settings: JsonObject = {}  # mem_len, window, clamp_len, segment, batch_size and tokens
        self.starts: list[int] = []  # index in the stream of the first token of each lane's current segment

    def observe(self, layer: int, inputs: AttentionInputs) -> None:
        """Add the attention of one layer on one segment."""
        if layer not in self.layers:
            return
        row, scope = self.layers.index(layer), inputs.scope
        n_lane, n_query, n_head = inputs.query.shape[:3]
        keys = torch.arange(scope.memory + 1, scope.memory + n_query + 1)
        if scope.window is not None:
            keys = keys.clamp(max=scope.window)
        first = int((keys < self.min_keys).sum())  # the number of keys never falls within a segment
        if row == 0:
            self.even += n_lane * np.bincount(keys[first:].numpy() - 1, minlength=len(self.even))
        for name, sums in {"all": self.weights, **self.terms}.items():
            weights = inputs.weights("abcd" if name == "all" else name)
            if name == "all":
                entropy = torch.special.entr(weights[:, first:]).sum((1, 2), dtype=torch.float64)
                self.effective_keys[row] += entropy.view(n_head, n_lane).sum(1).cpu().numpy()
                for close in self.close:
                    lane = weights.view(n_head, n_lane, n_query, -1)[:, close.lane]
                    close.add(row, lane, self.starts[close.lane], scope.memory, keys)
            by_distance = sums_by_distance(weights, n_head, first)
            n_distance = min(by_distance.shape[1], sums.shape[2])  # beyond the window all weights are 0
            sums[row, :, :n_distance] += by_distance[:, :n_distance].cpu().numpy()

    def finish(self) -> None:
        """Turn the sums into means."""
        self.queries = int(self.even.sum())
        share, keys = self.even / self.queries, np.arange(1, len(self.even) + 1)
        self.even = (share / keys)[::-1].cumsum()[::-1]  # a token that sees n keys gives 1/n to each distance below n
        self.even_keys = float(np.exp(share @ np.log(keys)))
        self.effective_keys = np.exp(self.effective_keys / self.queries)
        for sums in (self.weights, *self.terms.values()):
            sums /= self.queries
        for close in self.close:
            close.trim()

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
    settings: Settings,
    plan: AttentionPlan = DEFAULT_PLAN,
    progress: Progress | None = None,
) -> AttentionAverages:
    """Average the attention of every head of any Transformer over the tokens of a stream, by distance.

    Every target counts, so `settings.exhaustive` must be false. All weights are kept at the plan's positions.
    """
    layers = attentions(model)
    chosen = tuple(range(len(layers)) if plan.layers is None else sorted(set(plan.layers)))
    if not chosen or chosen[0] < 0 or chosen[-1] >= len(layers):
        wrong = next((layer + 1 for layer in chosen if not 0 <= layer < len(layers)), "none")
        raise UserError(field="layers", value=wrong, expected=f"some of this model's layers 1 to {len(layers)}")
    terms = "" if plan.terms is False else model.config.score_terms
    if plan.terms and not terms:
        raise UserError(
            f"the terms of Figure 7 cannot be told apart here: this model's positions are absolute "
            f"({model.config.chosen_by}) and go into its hidden states, not into terms of the score"
        )
    n_token = len(checked_ids(tokens, settings.max_tokens))
    lanes = Lanes.cut(n_token, settings.batch_size)
    lengths = settings.init_state(model, 1).lengths
    span, longest = reach(lengths, settings.segment), lanes.end[0] - lanes.first[0]
    everywhere = 1 if model.context is not None else lengths.window or lengths.mem_len + 1
    needed = everywhere if plan.min_keys is None else plan.min_keys
    less = "use less memory or fewer lanes, or read more tokens"
    if not 1 <= needed <= min(span, longest):
        expected = f"1 to {min(span, longest)}, as a lane has {longest} of the {n_token} tokens and a token sees {span}"
        raise UserError(field="min_keys", value=needed, expected=expected, remedy=less)
    n_head = layers[0].n_head
    close = [Close(position, plan.rows, span, lanes, len(chosen), n_head) for position in plan.positions or ()]
    # Term (c) does not depend on the distance: the paper's Figure 7 leaves it out.
    averages = AttentionAverages(chosen, n_head, span, needed, terms.replace("c", ""), close)
    averages.starts = [first - 1 for first in lanes.first]
    with evaluation_mode(model, settings.dtype) as view, observed(view, averages.observe):

        def step(inputs: Tensor, targets: Tensor, state: State, counted: Tensor) -> tuple[Tensor, State]:
            _, after = view.hidden_states(inputs, state)
            averages.starts = [start + inputs.shape[1] for start in averages.starts]
            return torch.zeros(inputs.shape, device=inputs.device), after  # attention needs no losses

        read_lanes(view, tokens, settings, step, progress=progress)
    if not averages.even.any():
        problem = f"no token of a lane's {longest} sees {needed} keys, because of where segments begin"
        raise UserError(problem, remedy=less)
    averages.finish()
    averages.settings = {**asdict(lengths), "segment": settings.segment, "batch_size": settings.batch_size}
    averages.settings["tokens"] = n_token
    return averages


def sums_by_distance(weights: Tensor, n_head: int, first: int = 0) -> Tensor:
    """Sum attention weights over lanes and queries by distance: [H*B,T,S] -> float64 [H,S], distance 0 first.

    The weights are written through the shifted view of a buffer, which is the inverse of the shift of Appendix B: the
    buffer's columns are then distances. Hidden keys have weight 0, which fills the corners that the view runs over.

    Queries before `first` are left out.
    """
    n_matrix, n_query, n_key = weights.shape
    buffer = weights.new_zeros(n_head, n_matrix // n_head * n_query, n_key + 1)
    shifted_view(buffer, n_matrix // n_head, n_query).copy_(weights)
    rows = buffer.view(n_head, n_matrix // n_head, n_query, n_key + 1)[:, :, first:, 1:]
    return rows.sum((1, 2), dtype=torch.float64).flip(-1)
