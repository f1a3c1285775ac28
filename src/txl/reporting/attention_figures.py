"""Figures 5 to 7 of the paper for any run: average attention, one head at one token, and the terms of the score."""

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

TERMS = {"a": "(a) content", "b": "(b) content-dependent position", "d": "(d) global position bias"}
"""Names of the terms of the attention score that depend on position or content."""
_COLUMNS = 640
"""Largest number of columns of a heat map; a longer span is averaged down to this number."""
_ROWS = 48
"""Largest number of labelled rows of a close-up; of more rows, only every second, third ... is labelled."""
# From little attention to much; grey marks positions that a token does not see. The darkest colour differs from INK by
# one, because dark mode replaces INK by a light colour and the scale must stay monotonic.
HEAT = LinearSegmentedColormap.from_list("txl-heat", ["#ffffff", "#c6d7e6", SECOND, "#1d2732"]).with_extremes(
    bad="#e4e4e4"
)


def average_figure(record: JsonObject, title: str = "") -> Plot:
    """Return Figure 5: average attention of every head by distance.

    Args:
        record: record that `txl.analysis.attention_record.analyse_attention` returned.
        title: title in the drawing, for a file of its own.
    """
    far = max(record["heads"], key=lambda row: row["mean_distance"])
    text = (
        f"Heat map of {len(record['heads'])} heads by distance. Layer {far['layer']}, head {far['head']} looks "
        f"farthest, {far['mean_distance']:.1f} tokens back on average."
    )
    name, height = "attention", _height(record)
    return Plot(name, "Average attention by distance", text, height, lambda drawn: draw_average(drawn, record, title))


def terms_figure(record: JsonObject, title: str = "") -> Plot:
    """Return Figure 7: a heat map of all heads for each term of the attention score; arguments as `average_figure`."""
    names = ", ".join(TERMS[name] for name in record["terms"])
    text, height = f"Heat maps of {names}, every head by distance.", 0.8 * _height(record) + 0.5
    name = "Terms of the attention score by distance"
    return Plot("terms", name, text, height, lambda drawn: draw_terms(drawn, record, title))


def close_figure(record: JsonObject, position: int, head: int) -> Plot:
    """Return Figure 6: the weights of one head at neighbouring tokens.

    Args:
        record: as in `average_figure`.
        position: index of the chosen position in the record.
        head: index of the head among those of the position.
    """
    chosen = record["positions"][position]
    title = f"Layer {chosen['heads'][head]['layer']}, head {chosen['heads'][head]['head']}"
    height = 1.1 + 0.16 * min(_ROWS, max(8, len(chosen["keys"])))
    text = "Heat map of neighbouring tokens by what they attend to."
    return Plot(
        f"close-{position}-{head}", title, text, height, lambda drawn: draw_close(drawn, record, position, head)
    )


def draw_average(drawn: Figure, record: JsonObject, title: str = "") -> None:
    """Draw a heat map of average attention, heads by distance."""
    weights = np.array([row["average"] for row in record["heads"]])
    axes = drawn.add_subplot()
    axes.set_title(title, fontsize=9.5, loc="left", parse_math=False)
    image = _heat_map(axes, weights, record)
    _scale(drawn.colorbar(image, ax=axes, pad=0.01, aspect=30), "mean attention weight")


def draw_terms(drawn: Figure, record: JsonObject, title: str = "") -> None:
    """Draw a heat map of heads by distance for each term, all on one colour scale."""
    terms = record["terms"]
    panels = drawn.subplots(1, len(terms), squeeze=False, sharey=True)[0]
    norm = _norm(np.concatenate([np.array(weights) for weights in terms.values()]))
    for index, (axes, (name, weights)) in enumerate(zip(panels, terms.items(), strict=True)):
        image = _heat_map(axes, np.array(weights), record, norm, ticks=4)
        axes.set_title(TERMS[name], fontsize=9.5, loc="left")
        if index:
            axes.set_ylabel("")
        else:
            _scale(drawn.colorbar(image, ax=panels, pad=0.01, aspect=30), "mean weight")
    if title:
        drawn.suptitle(title, x=0.01, ha="left", fontsize=9.5, parse_math=False)


def draw_close(drawn: Figure, record: JsonObject, place: int, at: int) -> None:
    """Draw Figure 6: attention weights of neighbouring tokens by distance."""
    position = record["positions"][place]
    head = position["heads"][at]
    weights, keys = np.array(head["weights"]), np.array(position["keys"])
    n_row, n_column = weights.shape
    axes = drawn.add_subplot()
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
    texts = position["texts"][-n_row:]
    axes.set_yticks(list(labelled), [_label(texts[row]) for row in labelled], fontsize=7.5, parse_math=False)
    _distance_axis(axes)
    axes.set_xlabel("distance from the last row’s token, tokens")
    title = f"layer {head['layer']}, head {head['head']}, token {position['position']:,}"
    axes.set_title(title, fontsize=9.5, loc="left")
    extend = "max" if weights.max() > most else "neither"
    bar = drawn.colorbar(image, ax=axes, pad=0.01, aspect=30, extend=extend)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    for end in bar.ax.patches:
        end.set_gid("heat-end")  # id that the page's style selects
    bar.set_label("attention weight")


def _heat_map(axes: Axes, weights: np.ndarray, record: JsonObject, norm: LogNorm | None = None, ticks: int = 6) -> Any:
    """Draw weights [heads, distance] as an image, with the smallest distance on the right."""
    span = weights.shape[1]
    shown = _thinned(weights)[:, ::-1]
    norm = norm or _norm(weights)
    image = axes.imshow(
        np.maximum(shown, norm.vmin or 0), aspect="auto", interpolation="none", cmap=HEAT, norm=norm,
        extent=(-(span - 0.5), 0.5, len(weights) - 0.5, -0.5),
    )  # fmt: skip
    axes.grid(False)
    layers = [row["layer"] for row in record["heads"]]
    begins = [at for at, layer in enumerate(layers) if at == 0 or layers[at - 1] != layer]
    for at in begins[1:]:
        axes.axhline(at - 0.5, color="white", linewidth=0.8)
    per_layer = len(layers) / len(begins)
    step = max(1, round(len(begins) / 12))
    shown_layers = begins[::step]
    axes.set_yticks([at + (per_layer - 1) / 2 for at in shown_layers], [str(layers[at]) for at in shown_layers])
    axes.set_ylabel("layer (its heads in order)")
    everyone = record["settings"]["min_keys"]
    if 1 < everyone < span:
        axes.axvline(-(everyone - 0.5), color=SOFT, linewidth=1, linestyle=(0, (2, 2)))
    _distance_axis(axes, ticks)
    axes.set_xlabel("distance, tokens")
    return image


def _distance_axis(axes: Axes, ticks: int = 6) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(value):,.0f}"))


def _scale(bar: Any, label: str) -> None:
    bar.outline.set_visible(False)
    bar.set_label(label)
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.tick_params(which="minor", length=0)


def _norm(weights: np.ndarray) -> LogNorm:
    """Return a logarithmic scale that begins at 0.1 times the uniform weight.

    The scale ends at the largest weight, but at least at 100 times the uniform weight. Uniform weights are then in the
    lowest third of the scale, which is light.
    """
    low = 0.1 / weights.shape[1]
    return LogNorm(low, max(float(weights.max()), 1000 * low))


def _thinned(weights: np.ndarray) -> np.ndarray:
    """Return weights with neighbouring distances averaged, so that there are at most `_COLUMNS` columns."""
    if weights.shape[1] <= _COLUMNS:
        return weights
    return np.stack([part.mean(axis=1) for part in np.array_split(weights, _COLUMNS, axis=1)], axis=1)


def _height(record: JsonObject) -> float:
    """Return the height in inches of a heat map with one row per head."""
    return min(9.0, max(2.6, 1.1 + 0.055 * len(record["heads"])))


def _label(text: str) -> str:
    if not text:
        return "…"  # a byte that completes no character
    shown = plain(text.strip()) or ("⏎" if "\n" in text else "␣")
    return shown if len(shown) <= 14 else f"{shown[:13]}…"
