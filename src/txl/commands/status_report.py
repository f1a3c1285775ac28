"""`txl status DIR`: progress, losses and checkpoints of a run; `txl report DIR`: a page about its results."""

from __future__ import annotations

import argparse

from txl.commands.options import add_out, check_output_file, existing_run, shared
from txl.commands.output import print_json, say
from txl.commands.parser import Parser, flag
from txl.runs.directory import RunDirectory


def add_parser(commands: Parser) -> None:
    """Add both commands to the command line."""
    parser = commands.add_command(
        "status",
        help="show how far a run is, and whether its checkpoints are intact",
        example="txl status runs/mine",
        description="Show how far a run is, its newest losses, its restarts, and whether its checkpoints are intact. "
        "The run may be training.",
    )
    shared(parser, "directory", "json")
    parser.set_defaults(run=run_status)

    parser = commands.add_command(
        "report",
        help="write a page about a run that opens in a browser",
        example="txl report runs/mine",
        description="Write report.html: curves, results, samples and settings of a run in one file that opens offline.",
    )
    shared(parser, "directory")
    add_out(parser, "FILE", "where to write it (default: DIR/report.html)")
    about = "also compress the test text with lzma after it has seen the training text; takes up to a minute"
    flag(parser, "--after-training-text", about)
    shared(parser, "data_dir", "json")
    parser.set_defaults(run=run_report)


def run_status(arguments: argparse.Namespace) -> None:
    """Print the status of a run, after reading and verifying every file of its checkpoints."""
    from txl.runs import status

    found = status.run_status(existing_run(arguments.directory))
    if arguments.json:
        print_json(found.to_dict())
    else:
        print("\n".join(found.lines()))


def run_report(arguments: argparse.Namespace) -> None:
    """Write the report."""
    directory = existing_run(arguments.directory)
    check_output_file(arguments.out, None)
    from txl.reporting.report import write_report

    if torn := RunDirectory(directory).log().torn:
        say(f"note: {directory / 'log.jsonl'}: lines left out, torn by a crash or without all fields: {torn}")
    compressed = arguments.after_training_text
    path = write_report(directory, out=arguments.out, data_dir=arguments.data_dir, after_training_text=compressed)
    if arguments.json:
        print_json({"report": str(path)})
    else:
        print(path)
