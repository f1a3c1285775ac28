"""`txl data prepare | info | list`: corpora."""

from __future__ import annotations

import argparse
from typing import Any

from txl.commands.options import absolute_path, add_data_dir, add_json, print_json
from txl.config import DataConfig
from txl.errors import UserError


def add_parser(commands: Any) -> None:
    """Add the command and its three actions to the command line."""
    parser = commands.add_parser("data", help="prepare corpora and tell about them")
    actions = parser.add_subparsers(dest="action", metavar="prepare|info|list", required=True)
    for action, what in (("prepare", "cut a text into tokens, once"), ("info", "counts and hashes of a corpus")):
        each = actions.add_parser(action, help=what)
        each.add_argument("name", metavar="NAME", help="name of a corpus, or a file, folder or glob")
        each.add_argument("--unit", metavar="U", help="byte, char, word or bpe (default: the corpus's own)")
        each.add_argument("--source", metavar="DIR", help="folder or archive to take a named corpus from")
        each.add_argument("--vocab-size", type=int, metavar="V", help="tokens of a bpe vocabulary")
        each.add_argument("--min-count", type=int, metavar="N", help="words seen less often become <unk>")
        each.add_argument("--max-words", type=int, metavar="N", help="keep only the N most frequent words")
        add_data_dir(each)
        add_json(each)
        each.set_defaults(run=run_open)
    listing = actions.add_parser("list", help="the corpora that have a name")
    add_json(listing)
    listing.set_defaults(run=run_list)


def run_open(arguments: argparse.Namespace) -> None:
    """Open a corpus (preparing it if need be) and print what is known of it."""
    from txl.data.corpora import open_corpus

    if arguments.unit not in (None, "byte", "char", "word", "bpe"):
        raise UserError(f"--unit is {arguments.unit!r}; expected one of byte, char, word, bpe")
    given = {
        name: getattr(arguments, name)
        for name in ("source", "vocab_size", "min_count", "max_words")
        if getattr(arguments, name) is not None
    }
    for name, value in given.items():
        if name != "source" and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; expected 1 or more")
    corpus = open_corpus(
        absolute_path(arguments.name),
        arguments.unit,
        config=DataConfig(**given),
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
