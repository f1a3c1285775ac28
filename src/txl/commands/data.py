"""`txl data prepare | info | list`: corpora."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import TYPE_CHECKING, Any

from txl.commands.options import add_data_dir, add_json
from txl.commands.output import print_json
from txl.config import DataConfig, RunConfig, parse_value, validate

if TYPE_CHECKING:
    from txl.commands.options import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add the command and its three actions to the command line."""
    parser = commands.add_parser("data", help="prepare corpora and tell about them")
    actions = parser.add_subparsers(dest="action", metavar="prepare|info|list", required=True)
    for action, what in (("prepare", "cut a text into tokens, once"), ("info", "counts and hashes of a corpus")):
        each = actions.add_parser(action, help=what)
        each.add_argument("name", metavar="NAME", help="name of a corpus, or a file, folder or glob")
        hints = typing.get_type_hints(DataConfig)
        for field in dataclasses.fields(DataConfig):
            if field.name != "corpus":
                option = f"--{field.name.replace('_', '-')}"
                switch: dict[str, Any] = {"nargs": "?", "const": "true"} if hints[field.name] is bool else {}
                each.add_argument(option, metavar="X", help=field.metadata["help"], **switch)
        add_data_dir(each)
        add_json(each)
        each.set_defaults(run=run_open)
    listing = actions.add_parser("list", help="the corpora that have a name")
    add_json(listing)
    listing.set_defaults(run=run_list)


def run_open(arguments: argparse.Namespace) -> None:
    """Open a corpus (preparing it if need be) and print what is known of it."""
    from txl.data.corpora import absolute_path, natural_unit, open_corpus

    hints = typing.get_type_hints(DataConfig)
    given = {
        name: parse_value(hint, getattr(arguments, name), f"--{name.replace('_', '-')}")
        for name, hint in hints.items()
        if getattr(arguments, name, None) is not None
    }
    config = RunConfig(data=DataConfig(**given))
    validate(config)
    corpus = open_corpus(
        absolute_path(arguments.name),
        given.get("unit", natural_unit(arguments.name)),
        config=config.data,
        data_dir=arguments.data_dir,
        quiet=arguments.json,
    )
    info = corpus.info()
    if arguments.json:
        print_json(info)
        return
    print(f"{info['name']}: {info['unit']} tokens, vocabulary of {info['vocabulary_size']:,}")
    for split, counts in info["splits"].items():
        unknown = f", {counts['unknown']:,} unknown" if counts.get("unknown") else ""
        print(f"  {split:6} {counts['tokens']:>13,} tokens  {counts['bytes']:>13,} bytes{unknown}")
    for note in corpus.notes("test"):
        print(f"  note: {note}")
    print(f"  prepared in {corpus.directory}")
    print(f"  identity {info['identity']}")


def run_list(arguments: argparse.Namespace) -> None:
    """Print the corpora that have a name."""
    from txl.data.corpora import list_corpora

    corpora = list_corpora()
    if arguments.json:
        print_json({"corpora": corpora})
        return
    for each in corpora:
        print(f"{each['name']:14} {each['description']}")
    print("... or any file, folder or glob of your own.")
