"""Figures 5 to 7 of the paper for any run: average attention, one head at one token, and the terms of the score.

A record is what `txl.analysis.attention_record.analyse_attention` returned; a title is for a file of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from txl.files import JsonObject
from txl.reporting.plots import SECOND, SOFT, Plot
from txl.reporting.wording import plain

# Terms of the attention score that depend on position or content.
TERMS = {"a": "(a) content", "b": "(b) content-dependent position", "d": "(d) global position bias"}
_COLUMNS = 640  # largest number of columns of a heat map; a longer span is averaged down to this number
_ROWS = 48  # largest number of labelled rows of a close-up; of more, only every second, third ... is labelled
# From little attention to much; grey marks positions that a token does not see. The darkest colour differs from INK by
# one, because dark mode replaces INK by a light colour and the scale must stay monotonic.
HEAT = LinearSegmentedColormap.from_list("txl-heat", ["#ffffff", "#c6d7e6", SECOND, "#1d2732"])
HEAT = HEAT.with_extremes(bad="#e4e4e4")


def average_figure(record: JsonObject, title: str = "") -> Plot:
    """Return Figure 5: average attention of every head by distance."""
    far = max(record["heads"], key=lambda row: row["mean_distance"])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_title(title, fontsize=9.5, loc="left", parse_math=False)
        image = _heat_map(axes, np.array([row["average"] for row in record["heads"]]), record)
        _scale(figure.colorbar(image, ax=axes, pad=0.01, aspect=30), "mean attention weight")

    text = (
        f"Heat map of {len(record['heads'])} heads by distance. Layer {far['layer']}, head {far['head']} looks "
        f"farthest, {far['mean_distance']:.1f} tokens back on average."
    )
    return Plot("attention", "Average attention by distance", text, _height(record), draw)


def terms_figure(record: JsonObject, title: str = "") -> Plot:
    """Return Figure 7: a heat map of all heads for each term of the attention score, all on one colour scale."""
    terms = {name: np.array(weights) for name, weights in record["terms"].items()}

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(terms), squeeze=False, sharey=True)[0]
        norm = _norm(np.concatenate(list(terms.values())))
        for axes, (name, weights) in zip(panels, terms.items(), strict=True):
            image = _heat_map(axes, weights, record, norm, ticks=4)
            axes.set_title(TERMS[name], fontsize=9.5, loc="left")
            if axes is panels[0]:
                _scale(figure.colorbar(image, ax=panels, pad=0.01, aspect=30), "mean weight")
            else:
                axes.set_ylabel("")
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, parse_math=False)

    text = f"Heat maps of {', '.join(TERMS[name] for name in terms)}, every head by distance."
    return Plot("terms", "Terms of the attention score by distance", text, 0.8 * _height(record) + 0.5, draw)


def close_figure(record: JsonObject, position: int, head: int) -> Plot:
    """Return Figure 6: a head's weights at neighbouring tokens, by the indices of position and head in the record."""
    chosen = record["positions"][position]
    shown = chosen["heads"][head]
    name = f"layer {shown['layer']}, head {shown['head']}"

    def draw(figure: Figure) -> None:
        weights, keys = np.array(shown["weights"]), np.array(chosen["keys"])
        n_row, n_column = weights.shape
        axes = figure.add_subplot()
        last = np.arange(n_column - n_row, n_column)[:, None]
        columns = np.arange(n_column)
        unseen = (columns > last) | (columns <= last - keys[:, None])
        # Evenly divided attention is drawn light, as in Figure 5.
        most = min(1.0, max(float(np.quantile(weights[~unseen], 0.995)), 4 / float(keys.mean())))
        image = axes.imshow(
            np.ma.array(weights, mask=unseen), aspect="auto", interpolation="none", cmap=HEAT, vmin=0, vmax=most,
            extent=(-(n_column - 0.5), 0.5, n_row - 0.5, -0.5),
        )  # fmt: skip
        axes.grid(False)
        step = -(-n_row // _ROWS)
        labelled = range((n_row - 1) % step, n_row, step)  # the last row is always labelled
        texts = [label(text) for text in chosen["texts"][-n_row:]]
        axes.set_yticks(list(labelled), [texts[row] for row in labelled], fontsize=7.5, parse_math=False)
        _distance_axis(axes, 6)
        axes.set_xlabel("distance from the last row’s token, tokens")
        axes.set_title(f"{name}, token {chosen['position']:,}", fontsize=9.5, loc="left")
        extend = "max" if weights.max() > most else "neither"
        bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=30, extend=extend)
        for end in bar.ax.patches:
            end.set_gid("heat-end")  # id that the page's style selects
        _scale(bar, "attention weight")

    height = 1.1 + 0.16 * min(_ROWS, max(8, len(chosen["keys"])))
    text = "Heat map of neighbouring tokens by what they attend to."
    return Plot(f"close-{position}-{head}", name.capitalize(), text, height, draw)


def label(text: str) -> str:
    """Return a token's text as the label of a row: at most 14 characters, white space visible."""
    if not text:
        return "…"  # a byte that completes no character
    shown = plain(text.strip()) or ("⏎" if "\n" in text else "␣")
    return shown if len(shown) <= 14 else f"{shown[:13]}…"


def _heat_map(axes: Axes, weights: np.ndarray, record: JsonObject, norm: LogNorm | None = None, ticks: int = 6) -> Any:
    """Draw weights [heads, distance] as an image, with the smallest distance on the right."""
    span = weights.shape[1]
    parts = np.array_split(weights, min(span, _COLUMNS), axis=1)
    columns = np.stack([part.mean(axis=1) for part in parts], axis=1)[:, ::-1]
    norm = norm or _norm(weights)
    image = axes.imshow(
        np.maximum(columns, norm.vmin or 0), aspect="auto", interpolation="none", cmap=HEAT, norm=norm,
        extent=(-(span - 0.5), 0.5, len(weights) - 0.5, -0.5),
    )  # fmt: skip
    axes.grid(False)
    layers = [row["layer"] for row in record["heads"]]
    begins = [at for at, layer in enumerate(layers) if at == 0 or layers[at - 1] != layer]
    for at in begins[1:]:
        axes.axhline(at - 0.5, color="white", linewidth=0.8)
    middle = (len(layers) / len(begins) - 1) / 2
    labelled = begins[:: max(1, round(len(begins) / 12))]
    axes.set_yticks([at + middle for at in labelled], [str(layers[at]) for at in labelled])
    axes.set_ylabel("layer (its heads in order)")
    everyone = record["settings"]["min_keys"]
    if 1 < everyone < span:
        axes.axvline(-(everyone - 0.5), color=SOFT, linewidth=1, linestyle=(0, (2, 2)))
    _distance_axis(axes, ticks)
    axes.set_xlabel("distance, tokens")
    return image


def _distance_axis(axes: Axes, ticks: int) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(value):,.0f}"))


def _scale(bar: Any, name: str) -> None:
    bar.outline.set_visible(False)
    bar.set_label(name)
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.tick_params(which="minor", length=0)


def _norm(weights: np.ndarray) -> LogNorm:
    """Return a logarithmic scale that begins at 0.1 times the uniform weight.

    The scale ends at the largest weight, but at least at 100 times the uniform weight. Uniform weights are then in the
    lowest third of the scale, which is light.
    """
    low = 0.1 / weights.shape[1]
    return LogNorm(low, max(float(weights.max()), 1000 * low))


def _height(record: JsonObject) -> float:
    """Return the height in inches of a heat map with one row per head."""
    return min(9.0, max(2.6, 1.1 + 0.055 * len(record["heads"])))
