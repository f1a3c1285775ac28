"""Parts of an HTML page: escaping, tables, figures, and the document that contains them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape as html_escape
from string import Template

from txl.reporting.plots import Drawing
from txl.reporting.style import STYLE
from txl.reporting.wording import plain

# The content security policy forbids the page to load anything, so that the page is certain to be complete offline.
# Heat maps are embedded as data.
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
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
    """Return a complete HTML document."""
    return _PAGE.substitute(title=escape(title), style=STYLE, body="\n".join(body))


def escape(text: object) -> str:
    """Return text escaped for HTML content or an HTML attribute; control characters become backslash escapes."""
    return html_escape(plain(str(text)))


def visible(text: str) -> str:
    """Return escaped text in which control characters are visible as escapes (\\x07); line ends and tabs stay."""
    shown = []
    for character in text:
        written = plain(character)
        if written == character:
            shown.append(escape(character))
        else:
            shown.append(f'<span class="control">{written}</span>')
    return "".join(shown)


def section(heading: str, *parts: str) -> str:
    """Return a section of the page: a heading and the parts that are not empty."""
    return "\n".join(["<section>", f"<h2>{escape(heading)}</h2>", *(part for part in parts if part), "</section>"])


def note(text: str, kind: str = "note") -> str:
    """Return an explanatory paragraph; text between backticks is set as code."""
    pieces = text.split("`")
    marked = (f"<code>{escape(piece)}</code>" if at % 2 else escape(piece) for at, piece in enumerate(pieces))
    return f'<p class="{kind}">{"".join(marked)}</p>'


def figure(drawn: Drawing, caption: str) -> str:
    """Return a drawing with a caption; the page's width decides whether the wide or the narrow form is shown."""
    return (
        f'<figure><div class="wide">{drawn.wide}</div><div class="narrow">{drawn.narrow}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    strong: Iterable[int] = (),
) -> str:
    """Return a table: columns in `numbers` are right-aligned, rows in `strong` are bold, column 0 holds row names."""
    numbers, strong = set(numbers), set(strong)

    def cell(tag: str, column: int, text: str, scope: str) -> str:
        kind = ' class="number"' if column in numbers else ""
        return f"<{tag}{kind}{scope}>{escape(text)}</{tag}>"

    head = "".join(cell("th", column, text, ' scope="col"') for column, text in enumerate(headings))
    body = "".join(
        ('<tr class="strong">' if at in strong else "<tr>")
        + "".join(
            cell("td", column, text, "") if column else cell("th", column, text, ' scope="row"')
            for column, text in enumerate(row)
        )
        + "</tr>"
        for at, row in enumerate(rows)
    )
    # A table that is wider than the window can be scrolled; tabindex allows scrolling by keyboard.
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">'
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def bars(caption: str, headings: tuple[str, str], rows: Sequence[tuple[str, float, bool]]) -> str:
    """Return a table of names and values with a bar beside each value, starting at 0.

    Args:
        caption: caption of the table.
        headings: headings of the two columns.
        rows: name and value of each row, and True for a bold row with a bar in the accent colour.
    """
    longest = max(value for _, value, _ in rows)
    lines = "".join(
        f'<tr class="{"strong" if accent else "plain"}"><th scope="row">{escape(name)}</th>'
        f'<td class="number">{value:.3f}</td>'
        f'<td class="bar"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * value / longest:.2f}" height="10"/></svg></td></tr>'
        for name, value, accent in rows
    )
    name, number = (escape(heading) for heading in headings)
    head = f'<th scope="col">{name}</th><th scope="col" class="number">{number}</th><td></td>'
    return (
        f'<table class="bars"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    )


def pairs(caption: str, rows: Iterable[tuple[str, str]], code: bool = False) -> str:
    """Return a table of names and values; `code` sets the values as code."""
    opened, closed = ("<code>", "</code>") if code else ("", "")
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{opened}{escape(value)}{closed}</td></tr>' for name, value in rows
    )
    return f'<table class="pairs"><caption>{escape(caption)}</caption><tbody>{body}</tbody></table>'
