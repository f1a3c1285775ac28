"""Speed of models, always beside the machine's own matrix-multiplication rate measured in the same run."""

from __future__ import annotations

from txl.config import RunConfig, TransformerXLConfig
from txl.errors import UserError

TABLE_9 = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""The paper's slowdowns of a vanilla Transformer by attention length, on one GPU."""


def transformer_xl_of(run: RunConfig) -> TransformerXLConfig:
    """Return the model of a configuration."""
    if not isinstance(run.model, TransformerXLConfig):
        raise UserError(f"{run.name} is a baseline ({run.model.chosen_by}); give a preset of Transformer-XL")
    return run.model
