"""`txl data prepare | info | list`: prepare, describe and list corpora."""

from __future__ import annotations

import argparse
import textwrap

from txl.commands.config_options import add_config_options, config_options, data_config
from txl.commands.options import add_data_dir, add_json
from txl.commands.output import print_json
from txl.commands.parser import Commands
from txl.config import DataConfig, RunConfig, options, validate

_WIDTH = 80  # characters per line that fit into any terminal


def add_parser(commands: Commands) -> None:
    """Add the command and its three actions to the command line."""
    parser = commands.add_parser(
        "data",
        help="prepare a corpus, or show what is known of one",
        example="txl data info my.txt --unit word",
        description="Prepare a corpus, or show what is known of one. txl train prepares its text by itself.",
    )
    actions = parser.add_commands("action", "prepare|info|list")
    for action, what, example in (
        ("prepare", "cut a text into tokens, once", "txl data prepare wikitext-103"),
        ("info", "show counts and hashes of a corpus; prepare it if need be", "txl data info my.txt --unit word"),
    ):
        command = actions.add_parser(action, help=what, example=example, description=f"{what[0].upper()}{what[1:]}.")
        command.add_argument("name", metavar="NAME", help="a corpus by name (txl data list), or a file, folder or glob")
        fields = [option.name for option in options() if option.name != "data.corpus"]  # NAME is the corpus
        add_config_options(command, ("data",), fields=fields)
        add_data_dir(command)
        add_json(command)
        command.set_defaults(run=run_open)
    what = "list the corpora that have a name"
    listing = actions.add_parser("list", help=what, example="txl data list", description=f"{what.capitalize()}.")
    add_json(listing)
    listing.set_defaults(run=run_list)


def run_open(arguments: argparse.Namespace) -> None:
    """Open a corpus, prepare it if necessary, and print its counts, notes and identity."""
    from txl.data.corpora import natural_unit, open_corpus, refuse_unused

    changes = config_options(arguments)
    data = data_config(arguments, DataConfig(corpus=arguments.name, unit=natural_unit(arguments.name)))
    validate(RunConfig(data=data))
    refuse_unused(data, changes)
    corpus = open_corpus(data.corpus, config=data, data_dir=arguments.data_dir, quiet=arguments.json)
    info = corpus.info()
    if arguments.json:
        print_json(info)
        return
    print(f"{info['name']}: {info['unit']} tokens, vocabulary of {info['vocabulary_size']:,}")
    for split, counts in info["splits"].items():
        unknown = f", {counts['unknown']:,} unknown" if counts.get("unknown") else ""
        print(f"  {split:6} {counts['tokens']:>13,} tokens  {counts['bytes']:>13,} bytes{unknown}")
    for difference in info.get("differences", ()):
        print(f"  note: not the published {info['name']}: {difference}")
    for note in corpus.notes("test", corpus.unknown_share("train")):
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
    for corpus in corpora:
        lines = textwrap.wrap(corpus["description"], width=_WIDTH - 15)
        print(f"{corpus['name']:14} " + f"\n{'':15}".join(lines))
    print("Or a file, folder or glob of your own: txl data info my.txt")
