"""Write `docs/explanation/performance.md` and its figures from the records in `results/`.

    python -m benchmarks.performance_page            # writes the page
    python -m benchmarks.performance_page --check    # exit code 1 if the page does not match the records

All numbers of the page come from records. In place of a missing record, the page names the command that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from txl.reporting.plots import ACCENT, INK, SECOND, SOFT
from txl_lab.pages import DOCS, Record, RecordedPlot, read_record, table, write_or_check
from txl_lab.records import RESULTS

HEAD = """# Performance

This page shows how fast each kind of work is, what limits it, and how its cost grows. Unless a section says otherwise,
a ratio compares two timings of one run on one machine; the section's last line names the record. Some sections were
measured before a faster part was added to the program, or in several runs, and say so. The command
`python -m benchmarks.performance_page` writes this page from the records, and a test compares the two.

Letters: B lanes, T tokens of a segment, M positions of memory, S = M + T keys, E model width, H heads, D width of a
head, N layers, V vocabulary.
"""
# Labels of our recipes, by their names in the record.
NAMED_RECIPES = {"adam": "Adam, tuned", "muon": "Muon"}
REACHED = {"fraction_of_bandwidth": "the bandwidth", "fraction_of_matmul_rate": "the matrix rate"}


@dataclass(frozen=True)
class Section:
    """A part of the page, written from one record."""

    title: str
    record: str  # name of the record's file in `results/`, without extension
    text: Callable[[Record], str]
    figures: tuple[str, ...] = ()
    note: str = ""  # note on a change in the program since the record was made
    made_with: str = ""  # command that makes the record; empty: the script of the record's name.

    @property
    def command(self) -> str:
        """Command that makes the record."""
        script = f"python -m benchmarks.{self.record.replace('-', '_')} results/{self.record}.json"
        return self.made_with or script


BEFORE_COMPILED = "Measured before attention without gradients was compiled."
BEFORE_COMPILED_TRAINING = "Measured before attention in training was compiled."
WITH_MKL = "Its float32 products are MKL's; today's are oneDNN's on this processor."


def roofline(record: Record) -> str:
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
    ways = list(output["rows"][0]["times_shifted_float32"])
    rows = [[row["what"], *(f"{row['times_shifted_float32'][way]:.2f}" for way in ways)] for row in output["rows"]]
    return (
        "Speed relative to `shifted` in float32: forward and backward, processor time of one thread. `compiled` is "
        "`--model.attention compiled`.\n\n" + table(["", *ways], rows) + "\n"
    )


def beside_pytorch(record: Record) -> str:
    rows = [[row["work"], row["of"], f"{row['times_pytorch']:.2f}"] for row in record["rows"]]
    return (
        "Speed relative to PyTorch alone (in training with `shifted` attention), in float32. Both are timed in turns."
        f"\n\n{table(['work', 'of', 'times as fast'], rows)}\n"
    )


def vocabulary_memory(record: Record) -> str:
    rows = [[way, f"{found['peak_bytes_over_model'] / 2**20:,.0f}"] for way, found in record["ways"].items()]
    return (
        f"Peak memory of a training step, minus the model: {record['shape']}, {record['vocabulary']:,} words, "
        f"{record['tokens']:,} tokens.\n\n{table(['cross-entropy', 'MiB'], rows)}\n"
    )


def peers(record: Record) -> str:
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


NAMES = {"segment": "T", "memory": "M", "layers": "layers", "batch": "B", "vocabulary": "V"}


def _doubling_axis(axis: Any, values: Sequence[float]) -> None:
    """Set the ticks of a logarithmic axis at the given values."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _label(axes: Axes, text: str, place: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    axes.annotate(text, place, xytext=shift, textcoords="offset points", **style)


def draw_roofline(figure: Figure, record: Record) -> None:
    machine, axes = record["roofline"], figure.add_subplot()
    bandwidth, top = machine["bandwidth"], max(machine["matmul_rate"]["float32"].values())
    points = [
        (work["name"], work["operations"] / work["bytes_read_once"], work["operations"] / work["seconds"])
        for work in record["workloads"]
    ]
    low, high = min(point[1] for point in points) / 3, max(point[1] for point in points) * 4
    ridge, gigas = top / bandwidth, top / 1e9
    axes.loglog([low, ridge, high], [low * bandwidth / 1e9, gigas, gigas], color=SECOND, linewidth=1.5)
    middle = (low * ridge) ** 0.5
    bound = (middle, middle * bandwidth / 1e9)
    _label(axes, f"{bandwidth / 1e9:.0f} GB/s", bound, (-6, 4), ha="right", color=SECOND)
    _label(axes, f"{gigas:,.0f} GFLOP/s", (high, gigas), (0, 5), ha="right", color=SECOND)
    for name, intensity, rate in points:
        axes.plot(intensity, rate / 1e9, marker="o", markersize=5, color=ACCENT)
        _label(axes, name, (intensity, rate / 1e9), (0, -14), ha="center", color=INK, fontsize=8.5)
    axes.set_ylim(min(point[2] for point in points) / 1e9 / 3, gigas * 2.2)
    axes.set_xlabel("operations a byte that must be read")
    axes.set_ylabel("GFLOP/s, float32")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def draw_growth(figure: Figure, record: Record) -> None:
    """Draw a small plot per axis: time of a training step and of an evaluation, relative to the first point."""
    frames: Any = figure.subplots(1, len(record["axes"]), squeeze=False)[0]
    for axes, (axis, rows) in zip(frames, record["axes"].items(), strict=True):
        values = [row["value"] for row in rows]
        for kind, color in (("training step", ACCENT), ("evaluation", SECOND)):
            seconds, counted = (
                [row[kind][what] / rows[0][kind][what] for row in rows] for what in ("seconds", "operations")
            )
            axes.plot(values, seconds, "-", color=color, marker="o", markersize=3.5, linewidth=1.5, label=kind)
            label = "counted operations" if kind == "training step" else None
            axes.plot(values, counted, ":", color=color, linewidth=1, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        _doubling_axis(axes.xaxis, values if len(values) <= 4 else values[::2] if len(values) % 2 else values[1::2])
        short = FuncFormatter(lambda value, _: f"{value:g}" if value % 1000 else f"{value / 1000:g}k")
        axes.xaxis.set_major_formatter(short)
        axes.set_ylim(0.5, None)
        bottom, top = axes.get_ylim()
        powers = range(0, 16, 1 if top < 40 else 2)
        _doubling_axis(axes.yaxis, [2.0**power for power in powers if bottom <= 2**power <= top])
        axes.set_xlabel(NAMES[axis])
    frames[0].set_ylabel("time, relative to the first")
    figure.legend(*frames[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)


def draw_training_memory(figure: Figure, record: Record) -> None:
    axes = figure.add_subplot()
    lengths = [row["length"] for row in record["rows"]]
    ways = (
        ("peer", "Hugging Face, float32", SOFT, "-"),
        ("shifted", "shifted, float32", SECOND, "-"),
        ("factorised", "factorised, float32", SECOND, ":"),
        ("compiled", "compiled, float32", ACCENT, "-"),
        ("compiled, bfloat16", "compiled, bfloat16", ACCENT, ":"),
    )
    measured = record["rows"][0]["peak_bytes"]
    for way, label, color, style in (way for way in ways if way[0] in measured):
        sizes = [row["peak_bytes"][way] / 2**20 for row in record["rows"]]
        axes.loglog(lengths, sizes, style, color=color, marker="o", markersize=4, linewidth=1.5, label=label)
    _doubling_axis(axes.xaxis, lengths)
    low, high = axes.get_ylim()
    _doubling_axis(axes.yaxis, [4.0**power for power in range(20) if low <= 4**power <= high])
    axes.set_xlabel("T = M, tokens")
    axes.set_ylabel("MiB over what is held between steps")
    axes.legend(loc="upper left")


def draw_quality(figure: Figure, record: Record) -> None:
    texts = record["texts"]
    for axes, text in zip(figure.subplots(1, len(texts), squeeze=False)[0], texts, strict=True):
        (authors,) = (curve for curve in text["curves"] if curve["recipe"] == "authors")
        counted = text["settings"]["peer_ratio"]  # the record's seconds of the authors' recipe over those measured
        points = [(point["seconds"] / counted, point["nll"]) for point in authors["points"] if point["seconds"] > 0]
        axes.plot(*zip(*points, strict=True), color=SOFT, linewidth=1.5)
        target = text["target_nll"]
        axes.axhline(target, color=SOFT, linewidth=0.8, linestyle=":")
        axes.annotate(
            "authors'", points[len(points) // 3], xytext=(6, 6), textcoords="offset points", fontsize=8.5, color=SOFT
        )
        ends: list[tuple[float, float]] = []
        for recipe, color, below in (("adam", SECOND, False), ("muon", ACCENT, True)):
            runs = [curve for curve in text["curves"] if curve["recipe"] == recipe]
            if not runs:
                continue  # not measured
            ends = [(curve["steps"] * curve["step_seconds"], curve["points"][-1]["nll"]) for curve in runs]
            axes.plot(*zip(*ends, strict=True), color=color, marker="o", markersize=4, linewidth=1.5)
            shift = (-4, -10) if below else (4, 4)
            axes.annotate(
                NAMED_RECIPES[recipe], ends[0], xytext=shift, textcoords="offset points", fontsize=8.5, color=color,
                ha="right" if below else "left",
            )  # fmt: skip
        axes.set_xscale("log")
        _doubling_axis(axes.xaxis, [each for each in (15, 30, 60, 120, 300, 600) if each <= points[-1][0]])
        axes.set_xlim(left=15)
        shown = [nll for _, nll in ends] + [target]
        axes.set_ylim(min(shown) - 0.15, max(shown) + 0.6)
        axes.set_xlabel("seconds of training, as measured")
        axes.set_title(text["text"], fontsize=9.5, loc="left")
    figure.axes[0].set_ylabel("validation loss, nats a token")


# Title of each figure of the page, its size in inches, and the function that draws it
FIGURES: dict[str, tuple[str, tuple[float, float], Callable[..., None]]] = {
    "quality": ("Validation loss against the time of training", (9.4, 3.3), draw_quality),
    "roofline": ("Rate against operations a byte, below the machine's roofline", (7.6, 3.6), draw_roofline),
    "growth": ("Time against T, M, layers, B and V, relative to the first", (9.4, 3.2), draw_growth),
    "training-memory": ("Peak memory of a training step against T = M", (7.6, 3.5), draw_training_memory),
}

GONE = "its script is gone"
RECORD = "python benchmarks/record.py results/{}.json {}"
COMPILED = "python -m benchmarks.compiled results/compiled-{}.json"
SECTIONS = (
    Section("Time to quality", "quality", quality, ("quality",)),
    Section(
        "Compared with Hugging Face's Transformer-XL",
        "bench-peers",
        peers,
        note="On this processor, our products of float32 matrices are oneDNN's. The peer's are MKL's, as usual in "
        "PyTorch, which are slower ([decisions](../decisions.md)).",
        made_with="make bench-peers",
    ),
    Section("The roofline", "scaling", roofline, ("roofline",), f"{BEFORE_COMPILED} {WITH_MKL}", GONE),
    Section("Where a segment's time goes", "segment-profile", segment_profile, made_with=GONE),
    Section("Where a training step's time goes", "training-profile", training_profile, made_with=GONE),
    Section("Compiled attention in training", "training-attention", training_attention, made_with=GONE),
    Section(
        "Compiled code with AVX-512", "compiled-avx512", beside_pytorch, made_with=COMPILED.format("compiled-avx512")
    ),
    Section(
        "Compiled code with AVX2 alone", "compiled-avx2", beside_pytorch, made_with=COMPILED.format("compiled-avx2")
    ),
    Section("How cost grows", "scaling", growth, ("growth",), f"{BEFORE_COMPILED} {WITH_MKL}", GONE),
    Section("Memory of a training step", "training-memory", training_memory, ("training-memory",), made_with=GONE),
    Section("Memory and the vocabulary", "vocabulary-memory", vocabulary_memory, made_with=GONE),
    Section("Table 9", "bench-table9", table9, made_with=RECORD.format("bench-table9", "bench table9 --json")),
    Section(
        "Compiled layers",
        "bench-compile",
        compiled,
        note=BEFORE_COMPILED_TRAINING,
        made_with=RECORD.format("bench-compile", "bench train --compile --json"),
    ),
    Section("A long stream", "long-stream", long_stream, note=BEFORE_COMPILED),
)


def made_by(name: str, made: Record, part: str) -> str:
    hardware, commit = made["hardware"], made["commit"]
    threads = f"{hardware['threads']} thread{'' if hardware['threads'] == 1 else 's'}"
    return (
        f"`results/{name}.json`{part}: {hardware['cpu']}, {hardware['cores']} cores, {threads}, "
        f"torch {made['software']['torch']}, commit {commit[:7]}"
        f"{' with uncommitted changes' if ' ' in commit else ''}, {made['date']}.\n"
    )


def page(results: Path, docs: Path) -> tuple[str, list[RecordedPlot]]:
    """Return the text of the page, and its figures."""
    parts, plots = [HEAD], []
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        if not (results / f"{section.record}.json").is_file():
            parts.append(f"Not recorded yet: `{section.command}`.\n")
            continue
        record = read_record(results, section.record)
        output = record["output"]
        parts.append(section.text(output))
        if section.note:
            parts.append(f"{section.note}\n")
        for name in section.figures:
            title, size, draw = FIGURES[name]
            path = docs / f"performance-{name}.svg"
            plots.append(RecordedPlot(path, [name, output], size, partial(draw, record=output)))
            parts.append(f"![{title}]({path.name})\n")
        # Texts of one record may come from different days; a text with its own hardware entry gets its own line.
        texts = [text for text in output.get("texts", ()) if "hardware" in text]
        parts += [made_by(section.record, text, f", `{text['text']}`") for text in texts]
        parts.append(made_by(section.record, record, f", `{output['texts'][-1]['text']}`" if texts else ""))
    return "\n".join(parts), plots


def write_page(results: Path = RESULTS, docs: Path = DOCS / "explanation") -> None:
    text, plots = page(results, docs)
    for plot in plots:
        plot.write()
    for path in {docs / f"performance-{name}.svg" for name in FIGURES} - {plot.path for plot in plots}:
        path.unlink(missing_ok=True)
    (docs / "performance.md").write_text(text, encoding="utf-8")


def check_page(results: Path = RESULTS, docs: Path = DOCS / "explanation") -> list[str]:
    text, plots = page(results, docs)
    path = docs / "performance.md"
    wrong = [] if path.is_file() and path.read_text(encoding="utf-8") == text else [path.name]
    return wrong + [plot.path.name for plot in plots if not plot.is_current]


if __name__ == "__main__":
    write_or_check("performance_page", write_page, check_page)
