"""Language models, all with the interface `txl.models.language_model.LanguageModel`."""

from __future__ import annotations

from collections.abc import Sized
from operator import index
from typing import SupportsIndex

import torch

from txl.config import ModelConfig
from txl.models.family import FamilyModel
from txl.models.recurrent import RecurrentModel
from txl.models.transformer_xl import TransformerXL
from txl.models.vanilla import VanillaTransformer

# Model class of every family, by configuration class.
FAMILIES: dict[type[ModelConfig], type[FamilyModel]] = {
    model.config_class: model for model in (TransformerXL, VanillaTransformer, RecurrentModel)
}


def build_model(
    config: ModelConfig,
    vocabulary: Sized | SupportsIndex,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> FamilyModel:
    """Build a model with fresh weights, drawn from torch's default generator.

    Args:
        config: model configuration; its class determines the family.
        vocabulary: vocabulary, or its number of tokens.
        device: device that the model will train on, on which the choice of attention depends; None: not known yet. The
            caller moves the model there.
        dtype: dtype of the matrix products in training (`train.dtype`), on which it depends too; None: not known yet.
            The weights are always in PyTorch's default dtype.
    """
    vocab_size = len(vocabulary) if isinstance(vocabulary, Sized) else index(vocabulary)
    return FAMILIES[type(config)](config, vocab_size, device, dtype)
