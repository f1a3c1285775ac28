"""`txl demo`: train, evaluate, generate and report, on text that every Python installation contains."""

from __future__ import annotations

import argparse
import shlex
import time
from typing import TYPE_CHECKING

from txl.commands import options
from txl.commands.generate import record_sample
from txl.commands.output import say
from txl.commands.parser import Parser, build_parser, option
from txl.config import RunConfig, differences, leaf_fields, shown, validate, with_options
from txl.config.values import require
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName

if TYPE_CHECKING:
    from txl.data.prepared import Corpus
    from txl.models.language_model import LanguageModel

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


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "demo",
        help="train, measure and generate in minutes, without a download",
        example="txl demo",
        description="Train a small model on the Python standard library's own source files, measure it with and "
        "without memory, let it write, and make the report: about five minutes on two CPU cores, without a download. "
        "Steps, learning rate, arithmetic and first weights are adjusted to the machine, except for options that you "
        "give; with another --preset nothing is adjusted.",
        add_help=False,
    )
    options.add_out(parser, "DIR", "the run directory (default: runs/demo)", default="runs/demo")
    option(parser, "--preset", "NAME", "configuration", default=_PRESET)
    option(parser, "--test-tokens", "N", "tokens of the test split to read (default: all)", int)
    options.shared(parser, "data_dir")
    options.add_config_options(parser, ("data", "model", "train", "eval"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train (or resume), measure with and without memory, write samples and the report, and print the summary."""
    began, limit, given = time.monotonic(), arguments.test_tokens, options.config_options(arguments)
    directory, preset, data_dir = RunDirectory(arguments.out), options.base_config(arguments.preset), arguments.data_dir
    is_begun, is_adjusted = directory.config_path.exists(), arguments.preset == _PRESET
    config = options.run_config(directory.config() if is_begun and is_adjusted else preset, given)
    lanes = 2 * config.eval.batch_size
    require(limit is None or limit >= lanes, "test_tokens", limit, f"{lanes} (two for each lane) or more")
    options.writable_folder(arguments.out)
    from txl.data.corpora import open_corpus
    from txl.reporting.report import default_checkpoint, summary_lines, write_report
    from txl.training.starting import check_out
    from txl.training.trainer import Trainer

    device = options.pick_device(None)
    if is_adjusted and not is_begun:
        config = suited(config, given, device)
    check_out(directory.path, config)
    validate(config)
    values = {name: shown(value) for name, _, _, value in leaf_fields(config)}
    changed = [change.partition(" ")[0] for change in differences(preset, config)]
    changes = [word for name in changed for word in (f"--{name.replace('_', '-')}", values[name])]
    say(f"$ txl {shlex.join(['train', arguments.preset, '--out', arguments.out, *changes])}")
    Trainer(config, directory.path, device=device, data_dir=data_dir).fit()
    lengths = sorted({0, config.model.mem_len, config.eval.mem_len})
    words = ["eval", arguments.out, "--mem-lens", ",".join(map(str, lengths))]
    words += ["--dtype", "bfloat16" if config.train.dtype == "bfloat16" else "float32"]
    words += [] if limit is None else ["--max-tokens", str(limit)]
    words += [] if data_dir is None else ["--data-dir", data_dir]
    say(f"$ txl {shlex.join(words)}")
    measuring = build_parser().parse_args(words)
    measuring.run(measuring)
    model, _ = directory.load(directory.checkpoint(), device=device)
    corpus = open_corpus(config.data.corpus, config=config.data, data_dir=data_dir, quiet=True)
    context, text = _write_samples(directory, model, corpus)
    say(f"$ txl report {shlex.quote(arguments.out)} --after-training-text")
    report = write_report(directory.path, data_dir=data_dir, after_training_text=True)
    print(report)
    for line in [*context.splitlines()[-_READ:], MARK, *text.splitlines()[:_WRITTEN], ""]:
        print(line)
    directory.append(EventName.DEMO, config.train.steps, seconds=time.monotonic() - began)
    for line in summary_lines(directory.events(), report, default_checkpoint(directory)):
        print(line)


def suited(config: RunConfig, given: dict[str, str], device: str) -> RunConfig:
    """Return a copy for this machine: its arithmetic, steps that fit into the demo's time, and what follows from them.

    What the user's options `given` set stays. The steps are found by the time of a few steps on random tokens, so they
    stay, too, if the vocabulary's size depends on the text.
    """
    from txl.data.corpora import known_vocabulary_size
    from txl.minutes.rule import rate_of, with_copying
    from txl.training import timing
    from txl.training.defaults import fast_options

    config = with_options(config, fast_options(config, given, device) | given)
    data, most = config.data, config.train.steps
    vocab_size = data.vocab_size if data.unit == "bpe" else known_vocabulary_size(data)
    if "train.steps" not in given and vocab_size is not None:
        _, step = timing.training_workload(config, vocab_size, device, must_compile=False)
        seconds = timing.timed(step, 3, device)
        short = with_copying(with_options(config, {"train.steps": str(_LEAST_COPYING)}), given)
        least = _LEAST_COPYING if short.model.first_weights == "induction" else _LEAST
        config.train.steps = steps = steps_within(_SECONDS, seconds, least, most)
        if steps < most:
            minutes = (_FIXED + (steps + _BESIDE) * seconds) / 60
            say(f"{steps:,} training steps instead of {most:,}: the demo takes about {minutes:.0f} minutes here")
    config = with_copying(config, given)
    if "train.learning_rate" not in given:
        config.train.learning_rate = rate_of(config.train.steps)
    return config


def steps_within(seconds: float, step_seconds: float, least: int, most: int) -> int:
    """Return the number of training steps of a demo that takes `seconds`, in whole hundreds, within two limits."""
    hundreds = int(((seconds - _FIXED) / step_seconds - _BESIDE) // 100)
    return min(most, max(least, 100 * hundreds))


def _write_samples(directory: RunDirectory, model: LanguageModel, corpus: Corpus) -> tuple[str, str]:
    """Continue passages of the test split, and add the texts to the run's log for the report; return the last pair."""
    from txl.generation.sampling import GenerationOptions, Sampling
    from txl.generation.text import generate_with

    test, checkpoint, context, text = corpus.tokens("test"), directory.checkpoint(), "", ""
    # At temperature 0.8 more than half of such a small model's samples end in repetition.
    sampling = Sampling(top_k=None, top_p=0.95, temperature=0.9)
    settings = GenerationOptions(300, sampling=sampling, seed=1, **directory.config().eval.lengths.options())
    for number in range(1, _SAMPLES + 1):
        begin = len(test) * number // (_SAMPLES + 1)
        context = whole_lines(corpus.vocabulary.decode(test[begin : begin + _CONTEXT]))
        text = "".join(generate_with(model, corpus.vocabulary, context, settings))
        record_sample(directory, checkpoint, context, text, settings)
    return context, text


def whole_lines(text: str) -> str:
    """Return a text without the cut lines at its ends, or the whole text if the cut lines are more than half of it.

    Replacement characters at the ends, left by cut characters, are removed in both cases.
    """
    _, _, rest = text.partition("\n")
    lines = rest[: rest.rfind("\n") + 1]
    return lines if len(lines) >= len(text) / 2 and lines.strip() else text.strip("\N{REPLACEMENT CHARACTER}")
