"""Page of a table: the paper's numbers, ours, the scale, the claims and figures, in HTML and as JSON."""

from __future__ import annotations

import base64
import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from txl.config import RunConfig, model_from_dict
from txl.files import JsonObject, write_whole
from txl.reporting.wording import counted, short_name
from txl.units import duration_text
from txl_lab.paper.measurements import Speed
from txl_lab.paper.outcome import (
    cells,
    distances_text,
    group_distances,
    named_seeds,
    recorded_seeds,
    repeats_text,
    tuned_rates,
)
from txl_lab.paper.parts import escape, figure, note, page, pairs, section, table
from txl_lab.paper.schema import FITTED, Outcome, Row, RowResult

# Most columns of one table with the paper's numbers and ours; with more columns there is a table for each
_COLUMNS = 6


def write_outcome(outcome: Outcome, out: Path, command: Sequence[str], circumstances: JsonObject) -> JsonObject:
    """Write NAME.json and NAME.html into a folder.

    Returns:
        Contents of the JSON file.
    """
    record = outcome_record(outcome, command, circumstances)
    name = outcome.definition.name
    write_whole(out / f"{name}.json", json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    write_whole(out / f"{name}.html", outcome_page(outcome, out, command, circumstances))
    return record


def outcome_record(outcome: Outcome, command: Sequence[str], circumstances: JsonObject) -> JsonObject:
    """Return the contents of the page, ready for JSON."""
    definition = outcome.definition
    return {
        "what": definition.name,
        "title": definition.title,
        "paper": {"corpus": definition.corpus, "metric": definition.metric},
        "scale": outcome.scale.to_dict(),
        "corpus": outcome.corpus,
        "unit": outcome.unit,
        "seeds": outcome.seeds,
        "claims": [
            {
                "claim": claim.key,
                "text": claim.text,
                "paper": claim.paper,
                "outcome": verdict.outcome,
                "reason": verdict.reason,
            }
            for claim, verdict in outcome.verdicts()
        ],
        "rows": [
            {
                "row": result.row.key,
                "model": result.row.name,
                "paper": result.row.paper,
                "status": result.status,
                "reason": result.reason,
                "shown": dict(zip(definition.measurement.headings(outcome), cells(outcome, result), strict=True)),
                "parameters": result.parameters,
                "config": result.config,
                "values": outcome.values[result.row.key],
                "loss_by_length": {
                    str(length): nll for length, nll in sorted(outcome.curves.get(result.row.key, {}).items())
                },
                "seeds": {str(seed): _without_losses(measured) for seed, measured in sorted(result.by_seed.items())},
            }
            for result in outcome.rows
        ],
        "gains": [
            {
                "group": gains.group,
                "seed": gains.seed,
                "row": name,
                "gains": [{"short": short, "long": long, "gain": gain} for (short, long), gain in by_pair.items()],
            }
            for gains in outcome.gains
            for name, by_pair in gains.gains.items()
        ],
        "group_distances": group_distances(outcome),
        "command": list(command),
        **circumstances,
    }


def _without_losses(measured: JsonObject) -> JsonObject:
    """Return a measurement without configuration and losses of single targets, with None for NaN and infinity."""
    kept = {name: value for name, value in measured.items() if name not in ("losses", "config", "effective context")}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in kept.items()
    }


def outcome_page(outcome: Outcome, out: Path, command: Sequence[str], circumstances: JsonObject) -> str:
    """Return the page as HTML.

    Args:
        outcome: outcome of the table.
        out: folder of the page; holds the files of figures to show.
        command: words of the command that made the page.
        circumstances: hardware and software.
    """
    definition = outcome.definition
    body = [
        _header(outcome),
        _claims(outcome),
        _comparison(outcome),
        *(section(heading, figure(drawn, text)) for heading, drawn, text in definition.measurement.figures(outcome)),
        *_pictures(outcome, out),
        _made(outcome),
        _budget(outcome),
        _circumstances(outcome, command, circumstances),
    ]
    return page(f"{definition.title}, scale {outcome.scale.name}", [part for part in body if part])


def _header(outcome: Outcome) -> str:
    definition, scale = outcome.definition, outcome.scale
    is_speed = isinstance(definition.measurement, Speed)
    read = "random" if is_speed else f"{short_name(outcome.corpus)} in {outcome.unit}"
    text = f"{read} tokens, {repeats_text(outcome)}"
    words = f"The paper: {definition.corpus}, {definition.metric}. Here: scale {scale.name} ({scale.about}), {text}."
    state = ""
    if (
        definition.measurement.has_numbers
        and not is_speed
        and not definition.is_open_question
        and not outcome.compares_with_paper
    ):
        state = note("The paper's numbers and ours are not comparable; compare the order of the models.", "warning")
    failed = "".join(note(f"{result.row.key} failed: {result.reason}", "warning") for result in outcome.failed)
    return f"<header><h1>{escape(definition.title)}</h1><p>{escape(words)}</p>{state}{failed}</header>"


def _claims(outcome: Outcome) -> str:
    judged = outcome.verdicts()
    if not judged:
        return section("Claims", note("None of the paper’s claims C1 to C7 rests on this."))
    rows = [[claim.key, claim.text, claim.paper, verdict.outcome, verdict.reason] for claim, verdict in judged]
    return section(
        "Claims",
        table("Claims that this table tests", ("claim", "here", "the paper", "outcome", "why"), rows),
        note(
            "A difference counts where it exceeds half the width of a 95% confidence interval over the seeds "
            "(Student’s t, pooled variance), written as ±; two lengths differ only if a length between them "
            "was tried. "
            "What is judged is the direction, not the paper’s amount."
        ),
    )


def _comparison(outcome: Outcome) -> str:
    definition = outcome.definition
    if not definition.measurement.has_numbers:
        return section("The paper", note(definition.caption, "lead"), *(note(text) for text in definition.notes))
    wide = len(definition.columns) + len(definition.measurement.headings(outcome)) > _COLUMNS
    missing = [result for result in outcome.rows if result.status == "not at this scale"]
    return section(
        "Results" if definition.is_open_question else "The paper’s numbers and ours",
        note(definition.caption, "lead"),
        *([_paper(outcome), _ours(outcome)] if wide else [_side_by_side(outcome)]),
        *(note(text) for text in definition.notes),
        *(note(f"{text[0].upper()}{text[1:]}.") for text in distances_text(outcome)),
        *(note(f"{result.row.key}, {result.status}: {result.reason}.") for result in missing),
    )


def _side_by_side(outcome: Outcome) -> str:
    columns, ours = outcome.definition.columns, outcome.definition.measurement.headings(outcome)
    rows = [
        [_name(result.row), *(result.row.paper.get(column, "-") for column in columns), *cells(outcome, result)]
        for result in outcome.rows
    ]
    heads = ["model", *(f"paper’s {column}" for column in columns), *ours[:-1], ""]
    return table(_caption(outcome), heads, rows, range(1, len(heads) - 1), _trained(outcome, outcome.rows))


def _paper(outcome: Outcome) -> str:
    columns = outcome.definition.columns
    rows = [[_name(result.row), *(result.row.paper.get(column, "-") for column in columns)] for result in outcome.rows]
    numbers = [at for at, column in enumerate(columns, 1) if column not in ("Recurrence", "Encoding", "Loss")]
    return table(f"The paper: {outcome.definition.metric}", ("model", *columns), rows, numbers)


def _ours(outcome: Outcome) -> str:
    shown = [result for result in outcome.rows if result.row.trained]
    rows = [[_name(result.row), *cells(outcome, result)] for result in shown]
    heads = ["model", *outcome.definition.measurement.headings(outcome)[:-1], ""]
    return table(_caption(outcome), heads, rows, range(1, len(heads) - 1), _trained(outcome, shown))


def _name(row: Row) -> str:
    return row.name if row.name not in ("", "-") else row.key


def _caption(outcome: Outcome) -> str:
    repeats = repeats_text(outcome)
    return f"Here: {repeats}" if outcome.seeds == 1 else f"Here: mean ± standard deviation over {repeats}"


def _trained(outcome: Outcome, shown: Sequence[RowResult]) -> list[int]:
    return [at for at, result in enumerate(shown) if result.by_seed]


def _pictures(outcome: Outcome, out: Path) -> list[str]:
    """Return the section with the figures that were made with the model of each seed."""
    definition = outcome.definition
    parts = []
    for result in outcome.rows:
        for seed, measured in sorted(result.by_seed.items()):
            for name in measured.get("files", ()):
                if not definition.pictures or not Path(name).match(definition.pictures):
                    continue
                data = base64.b64encode((out / name).read_bytes()).decode()
                image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(definition.title)}">'
                caption = f"<figcaption>{escape(f'Seed {seed}: {Path(name).name}')}</figcaption>"
                parts.append(f"<figure>{image}{caption}</figure>")
    return [section("Here", *parts)] if parts else []


def _made(outcome: Outcome) -> str:
    """Return the section with links to the files that were made with the models."""
    links = [
        f'<li><a href="{escape(quote(name))}">{escape(name)}</a></li>'
        for result in outcome.rows
        for measured in result.by_seed.values()
        for name in measured.get("files", ())
    ]
    return section("What was made", f"<ul>{''.join(links)}</ul>") if links else ""


def _convergence(outcome: Outcome) -> list[str]:
    """Return notes on the rules of training until convergence and on the learning rates that were tried."""
    rules = outcome.scale.until_converged
    if rules is None:
        return []
    lines = [
        f"A row trains until {rules.patience} evaluations in a row are no better than the best before them; its "
        f"learning rate is divided by four after {counted(rules.plateau_patience, 'such evaluation')}, and falls to "
        f"zero over the last {rules.decay_share:.0%} of the cap. A row that averages its weights when validation stops "
        f"improving keeps the schedule of its recipe. Learning rates are tried on the validation split with seed 1, in "
        f"runs of {rules.tuning_share:.0%} of the cap whose rate falls to zero"
        + ("; the best of them and half of it are then tried in runs to the end." if rules.halvings else ".")
    ]
    return [note(each) for each in [*lines, *(f"Learning rate of {each}." for each in tuned_rates(outcome))]]


def _budget(outcome: Outcome) -> str:
    measured = [result for result in outcome.rows if result.config is not None and result.by_seed]
    trained = [result for result in measured if result.row.cache_over is None]
    if not trained:
        return ""
    rows = []
    for result in trained:
        assert result.config is not None
        run = RunConfig.from_dict(result.config)
        train, model = run.train, run.model
        every = list(result.by_seed.values())
        here = [measured for measured in every if "recorded" not in measured] or every
        seconds = statistics.fmean(measured.get("training_seconds", 0.0) for measured in here)
        steps = round(statistics.fmean(measured.get("steps", train.steps) for measured in every))
        rows.append(
            [
                result.row.key,
                "-" if result.parameters is None else f"{result.parameters:,}",
                f"{steps:,}" + (" (the cap)" if result.hit_cap else ""),
                f"{train.batch_size} × {train.segment}"
                + (f" × {train.backprop_segments}" if train.backprop_segments > 1 else ""),
                f"{model.mem_len:,}",
                f"{steps * train.tokens_per_step:,}",
                duration_text(seconds),
            ]
        )
    heads = ("row", "parameters", "steps", "lanes × segment", "memory", "tokens", "training time, mean")
    changed = [(result.row.key, _changed(result, outcome.scale.is_published)) for result in measured]
    return section(
        "Budgets",
        table("Training of each model, with one seed", heads, rows, range(1, 7)),
        *_convergence(outcome),
        pairs("What makes a row", changed),
    )


def _changed(result: RowResult, published: bool) -> str:
    """Return in words the differences between a row's model and the scale's, or the published preset."""
    row = result.row
    if row.cache_over is not None:
        return f"the models of {row.cache_over}, with a continuous cache tuned on the validation split"
    assert result.config is not None
    names = [] if published else list(row.overrides or {})
    words = [f"the preset {row.preset}"] if published else []
    if not published:
        words += [f"{factor:.3g} times the {name}" for name, factor in asdict(row.shape).items() if factor != 1]
        names += [] if row.fit is None else [FITTED]
        names += ["model.cutoffs", "model.div_val"] if row.adaptive else []
    for name in names:
        part, _, field = name.partition(".")
        section = result.config[part]  # a model without memory stores no mem_len
        words.append(f"{name} {section[field] if field in section else getattr(model_from_dict(section), field)}")
    return "; ".join(words) or "the scale’s model"


def _circumstances(outcome: Outcome, command: Sequence[str], circumstances: JsonObject) -> str:
    hardware, software = circumstances["hardware"], circumstances["software"]
    rows = [
        ("processor", f"{hardware['cpu']} ({hardware['cores']} cores)"),
        ("device", hardware.get("gpu", hardware["device"])),
        *((name, str(version)) for name, version in software.items()),
        ("command", shlex.join(command)),
    ]
    recorded = [
        note(
            f"Measured before, and taken from a record: {named_seeds(seeds)}, {origin['hardware']['cpu']} "
            f"({origin['dtype'] or 'float32'}), {shlex.join(origin['command'])}"
        )
        for origin, seeds in recorded_seeds(each for result in outcome.rows for each in result.by_seed.items())
    ]
    return section(
        "Where and how",
        pairs("Environment of the last command", rows),
        *recorded,
        note(f"Everything on this page, and more, is in `{outcome.definition.name}.json` beside it."),
    )
