"""report.html: one page that tells what a run was and what came of it, made from its log. It opens offline."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from txl.config import RunConfig, leaf_fields
from txl.data.corpora import open_corpus
from txl.errors import UserError
from txl.reporting.compression import compress
from txl.reporting.page import escape, figure, page, pairs, table, visible
from txl.reporting.plots import learning_rate_figure, loss_figure, memory_figure
from txl.reporting.summary import Findings, findings, quality_text, scored_bytes
from txl.run_directory import RunDirectory, write_whole
from txl.training.display import duration


def write_report(directory: str | Path, *, out: str | Path | None = None, data_dir: str | Path | None = None) -> Path:
    """Write a run's report.

    What zlib and lzma need for the text that was scored is measured here, once, and added to the log.

    Args:
        directory: a run directory.
        out: where to write it; None: report.html in the run directory.
        data_dir: where prepared corpora live.

    Returns:
        The path of the report.

    Raises:
        UserError: if the run has not begun.
    """
    run_directory = RunDirectory(directory)
    config = run_directory.config()
    found = findings(run_directory.events())
    if found is None or not found.train:
        raise UserError(f"{directory}: nothing has been trained here yet; run txl train first")
    note = None
    if found.result is not None and found.compression is None:
        note = _measure_compression(run_directory, config, found.result, data_dir)
        found = findings(run_directory.events()) or found
    path = Path(out) if out is not None else run_directory.path / "report.html"
    body = [
        _header(config, found),
        *_result(found, note),
        *_training(found),
        *_memory(found),
        *_samples(found),
        *_corpus(found),
        *_model(config, found),
        *_circumstances(run_directory, found),
    ]
    try:
        write_whole(path, page(f"{config.name} on {found.start['corpus']['name']}", body))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the report was not written") from None
    return path


def _measure_compression(
    run_directory: RunDirectory, config: RunConfig, result: dict[str, Any], data_dir: str | Path | None
) -> str | None:
    """Compress the bytes that the result is about, and log it; or say why that cannot be done."""
    n_bytes = scored_bytes(result)
    if n_bytes is None:
        return "The text's size is not known, so compressors could not be compared."
    try:
        name = result["corpus"]
        data = config.data if name == config.data.corpus else RunConfig().data
        corpus = open_corpus(name, config=data, data_dir=data_dir, vocabulary=run_directory.vocabulary(), quiet=True)
        sizes = compress(corpus.text_bytes(result["split"]), n_bytes)
        run_directory.append(
            "compression",
            0,
            corpus=name,
            split=result["split"],
            text=sizes.text,
            zlib=sizes.zlib,
            lzma=sizes.lzma,
        )
    except UserError as error:
        return f"Compressors could not be compared: {error}"
    return None


def _header(config: RunConfig, found: Findings) -> str:
    corpus = found.start["corpus"]
    state = (
        ""
        if found.ended
        else (
            f'<p class="warning">This run has not ended: step {found.train[-1]["step"]:,} of '
            f"{config.train.steps:,}.</p>"
        )
    )
    return (
        f"<header><h1>{escape(config.name)} on {escape(corpus['name'])}</h1>"
        f"<p>Transformer-XL, {found.start['total_parameters']:,} parameters, "
        f"{config.model.n_layer} layers of width {config.model.d_model}, {escape(corpus['unit'])} tokens.</p>{state}"
        f"</header>"
    )


def _result(found: Findings, note: str | None) -> list[str]:
    if found.result is None:
        return ['<p class="warning">No result yet: <code>txl eval DIR --mem-lens 0,128,256</code> adds it.</p>']
    result, unit = found.result, found.unit
    figures = [(quality_text(result, unit), f"with memory {result['mem_len']:,}")]
    if found.without_memory is not None:
        figures.append((quality_text(found.without_memory, unit), "without memory"))
    if found.compression is not None:
        text = found.compression["text"]
        if unit != "byte" and result["bits_per_byte"] is not None:
            figures.append((f"{result['bits_per_byte']:.3f}", "bits per byte"))
        figures += [
            (f"{8 * found.compression[name] / text:.3f}", f"{name}, bits per byte") for name in ("zlib", "lzma")
        ]
    boxes = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in figures)
    window = "no window" if result["window"] is None else f"a window of {result['window']:,} keys"
    parts = [
        f"{result['split']} split of {result['corpus']}, {result['tokens']:,} targets scored, each once",
        f"{result['dropped']:,} not scored" if result["dropped"] else "",
        f"memory {result['mem_len']:,}, {window}, segments of {result['segment']} in {result['batch_size']} lanes",
        f"{result['tokens_per_second']:,.0f} tokens/s",
        f"checkpoint {result['checkpoint']}",
    ]
    if found.compression is not None:
        parts.append(
            f"zlib (level 9) and lzma (preset 9) compress the same {found.compression['text']:,} bytes and learn "
            f"from nothing else, while the model was trained on other text of the same kind"
        )
    lines = ["<section>", f'<div class="result">{boxes}</div>']
    lines.append(f'<p class="note">{escape("; ".join(part for part in parts if part))}.</p>')
    if note:
        lines.append(f'<p class="note">{escape(note)}</p>')
    if unit == "word":
        lines.append(
            '<p class="note">Bits per byte of word tokens are a lower bound: &lt;unk&gt; does not pay for the '
            "spelling that it hides.</p>"
        )
    return [*lines, "</section>"]


def _training(found: Findings) -> list[str]:
    events, last = [*found.train, *found.valid], found.train[-1]
    seen = last["tokens"] / found.start["corpus"]["splits"]["train"]["tokens"]
    caption = (
        f"{last['tokens']:,} tokens trained on ({seen:.2f} times the training split) in {duration(last['elapsed'])}."
    )
    if found.valid:
        row = found.valid[-1]
        caption += (
            f" Validation: {row['tokens']:,} targets, segments of {row['segment']}, memory {row['mem_len']}, "
            f"so that a token sees as far as in training."
        )
    return [
        "<section><h2>Training</h2>",
        figure(loss_figure(events, found.unit), caption),
        figure(learning_rate_figure(events), "Learning rate, and the gradient's norm before it is clipped."),
        "</section>",
    ]


def _memory(found: Findings) -> list[str]:
    heading = "<section><h2>Quality against memory length</h2>"
    if len(found.sweep) < 2:
        hint = '<p class="note"><code>txl eval DIR --mem-lens 0,64,128,256</code> adds this.</p></section>'
        return [heading, hint]
    rows = sorted(found.sweep, key=lambda row: row["mem_len"])
    shown = [
        [
            f"{row['mem_len']:,}",
            "none" if row["window"] is None else f"{row['window']:,}",
            f"{row['nll']:.4f}",
            quality_text(row, found.unit),
            "" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}",
            f"{row['tokens_per_second']:,.0f}",
        ]
        for row in rows
    ]
    first = rows[0]
    return [
        heading,
        figure(
            memory_figure(rows, found.unit),
            "With memory M every token sees exactly M keys, itself included; at 0 each segment is read alone, and a "
            "token sees what precedes it there.",
        ),
        table(
            f"{first['split']} split, {first['tokens']:,} targets, the same at each length, segments of "
            f"{first['segment']}",
            ("memory", "window", "nats a token", "quality", "bits per byte", "tokens/s"),
            shown,
            numbers=range(6),
        ),
        "</section>",
    ]


def _samples(found: Findings) -> list[str]:
    if not found.samples:
        return []
    lines = ["<section><h2>Samples</h2>"]
    for sample in found.samples:
        settings = [f"temperature {sample['temperature']}", f"top-k {sample['top_k']}", f"seed {sample['seed']}"]
        if sample["top_p"] is not None:
            settings.append(f"top-p {sample['top_p']}")
        lines.append(f'<p class="note">{escape(", ".join(settings))}; the prompt is bold.</p>')
        lines.append(f'<pre><span class="prompt">{visible(sample["prompt"])}</span>{visible(sample["text"])}</pre>')
    return [*lines, "</section>"]


def _corpus(found: Findings) -> list[str]:
    corpus = found.start["corpus"]
    rows = [
        [
            split,
            f"{record['tokens']:,}",
            f"{record['bytes']:,}",
            f"{record['unknown']:,}",
            record["sha256_text"][:16],
        ]
        for split, record in corpus["splits"].items()
    ]
    return [
        "<section><h2>Corpus</h2>",
        table(
            f"{corpus['name']}, {corpus['unit']} tokens, vocabulary of {corpus['vocabulary_size']:,}, "
            f"identity {corpus['identity'][:16]}",
            ("split", "tokens", "bytes", "unknown", "sha256 of the text"),
            rows,
            numbers=(1, 2, 3),
        ),
        "</section>",
    ]


def _model(config: RunConfig, found: Findings) -> list[str]:
    parts = [[part, f"{count:,}"] for part, count in found.start["parameters"].items()]
    parts.append(["total", f"{found.start['total_parameters']:,}"])
    lines = [
        "<section><h2>Model and settings</h2>",
        table("Parameters", ("part", "number"), parts, numbers=(1,)),
        '<div class="columns">',
    ]
    sections: dict[str, list[tuple[str, str]]] = {}
    for name, _, _, value in leaf_fields(config):
        section, _, field = name.rpartition(".")
        if section:
            sections.setdefault(section, []).append((field, "none" if value is None else str(value)))
    lines += [pairs(section, rows) for section, rows in sections.items()]
    return [*lines, "</div></section>"]


def _circumstances(run_directory: RunDirectory, found: Findings) -> list[str]:
    hardware, software = found.start["hardware"], found.start["software"]
    rows = [
        ("processor", f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads"),
        ("memory", f"{hardware['memory_bytes'] / 2**30:.1f} GiB"),
        ("device", hardware.get("gpu", hardware["device"])),
        ("attention", found.start["attention"]),
        *((name, version) for name, version in software.items()),
        ("command", shlex.join(found.start["command"])),
    ]
    starts = [event for event in run_directory.events() if event["event"] == "resume"]
    if starts:
        rows.append(("continued", f"{len(starts)} times, last from step {starts[-1]['step']:,}"))
    return ["<section><h2>Hardware and software</h2>", pairs("Where it ran", rows), "</section>"]
