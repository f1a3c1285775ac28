"""Report of a run: report.html, a page that opens offline, and a summary of a few lines; both made from the log."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from txl.config import RunConfig, differences, leaf_fields
from txl.errors import UserError
from txl.files import JsonObject, write_whole
from txl.presets import preset, presets
from txl.reporting.attention_page import FOLDER, RECORD, attention_section, read_record
from txl.reporting.comparison import LZMA_AFTER, measure_compression
from txl.reporting.findings import Findings, findings
from txl.reporting.page import escape, figure, note, page, pairs, section, table, visible
from txl.reporting.plots import POINTS, loss_figure, loss_limits, memory_figure, schedule_figure
from txl.reporting.result import evaluation_cells, evaluation_headings, is_recurrent, memory_name, result_section
from txl.reporting.wording import (
    arithmetic_words,
    change_text,
    counted,
    layers_text,
    manner_words,
    settings_text,
    short_name,
    window_text,
)
from txl.runs.directory import RunDirectory
from txl.runs.events import Evaluation, SampleEvent, TrainEvent
from txl.units import duration_text, measure_name, quality, quality_text, token_name

_SAMPLES, _SAMPLE_CHARACTERS, _OTHERS = 6, 3000, 12
"""Largest numbers of samples, of characters per sample, and of other evaluations shown; the page counts the rest."""


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
    config = run_directory.config()
    events = run_directory.events()
    checkpoint = default_checkpoint(run_directory)
    found = findings(events, checkpoint)
    if run_directory.lacks_log():
        log = run_directory.path / "log.jsonl"
        raise UserError(f"{log}: missing or incomplete, and a report is made from it; restore it from a copy")
    if found is None or not found.train:
        raise UserError(
            f"{directory}: nothing has been trained here (log.jsonl has no train line), and a report is about "
            f"training; run txl train"
        )
    problem = None
    known = found.compression
    if found.result is not None and (known is None or (after_training_text and LZMA_AFTER not in known)):
        measured, problem = measure_compression(run_directory, found, data_dir, after_training_text)
        if measured is not None:
            found = findings([*events, measured], checkpoint) or found
    path = Path(out) if out is not None else run_directory.path / "report.html"
    name = str(directory)
    body = [
        _header(config, found, run_directory.newest() is not None),
        result_section(found, name, problem),
        _training(config, found),
        _memory(config, found, name),
        _attention(run_directory),
        _samples(found, name),
        _other_evaluations(found),
        _corpus(found),
        _model(config, found),
        _circumstances(found),
    ]
    write_whole(path, page(_title(config, found), [part for part in body if part]))
    return path


def _title(config: RunConfig, found: Findings) -> str:
    name = config.name.replace("-", " ") if config.is_planned else config.name
    return f"{name} on {short_name(found.start['corpus']['name'])}"


def _header(config: RunConfig, found: Findings, has_checkpoint: bool) -> str:
    corpus, last = found.start["corpus"], found.train[-1]
    words = (
        f"{config.model.display_name}, {found.start['total_parameters']:,} parameters in {layers_text(config.model)}, "
        f"reading {token_name(corpus['unit'])}s. Trained for {counted(last['step'], 'step')} in "
        f"{duration_text(last['elapsed'])}, begun {_day(found.stretches[0]['time'])}."
    )
    state = ""
    if not found.ended:
        steps = found.start["config"]["train"]["steps"]
        state = f"This run is not finished: step {last['step']:,} of {steps:,}"
        if found.stopped is not None:
            state += f", stopped at step {found.stopped['step']:,} ({found.stopped['reason']})"
        how = "goes on from the last checkpoint" if has_checkpoint else "begins again, as there is no checkpoint"
        state = note(f"{state}. The same `txl train` command {how}.", "warning")
    elif found.converged and last["step"] < found.start["config"]["train"]["steps"]:
        steps = found.start["config"]["train"]["steps"]
        state = note(f"Training ended before step {steps:,}, because the validation loss no longer improved.")
    elif found.diverged is not None:
        state = note(f"Training diverged, and this model is of no use: {found.diverged}.", "warning")
    return f"<header><h1>{escape(_title(config, found))}</h1><p>{escape(words)}</p>{state}</header>"


def _training(config: RunConfig, found: Findings) -> str:
    last, corpus = found.train[-1], found.start["corpus"]
    tokens = corpus["splits"]["train"]["tokens"]
    dropout = ", with dropout" if config.model.has_dropout else ""
    which = {"half": ", the recent half of each segment", "last": ", the last position of each segment"}
    which = which.get(config.train.loss, "")
    caption = (
        f"Training: mean over the steps of each line of the log{dropout}{which} ({len(found.train):,} lines"
        + (f", averaged down to {POINTS} points" if len(found.train) > POINTS else "")
        + "); where there is a pale line, the strong one is its running mean."
    )
    if found.valid:
        row = found.valid[-1]
        caption += (
            f" Validation: {counted(row['tokens'], 'target')} of the valid split, segments of {row['segment']}, memory "
            f"{row['mem_len']:,}, {window_text(row)}."
        )
    shown = [quality(event["loss"], found.unit) for event in found.train]
    top = loss_limits(shown, [quality(event["nll"], found.unit) for event in found.valid])[1]
    if max(shown) > top:
        caption += f" The first lines, up to {max(shown):.2f}, lie above the frame."
    best = ""
    if found.best is not None:
        best = (
            f" The lowest validation loss was {found.best['nll']:.4f} nats per {token_name(found.unit)} ("
            f"{quality_text(found.best['nll'], found.unit)} {measure_name(found.unit)}) at step {found.best['step']:,}."
        )
    read = _tokens_read(last)
    targets = "" if read == last["tokens"] else f" ({last['tokens']:,} of them counted in the loss)"
    lead = (
        f"{read:,} tokens{targets}, {read / tokens:.3g} times the training split, at {found.speed:,.0f} "
        f"tokens/s (median of the log’s lines; evaluating and saving not counted).{best}"
    )
    norm = f"clipped above {config.train.clip:g}" if config.train.clip else "not clipped"
    return section(
        "Training",
        note(lead, "lead"),
        figure(loss_figure(found.train, found.valid, found.unit), caption),
        figure(
            schedule_figure(found.train, config.train.clip),
            f"The learning rate, and the norm of the gradient before clipping ({norm}), each at the last step of a "
            f"line of the log.",
        ),
        note("No validation in this run: `--train.eval-every K` adds it.") if not found.valid else "",
    )


def _memory(config: RunConfig, found: Findings, name: str) -> str:
    heading, curve = "Quality against memory length", found.curve
    if not curve and is_recurrent(found):
        return ""  # a recurrent model has no memory length
    lengths = sorted({0, config.model.mem_len, config.eval.mem_len})
    if not curve and len(lengths) == 1:
        return ""  # a model without memory
    if not curve:
        listed = ",".join(map(str, lengths))
        return section(heading, note(f"Not measured yet: `txl eval {shlex.quote(name)} --mem-lens {listed}` adds it."))
    windows = {row["window"] == row["mem_len"] for row in curve if row["mem_len"]}
    text = settings_text(curve[0], found.split_of(curve[0]), memory=False)
    caption = f"{text[0].upper()}{text[1:]}."
    if windows == {True}:
        caption += " With memory M, a token sees exactly M keys, its own included."
    if curve[0]["mem_len"] == 0:
        caption += " With memory 0, each segment is read alone, and a token sees only what precedes it there."
    unit = curve[0]["unit"]
    return section(
        heading,
        figure(memory_figure(curve, unit, config.model.mem_len or None), caption),
        table(
            "The same targets at every memory length",
            ("memory", "window", *evaluation_headings(unit)),
            [[f"{row['mem_len']:,}", _window(row), *evaluation_cells(row)] for row in curve],
            numbers=range(9),
        ),
    )


def _window(row: Evaluation | SampleEvent) -> str:
    window = row.get("window")  # older logs hold the word "none" for samples
    return f"{window:,}" if isinstance(window, int) else "none"


def _attention(run_directory: RunDirectory) -> str:
    """Return the section about attention, if `txl attention` has been run."""
    path = run_directory.path / FOLDER / RECORD
    if not path.is_file():
        return ""
    try:
        return attention_section(read_record(path))
    except UserError as error:
        problem = str(error)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # a record changed by hand
        problem = f"{path}: damaged; run txl attention again"
    return section("Where the heads look", note(problem, "warning"))


def _samples(found: Findings, name: str) -> str:
    if not found.samples:
        command = f"txl generate {shlex.quote(name)} --prompt TEXT"
        return section("Samples", note(f"None in this run’s log; `{command}` adds one."))
    shown = found.samples[-_SAMPLES:]
    left_out = len(found.samples) - len(shown)
    lead = f"Written by {shown[0]['checkpoint']}; the prompt is in bold, the model’s continuation is not."
    if left_out:
        lead += f" The newest {len(shown)} of {len(found.samples)} in the log."
    return section("Samples", note(lead), *(_sample(sample) for sample in shown))


def _sample(sample: SampleEvent) -> str:
    settings = [f"temperature {sample['temperature']:g}" if sample["temperature"] else "greedy"]
    if sample["temperature"]:
        cuts = {"top-k": sample["top_k"], "top-p": sample["top_p"]}
        settings += [f"{cut} {value}" for cut, value in cuts.items() if value is not None]
        settings.append("no seed" if sample["seed"] is None else f"seed {sample['seed']}")
    if (memory := sample.get("mem_len")) is not None:
        settings.append(f"memory {memory:,}, window {_window(sample)}")
    settings.append(f"at most {counted(sample['max_tokens'], 'token')}")
    text = sample["text"]
    rest = len(text) - _SAMPLE_CHARACTERS
    if rest > 0:
        text = text[:_SAMPLE_CHARACTERS]
        settings.append(f"{rest:,} more characters are in log.jsonl")
    return (
        f'<figure class="sample"><figcaption>{escape(", ".join(settings))}</figcaption>'
        f'<pre><b class="prompt">{visible(sample["prompt"])}</b>{visible(text)}</pre></figure>'
    )


def _other_evaluations(found: Findings) -> str:
    if not found.others:
        return ""
    shown = found.others[:_OTHERS]
    rows = [
        [
            row["corpus"],
            row["split"],
            row["checkpoint"].removeprefix("step-").lstrip("0") or "0",
            f"{row['tokens']:,}",
            _manner(row),
            f"{row['nll']:.4f}",
            f"{quality_text(row['nll'], row['unit'])} {measure_name(row['unit'])}",
        ]
        for row in shown
    ]
    left_out = len(found.others) - len(shown)
    caption = "Newest first" + (f"; {left_out:,} more in log.jsonl" if left_out else "")
    headings = ("corpus", "split", "step", "targets", "how", "nats per token", "quality")
    return section("Other evaluations", table(caption, headings, rows, numbers=(2, 3, 5, 6)))


def _manner(row: Evaluation) -> str:
    """Return the settings of an evaluation in words; evaluations with equal words can differ only in targets."""
    lanes = f"memory {row['mem_len']:,}, window {_window(row)}, segments of {row['segment']:,} in "
    lanes += counted(row["batch_size"], "lane")
    return ", ".join([*([] if row["sliding"] else [lanes]), *manner_words(row), *arithmetic_words(row)])


def _corpus(found: Findings) -> str:
    corpus = found.start["corpus"]
    unknown = any(record.get("unknown") for record in corpus["splits"].values())
    rows = [
        [
            split,
            f"{record['tokens']:,}",
            f"{record['bytes']:,}",
            *([f"{record.get('unknown', 0):,}"] if unknown else []),
        ]
        for split, record in corpus["splits"].items()
    ]
    hashes = [(f"{split}, text", record["sha256_text"]) for split, record in corpus["splits"].items()]
    hashes += [(f"{split}, tokens", record["sha256_tokens"]) for split, record in corpus["splits"].items()]
    hashes.append(("all that defines the data", corpus["identity"]))
    return section(
        "Corpus",
        table(
            f"{corpus['name']}, read as {token_name(corpus['unit'])}s; vocabulary of {corpus['vocabulary_size']:,}",
            ("split", "tokens", "bytes", *(["unknown (<unk>)"] if unknown else [])),
            rows,
            numbers=range(1, 4),
        ),
        pairs("SHA-256", hashes, code=True),
    )


def _model(config: RunConfig, found: Findings) -> str:
    total = found.start["total_parameters"]
    parts = [[part, f"{count:,}", f"{count / total:.1%}"] for part, count in found.start["parameters"].items()]
    parts.append(["all", f"{total:,}", "100.0%"])
    sections: dict[str, list[tuple[str, str]]] = {}
    for name, _, _, value in leaf_fields(config):
        group, _, field = name.rpartition(".")
        if group:
            text = "none" if value is None or value == () else str(value)
            sections.setdefault(group, []).append((field, text))
    changes = ""
    if config.name in presets():
        changed = differences(preset(config.name), config)
        changes = (
            f"Differs from the preset {config.name} in: {'; '.join(changed).replace(' -> ', ' → ')}."
            if changed
            else f"Exactly the preset {config.name}."
        )
    return section(
        "Model and configuration",
        table("Parameters by part", ("part", "number", "share"), parts, numbers=(1, 2), strong=[len(parts) - 1]),
        note(changes) if changes else "",
        '<div class="columns">',
        *(pairs(group, rows) for group, rows in sections.items()),
        "</div>",
    )


def _circumstances(found: Findings) -> str:
    hardware, software = found.start["hardware"], found.start["software"]
    rows = [
        ("processor", f"{hardware['cpu']}"),
        ("cores", f"{hardware['cores']} usable, {counted(hardware.get('threads', hardware['cores']), 'thread')}"),
        ("memory", f"{hardware['memory_bytes'] / 2**30:.1f} GiB" if hardware["memory_bytes"] else "unknown"),
        ("device", hardware.get("gpu", hardware["device"])),
        *([("attention", found.start["attention"])] if "attention" in found.start else []),
        *((name, str(version)) for name, version in software.items()),
    ]
    commands = "\n".join(_command(event["command"]) for event in found.stretches)
    count = len(found.stretches)
    again = f"Training was run {count} times; the table is of the last." if count > 1 else ""
    return section(
        "Hardware, software, commands",
        note(again) if again else "",
        pairs("Where it was trained", rows),
        f'<figure class="sample"><figcaption>{"Commands" if count > 1 else "Command"} of training, as logged'
        f"</figcaption><pre>{visible(commands)}</pre></figure>",
        note("The log of all of this, one object a line, is `log.jsonl` in the run’s directory."),
    )


def _command(words: list[str]) -> str:
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else ""


def _tokens_read(line: TrainEvent) -> int:
    """Return the number of tokens that training has read; logs of earlier versions have only that of targets."""
    return line.get("tokens_read", line["tokens"])


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")


def default_checkpoint(run: RunDirectory) -> str | None:
    """Return the name of the checkpoint that commands read by default; None if there is none."""
    try:
        return run.checkpoint().name
    except UserError:
        return None


def summary_lines(events: Sequence[JsonObject], report: Path | None = None, checkpoint: str | None = None) -> list[str]:
    """Return a summary: result with and without memory, compressors on the same bytes, size and speed, report path.

    Args:
        events: events of a run's log.
        report: path of the report; None: the last line names the command that writes one.
        checkpoint: as in `findings`.
    """
    found = findings(events, checkpoint)
    if found is None or not found.train:
        return ["nothing has been trained here yet: run txl train"]
    hardware, train = found.start["hardware"], found.start["config"]["train"]
    place = hardware.get("gpu") or f"{hardware['cpu']} ({hardware['cores']} cores)"
    return [
        _result_line(found),
        *_compressor_lines(found),
        f"{found.start['total_parameters']:,} parameters, {_tokens_read(found.train[-1]):,} tokens trained on in "
        f"{train['dtype']} at {found.speed:,.0f} tokens/s on {place}",
        "report: run txl report DIR" if report is None else f"report: {report}",
    ]


def _result_line(found: Findings) -> str:
    result, without = found.result, found.without_memory
    if result is None:
        return "no result on the test split yet: run txl eval DIR --mem-lens 0,128,256"
    in_bytes = result.get("bits_per_byte") is not None

    def figure(row: Evaluation) -> str:
        if in_bytes:
            return f"{row['bits_per_byte']:.3f}"
        return quality_text(row["nll"], result["unit"])

    measure = "bits per byte" if in_bytes else measure_name(result["unit"])
    line = f"{result['corpus']} {result['split']}, {result['tokens']:,} targets: "
    how = memory_name(found, result)
    line += f"{figure(result)} {measure}{' with ' if how.startswith('memory') else ', '}{how}"
    if without is not None:
        line += f", {figure(without)} without (memory: {change_text(result['nll'], without['nll'])})"
    return line


def _compressor_lines(found: Findings) -> list[str]:
    """Return a line with the compressors' bits per byte and a note that the model has also seen training text."""
    sizes, result = found.compression, found.result
    if sizes is None or result is None or result.get("bits_per_byte") is None:
        return []

    def bits(name: str) -> str:
        return f"{8 * sizes[name] / sizes['text']:.3f}"

    line = f"the same {sizes['text']:,} bytes: " + ", ".join(f"{name} {bits(name)}" for name in ("zlib", "bz2", "lzma"))
    line += "; unlike these, the model has seen training text"
    return [line + (f" (lzma that has seen it too: {bits(LZMA_AFTER)})" if LZMA_AFTER in sizes else "")]
