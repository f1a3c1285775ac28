"""Write `docs/explanation/performance.md` and its figures from the records in `results/`.

    python -m benchmarks.performance_page            # writes the page
    python -m benchmarks.performance_page --check    # exit code 1 if the page does not match the records

All numbers of the page come from records. In place of a missing record, the page names the command that makes it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.performance_plots import FIGURES, NAMED_RECIPES

ROOT = Path(__file__).parents[1]
HEAD = """# Performance

This page shows how fast each kind of work is, what limits it, and how its cost grows. Unless a section says otherwise,
a ratio compares two timings of one run on one machine; the section's last line names the record. Some sections were
measured before a faster part was added to the program, or in several runs, and say so. The command
`python -m benchmarks.performance_page` writes this page from the records, and a test compares the two.

Letters: B lanes, T tokens of a segment, M positions of memory, S = M + T keys, E model width, H heads, D width of a
head, N layers, V vocabulary.
"""
Record = dict[str, Any]
REACHED = {"fraction_of_bandwidth": "the bandwidth", "fraction_of_matmul_rate": "the matrix rate"}


@dataclass(frozen=True)
class Section:
    """A part of the page, written from one record."""

    title: str
    record: str
    """Name of the record's file in `results/`, without extension."""
    command: str
    """Command that makes the record."""
    text: Callable[[Record], str]
    figures: tuple[str, ...] = ()
    note: str = ""
    """Note on a change in the program since the record was made."""


BEFORE_COMPILED = "Measured before attention without gradients was compiled."
BEFORE_COMPILED_TRAINING = "Measured before attention in training was compiled."
WITH_MKL = "Its float32 products are MKL's; today's are oneDNN's on this processor."


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def roofline(record: Record) -> str:
    """Return the text about the machine's rates and the workloads of enwik8-12L relative to these rates."""
    machine = record["roofline"]
    rates, bandwidth = machine["matmul_rate"], machine["bandwidth"]
    best = {dtype: max(by_size.values()) for dtype, by_size in rates.items()}
    sizes = list(rates["float32"])
    by_size = [[f"{int(size):,}", *(f"{rates[dtype][size] / 1e9:,.0f}" for dtype in rates)] for size in sizes]
    rows = []
    for work in record["workloads"]:
        intensity, rate = work["operations"] / work["bytes_read_once"], work["operations"] / work["seconds"]
        roof = min(best["float32"], intensity * bandwidth)
        bound = "reading" if intensity * bandwidth < best["float32"] else "arithmetic"
        rows.append([work["name"], f"{intensity:,.1f}", f"{rate / 1e9:,.1f}", bound, f"{rate / roof:.2f}"])
    return (
        f"This machine reads memory at {bandwidth / 1e9:.1f} GB/s. In float32, work with fewer than "
        f"{best['float32'] / bandwidth:.0f} operations per byte is bound by reading, other work by arithmetic. "
        "Rate of square matrix products, GFLOP/s:\n\n"
        f"{table(['size', *rates], by_size)}\n\n"
        "enwik8-12L in float32, compared with these limits. Each byte counts once: weights, and the keys, values and "
        "W_kR R of memory.\n\n"
        f"{table(['work', 'operations per byte', 'GFLOP/s', 'bound by', 'share of the limit'], rows)}\n"
    )


def growth(record: Record) -> str:
    """Return the text about time and operations of every point, relative to the first point of its axis."""
    base = record["base"]
    parts = [
        "In each table one quantity grows; all others stay at "
        f"T {base['segment']}, M {base['memory']}, {base['layers']} layers, B {base['batch']}, V {base['vocabulary']} "
        f"({record['shape']}, float32). Times are relative to the first column. In parentheses: counted "
        "operations, relative to the first column. Where time grows more slowly than operations, small products were "
        "inefficient. Where it grows faster, the time goes into reading RAM or into work outside of matrix products.\n"
    ]
    for axis, rows in record["axes"].items():
        lines = []
        for kind in ("training step", "evaluation"):
            first = rows[0][kind]
            ratios = (
                f"{row[kind]['seconds'] / first['seconds']:.2f} ({row[kind]['operations'] / first['operations']:.2f})"
                for row in rows
            )
            lines.append([kind, *ratios])
        parts.append(table([axis, *(f"{row['value']:,}" for row in rows)], lines) + "\n")
    return "\n".join(parts)


def training_memory(record: Record) -> str:
    """Return the text about the peak memory of a training step."""
    rows = []
    for row in record["rows"]:
        sizes = {way: f"{size / 2**20:,.0f}" for way, size in row["peak_bytes"].items()}
        ours = (f"{sizes[way]} ({ratio:.1f})" for way, ratio in row["ratio"].items())
        rows.append([f"{row['length']:,}", sizes["peer"], *ours])
    return (
        f"Peak memory of a step in MiB, minus what is held between steps: {record['shape']}, {record['n_layer']} "
        f"layers, B {record['batch_size']}, no dropout, float32 unless named. The peer is {record['peer']}. In "
        "parentheses: how many times less than the peer.\n\n"
        f"{table(['T = M', 'peer', *record['rows'][0]['ratio']], rows)}\n"
    )


def training_attention(output: Record) -> str:
    """Return the text about times of attention and of a step, with and without the compiled library."""
    ways = list(output["rows"][0]["times_shifted_float32"])
    rows = [[row["what"], *(f"{row['times_shifted_float32'][way]:.2f}" for way in ways)] for row in output["rows"]]
    return (
        "Speed relative to `shifted` in float32: forward and backward, processor time of one thread. `compiled` is "
        "`--model.attention compiled`.\n\n" + table(["", *ways], rows) + "\n"
    )


def beside_pytorch(record: Record) -> str:
    """Return the text about everything that is compiled, on one processor."""
    rows = [[row["work"], row["of"], f"{row['times_pytorch']:.2f}"] for row in record["rows"]]
    return (
        "Speed relative to PyTorch alone (in training with `shifted` attention), in float32. Both are timed in turns."
        f"\n\n{table(['work', 'of', 'times as fast'], rows)}\n"
    )


def vocabulary_memory(record: Record) -> str:
    """Return the text about the peak memory of a step for each way to compute cross-entropy."""
    rows = [[way, f"{found['peak_bytes_over_model'] / 2**20:,.0f}"] for way, found in record["ways"].items()]
    return (
        f"Peak memory of a training step, minus the model: {record['shape']}, {record['vocabulary']:,} words, "
        f"{record['tokens']:,} tokens.\n\n{table(['cross-entropy', 'MiB'], rows)}\n"
    )


def peers(record: Record) -> str:
    """Return the text about ratios to Hugging Face's model, with the bound of our model."""
    rows = []
    for row in record["rows"]:
        bounds = [f"{row[key]:.2f} of {what}" for key, what in REACHED.items() if key in row]
        shape = f"{row['preset']}, B {row['batch_size']}, T {row['our_segment']}, M {row['memory']:,}"
        aim = row["aim"] if isinstance(row["aim"], (int, float)) else row["aim"][0]
        rows.append([row["name"], shape, row["dtype"], f"{row['ratio']:.1f}", f"{aim:g}", "; ".join(bounds)])
    return (
        f"Speed relative to {record['peer']}, with the same weights and memory, in one run; in float32 the results are "
        "the same too. In rows named *our segment*, our model reads longer segments than theirs, and times per token "
        "are compared. *Aim* is the ratio that this project wants to reach. *Reached* is the share of the limit "
        "that our speed reaches; the limit is the bandwidth for reading weights and memory once, or the rate of the "
        "largest matrix products.\n\n"
        "![Times faster than Hugging Face's model, by kind of work](../images/speed.svg)\n\n"
        f"{table(['work', 'shape', 'our dtype', 'times faster', 'aim', 'reached'], rows)}\n"
    )


def segment_profile(record: Record) -> str:
    """Return the text about the shares of a segment's time, and the rate of its products over the matrix rate."""
    rows = []
    for row in record["rows"]:
        rates = row["fraction_of_matmul_rate"]
        cells = [
            f"{share:.2f}" + (f" (at {rates[part]:.2f})" if part in rates else "")
            for part, share in row["share"].items()
        ]
        shape = f"{row['preset']}, B {row['batch_size']}, T {row['segment']}, M {row['memory']:,}"
        rows.append([shape, row["dtype"], *cells])
    parts = list(record["rows"][0]["share"])
    return (
        "Shares of the time of a segment read without gradients. In parentheses: the rate of that part's operations, "
        "relative to the machine's largest matrix products.\n\n"
        f"{table(['shape', 'dtype', *parts], rows)}\n"
    )


def training_profile(record: Record) -> str:
    """Return the text about the shares of a training step's time."""
    rows = [
        [
            f"{row['preset']}, B {row['batch_size']}, T {row['segment']}, M {row['memory']}",
            row["dtype"],
            *(f"{share:.2f}" for share in row["share"].values()),
        ]
        for row in record["rows"]
    ]
    heads = ["shape", "dtype", *record["rows"][0]["share"]]
    return f"Shares of a training step's time, by PyTorch's profiler.\n\n{table(heads, rows)}\n"


def table9(record: Record) -> str:
    """Return the text about the slowdown of the vanilla Transformer."""
    rows = [
        [f"{row['attention_length']:,}", f"{row['ratio']:,.0f}", f"{row['published']:,}" if row["published"] else ""]
        for row in record["results"]
    ]
    heads = ["attention length", "times slower for each token", "the paper, one GPU"]
    dtype = record["results"][0]["dtype"]
    return (
        "A Transformer without memory computes its whole window again for every token. Table 9 of the paper compares "
        f"it with Transformer-XL ({dtype}).\n\n{table(heads, rows)}\n"
    )


def compiled(record: Record) -> str:
    """Return the text about the gain by torch.compile."""
    rows = []
    for row in record["results"]:
        if row["compiled"]:
            same = ("dtype", "segment", "mem_len", "batch_size")
            eager = next(
                each
                for each in record["results"]
                if not each["compiled"] and all(each[key] == row[key] for key in same)
            )
            gain = row["tokens_per_second"] / eager["tokens_per_second"]
            rows.append([row["dtype"], f"{gain:.2f}"])
    first = record["results"][0]
    shape = f"{record['preset']}, B {first['batch_size']}, T {first['segment']}, M {first['mem_len']}"
    return (
        f"Speed of a training step of {shape} with `--train.compile`, relative to one without.\n\n"
        f"{table(['dtype', 'times as fast'], rows)}\n"
    )


def long_stream(record: Record) -> str:
    """Return the text about memory and drift over a long stream."""
    return (
        f"A small model read {record['tokens']:,} tokens in segments of {record['segment']}. After the first tenth the "
        f"process grew by at most {record['largest_growth_after_a_tenth'] / 2**10:,.0f} KiB. The last losses differ by "
        f"{record['largest_difference_from_fresh_float32']:.1e} nats from those of a float32 model that "
        f"reads only the end of the text, and by {record['largest_difference_from_fresh_float64']:.1e} from those of a "
        "float64 model that does the same. The latter two models differ from each other by "
        f"{record['rounding_of_fresh_float32']:.1e}, by rounding alone.\n"
    )


READ_AS = {
    "stdlib": "the standard library's sources in BPE tokens",
    "enwik8": "the first 4.2 MB of enwik8 in bytes",
    "ptb": "Penn Treebank in words",
}


def quality(record: Record) -> str:
    """Return the text about the time and tokens in which our recipes reach the loss of the authors' recipe."""
    heads = [
        *("text", "target loss", "authors' learning rate", "our recipe", "our learning rate"),
        *("time / authors' time", "the same as counted", "tokens / authors' tokens"),
    ]
    settings, rows = record["texts"][0]["settings"], []
    best_after: list[str] = []
    later: list[str] = []
    all_seconds = 60 * settings["minutes"]
    for text in record["texts"]:
        authors, *ours = text["curves"]
        theirs = min(authors["points"], key=lambda point: point["nll"])["seconds"]
        best_after.append(f"`{text['text']}` {theirs / 60 / settings['peer_ratio']:.1f}")
        for recipe, name in NAMED_RECIPES.items():
            if not any(curve["recipe"] == recipe for curve in ours):
                continue  # not measured
            needed = text.get(f"{recipe}_of_authors")
            if measured := text.get(f"{recipe}_measured"):
                share = (
                    next(curve["step_seconds"] for curve in ours if curve["recipe"] == recipe) / authors["step_seconds"]
                )
                later.append(
                    f"On `{text['text']}`, *{name}* was measured in another run, on {measured['date']}; its step is "
                    f"taken as {share * settings['peer_ratio']:.3f} of the authors'."
                )
            given = [each["steps"] * each["step_seconds"] / theirs for each in ours if each["recipe"] == recipe]
            shares = ["not reached", "", ""]
            if needed:
                seconds, counted = needed["seconds"], settings["peer_ratio"]
                shares = [f"{each:.3f}" for each in (seconds * counted, seconds, needed["tokens"])]
                if len(given) > 1:
                    shares[0] += f" ({sorted(given)[-2] * counted:.3f} was not enough)"
            rate = next(curve["rate"] for curve in ours if curve["recipe"] == recipe)
            target = f"{text['target_nll']:.3f}"
            rows.append([text["text"], target, f"{authors['rate']:g}", name, f"{rate:g}", *shares])
    tried = {
        round(curve["steps"] * curve["step_seconds"] / all_seconds, 3)
        for text in record["texts"]
        for curve in text["curves"]
        if curve["recipe"] != "authors"
    }
    given_shares = ", ".join(f"{share:g}" for share in sorted(tried))
    read = [f"`{text['text']}` is {READ_AS[text['text']]}" for text in record["texts"]]
    return (
        "How long does our recipe (that of the preset `stdlib-bpe`, at the rate that it had then) need to reach the "
        f"loss that the authors' recipe reaches in {settings['minutes'] / settings['peer_ratio']:.1f} minutes?\n\n"
        "- **Authors' recipe**: Adam, float32, cosine, run in this program on PyTorch alone.\n"
        f"- **Ours** was trained for {given_shares} of {settings['minutes']:g} minutes, shortest first, each "
        "time with a complete schedule. The table shows the shortest run that reached the loss, divided by the time in "
        f"which the authors' recipe came to its best loss, in minutes: {'; '.join(best_after)}.\n"
        f"- **As counted**: steps of the authors' recipe are counted as {settings['peer_ratio']:g} times as long as "
        f"measured, our estimate for the authors' own code ({settings['minutes']:g} minutes in all). The aim, a tenth "
        "of the time and a third of the tokens, is set by this count.\n"
        "- **Learning rates** were tuned on validation, those of the authors' recipe over five values or more, Adam's "
        "over three or more. Muon's was not tuned.\n"
        f"- **Loss** is in nats per token of the validation split: {'; '.join(read)}."
        f"\n\n{table(heads, rows)}\n\n{' '.join(later)}{' ' if later else ''}Each run is of one seed.\n"
    )


RECORD = "python benchmarks/record.py results/{}.json {}"
SECTIONS = (
    Section(
        "Time to quality",
        "quality",
        "python -m benchmarks.quality results/quality.json",
        quality,
        ("quality",),
    ),
    Section(
        "Compared with Hugging Face's Transformer-XL",
        "bench-peers",
        "make bench-peers",
        peers,
        note="On this processor, our products of float32 matrices are oneDNN's. The peer's are MKL's, as usual in "
        "PyTorch, which are slower ([decisions](../decisions.md)).",
    ),
    Section(
        "The roofline",
        "scaling",
        "python -m benchmarks.scaling results/scaling.json",
        roofline,
        ("roofline",),
        f"{BEFORE_COMPILED} {WITH_MKL}",
    ),
    Section(
        "Where a segment's time goes",
        "segment-profile",
        "python -m benchmarks.segment_profile results/segment-profile.json",
        segment_profile,
    ),
    Section(
        "Where a training step's time goes",
        "training-profile",
        "python -m benchmarks.training_profile results/training-profile.json",
        training_profile,
    ),
    Section(
        "Compiled attention in training",
        "training-attention",
        "python -m benchmarks.training_attention results/training-attention.json",
        training_attention,
    ),
    Section(
        "Compiled code with AVX-512",
        "compiled-avx512",
        "python -m benchmarks.compiled results/compiled-avx512.json",
        beside_pytorch,
    ),
    Section(
        "Compiled code with AVX2 alone",
        "compiled-avx2",
        "python -m benchmarks.compiled results/compiled-avx2.json",
        beside_pytorch,
    ),
    Section(
        "How cost grows",
        "scaling",
        "python -m benchmarks.scaling results/scaling.json",
        growth,
        ("growth",),
        f"{BEFORE_COMPILED} {WITH_MKL}",
    ),
    Section(
        "Memory of a training step",
        "training-memory",
        "PYTHONPATH=src:. .venv-oracle/bin/python -m benchmarks.training_memory results/training-memory.json",
        training_memory,
        ("training-memory",),
    ),
    Section(
        "Memory and the vocabulary",
        "vocabulary-memory",
        "python -m benchmarks.vocabulary_memory results/vocabulary-memory.json",
        vocabulary_memory,
    ),
    Section("Table 9", "bench-table9", RECORD.format("bench-table9", "bench table9 --json"), table9),
    Section(
        "Compiled layers",
        "bench-compile",
        RECORD.format("bench-compile", "bench train --compile --json"),
        compiled,
        note=BEFORE_COMPILED_TRAINING,
    ),
    Section(
        "A long stream",
        "long-stream",
        "python -m benchmarks.long_stream results/long-stream.json",
        long_stream,
        note=BEFORE_COMPILED,
    ),
)


def made_by(name: str, made: Record, part: str) -> str:
    """Return the line that states the source of the numbers of a record, or of a part of the record."""
    hardware, commit = made["hardware"], made["commit"]
    threads = f"{hardware['threads']} thread{'' if hardware['threads'] == 1 else 's'}"
    return (
        f"`results/{name}.json`{part}: {hardware['cpu']}, {hardware['cores']} cores, {threads}, "
        f"torch {made['software']['torch']}, commit {commit[:7]}"
        f"{' with uncommitted changes' if ' ' in commit else ''}, {made['date']}.\n"
    )


def page(results: Path) -> tuple[str, dict[str, tuple[str, Record]]]:
    """Return the text of the page, and for every figure the digest of its data and the data."""
    parts, figures = [HEAD], {}
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        path = results / f"{section.record}.json"
        if not path.is_file():
            parts.append(f"Not recorded yet: `{section.command}`.\n")
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        parts.append(section.text(record["output"]))
        if section.note:
            parts.append(f"{section.note}\n")
        for name in section.figures:
            digest = hashlib.sha256(json.dumps([name, record["output"]]).encode()).hexdigest()[:16]
            figures[name] = digest, record["output"]
            parts.append(f"![{FIGURES[name].title}](performance-{name}.svg)\n")
        # Texts of one record may come from different days; a text with its own hardware entry gets its own line.
        texts = [text for text in record["output"].get("texts", ()) if "hardware" in text]
        parts += [made_by(section.record, text, f", `{text['text']}`") for text in texts]
        rest = f", `{record['output']['texts'][-1]['text']}`" if texts else ""
        parts.append(made_by(section.record, record, rest))
    return "\n".join(parts), figures


def write_page(results: Path, docs: Path) -> None:
    """Write the page and its figures, and remove figures without a record."""
    text, figures = page(results)
    for name, (digest, record) in figures.items():
        FIGURES[name].save(record, docs / f"performance-{name}.svg", digest)
    for name in FIGURES.keys() - figures.keys():
        (docs / f"performance-{name}.svg").unlink(missing_ok=True)
    (docs / "performance.md").write_text(text, encoding="utf-8")


def check_page(results: Path, docs: Path) -> list[str]:
    """Return the names of the files that do not match the records."""
    text, figures = page(results)
    path = docs / "performance.md"
    wrong = [] if path.is_file() and path.read_text(encoding="utf-8") == text else [path.name]
    for name, (digest, _) in figures.items():
        figure = docs / f"performance-{name}.svg"
        if not figure.is_file() or digest not in figure.read_text(encoding="utf-8"):
            wrong.append(figure.name)
    return wrong


def main() -> None:
    """Write or check the page."""
    results, docs = ROOT / "results", ROOT / "docs" / "explanation"
    if sys.argv[1:] == ["--check"]:
        if wrong := check_page(results, docs):
            sys.exit(f"not what results/ gives: {', '.join(wrong)}; run python -m benchmarks.performance_page")
    elif sys.argv[1:]:
        sys.exit("usage: python -m benchmarks.performance_page [--check]")
    else:
        write_page(results, docs)


if __name__ == "__main__":
    main()
