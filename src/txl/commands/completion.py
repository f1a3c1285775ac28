"""`txl completion bash|zsh`: shell script that completes commands, options, presets and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from txl.commands.parser import Commands, Parser

_SHELLS = ("bash", "zsh")
_FOLDERS, _FILES = ("DIR",), ("FILE", "PATH", "OUT")
_PRESETS = {"bash": "_txl_presets", "zsh": "_txl_presets"}


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands in a shell",
        example='eval "$(txl completion bash)"',
        description="Print a script by which the shell completes commands, options, presets and files. For every new "
        'shell, put the example into ~/.bashrc; for zsh, eval "$(txl completion zsh)" after compinit into ~/.zshrc.',
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=" or ".join(_SHELLS))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the script, made from the parser of the whole command line."""
    import shtab

    from txl.commands.command_line import build_parser
    from txl.config import kind_of, options
    from txl.presets import presets

    words_of = {option.name: kind_of(option.hint).choices for option in options()}
    root = build_parser()
    for action in _arguments(root):
        completed: Any = action  # shtab reads an attribute that argparse does not define
        if action.metavar in _FOLDERS:
            completed.complete = shtab.DIRECTORY
        elif action.metavar in _FILES:
            completed.complete = shtab.FILE
        elif action.dest == "preset":
            completed.complete = _PRESETS
        elif words_of.get(action.dest):
            action.choices = words_of[action.dest]
    names = " ".join(presets())
    preamble = {
        "bash": f'_txl_presets() {{ compgen -W "{names}" -- "$1"; }}',
        "zsh": f"_txl_presets() {{ compadd -- {names}; }}",
    }
    print(shtab.complete(root, arguments.shell, preamble=preamble[arguments.shell]))


def _arguments(parser: Parser) -> Iterator[argparse.Action]:
    """Yield the options and arguments of a parser and of its commands, which get their summary as description."""
    yield from parser.arguments
    for command in parser.commands.values():
        command.description = command.summary  # for zsh, which shows it beside the name
        yield from _arguments(command)
