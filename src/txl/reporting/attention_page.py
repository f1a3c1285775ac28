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

# Folder of `txl attention` in the run directory, and file name of the record in this folder.
FOLDER, RECORD = "attention", "attention.json"
_LISTED = 12  # heads in the table
_NEEDED = {"settings", "heads", "even", "farthest", "terms", "positions"}  # fields of a record besides its format


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
    """Write figures (as .svg and .png), page and record of the attention of a run called `name`; return their paths.

    The record is written last, so that it never refers to missing figures.
    """
    settings = record["settings"]
    about = [plain(short_name(settings["corpus"])), f"{settings['split']} split", counted(settings["queries"], "token")]
    title = ", ".join([*about, _memory(settings), settings["checkpoint"]])
    plots = {"figure5": average_figure(record, title)}
    if record["terms"]:
        plots["figure7"] = terms_figure(record, title)
    for index, position in enumerate(record["positions"]):
        for number, head in enumerate(position["heads"]):
            file = f"figure6-token{position['position']}-layer{head['layer']}-head{head['head']}"
            plots[file] = close_figure(record, index, number)
    paths = {out / f"{file}.{ending}": plot for file, plot in plots.items() for ending in ("svg", "png")}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, plot in paths.items():
            plot.save(path)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    write_whole(out / "attention.html", attention_page(record, name))
    write_whole(out / RECORD, json.dumps(record, ensure_ascii=False) + "\n")
    return [*paths, out / "attention.html", out / RECORD]


def attention_page(record: JsonObject, name: str) -> str:
    """Return a complete HTML page about the attention of the run with this name."""
    title = f"Attention of {name}"
    header = Markup("<header><h1>{}</h1></header>\n").format(plain(title))
    return render("page.html", {"title": title, "body": header + attention_section(record)})


def attention_section(record: JsonObject) -> Markup:
    """Return the section about attention: averages, terms, the farthest heads, and the chosen positions with text."""
    closes = [
        (close_figure(record, index, number), position["position"], _text(position, head))
        for index, position in enumerate(record["positions"])
        for number, head in enumerate(position["heads"])
    ]
    farthest = sorted(record["heads"], key=lambda row: -row["mean_distance"])[:_LISTED]
    rows = []
    for row in farthest:
        measures = f"{row['mean_distance']:.1f}", f"{row['share_beyond']:.1%}", f"{row['effective_keys']:.1f}"
        rows.append([row["layer"], row["head"], *measures])
    chosen = [tuple(pair) for pair in record["farthest"]]
    values = {
        "record": record,
        "memory": _memory(record["settings"]),
        "average": average_figure(record),
        "terms": terms_figure(record) if record["terms"] else None,
        "closes": closes,
        "span": len(record["heads"][0]["average"]),
        "farthest": rows,
        "strong": [index for index, row in enumerate(farthest) if (row["layer"], row["head"]) in chosen],
    }
    return render("attention.html", values)


def _memory(settings: JsonObject) -> str:
    if not settings["mem_len"]:
        return f"segments of {settings['segment']:,} without memory"
    window = "no window" if settings["window"] is None else f"window {counted(settings['window'], 'key')}"
    return f"memory {settings['mem_len']:,}, {window}"


def _text(position: JsonObject, head: JsonObject) -> Markup:
    """Return as HTML the text that the last token sees, and in a box what follows it."""
    chosen, last = set(head["marked"]), len(position["texts"]) - 1
    seen = Markup("")
    for index in range(last + 1 - position["keys"][-1], last + 1):
        piece = visible(position["texts"][index])
        if index in chosen or index == last:  # a marked line end must be visible
            piece = piece.replace("\n", "⏎\n")
        if index in chosen:
            piece = Markup("<mark>{}</mark>").format(piece)
        seen += Markup('<span class="target">{}</span>').format(piece) if index == last else piece
    following = position["next"].replace("\n", "⏎").replace(" ", "␣")
    return Markup('{}<span class="control">{}</span>').format(seen, visible(following))
