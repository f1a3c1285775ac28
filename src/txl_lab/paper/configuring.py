"""Configuration of a row at a scale, or the reason why the row is not trained; and the plan of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from txl.config import DataConfig, RunConfig, model_with, validate, with_options
from txl.data.corpora import vocabulary_size
from txl.errors import UserError
from txl.presets import preset, presets
from txl.reporting.wording import counted
from txl.training.estimate import estimate
from txl_lab.paper.converging import with_convergence
from txl_lab.paper.measurements import Speed
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import FITTED, Definition, Row
from txl_lab.speed.budget import with_segment

_LARGEST_WIDTH = 1 << 14
_CLOSE = 0.1  # largest relative difference in parameters between rows whose numbers of parameters are to match

# Function from two configurations and a vocabulary size to the longest segment with which the first configuration
# trains in no more memory than the second one
FitSegment = Callable[[RunConfig, RunConfig, int], int]


class NotTrained(Exception):
    """Exception for a row that is listed but not trained, with the status of the row (`RowResult`) and the reason."""

    def __init__(self, status: Literal["published only", "not at this scale"], reason: str):
        super().__init__(reason)
        self.status: Literal["published only", "not at this scale"] = status


def configure(
    definition: Definition, row: Row, scale: Scale, data: DataConfig, vocab_size: int, fit_segment: FitSegment
) -> RunConfig:
    """Return the configuration of a row at a scale, with seed 1; `NotTrained` if it has none.

    `fit_segment` finds the segment of a row with `equal_memory_with`.
    """
    if not row.trained:
        raise NotTrained("published only", "")
    if scale.is_published and row.preset is None:
        raise NotTrained("not at this scale", "there is no published preset of it")
    run = _varied(definition, row, scale, data, vocab_size)
    run.name = f"{definition.experiment_name}-{row.key}"
    if row.fit is not None and not scale.is_published:
        other = _varied(definition, definition.row(row.fit), scale, data, vocab_size)
        run = fitted(run, FITTED, vocab_size, other.model.parameter_count(vocab_size))
    if row.equal_memory_with is not None:
        other = configure(definition, definition.row(row.equal_memory_with), scale, data, vocab_size, fit_segment)
        # Both as they are trained: an average of weights or another attention would take other memory.
        run = with_equal_tokens(run, fit_segment(_as_trained(run, scale), other, vocab_size))
    run = _as_trained(run, scale)
    if not scale.is_published and definition.measurement.tests_as_trained:
        reach = run.model.mem_len + run.train.segment - 1
        run.eval = dataclasses.replace(run.eval, mem_len=reach, window=reach)
    if run.model.mem_len == 0:
        run.model = model_with(run.model, {"window": None})
        run.eval = dataclasses.replace(
            run.eval, mem_len=0, window=None, clamp_len=None, segment=min(run.eval.segment, run.train.segment)
        )
    validate(run)
    return run


def _as_trained(run: RunConfig, scale: Scale) -> RunConfig:
    return run if scale.until_converged is None else with_convergence(run, scale.until_converged)


def _varied(definition: Definition, row: Row, scale: Scale, data: DataConfig, vocab_size: int) -> RunConfig:
    """Return the scale's configuration, or the published one, with the row's shape and overrides."""
    if scale.is_published:
        assert row.preset is not None
        run = preset(row.preset)
    else:
        run = scale.base(definition.unit, definition.separate_sentences)
        widths = {name: getattr(run.model, name) for name in ("d_model", "d_head", "d_inner")}
        widths = {name: 2 * max(1, round(width * row.shape.width / 2)) for name, width in widths.items()}
        lengths = {"mem_len": round(run.model.mem_len * row.shape.memory)} if row.shape.memory != 1 else {}
        n_layer = max(1, round(run.model.n_layer * row.shape.depth))
        run.model = dataclasses.replace(run.model, n_layer=n_layer, **widths, **lengths)
        run.train.batch_size //= row.lanes_over
        if definition.unit == "word" and row.adaptive:
            run.model.cutoffs, run.model.div_val = (vocab_size // 8, vocab_size // 2), 4
        elif definition.unit == "word" and vocab_size >= 8000:
            run.model.cutoffs = (vocab_size // 10, vocab_size // 3)
    longest = max(run.train.segment, scale.longest_context, *scale.attention_lengths_of(run))
    if not scale.is_published:
        run = with_options(run, row.options(run.train.segment, run.model.mem_len, longest), drop=True)
    run.data = dataclasses.replace(data)
    if scale.dtype is not None:
        run.train.dtype = scale.dtype
    return run


def fitted(run: RunConfig, field: str, vocab_size: int, target: int) -> RunConfig:
    """Return the configuration whose width `field` is even and gives the number of parameters nearest to `target`."""

    def at(width: int) -> tuple[RunConfig, int]:
        candidate = with_options(run, {field: str(width)})
        return candidate, candidate.model.parameter_count(vocab_size)

    low, high = 1, _LARGEST_WIDTH // 2
    while low < high:  # find the narrowest with `target` parameters or more
        middle = (low + high) // 2
        low, high = (low, middle) if at(2 * middle)[1] >= target else (middle + 1, high)
    candidates = [at(2 * width) for width in (low - 1, low) if width > 0]
    nearest, found = min(candidates, key=lambda candidate: abs(candidate[1] - target))
    if abs(found - target) > _CLOSE * target:
        raise UserError(f"{run.name}: no {field} gives about {target:,} parameters; the nearest has {found:,}")
    return nearest


def with_equal_tokens(run: RunConfig, segment: int) -> RunConfig:
    """Return the configuration with another segment, and the number of steps that keeps the tokens nearly equal."""
    changed = with_segment(run, segment)
    before, train = run.train, changed.train
    train.steps = max(1, round(before.steps * before.segment / segment))
    if before.average_from is not None:
        train.average_from = round(before.average_from * before.segment / segment)
    return changed


def estimated_segment(run: RunConfig, other: RunConfig, vocab_size: int) -> int:
    """Return the longest segment of equal memory by `txl.training.estimate`, without a measurement."""

    def bytes_over(segment: int) -> float:
        return estimate(with_segment(run, segment), vocab_size).total_bytes - budget

    budget = estimate(other, vocab_size).total_bytes
    low, high = run.train.segment, 8 * run.train.segment + 1
    below, above = bytes_over(low), bytes_over(high)
    # An estimate takes seconds, and memory is nearly a line over the segment: the place where the line meets the budget
    # comes next. The weight of the end that stays is halved, so that both ends move (the Illinois rule).
    while high - low > 1 and below < 0:
        met = low + round((high - low) * -below / (above - below)) if above > 0 else high
        segment = min(max(met, low + 1), high - 1)
        over = bytes_over(segment)
        if over <= 0:
            low, below, above = segment, over, above / 2
        else:
            high, above, below = segment, over, below / 2
    return low


@dataclass(frozen=True)
class PlannedRow:
    """A row of a plan."""

    key: str
    name: str
    status: str  # one of "to train", "to measure", "published only", "not at this scale", "failed"
    reason: str = ""
    preset: str | None = None
    parameters: int | None = None
    steps: int | None = None
    tokens: int | None = None  # training tokens of one seed


def plan(definition: Definition, scale: Scale, data: DataConfig, data_dir: str | None, quiet: bool) -> list[PlannedRow]:
    """Return the plan of every row at a scale; open the corpus only if the size of its vocabulary is not known."""
    if isinstance(definition.measurement, Speed):
        return [
            PlannedRow(row.key, f"attention length {scale.speed_length(row.length):,}", "to measure", preset=row.preset)
            for row in definition.rows
        ]
    published = scale.is_published and data.corpus == definition.corpus
    size = None if published else vocabulary_size(data, data_dir, quiet)
    return [_planned(definition, row, scale, data, size) for row in definition.rows]


def _planned(definition: Definition, row: Row, scale: Scale, data: DataConfig, size: int | None) -> PlannedRow:
    if size is None:
        size = presets()[row.preset].vocab_size if row.preset in presets() else 1
    try:
        run = configure(definition, row, scale, data, size, estimated_segment)
    except NotTrained as why:
        return PlannedRow(row.key, row.name, why.status, str(why))
    except UserError as error:
        return PlannedRow(row.key, row.name, "failed", str(error))
    if row.cache_over is not None:
        return PlannedRow(row.key, row.name, "to measure", f"a cache over {row.cache_over}")
    train = run.train
    return PlannedRow(
        row.key,
        row.name,
        "to train",
        f"segments of about {train.segment}, measured when it runs" if row.equal_memory_with is not None else "",
        preset=row.preset if scale.is_published else None,
        parameters=run.model.parameter_count(size),
        steps=train.steps,
        tokens=train.steps * train.tokens_per_step,
    )


def plan_lines(planned: list[PlannedRow], seeds: int) -> list[str]:
    """Return the lines of the plan as a table in Markdown, with totals below the table."""
    lines = ["| row | model | preset | parameters | steps | tokens a seed | |", "|---|---|---|---:|---:|---:|---|"]
    for row in planned:
        counts = (row.parameters, row.steps, row.tokens)
        numbers = " | ".join("-" if count is None else f"{count:,}" for count in counts)
        reason = f"{row.status}: {row.reason}" if row.reason else row.status
        lines.append(f"| {row.key} | {row.name} | {row.preset or '-'} | {numbers} | {reason} |")
    total = seeds * sum(row.tokens or 0 for row in planned)
    trained = seeds * sum(row.tokens is not None for row in planned)
    return [*lines, "", f"{counted(trained, 'run')} over {counted(seeds, 'seed')}, {total:,} tokens in all"]
