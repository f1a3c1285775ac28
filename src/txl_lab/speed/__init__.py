"""Measurements of the speed of models, and of the machine's rate of matrix multiplication to compare with."""

from __future__ import annotations

from txl.config import RunConfig, TransformerXLConfig
from txl.errors import UserError

# Published slowdown of a vanilla Transformer on one GPU (Table 9), by attention length
TABLE_9 = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def transformer_xl_of(run: RunConfig) -> TransformerXLConfig:
    """Return the model configuration of a run; refuse any model other than a Transformer-XL."""
    if not isinstance(run.model, TransformerXLConfig):
        raise UserError(f"{run.name} is a baseline ({run.model.chosen_by}); give a preset of Transformer-XL")
    return run.model
