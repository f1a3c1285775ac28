"""Language models, all behind `txl.models.language_model.LanguageModel`."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from txl.config import ModelConfig
from txl.models.decoder import Decoder
from txl.models.recurrent import RecurrentModel
from txl.models.transformer_xl import TransformerXL
from txl.models.vanilla import VanillaTransformer

FAMILIES: dict[type[ModelConfig], type[Decoder[Any]]] = {
    model.config_class: model for model in (TransformerXL, VanillaTransformer, RecurrentModel)
}
"""The model of every family, by its configuration."""


def build_model(config: ModelConfig, vocabulary: Sized | int, device: str | None = None) -> Decoder[Any]:
    """A model with fresh weights, drawn from torch's default generator.

    Args:
        config: its shape, whose class is its family.
        vocabulary: a vocabulary, or the number of tokens in one.
        device: where it will train (the caller moves it there); attention is chosen for it. None: not known yet.

    Raises:
        UserError: for a configuration that cannot be built.
    """
    vocab_size = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    return FAMILIES[type(config)](config, vocab_size, device)
