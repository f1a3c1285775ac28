"""Reuse of a table's record: results of models that were measured before, in another folder or on another machine.

A record is the file NAME.json that a reproduction writes, or the same inside of "output" (`benchmarks/record.py`). Each
model and seed of it becomes a file in the folder's results/, as if it had been measured there; only what the record
lacks is trained. Tuned learning rates are taken too, so that new seeds train at the rates of the recorded ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from txl.config import RunConfig
from txl.errors import UserError
from txl.files import JsonObject, read_json, write_whole
from txl.reproduction.converging import at_rate
from txl.reproduction.folder import changes
from txl.reproduction.scales import Scale
from txl.reproduction.schema import Definition
from txl.runs.directory import of_today

_MAY_DIFFER = ("dtype",)
"""Entries of a scale's record that may differ between seeds: another machine may be fast in other arithmetic."""


def read_record(path: Path, definition: Definition, scale: Scale, corpus: str, text: str) -> JsonObject:
    """Return a record of the same table, at the same scale and on the same text.

    Args:
        path: the record.
        definition: definition of the table.
        scale: scale of the reproduction that takes the results.
        corpus: name or path of its corpus.
        text: identity of its corpus. Records of earlier versions lack it; their corpus is compared by name.

    Raises:
        UserError: if the file is no record of this table, or of another scale or text.
    """
    try:
        whole = read_json(path, "give the NAME.json of a reproduction")
    except OSError as error:
        raise UserError(f"--reuse {path}: cannot be read ({error.strerror or error})") from None
    record = whole.get("output", whole) if isinstance(whole, dict) else None
    if not isinstance(record, dict) or not {"what", "scale", "rows", "seeds"} <= record.keys():
        raise UserError(f"--reuse {path}: not a record of a reproduction; give the NAME.json that one has written")
    if definition.kind in ("speed", "product") or record["what"] != definition.name:
        raise UserError(
            f"--reuse {path}: a record of {record['what']}, of which {definition.name} can take nothing; give a folder "
            f"to take equal models from"
        )
    there, wanted = (
        {"scale": {name: value for name, value in scale_of.items() if name not in _MAY_DIFFER}, "text": identity}
        for scale_of, identity in (
            (record["scale"], record.get("text", record.get("corpus"))),
            (json.loads(json.dumps(scale.to_dict())), text if "text" in record else corpus),
        )
    )
    if changed := changes(there, wanted):
        raise UserError(f"--reuse {path} is of another reproduction: {', '.join(changed)}")
    origin = {name: whole[name] for name in ("commit", "date") if name in whole}
    origin |= {name: record[name] for name in ("command", "hardware", "software") if name in record}
    return record | {"origin": origin | {"dtype": record["scale"].get("dtype")}}


def take_results(record: JsonObject, definition: Definition, path_of: Callable[[str, int], Path], rates: Path) -> None:
    """Write the results and learning rates of a record into a reproduction's folder, where the folder has none.

    Args:
        record: record from `read_record`.
        definition: definition of the table.
        path_of: function that returns the path of the result of a row, by key, and a seed.
        rates: folder of the tuned learning rates.
    """
    for key, seed, result in _results(record, definition):
        path = path_of(key, seed)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(result) + "\n")
        tuned = result.get("rates")
        if tuned is not None and not (path := rates / f"{tuned['recipe']}.json").exists():
            rates.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(tuned, indent=1) + "\n")


def _results(record: JsonObject, definition: Definition) -> Iterator[tuple[str, int, JsonObject]]:
    """Yield the row, seed and result of every measurement that can be taken from a record."""
    groups = {row.key: row.group for row in definition.rows}
    rows = {row["row"]: row for row in record["rows"] if row["row"] in groups and row["seeds"]}
    for key, row in rows.items():
        seeds = sorted(map(int, row["seeds"]))
        if definition.kind == "context":  # of an incomplete group, a record has no lengths
            members = [rows.get(each.key, {"seeds": {}}) for each in definition.rows if each.group == groups[key]]
            seeds = sorted(set.intersection(*({int(seed) for seed in member["seeds"]} for member in members)))
        for place, seed in enumerate(seeds):
            result = dict(row["seeds"][str(seed)])
            run = RunConfig.from_dict(of_today(row["config"]))
            if "rates" in result:
                run = at_rate(run, result["rates"]["factor"])
            run.train.seed = seed
            result |= {"config": run.to_dict(), "recorded": result.get("recorded", record["origin"])}
            if definition.kind == "context":
                result["effective context"] = _effective_context(record, row, groups[key], seed, place)
            yield key, seed, result


def _effective_context(record: JsonObject, row: JsonObject, group: str, seed: int, place: int) -> JsonObject:
    """Return what a record of Table 8 has instead of losses of single targets: lengths, mean losses, gains."""
    return {
        "values": {name: values[place] for name, values in row["values"].items()},
        "curve": {length: losses[place] for length, losses in row["loss_by_length"].items()},
        "gains": next(
            each["gains"]
            for each in record["gains"]
            if (each["group"], each["seed"], each["row"]) == (group, seed, row["row"])
        ),
    }
