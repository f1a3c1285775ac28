"""Page of `txl recl`: Table 8 and Figures 3 and 4 of the paper for a group of runs."""

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
    """Return plots by file name: perplexity by context length, and for each r the gains of steps and of all pairs.

    Args:
        result: result that `txl recl --json` prints.
    """
    models = {model["name"]: model for model in result["models"]}
    points = {
        name: [(length, model["ppl"][str(length)]) for length in result["context_lengths"]]
        for name, model in models.items()
    }
    plots = {"perplexity": length_plot(points, "perplexity", "context length", "perplexity per token")}
    for r, pairs in result["relative_gains"].items():
        steps = {name: [(pair["short"], pair["gain"][name]) for pair in pairs] for name in models}
        name = f"relative-gain-r{r}"
        plots[name] = steps_plot(steps, result["threshold"], _id(name), f"Relative gain of each step, r = {r}")
    for r, pairs in result["perplexity_gains"].items():
        gains = {name: {(pair["short"], pair["long"]): pair["gain"][name] for pair in pairs} for name in models}
        name = f"gains-r{r}"
        plots[name] = gains_plot(gains, _id(name), f"Unnormalised relative perplexity gains, r = {r}")
    return plots


def recl_page(result: JsonObject, plots: dict[str, Plot], command: Sequence[str]) -> str:
    """Return the page as HTML.

    Args:
        result: result that `txl recl --json` prints.
        plots: plots that `recl_plots` returned.
        command: words of the command line that made the result.
    """
    models, fractions = result["models"], list(result["relative_gains"])
    recl = [
        [model["name"], f"{model['parameters']:,}", *(f"{model['recl'][r]:,}" for r in fractions)] for model in models
    ]
    perplexities = [
        [f"{length:,}", *(ppl_text(model["ppl"][str(length)]) for model in models)]
        for length in result["context_lengths"]
    ]
    values = {
        "title": "Relative effective context length",
        "result": result,
        "plots": plots,
        "recl": [["model", "parameters", *(f"r = {r}" for r in fractions)], *recl],
        "notes": limited_contexts(result),
        "perplexities": [["context", *(model["name"] for model in models)], *perplexities],
        "command": shlex.join(command),
    }
    return render("recl.html", values)


def limited_contexts(result: JsonObject) -> list[str]:
    """Return a sentence for each model that cannot read the longest context at once.

    Args:
        result: result that `txl recl --json` prints.
    """
    longest = result["context_lengths"][-1]
    return [
        f"{model['name']} reads at most {most:,} tokens at once: longer contexts were cut to {most:,} tokens, so its "
        f"effective context is at most that."
        for model in result["models"]
        if (most := model["longest_context"]) is not None and most < longest
    ]


def write_recl(folder: Path, result: JsonObject, command: Sequence[str]) -> list[Path]:
    """Write recl.html, recl.json and each figure as .svg and .png into an existing folder; return the paths.

    Raises:
        OSError: if a file cannot be written. Each file is then complete: the old or the new version.
    """
    plots = recl_plots(result)
    figures = {folder / f"{name}.{ending}": plot for name, plot in plots.items() for ending in ("svg", "png")}
    for path, plot in figures.items():
        plot.save(path)
    texts = {
        folder / "recl.json": json.dumps(result, indent=1, ensure_ascii=False) + "\n",
        folder / "recl.html": recl_page(result, plots, command),
    }
    for path, text in texts.items():
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return [*figures, *texts]


def _id(name: str) -> str:
    """Return a name without full stops, which have a meaning in CSS selectors."""
    return name.replace(".", "-")
