"""Token embedding and output softmax, adaptive (Grave et al. 2016; Baevski and Auli 2018) or plain.

The vocabulary, most frequent tokens first, is cut into clusters: the shortlist (cluster 0) and the tail clusters.
Without cutoffs there is one cluster, and both modules are the plain ones. With `div_val` f, cluster i is embedded in
d_embed / f^i features and projected to d_model. The softmax shares the tables of the embedding (tied weights) or has
its own. For each cluster it uses the embedding's projection or a separate one.

Shapes: N tokens, E d_model, V vocabulary, V_i tokens and d_i features of cluster i, C number of tail clusters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from txl.config import ModelConfig
from txl.devices import runs_ahead
from txl.errors import UserError
from txl.models.cross_entropy import linear_cross_entropy
from txl.models.layers import logits, make_dropout
from txl.native.operations import linear


def cluster_bounds(vocab_size: int, cutoffs: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return for every cluster its first token and the end, which is one past its last token."""
    edges = [0, *cutoffs, vocab_size]
    if any(first >= end for first, end in pairwise(edges)):
        raise UserError(
            f"model.cutoffs is {list(cutoffs)} for a vocabulary of {vocab_size}; expected numbers that increase "
            f"strictly, all above 0 and below {vocab_size}"
        )
    return list(pairwise(edges))


def cluster_widths(d_embed: int, div_val: int, n_cluster: int) -> list[int]:
    """Return d_i = d_embed / div_val^i, rounded down (`ModelConfig.validate` refuses a cluster without features)."""
    return [d_embed // div_val**i for i in range(n_cluster)]


def cluster_parts(tables: Iterable[Tensor], bounds: list[tuple[int, int]]) -> list[Tensor]:
    """Return the table [V_i, d_i] of every cluster, from one table per cluster or one table for all clusters.

    A common table is split once, and not sliced per cluster: the gradient of each slice would be as large as the table.
    """
    parts = list(tables)
    return parts if len(parts) > 1 else list(parts[0].split([end - first for first, end in bounds]))


def _places(mask: Bool[Tensor, " N"], room: int) -> Int64[Tensor, " room"]:
    """Return the indices where a mask is true, in order, then indices where it is false; never wait for the device.

    Args:
        mask: mask with at most `room` true entries.
        room: number of indices to return, at most N.
    """
    order = torch.where(mask, mask.cumsum(0) - 1, mask.sum() + (~mask).cumsum(0) - 1)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(mask), device=mask.device))
    return places[:room]


class AdaptiveEmbedding(nn.Module):
    """Embedding of tokens in d_model features; Transformers scale it by sqrt(d_model) as in Vaswani et al. (2017)."""

    def __init__(self, vocab_size: int, config: ModelConfig):
        super().__init__()
        d_embed = config.d_embed or config.d_model  # d_0, width of the shortlist
        self.bounds = cluster_bounds(vocab_size, config.cutoffs)
        self.d_model = config.d_model
        self.scale = config.embedding_scale
        # Like the authors, split the table only if the clusters differ in width; one table computes the same function.
        if config.div_val == 1:
            sizes, widths = [vocab_size], [d_embed]
        else:
            sizes = [end - first for first, end in self.bounds]
            widths = cluster_widths(d_embed, config.div_val, len(self.bounds))
        self.tables = nn.ParameterList(torch.empty(size, width) for size, width in zip(sizes, widths, strict=True))
        projected = config.div_val > 1 or d_embed != config.d_model
        self.projections = nn.ParameterList(torch.empty(config.d_model, width) for width in widths if projected)

    @property
    def split(self) -> bool:
        """True if there are several tables, one for every cluster."""
        return len(self.tables) > 1

    def cluster_tables(self) -> list[Float[Tensor, "_ _"]]:
        """Return the embedding table [V_i, d_i] of every cluster."""
        return cluster_parts(self.tables, self.bounds)

    def projection(self, cluster: int) -> Float[Tensor, "E _"] | None:
        """Return the projection [E, d_i] of a cluster's embeddings to d_model; None if there is none."""
        if len(self.projections) == 0:
            return None
        return self.projections[cluster if self.split else 0]

    def forward(self, tokens: Int64[Tensor, "*rows"]) -> Float[Tensor, "*rows E"]:
        """Embed tokens; on a GPU with shapes that do not depend on the tokens, so that the host never waits."""
        if self.split and (runs_ahead(tokens) or isinstance(tokens, FakeTensor)):
            return self.of_every_cluster(tokens)
        if not self.split:
            embedded = F.embedding(tokens, self.tables[0])
            if len(self.projections) > 0:
                # In the table's dtype, not that of autocast, because all layers add to this tensor.
                embedded = linear(embedded, self.projections[0]).to(self.tables[0].dtype)
        else:
            flat = tokens.reshape(-1)
            # A token outside of all clusters becomes NaN; zeros would give a plausible loss.
            embedded = self.tables[0].new_full((flat.numel(), self.d_model), math.nan)
            for cluster, (first, end) in enumerate(self.bounds):
                places = ((flat >= first) & (flat < end)).nonzero().squeeze(1)
                rows = F.embedding(flat[places] - first, self.tables[cluster])
                rows = linear(rows, self.projections[cluster])
                embedded = embedded.index_copy(0, places, rows.to(embedded.dtype))
            embedded = embedded.view(*tokens.shape, self.d_model)
        return embedded if self.scale == 1 else embedded * self.scale

    def of_every_cluster(self, tokens: Int64[Tensor, "*rows"]) -> Float[Tensor, "*rows E"]:
        """Compute `forward` for a few tokens, with shapes that do not depend on the tokens' clusters."""
        if not self.split:
            return self(tokens)
        embedded = self.tables[0].new_full((*tokens.shape, self.d_model), math.nan)
        for cluster, (first, end) in enumerate(self.bounds):
            rows = F.embedding((tokens - first).clamp(0, end - first - 1), self.tables[cluster])
            there = ((tokens >= first) & (tokens < end))[..., None]
            embedded = torch.where(there, linear(rows, self.projections[cluster]), embedded)
        return embedded if self.scale == 1 else embedded * self.scale


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities from hidden states, computed with the tables of an `AdaptiveEmbedding`.

    The head has one logit for each shortlist token and one for each tail cluster; row i-1 of `cluster_weight` belongs
    to cluster i. The probability of a tail token is that of its cluster times that of the token within the cluster.
    """

    compiled = False
    """True if the compiled library also computes losses in training, as for models whose attention is `compiled`."""

    def __init__(self, embedding: AdaptiveEmbedding, config: ModelConfig):
        super().__init__()
        self.bounds = embedding.bounds
        d_embed = config.d_embed or config.d_model
        n_tail = len(self.bounds) - 1
        self.bias = nn.Parameter(torch.empty(self.bounds[-1][1]))
        if n_tail:
            self.cluster_weight = nn.Parameter(torch.empty(n_tail, d_embed))
            self.cluster_bias = nn.Parameter(torch.empty(n_tail))
        self.has_own_tables = not config.tie_embeddings
        if self.has_own_tables:
            self.own_tables = nn.ParameterList(torch.empty_like(table) for table in embedding.tables)
        self.dropout_tail = make_dropout(config.dropout_tail, locked=False)
        # Baevski and Auli 2018, Section 3: tail clusters share the embedding's projections, the head has no projection.
        self.plain_head = config.tie_projections == "tails"
        # One entry for each cluster with a separate output projection; other clusters use the embedding's. (With
        # div_val 1 the clusters share the embedding's only projection, but may have separate output projections.)
        self.own_projections = nn.ParameterDict()
        for cluster in range(len(self.bounds)):
            tied = config.tie_projections in ("all", "tails") or (
                config.tie_projections == "all_but_first" and cluster > 0
            )
            shared = embedding.projection(cluster)
            if shared is not None and not tied:
                self.own_projections[str(cluster)] = nn.Parameter(torch.empty_like(shared))

    def tail_rows(self, targets: Int64[Tensor, "*rows"]) -> tuple[int, ...]:
        """Return the number of targets in each tail cluster; `targets` is on a CPU."""
        edges = torch.tensor([first for first, _ in self.bounds[1:]])
        cluster = torch.bucketize(targets.flatten(), edges, right=True)
        return tuple(cluster.bincount(minlength=len(self.bounds))[1:].tolist())

    def nll(
        self,
        hidden: Float[Tensor, "N E"],
        targets: Int64[Tensor, " N"],
        embedding: AdaptiveEmbedding,
        tail_rows: Sequence[int] | None = None,
    ) -> Float[Tensor, " N"]:
        """Return the negative log-likelihood of each target in nats, in the order of the targets.

        Args:
            hidden: h^N.
            targets: target tokens.
            embedding: embedding that shares its tables and projections.
            tail_rows: see `Objective`; with fewer rows than targets in a tail cluster, the loss of some targets would
                lack the term of that cluster.
        """
        tables, losses = self._tables(embedding), partial(linear_cross_entropy, compiled=self.compiled)
        if len(self.bounds) == 1:
            return losses(self._projected(hidden, embedding, 0), *self._layer(tables, 0), targets)
        shortlist = self.bounds[0][1]
        # log p(x) = log p_head(cluster of x) + log p_cluster(x). In the head, a tail cluster is one further class after
        # the shortlist.
        cluster = sum((targets >= first).long() for first, _ in self.bounds[1:])
        assert isinstance(cluster, Tensor)
        head_target = torch.where(cluster == 0, targets, shortlist - 1 + cluster)
        nll = losses(self._projected(hidden, embedding, 0), *self._layer(tables, 0), head_target)  # every target
        for tail, (first, _) in enumerate(self.bounds[1:], start=1):  # only the targets of that cluster
            here = cluster == tail
            places = here.nonzero().squeeze(1) if tail_rows is None else _places(here, tail_rows[tail - 1])
            if places.numel():
                there = self._projected(hidden[places], embedding, tail)
                inside = targets[places] - first
                if tail_rows is None:
                    within = losses(there, *self._layer(tables, tail), inside)
                else:
                    meant = here[places]
                    inside = torch.where(meant, inside, 0)
                    within = losses(there, *self._layer(tables, tail), inside)
                    within = torch.where(meant, within, 0)
                nll = nll.index_add(0, places, within)
        return nll

    def log_probs(self, hidden: Float[Tensor, "N E"], embedding: AdaptiveEmbedding) -> Float[Tensor, "N V"]:
        """Return log-probabilities over the whole vocabulary."""
        tables = self._tables(embedding)
        head = self._logits(hidden, embedding, tables, 0)
        shortlist = self.bounds[0][1]
        if len(self.bounds) > 1:
            # Concatenate the logits: concatenating the weights would copy the shortlist's table.
            inner = self._projected(hidden, embedding, 0)
            clusters = logits(inner, self.cluster_weight, self.cluster_bias)
            head = torch.cat([head, clusters], dim=-1)
        head = head.log_softmax(dim=-1)  # [N, shortlist + C]
        parts = [head[:, :shortlist]]
        for tail in range(1, len(self.bounds)):
            within = self._logits(hidden, embedding, tables, tail).log_softmax(dim=-1)
            parts.append(within + head[:, shortlist + tail - 1, None])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _logits(self, hidden: Tensor, embedding: AdaptiveEmbedding, tables: list[Tensor], cluster: int) -> Tensor:
        """Return the logits of one cluster's tokens: [N,E] -> [N,V_i]."""
        first, end = self.bounds[cluster]
        return logits(self._projected(hidden, embedding, cluster), tables[cluster], self.bias[first:end])

    def _tables(self, embedding: AdaptiveEmbedding) -> list[Tensor]:
        """Return the output table [V_i, d_i] of every cluster."""
        return cluster_parts(self.own_tables, self.bounds) if self.has_own_tables else embedding.cluster_tables()

    def _projected(self, hidden: Tensor, embedding: AdaptiveEmbedding, cluster: int) -> Tensor:
        """Project hidden states to the width of a cluster's table: [N,E] -> [N,d_i]."""
        if cluster == 0 and self.plain_head:
            return hidden
        own = str(cluster) in self.own_projections
        projection = self.own_projections[str(cluster)] if own else embedding.projection(cluster)
        projected = hidden if projection is None else linear(hidden, projection.t())
        return projected if cluster == 0 else self.dropout_tail(projected)

    def _layer(self, tables: list[Tensor], cluster: int) -> tuple[Tensor, Tensor]:
        """Return weight [V_i,d_i] and bias [V_i] of a cluster's logits; the head has C further rows for the tails."""
        first, end = self.bounds[cluster]
        weight, bias = tables[cluster], self.bias[first:end]
        if cluster == 0 and len(self.bounds) > 1:
            weight = torch.cat([weight, self.cluster_weight])
            bias = torch.cat([bias, self.cluster_bias])
        return weight, bias
