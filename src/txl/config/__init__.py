"""The configuration of a run: dataclasses, JSON in and out, and the rules that their values must obey.

`run` has the whole, `sections` its parts on data, training and evaluation, `model` the fields that all models share,
`transformer_xl`, `vanilla` and `recurrent` those of one family; `families` lists the families. Each field has its
range, its help and what depends on it in its metadata (`values.setting`). `fields` finds fields by name.
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
from txl.config.model import Encoding, ModelConfig, TransformerConfig
from txl.config.recurrent import RecurrentConfig, RecurrentKind
from txl.config.run import RunConfig, validate
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
from txl.config.values import FieldValues, choices_of, parse_value, placeholder, shown, whole_number
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
    "Encoding",
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
    "choices_of",
    "chosen_family",
    "differences",
    "leaf_fields",
    "may_change",
    "model_from_dict",
    "model_with",
    "options",
    "parse_value",
    "parsed_options",
    "placeholder",
    "same_length",
    "shown",
    "validate",
    "validate_temperature",
    "whole_number",
    "with_options",
    "with_unset_data",
]
