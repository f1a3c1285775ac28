"""Plan of a table, before anything is trained: models, parameters, steps, tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from txl.config import DataConfig
from txl.data.corpora import vocabulary_size
from txl.errors import UserError
from txl.files import JsonObject
from txl.presets import presets
from txl.reporting.wording import counted
from txl_lab.paper.configuring import NotTrained, configure, estimated_segment
from txl_lab.paper.measurements import Speed
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import Definition, Row


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

    def to_dict(self) -> JsonObject:
        """Return all fields, ready for JSON."""
        return asdict(self)


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
