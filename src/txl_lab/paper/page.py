"""Page of a table: the paper's numbers, ours, the scale, the claims and figures, in HTML and as JSON."""

from __future__ import annotations

import base64
import json
import math
import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup
from markupsafe import escape as escaped

from txl.config import RunConfig, model_from_dict
from txl.files import JsonObject, write_whole
from txl.reporting.page import code, macros, render
from txl.reporting.wording import counted, plain, short_name
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
from txl_lab.paper.schema import FITTED, Outcome, RowResult

# Most columns of one table with the paper's numbers and ours; with more columns there is a table for each.
_COLUMNS = 6


def write_outcome(outcome: Outcome, out: Path, command: Sequence[str], circumstances: JsonObject) -> JsonObject:
    """Write NAME.json and NAME.html into a folder, and return the contents of the JSON file."""
    definition, name = outcome.definition, outcome.definition.name
    headings = definition.measurement.headings(outcome)
    rows, gains = [], []
    for result in outcome.rows:
        key, curve = result.row.key, outcome.curves.get(result.row.key, {})
        rows.append(
            {
                "row": key,
                "model": result.row.name,
                "paper": result.row.paper,
                "status": result.status,
                "reason": result.reason,
                "shown": dict(zip(headings, cells(outcome, result), strict=True)),
                "parameters": result.parameters,
                "config": result.config,
                "values": outcome.values[key],
                "loss_by_length": {str(length): nll for length, nll in sorted(curve.items())},
                "seeds": {str(seed): _without_losses(measured) for seed, measured in sorted(result.by_seed.items())},
            }
        )
    for of_group in outcome.gains:
        for row, by_pair in of_group.gains.items():
            listed = [{"short": short, "long": long, "gain": gain} for (short, long), gain in by_pair.items()]
            gains.append({"group": of_group.group, "seed": of_group.seed, "row": row, "gains": listed})
    record = {
        "what": name,
        "title": definition.title,
        "paper": {"corpus": definition.corpus, "metric": definition.metric},
        "scale": outcome.scale.to_dict(),
        "corpus": outcome.corpus,
        "unit": outcome.unit,
        "seeds": outcome.seeds,
        "claims": [
            {"claim": claim.key, "text": claim.text, "paper": claim.paper, **verdict._asdict()}
            for claim, verdict in outcome.verdicts()
        ],
        "rows": rows,
        "gains": gains,
        "group_distances": group_distances(outcome),
        "command": list(command),
        **circumstances,
    }
    write_whole(out / f"{name}.json", json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    write_whole(out / f"{name}.html", outcome_page(outcome, out, command, circumstances))
    return record


def _without_losses(measured: JsonObject) -> JsonObject:
    """Return a measurement without configuration and losses of single targets, with None for NaN and infinity."""
    kept = {name: value for name, value in measured.items() if name not in ("losses", "config", "effective context")}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in kept.items()
    }


def outcome_page(outcome: Outcome, out: Path, command: Sequence[str], circumstances: JsonObject) -> str:
    """Return the page as HTML; `out` is its folder, with the files of figures to show."""
    definition = outcome.definition
    drawn = [
        _section(heading, macros().figure(plot, caller=lambda text=text: text))
        for heading, plot, text in definition.measurement.figures(outcome)
    ]
    body = [_header(outcome), _claims(outcome), _comparison(outcome), *drawn, *_made(outcome, out), _budget(outcome)]
    body.append(_circumstances(outcome, command, circumstances))
    title = f"{definition.title}, scale {outcome.scale.name}"
    return render("page.html", {"title": title, "body": Markup("\n".join(part for part in body if part))})


def _escape(text: object) -> str:
    return str(escaped(plain(str(text))))


def _section(heading: str, *parts: str) -> str:
    return macros().section(heading, caller=lambda: Markup("\n".join(part for part in parts if part)))


def _note(text: str, kind: str = "note") -> str:
    """Return an explanatory paragraph; text between backticks is set as code."""
    return f'<p class="{kind}">{code(text)}</p>'


def _table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    strong: Iterable[int] = (),
) -> str:
    """Return a table: columns in `numbers` are right-aligned, rows in `strong` are bold, column 0 holds row names."""
    return macros().table(caption, headings, rows, set(numbers), set(strong))


def _header(outcome: Outcome) -> str:
    definition, scale = outcome.definition, outcome.scale
    is_speed = isinstance(definition.measurement, Speed)
    read = "random" if is_speed else f"{short_name(outcome.corpus)} in {outcome.unit}"
    words = f"The paper: {definition.corpus}, {definition.metric}. "
    words += f"Here: scale {scale.name} ({scale.about}), {read} tokens, {repeats_text(outcome)}."
    has_numbers = definition.measurement.has_numbers and not is_speed and not definition.is_open_question
    notes = [f"{result.row.key} failed: {result.reason}" for result in outcome.failed]
    if has_numbers and not outcome.compares_with_paper:
        notes.insert(0, "The paper's numbers and ours are not comparable; compare the order of the models.")
    warnings = "".join(_note(text, "warning") for text in notes)
    return f"<header><h1>{_escape(definition.title)}</h1><p>{_escape(words)}</p>{warnings}</header>"


def _claims(outcome: Outcome) -> str:
    judged = outcome.verdicts()
    if not judged:
        return _section("Claims", _note("None of the paper’s claims C1 to C7 rests on this."))
    rows = [[claim.key, claim.text, claim.paper, verdict.outcome, verdict.reason] for claim, verdict in judged]
    return _section(
        "Claims",
        _table("Claims that this table tests", ("claim", "here", "the paper", "outcome", "why"), rows),
        _note(
            "A difference counts where it exceeds half the width of a 95% confidence interval over the seeds "
            "(Student’s t, pooled variance), written as ±; two lengths differ only if a length between them "
            "was tried. "
            "What is judged is the direction, not the paper’s amount."
        ),
    )


def _comparison(outcome: Outcome) -> str:
    """Return the numbers of the paper and ours, in one table if they are few."""
    definition, columns = outcome.definition, outcome.definition.columns
    if not definition.measurement.has_numbers:
        return _section("The paper", _note(definition.caption, "lead"), *(_note(text) for text in definition.notes))
    ours, repeats = definition.measurement.headings(outcome), repeats_text(outcome)
    caption = f"Here: {repeats}" if outcome.seeds == 1 else f"Here: mean ± standard deviation over {repeats}"
    is_wide = len(columns) + len(ours) > _COLUMNS
    names = {id(result): result.row.key if result.row.name in ("", "-") else result.row.name for result in outcome.rows}
    papers = {id(result): [result.row.paper.get(column, "-") for column in columns] for result in outcome.rows}
    tables = []
    if is_wide:
        numbers = [at for at, column in enumerate(columns, 1) if column not in ("Recurrence", "Encoding", "Loss")]
        rows = [[names[id(result)], *papers[id(result)]] for result in outcome.rows]
        tables.append(_table(f"The paper: {definition.metric}", ("model", *columns), rows, numbers))
    shown = [result for result in outcome.rows if result.row.trained or not is_wide]
    heads = ["model", *([] if is_wide else [f"paper’s {column}" for column in columns]), *ours[:-1], ""]
    rows = [[names[id(result)], *([] if is_wide else papers[id(result)]), *cells(outcome, result)] for result in shown]
    trained = [at for at, result in enumerate(shown) if result.by_seed]
    tables.append(_table(caption, heads, rows, range(1, len(heads) - 1), trained))
    missing = [result for result in outcome.rows if result.status == "not at this scale"]
    return _section(
        "Results" if definition.is_open_question else "The paper’s numbers and ours",
        _note(definition.caption, "lead"),
        *tables,
        *(_note(text) for text in definition.notes),
        *(_note(f"{text[0].upper()}{text[1:]}.") for text in distances_text(outcome)),
        *(_note(f"{result.row.key}, {result.status}: {result.reason}.") for result in missing),
    )


def _made(outcome: Outcome, out: Path) -> list[str]:
    """Return sections with the files that were made with the models: those that are pictures shown, all as links."""
    definition, pictures, links = outcome.definition, [], []
    for result in outcome.rows:
        for seed, measured in sorted(result.by_seed.items()):
            for name in measured.get("files", ()):
                links.append(f'<li><a href="{_escape(quote(name))}">{_escape(name)}</a></li>')
                if definition.pictures and Path(name).match(definition.pictures):
                    data = base64.b64encode((out / name).read_bytes()).decode()
                    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{_escape(definition.title)}">'
                    caption = f"<figcaption>{_escape(f'Seed {seed}: {Path(name).name}')}</figcaption>"
                    pictures.append(f"<figure>{image}{caption}</figure>")
    shown = [_section("Here", *pictures)] if pictures else []
    return [*shown, _section("What was made", f"<ul>{''.join(links)}</ul>")] if links else shown


def _budget(outcome: Outcome) -> str:
    """Return what each model's training took, and what tells the models apart."""
    measured = [result for result in outcome.rows if result.config is not None and result.by_seed]
    rows = []
    for result in measured:
        if result.row.cache_over is not None:
            continue
        run = RunConfig.from_dict(result.config)
        train, every = run.train, list(result.by_seed.values())
        here = [measured for measured in every if "recorded" not in measured] or every
        steps = round(statistics.fmean(measured.get("steps", train.steps) for measured in every))
        segments = f" × {train.backprop_segments}" if train.backprop_segments > 1 else ""
        rows.append(
            [
                result.row.key,
                result.parameters_text,
                f"{steps:,}" + (" (the cap)" if result.hit_cap else ""),
                f"{train.batch_size} × {train.segment}{segments}",
                f"{run.model.mem_len:,}",
                f"{steps * train.tokens_per_step:,}",
                duration_text(statistics.fmean(measured.get("training_seconds", 0.0) for measured in here)),
            ]
        )
    if not rows:
        return ""
    notes = []
    if (rules := outcome.scale.until_converged) is not None:
        notes.append(
            f"A row trains until {rules.patience} evaluations in a row are no better than the best before them; its "
            f"learning rate is divided by four after {counted(rules.plateau_patience, 'such evaluation')}, and falls "
            f"to zero over the last {rules.decay_share:.0%} of the cap. A row that averages its weights when "
            "validation stops improving keeps the schedule of its recipe. Learning rates are tried on the validation "
            f"split with seed 1, in runs of {rules.tuning_share:.0%} of the cap whose rate falls to zero"
            + ("; the best of them and half of it are then tried in runs to the end." if rules.halvings else ".")
        )
        notes += [f"Learning rate of {rate}." for rate in tuned_rates(outcome)]
    heads = ("row", "parameters", "steps", "lanes × segment", "memory", "tokens", "training time, mean")
    changed = [(result.row.key, _changed(result, outcome.scale.is_published)) for result in measured]
    return _section(
        "Budgets",
        _table("Training of each model, with one seed", heads, rows, range(1, 7)),
        *map(_note, notes),
        macros().pairs("What makes a row", changed),
    )


def _changed(result: RowResult, published: bool) -> str:
    """Return in words the differences between a row's model and the scale's, or the published preset."""
    row = result.row
    if row.cache_over is not None:
        return f"the models of {row.cache_over}, with a continuous cache tuned on the validation split"
    if published:
        return f"the preset {row.preset}"
    assert result.config is not None
    words = [f"{factor:.3g} times the {name}" for name, factor in asdict(row.shape).items() if factor != 1]
    names = list(row.overrides or {}) + ([] if row.fit is None else [FITTED])
    for name in names + (["model.cutoffs", "model.div_val"] if row.adaptive else []):
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
    recorded = recorded_seeds(measured for result in outcome.rows for measured in result.by_seed.items())
    notes = [
        f"Measured before, and taken from a record: {named_seeds(seeds)}, {origin['hardware']['cpu']} "
        f"({origin['dtype'] or 'float32'}), {shlex.join(origin['command'])}"
        for origin, seeds in recorded
    ]
    notes.append(f"Everything on this page, and more, is in `{outcome.definition.name}.json` beside it.")
    return _section("Where and how", macros().pairs("Environment of the last command", rows), *map(_note, notes))
