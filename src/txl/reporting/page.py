"""Pieces of an HTML page: escaping, tables, definition lists, and the page around them with its style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from string import Template

STYLE = """
:root { --ink: #1d2733; --soft: #5b6774; --line: #d8dee4; --wash: #f5f7f8; --accent: #b3452c; --paper: #fff; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 50rem; margin: 0 auto; padding: 2.5rem 2rem 4rem; background: var(--paper); }
header p, .note, figcaption, caption { color: var(--soft); font-size: .9rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
.result { display: flex; flex-wrap: wrap; gap: 1rem 2.4rem; margin: 1.6rem 0 .6rem; }
.result div { min-width: 8rem; }
.result b { display: block; font-size: 2.1rem; line-height: 1.15; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.result div:first-child b { color: var(--accent); }
.result span { color: var(--soft); font-size: .9rem; }
figure { margin: 1rem 0 1.4rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; background: #fff; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; }
td.number, th.number { text-align: right; padding-right: 1.2rem; }
pre, code { font: .84rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--wash); border-left: 3px solid var(--line); padding: .8rem 1rem; margin: .4rem 0 1.2rem;
  white-space: pre-wrap; overflow-wrap: anywhere; break-inside: avoid; }
pre .prompt { font-weight: 700; }
pre .control { color: var(--accent); }
td code { overflow-wrap: anywhere; }
.columns { columns: 2; column-gap: 2rem; }
.columns table { break-inside: avoid; margin-bottom: 1rem; }
.warning { border-left: 3px solid var(--accent); padding: .2rem .9rem; }
@media (max-width: 40rem) { main { padding: 1.4rem 1rem; } .columns { columns: 1; } .result b { font-size: 1.7rem; } }
@media print { body, main { background: #fff; padding: 0; font-size: 10.5pt; } main { max-width: none; }
  h2 { break-after: avoid; } a { color: inherit; } .scroll { overflow: visible; } }
"""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")


def page(title: str, body: Iterable[str]) -> str:
    """A whole page."""
    return _PAGE.substitute(title=escape(title), style=STYLE, body="\n".join(body))


def figure(svg: str, caption: str) -> str:
    """A drawing with a caption."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table; the columns in `numbers` are set to the right."""

    def cell(tag: str, column: int, text: str) -> str:
        kind = ' class="number"' if column in numbers else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{kind}{scope}>{escape(text)}</{tag}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(headings))
    body = "".join(
        "<tr>" + "".join(cell("td", column, text) for column, text in enumerate(row)) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def pairs(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f"<table><caption>{escape(caption)}</caption><tbody>{body}</tbody></table>"


def visible(text: str) -> str:
    """Escaped text in which control characters can be seen and do no harm."""
    shown = []
    for character in text:
        if character in "\n\t" or character.isprintable():
            shown.append(escape(character))
        else:
            shown.append(f'<span class="control" title="U+{ord(character):04X}">\N{MIDDLE DOT}</span>')
    return "".join(shown)
