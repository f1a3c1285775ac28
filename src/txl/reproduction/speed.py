"""Table 9 at a scale: the measurement of `txl bench table9`, repeated."""

from __future__ import annotations

from typing import Any

from txl.benchmarking import transformer_xl_of
from txl.benchmarking.table9 import slowdown
from txl.presets import find_preset
from txl.reproduction.definition import Row
from txl.reproduction.scales import Scale

SEGMENT = 128
"""Tokens that Transformer-XL reads at once."""


def speed_length(row: Row, scale: Scale) -> int:
    """The attention length that stands for a row's at a scale."""
    assert row.length is not None
    return max(1, round(row.length * scale.speed_lengths))


def measure_speed(row: Row, scale: Scale, device: str) -> dict[str, Any]:
    """One measurement of a row of Table 9."""
    assert row.preset is not None
    published = find_preset(row.preset)
    # The full attention lengths ask for the full model: only then are the paper's numbers beside ours.
    whole = scale.speed_lengths == 1
    shape = transformer_xl_of(published.make() if whole else scale.base("character"))
    length, dtype = speed_length(row, scale), scale.dtype or "float32"
    found = slowdown(shape, published.vocab_size, length, SEGMENT, scale.speed_steps, device, dtype)
    return {"slower": found.ratio, **found.to_dict()}
