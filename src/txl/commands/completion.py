"""`txl completion bash|zsh`: shell script that completes commands, options, presets and files."""

from __future__ import annotations

import argparse
from typing import Any

from txl.commands.parser import Parser, build_parser
from txl.config import kind_of, options

_SHELLS = ("bash", "zsh")
_FOLDERS, _FILES = ("DIR",), ("FILE", "PATH", "OUT")


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
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

    from txl.presets import presets

    words_of = {item.name: kind_of(item.hint).choices for item in options()}
    root = build_parser()
    parsers = [root]
    for parser in parsers:  # grows by the commands of each
        parsers += parser.commands.values()
        parser.description = parser.summary or parser.description  # for zsh, which shows it beside the name
        completed: Any  # shtab reads an attribute that argparse does not define
        for completed in parser.arguments:
            if completed.metavar in _FOLDERS:
                completed.complete = shtab.DIRECTORY
            elif completed.metavar in _FILES:
                completed.complete = shtab.FILE
            elif completed.dest == "preset":
                completed.complete = dict.fromkeys(_SHELLS, "_txl_presets")
            elif words_of.get(completed.dest):
                completed.choices = words_of[completed.dest]
    body = {"bash": 'compgen -W "{}" -- "$1"', "zsh": "compadd -- {}"}[arguments.shell].format(" ".join(presets()))
    print(shtab.complete(root, arguments.shell, preamble=f"_txl_presets() {{ {body}; }}"))
