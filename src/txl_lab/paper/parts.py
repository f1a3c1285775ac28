"""Parts of a table's page, from the templates of the core's pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup
from markupsafe import escape as escaped

from txl.reporting.page import code, macros, render
from txl.reporting.plots import Plot
from txl.reporting.wording import plain


def page(title: str, body: Iterable[str]) -> str:
    """Return a complete HTML document."""
    return render("page.html", {"title": title, "body": Markup("\n".join(body))})


def escape(text: object) -> str:
    """Return text escaped for HTML content or an HTML attribute."""
    return str(escaped(plain(str(text))))


def section(heading: str, *parts: str) -> str:
    """Return a section of the page: a heading and the parts that are not empty."""
    return macros().section(heading, caller=lambda: Markup("\n".join(part for part in parts if part)))


def note(text: str, kind: str = "note") -> str:
    """Return an explanatory paragraph; text between backticks is set as code."""
    return f'<p class="{kind}">{code(text)}</p>'


def figure(plot: Plot, caption: str) -> str:
    """Return a plot with a caption."""
    return macros().figure(plot, caller=lambda: caption)


def table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    strong: Iterable[int] = (),
) -> str:
    """Return a table: columns in `numbers` are right-aligned, rows in `strong` are bold, column 0 holds row names."""
    return macros().table(caption, headings, rows, set(numbers), set(strong))


def pairs(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values."""
    return macros().pairs(caption, rows)
