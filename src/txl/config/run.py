"""The configuration of a run, and its fields by their dotted names, as on the command line: ``model.mem_len``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from txl.config.families import MODEL_FIELDS, model_from_dict, model_with
from txl.config.model import ModelConfig
from txl.config.sections import DataConfig, EvalConfig, TrainConfig
from txl.config.transformer_xl import TransformerXLConfig
from txl.config.values import FieldValues, Section, TypeHint, from_plain, hints_of, parse_value, require, shown
from txl.errors import UserError, did_you_mean
from txl.files import JsonObject

_PLANNED = "-minutes"


@dataclass
class RunConfig(Section):
    """Everything that determines a run, apart from the machine."""

    name: str = field(default="custom", metadata={"may_change": True})
    model: ModelConfig = field(default_factory=TransformerXLConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def is_planned(self) -> bool:
        """True if `txl train --minutes` chose the run, as its name tells."""
        return self.name.endswith(_PLANNED)

    @property
    def validation_lanes(self) -> int:
        """Number of lanes of the evaluations during training."""
        return self.train.eval_batch_size or self.eval.batch_size

    def to_dict(self) -> JsonObject:
        """Return plain dictionaries and lists, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: object) -> RunConfig:
        """Build a configuration from the result of `to_dict`; missing fields get their defaults.

        Raises:
            UserError: for an unknown field, or a value of the wrong type.
        """
        return from_plain(cls, values, readers={ModelConfig: model_from_dict})


class Option(NamedTuple):
    """A configuration field as a command-line option; `owner` is the class of the models that have it, if any."""

    name: str
    hint: TypeHint
    help: str
    owner: type[ModelConfig] | None


def planned_name(minutes: float) -> str:
    """Return the name of the run that is chosen for a number of minutes."""
    return f"{minutes:g}{_PLANNED}"


def validate(run: RunConfig) -> None:
    """Check the rules of a whole configuration, apart from those that depend on the data."""
    require(run.name.isprintable(), "name", run.name, "a name of printable characters, in one line")
    for section in (run.model, run.train, run.data, run.eval):
        section.validate()
    run.model.validate_use(run.train, run.eval)


def options() -> Iterator[Option]:
    """Yield the fields of all sections and families as options."""
    for name, (item, hint, owner) in MODEL_FIELDS.items():
        yield Option(f"model.{name}", hint, item.metadata["help"], owner)
    for name, item, hint, _ in leaf_fields(RunConfig()):
        if not name.startswith("model.") and name != "name":
            yield Option(name, hint, item.metadata["help"], None)


def leaf_fields(config: Section, prefix: str = "") -> list[tuple[str, dataclasses.Field[object], TypeHint, object]]:
    """Return every field that is not itself a dataclass: (dotted name, field, type, value)."""
    leaves = []
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), f"{prefix}{item.name}"
        if isinstance(value, Section):
            leaves.extend(leaf_fields(value, f"{name}."))
        else:
            leaves.append((name, item, hints_of(type(config))[item.name], value))
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
