"""`txl demo`: train, evaluate, generate and report, on text that every Python installation contains."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from txl.commands.arguments import check_corpus, pick_device, writable_folder
from txl.commands.config_options import add_config_options, config_options
from txl.commands.options import add_data_dir, add_out
from txl.commands.output import say
from txl.commands.parser import Commands
from txl.config import RunConfig, validate, with_options
from txl.errors import UserError

_PRESET = "stdlib-bpe"
_SECONDS, _FIXED, _BESIDE = 300.0, 40.0, 350
"""Seconds that the demo should take; seconds of the parts that need no model; time of evaluation and texts, in training
steps."""
_LEAST, _LEAST_COPYING = 900, 500
"""Least number of steps, and the same with heads that copy. After 700 steps without them a model was worse than zlib;
after 500 with them it is about as good as bz2."""
_SAMPLES, _CONTEXT = 3, 256
"""Number of texts that the model writes, and most tokens of the test split that each text continues. After a prompt of
a few words a small model soon repeats itself, because in training it has nearly always read more."""
_READ, _WRITTEN = 4, 12
"""Lines printed of a context, and of the text that the model writes."""
MARK = "--- the model goes on: ---"


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train, measure and generate in minutes, without a download",
        example="txl demo",
        description="Train a small model on the Python standard library's own source files, measure it with and "
        "without memory, let it write, and make the report: about five minutes on two CPU cores, without a download. "
        "By default, the number of steps is lowered to what fits into five minutes (at least 500, or 900 without heads "
        "that copy), the learning rate is the one for this number of steps, matrix products are in bfloat16 if the "
        "processor has instructions for it, and a run of at most 2,000 steps begins with heads that copy (model.init "
        "induction). Options that you give are kept; with another --preset nothing is adjusted.",
        add_help=False,
    )
    add_out(parser, "DIR", "the run directory (default: runs/demo)", default="runs/demo")
    parser.add_argument("--preset", default=_PRESET, metavar="NAME", help=f"configuration (default: {_PRESET})")
    parser.add_argument("--test-tokens", type=int, metavar="N", help="tokens of the test split to read (default: all)")
    add_data_dir(parser)
    add_config_options(parser, ("data", "model", "train", "eval"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train (or resume), measure with and without memory, write samples and the report, and print the summary."""
    from txl.presets import preset
    from txl.training.compilation import can_capture

    began = time.monotonic()
    changes, limit = config_options(arguments), arguments.test_tokens
    if arguments.preset == _PRESET:
        changes = arithmetic_of(Path(arguments.out)) | changes
        if can_capture(with_options(preset(_PRESET), changes), pick_device(None)):
            changes = {"train.capture": "true"} | changes
    out, config = arguments.out, with_options(preset(arguments.preset), changes)
    validate(config)
    if limit is not None and limit < 2 * config.eval.batch_size:
        raise UserError(f"--test-tokens is {limit}; expected two for each lane of the evaluation or more")
    writable_folder(out)  # refused before the machine is timed
    check_corpus(config.data.corpus)
    if arguments.preset == _PRESET and "train.steps" not in changes:
        changes |= steps_of_this_machine(Path(out), config, changes)
        config = with_options(config, changes)
    if arguments.preset == _PRESET:
        changes |= copying_of(Path(out), config, changes)
        changes |= rate_for_steps(Path(out), config, changes)
        config = with_options(config, changes)
    options = [word for name, value in changes.items() for word in (f"--{name.replace('_', '-')}", value)]
    data_dir = [] if arguments.data_dir is None else ["--data-dir", arguments.data_dir]
    measured = ["--mem-lens", ",".join(map(str, memory_lengths(config)))]
    measured += ["--dtype", "bfloat16"] if config.train.dtype == "bfloat16" else []
    measured += [] if limit is None else ["--max-tokens", str(limit)]

    from txl.commands.command_line import build_parser

    parse = build_parser().parse_args
    _command(parse, "train", arguments.preset, "--out", out, *options, *data_dir)
    _command(parse, "eval", out, *measured, *data_dir)
    samples = write_samples(Path(out), config, data_dir=arguments.data_dir)
    _command(parse, "report", out, "--after-training-text", *data_dir)

    from txl.reporting.report import default_checkpoint, summary_lines
    from txl.runs.directory import RunDirectory
    from txl.runs.events import EventName

    context, text = samples[-1]
    for line in [*context.splitlines()[-_READ:], MARK, *text.splitlines()[:_WRITTEN], ""]:
        print(line)
    trained = RunDirectory(out)
    trained.append(EventName.DEMO, config.train.steps, seconds=time.monotonic() - began)
    for line in summary_lines(trained.events(), Path(out) / "report.html", default_checkpoint(trained)):
        print(line)


def arithmetic_of(out: Path) -> dict[str, str]:
    """Return the dtype of the run in `out`, so that it resumes, or else the dtype that this machine is fast in."""
    from txl.runs.directory import RunDirectory
    from txl.runs.environment import multiplies_bfloat16

    if RunDirectory(out).config_path.exists():
        return {"train.dtype": RunDirectory(out).config().train.dtype}
    return {"train.dtype": "bfloat16"} if multiplies_bfloat16(pick_device(None)) else {}


def steps_of_this_machine(out: Path, config: RunConfig, given: dict[str, str]) -> dict[str, str]:
    """Return the option with as many steps as fit into the demo's time, at most those of the configuration.

    A few steps on random tokens are timed. If `out` holds a run, return the steps of that run, so that it resumes.

    Args:
        out: folder of the run.
        config: configuration with the user's options.
        given: options of the user by dotted name.
    """
    from txl.allocator import keep_freed_memory
    from txl.data.corpora import known_vocabulary_size
    from txl.minutes.timing import timed, training_workload
    from txl.runs.directory import RunDirectory

    if RunDirectory(out).config_path.exists():
        return {"train.steps": str(RunDirectory(out).config().train.steps)}
    vocab_size = config.data.vocab_size if config.data.unit == "bpe" else known_vocabulary_size(config.data)
    if vocab_size is None:  # it depends on the text
        return {}
    keep_freed_memory()  # as in training
    device = pick_device(None)
    _, step = training_workload(config, vocab_size, device, must_compile=False)
    step_seconds = timed(step, 3, device)
    copies = copying_of(out, with_options(config, {"train.steps": str(_LEAST_COPYING)}), given)
    least = _LEAST_COPYING if copies else _LEAST
    steps = steps_within(_SECONDS, step_seconds, least, config.train.steps)
    if steps < config.train.steps:
        minutes = (_FIXED + (steps + _BESIDE) * step_seconds) / 60
        instead = f"{steps:,} training steps instead of {config.train.steps:,}"
        say(f"{instead}: the demo takes about {minutes:.0f} minutes here")
    return {"train.steps": str(steps)}


def steps_within(seconds: float, step_seconds: float, least: int, most: int) -> int:
    """Return the number of training steps of a demo that takes `seconds`, in whole hundreds, within two limits."""
    hundreds = int(((seconds - _FIXED) / step_seconds - _BESIDE) // 100)
    return min(most, max(least, 100 * hundreds))


def copying_of(out: Path, config: RunConfig, given: dict[str, str]) -> dict[str, str]:
    """Return `model.init induction` if the run in `out` has it, or if there is none and the new run is short.

    Else, or if the user's options give `model.init` or a model in which such heads cannot work, return no option.
    """
    from txl.minutes.rule import can_copy, with_copying
    from txl.runs.directory import RunDirectory

    if "model.init" in given or not can_copy(config.model):
        return {}
    trained = RunDirectory(out)
    run = trained.config() if trained.config_path.exists() else with_copying(config, given)
    return {"model.init": run.model.first_weights} if run.model.first_weights == "induction" else {}


def rate_for_steps(out: Path, config: RunConfig, given: dict[str, str]) -> dict[str, str]:
    """Return the learning rate of the run in `out`, or else that for the number of steps: fewer steps, a higher rate.

    Return no option if the user's options give a rate.
    """
    from txl.minutes.rule import rate_of
    from txl.runs.directory import RunDirectory

    if "train.learning_rate" in given:
        return {}
    trained = RunDirectory(out)
    begun = trained.config().train.learning_rate if trained.config_path.exists() else rate_of(config.train.steps)
    return {"train.learning_rate": f"{begun:g}"}


def _command(parse: Callable[[Sequence[str]], argparse.Namespace], *words: str) -> None:
    """Print a command as a user would type it, and run it; `parse` parses command lines (`txl.cli`)."""
    say(f"$ txl {shlex.join(words)}")
    arguments = parse(words)
    arguments.run(arguments)


def memory_lengths(config: RunConfig) -> list[int]:
    """Return the memory lengths to test: 0, the length in training, and the length in the run's test settings."""
    return sorted({0, config.model.mem_len, config.eval.mem_len})


def write_samples(
    directory: Path, config: RunConfig, *, data_dir: str | None = None, max_tokens: int = 300, seed: int = 1
) -> list[tuple[str, str]]:
    """Continue passages of the test split, and add the texts to the run's log for the report.

    Returns:
        Pairs of a passage and the model's text.
    """
    from txl.commands.generate import record_sample
    from txl.data.corpora import open_corpus
    from txl.generation.sampling import GenerationOptions, Sampling
    from txl.generation.text import generate_with
    from txl.runs.directory import RunDirectory

    run_directory = RunDirectory(directory)
    checkpoint = run_directory.checkpoint()
    model, vocabulary = run_directory.load(checkpoint)
    corpus = open_corpus(config.data.corpus, config=config.data, data_dir=data_dir, quiet=True)
    test = corpus.tokens("test")
    # At temperature 0.8 more than half of such a small model's samples end in repetition.
    sampling = Sampling(top_k=None, top_p=0.95, temperature=0.9)
    options = GenerationOptions(max_tokens, sampling=sampling, seed=seed, **config.eval.lengths.options())
    samples = []
    for number in range(1, _SAMPLES + 1):
        begin = len(test) * number // (_SAMPLES + 1)
        context = whole_lines(corpus.vocabulary.decode(test[begin : begin + _CONTEXT]))
        text = "".join(generate_with(model, vocabulary, context, options))
        record_sample(run_directory, checkpoint, context, text, options)
        samples.append((context, text))
    return samples


def whole_lines(text: str) -> str:
    """Return a text without the cut lines at its ends, or the whole text if the cut lines are more than half of it.

    Replacement characters at the ends, left by cut characters, are removed in both cases.
    """
    _, _, rest = text.partition("\n")
    lines = rest[: rest.rfind("\n") + 1]
    return lines if len(lines) >= len(text) / 2 and lines.strip() else text.strip("\N{REPLACEMENT CHARACTER}")
