"""First section of the report: the result on the test split, compared with general-purpose compressors."""

from __future__ import annotations

import shlex

from txl.config import model_from_dict
from txl.reporting.comparison import LZMA_AFTER
from txl.reporting.findings import Findings, tokens_read
from txl.reporting.page import bars, escape, note, section, table
from txl.reporting.wording import change_text, manner_words, settings_text
from txl.runs.events import Evaluation, EvaluationFigures
from txl.units import is_character_unit, ppl_text, quality_label, quality_text, token_name


def result_section(found: Findings, name: str, problem: str | None) -> str:
    """Return the section: the result with and without memory, and the compressors.

    Args:
        found: contents of the run's log.
        name: run directory as written on the command line.
        problem: reason why compressed sizes are missing; None if there is none.
    """
    result, without = found.result, found.without_memory
    if result is None:
        memory = found.start["config"]["eval"]["mem_len"]
        lengths = f"0,{memory}" if memory else "0"
        return section(
            "Result", note(f"Not tested yet: `txl eval {shlex.quote(name)} --mem-lens {lengths}` adds it.", "warning")
        )
    settings = settings_text(result, found.split_of(result))
    parts = [_figures(found, result, without), note(f"Measured on {settings}.", "lead")]
    rows = [row for row in (result, without) if row is not None]
    parts.append(
        table(
            f"Loss on the {result['split']} split of {result['corpus']}",
            ("", *evaluation_headings(result["unit"])),
            [[memory_name(found, row), *evaluation_cells(row)] for row in rows],
            numbers=range(1, 7),
            strong=[0],
        )
    )
    if without is None and result["mem_len"]:
        command = f"txl eval {shlex.quote(name)} --mem-lens 0,{result['mem_len']}"
        parts.append(note(f"Not measured without memory: `{command}` adds it."))
    parts.append(_compressors(found, rows))
    if problem is not None:
        parts.append(note(f"zlib, bzip2 and lzma are not shown: {problem}."))
    parts.append(_caveat(found, result))
    return section(f"Result on the {result['split']} split", *parts)


def is_recurrent(found: Findings) -> bool:
    """Return whether the model carries a state of constant size instead of a memory of positions."""
    return model_from_dict(found.start["config"]["model"]).constant_state


def evaluation_headings(unit: str) -> tuple[str, ...]:
    """Return the column headings for `evaluation_cells`."""
    bits = "bpc" if is_character_unit(unit) else "bits per token"
    return (bits, "ppl", "bits per byte", "nats per token", "tokens/s")


def evaluation_cells(row: EvaluationFigures) -> list[str]:
    """Return the measures of an evaluation as table cells."""
    per_byte = row.get("bits_per_byte")
    return [
        f"{row['bpc']:.4f}",
        ppl_text(row["ppl"]),
        "unknown" if per_byte is None else f"{per_byte:.4f}",
        f"{row['nll']:.4f}",
        f"{row['tokens_per_second']:,.0f}",
    ]


def _figures(found: Findings, result: Evaluation, without: Evaluation | None) -> str:
    unit = result["unit"]
    label = quality_label(unit)
    figures = [(quality_text(result["nll"], unit), f"{label}, {memory_name(found, result)}")]
    if without is not None:
        figures.append((quality_text(without["nll"], unit), f"{label}, without memory"))
        amount, words = change_text(result["nll"], without["nll"]).split(" ", 1)
        figures.append((amount, f"{words} with memory"))
    boxes = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in figures)
    return f'<div class="result">{boxes}</div>'


def memory_name(found: Findings, row: Evaluation) -> str:
    """Return in words an evaluation's memory and the settings that differ from a plain evaluation (`manner_words`)."""
    if row["sliding"]:
        return ", ".join(manner_words(row))
    memory = f"memory {row['mem_len']:,}" if row["mem_len"] else "without memory"
    return ", ".join(["its state carried" if is_recurrent(found) else memory, *manner_words(row)])


def _compressors(found: Findings, rows: list[Evaluation]) -> str:
    if found.compression is None or found.result is None or found.result.get("bits_per_byte") is None:
        return ""
    text, result = found.compression["text"], found.result
    lines = [
        (f"this model, {memory_name(found, row)}", row["bits_per_byte"] or 0.0, at == 0) for at, row in enumerate(rows)
    ]
    names = {"lzma": "lzma (xz -9e)", "bz2": "bzip2 (level 9)", "zlib": "zlib (level 9)"}
    names = ({LZMA_AFTER: "lzma, training text seen"} if LZMA_AFTER in found.compression else {}) | names
    lines += [(words, 8 * found.compression[name] / text, False) for name, words in names.items()]
    split = found.split_of(result)
    exact = result["unit"] == "byte" or (split is not None and tokens_read(result) == split["tokens"])
    about = "" if exact else "about "
    weights = found.start["total_parameters"] * 4
    explained = (
        f"Compressors see {about}the same {text:,} bytes and nothing else: zlib makes {found.compression['zlib']:,} "
        f"bytes of them, bzip2 {found.compression['bz2']:,}, lzma {found.compression['lzma']:,}. The model learned "
        f"from other text first, and its own size ({weights:,} bytes of float32 weights) is not counted."
    )
    if LZMA_AFTER in found.compression:
        explained += (
            f" Appended to the training text, of which it sees the last 64 MiB at most, lzma’s file grows by "
            f"{found.compression[LZMA_AFTER]:,} bytes."
        )
    return bars("Bits per byte of the text; lower is better", ("", "bits per byte"), lines) + "\n" + note(explained)


def _caveat(found: Findings, result: Evaluation) -> str:
    """Return a note on how <unk> limits the meaning of the measures; empty if no token read is <unk>."""
    unknown = found.unknown_tokens(result)
    if unknown == 0 or result["unit"] in ("byte", "bpe"):
        return ""
    some = "Tokens that the vocabulary lacks are" if unknown is None else f"{unknown:,} of the tokens read are"
    return note(
        f"{some} <unk>, whose spelling costs no bits: bits per byte is then a lower bound, and "
        f"the loss per {token_name(result['unit'])} compares only with models of the same vocabulary."
    )
