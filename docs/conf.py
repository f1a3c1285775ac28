"""Sphinx's configuration: `make docs`. Tables of the reference come from the parsers, the fields and the presets.

`python docs/conf.py` writes these tables into the pages; a test fails if they are not current.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txl.commands.parser import Parser

ROOT = Path(__file__).resolve().parent.parent

project = "transformer-xl"
author = copyright = "the transformer-xl maintainers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

html_theme = "furo"
html_title = "transformer-xl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = html_show_copyright = False
html_copy_source = False

myst_heading_anchors = 4
default_role = "code"  # single backticks in docstrings
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_use_type_comments = False
maximum_signature_line_length = 88
napoleon_numpy_docstring = False

GROUPS = {
    "Configuration and corpora": ("config", "presets", "data"),
    "Models": ("models",),
    "Training and runs": ("training", "runs"),
    "Evaluation": ("evaluation",),
    "Generation": ("generation",),
    "Reports": ("reporting",),
    "Errors": ("errors",),
}
"""Headings of the Python reference, and the packages whose public names stand below each."""
RETURNED = "Objects that functions return"
OBJECTS = {
    "txl.data.prepared.Corpus": "tokens",
    "txl.data.vocabulary.Vocabulary": "encode, decode",
    "txl.presets.recipe.Preset": "",
}
"""Classes without a public name, and their documented members."""


def setup(app) -> None:
    """Fill the markers of a page before it is parsed."""
    app.connect("source-read", lambda app, name, source: source.__setitem__(0, filled(source[0])))


def filled(text: str) -> str:
    """Return a page with the lists that only the site has, instead of those that stand in the file."""
    return _replaced(text, SITE)


def written(text: str) -> str:
    """Return a page with the lists of its file brought up to date."""
    return _replaced(text, WRITTEN)


def _replaced(text: str, lists: dict[str, Callable[[], str]]) -> str:
    """Replace what stands between `<!-- generated: NAME -->` and `<!-- end -->` by the list of that name, if any.

    A name that neither the files nor the site have a list for ends the build.
    """

    def replaced(found: re.Match[str]) -> str:
        if found[2] not in SITE | WRITTEN:
            raise KeyError(found[2])
        return f"{found[1]}{lists[found[2]]()}{found[4]}" if found[2] in lists else found[0]

    return re.sub(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end -->\n)", replaced, text, flags=re.DOTALL)


def names() -> dict[str, list[str]]:
    """Return the public names of txl by group."""
    tree = ast.parse((ROOT / "src" / "txl" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    home = {each.name: str(node.module).split(".")[0] for node in imports for each in node.names}
    groups = {heading: [name for name in home if home[name] in packages] for heading, packages in GROUPS.items()}
    if missing := home.keys() - set().union(*groups.values()):
        raise ValueError(f"docs/conf.py: GROUPS has no heading for {', '.join(missing)}")
    return groups


def python() -> str:
    """Return a directive for every public name of txl."""
    parts = []
    for heading, group in names().items():
        parts.append(f"## {heading}\n")
        for name in group:
            if name == "TransformerXL":  # its methods are those of LanguageModel
                directive = f".. autoclass:: txl.{name}"
            elif name[0].isupper():
                directive = f".. autoclass:: txl.{name}\n   :members:"
            else:
                directive = f".. autofunction:: txl.{name}"
            parts.append(f"### {name}\n\n```{{eval-rst}}\n{directive}\n```\n")
    parts.append(f"## {RETURNED}\n")
    for name, members in OBJECTS.items():
        directive = f".. autoclass:: {name}\n   :members: {members}"
        parts.append(f"### {name.rpartition('.')[2]}\n\n```{{eval-rst}}\n{directive}\n```\n")
    return "\n".join(parts)


def python_names() -> str:
    """Return a table of the public names of txl, each with the first sentence of its docstring."""
    parts = ["Signatures and arguments: `help(txl.evaluate)`, or the site that `make docs` builds in `site/`.\n"]
    groups = {heading: [f"txl.{name}" for name in group] for heading, group in names().items()}
    for heading, group in (groups | {RETURNED: list(OBJECTS)}).items():
        rows = [(f"`{name}`", _first_sentence(*name.rsplit(".", 1))) for name in group]
        parts += [f"## {heading}\n", table(("name", "meaning"), rows)]
    return "\n".join(parts)


def _first_sentence(module: str, name: str) -> str:
    docstring = inspect.getdoc(getattr(importlib.import_module(module), name))
    assert docstring is not None, name
    return re.split(r"(?<=\.)\s", docstring, maxsplit=1)[0]


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(columns)]
    lines += [["---"] * len(lines[0]), *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _escaped(text: str) -> str:
    return re.sub(r"([<>*_\[\]`])", r"\\\1", text)


def commands() -> str:
    """Return every command with its arguments, from the parser itself."""
    from txl.commands.parser import build_parser

    return "\n".join(_commands(build_parser(), 2))


def _commands(parser: Parser, level: int) -> list[str]:
    parts = []
    for command in parser.commands.values():
        parts += [_command(command, level), *_commands(command, level + 1)]
    return parts


def _command(parser: Parser, level: int) -> str:
    description = _escaped(parser.description or "")
    parts = [f"{'#' * level} {parser.prog}\n", f"```sh\n{parser.example}\n```\n", f"{description}\n"]
    shown = [action for action in parser.arguments if action.help != argparse.SUPPRESS and action.dest != "help"]
    own = [action for action in shown if "." not in action.dest or _short(action)]
    if own:
        parts.append(table(("argument", "meaning"), [(_invocation(each), _help(parser, each)) for each in own]))
    if sections := sorted({each.dest.split(".")[0] for each in shown if "." in each.dest}):
        names = ", ".join(f"`--{section}.*`" for section in sections)
        parts.append(f"Also takes [fields of the configuration](options.md): {names}.\n")
    return "\n".join(parts)


def _short(action: argparse.Action) -> bool:
    """Return whether a field of the configuration has a short form in this command."""
    return any("." not in name for name in action.option_strings)


def _invocation(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else None
    if value is None:
        value = "|".join(map(str, action.choices)) if action.choices is not None else action.dest.upper()
    if not action.option_strings:
        return f"`{value}`"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return names if action.nargs == 0 else f"{names} `{value}`"


def _help(parser: Parser, action: argparse.Action) -> str:
    text = (action.help or "") % dict(vars(action), prog=parser.prog)
    if action.default not in (None, False, argparse.SUPPRESS) and "default" not in text:
        text = f"{text} (default: {action.default})"
    return _escaped(text)


def options() -> str:
    """Return the fields of every section of a configuration, with their defaults and meaning."""
    from txl.config import MODEL_FAMILIES, DataConfig, EvalConfig, TrainConfig

    shared = set.intersection(
        *({item.name for item in dataclasses.fields(family)} for family in MODEL_FAMILIES.values())
    )
    first = next(iter(MODEL_FAMILIES.values()))
    parts = ["## model, every family\n", _fields("model", [first.__dataclass_fields__[name] for name in shared])]
    for name, family in MODEL_FAMILIES.items():
        own = [each for each in dataclasses.fields(family) if each.name not in shared]
        parts += [f"## model, {name}\n", _fields("model", own)]
    for name, section in (("data", DataConfig), ("train", TrainConfig), ("eval", EvalConfig)):
        parts += [f"## {name}\n", _fields(name, dataclasses.fields(section))]
    return "\n".join(parts)


def _fields(section: str, fields: Iterable[dataclasses.Field]) -> str:
    rows = []
    for item in fields:
        if "help" not in item.metadata:
            continue
        default = item.default_factory() if callable(item.default_factory) else item.default
        expected = item.metadata.get("expected")
        meaning = f"{item.metadata['help']} ({expected})" if expected else item.metadata["help"]
        rows.append((f"`--{section}.{item.name.replace('_', '-')}`", f"`{_shown(default)}`", _escaped(meaning)))
    return table(("field", "default", "meaning"), sorted(rows) if section == "model" else rows)


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def presets() -> str:
    """Return a table for each group of presets."""
    from txl.presets import named_presets

    parts = []
    for group, members in named_presets().items():
        rows = []
        for each in members:
            run = each.make()
            rows.append(
                (
                    f"`{each.name}`",
                    each.description,
                    f"{run.model.parameter_count(each.vocab_size):,}",
                    f"{run.train.segment} / {run.model.mem_len}",
                    f"{run.eval.segment} / {run.eval.mem_len}",
                    "-" if each.published == "none" else each.published,
                    each.source,
                )
            )
        columns = ("preset", "model", "parameters", "training", "test", "published", "source")
        parts += [f"## {group[0].upper()}{group[1:]}\n", table(columns, rows)]
    return "\n".join(parts)


def changes() -> str:
    """Return CHANGELOG.md without its title, its links as they are seen from the page."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n")[2]
    return text.replace("](docs/", "](../")


WRITTEN = {"python": python_names, "commands": commands, "options": options, "presets": presets}
"""Returns the list that a page's file has."""
SITE = {"python": python, "changes": changes}
"""Returns what the site has instead."""

if __name__ == "__main__":
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
