"""Peak memory of training, measured, and the longest segment that fits into a budget (Table 10).

Table 10 compares models not at one backpropagation length but at one budget of memory: without recurrence a segment may
be longer. What is measured are whole training steps (forward, backward, clipping, optimiser) on made-up tokens behind a
full memory: on CUDA the allocator's own peak, elsewhere the bytes of all tensors alive at once, counted operation by
operation. The latter is the same in every run, and leaves out what an operation takes for itself inside.

Shapes: B lanes, T tokens of a segment, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from txl.config import RunConfig, validate
from txl.devices import seed_generators
from txl.errors import UserError
from txl.files import JsonObject
from txl.models import build_model
from txl.training.optimisers import WeightAverage, build_optimizer
from txl.training.step import training_step

STEPS = 2
"""The optimiser makes its state in the first; the second has everything."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside and not yet gone; views count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        identity, size = storage._cdata, storage.nbytes()
        if identity in self._alive:
            return
        self._alive.add(identity)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, identity, size)

    def _gone(self, identity: int, size: int) -> None:
        self._alive.discard(identity)
        self.now -= size


def peak_bytes(run: RunConfig, vocab_size: int, device: str = "cpu") -> int:
    """Return the most bytes of tensors that training holds at once, weights and optimiser included.

    The caller's random numbers stay as they were.

    Args:
        run: the configuration; its corpus is not read.
        vocab_size: tokens of the vocabulary.
        device: where.
    """
    validate(run)
    devices = [device] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        seed_generators(0, device)
        if not devices:
            with LiveBytes() as live:
                _train(run, vocab_size, device)
            return live.peak
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _train(run, vocab_size, device)
        return torch.cuda.max_memory_allocated(device) - before


def _train(run: RunConfig, vocab_size: int, device: str) -> None:
    train = run.train
    model = build_model(run.model, vocab_size).to(device).train()
    if train.dtype == "float64":
        model.double()
    optimizer = build_optimizer(model, train)
    average = None
    if train.average_from is not None or train.average_patience is not None:
        average = WeightAverage(model, train.average_mu)
    parts = train.micro_batches
    states = [model.init_state(train.batch_size // parts).filled_with_noise() for _ in range(parts)]
    for _ in range(STEPS):
        tokens = ranked_tokens(vocab_size, train.batch_size, train.segment * train.backprop_segments).to(device)
        states = training_step(model, optimizer, tokens, tokens, states, train, lengths=train.step_lengths).states
        if average is not None:
            average.update(model)


def ranked_tokens(vocab_size: int, batch_size: int, segment: int) -> Tensor:
    """Draw token ids in the proportions of Zipf's law, in random order: int64 [B,T].

    How much an adaptive softmax takes depends on how many targets its clusters have. Proportions, not draws, so that
    it grows evenly with the length. Ids are ranks; half of all tokens are among the sqrt(V) most frequent ones.
    """
    n_token = batch_size * segment
    quantiles = (torch.randperm(n_token) + 0.5) / n_token
    return (vocab_size**quantiles).long().sub_(1).clamp_(0, vocab_size - 1).view(batch_size, segment)


@dataclass(frozen=True)
class Fit:
    """The longest segment that fits."""

    segment: int
    peak_bytes: int
    """Peak bytes of that segment."""
    budget_bytes: int
    measured: dict[int, int]
    """Peak bytes of every segment that was tried."""

    def to_dict(self) -> JsonObject:
        """Return everything, ready for JSON."""
        return asdict(self)


def with_segment(run: RunConfig, segment: int) -> RunConfig:
    """Return a copy with another backpropagation length, and no more positions than that where they are learned."""
    changed = RunConfig.from_dict(run.to_dict())
    changed.train.segment = segment
    changed.model = changed.model.for_segment(segment, changed.train.random_segments)
    if changed.model.context is not None:
        changed.eval.segment = min(changed.eval.segment, segment)
    return changed


def longest_segment(
    run: RunConfig,
    budget_bytes: int,
    vocab_size: int,
    device: str = "cpu",
    at_most: int = 1 << 14,
    on_measured: Callable[[int, int], None] | None = None,
) -> Fit:
    """Return the longest backpropagation length whose training peaks at no more than a budget.

    Lengths are doubled, then halved in between, which takes the peak to grow with the length.

    Args:
        run: everything but the segment.
        budget_bytes: what `peak_bytes` of another configuration gives, say.
        vocab_size: tokens of the vocabulary.
        device: where.
        at_most: no longer segment is tried.
        on_measured: sees each segment and its peak as they come.

    Raises:
        UserError: if not even one token fits, or the configuration breaks a rule.
    """
    measured: dict[int, int] = {}

    def fits(segment: int) -> bool:
        if segment not in measured:
            measured[segment] = peak_bytes(with_segment(run, segment), vocab_size, device)
            if on_measured is not None:
                on_measured(segment, measured[segment])
        return measured[segment] <= budget_bytes

    if not fits(1):
        raise UserError(
            f"{run.name} takes {measured[1]:,} bytes with segments of 1 token, more than the {budget_bytes:,} allowed; "
            f"use a smaller model or batch, or a larger reference"
        )
    low, high = 1, min(max(2, run.train.segment), at_most)  # low fits
    while high > low and fits(high):
        low, high = high, min(2 * high, at_most)
    while high - low > 1:  # high does not fit, or is the limit and does
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Fit(low, measured[low], budget_bytes, measured)
