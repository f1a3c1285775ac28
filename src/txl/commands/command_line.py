"""The whole command line: every command by task."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import txl
from txl.commands.parser import Parser

# Modules of `txl.commands` by task, in the order of the help.
COMMANDS = {
    "start": ("demo", "presets", "data"),
    "train": ("train", "status", "report"),
    "measure": ("eval", "dynamic", "cache", "score", "recl"),
    "analyse": ("attention", "samples"),
    "use": ("generate", "serve", "compress"),
    "import and export": ("import_", "export"),
}
# Group of entry points by which other packages add commands: the name is a task, the object the names of modules.
ENTRY_POINTS = "txl.commands"


class _CommandLine(Parser):
    """Parser of the whole command line, whose help lists the commands by task."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.tasks: dict[str, list[str]] = {}

    def format_help(self) -> str:
        """Return the help: example, usage, commands by task, and the two options."""
        lines = [f"example: {self.example}", f"usage: {self.prog} COMMAND ...", "", f"{self.description}"]
        for task, names in self.tasks.items():
            lines += ["", f"{task}:", *(f"  {name:12}{self.commands[name].summary}" for name in names)]
        options = [(", ".join(action.option_strings), action.help) for action in self.arguments]
        lines += ["", "options:", *(f"  {names:12}{about}" for names, about in options)]
        return "\n".join([*lines, "", f"{self.epilog}", ""])


class _Version(argparse.Action):
    """Option that prints the version; argparse's own would hide that standard output is full."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"txl {txl.__version__}", flush=True)
        parser.exit()


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = _CommandLine(
        prog="txl",
        example="txl demo",
        description="Language models that read past a fixed-length context: train, measure, use them.",
        epilog="txl COMMAND --help shows an example and the options of a command.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_commands("command", "COMMAND")
    for task, modules in _modules_by_task():
        known = len(parser.commands)
        for module in modules:
            import_module(module).add_parser(commands)
        parser.tasks[task] = list(parser.commands)[known:]
    return parser


def _modules_by_task() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each task with the full names of its commands' modules, in the order of the help.

    The laboratory's are found by its entry point, because it stands above this package. Where txl runs from its sources
    without being installed, there is no entry point, and its commands are unknown.
    """
    for task, names in COMMANDS.items():
        yield task, [f"txl.commands.{name}" for name in names]
    for point in entry_points(group=ENTRY_POINTS):
        yield point.name, point.load()
    yield "shell", ["txl.commands.completion"]
