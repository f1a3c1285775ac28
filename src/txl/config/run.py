"""The configuration of a run: that of the model, and the sections that all models share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from txl.config.families import model_from_dict
from txl.config.model import ModelConfig
from txl.config.sections import DataConfig, EvalConfig, TrainConfig
from txl.config.transformer_xl import TransformerXLConfig
from txl.config.values import Section, from_plain, require
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
        return from_plain(cls, values, prefix="", readers={ModelConfig: model_from_dict})


def planned_name(minutes: float) -> str:
    """Return the name of the run that is chosen for a number of minutes."""
    return f"{minutes:g}{_PLANNED}"


def validate(run: RunConfig) -> None:
    """Check the rules of a whole configuration, apart from those that depend on the data."""
    require(run.name.isprintable(), "name", run.name, "a name of printable characters, in one line")
    for section in (run.model, run.train, run.data, run.eval):
        section.validate()
    run.model.validate_use(run.train, run.eval)
