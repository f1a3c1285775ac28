"""The two workloads of speed measurements: a training step, and evaluation in segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import NamedTuple

import torch

from txl.config import RunConfig
from txl.evaluation.recorded import WARM
from txl.evaluation.stream import nll_step
from txl.files import JsonObject
from txl.models import build_model
from txl.models.family import FamilyModel
from txl.models.language_model import State
from txl.models.loss import Objective
from txl.training.timing import seconds_of, timed, training_workload
from txl_lab.speed import transformer_xl_of
from txl_lab.speed.budget import peak_bytes
from txl_lab.speed.operations import forward_operations, matmul_rate, training_operations


@dataclass(frozen=True)
class Speed:
    """Speed of a workload, with the machine's rate of matrix multiplication to compare with."""

    workload: str
    dtype: str
    batch_size: int
    segment: int
    mem_len: int
    step_seconds: float  # median time of the timed steps
    tokens_per_second: float
    operations_per_step: int
    # Operations per second of a 2048 x 2048 matrix product in the same dtype: mean of the rates before and after
    matmul_rate: float
    attention: str
    compiled: bool = False  # True if `torch.compile` compiled the layers

    @property
    def fraction(self) -> float:
        """Operations per second of the workload, divided by `matmul_rate`."""
        return self.operations_per_step / self.step_seconds / self.matmul_rate

    def to_dict(self) -> JsonObject:
        """Return all figures, ready for JSON."""
        return asdict(self) | {"fraction_of_matmul_rate": self.fraction}


class Beside(NamedTuple):
    """Median seconds of two steps that were timed alternately, and the median ratio of the first to the second."""

    ours: float
    theirs: float
    ratio: float


def timed_alternately(
    often: Callable[[], None], seldom: Callable[[], None], steps: int, device: str
) -> tuple[float, float]:
    """Return the median seconds of two steps, timed in rounds: the first step four times, then the second once.

    The first round does not count. The steps alternate, because the speed of a shared machine varies from second to
    second.
    """
    rounds = [([seconds_of(often, device) for _ in range(4)], seconds_of(seldom, device)) for _ in range(steps + 1)][1:]
    frequent = [seconds for of_often, _ in rounds for seconds in of_often]
    return median(frequent), median(of_seldom for _, of_seldom in rounds)


def timed_in_pairs(first: Callable[[], None], second: Callable[[], None], pairs: int, device: str) -> Beside:
    """Time two steps alternately; the first pair does not count.

    The ratio is the median over pairs, because a change in the machine's load affects both steps of most pairs.
    """
    found = [(seconds_of(first, device), seconds_of(second, device)) for _ in range(pairs + 1)][1:]
    ours, theirs = (median(seconds) for seconds in zip(*found, strict=True))
    return Beside(ours, theirs, median(one / other for one, other in found))


def bench_training(run: RunConfig, vocab_size: int, steps: int, device: str) -> Speed:
    """Time training steps on random tokens, and measure the machine's rate of matrix multiplication."""
    train, dtype, model_shape = run.train, run.train.dtype, transformer_xl_of(run)
    model, step = training_workload(run, vocab_size, device)
    memory = model.init_state(1).filled_with_noise().length
    # R is projected again for each micro-batch. Of several segments, all but the first have gradients in their memory.
    part, scored = (
        (train.batch_size // train.micro_batches, train.segment),
        Objective(train.loss).counted(train.segment),
    )
    operations = train.micro_batches * sum(
        training_operations(model_shape, vocab_size, *part, memory, run.model.window, scored=scored, learned=learned)
        for learned in (min(memory, number * train.segment) for number in range(train.backprop_segments))
    )
    rate = matmul_rate(getattr(torch, dtype), device)
    seconds = timed(step, steps, device)
    rate = (rate + matmul_rate(getattr(torch, dtype), device)) / 2
    tokens_per_second = train.tokens_per_step / seconds
    name, shape = model.attention_name, (train.batch_size, train.segment)
    return Speed(
        "training step", dtype, *shape, memory, seconds, tokens_per_second, operations, rate, name, train.compile
    )


def reading_workload(run: RunConfig, vocab_size: int, device: str) -> tuple[FamilyModel, State, Callable[[], None]]:
    """Return a new model, a full memory, and a function that reads random tokens with the run's test settings."""
    torch.manual_seed(0)
    settings = run.eval
    model = build_model(run.model, vocab_size).to(device).eval()
    clamp_len = "none" if settings.clamp_len is None else settings.clamp_len
    state = model.init_state(settings.batch_size, settings.mem_len, settings.window or "none", clamp_len)
    first = state = state.filled_with_noise()
    read, shape = nll_step(model, 1.0), (settings.batch_size, settings.segment)
    counted = torch.ones(shape, dtype=torch.bool, device=device)

    def step() -> None:
        nonlocal state
        tokens = torch.randint(vocab_size, shape, device=device)
        _, state = read(tokens, tokens, state, counted)

    return model, first, step


def bench_evaluation(run: RunConfig, vocab_size: int, steps: int, device: str, dtype: str) -> Speed:
    """Time evaluation in segments of random tokens with the run's test settings; memory is full from the start."""
    settings, model_shape = run.eval, transformer_xl_of(run)
    model, state, step = reading_workload(run, vocab_size, device)
    shape, memory = (settings.batch_size, settings.segment), state.length or 0
    operations = forward_operations(model_shape, vocab_size, *shape, memory, settings.window, frozen=True)
    rate = matmul_rate(getattr(torch, dtype), device)
    # Entered once for all steps, as in an evaluation: autocast then converts the weights once.
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        for _ in range(WARM + 1 if device.startswith("cuda") else 0):  # after which the step is recorded
            step()
        seconds = timed(step, steps, device)
    rate = (rate + matmul_rate(getattr(torch, dtype), device)) / 2
    tokens_per_second = settings.batch_size * settings.segment / seconds
    return Speed(
        "evaluation", dtype, *shape, memory, seconds, tokens_per_second, operations, rate, model.attention_name
    )


def measure_cost(run: RunConfig, peer: RunConfig, vocab_size: int, pairs: int, device: str) -> JsonObject:
    """Return training time per token, training memory and reading time per token, relative to another configuration.

    Steps of both configurations are timed alternately, in `pairs` pairs. The states of the caller's random generators
    are preserved.
    """
    both = run, peer
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        train, other = (training_workload(config, vocab_size, device)[1] for config in both)
        training = timed_in_pairs(train, other, pairs, device)
        read, other = (reading_workload(config, vocab_size, device)[2] for config in both)
        with torch.no_grad():
            reading = timed_in_pairs(read, other, pairs, device)
    bytes_of = [peak_bytes(config, vocab_size, device) for config in both]
    return {
        **_a_token("time", training, [config.train.tokens_per_step for config in both]),
        **_a_token("reading", reading, [config.eval.batch_size * config.eval.segment for config in both]),
        "memory": bytes_of[0] / bytes_of[1],
        "memory, bytes": bytes_of[0],
    }


def _a_token(name: str, timed: Beside, tokens: Sequence[int]) -> JsonObject:
    return {
        name: timed.ratio * tokens[1] / tokens[0],
        f"{name}, seconds a token": timed.ours / tokens[0],
        f"{name}, seconds a token beside": timed.theirs / tokens[1],
    }
