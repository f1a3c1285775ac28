"""The families of models: the configuration class of each, and conversion of a model to another family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

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


@dataclass(frozen=True)
class ModelField:
    """A field of one family or of several families."""

    item: dataclasses.Field[object]
    hint: TypeHint
    """Type of the field; of a choice, with the values of all families."""
    owner: type[ModelConfig]
    """The class that declares the field."""

    @property
    def lacking(self) -> object:
        """The value that means the same as not having the field; `ANYTHING` if no value makes a difference."""
        return self.item.metadata.get("lacking", self.item.default)


def _model_fields() -> dict[str, ModelField]:
    fields: dict[str, ModelField] = {}
    for owner in (ModelConfig, TransformerConfig, *MODEL_FAMILIES.values()):
        for item in dataclasses.fields(owner):
            hint, known = hints_of(owner)[item.name], fields.get(item.name)
            if known is None:
                without = item.metadata.get("lacking")
                choices = ((without,) if isinstance(without, str) else ()) + kind_of(hint).choices
                fields[item.name] = ModelField(item, Literal[choices] if choices else hint, owner)
            elif more := [choice for choice in kind_of(hint).choices if choice not in kind_of(known.hint).choices]:
                choices = (*kind_of(known.hint).choices, *more)
                fields[item.name] = dataclasses.replace(known, hint=Literal[choices])
    return fields


# The fields of all families by name, the fields shared by all models first.
MODEL_FIELDS = _model_fields()


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


def model_with(model: ModelConfig, changes: FieldValues, drop: bool = False) -> ModelConfig:
    """Return a copy with fields set; `family`, `kind` or `encoding` of another family converts it to that family.

    Args:
        model: configuration to copy; it is not changed.
        changes: values by name.
        drop: True: leave out settings of `model` that the other family lacks, instead of refusing them; lengths of a
            memory are refused in either case.
    """
    family = chosen_family(changes, model)
    result = as_family(model, family)
    lacking = {}
    for name, value in changes.items():
        if name in family.__dataclass_fields__:
            setattr(result, name, value)
        else:
            lacking[name] = value
    _refuse_lacking(result, lacking)
    known = {*_CHOOSE, *changes, *family.__dataclass_fields__}
    left = [item.name for item in dataclasses.fields(model) if item.name not in known]
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
    unknown = [name for name in values if name not in MODEL_FIELDS]
    if unknown:
        raise UserError("not known to this version", field=f"model.{unknown[0]}")
    settings = {name: checked(MODEL_FIELDS[name].hint, value, f"model.{name}") for name, value in values.items()}
    family = chosen_family(settings)
    own = [item.name for item in dataclasses.fields(family) if item.init]
    result = family(**{name: value for name, value in settings.items() if name in own})
    others = {name: value for name, value in settings.items() if name not in ("family", *own)}
    _refuse_lacking(result, others, carried=True)
    return result


def _refuse_lacking(model: ModelConfig, values: Mapping[str, object], carried: bool = False) -> None:
    """Refuse settings of other families, except values that mean the same as not having the setting.

    Args:
        model: configuration of the family.
        values: values of fields of other families, by name.
        carried: True: the values come from a stored configuration, not from the user; settings that make no
            difference (`lacking=ANYTHING`) are then ignored.
    """
    for name, value in values.items():
        field = MODEL_FIELDS[name]
        default = field.item.default if field.lacking is ANYTHING else field.lacking
        if value == default or (carried and field.lacking is ANYTHING):
            continue
        if name in NO_LENGTHS:
            model.refuse_lengths({name: value}, "model.")
        why = f"{model.chosen_by}, which has no use for it: it is a setting of {field.owner.title}"
        remedy = f"leave it at its default, {shown(default)}"
        raise UserError(field=f"model.{name}", value=value, but=why, remedy=remedy)


def chosen_family(settings: FieldValues, model: ModelConfig | None = None) -> type[ModelConfig]:
    """Return the configuration class that `family` selects, or else `kind` and `encoding`.

    Args:
        settings: values of model fields by name.
        model: configuration whose `kind` and `encoding` are used if `settings` has none.
    """
    if "family" in settings:
        if settings["family"] not in MODEL_FAMILIES:
            expected = f"one of {', '.join(MODEL_FAMILIES)}"
            raise UserError(field="model.family", value=settings["family"], expected=expected)
        return MODEL_FAMILIES[settings["family"]]
    if settings.get("kind", getattr(model, "kind", "transformer")) != "transformer":
        return RecurrentConfig
    encoding = settings.get("encoding", getattr(model, "encoding", "relative"))
    return VanillaConfig if encoding in VanillaConfig.choices() else TransformerXLConfig
