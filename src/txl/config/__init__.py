"""The configuration of a run: dataclasses, JSON in and out, and the rules that their values must obey.

`sections` has the fields; `values` reads them from JSON and text, `fields` finds them by name. The rules are in
`model_rules` and `run_rules` and, for each kind of model, in `kinds`; `parameters` counts.
"""

from txl.config.fields import differences, leaf_fields, with_options, with_unset_data
from txl.config.model_rules import (
    has_absolute_positions,
    has_auxiliary_losses,
    longest_distance,
    validate_lengths,
    validate_model,
)
from txl.config.parameters import parameter_count
from txl.config.run_rules import RANDOM_LENGTHS, validate, validate_temperature
from txl.config.sections import (
    AttentionName,
    DataConfig,
    Encoding,
    EvalConfig,
    LossName,
    ModelConfig,
    RunConfig,
    TrainConfig,
    Unit,
    WordRule,
)
from txl.config.values import parse_value, whole_number

__all__ = [
    "RANDOM_LENGTHS",
    "AttentionName",
    "DataConfig",
    "Encoding",
    "EvalConfig",
    "LossName",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "Unit",
    "WordRule",
    "differences",
    "has_absolute_positions",
    "has_auxiliary_losses",
    "leaf_fields",
    "longest_distance",
    "parameter_count",
    "parse_value",
    "validate",
    "validate_lengths",
    "validate_model",
    "validate_temperature",
    "whole_number",
    "with_options",
    "with_unset_data",
]
