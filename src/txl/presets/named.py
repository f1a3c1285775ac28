"""All presets, grouped by purpose."""

from __future__ import annotations

from txl.presets.baselines import BASELINES, SMALL_BASELINES
from txl.presets.published import ABLATIONS, PAPER, VANILLA
from txl.presets.recipe import Preset
from txl.presets.small import SMALL, SMALL_ABLATIONS


def named_presets() -> dict[str, list[Preset]]:
    """Return all presets, grouped by purpose, with the paper's models first."""
    return {
        "the paper's models": PAPER,
        "models that the paper compares with": [*VANILLA, *BASELINES],
        "this project's, for a CPU (wikitext-2: the recipe of ptb)": [*SMALL, *SMALL_BASELINES],
        "rows of the ablations, Tables 6, 7 and 10": [*ABLATIONS, *SMALL_ABLATIONS],
    }
