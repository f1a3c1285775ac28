"""Token embedding and output softmax, adaptive (Grave et al. 2016; Baevski and Auli 2018) or plain, and mixed.

The vocabulary, most frequent tokens first, is cut into clusters: the shortlist (cluster 0) and the tail clusters.
Without cutoffs there is one cluster, and both modules are the plain ones. With `div_val` f, cluster i is embedded in
d_embed / f^i features and projected to d_model. The softmax shares the tables of the embedding (tied weights) or has
its own. For each cluster it uses the embedding's projection or a separate one.

Shapes: N tokens, E d_model, V vocabulary, V_i tokens and d_i features of cluster i; B lanes, T tokens of a segment, E_h
width of a model's hidden states, K softmaxes of a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from txl.config import ModelConfig
from txl.devices import runs_ahead
from txl.errors import UserError
from txl.models.layers import make_dropout
from txl.models.loss import MAX_LOGITS_CUDA, at_least_float32, fused_dtype, linear_cross_entropy
from txl.native.operations import linear


def cluster_bounds(vocab_size: int, cutoffs: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return for every cluster its first token and the end, which is one past its last token."""
    edges = [0, *cutoffs, vocab_size]
    if any(first >= end for first, end in pairwise(edges)):
        raise UserError(
            field="model.cutoffs",
            value=list(cutoffs),
            expected=f"increasing numbers above 0 and below {vocab_size}, the size of the vocabulary",
        )
    return list(pairwise(edges))


class AdaptiveEmbedding(nn.Module):
    """Embedding of tokens in d_model features; Transformers scale it by sqrt(d_model) as in Vaswani et al. (2017)."""

    shared: Tensor | None = None
    """Within a training step on a GPU, the only table as a result of the look-up (`txl.models.fused_ends.looked_up`): a
    softmax that uses it instead of the parameter gives its gradient to the look-up, which adds its own."""

    def __init__(self, vocab_size: int, config: ModelConfig):
        super().__init__()
        d_embed = config.d_embed or config.d_model  # d_0, width of the shortlist
        self.bounds = cluster_bounds(vocab_size, config.cutoffs)
        self.d_model, self.scale = config.d_model, config.embedding_scale
        # Like the authors, split the table only if the clusters differ in width; one table computes the same function.
        sizes, widths = [vocab_size], [d_embed]
        if config.div_val > 1:
            sizes = [end - first for first, end in self.bounds]
            widths = [d_embed // config.div_val**i for i in range(len(sizes))]  # `ModelConfig.validate` refuses 0
        self.tables = nn.ParameterList(torch.empty(size, width) for size, width in zip(sizes, widths, strict=True))
        self.split = len(sizes) > 1  # several tables, one for every cluster
        projected = config.div_val > 1 or d_embed != config.d_model
        self.projections = nn.ParameterList(torch.empty(config.d_model, width) for width in widths if projected)

    def cluster_tables(self, tables: Iterable[Tensor] | None = None) -> list[Float[Tensor, "_ _"]]:
        """Return the table [V_i, d_i] of every cluster; `tables` replace those of the embedding.

        A common table is split once, not sliced per cluster: the gradient of each slice would be as large as the table.
        """
        parts = list(self.tables if tables is None else tables)
        return (
            parts
            if self.split or len(self.bounds) == 1
            else list(parts[0].split([end - first for first, end in self.bounds]))
        )

    def tables_in_use(self) -> list[Tensor]:
        """Return the tables for a softmax that shares them."""
        return list(self.tables) if self.shared is None else [self.shared]

    def projection(self, cluster: int) -> Float[Tensor, "E _"] | None:
        """Return the projection [E, d_i] of a cluster's embeddings to d_model; None if there is none."""
        return self.projections[cluster if self.split else 0] if len(self.projections) else None

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
        n_tail = len(self.bounds) - 1
        self.bias = nn.Parameter(torch.empty(self.bounds[-1][1]))
        if n_tail:
            self.cluster_weight = nn.Parameter(torch.empty(n_tail, config.d_embed or config.d_model))
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
        first_tied = {"all": 0, "tails": 0, "all_but_first": 1}.get(config.tie_projections, len(self.bounds))
        for cluster in range(first_tied):
            if (shared := embedding.projection(cluster)) is not None:
                self.own_projections[str(cluster)] = nn.Parameter(torch.empty_like(shared))

    def nll(
        self,
        hidden: Float[Tensor, "N E"],
        targets: Int64[Tensor, " N"],
        embedding: AdaptiveEmbedding,
        tail_rows: Sequence[int] | None = None,
    ) -> Float[Tensor, " N"]:
        """Return the negative log-likelihood of each target in nats.

        With fewer `tail_rows` (see `Objective`) than targets in a tail cluster, the loss of some targets would lack the
        term of that cluster.
        """
        tables, losses = self._tables(embedding), partial(linear_cross_entropy, compiled=self.compiled)
        inner = self._projected(hidden, embedding, 0)
        if len(self.bounds) == 1:
            return losses(inner, *self._layer(tables, 0), targets)
        # log p(x) = log p_head(cluster of x) + log p_cluster(x). In the head, a tail cluster is one further class after
        # the shortlist.
        cluster = sum((targets >= first).long() for first, _ in self.bounds[1:])
        assert isinstance(cluster, Tensor)
        head_target = torch.where(cluster == 0, targets, self.bounds[0][1] - 1 + cluster)
        tails = self._tails(targets, cluster, tail_rows)
        if (dtype := fused_dtype(hidden, self.bias)) is not None:
            return self._fused_nll(hidden, inner, head_target, tails, embedding, dtype)
        weight, bias = self._layer(tables, 0)
        head = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        nll = losses(inner, *head, head_target)  # every target
        del head  # without gradients nothing else holds it
        for tail, (places, inside, meant) in enumerate(tails, start=1):
            if places.numel():
                rows = self._projected(hidden[places], embedding, tail)
                within = losses(rows, *self._layer(tables, tail), inside)
                nll = nll.index_add(0, places, within if meant is None else torch.where(meant, within, 0))
        return nll

    def _tails(
        self, targets: Tensor, cluster: Tensor, tail_rows: Sequence[int] | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield for each tail cluster the places of its targets, the targets counted from its first, and a mask.

        With `tail_rows`, other places follow until the rows are full, without waiting for the device, and the mask says
        which are meant; None: all.
        """
        for tail, (first, _) in enumerate(self.bounds[1:], start=1):  # only the targets of that cluster
            here = cluster == tail
            if tail_rows is None:
                places = here.nonzero().squeeze(1)
                yield places, targets[places] - first, None
                continue
            order = torch.where(here, here.cumsum(0) - 1, here.sum() + (~here).cumsum(0) - 1)
            numbers = torch.arange(len(here), device=here.device)
            places = torch.empty_like(order).scatter_(0, order, numbers)[: tail_rows[tail - 1]]
            meant = here[places]
            yield places, torch.where(meant, targets[places] - first, 0), meant

    def _fused_nll(
        self,
        hidden: Tensor,
        inner: Tensor,
        head_target: Tensor,
        tails: Iterator[tuple[Tensor, Tensor, Tensor | None]],
        embedding: AdaptiveEmbedding,
        dtype: torch.dtype,
    ) -> Tensor:
        """Compute `nll` of all clusters in one function, which writes the gradient of a common table only once."""
        from txl.models.loss_kernels import Cluster, Slice, fused_cross_entropies

        tables = list(self.own_tables) if self.has_own_tables else embedding.tables_in_use()
        n_table, n_tail = len(tables), len(self.bounds) - 1
        tensors = [*tables, self.cluster_weight, self.bias, self.cluster_bias]
        classes = [
            [Slice(place, 0, end - first) if embedding.split else Slice(0, first, end), Slice(n_table + 1, first, end)]
            for place, (first, end) in enumerate(self.bounds)
        ]
        of_tails = Slice(n_table, 0, n_tail), Slice(n_table + 2, 0, n_tail)
        clusters, added = [Cluster(inner, head_target, *zip(classes[0], of_tails, strict=True))], []
        for tail, (places, inside, meant) in enumerate(tails, start=1):
            if places.numel():
                rows = self._projected(hidden.index_select(0, places), embedding, tail)
                clusters.append(Cluster(rows, inside, *zip(classes[tail], strict=True)))
                added.append((places, meant))
        nll, *others = fused_cross_entropies(clusters, tensors, dtype, MAX_LOGITS_CUDA)
        for (places, meant), within in zip(added, others, strict=True):
            nll = nll.index_add(0, places, within if meant is None else torch.where(meant, within, 0))
        return nll

    def log_probs(self, hidden: Float[Tensor, "N E"], embedding: AdaptiveEmbedding) -> Float[Tensor, "N V"]:
        """Return log-probabilities over the whole vocabulary."""
        tables, shortlist = self._tables(embedding), self.bounds[0][1]
        inner = self._projected(hidden, embedding, 0)
        head = _logits(inner, *self._layer(tables, 0))
        if len(self.bounds) > 1:
            # Concatenate the logits: concatenating the weights would copy the shortlist's table.
            head = torch.cat([head, _logits(inner, self.cluster_weight, self.cluster_bias)], dim=-1)
        head = head.log_softmax(dim=-1)  # [N, shortlist + number of tail clusters]
        parts = [head[:, :shortlist]]
        for tail in range(1, len(self.bounds)):
            within = _logits(self._projected(hidden, embedding, tail), *self._layer(tables, tail)).log_softmax(dim=-1)
            parts.append(within + head[:, shortlist + tail - 1, None])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _tables(self, embedding: AdaptiveEmbedding) -> list[Tensor]:
        """Return the output table [V_i, d_i] of every cluster."""
        return embedding.cluster_tables(self.own_tables if self.has_own_tables else None)

    def _projected(self, hidden: Tensor, embedding: AdaptiveEmbedding, cluster: int) -> Tensor:
        """Project hidden states to the width of a cluster's table: [N,E] -> [N,d_i]."""
        if cluster == 0 and self.plain_head:
            return hidden
        own = str(cluster) in self.own_projections
        projection = self.own_projections[str(cluster)] if own else embedding.projection(cluster)
        projected = hidden if projection is None else linear(hidden, projection.t())
        return projected if cluster == 0 else self.dropout_tail(projected)

    def _layer(self, tables: list[Tensor], cluster: int) -> tuple[Tensor, Tensor]:
        """Return weight [V_i,d_i] and bias [V_i] of a cluster's logits."""
        first, end = self.bounds[cluster]
        return tables[cluster], self.bias if len(self.bounds) == 1 else self.bias[first:end]


def _logits(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return at_least_float32(linear(rows, weight, bias, keeps_sums=True))


class MixtureOfSoftmaxes(nn.Module):
    """The weights pi of the K softmaxes in a mixture, and their hidden states h_k (Yang et al. 2017).

    P(x | h) = sum_k pi_k softmax(W h_k)_x with h_k = tanh(W_k h) and pi = softmax(W_pi h): Equation 3 of the paper. All
    K softmaxes share the output tables, which may be those of a plain or an adaptive softmax.
    """

    def __init__(self, d_hidden: int, d_model: int, n_softmax: int, dropout: nn.Module):
        super().__init__()
        self.prior = nn.Linear(d_hidden, n_softmax, bias=False)
        self.latent = nn.Linear(d_hidden, n_softmax * d_model)
        self.n_softmax, self.dropout = n_softmax, dropout

    def nll(
        self,
        hidden: Float[Tensor, "B T E_h"],
        targets: Int64[Tensor, "B T"],
        softmax: AdaptiveSoftmax,
        embedding: AdaptiveEmbedding,
        tail_rows: Sequence[int] | None = None,
    ) -> Float[Tensor, "B T"]:
        """Return the negative log-likelihood of each target in nats; `tail_rows` as in `Objective`."""
        # The K softmaxes are K times as many rows of one softmax; then -log sum_k exp(log pi_k - nll_k).
        repeated = targets[..., None].expand(*targets.shape, self.n_softmax)
        rows = None if tail_rows is None else [self.n_softmax * count for count in tail_rows]
        log_prior, parts = self._log_prior_and_parts(hidden)
        nll = softmax.nll(parts.flatten(0, -2), repeated.flatten(), embedding, rows)
        return -(log_prior - nll.view_as(repeated)).logsumexp(dim=-1)

    def log_probs(
        self, hidden: Float[Tensor, "B T E_h"], softmax: AdaptiveSoftmax, embedding: AdaptiveEmbedding
    ) -> Float[Tensor, "B T V"]:
        """Return log-probabilities over the whole vocabulary, computed one softmax at a time."""
        log_prior, parts = self._log_prior_and_parts(hidden)
        mixed = None
        for part, log_weight in zip(parts.unbind(-2), log_prior.unbind(-1), strict=True):
            log_probs = softmax.log_probs(part.flatten(0, 1), embedding).unflatten(0, part.shape[:2])
            log_probs = log_probs + log_weight[..., None]
            mixed = log_probs if mixed is None else torch.logaddexp(mixed, log_probs)
        assert mixed is not None  # n_softmax is 1 or more
        return mixed

    def _log_prior_and_parts(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return log pi [B,T,K] and h_k [B,T,K,E]."""
        parts = self.dropout(torch.tanh(self.latent(hidden))).unflatten(-1, (self.n_softmax, -1))
        return at_least_float32(self.prior(hidden)).log_softmax(dim=-1), parts
