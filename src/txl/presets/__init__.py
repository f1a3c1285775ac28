"""Presets: the paper's configurations, each with its source and published result, and small ones for a CPU.

`import txl` imports this module, so the configurations are only loaded on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False  # instead of `typing.TYPE_CHECKING`, because that import takes longer than this module
if TYPE_CHECKING:
    from txl.config import RunConfig
    from txl.presets.recipe import Preset


def named_presets() -> dict[str, list[Preset]]:
    """Return all presets, grouped by purpose, with the paper's models first."""
    from txl.presets.baselines import BASELINES, SMALL_BASELINES
    from txl.presets.published import ABLATIONS, PAPER, VANILLA
    from txl.presets.small import SMALL, SMALL_ABLATIONS

    return {
        "the paper's models": PAPER,
        "models that the paper compares with": [*VANILLA, *BASELINES],
        "this project's, for a CPU (wikitext-2: the recipe of ptb)": [*SMALL, *SMALL_BASELINES],
        "rows of the ablations, Tables 6, 7 and 10": [*ABLATIONS, *SMALL_ABLATIONS],
    }


def presets() -> dict[str, Preset]:
    """Return all presets by name, the paper's models first."""
    return {preset.name: preset for group in named_presets().values() for preset in group}


def find_preset(name: str) -> Preset:
    """Return the preset with the name `name`."""
    by_name = presets()
    if name not in by_name:
        from txl.errors import UserError, did_you_mean

        hint = did_you_mean(name, by_name, cutoff=0.4) or "txl presets lists them"
        raise UserError(f"unknown preset {name!r}; {hint}")
    return by_name[name]


def preset(name: str) -> RunConfig:
    """Return a new copy of a preset's configuration; the caller may change it."""
    return find_preset(name).make()
