"""Configuration fields by their dotted names, as on the command line: ``model.mem_len``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from txl.config.families import MODEL_FIELDS, model_with
from txl.config.model import ModelConfig
from txl.config.run import RunConfig
from txl.config.sections import DataConfig
from txl.config.values import FieldValues, Section, TypeHint, hints_of, parse_value, shown
from txl.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Option:
    """A configuration field as a command-line option."""

    name: str
    """Dotted name of the field: "model.mem_len"."""
    hint: TypeHint
    """Type of the field."""
    help: str
    owner: type[ModelConfig] | None
    """Configuration class of the models that have the field; None for fields of other sections."""


def options() -> Iterator[Option]:
    """Yield the fields of all sections and families as options."""
    for name, field in MODEL_FIELDS.items():
        yield Option(f"model.{name}", field.hint, field.item.metadata["help"], field.owner)
    for name, item, hint, _ in leaf_fields(RunConfig()):
        if not name.startswith("model.") and name != "name":
            yield Option(name, hint, item.metadata["help"], None)


def leaf_fields(config: Section, prefix: str = "") -> list[tuple[str, dataclasses.Field[object], TypeHint, object]]:
    """Return every field that is not itself a dataclass: (dotted name, field, type, value)."""
    leaves = []
    hints = hints_of(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        name = f"{prefix}{item.name}"
        if isinstance(value, Section):
            leaves.extend(leaf_fields(value, f"{name}."))
        else:
            leaves.append((name, item, hints[item.name], value))
    return leaves


def differences(old: RunConfig, new: RunConfig, ignore: frozenset[str] = frozenset()) -> list[str]:
    """Return the fields in which two configurations differ, as "train.steps 100 -> 200", without the names in `ignore`.

    Models of different families are compared in the fields that both have.
    """
    before, after = ({name: value for name, _, _, value in leaf_fields(config)} for config in (old, new))
    return [
        f"{name} {shown(before[name])} -> {shown(after[name])}"
        for name in before
        if name in after and before[name] != after[name] and name not in ignore
    ]


def with_unset_data(config: RunConfig, stored: RunConfig) -> RunConfig:
    """Return a copy in which unset fields for the preparation of text (`as_stored`) have the values of a stored run."""
    result = RunConfig.from_dict(config.to_dict())
    for item in dataclasses.fields(DataConfig):
        if item.metadata.get("as_stored") and getattr(result.data, item.name) is None:
            setattr(result.data, item.name, getattr(stored.data, item.name))
    return result


def may_change() -> frozenset[str]:
    """Return the fields that a continued run may change, because no number that it computes depends on them."""
    return frozenset(name for name, item, _, _ in leaf_fields(RunConfig()) if item.metadata.get("may_change"))


def with_options(config: RunConfig, changes: dict[str, str], *, drop: bool = False) -> RunConfig:
    """Return a copy of a configuration with fields set from text, as on the command line.

    A value of `model.family`, `model.kind` or `model.encoding` that belongs to another family converts the model to
    that family: ``{"model.encoding": "learned"}`` makes a Transformer-XL a Transformer without memory.

    Args:
        config: configuration to copy; it is not changed.
        changes: values as text, by dotted name with "-" allowed for "_":
            ``{"model.mem-len": "128", "model.window": "none"}``.
        drop: True: leave out settings of the configuration's model that another family lacks, instead of refusing them;
            lengths of a memory are refused in either case.

    Raises:
        UserError: for a name that is no field (the message suggests similar names), a value of the wrong type, or a
            setting that the model's family lacks.
    """
    result = RunConfig.from_dict(config.to_dict())
    of_model: FieldValues = {}
    for name, value in parsed_options(changes).items():
        section, field_name = name.split(".")
        if section == "model":
            of_model[field_name] = value
        else:
            setattr(getattr(result, section), field_name, value)
    result.model = model_with(result.model, of_model, drop)
    return result


def parsed_options(changes: dict[str, str]) -> FieldValues:
    """Parse the values of options; the names in the result have "_" for "-"."""
    types_of = {option.name: option.hint for option in options()}
    values = {}
    for option, text in changes.items():
        name = option.replace("-", "_")
        if name not in types_of:
            hint = did_you_mean(name, types_of, cutoff=0.5)
            raise UserError("no such field of the configuration", field=name, remedy=hint or "")
        values[name] = parse_value(types_of[name], text, name)
    return values
