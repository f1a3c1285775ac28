"""The families of models: the configuration class of each, and conversion of a model to another family."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from txl.config.model import LENGTHS, ModelConfig, model_fields
from txl.config.recurrent import RecurrentConfig
from txl.config.transformer_xl import TransformerXLConfig
from txl.config.values import ANYTHING, FieldValues, checked
from txl.config.vanilla import VanillaConfig
from txl.errors import UserError

MODEL_FAMILIES: dict[str, type[ModelConfig]] = {
    config().family: config for config in (TransformerXLConfig, VanillaConfig, RecurrentConfig)
}
"""Configuration class of each family by name; `txl.models.FAMILIES` holds the model classes."""
MODEL_FIELDS = model_fields()
"""The fields of all families by name, the fields shared by all models first."""
FamilyT = TypeVar("FamilyT", bound=ModelConfig)
_CHOOSE = ("family", "kind", "encoding")
"""Names of the fields that select a model instead of changing a property of the model."""


def as_family(model: ModelConfig, family: type[FamilyT]) -> FamilyT:
    """Return a configuration of another family with the settings that both families have, without all others.

    Args:
        model: configuration to convert; it is not changed.
        family: configuration class of the other family. Fields that `model` lacks get their defaults, but the memory
            length gets 0.
    """
    if type(model) is family:
        return dataclasses.replace(model)
    values: FieldValues = {}
    for item in dataclasses.fields(family):
        if item.name in _CHOOSE:
            continue
        if item.name in model.__dataclass_fields__:
            values[item.name] = getattr(model, item.name)
        elif item.metadata.get("lacking", ANYTHING) is not ANYTHING:
            values[item.name] = item.metadata["lacking"]
    return family(**values)


def model_with(model: ModelConfig, given: FieldValues, drop: bool = False) -> ModelConfig:
    """Return a copy with fields set; `family`, `kind` or `encoding` of another family converts it to that family.

    Args:
        model: configuration to copy; it is not changed.
        given: values by name.
        drop: True: leave out settings of `model` that the other family lacks, instead of refusing them; lengths of a
            memory are refused in either case.
    """
    family = chosen_family(given, model)
    result = as_family(model, family)
    lacking = {}
    for name, value in given.items():
        if name in family.__dataclass_fields__:
            setattr(result, name, value)
        else:
            lacking[name] = value
    result.refuse_lacking(lacking)
    kept = {*_CHOOSE, *given, *family.__dataclass_fields__}
    left = [item.name for item in dataclasses.fields(model) if item.name not in kept]
    carried = {name: getattr(model, name) for name in left if name in LENGTHS or not drop}
    result.refuse_lacking(carried, carried=True)
    return result


def model_from_dict(values: object) -> ModelConfig:
    """Build a model's configuration from the result of `dataclasses.asdict`; missing fields get their defaults.

    If `family` is missing, the values come from a file with the fields of all families: `kind` and `encoding` then
    select the family. Fields of other families are left out, or refused if their values would make a difference.
    """
    if not isinstance(values, dict):
        raise UserError(field="model", value=values, expected="an object")
    unknown = [name for name in values if name not in MODEL_FIELDS]
    if unknown:
        raise UserError("not known to this version", field=f"model.{unknown[0]}")
    given = {name: checked(MODEL_FIELDS[name].hint, value, f"model.{name}") for name, value in values.items()}
    family = chosen_family(given)
    own = [item.name for item in dataclasses.fields(family) if item.init]
    result = family(**{name: value for name, value in given.items() if name in own})
    others = {name: value for name, value in given.items() if name not in ("family", *own)}
    result.refuse_lacking(others, carried=True)
    return result


def chosen_family(given: FieldValues, model: ModelConfig | None = None) -> type[ModelConfig]:
    """Return the configuration class that `family` selects, or else `kind` and `encoding`.

    Args:
        given: values of model fields by name.
        model: configuration whose `kind` and `encoding` are used if `given` has none.
    """
    if "family" in given:
        if given["family"] not in MODEL_FAMILIES:
            expected = f"one of {', '.join(MODEL_FAMILIES)}"
            raise UserError(field="model.family", value=given["family"], expected=expected)
        return MODEL_FAMILIES[given["family"]]
    if given.get("kind", getattr(model, "kind", "transformer")) != "transformer":
        return RecurrentConfig
    encoding = given.get("encoding", getattr(model, "encoding", "relative"))
    return VanillaConfig if encoding in VanillaConfig.choices() else TransformerXLConfig
