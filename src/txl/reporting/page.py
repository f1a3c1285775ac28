"""Pages from the templates beside this module: HTML that opens offline, in light and dark mode, and Markdown."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_eval_context
from jinja2.nodes import EvalContext
from markupsafe import Markup, escape

from txl import units
from txl.reporting import wording
from txl.reporting.plots import DARK, DARK_RULES, LIGHT
from txl.reporting.wording import plain


def render(template: str, values: Mapping[str, object]) -> Markup:
    """Return the text that a template makes of values; every text among them is escaped for HTML, if it is HTML."""
    return Markup(_environment().get_template(template).render(values))


@pass_eval_context
def _finalized(context: EvalContext, value: object) -> object:
    """Return a value for a page: texts of users may hold control characters, which could break HTML."""
    if isinstance(value, str) and not isinstance(value, Markup) and context.autoescape:
        return plain(value)
    return value


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("txl.reporting"),
        autoescape=lambda name: name is None or not name.endswith(".md"),
        finalize=_finalized,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"light": LIGHT, "dark": DARK, "dark_rules": DARK_RULES, "units": units, "wording": wording}
    made.filters |= {"form": format, "code": code, "visible": visible, "fence": fence}
    made.filters |= {"counted": wording.counted, "short_name": wording.short_name}
    return made


def macros() -> Any:
    """Return the macros of `parts.html` as attributes, for a page that is put together in Python."""
    return _environment().get_template("parts.html").module


def code(text: str) -> Markup:
    """Return escaped text in which what stands between backticks is set as code."""
    pieces = [escape(plain(piece)) for piece in text.split("`")]
    pieces[1::2] = [Markup("<code>{}</code>").format(piece) for piece in pieces[1::2]]
    return Markup("").join(pieces)


def visible(text: str) -> Markup:
    """Return escaped text in which control characters are visible as escapes (\\x07); line ends and tabs stay."""
    control = Markup('<span class="control">{}</span>')
    return Markup("").join(
        character if (written := plain(character)) == character else control.format(written) for character in text
    )


def fence(text: str) -> str:
    """Return the fence of a text in Markdown: more tildes than any run of tildes in the text."""
    return "~" * max(3, 1 + max(map(len, re.findall("~+", text)), default=0))
