"""The configuration of a run: dataclasses, JSON in and out, and the rules that their values must obey.

`models` has the families of models, `sections` what all of them share, `run` the whole. Each field has its range, its
help and what depends on it in its metadata (`values.setting`). `fields` finds fields by name.
"""

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
from txl.config.models import (
    MODEL_FAMILIES,
    MODEL_FIELDS,
    AttentionName,
    Encoding,
    ModelConfig,
    RecurrentConfig,
    RecurrentKind,
    TransformerConfig,
    TransformerXLConfig,
    VanillaConfig,
    as_family,
    chosen_family,
    model_from_dict,
    model_with,
)
from txl.config.run import RunConfig, validate
from txl.config.sections import (
    RANDOM_LENGTHS,
    DataConfig,
    EvalConfig,
    Lengths,
    Limit,
    LossName,
    TrainConfig,
    Unit,
    WordRule,
    validate_temperature,
)
from txl.config.values import parse_value, whole_number

__all__ = [
    "MODEL_FAMILIES",
    "MODEL_FIELDS",
    "RANDOM_LENGTHS",
    "AttentionName",
    "DataConfig",
    "Encoding",
    "EvalConfig",
    "Lengths",
    "Limit",
    "LossName",
    "ModelConfig",
    "Option",
    "RecurrentConfig",
    "RecurrentKind",
    "RunConfig",
    "TrainConfig",
    "TransformerConfig",
    "TransformerXLConfig",
    "Unit",
    "VanillaConfig",
    "WordRule",
    "as_family",
    "chosen_family",
    "differences",
    "leaf_fields",
    "may_change",
    "model_from_dict",
    "model_with",
    "options",
    "parse_value",
    "parsed_options",
    "validate",
    "validate_temperature",
    "whole_number",
    "with_options",
    "with_unset_data",
]
