"""`txl demo`: the whole way on real text that every Python has: train, evaluate, generate, report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from txl.commands.options import add_data_dir, say
from txl.config import RunConfig

PROMPTS = ("def read_config(path):\n    ", "class Stream:\n    ", "import ")


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("demo", help="train, evaluate, generate and report in minutes, without a download")
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="the run directory (default: runs/demo)")
    parser.add_argument("--preset", default="stdlib-tiny", metavar="NAME", help="default: stdlib-tiny")
    add_data_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train (or go on), measure with and without memory, write samples and the report, and print the summary."""
    from txl.presets import preset

    out = arguments.out
    config = preset(arguments.preset)
    data_dir = [] if arguments.data_dir is None else ["--data-dir", arguments.data_dir]

    def command(*words: str) -> None:
        # The same functions that the command line calls: what the demo shows is what a user can type.
        from txl.cli import build_parser

        say(f"$ txl {' '.join(repr(word) if ' ' in word or not word.isprintable() else word for word in words)}")
        parsed = build_parser().parse_args([*words, *data_dir])
        parsed.run(parsed)

    command("train", arguments.preset, "--out", out)
    command("eval", out, "--mem-lens", ",".join(map(str, memory_lengths(config))), "--max-tokens", "200000")
    write_samples(Path(out), config)
    command("report", out)
    from txl.reporting.summary import summary_lines
    from txl.run_directory import RunDirectory

    for line in summary_lines(RunDirectory(out).events(), Path(out) / "report.html"):
        print(line)


def memory_lengths(config: RunConfig) -> list[int]:
    """No memory, training's, and doublings from a quarter of it up to the run's test memory."""
    lengths = {0, config.model.mem_len, config.eval.mem_len}
    length = max(1, config.model.mem_len // 4)
    while length < config.eval.mem_len:
        lengths.add(length)
        length *= 2
    return sorted(lengths)


def write_samples(directory: Path, config: RunConfig, max_tokens: int = 400, seed: int = 1) -> None:
    """Continue a few prompts and add them to the run's log, for the report."""
    from txl.commands.evaluate import checkpoint_step
    from txl.generation import generate
    from txl.run_directory import RunDirectory

    run_directory = RunDirectory(directory)
    checkpoint = run_directory.checkpoint()
    model, vocabulary = run_directory.load(checkpoint)
    settings = {"top_k": 40, "top_p": None, "temperature": 0.8, "seed": seed, "max_tokens": max_tokens}
    for prompt in PROMPTS:
        text = "".join(
            generate(model, vocabulary, prompt, mem_len=config.eval.mem_len, window=config.eval.window, **settings)
        )
        run_directory.append(
            "sample", checkpoint_step(checkpoint), prompt=prompt, text=text, checkpoint=checkpoint.name, **settings
        )
