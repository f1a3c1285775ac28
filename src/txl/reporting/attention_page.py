"""Page, figures and record of `txl attention`."""

from __future__ import annotations

import json
from pathlib import Path

from markupsafe import Markup

from txl.analysis.attention_record import FORMAT
from txl.errors import UserError
from txl.files import JsonObject, read_json, write_whole
from txl.reporting.attention_figures import average_figure, close_figure, terms_figure
from txl.reporting.page import render, visible
from txl.reporting.wording import counted, plain, short_name

FOLDER, RECORD = "attention", "attention.json"
"""Folder of `txl attention` in the run directory, and file name of the record in this folder."""
_LISTED = 12
_NEEDED = {"settings", "heads", "even", "farthest", "terms", "positions"}
"""Fields of a record besides its format."""


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


def save_figures(record: JsonObject, folder: Path) -> list[Path]:
    """Write all figures as .svg and .png, and return the paths.

    Raises:
        OSError: if a figure cannot be written.
    """
    title = _described(record)
    plots = {"figure5": average_figure(record, title)}
    if record["terms"]:
        plots["figure7"] = terms_figure(record, title)
    for index, position in enumerate(record["positions"]):
        for number, head in enumerate(position["heads"]):
            name = f"figure6-token{position['position']}-layer{head['layer']}-head{head['head']}"
            plots[name] = close_figure(record, index, number)
    paths = {folder / f"{name}.{ending}": plot for name, plot in plots.items() for ending in ("svg", "png")}
    for path, plot in paths.items():
        plot.save(path)
    return list(paths)


def attention_page(record: JsonObject, name: str) -> str:
    """Return a complete HTML page about a run's attention.

    Args:
        record: record as `read_record` returns it.
        name: name of the run.
    """
    title = f"Attention of {name}"
    header = Markup("<header><h1>{}</h1></header>\n").format(plain(title))
    return render("page.html", {"title": title, "body": header + attention_section(record)})


def attention_section(record: JsonObject) -> Markup:
    """Return the section about attention: averages, terms, the farthest heads, and the chosen positions with text."""
    span = len(record["heads"][0]["average"])
    closes = [
        (close_figure(record, index, number), position["position"], _text(position, head))
        for index, position in enumerate(record["positions"])
        for number, head in enumerate(position["heads"])
    ]
    farthest = sorted(record["heads"], key=lambda row: -row["mean_distance"])[:_LISTED]
    chosen = [tuple(pair) for pair in record["farthest"]]
    values = {
        "record": record,
        "memory": _memory(record["settings"]),
        "average": average_figure(record),
        "terms": terms_figure(record) if record["terms"] else None,
        "closes": closes,
        "span": span,
        "farthest": [_cells(row) for row in farthest],
        "strong": [index for index, row in enumerate(farthest) if (row["layer"], row["head"]) in chosen],
    }
    return Markup(render("attention.html", values))


def _cells(row: JsonObject) -> list[str]:
    """Return the measures of a head as table cells."""
    return [
        str(row["layer"]),
        str(row["head"]),
        f"{row['mean_distance']:.1f}",
        f"{row['share_beyond']:.1%}",
        f"{row['effective_keys']:.1f}",
    ]


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


def _memory(settings: JsonObject) -> str:
    if not settings["mem_len"]:
        return f"segments of {settings['segment']:,} without memory"
    window = "no window" if settings["window"] is None else f"window {counted(settings['window'], 'key')}"
    return f"memory {settings['mem_len']:,}, {window}"


def _text(position: JsonObject, head: JsonObject) -> Markup:
    """Return as HTML the text that the last token sees; marks on chosen tokens leave out white space at the ends."""
    chosen, last = set(head["marked"]), len(position["texts"]) - 1
    pieces = []
    for index in range(last + 1 - position["keys"][-1], last + 1):
        text = position["texts"][index]
        if index not in chosen and index != last:
            pieces.append(visible(text))
            continue
        word = text.strip()
        before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        if not word:
            # A marked line end must be visible.
            before, word, after = "", text.replace("\n", "⏎"), "\n" * text.count("\n")
        piece = Markup("<mark>{}</mark>").format(visible(word)) if index in chosen else visible(word)
        piece = Markup('<span class="target">{}</span>').format(piece) if index == last else piece
        pieces.append(visible(before) + piece + visible(after))
    following = position["next"]
    space = " " if following.strip() and following[0] == " " else ""
    word = following.strip() or following.replace("\n", "⏎").replace(" ", "␣")
    seen = Markup("").join(pieces).lstrip(" ")
    return Markup('{}{}<span class="control">{}</span>').format(seen, space, visible(word))
