"""Language models, all behind `txl.models.language_model.LanguageModel`."""

from __future__ import annotations

from collections.abc import Sized

from txl.config import ModelConfig
from txl.models.family import FamilyModel
from txl.models.recurrent import RecurrentModel
from txl.models.transformer_xl import TransformerXL
from txl.models.vanilla import VanillaTransformer

FAMILIES: dict[type[ModelConfig], type[FamilyModel]] = {
    model.config_class: model for model in (TransformerXL, VanillaTransformer, RecurrentModel)
}
"""The model of every family, by its configuration."""


def build_model(config: ModelConfig, vocabulary: Sized | int, device: str | None = None) -> FamilyModel:
    """Build a model with fresh weights, drawn from torch's default generator.

    Args:
        config: its shape, whose class is its family.
        vocabulary: a vocabulary, or the number of tokens in one.
        device: device that it will train on (the caller moves it there), which the choice of attention depends on;
            None: not known yet.
    """
    vocab_size = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    return FAMILIES[type(config)](config, vocab_size, device)
