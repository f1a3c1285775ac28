"""Page of `txl recl`: Table 8 and Figures 3 and 4 of the paper for a group of runs.

A result is what `txl recl --json` prints.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from txl.files import JsonObject, replacing
from txl.reporting.context_figures import gains_plot, length_plot, steps_plot
from txl.reporting.page import render
from txl.reporting.plots import Plot
from txl.units import ppl_text


def recl_plots(result: JsonObject) -> dict[str, Plot]:
    """Return plots by file name: perplexity by context length, and for each r the gains of steps and of all pairs."""
    models = {model["name"]: model for model in result["models"]}
    points = {
        name: [(length, model["ppl"][str(length)]) for length in result["context_lengths"]]
        for name, model in models.items()
    }
    plots = {"perplexity": length_plot(points, "perplexity", "context length", "perplexity per token")}
    for r, pairs in result["relative_gains"].items():
        steps = {name: [(pair["short"], pair["gain"][name]) for pair in pairs] for name in models}
        name, title = f"relative-gain-r{r}", f"Relative gain of each step, r = {r}"
        # In a page's ids a full stop would have a meaning for CSS selectors.
        plots[name] = steps_plot(steps, result["threshold"], name.replace(".", "-"), title)
    for r, pairs in result["perplexity_gains"].items():
        gains = {name: {(pair["short"], pair["long"]): pair["gain"][name] for pair in pairs} for name in models}
        name, title = f"gains-r{r}", f"Unnormalised relative perplexity gains, r = {r}"
        plots[name] = gains_plot(gains, name.replace(".", "-"), title)
    return plots


def limited_contexts(result: JsonObject) -> list[str]:
    """Return a sentence for each model that cannot read the longest context at once."""
    longest = result["context_lengths"][-1]
    return [
        f"{model['name']} reads at most {most:,} tokens at once: longer contexts were cut to {most:,} tokens, so its "
        f"effective context is at most that."
        for model in result["models"]
        if (most := model["longest_context"]) is not None and most < longest
    ]


def write_recl(folder: Path, result: JsonObject, command: Sequence[str]) -> list[Path]:
    """Write recl.html, recl.json and each figure as .svg and .png into an existing folder; return the paths.

    The page shows the words of the `command` that made the result.

    Raises:
        OSError: if a file cannot be written. Each file is then complete: the old or the new version.
    """
    plots, models, fractions = recl_plots(result), result["models"], list(result["relative_gains"])
    values = {
        "title": "Relative effective context length",
        "result": result,
        "plots": plots,
        "recl": [
            ["model", "parameters", *(f"r = {r}" for r in fractions)],
            *(
                [model["name"], f"{model['parameters']:,}", *(f"{model['recl'][r]:,}" for r in fractions)]
                for model in models
            ),
        ],
        "notes": limited_contexts(result),
        "perplexities": [
            ["context", *(model["name"] for model in models)],
            *([f"{n:,}", *(ppl_text(model["ppl"][str(n)]) for model in models)] for n in result["context_lengths"]),
        ],
        "command": shlex.join(command),
    }
    figures = {folder / f"{name}.{ending}": plot for name, plot in plots.items() for ending in ("svg", "png")}
    for path, plot in figures.items():
        plot.save(path)
    texts = {
        "recl.json": json.dumps(result, indent=1, ensure_ascii=False) + "\n",
        "recl.html": render("recl.html", values),
    }
    for name, text in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return [*figures, *(folder / name for name in texts)]
