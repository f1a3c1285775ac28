"""The families of models: each one's configuration by name, and models that become one of another family."""

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
"""The configuration of every family by its name; `txl.models.FAMILIES` has the model of each."""
MODEL_FIELDS = model_fields()
"""The fields of all families by name, those of every model first."""
FamilyT = TypeVar("FamilyT", bound=ModelConfig)
_CHOOSE = ("family", "kind", "encoding")
"""Fields that choose a model rather than set something of it."""


def as_family(model: ModelConfig, family: type[FamilyT]) -> FamilyT:
    """Return a model of another family with the settings that both have; the others are left out.

    Args:
        model: stays as it is.
        family: its class. What `model` lacks has its default there, but for memory: without one, none.
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
    """Return a copy with fields set; a field of another family makes it a model of that family.

    Args:
        model: stays as it is.
        given: values by name.
        drop: leave out settings of `model` that the other family lacks, rather than refuse them; the lengths of a
            memory are refused in either case.
    """
    family = chosen_family(given, model)
    result = as_family(model, family)
    lacking = {}
    for name, value in given.items():
        if name in ("family", *family.__dataclass_fields__):
            object.__setattr__(result, name, value)
        else:
            lacking[name] = value
    result.refuse_lacking(lacking)
    kept = {*_CHOOSE, *given, *family.__dataclass_fields__}
    left = [item.name for item in dataclasses.fields(model) if item.name not in kept]
    carried = {name: getattr(model, name) for name in left if name in LENGTHS or not drop}
    result.refuse_lacking(carried, carried=True)
    return result


def model_from_dict(values: object) -> ModelConfig:
    """Build a model's configuration from `dataclasses.asdict` of it; missing fields take their defaults.

    Without `family` the values are of a file that has the fields of all families: `kind` and `encoding` then say which
    one it is, and the fields of the others are left out.
    """
    if not isinstance(values, dict):
        raise UserError(f"configuration model: expected an object, found {values!r}")
    unknown = [name for name in values if name not in MODEL_FIELDS]
    if unknown:
        raise UserError(f"configuration field model.{unknown[0]} is not known to this version")
    given = {name: checked(MODEL_FIELDS[name].hint, value, f"model.{name}") for name, value in values.items()}
    family = chosen_family(given)
    own = [item.name for item in dataclasses.fields(family) if item.init]
    result = family(**{name: value for name, value in given.items() if name in own})
    others = {name: value for name, value in given.items() if name not in ("family", *own)}
    result.refuse_lacking(others, carried=True)
    return result


def chosen_family(given: FieldValues, model: ModelConfig | None = None) -> type[ModelConfig]:
    """Return the family that `family` names, or else `kind` and `encoding`.

    Args:
        given: fields of a model by name.
        model: whose kind and encoding count where none is given.
    """
    if "family" in given:
        if given["family"] not in MODEL_FAMILIES:
            raise UserError(f"model.family is {given['family']!r}; expected one of {', '.join(MODEL_FAMILIES)}")
        return MODEL_FAMILIES[given["family"]]
    if given.get("kind", getattr(model, "kind", "transformer")) != "transformer":
        return RecurrentConfig
    encoding = given.get("encoding", getattr(model, "encoding", "relative"))
    return VanillaConfig if encoding in VanillaConfig.choices() else TransformerXLConfig
