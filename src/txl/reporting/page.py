"""Pages from the templates beside this module: HTML that opens offline, in light and dark mode."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from txl import units
from txl.reporting import wording
from txl.reporting.plots import DARK, DARK_RULES, LIGHT
from txl.reporting.wording import counted, plain, short_name


def render(template: str, values: Mapping[str, object]) -> str:
    """Return the text that a template makes of values; every text among them is escaped."""
    return _environment().get_template(template).render(values)


def macros() -> Any:
    """Return the macros of `parts.html` as attributes, for a page that is put together in Python."""
    return _environment().get_template("parts.html").module


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("txl.reporting"),
        autoescape=True,
        # Texts of users may hold control characters, which could break the page.
        finalize=lambda value: plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"light": LIGHT, "dark": DARK, "dark_rules": DARK_RULES, "units": units, "wording": wording}
    filters = {"form": format, "code": code, "visible": visible, "counted": counted, "short_name": short_name}
    environment.filters |= filters
    return environment


def code(text: str) -> Markup:
    """Return escaped text in which what stands between backticks is set as code."""
    pieces = [escape(plain(piece)) for piece in text.split("`")]
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if index % 2 else piece for index, piece in enumerate(pieces)
    )


def visible(text: str) -> Markup:
    """Return escaped text in which control characters are visible as escapes (\\x07); line ends and tabs stay."""
    control = Markup('<span class="control">{}</span>')
    return Markup("").join(
        character if (written := plain(character)) == character else control.format(written) for character in text
    )
