"""`txl demo`: the whole way on real text that every Python has: train, evaluate, generate, report."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from txl.commands.options import add_config_options, add_data_dir, config_options
from txl.commands.output import say
from txl.config import RunConfig, validate, with_options
from txl.errors import UserError

if TYPE_CHECKING:
    from txl.commands.options import Subparsers

PROMPTS = ("def read_config(path):\n    ", "class Stream:\n    ", "import ")
TEST_TOKENS = 200_000
"""Tokens of the test split that are read at each memory length."""


def add_parser(commands: Subparsers) -> None:
    """Add the command to the command line."""
    about = "train, evaluate, generate and report in minutes, without a download"
    parser = commands.add_parser("demo", help=about, add_help=False)
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="the run directory (default: runs/demo)")
    parser.add_argument("--preset", default="stdlib-tiny", metavar="NAME", help="default: stdlib-tiny")
    parser.add_argument(
        "--test-tokens", type=int, default=TEST_TOKENS, metavar="N", help=f"of the test split (default: {TEST_TOKENS})"
    )
    add_data_dir(parser)
    add_config_options(parser, ("model", "data", "train", "eval"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train (or go on), measure with and without memory, write samples and the report, and print the summary."""
    from txl.presets import preset

    if arguments.test_tokens < 2 * preset(arguments.preset).eval.batch_size:
        raise UserError(
            f"--test-tokens is {arguments.test_tokens}; expected two for each lane of the evaluation or more"
        )
    out, changes = arguments.out, config_options(arguments)
    config = with_options(preset(arguments.preset), changes)
    validate(config)
    options = [word for name, value in changes.items() for word in (f"--{name.replace('_', '-')}", value)]
    data_dir = [] if arguments.data_dir is None else ["--data-dir", arguments.data_dir]
    lengths = ",".join(map(str, memory_lengths(config)))

    parse = arguments.parse
    _command(parse, "train", arguments.preset, "--out", out, *options, *data_dir)
    _command(parse, "eval", out, "--mem-lens", lengths, "--max-tokens", str(arguments.test_tokens), *data_dir)
    write_samples(Path(out), config)
    _command(parse, "report", out, *data_dir)

    from txl.reporting.report import summary_lines
    from txl.runs.directory import RunDirectory

    for line in summary_lines(RunDirectory(out).events(), Path(out) / "report.html"):
        print(line)


def _command(parse: Callable[[Sequence[str]], argparse.Namespace], *words: str) -> None:
    """Run a command as a user would type it, and show it; `parse` is the command line's (`txl.cli`)."""
    say(f"$ txl {shlex.join(words)}")
    arguments = parse(words)
    arguments.run(arguments)


def memory_lengths(config: RunConfig) -> list[int]:
    """Return memory lengths to test: 0, training's, and doublings from a quarter of it up to the run's test memory."""
    lengths = {0, config.model.mem_len, config.eval.mem_len}
    length = max(1, config.model.mem_len // 4)
    while length < config.eval.mem_len:
        lengths.add(length)
        length *= 2
    return sorted(lengths)


def write_samples(directory: Path, config: RunConfig, max_tokens: int = 400, seed: int = 1) -> None:
    """Continue a few prompts and add them to the run's log, for the report."""
    from txl.commands.generate import record_sample
    from txl.generation.text import encode_prompt, generate
    from txl.runs.directory import RunDirectory

    run_directory = RunDirectory(directory)
    checkpoint = run_directory.checkpoint()
    model, vocabulary = run_directory.load(checkpoint)
    settings = {
        "top_k": 40,
        "top_p": None,
        "temperature": 0.8,
        "seed": seed,
        "max_tokens": max_tokens,
        **config.eval.length_options(),
    }
    for prompt in PROMPTS:
        try:
            encode_prompt(vocabulary, prompt)
        except UserError as error:  # a text of the user's own may lack the prompt's characters
            say(f"note: no sample for the prompt {prompt!r}: {error}")
            continue
        text = "".join(generate(model, vocabulary, prompt, **settings))
        record_sample(run_directory, checkpoint, prompt, text, settings)
