"""`txl demo`: the whole way on real text that every Python has: train, evaluate, generate, report."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from txl.commands.options import add_config_options, add_data_dir, add_out, config_options
from txl.commands.output import say
from txl.config import RunConfig, validate, with_options
from txl.errors import UserError

if TYPE_CHECKING:
    from txl.commands.options import Subparsers

PROMPTS = ("import ", "class Stream:\n    ", "def read_config(path):\n    ")
_PRESET, _STEPS_IN_FLOAT32 = "stdlib-bpe", 1000
"""The preset, and its steps where the processor has no fast bfloat16: there a step takes 1.7 times as long."""
_SHOWN = 12
"""Lines of a sample that are printed."""


def add_parser(commands: Subparsers) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train, measure and generate in minutes, without a download",
        example="txl demo",
        description="Train a small model on the Python standard library's own source files, measure it with and "
        "without memory, let it write, and make the report: some minutes on a CPU, without a download.",
        add_help=False,
    )
    add_out(parser, "DIR", "the run directory (default: runs/demo)", default="runs/demo")
    parser.add_argument("--preset", default=_PRESET, metavar="NAME", help=f"configuration (default: {_PRESET})")
    parser.add_argument("--test-tokens", type=int, metavar="N", help="tokens of the test split to read (default: all)")
    add_data_dir(parser)
    add_config_options(parser, ("data", "model", "train", "eval"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train (or go on), measure with and without memory, write samples and the report, and print the summary."""
    from txl.presets import preset

    limit = arguments.test_tokens
    if limit is not None and limit < 2 * preset(arguments.preset).eval.batch_size:
        raise UserError(f"--test-tokens is {limit}; expected two for each lane of the evaluation or more")
    changes = config_options(arguments)
    if arguments.preset == _PRESET:
        changes = arithmetic_of_this_machine() | changes
    out, config = arguments.out, with_options(preset(arguments.preset), changes)
    validate(config)
    options = [word for name, value in changes.items() for word in (f"--{name.replace('_', '-')}", value)]
    data_dir = [] if arguments.data_dir is None else ["--data-dir", arguments.data_dir]
    measured = ["--mem-lens", ",".join(map(str, memory_lengths(config)))]
    measured += ["--dtype", "bfloat16"] if config.train.dtype == "bfloat16" else []
    measured += [] if limit is None else ["--max-tokens", str(limit)]

    parse = arguments.parse
    _command(parse, "train", arguments.preset, "--out", out, *options, *data_dir)
    _command(parse, "eval", out, *measured, *data_dir)
    sample = write_samples(Path(out), config)
    _command(parse, "report", out, "--after-training-text", *data_dir)

    from txl.reporting.report import summary_lines
    from txl.runs.directory import RunDirectory

    for line in [*sample.splitlines()[:_SHOWN], ""] if sample else []:
        print(line)
    for line in summary_lines(RunDirectory(out).events(), Path(out) / "report.html"):
        print(line)


def arithmetic_of_this_machine() -> dict[str, str]:
    """Return the options of training that keep the demo short here: bfloat16 where it is fast, else fewer steps."""
    from txl.commands.options import pick_device
    from txl.runs.environment import multiplies_bfloat16

    if multiplies_bfloat16(pick_device(None)):
        return {"train.dtype": "bfloat16"}
    return {"train.steps": str(_STEPS_IN_FLOAT32)}


def _command(parse: Callable[[Sequence[str]], argparse.Namespace], *words: str) -> None:
    """Run a command as a user would type it, and show it; `parse` is the command line's (`txl.cli`)."""
    say(f"$ txl {shlex.join(words)}")
    arguments = parse(words)
    arguments.run(arguments)


def memory_lengths(config: RunConfig) -> list[int]:
    """Return the memory lengths to test: none, training's, and the run's test memory."""
    return sorted({0, config.model.mem_len, config.eval.mem_len})


def write_samples(directory: Path, config: RunConfig, max_tokens: int = 400, seed: int = 1) -> str:
    """Continue a few prompts, add them to the run's log for the report, and return the last one with its prompt."""
    from txl.commands.generate import record_sample
    from txl.generation.text import encode_prompt, generate
    from txl.runs.directory import RunDirectory

    run_directory = RunDirectory(directory)
    checkpoint = run_directory.checkpoint()
    model, vocabulary = run_directory.load(checkpoint)
    settings = {
        "top_k": None,
        "top_p": 0.95,
        "temperature": 0.9,  # at 0.8 more than half of such a small model's samples end in repetition
        "seed": seed,
        "max_tokens": max_tokens,
        **config.eval.lengths.options(),
    }
    shown = ""
    for prompt in PROMPTS:
        try:
            encode_prompt(vocabulary, prompt)
        except UserError as error:  # a text of the user's own may lack the prompt's characters
            say(f"note: no sample for the prompt {prompt!r}: {error}")
            continue
        text = "".join(generate(model, vocabulary, prompt, **settings))
        record_sample(run_directory, checkpoint, prompt, text, settings)
        shown = prompt + text
    return shown
