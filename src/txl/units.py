"""Losses and times in the units that people read."""

from __future__ import annotations

import math


def metric(unit: str, nll: float) -> tuple[str, str]:
    """The measure that belongs to a unit of text, its name and value.

    Args:
        unit: of the tokens; bytes and characters have bits per character, the others perplexity.
        nll: mean loss in nats a token.
    """
    if unit in ("byte", "char"):
        return "bpc", f"{nll / math.log(2):.4f}"
    return "ppl", ppl_text(math.exp(min(nll, 700)))


def ppl_text(ppl: float) -> str:
    """A perplexity with four figures or more."""
    if ppl >= 1e6:
        return f"{ppl:.3g}"
    return f"{ppl:.3f}" if ppl < 10 else f"{ppl:.2f}" if ppl < 1000 else f"{ppl:,.0f}"


def duration(seconds: float) -> str:
    """1:02:03, or 2:03."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
