"""Training until validation no longer improves, at the best of a few learning rates.

Rows of one recipe share their choice of a rate: the same family of models, first weights, optimiser and learning rate,
and of recurrent networks the same kind. The row of a recipe that comes first is trained for a part of the steps at each
rate, with seed 1, and the rate with the lowest validation loss is the recipe's. `rates/RECIPE.json` keeps it;
`rates/RECIPE/RATE` holds the runs, which go on after a stop.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from txl.config import RunConfig, TrainConfig, TransformerXLConfig
from txl.errors import UserError
from txl.files import write_whole
from txl.reproduction.folder import stored_json


@dataclass(frozen=True)
class UntilConverged:
    """Rules of such a training."""

    patience: int = 4
    """A row ends when so many evaluations in a row were no better than the best before them. One whose weights are
    averaged when validation stops improving (AWD-LSTM) waits for as many more as that takes."""
    evaluations: int = 25
    """Evaluations, at equal distances, up to the cap."""
    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Rates that are tried, relative to the recipe's own; one step further where the best lies at an end."""
    furthest: float = 4.0
    """The largest factor, and one over the smallest."""
    decay_share: float = 0.25
    """Part of the cap, at its end, over which the rate of a row that comes so far falls to zero. At its full rate it
    would be judged by its noise: lowering the rate is worth 0.1 nats and more."""
    tuning_share: float = 0.2
    """Steps of a run that tries a rate, relative to the cap."""


class Tried(TypedDict):
    """A learning rate that was tried."""

    factor: float
    learning_rate: float
    nll: float | None
    """Lowest validation loss, in nats a token; None: training diverged."""
    tokens: int
    seconds: float


class Tuned(TypedDict):
    """The choice of a recipe's learning rate."""

    recipe: str
    row: str
    steps: int
    tried: list[Tried]
    factor: float
    at_edge: bool
    """True if no rate beyond the chosen one was tried."""


def recipe_of(run: RunConfig) -> str:
    """Return the name of what rows have to share to share a learning rate."""
    # A QRNN learns best at rates at which an LSTM learns nothing. First weights move the best rate too.
    model = run.model
    names = [getattr(model, model.choice) if model.constant_state else model.family]
    if model.first_weights != "normal":
        names.append(model.first_weights)
    return "-".join([*names, run.train.optimizer, f"{run.train.learning_rate:g}"])


def with_convergence(run: RunConfig, rules: UntilConverged) -> RunConfig:
    """Return a configuration that trains until it has converged; its number of steps is the cap.

    The rate is divided by four whenever an evaluation is no better than the best before it, and falls to zero at the
    cap. A recipe that averages its weights when validation stops improving keeps its own schedule. A Transformer-XL
    trains with the machine's fastest attention.
    """
    train = dataclasses.replace(run.train, eval_every=max(1, run.train.steps // rules.evaluations))
    if train.average_patience is None:
        train.schedule, train.decay_share = "plateau", rules.decay_share
        train.average_from, train.average_mu = None, None
        train.min_learning_rate, train.decay_at, train.average_lr_factor = 0.0, (), 1.0
        train.patience = rules.patience
    else:
        train.patience = rules.patience + train.average_patience
    model = run.model
    if isinstance(model, TransformerXLConfig) and model.attention == "auto":
        model = dataclasses.replace(model, attention="fastest")
    return dataclasses.replace(run, model=model, train=train)


def at_rate(run: RunConfig, factor: float) -> RunConfig:
    """Return a configuration with another learning rate, relative to its own."""
    train = run.train
    changed = {name: getattr(train, name) * factor for name in ("learning_rate", "min_learning_rate")}
    return dataclasses.replace(run, train=dataclasses.replace(train, **changed))


def tuning_run(run: RunConfig, rules: UntilConverged, factor: float) -> RunConfig:
    """Return the shorter run that tries a rate for a configuration of `with_convergence`.

    It makes all of its steps, and the rate falls in a line to zero, so that every rate is judged at its end; a recipe
    with a schedule of its own keeps it.
    """
    run = at_rate(run, factor)
    steps = max(1, round(run.train.steps * rules.tuning_share))
    warmup = min(run.train.warmup_steps, steps // 2)
    train = dataclasses.replace(run.train, steps=steps, patience=None, warmup_steps=warmup)
    train.eval_every = min(train.eval_every, steps)
    if train.schedule == "plateau":
        train.schedule, train.decay_share = "linear", TrainConfig().decay_share
    return dataclasses.replace(run, name=f"{run.name}-rate", train=train)


def tune(
    row: str, run: RunConfig, rules: UntilConverged, folder: Path, fit: Callable[[RunConfig, Path], Tried]
) -> Tuned:
    """Return the learning rate of a row's recipe, tried now or found in the folder.

    Args:
        row: its key.
        run: of `with_convergence`, at the recipe's own rate, with seed 1.
        rules: which rates are tried, and for how long.
        folder: of all recipes' rates.
        fit: trains a run of `tuning_run` in a directory; its `factor` is set here.

    Raises:
        UserError: if training diverges at every rate.
        RunInterrupted: after Ctrl-C or SIGTERM.
    """
    recipe = recipe_of(run)
    path = folder / f"{recipe}.json"
    stored: Tuned | None = stored_json(path)
    if stored is not None:
        return stored
    tried: dict[float, Tried] = {}
    waiting = list(rules.factors)
    while waiting:
        factor = waiting.pop(0)
        one = tuning_run(run, rules, factor)
        tried[factor] = fit(one, folder / recipe / f"{one.train.learning_rate:g}")
        tried[factor]["factor"] = factor
        if not waiting:
            best = _best(tried)
            further = {min(tried): best / 2, max(tried): best * 2}.get(best)
            if further is not None and 1 / rules.furthest <= further <= rules.furthest:
                waiting.append(further)
    best = _best(tried)
    if tried[best]["nll"] is None:
        rates = ", ".join(f"{each['learning_rate']:g}" for each in tried.values())
        raise UserError(f"training diverges at every learning rate that was tried: {rates}")
    tuned = Tuned(
        recipe=recipe,
        row=row,
        steps=tuning_run(run, rules, 1.0).train.steps,
        tried=[tried[factor] for factor in sorted(tried)],
        factor=best,
        at_edge=best in (min(tried), max(tried)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(tuned, indent=1) + "\n")
    return tuned


def _best(tried: dict[float, Tried]) -> float:
    """Return the factor with the lowest loss; of equal ones the smallest."""

    def loss(factor: float) -> float:
        found = tried[factor]["nll"]
        return math.inf if found is None else found

    return min(sorted(tried), key=loss)
