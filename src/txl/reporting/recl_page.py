"""Page of `txl recl`: Table 8 and Figures 3 and 4 of the paper for a group of runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from txl.files import JsonObject, replacing
from txl.reporting.context_figures import Plot, gains_plot, length_plot, steps_plot
from txl.reporting.page import escape, figure, note, page, section, table
from txl.reporting.wording import counted, short_name
from txl.units import ppl_text


def recl_plots(result: JsonObject) -> dict[str, Plot]:
    """Return plots by file name: perplexity by context length, and for each r the gains of steps and of all pairs.

    Args:
        result: result that `txl recl --json` prints.
    """
    models = {each["name"]: each for each in result["models"]}
    points = {
        name: [(length, each["ppl"][str(length)]) for length in result["context_lengths"]]
        for name, each in models.items()
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
    lengths = result["context_lengths"]
    title = "Relative effective context length"
    words = (
        f"{result['targets']:,} targets spread over the {result['split']} split of {short_name(result['corpus'])}, "
        f"each predicted from exactly {lengths[0]:,}, {lengths[1]:,} ... {lengths[-1]:,} tokens "
        f"by {counted(len(result['models']), 'model')}."
    )
    figures = [
        section(
            "Figure 4: perplexity by context length",
            figure(plots["perplexity"].drawing(), "Of the same targets, not calibrated by the group’s baseline."),
        )
    ]
    for r in result["relative_gains"]:
        figures.append(
            section(
                f"Figure 3: what longer contexts gain, r = {r}",
                figure(
                    plots[f"relative-gain-r{r}"].drawing(),
                    "g(c,c′) of each step. A model’s RECL is the first c at which its line lies below the threshold.",
                ),
                figure(
                    plots[f"gains-r{r}"].drawing(),
                    "exp f(c,c) − exp f(c,c′) of every pair; what stands out more gains more from the longer context.",
                ),
            )
        )
    body = [
        f"<header><h1>{title}</h1><p>{escape(words)}</p></header>",
        _table_8(result),
        *figures,
        _perplexities(result),
        section(
            "How",
            note(
                "Appendix C of the paper. Every target’s context is read from empty memory, so that a model with "
                "memory sees exactly as much as one without. All models share one baseline, the least loss of any of "
                "them at the shorter context: the figures hold for this group alone."
            ),
            note(f"`{shlex.join(command)}`"),
            note("Everything on this page is in `recl.json` beside it."),
        ),
    ]
    return page(title, body)


def held_notes(result: JsonObject) -> list[str]:
    """Return a sentence for each model that cannot read the longest context at once.

    Args:
        result: result that `txl recl --json` prints.
    """
    longest = result["context_lengths"][-1]
    return [
        f"{each['name']} reads at most {each['longest_context']:,} tokens at once: longer contexts were cut to "
        f"{each['longest_context']:,} tokens, so its effective context is at most that."
        for each in result["models"]
        if each["longest_context"] is not None and each["longest_context"] < longest
    ]


def write_recl(folder: Path, result: JsonObject, command: Sequence[str]) -> list[Path]:
    """Write recl.html, recl.json and each figure as .svg and .png into an existing folder; return the paths.

    Raises:
        OSError: if a file cannot be written. Each file is then complete: the old or the new version.
    """
    plots = recl_plots(result)
    written = []
    for name, plot in plots.items():
        for ending in ("svg", "png"):
            written.append(folder / f"{name}.{ending}")
            plot.save(written[-1])
    texts = {
        "recl.json": json.dumps(result, indent=1, ensure_ascii=False) + "\n",
        "recl.html": recl_page(result, plots, command),
    }
    for name, text in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        written.append(folder / name)
    return written


def _table_8(result: JsonObject) -> str:
    fractions = list(result["relative_gains"])
    rows = [
        [each["name"], f"{each['parameters']:,}", *(f"{each['recl'][r]:,}" for r in fractions)]
        for each in result["models"]
    ]
    heads = ["model", "parameters", *(f"r = {r}" for r in fractions)]
    longest = result["context_lengths"][-1]
    return section(
        "Table 8: relative effective context length",
        table(
            f"Tokens up to which a longer context still gains {result['threshold']:.3g} of perplexity, r: the fraction "
            f"of targets that are hardest for the group",
            heads,
            rows,
            range(1, len(heads)),
        ),
        note(f"{longest:,}, the longest that was measured, means that gains never stopped."),
        *(note(each) for each in held_notes(result)),
        note("Table 8 compares models of the same parameter budget."),
    )


def _perplexities(result: JsonObject) -> str:
    names = [each["name"] for each in result["models"]]
    rows = [
        [f"{length:,}", *(ppl_text(each["ppl"][str(length)]) for each in result["models"])]
        for length in result["context_lengths"]
    ]
    return section(
        "Perplexities", table("Per token, by context length", ["context", *names], rows, range(1, len(names) + 1))
    )


def _id(name: str) -> str:
    """Return a name without full stops, which have a meaning in CSS selectors."""
    return name.replace(".", "-")
