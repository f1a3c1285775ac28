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
    config: ModelConfig, vocabulary: Sized | SupportsIndex, device: str | None = None, dtype: torch.dtype | None = None
) -> FamilyModel:
    """Build a model with fresh weights, drawn from torch's default generator, in PyTorch's default dtype.

    The class of the configuration determines the family, and the choice of attention depends on the device and the
    dtype of the matrix products in training (None: not known yet). The caller moves the model to the device.
    """
    vocab_size = len(vocabulary) if isinstance(vocabulary, Sized) else index(vocabulary)
    return FAMILIES[type(config)](config, vocab_size, device, dtype)
