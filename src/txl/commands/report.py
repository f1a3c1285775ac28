"""`txl report DIR`: a page about the settings and the results of a run."""

from __future__ import annotations

import argparse

from txl.commands.arguments import check_output_file, existing_run
from txl.commands.options import add_data_dir, add_json, add_out
from txl.commands.output import print_json, say
from txl.commands.parser import Commands


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "report",
        help="write a page about a run that opens in a browser",
        example="txl report runs/mine",
        description="Write report.html: curves, results, samples and settings of a run in one file that opens offline.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    add_out(parser, "FILE", "where to write it (default: DIR/report.html)")
    parser.add_argument(
        "--after-training-text",
        action="store_true",
        help="also compress the test text with lzma after it has seen the training text; takes up to a minute",
    )
    add_data_dir(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Write the report."""
    directory = existing_run(arguments.directory)
    check_output_file(arguments.out, None)
    from txl.reporting.report import write_report
    from txl.reporting.wording import counted
    from txl.runs.directory import RunDirectory

    torn = RunDirectory(directory).log().torn
    if torn:
        say(f"note: {directory / 'log.jsonl'}: {counted(torn, 'line')} left out, torn by a crash or without all fields")
    path = write_report(
        directory,
        out=arguments.out,
        data_dir=arguments.data_dir,
        after_training_text=arguments.after_training_text,
    )
    if arguments.json:
        print_json({"report": str(path)})
    else:
        print(path)
