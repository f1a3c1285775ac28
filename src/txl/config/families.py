"""The families of models: the configuration class of each, and conversion of a model to another family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

from txl.config.model import NO_LENGTHS, ModelConfig, TransformerConfig
from txl.config.recurrent import RecurrentConfig
from txl.config.transformer_xl import TransformerXLConfig
from txl.config.values import ANYTHING, FieldValues, TypeHint, checked, hints_of, kind_of, shown
from txl.config.vanilla import VanillaConfig
from txl.errors import UserError

# Configuration class of each family by name; `txl.models.FAMILIES` holds the model classes.
MODEL_FAMILIES: dict[str, type[ModelConfig]] = {
    config().family: config for config in (TransformerXLConfig, VanillaConfig, RecurrentConfig)
}
FamilyT = TypeVar("FamilyT", bound=ModelConfig)
# Names of the fields that select a model instead of changing a property of the model.
_CHOOSE = ("family", "kind", "encoding")


class ModelField(NamedTuple):
    """A field of one family or several: its type (of a choice, with the values of all families), and first class."""

    item: dataclasses.Field[object]
    hint: TypeHint
    owner: type[ModelConfig]


# The fields of all families by name, the fields shared by all models first.
MODEL_FIELDS: dict[str, ModelField] = {}
for _owner in (ModelConfig, TransformerConfig, *MODEL_FAMILIES.values()):
    for _item in dataclasses.fields(_owner):
        _known = MODEL_FIELDS.get(_item.name, ModelField(_item, hints_of(_owner)[_item.name], _owner))
        _without = _item.metadata.get("lacking")
        _choices = [_without] if isinstance(_without, str) else []
        _choices += [*kind_of(_known.hint).choices, *kind_of(hints_of(_owner)[_item.name]).choices]
        _hint = Literal[tuple(dict.fromkeys(_choices))] if _choices else _known.hint
        MODEL_FIELDS[_item.name] = _known._replace(hint=_hint)


def as_family(model: ModelConfig, family: type[FamilyT]) -> FamilyT:
    """Return a copy as a configuration of another family, without the settings that this family lacks.

    Fields that `model` lacks get their defaults, but the memory length gets 0.
    """
    if type(model) is family:
        return dataclasses.replace(model)
    values: FieldValues = {}
    for item in dataclasses.fields(family):
        if item.name not in _CHOOSE and item.name in hints_of(type(model)):
            values[item.name] = getattr(model, item.name)
        elif item.name not in _CHOOSE and item.metadata.get("lacking", ANYTHING) is not ANYTHING:
            values[item.name] = item.metadata["lacking"]
    return family(**values)


def model_with(model: ModelConfig, changes: FieldValues, drop: bool = False) -> ModelConfig:
    """Return a copy with fields set; `family`, `kind` or `encoding` of another family converts it to that family.

    With `drop`, settings of `model` that the other family lacks are left out instead of refused; lengths of a memory
    are refused in either case.
    """
    family = chosen_family(changes, model)
    result = as_family(model, family)
    own = hints_of(family)
    for name, value in changes.items():
        if name in own:
            setattr(result, name, value)
    _refuse_lacking(result, {name: value for name, value in changes.items() if name not in own})
    left = [item.name for item in dataclasses.fields(model) if item.name not in {*_CHOOSE, *changes, *own}]
    carried = {name: getattr(model, name) for name in left if name in NO_LENGTHS or not drop}
    _refuse_lacking(result, carried, carried=True)
    return result


def model_from_dict(values: object) -> ModelConfig:
    """Build a model's configuration from the result of `dataclasses.asdict`; missing fields get their defaults.

    If `family` is missing, the values come from a file with the fields of all families: `kind` and `encoding` then
    select the family. Fields of other families are left out, or refused if their values would make a difference.
    """
    if not isinstance(values, dict):
        raise UserError(field="model", value=values, expected="an object")
    if unknown := [name for name in values if name not in MODEL_FIELDS]:
        raise UserError("not known to this version", field=f"model.{unknown[0]}")
    settings = {name: checked(MODEL_FIELDS[name].hint, value, f"model.{name}") for name, value in values.items()}
    family = chosen_family(settings)
    own = {item.name for item in dataclasses.fields(family)} - {"family"}
    result = family(**{name: value for name, value in settings.items() if name in own})
    others = {name: value for name, value in settings.items() if name not in own and name != "family"}
    _refuse_lacking(result, others, carried=True)
    return result


def _refuse_lacking(model: ModelConfig, values: Mapping[str, object], carried: bool = False) -> None:
    """Refuse settings of other families, except values that mean the same as not having the setting.

    With `carried`, the values come from a stored configuration, not from the user; settings that make no difference
    (`lacking=ANYTHING`) are then ignored.
    """
    for name, value in values.items():
        item, _, owner = MODEL_FIELDS[name]
        lacking = item.metadata.get("lacking", item.default)
        default = item.default if lacking is ANYTHING else lacking
        if value == default or (carried and lacking is ANYTHING):
            continue
        if name in NO_LENGTHS:
            model.refuse_lengths({name: value}, "model.")
        why = f"{model.chosen_by}, which has no use for it: it is a setting of {owner.title}"
        remedy = f"leave it at its default, {shown(default)}"
        raise UserError(field=f"model.{name}", value=value, but=why, remedy=remedy)


def chosen_family(settings: FieldValues, model: ModelConfig | None = None) -> type[ModelConfig]:
    """Return the configuration class that `family` selects, or else `kind` and `encoding`, of `model` if not set."""
    if "family" in settings:
        if settings["family"] not in MODEL_FAMILIES:
            expected = f"one of {', '.join(MODEL_FAMILIES)}"
            raise UserError(field="model.family", value=settings["family"], expected=expected)
        return MODEL_FAMILIES[settings["family"]]
    if settings.get("kind", getattr(model, "kind", "transformer")) != "transformer":
        return RecurrentConfig
    encoding = settings.get("encoding", getattr(model, "encoding", "relative"))
    return VanillaConfig if encoding in VanillaConfig.choices() else TransformerXLConfig
