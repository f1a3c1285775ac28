"""Language models, all behind `txl.models.language_model.LanguageModel`."""

from __future__ import annotations

from collections.abc import Sized

from txl.config import ModelConfig
from txl.models.transformer_xl import TransformerXL


def build_model(config: ModelConfig, vocabulary: Sized | int) -> TransformerXL:
    """A model with fresh weights, drawn from torch's default generator.

    Args:
        config: its shape.
        vocabulary: a vocabulary, or the number of tokens in one.

    Raises:
        UserError: for a configuration that cannot be built.
    """
    return TransformerXL(config, vocabulary if isinstance(vocabulary, int) else len(vocabulary))
