"""Write the claims and tables of `results/README.md`, with their plots, from records of `txl reproduce`.

    python -m benchmarks.tables_page            # writes this part of the page and its plots in results/figures/
    python -m benchmarks.tables_page --check    # exit code 1 if page or plots do not match the records

A record named reproduce-tableN-CORPUS.json holds a table. Each table has one record; a record with training until
convergence replaces one without. The record of Table 8 also holds Figure 4.
"""

from __future__ import annotations

import itertools
import math
import shlex
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from txl.reporting.plots import ACCENT, INK, SECOND, SOFT
from txl_lab.pages import Record, RecordedPlot, read_record, table, write_or_check
from txl_lab.paper.outcome import chosen_rate, named_seeds, rates_and_losses, recorded_seeds
from txl_lab.records import RESULTS

BEGIN, END = "<!-- tables: python -m benchmarks.tables_page -->", "<!-- end of tables -->"
# The paper's claims, shortened
CLAIMS = {
    "C1": "first below 1.0 bits a character on enwik8",
    "C2": "the best perplexity on WikiText-103",
    "C3": "dependencies 80% longer than recurrent networks', 450% longer than Transformers'",
    "C4": "evaluation up to 1,800 times faster",
    "C5": "recurrence and the relative encoding are both needed",
    "C6": "12 layers match a vanilla Transformer of 64",
    "C7": "recurrence helps without long-term dependency too",
}
# Measure that a table's plot shows, for tables whose plot does not show the quality
_PLOTTED = {"table8": "r = 0.1", "table9": "slower"}
_LEFT_OUT = ("parameters", "status", "backprop len")


def records(results: Path) -> dict[str, Record]:
    paths = sorted(results.glob("reproduce-table*.json"), key=lambda path: int(path.stem.split("-")[1][5:]))
    return {path.stem: read_record(results, path.stem) for path in paths}


def name_of(stem: str) -> str:
    """Return the table's name from a record's name: table6 for reproduce-table6-ptb."""
    return stem.split("-")[1]


def claims(found: dict[str, Record]) -> str:
    """Return a table with a row for each judgement about the claims C1 to C7, in the order of the claims."""
    rows = []
    for stem, record in found.items():
        for judged in record["output"]["claims"]:
            key = judged["claim"].split(",")[0]
            if key in CLAIMS and judged["outcome"] != "not judged":
                link = f"[{record['output']['title'].split(':')[0]}](#{name_of(stem)})"
                rows.append([key, CLAIMS[key], judged["text"], f"**{judged['outcome']}**", judged["reason"], link])
    rows.sort(key=lambda row: row[0])
    for before, row in itertools.pairwise(rows):
        if before[0] == row[0]:
            row[1] = ""
    return table(["", "the paper", "judged here", "outcome", "margin", "table"], rows)


def section(stem: str, record: Record) -> str:
    """Return the part of the page for one table."""
    output = record["output"]
    name, trained = name_of(stem), [row for row in output["rows"] if row["status"] == "done"]
    parts = [f'<a id="{name}"></a>\n\n### {output["title"]}\n', budget(output) + "\n"]
    if not trained:
        return "\n".join([*parts, "No row of it was trained.\n", made(stem, record)])
    parts += [f"![{text}](figures/{plot.path.name})\n" for text, plot in plots(output, Path())]
    left_out = {*_LEFT_OUT, "attn len"} if output["what"] == "table9" else _LEFT_OUT
    ours = [key for key in trained[0]["shown"] if key not in left_out]
    theirs = [key for key in trained[0]["paper"] if key.lower().replace("pplx", "ppl") in [key.lower() for key in ours]]
    heads = [
        "model" if output["what"] != "table9" else "attention length",
        "parameters",
        *(f"{key}, here" for key in ours),
        *(f"{key}, the paper" for key in theirs),
    ]
    rows = [
        [
            label(row),
            f"{row['parameters']:,}" if row["parameters"] else "-",
            *(row["shown"][key] for key in ours),
            *map(row["paper"].get, theirs),
        ]
        for row in trained
    ]
    parts.append(table(heads, [[str(cell) for cell in row] for row in rows]) + "\n")
    own = [judged for judged in output["claims"] if judged["claim"].split(",")[0] not in CLAIMS]
    parts += [f"- {judged['text']}: **{judged['outcome']}** ({judged['reason']})\n" for judged in own]
    return "\n".join([*parts, *spent(output), made(stem, record)])


def label(row: Record) -> str:
    """Return the row's key, which names the difference to other rows, and the paper's name of the row, if any."""
    model = row["model"].lstrip("- ")
    return f"`{row['row']}`" + (f" {model}" if model else "")


def budget(output: Record) -> str:
    """Return one sentence about text, training, seeds and targets."""
    scale = output["scale"]
    if output["what"] == "table9":
        return "Nothing is trained. Times of one thread."
    length = f"{scale['steps']:,} steps each, not converged"
    if scale.get("until_converged"):
        length = f"trained until validation stops improving or {scale['steps']:,} steps are made ({at_cap(output)})"
    targets = scale["eval_tokens"]
    if output["what"] == "table8":
        targets = output["rows"][0]["seeds"]["1"]["targets"]
    seeds = f"{output['seeds']} seed" + "s" * (output["seeds"] > 1)
    for fewer in range(output["seeds"] - 1, 0, -1):
        if rows := [f"`{row['row']}`" for row in output["rows"] if len(row["seeds"]) == fewer]:
            seeds += f", but {fewer} of each of {', '.join(rows)}"
    if missing := [f"`{row['row']}`" for row in output["rows"] if row["status"] == "not finished"]:
        seeds += f"; not trained: {', '.join(missing)}"
    return f"{output['corpus']} in {output['unit']}s, {length}; {seeds}; {targets:,} targets of the test split."


def at_cap(output: Record) -> str:
    """Return a clause that states which rows made as many steps as they were allowed."""
    trained = [row for row in output["rows"] if row["status"] == "done"]
    capped = [row["shown"]["status"].startswith("hit the cap") for row in trained]
    if not any(capped):
        return "no row made all steps"
    fewer = 2 * sum(capped) <= len(capped)  # name the shorter part
    named = ", ".join(f"`{row['row']}`" for row, at in zip(trained, capped, strict=True) if at == fewer)
    if fewer:
        return f"{named} made all steps"
    return f"all rows but {named} made all steps" if named else "all rows made all steps"


def spent(output: Record) -> list[str]:
    """Return a line with the time of a run and the learning rates that were tried; nothing if none was tuned."""
    runs = [each for row in output["rows"] for each in row["seeds"].values() if "training_seconds" in each]
    tuned = [{"whole": []} | each["rates"] for each in runs if "rates" in each]
    if not tuned:
        return []
    minutes = sorted(each["training_seconds"] / 60 for each in runs)
    most = max(each["tokens"] for each in runs)
    rates = "; ".join(dict.fromkeys(map(chosen, tuned)))
    return [
        f"A run took {minutes[0]:.1f} to {minutes[-1]:.1f} minutes and up to {most / 1e6:.1f} million tokens. Learning "
        f"rates, with losses of seed 1 on the validation split: {rates}.\n"
    ]


def chosen(tuned: Any) -> str:
    """Return the chosen learning rate of a recipe, and the losses of all that were tried."""

    def losses(name: str) -> str:
        return ", ".join(" ".join(each) for each in rates_and_losses(tuned[name]))

    whole = f"; to the end: {losses('whole')}" if tuned["whole"] else ""
    kind = tuned["recipe"].rsplit("-", 2)[0]
    row = f"`{tuned['row']}` of {tuned['table']}"
    return f"{kind} {chosen_rate(tuned):g} ({tuned['steps']:,} steps of {row}: {losses('tried')}{whole})"


def made(stem: str, record: Record) -> str:
    command = record["command"] if isinstance(record["command"], str) else shlex.join(record["command"])
    line = f"`results/{stem}.json`, commit {record['commit'][:7]}, {record['date']}: `{command}`\n"
    measured = ((int(seed), each) for row in record["output"]["rows"] for seed, each in row["seeds"].items())
    return "\n".join([line, *(taken(*each) for each in recorded_seeds(measured))])


def taken(origin: Record, seeds: list[int]) -> str:
    arithmetic, processor = origin["dtype"] or "float32", origin["hardware"]["cpu"]
    commit = f"commit {origin['commit'][:7]}, {origin['date']}, " if "commit" in origin else ""
    return f"Measured before: {named_seeds(seeds)}, {commit}in {arithmetic} on {processor}.\n"


def plotted(output: Record) -> list[tuple[str, list[float]]]:
    """Return each trained row's key with the values that the plot shows, one per seed."""
    measure = _PLOTTED.get(output["what"], "quality")
    rows = [(row["row"], row["values"].get(measure)) for row in output["rows"] if row["status"] == "done"]
    return [(key, values) for key, values in rows if values]


def plots(output: Record, folder: Path) -> list[tuple[str, RecordedPlot]]:
    rows, by_group = plotted(output), curves(output) if output["what"] == "table8" else {}
    found = []
    if rows:
        path, size = folder / f"{output['what']}.svg", (7.6, 0.9 + 0.28 * len(rows))
        plot = RecordedPlot(path, ["tables", rows], size, partial(draw_seeds, output))
        found.append((f"{output['title']}, every seed", plot))
    if by_group:
        plot = RecordedPlot(folder / "figure4.svg", ["tables", by_group], (7.6, 3.4), partial(draw_curves, by_group))
        found.append(("Figure 4: perplexity against context length, mean over seeds", plot))
    return found


def draw_seeds(output: Record, figure: Figure) -> None:
    axes = figure.add_subplot()
    rows = plotted(output)
    every = [value for _, values in rows for value in values]
    digits = 1 if max(every) - min(every) < 10 else 0
    for place, (key, values) in enumerate(reversed(rows)):
        color = ACCENT if key.startswith("xl") else SECOND
        axes.plot(values, [place] * len(values), "o", markersize=5, alpha=0.8, color=color)
        mean = sum(values) / len(values)
        axes.annotate(
            f"{mean:,.3f}" if mean < 10 else f"{mean:,.{digits}f}", (max(values), place), xytext=(7, 0),
            textcoords="offset points", va="center", fontsize=8, color=INK,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [key for key, _ in reversed(rows)], fontsize=8.5)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.margins(x=0.12)
    axes.grid(True, axis="x")
    measures = {"table8": "relative effective context length, tokens, r = 0.1", "table9": "times faster"}
    quality = "bits per character" if output["unit"] in ("byte", "char") else "perplexity, test split"
    axes.set_xlabel(measures.get(output["what"], quality))


def curves(output: Record) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return context lengths and mean perplexities over seeds, by group and row."""
    groups = {each["row"]: each["group"] for each in output["gains"]}
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in output["rows"]:
        if row["loss_by_length"]:
            points = [(int(length), fmean(map(math.exp, nll))) for length, nll in row["loss_by_length"].items()]
            found.setdefault(groups[row["row"]], {})[row["row"]] = points
    return found


def draw_curves(by_group: dict[str, dict[str, list[tuple[int, float]]]], figure: Figure) -> None:
    for axes, models in zip(figure.subplots(1, len(by_group), squeeze=False).flat, by_group.values(), strict=True):
        for (key, points), color in zip(models.items(), itertools.cycle((ACCENT, SECOND, INK, SOFT))):
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=2, linewidth=1.2, label=key)
        lowest = min(value for points in models.values() for _, value in points)
        axes.set_ylim(0.98 * lowest, 1.4 * lowest)  # a model far above would press the others into one line
        axes.set_xscale("log")
        ticks = [25, 50, 100, 200, 400, 900]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("context length, tokens")
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("perplexity, test split")


def made_from(results: Path) -> tuple[str, str, list[RecordedPlot]]:
    """Return the page as it is, and the page and the plots that the records give."""
    found, page = records(results), (results / "README.md").read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    parts = [claims(found), "\n## The paper's tables\n", *(section(*record) for record in found.items())]
    wanted = f"{before}{BEGIN}\n\n{chr(10).join(parts)}\n{END}{rest.partition(END)[2]}"
    figures = [plot for record in found.values() for _, plot in plots(record["output"], results / "figures")]
    return page, wanted, figures


def check(results: Path = RESULTS) -> list[str]:
    page, wanted, figures = made_from(results)
    wrong = [] if page == wanted else ["README.md"]
    return wrong + [plot.path.name for plot in figures if not plot.is_current]


def write(results: Path = RESULTS) -> None:
    _, wanted, figures = made_from(results)
    (results / "README.md").write_text(wanted, encoding="utf-8")
    for plot in figures:
        plot.write()


if __name__ == "__main__":
    write_or_check("tables_page", write, check)
