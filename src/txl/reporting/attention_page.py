"""Figures 5 to 7 of the paper for any run, and the section of a page that contains these figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from txl.analysis.attention_record import FORMAT
from txl.errors import UserError
from txl.files import JsonObject, read_json, write_whole
from txl.reporting.page import escape, figure, note, page, section, table, visible
from txl.reporting.plots import SECOND, SOFT, Drawing, drawing, save_figure
from txl.reporting.wording import counted, plain, short_name

FOLDER, RECORD = "attention", "attention.json"
"""Folder of `txl attention` in the run directory, and file name of the record in this folder."""
_COLUMNS = 640
"""Largest number of columns of a heat map; a longer span is averaged down to this number."""
_ROWS = 48
"""Largest number of labelled rows of a close-up; of more rows, only every second, third ... is labelled."""
_LISTED = 12
_NEEDED = {"settings", "heads", "even", "farthest", "terms", "positions"}
"""Fields of a record besides its format."""
_C_LEFT_OUT = " Term (c), the global content bias, does not depend on position."
_TERMS = {"a": "(a) content", "b": "(b) content-dependent position", "d": "(d) global position bias"}
# From little attention to much; grey marks positions that a token does not see. The darkest colour differs from INK by
# one, because dark mode replaces INK by a light colour and the scale must stay monotonic.
HEAT = LinearSegmentedColormap.from_list("txl-heat", ["#ffffff", "#c6d7e6", SECOND, "#1d2732"]).with_extremes(
    bad="#e4e4e4"
)


def read_record(path: Path) -> JsonObject:
    """Read the record that `txl attention` wrote."""
    again = "run txl attention again"
    record = read_json(path, again)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise UserError(f"{path}: of format {found!r}; {again}")
    if missing := sorted(_NEEDED - record.keys()):
        raise UserError(f"{path}: damaged (no {missing[0]}); {again}")
    return record


def write_attention(record: JsonObject, out: Path, name: str) -> list[Path]:
    """Write figures, page and record of a model's attention into a folder, and return their paths.

    The record is written last, so that it never refers to missing figures.

    Args:
        record: record that `txl.analysis.attention_record.analyse_attention` returned.
        out: folder to write to; created if missing.
        name: name of the run, for the page.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = save_figures(record, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    write_whole(out / "attention.html", attention_page(record, name))
    write_whole(out / RECORD, json.dumps(record, ensure_ascii=False) + "\n")
    return [*paths, out / "attention.html", out / RECORD]


def attention_page(record: JsonObject, name: str) -> str:
    """Return a complete HTML page about a run's attention.

    Args:
        record: record as `read_record` returns it.
        name: name of the run.
    """
    title = f"Attention of {name}"
    return page(title, [f"<header><h1>{escape(title)}</h1></header>", attention_section(record)])


def attention_section(record: JsonObject) -> str:
    """Return the section about attention: averages, terms, the farthest heads, and the chosen positions with text."""
    settings, even = record["settings"], record["even"]
    far = settings["far"]
    lead = (
        f"Averaged over {settings['queries']:,} tokens of the {settings['split']} split of "
        f"{short_name(settings['corpus'])} that see {counted(settings['min_keys'], 'key')} or more; "
        f"{_memory(settings)}, checkpoint {settings['checkpoint']}. Mean distance is how far a head looks back on "
        f"average. Effective keys (exp of the mean entropy) tell among how many keys it divides its attention: many "
        f"for one that looks everywhere, few for one that picks. A head that looked at all of them alike would have a "
        f"mean distance of {even['mean_distance']:.1f}, {even['share_beyond']:.1%} of its attention at {far:,} or "
        f"farther, and {even['effective_keys']:.1f} effective keys."
    )
    parts = [
        note(lead, "lead"),
        figure(
            average_figure(record),
            f"Average attention of every head by distance (Figure 5 of the paper). Stronger colour means more "
            f"attention; the scale is logarithmic.{_fall(record)}",
        ),
        _farthest(record),
    ]
    if record["terms"]:
        parts.append(
            figure(
                terms_figure(record),
                "The terms of the attention score apart, each with a softmax of its own, averaged (Figure 7 of the "
                "paper)." + (_C_LEFT_OUT if "d" in record["terms"] else ""),
            )
        )
    parts += [_position(record, place, head) for place in range(len(record["positions"])) for head in _shown(record)]
    return section("Where the heads look", *parts)


def save_figures(record: JsonObject, folder: Path) -> list[Path]:
    """Write all figures as .svg and .png, and return the paths.

    Raises:
        OSError: if a figure cannot be written.
    """
    height, described = _height(record) + 0.2, _described(record)
    figures = [("figure5", lambda drawn: draw_average(drawn, record, described), (7.6, height))]
    if record["terms"]:
        figures.append(("figure7", lambda drawn: draw_terms(drawn, record, 1, described), (10.0, height + 0.2)))
    for place, position in enumerate(record["positions"]):
        for at, head in enumerate(position["heads"]):
            name = f"figure6-token{position['position']}-layer{head['layer']}-head{head['head']}"
            size = (7.6, _close_height(position))
            figures.append((name, lambda drawn, place=place, at=at: draw_close(drawn, record, place, at), size))
    paths = [(draw, folder / f"{name}.{ending}", size) for name, draw, size in figures for ending in ("svg", "png")]
    for draw, path, size in paths:
        save_figure(draw, path, size)
    return [path for _, path, _ in paths]


def average_figure(record: JsonObject) -> Drawing:
    """Draw Figure 5: average attention of every head by distance."""
    far = max(record["heads"], key=lambda row: row["mean_distance"])
    text = (
        f"Heat map of {len(record['heads'])} heads by distance. Layer {far['layer']}, head {far['head']} looks "
        f"farthest, {far['mean_distance']:.1f} tokens back on average."
    )
    height = _height(record)
    return drawing(
        lambda drawn: draw_average(drawn, record), "attention", "Average attention by distance", text,
        wide=(7.6, height), narrow=(4.2, height),
    )  # fmt: skip


def terms_figure(record: JsonObject) -> Drawing:
    """Draw Figure 7, the terms of the attention score: panels in a row on a wide page, in a column on a narrow one."""
    height, names = _height(record), ", ".join(_TERMS[name] for name in record["terms"])
    return drawing(
        lambda drawn: draw_terms(drawn, record, 1 if drawn.get_figwidth() > 5 else len(record["terms"])),
        "terms", "Terms of the attention score by distance", f"Heat maps of {names}, every head by distance.",
        wide=(7.6, 0.8 * height + 0.5), narrow=(4.2, 2.4 * height),
    )  # fmt: skip


def draw_average(drawn: Figure, record: JsonObject, title: str = "") -> None:
    """Draw a heat map of average attention, heads by distance."""
    weights = np.array([row["average"] for row in record["heads"]])
    axes = drawn.add_subplot()
    axes.set_title(title, fontsize=9.5, loc="left", parse_math=False)
    image = _heat_map(axes, weights, record)
    _scale(drawn.colorbar(image, ax=axes, pad=0.01, aspect=30), "mean attention weight")


def draw_terms(drawn: Figure, record: JsonObject, rows: int, title: str = "") -> None:
    """Draw a heat map of heads by distance for each term, all on one colour scale."""
    terms = record["terms"]
    panels = drawn.subplots(rows, len(terms) // rows, squeeze=False, sharey=rows == 1)
    norm = _norm(np.concatenate([np.array(each) for each in terms.values()]))
    image = None
    for axes, (name, weights) in zip(panels.flat, terms.items(), strict=True):
        image = _heat_map(axes, np.array(weights), record, norm, ticks=4 if rows == 1 else 6)
        axes.set_title(_TERMS[name], fontsize=9.5, loc="left")
        if rows == 1 and axes is not panels.flat[0]:
            axes.set_ylabel("")
    if image is not None:
        _scale(drawn.colorbar(image, ax=list(panels.flat), pad=0.01, aspect=30), "mean weight")
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


def _close_height(position: JsonObject) -> float:
    """Return the height in inches of a close-up."""
    return 1.1 + 0.16 * min(_ROWS, max(8, len(position["keys"])))


def _described(record: JsonObject) -> str:
    """Return the title of a figure in a file of its own."""
    settings = record["settings"]
    words = (
        plain(short_name(settings["corpus"])),
        f"{settings['split']} split",
        f"{counted(settings['queries'], 'token')}",
        _memory(settings),
        settings["checkpoint"],
    )
    return ", ".join(words)


def _fall(record: JsonObject) -> str:
    """Return a note that some averaged tokens have no token at the largest distances; empty if all have one."""
    span, everyone = len(record["heads"][0]["average"]), record["settings"]["min_keys"]
    if everyone >= span:
        return ""
    if everyone == 1:
        return " Fewer tokens have a key at greater distances, so weights decrease there for every head."
    return " Beyond the dotted line not every token has a key so far back, so weights decrease there for every head."


def _label(text: str) -> str:
    if not text:
        return "…"  # a byte that completes no character
    shown = plain(text.strip()) or ("⏎" if "\n" in text else "␣")
    return shown if len(shown) <= 14 else f"{shown[:13]}…"


def _memory(settings: JsonObject) -> str:
    if not settings["mem_len"]:
        return f"segments of {settings['segment']:,} without memory"
    window = "no window" if settings["window"] is None else f"window {counted(settings['window'], 'key')}"
    return f"memory {settings['mem_len']:,}, {window}"


def _farthest(record: JsonObject) -> str:
    far = record["settings"]["far"]
    rows = sorted(record["heads"], key=lambda row: -row["mean_distance"])[:_LISTED]
    chosen = [tuple(each) for each in record["farthest"]]
    return table(
        f"The heads that look farthest; in bold the farthest of each third of the layers "
        f"({min(_LISTED, len(rows))} of {len(record['heads'])} heads)",
        ("layer", "head", "mean distance", f"share at {far:,} or farther", "effective keys"),
        [
            [
                f"{row['layer']}",
                f"{row['head']}",
                f"{row['mean_distance']:.1f}",
                f"{row['share_beyond']:.1%}",
                f"{row['effective_keys']:.1f}",
            ]
            for row in rows
        ],
        numbers=range(5),
        strong=[at for at, row in enumerate(rows) if (row["layer"], row["head"]) in chosen],
    )


def _shown(record: JsonObject) -> range:
    """Return the indices of the heads that are recorded at the chosen positions."""
    return range(len(record["positions"][0]["heads"])) if record["positions"] else range(0)


def _position(record: JsonObject, place: int, at: int) -> str:
    """Return one head at one position: a figure of the weights, and the text with the most attended tokens marked."""
    position = record["positions"][place]
    head = position["heads"][at]
    height = _close_height(position)
    drawn = drawing(
        lambda drawn: draw_close(drawn, record, place, at), f"close-{place}-{at}",
        f"Layer {head['layer']}, head {head['head']}", "Heat map of neighbouring tokens by what they attend to.",
        wide=(7.6, height), narrow=(4.2, height),
    )  # fmt: skip
    caption = (
        f"Layer {head['layer']}, head {head['head']} at token {position['position']:,} (the last row) and the tokens "
        f"before it (Figure 6 of the paper); grey is out of a token’s sight. Below, the text that the last token sees: "
        f"the fifth that the head attends to most is marked, the token itself is underlined, and what it has to "
        f"predict follows in a box."
    )
    return (
        f'{figure(drawn, caption)}<figure class="sample"><pre class="attended">{_text(position, head)}</pre></figure>'
    )


def _text(position: JsonObject, head: JsonObject) -> str:
    """Return as HTML the text that the last token sees; marks on chosen tokens leave out white space at the ends."""
    chosen, last = set(head["marked"]), len(position["texts"]) - 1
    pieces = []
    for index in range(last + 1 - position["keys"][-1], last + 1):
        text = position["texts"][index]
        word = text.strip()
        before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        if index not in chosen and index != last:
            pieces.append(visible(text))
            continue
        if not word:
            # A marked line end must be visible.
            before, word, after = "", text.replace("\n", "⏎"), "\n" * text.count("\n")
        piece = f"<mark>{visible(word)}</mark>" if index in chosen else visible(word)
        piece = f'<span class="target">{piece}</span>' if index == last else piece
        pieces.append(f"{visible(before)}{piece}{visible(after)}")
    following = position["next"]
    space = " " if following.strip() and following[0] == " " else ""
    word = following.strip() or following.replace("\n", "⏎").replace(" ", "␣")
    return f'{"".join(pieces).lstrip(" ")}{space}<span class="control">{visible(word)}</span>'
