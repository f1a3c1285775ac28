"""Training until validation stops improving, at the best of a few learning rates.

A learning rate is tuned once per recipe and used by all rows of the recipe: rows with the same family, number of
layers, kind of embeddings, initial weights, optimiser and learning rate, and for recurrent networks the same kind. The
first row of a recipe is trained with seed 1 at each rate, for a part of the steps. The rate with the lowest validation
loss and half of it are then trained to the end. Half of it is chosen if it ends better by `LEAST_GAIN`, and then half
of that is tried too.

`rates/RECIPE.json` stores the choice; `rates/RECIPE/ROW/RATE` holds the short runs and `RATE-whole` the others, which
resume after a stop. The chosen whole run becomes the row's run of seed 1. If the first row fails, the next one tunes
with runs of its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from txl.config import RunConfig, TrainConfig, TransformerXLConfig
from txl.errors import UserError
from txl.files import JsonObject, read_json, write_whole

# Least gain in nats per token for which half a rate is chosen. Tables share models only at the same rate, so a tiny
# gain must not change it. Seeds of one model differ by more, 0.01 to 0.06.
LEAST_GAIN = 0.005


@dataclass(frozen=True)
class UntilConverged:
    """Rules of training until convergence. The cap is the largest number of steps."""

    # Number of evaluations in a row without a new best after which training ends. If weights are averaged once
    # validation stops improving (AWD-LSTM), training waits for `average_patience` more evaluations.
    patience: int = 4
    # Number of evaluations in a row without a new best after which the learning rate is divided by four. With 1, noise
    # divided the rate of some models halfway through training: they ended 7% and 9% above the perplexity that they
    # reach with 2, other models 3% (Penn Treebank, one seed of four rows of `memory-depth`).
    plateau_patience: int = 2
    evaluations: int = 25  # number of evaluations up to the cap, at equal distances
    # Learning rates to try, relative to the recipe's. If the best is at an end, the next one beyond is tried too.
    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    furthest: float = 4.0  # largest factor that may be tried; the smallest is its reciprocal.
    # Share of the cap, at its end, over which the learning rate of a row that gets so far falls to zero. At the full
    # rate, noise would hide how good the model is: lowering the rate is worth 0.1 nats and more.
    decay_share: float = 0.25
    tuning_share: float = 0.2  # number of steps of a run that tries a learning rate, as a share of the cap
    # Number of times that the rate may be halved in runs to the end; 0: the short runs decide. Short runs favour high
    # rates: Table 1's large Transformer-XL is best at 2e-3 after 800 steps, and at 1e-3 after 4,000.
    halvings: int = 2


class Tried(TypedDict):
    """A learning rate that was tried."""

    factor: float
    learning_rate: float
    nll: float | None  # lowest validation loss, in nats per token; None: training diverged.
    tokens: int
    seconds: float


class Tuned(TypedDict):
    """The choice of a recipe's learning rate."""

    recipe: str
    table: str  # name of the table with the row that was tuned
    row: str
    steps: int  # number of steps of a short run
    tried: list[Tried]  # short runs, in ascending order of their rates
    whole: list[Tried]  # runs to the end, in the order in which they were made; empty if the rules have no halvings.
    factor: float
    at_edge: bool  # True if the chosen rate is the lowest or the highest that was tried


def recipe_of(run: RunConfig) -> str:
    """Return the name of a run's recipe; rows of one recipe share a tuned learning rate."""
    # A QRNN learns best at rates at which an LSTM learns nothing. The best rate also depends on depth, on the initial
    # weights and on whether rare words have narrower embeddings.
    model = run.model
    names = [getattr(model, model.choice) if model.constant_state else model.family, f"{model.n_layer}L"]
    if model.div_val > 1:
        names.append("adaptive")
    if model.first_weights != "normal":
        names.append(model.first_weights)
    return "-".join([*names, run.train.optimizer, f"{run.train.learning_rate:g}"])


def with_convergence(run: RunConfig, rules: UntilConverged) -> RunConfig:
    """Return a copy of a configuration that trains until convergence; its number of steps is the cap.

    The learning rate is divided by four when evaluations bring no new best, and falls to zero at the cap. A recipe that
    averages weights when validation stops improving keeps its own schedule. A Transformer-XL trains with the machine's
    fastest attention.
    """
    train = dataclasses.replace(run.train, eval_every=max(1, run.train.steps // rules.evaluations))
    if train.average_patience is None:
        train.schedule, train.decay_share = "plateau", rules.decay_share
        train.average_from, train.average_mu = None, None
        train.min_learning_rate, train.decay_at, train.average_lr_factor = 0.0, (), 1.0
        train.patience, train.plateau_patience = rules.patience, rules.plateau_patience
    else:
        train.patience = rules.patience + train.average_patience
    model = run.model
    if isinstance(model, TransformerXLConfig) and model.attention == "auto":
        model = dataclasses.replace(model, attention="fastest")
    return dataclasses.replace(run, model=model, train=train)


def at_rate(run: RunConfig, factor: float) -> RunConfig:
    """Return a copy of a configuration with its learning rates multiplied by a factor."""
    train = run.train
    changed = {name: getattr(train, name) * factor for name in ("learning_rate", "min_learning_rate")}
    return dataclasses.replace(run, train=dataclasses.replace(train, **changed))


def tuning_run(run: RunConfig, rules: UntilConverged, factor: float) -> RunConfig:
    """Return the shorter run that tries a learning rate for a configuration from `with_convergence`.

    The run makes all of its steps. The rate falls linearly to zero, so that all rates are compared after their decay. A
    recipe that has its own schedule keeps it.
    """
    run = at_rate(run, factor)
    steps = max(1, round(run.train.steps * rules.tuning_share))
    warmup = min(run.train.warmup_steps, steps // 2)
    train = dataclasses.replace(run.train, steps=steps, patience=None, warmup_steps=warmup)
    train.eval_every = min(train.eval_every, steps)
    if train.schedule == "plateau":
        train.schedule, train.decay_share, train.plateau_patience = "linear", TrainConfig().decay_share, 1
    return dataclasses.replace(run, name=f"{run.name}-rate", train=train)


def tune(
    table: str, row: str, run: RunConfig, rules: UntilConverged, folder: Path, fit: Callable[[RunConfig, Path], Tried]
) -> Tuned:
    """Return the tuned learning rate of the recipe of a row, stored in the folder, or else tuned now and stored.

    `run` is a configuration from `with_convergence`, with the recipe's learning rate and seed 1, and `fit` trains a run
    in a directory. If training diverges at every rate, this is a UserError.
    """
    recipe = recipe_of(run)
    path = folder / f"{recipe}.json"
    stored: Tuned | None = stored_json(path)
    if stored is not None:
        if not Tuned.__annotations__.keys() <= stored.keys():
            raise UserError(f"{path}: damaged (no learning rate); delete it to tune anew")
        return stored
    tried: dict[float, Tried] = {}
    waiting = list(rules.factors)
    while waiting:
        factor = waiting.pop(0)
        one = tuning_run(run, rules, factor)
        tried[factor] = fit(one, folder / recipe / row / f"{one.train.learning_rate:g}")
        tried[factor]["factor"] = factor
        if not waiting:
            best = _best(tried)
            further = {min(tried): best / 2, max(tried): best * 2}.get(best)
            if further is not None and 1 / rules.furthest <= further <= rules.furthest:
                waiting.append(further)
    best = _best(tried)
    whole: dict[float, Tried] = {}
    if tried[best]["nll"] is not None and rules.halvings:
        for factor in [best / 2**halving for halving in range(rules.halvings + 1)]:
            one = at_rate(run, factor)
            whole[factor] = fit(one, whole_run(folder, recipe, row, one))
            whole[factor]["factor"] = factor
            if factor != best and not _loss(whole[factor]) < _loss(whole[best]) - LEAST_GAIN:
                break
            best = factor
    if (whole or tried)[best]["nll"] is None:
        rates = ", ".join(f"{run['learning_rate']:g}" for run in (whole or tried).values())
        raise UserError(f"training diverges at every learning rate that was tried: {rates}")
    tuned = Tuned(
        recipe=recipe,
        table=table,
        row=row,
        steps=tuning_run(run, rules, 1.0).train.steps,
        tried=[tried[factor] for factor in sorted(tried)],
        whole=list(whole.values()),
        factor=best,
        at_edge=best in (min(tried | whole), max(tried | whole)),
    )
    write_json(path, dict(tuned), indent=1)
    return tuned


def whole_run(folder: Path, recipe: str, row: str, run: RunConfig) -> Path:
    """Return the directory in which a row's run to the end was made while its learning rate was tuned."""
    return folder / recipe / row / f"{run.train.learning_rate:g}-whole"


def _best(tried: dict[float, Tried]) -> float:
    """Return the factor with the lowest loss; if several have this loss, the smallest."""

    return min(sorted(tried), key=lambda factor: _loss(tried[factor]))


def _loss(tried: Tried) -> float:
    """Return the loss of a run that tried a learning rate, infinite if training diverged."""
    return math.inf if tried["nll"] is None else tried["nll"]


def write_json(path: Path, value: JsonObject, indent: int | None = None) -> None:
    """Write an object into a file, whose folder is created if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=indent) + "\n")


def stored_json(path: Path) -> Any:
    """Return the object in a JSON file; None if the file is missing."""
    try:
        stored = read_json(path, "delete it to measure anew")
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(stored, dict):
        raise UserError(f"{path}: damaged (no JSON object); delete it to measure anew")
    return stored
