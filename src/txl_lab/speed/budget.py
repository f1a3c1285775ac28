"""Measured peak memory of training, and the longest segment that fits into a memory budget (Table 10).

Table 10 compares models at the same memory budget, not at the same backpropagation length: without recurrence a segment
may be longer. The measurement makes whole training steps (forward, backward, clipping, optimiser) on artificial tokens
with full memory. On CUDA the result is the allocator's own peak. Elsewhere it is the bytes of all tensors alive at
once, counted operation by operation; this count is the same in every run, and excludes temporary buffers inside an
operation.

Shapes: B lanes, T tokens of a segment, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from txl.config import RunConfig, validate
from txl.devices import seed_generators
from txl.errors import UserError
from txl.files import JsonObject
from txl.training.compilation import model_to_train
from txl.training.estimate import LiveBytes, ranked_tokens
from txl.training.optimisers import build_optimizer
from txl.training.state import WeightAverage
from txl.training.step import StepInputs, training_step

# Number of steps to measure; the optimiser allocates its state in the first, so only the second has all tensors
STEPS = 2


def peak_bytes(run: RunConfig, vocab_size: int, device: str = "cpu") -> int:
    """Return the peak bytes of tensors during training, including weights and optimiser state.

    The states of the caller's random generators are preserved.
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
    model = model_to_train(run.model, vocab_size, device, train)
    optimizer = build_optimizer(model, train)
    average = WeightAverage(model, train.average_mu) if train.averages else None
    parts = train.micro_batches
    states = [model.init_state(train.batch_size // parts).filled_with_noise() for _ in range(parts)]
    for _ in range(STEPS):
        tokens = ranked_tokens(vocab_size, train.batch_size, train.segment * train.backprop_segments).to(device)
        if average is not None:
            average.prepare()
        inputs = StepInputs(tokens, tokens, states, lengths=train.step_lengths, average=average)
        states = training_step(model, optimizer, inputs, train).states


@dataclass(frozen=True)
class Fit:
    """The longest segment that fits into a memory budget."""

    segment: int
    peak_bytes: int  # peak bytes with this segment
    budget_bytes: int
    measured: dict[int, int]  # peak bytes by segment length, for every length that was tried

    def to_dict(self) -> JsonObject:
        """Return all fields as a dictionary for JSON."""
        return asdict(self)


def with_segment(run: RunConfig, segment: int) -> RunConfig:
    """Return a copy with another backpropagation length; positions, distances and evaluation segment are adapted."""
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
    """Return the longest backpropagation length whose peak memory is within a budget.

    The length is doubled, then found by bisection, on the assumption that the peak grows with the length.

    Raises:
        UserError: if not even a segment of one token fits, or the configuration breaks a rule.
    """
    measured: dict[int, int] = {}

    def fits(segment: int) -> bool:
        if segment not in measured:
            trial = with_segment(run, segment)
            trial.train.epoch_shift = 0  # takes no memory, and is refused beside some of the segments that are tried
            measured[segment] = peak_bytes(trial, vocab_size, device)
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
    while high - low > 1:  # high does not fit, unless low has reached the limit
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Fit(low, measured[low], budget_bytes, measured)
