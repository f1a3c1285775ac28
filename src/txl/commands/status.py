"""`txl status DIR`: progress, losses and checkpoints of a run."""

from __future__ import annotations

import argparse

from txl.commands.arguments import existing_run
from txl.commands.options import add_json
from txl.commands.output import print_json
from txl.commands.parser import Commands


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "status",
        help="show how far a run is, and whether its checkpoints are intact",
        example="txl status runs/mine",
        description="Show how far a run is, its newest losses, its restarts, and whether its checkpoints are intact. "
        "The run may be training.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the status of a run, after reading and verifying every file of its checkpoints."""
    from txl.runs.status import run_status

    status = run_status(existing_run(arguments.directory))
    if arguments.json:
        print_json(status.to_dict())
    else:
        print("\n".join(status.lines()))
