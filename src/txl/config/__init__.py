"""The configuration of a run: dataclasses, conversion from and to JSON, and the rules for their values.

`run` defines the whole and accesses fields by name, `sections` the parts that all models share, `model` the fields of
all models, `families` the families. The metadata of each field holds its range, help text and marks (`values.setting`).
"""
# ruff: noqa: F401

from txl.config.families import MODEL_FAMILIES, MODEL_FIELDS, as_family, chosen_family, model_from_dict, model_with
from txl.config.model import ModelConfig, TransformerConfig
from txl.config.recurrent import RecurrentConfig, RecurrentKind
from txl.config.run import (
    Option,
    RunConfig,
    differences,
    leaf_fields,
    may_change,
    options,
    parsed_options,
    planned_name,
    validate,
    with_options,
    with_unset_data,
)
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
