"""Fields by their dotted names, as the command line knows them: ``model.mem_len``."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from typing import Any

from txl.config.sections import RunConfig
from txl.config.values import parse_value, shown
from txl.errors import UserError


def leaf_fields(config: Any, prefix: str = "") -> list[tuple[str, dataclasses.Field[Any], Any, Any]]:
    """Every field that is not itself a dataclass: (dotted name, field, its type, its value)."""
    leaves = []
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        name = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            leaves.extend(leaf_fields(value, f"{name}."))
        else:
            leaves.append((name, item, hints[item.name], value))
    return leaves


def differences(old: RunConfig, new: RunConfig, ignore: frozenset[str] = frozenset()) -> list[str]:
    """The fields in which two configurations differ, as "train.steps 100 -> 200", but for the names in `ignore`."""
    return [
        f"{name} {shown(before)} -> {shown(after)}"
        for (name, _, _, before), (_, _, _, after) in zip(leaf_fields(old), leaf_fields(new), strict=True)
        if before != after and name not in ignore
    ]


def with_unset_data(config: RunConfig, stored: RunConfig) -> RunConfig:
    """A copy of a configuration in which a run that exists keeps its own way of reading text, where none is set."""
    result = RunConfig.from_dict(config.to_dict())
    for name in ("min_count", "word_rule", "normalise"):
        if getattr(result.data, name) is None:
            setattr(result.data, name, getattr(stored.data, name))
    return result


def with_options(config: RunConfig, options: dict[str, str]) -> RunConfig:
    """A copy of a configuration with fields set from text, as the command line gives them.

    Args:
        config: stays as it is.
        options: dotted names, "-" allowed for "_", to values: ``{"model.mem-len": "128", "model.window": "none"}``.

    Raises:
        UserError: for a name that is no field (with the nearest ones), or a value of the wrong type.
    """
    result = RunConfig.from_dict(config.to_dict())
    types_of = {name: hint for name, _, hint, _ in leaf_fields(result) if name != "name"}
    for option, text in options.items():
        name = option.replace("-", "_")
        if name not in types_of:
            near = difflib.get_close_matches(name, types_of, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join('--' + each.replace('_', '-') for each in near)}?" if near else ""
            raise UserError(f"unknown option --{option}{hint}")
        section, field_name = name.split(".")
        setattr(getattr(result, section), field_name, parse_value(types_of[name], text, f"--{name.replace('_', '-')}"))
    return result
