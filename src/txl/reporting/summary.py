"""The short answer: three lines on what a run came to, out of its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from txl.reporting.findings import Findings, findings
from txl.reporting.wording import change_text, is_character_unit, manner_words, quality_text


def summary_lines(events: Sequence[dict[str, Any]], report: Path | None = None) -> list[str]:
    """Three lines: the result with and without memory beside zlib's and lzma's; size and speed; where the report is.

    Args:
        events: of a run's log.
        report: the report's path; None: the third line says how to write one.
    """
    found = findings(events)
    if found is None or not found.train:
        return ["nothing has been trained here yet: run txl train"]
    hardware = found.start["hardware"]
    place = hardware.get("gpu") or f"{hardware['cpu']} ({hardware['cores']} cores)"
    return [
        _result_line(found),
        f"{found.start['total_parameters']:,} parameters, {found.train[-1]['tokens']:,} tokens trained on at "
        f"{found.speed:,.0f} tokens/s on {place}",
        "report: run txl report DIR" if report is None else f"report: {report}",
    ]


def _result_line(found: Findings) -> str:
    result, without = found.result, found.without_memory
    if result is None:
        return "no result on the test split yet: run txl eval DIR --mem-lens 0,128,256"
    in_bytes = result.get("bits_per_byte") is not None

    def figure(row: dict[str, Any]) -> str:
        if in_bytes:
            return f"{row['bits_per_byte']:.3f}"
        return quality_text(row["nll"], result["unit"])

    measure = "bits per byte" if in_bytes else "bpc" if is_character_unit(result["unit"]) else "ppl"
    line = f"{result['corpus']} {result['split']}, {result['tokens']:,} targets: "
    line += ", ".join([f"{figure(result)} {measure} with memory {result['mem_len']:,}", *manner_words(result)])
    if without is not None:
        line += f", {figure(without)} without (memory: {change_text(result['nll'], without['nll'])})"
    if found.compression is not None and in_bytes:
        zlib, lzma = (8 * found.compression[name] / found.compression["text"] for name in ("zlib", "lzma"))
        line += f"; zlib {zlib:.3f}, lzma {lzma:.3f}"
    return line
