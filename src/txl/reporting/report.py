"""Report of a run: report.html, a page that opens offline, and a summary of a few lines; both made from the log."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from markupsafe import Markup

from txl.config import RunConfig, differences, leaf_fields, model_from_dict
from txl.errors import UserError
from txl.files import JsonObject, write_whole
from txl.presets import preset, presets
from txl.reporting.attention_page import FOLDER, RECORD, attention_section, read_record
from txl.reporting.compressors import LZMA_AFTER, compressed_bits, measured_sizes
from txl.reporting.findings import Findings, findings, scored_bytes, tokens_read
from txl.reporting.page import render
from txl.reporting.plots import POINTS, loss_figure, loss_limits, memory_figure, schedule_figure
from txl.reporting.wording import arithmetic_words, change_text, counted, manner_words, short_name
from txl.runs.directory import RunDirectory
from txl.runs.events import Evaluation, EvaluationFigures, EventName, SampleEvent
from txl.units import measure_name, ppl_text, quality, quality_label, quality_text

# Largest numbers of samples, of characters per sample, and of other evaluations shown; the page counts the rest.
_SAMPLES, _SAMPLE_CHARACTERS, _OTHERS = 6, 3000, 12
_COMPRESSORS = {
    LZMA_AFTER: "lzma, training text seen",
    "lzma": "lzma (xz -9e)",
    "bz2": "bzip2 (level 9)",
    "zlib": "zlib (level 9)",
}


def write_report(
    directory: str | Path,
    *,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    after_training_text: bool = False,
) -> Path:
    """Write a run's report from its log and configuration; no model is loaded.

    The sizes to which zlib, bzip2 and lzma compress the scored text are measured once and added to the log.

    Args:
        directory: run directory.
        out: path of the report; None: report.html in the run directory.
        data_dir: directory of the prepared corpora; None: the default (`data_directory`).
        after_training_text: True to measure lzma also with the scored text appended to the training text. This takes a
            minute for 64 MiB of training text, the most that lzma uses.

    Returns:
        The path of the report. An error leaves the old page unchanged.

    Raises:
        UserError: if nothing has been trained, or the page cannot be written.
    """
    run_directory = RunDirectory(directory)
    config, events = run_directory.config(), run_directory.events()
    checkpoint = default_checkpoint(run_directory)
    facts = findings(events, checkpoint)
    if run_directory.lacks_log():
        log = run_directory.path / "log.jsonl"
        raise UserError(f"{log}: missing or incomplete, and a report is made from it; restore it from a copy")
    if facts is None or not facts.train:
        raise UserError(f"{directory}: nothing has been trained here, so there is nothing to report; run txl train")
    result, known, problem = facts.result, facts.compression, None
    if result is not None and (known is None or (after_training_text and LZMA_AFTER not in known)):
        try:
            fields = measured_sizes(result, scored_bytes(result), data_dir, after_training_text)
        except (UserError, OSError) as error:
            problem = str(error)
        else:
            facts = findings([*events, {"event": EventName.COMPRESSION, **fields}], checkpoint) or facts
            with suppress(UserError):  # a read-only run still gets its report, with `out`
                run_directory.append(EventName.COMPRESSION, facts.train[-1]["step"], **fields)
    attention, section = run_directory.path / FOLDER / RECORD, Markup("")
    if attention.is_file():
        try:
            section = attention_section(read_record(attention))
        except UserError as error:
            section = render("attention.html", {"problem": str(error)})
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # a record changed by hand
            section = render("attention.html", {"problem": f"{attention}: damaged; run txl attention again"})
    values = {
        "name": shlex.quote(str(directory)),
        "has_checkpoint": run_directory.newest() is not None,
        "problem": problem,
        "attention_section": section,
        **_run_values(config, facts),
        **_training_values(config, facts),
        **_result_values(facts),
    }
    path = Path(out) if out is not None else run_directory.path / "report.html"
    write_whole(path, render("report.html", values))
    return path


def _run_values(config: RunConfig, facts: Findings) -> dict[str, object]:
    """Return what the page says about the run as a whole: title, configuration, corpus, machine, commands."""
    start, name = facts.start, config.name.replace("-", " ") if config.is_planned else config.name
    total, hardware, corpus = start["total_parameters"], start["hardware"], start["corpus"]
    parameters = [[part, f"{count:,}", f"{count / total:.1%}"] for part, count in start["parameters"].items()]
    fields: dict[str, list[tuple[str, str]]] = {}
    for dotted, _, _, value in leaf_fields(config):
        group, _, field = dotted.rpartition(".")
        if group:
            fields.setdefault(group, []).append((field, "none" if value is None or value == () else str(value)))
    changes = differences(preset(config.name), config) if config.name in presets() else None
    memory = hardware["memory_bytes"]
    machine = [
        ("processor", hardware["cpu"]),
        ("cores", f"{hardware['cores']} usable, {counted(hardware['threads'], 'thread')}"),
        ("memory", f"{memory / 2**30:.1f} GiB" if memory else "unknown"),
        ("device", hardware.get("gpu", hardware["device"])),
        ("attention", start["attention"]),
        *((part, str(version)) for part, version in start["software"].items()),
    ]
    begun = datetime.fromtimestamp(facts.stretches[0]["time"], UTC)
    commands = [event["command"] for event in facts.stretches if event["command"]]
    records = corpus["splits"]
    has_unknown = any(record["unknown"] for record in records.values())
    splits = [["split", "tokens", "bytes", *(["unknown (<unk>)"] if has_unknown else [])]]
    for split, record in records.items():
        unknown = [f"{record['unknown']:,}"] if has_unknown else []
        splits.append([split, f"{record['tokens']:,}", f"{record['bytes']:,}", *unknown])
    hashes = [(f"{split}, text", record["sha256_text"]) for split, record in records.items()]
    hashes += [(f"{split}, tokens", record["sha256_tokens"]) for split, record in records.items()]
    return {
        "config": config,
        "facts": facts,
        "title": f"{name} on {short_name(corpus['name'])}",
        "begun": begun.strftime("%d %B %Y, %H:%M UTC").lstrip("0"),
        "parameters": [*parameters, ["all", f"{total:,}", "100.0%"]],
        "fields": fields,
        "changes": None if changes is None else "; ".join(changes).replace(" -> ", " → "),
        "machine": machine,
        "commands": "\n".join(shlex.join([Path(words[0]).name, *words[1:]]) for words in commands),
        "splits": splits,
        "hashes": [*hashes, ("all that defines the data", corpus["identity"])],
    }


def _training_values(config: RunConfig, facts: Findings) -> dict[str, object]:
    """Return the curves of training and of memory lengths, the samples and the other evaluations."""
    shown = [quality(event["loss"], facts.unit) for event in facts.train]
    top = loss_limits(shown, [quality(event["nll"], facts.unit) for event in facts.valid])[1]
    values: dict[str, object] = {
        "best": min(facts.valid, key=lambda event: event["nll"], default=None),
        "loss_figure": loss_figure(facts.train, facts.valid, facts.unit),
        "schedule_figure": schedule_figure(facts.train, config.train.clip),
        "points": POINTS,
        "above_frame": max(shown) if max(shown) > top else None,
        "samples": [(sample, _sampled(sample)) for sample in facts.samples[-_SAMPLES:]],
        "characters": _SAMPLE_CHARACTERS,
        "others": [_other(row) for row in facts.others[:_OTHERS]],
    }
    curve, lengths = facts.curve, sorted({0, config.model.mem_len, config.eval.mem_len})
    if not curve:
        missing = len(lengths) > 1 and not _is_recurrent(facts)
        return values | {"unmeasured": ",".join(map(str, lengths)) if missing else ""}
    return values | {
        "memory_figure": memory_figure(curve, curve[0]["unit"], config.model.mem_len or None),
        "curve": [[f"{row['mem_len']:,}", _window(row), *_cells(row)] for row in curve],
        "windows_are_memory": {row["window"] == row["mem_len"] for row in curve if row["mem_len"]} == {True},
    }


def _result_values(facts: Findings) -> dict[str, object]:
    """Return the result on the test split, in figures, and beside compressors."""
    result, without = facts.result, facts.without_memory
    if result is None:
        memory = facts.start["config"]["eval"]["mem_len"]
        return {"untested": f"0,{memory}" if memory else "0"}
    rows = [row for row in (result, without) if row is not None]
    label, split = quality_label(result["unit"]), facts.split_of(result)
    headline = [(quality_text(row["nll"], row["unit"]), f"{label}, {_memory_name(facts, row)}") for row in rows]
    if without is not None:
        amount, words = change_text(result["nll"], without["nll"]).split(" ", 1)
        headline.append((amount, f"{words} with memory"))
    values: dict[str, object] = {
        "headline": headline,
        "measured": [[_memory_name(facts, row), *_cells(row)] for row in rows],
        "unknown": split["unknown"] if result["unknown"] is None and split is not None else result["unknown"],
        "compressors": [],
    }
    if facts.compression is None or result["bits_per_byte"] is None:
        return values
    bits = compressed_bits(facts.compression)
    exact = result["unit"] == "byte" or (split is not None and tokens_read(result) == split["tokens"])
    bars = [(f"this model, {_memory_name(facts, row)}", row["bits_per_byte"] or 0.0) for row in rows]
    bars += [(words, bits[name]) for name, words in _COMPRESSORS.items() if name in bits]
    after = facts.compression.get(LZMA_AFTER)
    return values | {"compressors": bars, "about": "" if exact else "about ", "lzma_after": after}


def _is_recurrent(facts: Findings) -> bool:
    """Return whether the model carries a state of constant size instead of a memory of positions."""
    return model_from_dict(facts.start["config"]["model"]).constant_state


def _memory_name(facts: Findings, row: Evaluation) -> str:
    """Return in words an evaluation's memory and the settings that differ from a plain evaluation (`manner_words`)."""
    if row["sliding"]:
        return ", ".join(manner_words(row))
    memory = f"memory {row['mem_len']:,}" if row["mem_len"] else "without memory"
    return ", ".join(["its state carried" if _is_recurrent(facts) else memory, *manner_words(row)])


def _cells(row: EvaluationFigures) -> list[str]:
    """Return the measures of an evaluation as table cells."""
    per_byte = "unknown" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
    speed = f"{row['tokens_per_second']:,.0f}"
    return [f"{row['bpc']:.4f}", ppl_text(row["ppl"]), per_byte, f"{row['nll']:.4f}", speed]


def _window(row: Evaluation | SampleEvent) -> str:
    return "none" if row["window"] is None else f"{row['window']:,}"


def _sampled(sample: SampleEvent) -> str:
    """Return the settings of a sample in words."""
    words = [f"temperature {sample['temperature']:g}" if sample["temperature"] else "greedy"]
    if sample["temperature"]:
        cuts = {"top-k": sample["top_k"], "top-p": sample["top_p"]}
        words += [f"{cut} {value}" for cut, value in cuts.items() if value is not None]
        words.append("no seed" if sample["seed"] is None else f"seed {sample['seed']}")
    if (memory := sample["mem_len"]) is not None:
        words.append(f"memory {memory:,}, window {_window(sample)}")
    return ", ".join([*words, f"at most {counted(sample['max_tokens'], 'token')}"])


def _other(row: Evaluation) -> list[str]:
    """Return an evaluation as table cells; rows with equal words differ only in their targets."""
    lanes = f"segments of {row['segment']:,} in {counted(row['batch_size'], 'lane')}"
    how = [] if row["sliding"] else [f"memory {row['mem_len']:,}", f"window {_window(row)}", lanes]
    return [
        row["corpus"],
        row["split"],
        row["checkpoint"].removeprefix("step-").lstrip("0") or "0",
        f"{row['tokens']:,}",
        ", ".join([*how, *manner_words(row), *arithmetic_words(row)]),
        f"{row['nll']:.4f}",
        f"{quality_text(row['nll'], row['unit'])} {measure_name(row['unit'])}",
    ]


def default_checkpoint(run: RunDirectory) -> str | None:
    """Return the name of the checkpoint that commands read by default; None if there is none."""
    try:
        return run.checkpoint().name
    except UserError:
        return None


def summary_lines(events: Sequence[JsonObject], report: Path | None = None, checkpoint: str | None = None) -> list[str]:
    """Return a summary: result with and without memory, compressors on the same bytes, size and speed, report path.

    The checkpoint is that of `findings`. Without a report, the last line names the command that writes one.
    """
    facts = findings(events, checkpoint)
    if facts is None or not facts.train:
        return ["nothing has been trained here yet: run txl train"]
    result, without, sizes = facts.result, facts.without_memory, facts.compression
    lines = ["no result on the test split yet: run txl eval DIR --mem-lens 0,128,256"]
    if result is not None:
        in_bytes = result["bits_per_byte"] is not None

        def figure(row: Evaluation) -> str:
            return f"{row['bits_per_byte']:.3f}" if in_bytes else quality_text(row["nll"], row["unit"])

        measure, how = "bits per byte" if in_bytes else measure_name(result["unit"]), _memory_name(facts, result)
        line = f"{result['corpus']} {result['split']}, {result['tokens']:,} targets: {figure(result)} {measure}"
        line += f"{' with ' if how.startswith('memory') else ', '}{how}"
        if without is not None:
            line += f", {figure(without)} without (memory: {change_text(result['nll'], without['nll'])})"
        lines = [line]
        if sizes is not None and in_bytes:  # the model, unlike compressors, has seen training text
            bits = {name: f"{value:.3f}" for name, value in compressed_bits(sizes).items()}
            after = bits.pop(LZMA_AFTER, None)
            line = f"the same {sizes['text']:,} bytes: " + ", ".join(f"{name} {value}" for name, value in bits.items())
            line += "; unlike these, the model has seen training text"
            lines.append(line if after is None else f"{line} (lzma that has seen it too: {after})")
    hardware, train = facts.start["hardware"], facts.start["config"]["train"]
    place = hardware.get("gpu") or f"{hardware['cpu']} ({hardware['cores']} cores)"
    lines.append(
        f"{facts.start['total_parameters']:,} parameters, {facts.train[-1]['tokens_read']:,} tokens trained on in "
        f"{train['dtype']} at {facts.speed:,.0f} tokens/s on {place}"
    )
    return [*lines, "report: run txl report DIR" if report is None else f"report: {report}"]
