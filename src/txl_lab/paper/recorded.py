"""Reuse of a table's record: results of models that were measured before, in another folder or on another machine.

A record is the file NAME.json that a reproduction writes, or the same inside of "output" (`benchmarks/record.py`). Each
model and seed of it becomes a file in the folder's results/, as if it had been measured there; only what the record
lacks is trained. Tuned learning rates are taken too, so that new seeds train at the rates of the recorded ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from txl.config import RunConfig
from txl.errors import UserError, cause
from txl.files import JsonObject, read_json, reason_of, write_whole
from txl.runs.directory import of_today
from txl_lab.paper.converging import Tried, Tuned, at_rate
from txl_lab.paper.folder import changes, stored_json
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import Definition

_COUNTS = {"parameters", "steps", "tokens", "training_seconds", "measuring_seconds"}
"""Numbers that results have, except those of Table 9 and of a continuous cache."""
_MAY_DIFFER = "dtype"
"""Entry of a scale's record that may differ between seeds: another machine may be fast in other arithmetic."""


@dataclass(frozen=True)
class Recorded:
    """A result that a record has."""

    record: Path
    row: str
    """Key of the row."""
    seed: int
    result: JsonObject
    """Measurements with the run's configuration, in the form in which a reproduction stores them."""


def recorded_results(
    path: Path, definition: Definition, scale: Scale, corpus: str, text: str, needed: Sequence[str]
) -> list[Recorded]:
    """Return all results that a table can take from a record.

    A model that a row's continuous cache needs is taken only if the result of the cache is there too, and a model of a
    group (Table 8) only if the group's other models of the same seed are: they cannot be measured later without it.

    Args:
        path: the record.
        definition: definition of the table.
        scale: scale of the reproduction that takes the results.
        corpus: name or path of its corpus.
        text: identity of its corpus. Records of earlier versions lack it; their corpus is compared by name.
        needed: names of the measures that every result must have.

    Raises:
        UserError: if the file is no record of this table, is damaged, or is of another scale or text.
    """
    try:
        whole = read_json(path, "give the NAME.json of a reproduction")
    except OSError as error:
        raise UserError(f"--reuse {path}: cannot be read ({reason_of(error)})") from None
    record = whole.get("output", whole) if isinstance(whole, dict) else None
    if not isinstance(record, dict) or not {"what", "scale", "rows", "hardware", "command"} <= record.keys():
        raise UserError(f"--reuse {path}: not a record of a reproduction; give the NAME.json that one has written")
    if record["what"] != definition.name:
        raise UserError(f"--reuse {path}: a record of {record['what']}; give one of {definition.name}, or a folder")
    try:
        _check_origin(path, record, scale, corpus, text)
        origin = {name: whole[name] for name in ("commit", "date") if name in whole}
        origin |= {name: record[name] for name in ("command", "hardware")} | {"dtype": record["scale"].get("dtype")}
        _expect(isinstance(origin["hardware"]["cpu"], str), "no name of a processor")
        found = [Recorded(path, *each) for each in _results(record, definition, origin)]
        for each in found:
            check_form(each.result, needed)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"--reuse {path}: damaged{cause(error)}; give another record") from None
    return found


def take(found: Sequence[Recorded], folder: Path, definition: Definition) -> None:
    """Write results and learning rates into a reproduction's folder, where the folder has none.

    Args:
        found: results from `recorded_results`.
        folder: folder of the reproduction, with results/ and rates/.
        definition: definition of the table.

    Raises:
        UserError: if learning rates were tuned differently for the same recipe; nothing is written.
    """
    rates: dict[str, Tuned] = {}
    for each in found:
        tuned: Tuned | None = each.result.get("rates")
        if tuned is None:
            continue
        recipe = tuned["recipe"]
        known = rates.get(recipe) or stored_json(folder / "rates" / f"{recipe}.json") or tuned
        if known["factor"] != tuned["factor"]:
            raise UserError(
                f"--reuse {each.record}: {recipe} was trained at {tuned['factor']:g} times its learning rate, the "
                f"other seeds at {known['factor']:g} times; seeds of one table must share a rate"
            )
        rates[recipe] = known
    groups = {row.key: row.group for row in definition.rows}
    measured_here = {
        (groups[each.row], each.seed)
        for each in found
        if (stored := stored_json(result_path(folder, each.row, each.seed))) is not None and "recorded" not in stored
    }
    for recipe, tuned in rates.items():
        _write_new(folder / "rates" / f"{recipe}.json", json.dumps(tuned, indent=1))
    for each in found:
        if definition.kind != "context" or (groups[each.row], each.seed) not in measured_here:
            _write_new(result_path(folder, each.row, each.seed), json.dumps(each.result))


def result_path(folder: Path, row: str, seed: int) -> Path:
    """Return the path of a row's result in a reproduction's folder."""
    return folder / "results" / f"{row}-seed{seed}.json"


def _write_new(path: Path, text: str) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")


def _check_origin(path: Path, record: JsonObject, scale: Scale, corpus: str, text: str) -> None:
    has_text = "text" in record
    there = {"scale": dict(record["scale"]), "text": record["text"] if has_text else record["corpus"]}
    wanted = {"scale": json.loads(json.dumps(scale.to_dict())), "text": text if has_text else corpus}
    for each in (there, wanted):
        each["scale"].pop(_MAY_DIFFER, None)
    if changed := changes(there, wanted):
        raise UserError(f"--reuse {path} is of another reproduction: {', '.join(changed)}")


def _results(record: JsonObject, definition: Definition, origin: JsonObject) -> Iterator[tuple[str, int, JsonObject]]:
    """Yield the row, seed and result of every measurement that can be taken from a record."""
    rows = {row["row"]: row for row in record["rows"]}
    for wanted in definition.rows:
        if wanted.key not in rows:
            continue
        row = rows[wanted.key]
        together = [each.key for each in definition.rows if each.cache_over == wanted.key]
        if definition.kind == "context":
            together = [each.key for each in definition.rows if each.group == wanted.group and each.trained]
        others = [set(rows[key]["seeds"]) if key in rows else set() for key in together]
        for place, seed in enumerate(sorted(map(int, set(row["seeds"]).intersection(*others)))):
            result = dict(row["seeds"][str(seed)])
            run = RunConfig.from_dict(of_today(row["config"]))
            if "rates" in result:
                run = at_rate(run, result["rates"]["factor"])
            run.train.seed = seed
            result |= {"config": run.to_dict(), "recorded": result.get("recorded", origin)}
            if definition.kind == "context":
                result["effective context"] = _effective_context(record, row, wanted.group, seed, place)
            yield wanted.key, seed, result


def check_form(result: JsonObject, needed: Sequence[str]) -> None:
    """Check that a result has all that a page is made from.

    Args:
        result: a result, recorded or stored.
        needed: names of the measures that it must have.

    Raises:
        AttributeError, IndexError, KeyError, TypeError, ValueError: for what is missing or of another kind.
    """
    numbers = {name: result[name] for name in (*needed, *(_COUNTS & result.keys()))}
    for point in result.get("curve", ()):
        numbers |= {f"{name} of the point at {point['length']}": point[name] for name in ("length", "nll")}
    if (tuned := result.get("rates")) is not None:
        _expect(Tuned.__annotations__.keys() <= tuned.keys(), "no learning rates")
        tried = (*tuned["tried"], *tuned["whole"])
        _expect(all(Tried.__annotations__.keys() <= each.keys() for each in tried), "no learning rates")
        numbers["factor"] = tuned["factor"]
    if (context := result.get("effective context")) is not None:
        _expect("window" in result, "no window")
        numbers |= {"targets": result["targets"]} | context["values"]
        numbers |= {f"loss at {int(length)}": loss for length, loss in context["curve"].items()}
        for gain in context["gains"]:
            numbers |= {f"gain from {gain['short']} to {gain['long']}": gain["gain"]}
    losses = {int(length): each for length, each in result.get("losses", {}).items()}
    _expect(len({len(each) for each in losses.values()}) <= 1, "contexts with losses of different targets")
    _expect(all(_is_number(loss) for each in losses.values() for loss in each), "a loss that is no number")
    _expect(all(isinstance(each, str) for each in result.get("files", ())), "no names of files")
    missing = [name for name, value in numbers.items() if not _is_number(value)]
    _expect(not missing, f"no number in {', '.join(missing)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _expect(present: bool, missing: str) -> None:
    if not present:
        raise ValueError(missing)


def _effective_context(record: JsonObject, row: JsonObject, group: str, seed: int, place: int) -> JsonObject:
    """Return what a record of Table 8 has instead of losses of single targets: lengths, mean losses, gains."""
    [gains] = [
        each["gains"]
        for each in record["gains"]
        if (each["group"], each["seed"], each["row"]) == (group, seed, row["row"])
    ]
    return {
        "values": {name: values[place] for name, values in row["values"].items()},
        "curve": {length: losses[place] for length, losses in row["loss_by_length"].items()},
        "gains": gains,
    }
