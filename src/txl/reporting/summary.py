"""The short answer: what a run came to, out of its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl.reporting.plots import quality


@dataclass(frozen=True)
class Findings:
    """The parts of a log that a summary and a report are made of."""

    start: dict[str, Any]
    train: list[dict[str, Any]]
    valid: list[dict[str, Any]]
    result: dict[str, Any] | None
    """The evaluation that counts: the newest on the test split, at the longest memory if it was a sweep."""
    without_memory: dict[str, Any] | None
    """The one with memory 0 of the same sweep."""
    sweep: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    compression: dict[str, Any] | None
    """What compressors need for the bytes that `result` scored."""
    ended: bool

    @property
    def unit(self) -> str:
        """What one token is."""
        return self.start["corpus"]["unit"]


def findings(events: Sequence[dict[str, Any]]) -> Findings | None:
    """What a log says; None for one without a beginning."""
    starts = [event for event in events if event["event"] in ("start", "resume")]
    if not starts:
        return None

    def all_of(kind: str) -> list[dict[str, Any]]:
        return [event for event in events if event["event"] == kind]

    sweeps = [event for event in all_of("sweep") if event["split"] == "test"]
    evals = [event for event in all_of("eval") if event["split"] == "test"]
    sweep = sweeps[-1]["rows"] if sweeps else []
    result = max(sweep, key=lambda row: row["mem_len"]) if sweep else None
    if evals and (not sweeps or evals[-1]["time"] > sweeps[-1]["time"]):
        result = evals[-1]
    without = next((row for row in sweep if row["mem_len"] == 0), None)
    if without is not None and result is not None and without["checkpoint"] != result["checkpoint"]:
        without = None
    matching = [
        event
        for event in all_of("compression")
        if result is not None and event["corpus"] == result["corpus"] and event["text"] == scored_bytes(result)
    ]
    latest = max((event["step"] for event in all_of("train")), default=0)
    return Findings(
        start=starts[-1],
        train=_last_stretch(all_of("train")),
        valid=_last_stretch(all_of("valid")),
        result=result,
        without_memory=without,
        sweep=sweep,
        samples=_newest_samples(all_of("sample")),
        compression=matching[-1] if matching else None,
        ended=latest >= starts[-1]["config"]["train"]["steps"],
    )


def scored_bytes(row: dict[str, Any]) -> int | None:
    """Bytes of text that an evaluation read: its tokens (the lanes' first ones and the dropped ones too) times the
    split's mean bytes a token."""
    if row["bytes_per_token"] is None:
        return None
    return round((row["tokens"] + row["dropped"] + 1) * row["bytes_per_token"])


def _last_stretch(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One event a step: a run that went on from an earlier checkpoint has logged some steps twice."""
    by_step = {event["step"]: event for event in events}
    return [by_step[step] for step in sorted(by_step)]


def _newest_samples(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples of the checkpoint that was sampled last."""
    return [each for each in samples if each["checkpoint"] == samples[-1]["checkpoint"]][-6:]


def quality_text(row: dict[str, Any], unit: str) -> str:
    """1.234 bits a character, or perplexity 56.7."""
    value = quality(row, unit)
    return f"{value:.3f} bpc" if unit in ("byte", "char") else f"perplexity {value:.2f}"


def summary_lines(events: Sequence[dict[str, Any]], report: Path | None = None) -> list[str]:
    """Three lines: the result with and without memory, what compressors need, where the report is."""
    found = findings(events)
    if found is None or found.result is None:
        return ["no result yet: run txl eval DIR --mem-lens 0,128,256"]
    result, unit = found.result, found.unit
    lines = [
        f"{result['corpus']} {result['split']} split, {result['tokens']:,} targets: "
        f"{quality_text(result, unit)} with memory {result['mem_len']}"
    ]
    if found.without_memory is not None:
        gain = found.without_memory["nll"] - result["nll"]
        verdict = "memory helps" if gain > 0 else "memory does not help"
        lines[0] += f", {quality_text(found.without_memory, unit)} without: {verdict}"
    per_byte = result["bits_per_byte"]
    if found.compression is not None and per_byte is not None:
        zlib, lzma = (8 * found.compression[name] / found.compression["text"] for name in ("zlib", "lzma"))
        lines.append(f"bits per byte of that text: {per_byte:.3f}; zlib needs {zlib:.3f}, lzma {lzma:.3f}")
    else:
        lines.append(
            f"loss {result['nll']:.4f} nats a token" + ("" if per_byte is None else f", {per_byte:.3f} bits per byte")
        )
    speed = found.train[-1]["tokens_per_second"] if found.train else 0.0
    lines.append(
        f"{found.start['total_parameters']:,} parameters, trained at {speed:,.0f} tokens/s"
        + ("" if report is None else f"; report: {report}")
    )
    return lines
