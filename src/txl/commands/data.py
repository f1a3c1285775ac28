"""`txl data prepare | info | list`: prepare, describe and list corpora."""

from __future__ import annotations

import argparse
import textwrap

from txl.commands.options import add_config_options, config_options, data_config, shared
from txl.commands.output import print_json
from txl.commands.parser import Parser, option
from txl.config import DataConfig, RunConfig, options, validate

_ACTIONS = {
    "prepare": ("cut a text into tokens, once", "txl data prepare wikitext-103"),
    "info": ("show counts and hashes of a corpus; prepare it if need be", "txl data info my.txt --unit word"),
    "list": ("list the corpora that have a name", "txl data list"),
}


def add_parser(commands: Parser) -> None:
    """Add the command and its three actions to the command line."""
    parser = commands.add_command(
        "data",
        help="prepare a corpus, or show what is known of one",
        example="txl data info my.txt --unit word",
        description="Prepare a corpus, or show what is known of one. txl train prepares its text by itself.",
    )
    parser.add_commands("action", "|".join(_ACTIONS))
    for action, (what, example) in _ACTIONS.items():
        command = parser.add_command(action, help=what, example=example, description=f"{what.capitalize()}.")
        if action != "list":
            option(command, "name", "NAME", "a corpus by name (txl data list), or a file, folder or glob")
            fields = [item.name for item in options() if item.name != "data.corpus"]  # NAME is the corpus
            add_config_options(command, ("data",), fields=fields)
            shared(command, "data_dir")
        shared(command, "json")
        command.set_defaults(run=run_list if action == "list" else run_open)


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
        lines = textwrap.wrap(corpus["description"], width=65)  # 80 characters fit into any terminal
        print(f"{corpus['name']:14} " + f"\n{'':15}".join(lines))
    print("Or a file, folder or glob of your own: txl data info my.txt")
