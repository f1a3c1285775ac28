"""`txl demo`: train, evaluate, generate and report, on text that every Python installation contains."""

from __future__ import annotations

import argparse
import shlex
import time
from typing import TYPE_CHECKING

from txl.commands.arguments import check_corpus, pick_device, writable_folder
from txl.commands.config_options import add_config_options, base_config, config_options
from txl.commands.options import add_data_dir, add_out
from txl.commands.output import progress_bar, record, say
from txl.commands.parser import Commands
from txl.config import RunConfig, differences, leaf_fields, shown, validate, with_options
from txl.config.values import require

if TYPE_CHECKING:
    from txl.data.prepared import Corpus
    from txl.data.vocabulary import Vocabulary
    from txl.models.language_model import LanguageModel
    from txl.runs.directory import RunDirectory

_PRESET = "stdlib-bpe"
# Seconds that the demo should take; seconds of its parts that need no model; steps that take as long as its evaluation
# and texts.
_SECONDS, _FIXED, _BESIDE = 300.0, 40.0, 350
# Least number of steps, and the same with heads that copy. After 700 steps without them a model was worse than zlib;
# after 500 with them it is about as good as bz2.
_LEAST, _LEAST_COPYING = 900, 500
# Number of texts that the model writes, and most tokens of the test split that each text continues. After a prompt of a
# few words a small model soon repeats itself, because in training it has nearly always read more.
_SAMPLES, _CONTEXT = 3, 256
# Lines printed of a context, and of the text that the model writes.
_READ, _WRITTEN = 4, 12
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
    from txl.data.corpora import open_corpus, refuse_unused, with_absolute_paths
    from txl.devices import keep_freed_memory
    from txl.runs.directory import RunDirectory

    began, limit, options = time.monotonic(), arguments.test_tokens, config_options(arguments)
    directory, base, device = RunDirectory(arguments.out), base_config(arguments.preset), pick_device(None)
    is_begun, is_adjusted = directory.config_path.exists(), arguments.preset == _PRESET
    config = with_options(directory.config() if is_begun and is_adjusted else base, options)
    lanes = 2 * config.eval.batch_size
    require(limit is None or limit >= lanes, "test_tokens", limit, f"{lanes} (two for each lane) or more")
    writable_folder(arguments.out)
    if config.data.corpus != base.data.corpus and "data.source" not in options:
        config.data.source = None
    config.data = with_absolute_paths(config.data)
    refuse_unused(config.data, options)
    check_corpus(config.data.corpus)
    keep_freed_memory()
    if is_adjusted and not is_begun:
        validate(config)  # before the machine is timed
        config = suited(config, options, device)

    from txl.reporting.report import default_checkpoint, summary_lines, write_report
    from txl.runs.events import EventName
    from txl.training.starting import check_out
    from txl.training.trainer import Trainer

    check_out(directory.path, config)
    validate(config)
    _announce("train", arguments.preset, "--out", arguments.out, *_options(base, config))
    Trainer(config, directory.path, device=device, data_dir=arguments.data_dir).fit()
    model, vocabulary = directory.load(directory.checkpoint(), device=device)
    corpus = open_corpus(config.data.corpus, config=config.data, data_dir=arguments.data_dir, quiet=True)
    _measure(directory, model, corpus, limit)
    context, text = write_samples(directory, model, vocabulary, corpus)[-1]
    _announce("report", arguments.out, "--after-training-text")
    report = write_report(directory.path, data_dir=arguments.data_dir, after_training_text=True)
    print(report)
    for line in [*context.splitlines()[-_READ:], MARK, *text.splitlines()[:_WRITTEN], ""]:
        print(line)
    directory.append(EventName.DEMO, config.train.steps, seconds=time.monotonic() - began)
    for line in summary_lines(directory.events(), report, default_checkpoint(directory)):
        print(line)


def _announce(*words: str) -> None:
    """Print the command that does what follows."""
    say(f"$ txl {shlex.join(words)}")


def _options(base: RunConfig, config: RunConfig) -> list[str]:
    """Return the options that change one configuration into the other."""
    values = {name: shown(value) for name, _, _, value in leaf_fields(config)}
    changed = [change.partition(" ")[0] for change in differences(base, config)]
    return [word for name in changed for word in (f"--{name.replace('_', '-')}", values[name])]


def suited(config: RunConfig, options: dict[str, str], device: str) -> RunConfig:
    """Return a copy for this machine: its arithmetic, steps that fit into the demo's time, and what follows from them.

    Args:
        config: configuration with the user's options.
        options: options of the user by dotted name, which stay.
        device: device that trains.
    """
    from txl.minutes.rule import rate_of, with_copying
    from txl.runs.environment import multiplies_bfloat16
    from txl.training.compilation import can_capture

    config = with_options(config, ({"train.dtype": "bfloat16"} if multiplies_bfloat16(device) else {}) | options)
    config = with_options(config, ({"train.capture": "true"} if can_capture(config, device) else {}) | options)
    if "train.steps" not in options:
        config.train.steps = _steps(config, options, device)
    config = with_copying(config, options)
    if "train.learning_rate" not in options:
        config.train.learning_rate = rate_of(config.train.steps)
    return config


def _steps(config: RunConfig, options: dict[str, str], device: str) -> int:
    """Return as many steps as fit into the demo's time, by the time of a few steps on random tokens.

    They are at most the configuration's, and those if the size of the vocabulary depends on the text.
    """
    from txl.data.corpora import known_vocabulary_size
    from txl.minutes import timing
    from txl.minutes.rule import with_copying

    most, data = config.train.steps, config.data
    vocab_size = data.vocab_size if data.unit == "bpe" else known_vocabulary_size(data)
    if vocab_size is None:
        return most
    seconds = timing.timed(timing.training_workload(config, vocab_size, device, must_compile=False)[1], 3, device)
    short = with_copying(with_options(config, {"train.steps": str(_LEAST_COPYING)}), options)
    least = _LEAST_COPYING if short.model.first_weights == "induction" else _LEAST
    steps = steps_within(_SECONDS, seconds, least, most)
    if steps < most:
        minutes = (_FIXED + (steps + _BESIDE) * seconds) / 60
        say(f"{steps:,} training steps instead of {most:,}: the demo takes about {minutes:.0f} minutes here")
    return steps


def steps_within(seconds: float, step_seconds: float, least: int, most: int) -> int:
    """Return the number of training steps of a demo that takes `seconds`, in whole hundreds, within two limits."""
    hundreds = int(((seconds - _FIXED) / step_seconds - _BESIDE) // 100)
    return min(most, max(least, 100 * hundreds))


def _measure(directory: RunDirectory, model: LanguageModel, corpus: Corpus, limit: int | None) -> None:
    """Measure the model without memory, with that of training, and with that of its test settings."""
    from txl.commands.eval import describe, draw_curve
    from txl.commands.evaluation_results import print_rows
    from txl.evaluation.perplexity import evaluate_at_lengths
    from txl.evaluation.stream import Settings
    from txl.runs.events import Evaluation, EventName

    config, checkpoint = directory.config(), directory.checkpoint()
    lengths = sorted({0, config.model.mem_len, config.eval.mem_len})
    dtype = "bfloat16" if config.train.dtype == "bfloat16" else "float32"
    _announce("eval", str(directory.path), "--mem-lens", ",".join(map(str, lengths)), "--dtype", dtype)
    settings = Settings(
        segment=config.eval.segment,
        batch_size=config.eval.batch_size,
        clamp_len=config.eval.lengths.options()["clamp_len"],
        max_tokens=limit,
        dtype=dtype,
        temperature=config.eval.temperature,
    )
    progress, move = progress_bar("test split", quiet=False)
    with progress:
        results = list(evaluate_at_lengths(model, corpus.tokens("test"), lengths, settings, move))
    described, _ = describe(directory, checkpoint, corpus, results[0], "test")
    rows: list[Evaluation] = [{**described, **result.to_dict()} for result in results]
    record(directory, EventName.SWEEP, checkpoint, **described, rows=rows)
    print_rows(rows)
    draw_curve(directory.path, rows)


def write_samples(
    directory: RunDirectory, model: LanguageModel, vocabulary: Vocabulary | None, corpus: Corpus
) -> list[tuple[str, str]]:
    """Continue passages of the test split, and add the texts to the run's log for the report.

    Returns:
        Pairs of a passage and the model's text.
    """
    from txl.commands.generate import record_sample
    from txl.generation.sampling import GenerationOptions, Sampling
    from txl.generation.text import generate_with

    test, checkpoint = corpus.tokens("test"), directory.checkpoint()
    # At temperature 0.8 more than half of such a small model's samples end in repetition.
    sampling = Sampling(top_k=None, top_p=0.95, temperature=0.9)
    options = GenerationOptions(300, sampling=sampling, seed=1, **directory.config().eval.lengths.options())
    samples = []
    for number in range(1, _SAMPLES + 1):
        begin = len(test) * number // (_SAMPLES + 1)
        context = whole_lines(corpus.vocabulary.decode(test[begin : begin + _CONTEXT]))
        text = "".join(generate_with(model, vocabulary, context, options))
        record_sample(directory, checkpoint, context, text, options)
        samples.append((context, text))
    return samples


def whole_lines(text: str) -> str:
    """Return a text without the cut lines at its ends, or the whole text if the cut lines are more than half of it.

    Replacement characters at the ends, left by cut characters, are removed in both cases.
    """
    _, _, rest = text.partition("\n")
    lines = rest[: rest.rfind("\n") + 1]
    return lines if len(lines) >= len(text) / 2 and lines.strip() else text.strip("\N{REPLACEMENT CHARACTER}")
