"""The configuration of a run: dataclasses, conversion from and to JSON, and the rules for their values.

`run` defines the whole configuration, `sections` its parts for data, training and evaluation, `model` the fields shared
by all models, and `transformer_xl`, `vanilla` and `recurrent` the fields of one family each. `families` lists the
families, and `fields` accesses fields by name. The metadata of each field holds its range, its help text and its marks
(`values.setting`).
"""

from txl.config.families import (
    MODEL_FAMILIES,
    MODEL_FIELDS,
    as_family,
    chosen_family,
    model_from_dict,
    model_with,
)
from txl.config.fields import (
    Option,
    differences,
    leaf_fields,
    may_change,
    options,
    parsed_options,
    with_options,
    with_unset_data,
)
from txl.config.model import ModelConfig, TransformerConfig
from txl.config.recurrent import RecurrentConfig, RecurrentKind
from txl.config.run import RunConfig, planned_name, validate
from txl.config.sections import (
    RANDOM_LENGTHS,
    AdaptationRule,
    AdaptedWeights,
    Boundary,
    DataConfig,
    EvalConfig,
    Lengths,
    Limit,
    LossName,
    StatisticsName,
    TrainConfig,
    Unit,
    WordRule,
    same_length,
    validate_temperature,
)
from txl.config.transformer_xl import AttentionName, TransformerXLConfig
from txl.config.values import FieldValues, kind_of, placeholder, shown, whole_number
from txl.config.vanilla import VanillaConfig

__all__ = [
    "MODEL_FAMILIES",
    "MODEL_FIELDS",
    "RANDOM_LENGTHS",
    "AdaptationRule",
    "AdaptedWeights",
    "AttentionName",
    "Boundary",
    "DataConfig",
    "EvalConfig",
    "FieldValues",
    "Lengths",
    "Limit",
    "LossName",
    "ModelConfig",
    "Option",
    "RecurrentConfig",
    "RecurrentKind",
    "RunConfig",
    "StatisticsName",
    "TrainConfig",
    "TransformerConfig",
    "TransformerXLConfig",
    "Unit",
    "VanillaConfig",
    "WordRule",
    "as_family",
    "chosen_family",
    "differences",
    "kind_of",
    "leaf_fields",
    "may_change",
    "model_from_dict",
    "model_with",
    "options",
    "parsed_options",
    "placeholder",
    "planned_name",
    "same_length",
    "shown",
    "validate",
    "validate_temperature",
    "whole_number",
    "with_options",
    "with_unset_data",
]
