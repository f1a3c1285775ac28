"""Catalogue of all tables, figures and open questions, read from `tables.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from txl.errors import UserError, did_you_mean
from txl_lab.paper.claims import Claim, Judge, above, all_of, below, higher, lower, lower_at_equal_time, no_worse
from txl_lab.paper.measurements import MEASUREMENTS
from txl_lab.paper.schema import Definition, Row, Shape

_TABLES = Path(__file__).with_name("tables.toml")
_JUDGES: dict[str, Callable[..., Judge]] = {
    "lower": lower,
    "higher": higher,
    "lower_at_equal_time": lower_at_equal_time,
    "no_worse": no_worse,
    "above": above,
    "below": below,
}


@cache
def definitions() -> dict[str, Definition]:
    """Return all definitions by name: tables, figures, samples and open questions, in this order."""
    read = tomllib.loads(_TABLES.read_text(encoding="utf-8"))
    models = read.pop("models")
    return {name: _definition(name, read, models) for name in read}


def find_definition(name: str) -> Definition:
    """Return the definition with the name `name`; for an unknown name, suggest the nearest one."""
    every = definitions()
    if name not in every:
        hint = did_you_mean(name, every) or f"expected one of {', '.join(every)}"
        raise UserError(f"unknown table or figure {name!r}; {hint}")
    return every[name]


def _definition(name: str, tables: Mapping[str, Any], models: Mapping[str, Any]) -> Definition:
    """Return the definition of a table; `like` names the table whose entries it has, except its own."""
    entries = dict(tables[name])
    like, columns = entries.pop("like", None), entries.get("columns", ())
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entries.items()}
    fields["name"] = name
    if "measurement" in entries:
        fields["measurement"] = MEASUREMENTS[entries["measurement"]]
    if "rows" in entries:
        fields["rows"] = tuple(_row(row, columns, models) for row in entries["rows"])
    if "claims" in entries:
        fields["claims"] = tuple(map(_claim, entries["claims"]))
    return Definition(**fields) if like is None else replace(_definition(like, tables, models), **fields)


def _row(entries: Mapping[str, Any], columns: Sequence[str], models: Mapping[str, Any]) -> Row:
    rest = dict(entries)
    key = rest.pop("key", None) or _key_of(rest["name"])
    paper = dict(zip(columns, rest.pop("paper", ()), strict=bool(columns)))
    shape, changes = Shape(**rest.pop("shape", {})), rest.pop("model", None)
    overrides = None
    if changes is not None:
        overrides = {name: value for change in changes for name, value in _overrides(change, models).items()}
    return Row(key=key, paper=paper, shape=shape, overrides=overrides, **rest)


def _key_of(name: str) -> str:
    """Return the key of a published result, made from its name."""
    words = "".join(letter if letter.isalnum() else " " for letter in name.lower().replace("(", "").replace(")", ""))
    return "-".join(words.split())


def _overrides(name: str, models: Mapping[str, Any]) -> dict[str, str]:
    """Return named changes to a model as fields by dotted name, those that they are like first."""
    sections = dict(models[name])
    base = _overrides(sections.pop("like"), models) if "like" in sections else {}
    return base | {f"{section}.{field}": value for section, each in sections.items() for field, value in each.items()}


def _claim(entries: Mapping[str, Any]) -> Claim:
    about = {name: entries[name] for name in ("key", "text", "paper", "at_full_size") if name in entries}
    return Claim(**about, judge=_judge(entries))


def _judge(entries: Mapping[str, Any]) -> Judge:
    """Return the judge that a claim names: a list has our row and the others, a table the judge's arguments."""
    if "all" in entries:
        return all_of(*map(_judge, entries["all"]))
    name = next(name for name in _JUDGES if name in entries)
    measure = {"measure": entries["measure"]} if "measure" in entries else {}
    if isinstance(entries[name], list):
        return _JUDGES[name](*entries[name], **measure)
    return _JUDGES[name](**entries[name], **measure)
