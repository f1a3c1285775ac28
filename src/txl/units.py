"""Losses and times in readable units."""

from __future__ import annotations

import math


def is_character_unit(unit: str) -> bool:
    """Return whether a unit is measured in bits per character (else in perplexity)."""
    return unit in ("byte", "char")


def quality(nll: float, unit: str) -> float:
    """Convert a mean loss in nats to bits per token (bytes, characters) or to perplexity (words, BPE tokens)."""
    return nll / math.log(2) if is_character_unit(unit) else math.exp(min(nll, 700))


def measure_name(unit: str) -> str:
    """Return the short name of `quality`: bpc or ppl."""
    return "bpc" if is_character_unit(unit) else "ppl"


def metric(unit: str, nll: float) -> tuple[str, str]:
    """Return name and value of a unit's measure for a loss in nats: bits with four decimals, or perplexity."""
    value = quality(nll, unit)
    return measure_name(unit), f"{value:.4f}" if is_character_unit(unit) else ppl_text(value)


def ppl_text(ppl: float) -> str:
    """Return a perplexity as text with four digits or more; from a million on, with three digits and an exponent."""
    if ppl >= 1e6:
        return f"{ppl:.3g}"
    return f"{ppl:.3f}" if ppl < 10 else f"{ppl:.2f}" if ppl < 1000 else f"{ppl:,.0f}"


def duration(seconds: float) -> str:
    """Return a length of time as 1:02:03, or 2:03."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def quality_label(unit: str) -> str:
    """Return the full name of `quality`, for an axis or beside a number."""
    return {"byte": "bits per byte", "char": "bits per character"}.get(unit, f"perplexity per {token_name(unit)}")


def quality_text(nll: float, unit: str) -> str:
    """Return `quality` as text without its name: 1.234, or 56.7."""
    return f"{quality(nll, unit):.3f}" if is_character_unit(unit) else ppl_text(quality(nll, unit))


def token_name(unit: str) -> str:
    """Return the name of a token of a unit."""
    return {"byte": "byte", "char": "character", "word": "word", "bpe": "BPE token"}.get(unit, "token")


def duration_text(seconds: float) -> str:
    """Return a length of time in its two largest units: 4 min 5 s."""
    whole = round(seconds)
    for size, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part} {part_name}"
    return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"
