"""Time of training steps of real shapes, on random tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from txl.config import RunConfig
from txl.devices import float32_products
from txl.errors import UserError
from txl.models.family import FamilyModel
from txl.training.compilation import WARM, CapturedStep, check_trainable, compile_layers, model_to_train
from txl.training.optimisers import build_optimizer
from txl.training.parallel import TrainedModel
from txl.training.step import StepInputs, training_step

# Least time in seconds, and least number of steps, for which `median_seconds` times. On an H200, the choice of
# `--minutes` among 13 configurations took 42 s with a second for each.
_SECONDS, _SECONDS_ON_GPU, _STEPS = 1.0, 0.2, 3


def timed(step: Callable[[], None], steps: int, device: str) -> float:
    """Return the median time of a step in seconds; the first two steps do not count."""
    return median([seconds_of(step, device) for _ in range(steps + 2)][2:])


def median_seconds(step: Callable[[], None], device: str, longest: float) -> float:
    """Return the median time of a step in seconds; if the first takes longer than `longest`, no other is timed."""
    steps = [seconds_of(step, device)]
    if steps[0] < longest:
        seconds_of(step, device)
        steps = [seconds_of(step, device) for _ in range(_STEPS)]
        least = _SECONDS_ON_GPU if device.startswith("cuda") else _SECONDS
        while sum(steps) < least:
            steps.append(seconds_of(step, device))
    return median(steps)


def seconds_of(step: Callable[[], None], device: str) -> float:
    """Return the time of one step in seconds, including its work on the device."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    """Wait until a GPU has finished all work that was launched; on a CPU do nothing."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def training_workload(
    run: RunConfig, vocab_size: int, device: str, *, must_compile: bool = True, longest: float = math.inf
) -> tuple[FamilyModel, Callable[[], None]]:
    """Return a new model, and a function that makes a training step (forward, backward, clipping, optimiser).

    Tokens are random, and memory is full from the start. On a GPU the first steps are made here: in them kernels are
    compiled, libraries initialise themselves, and with `train.capture` the step is recorded. If the second takes longer
    than `longest` seconds, it is the last one, and no step is recorded.

    Raises:
        UserError: if the device or the model cannot be trained in this way, or with `must_compile` if `train.compile`
            finds no working compiler. Without it the layers then run eagerly, as in training.
    """
    train = run.train
    check_trainable(run, device)
    torch.manual_seed(0)
    model = model_to_train(run.model, vocab_size, device, train)
    if train.compile and (reason := compile_layers(model, device)) is not None and must_compile:
        problem = f"there is no working compiler here ({reason})"
        raise UserError(problem, field="train.compile", remedy="install one, or leave it out")
    optimizer = build_optimizer(model, train)
    shape = train.batch_size, train.segment * train.backprop_segments
    take_step = CapturedStep() if train.capture else training_step
    trained = TrainedModel(model)
    lanes = train.batch_size // train.micro_batches
    states = [model.init_state(lanes).filled_with_noise() for _ in range(train.micro_batches)]

    def step() -> None:
        nonlocal states
        tokens = torch.randint(vocab_size, shape, device=device)
        with float32_products(train.tf32):
            inputs = StepInputs(tokens, tokens, states, lengths=train.step_lengths)
            states = take_step(trained, optimizer, inputs, train).states

    for number in range(0 if device == "cpu" else WARM + 1):  # the last one records the step, and replays it
        if seconds_of(step, device) > longest and number == 1:
            break
    return model, step
