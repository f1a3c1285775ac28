"""`txl cache DIR`: tune a continuous cache on the validation split, and measure its gain on the test split."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from txl.commands.arguments import pick_device, run_corpus, run_to_read
from txl.commands.evaluation_options import (
    add_reading_options,
    add_splits,
    eval_command,
    evaluation_settings,
    fractions,
    refuse_tuned_split,
)
from txl.commands.evaluation_results import measured_on, print_rows, refuse_not_a_number
from txl.commands.options import add_memory_options, add_run_options
from txl.commands.output import ProgressByPart, print_json, record
from txl.commands.parser import Commands
from txl.runs.events import Evaluation, EventName

if TYPE_CHECKING:
    from txl.evaluation.cache_tuning import CacheTuning


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "cache",
        help="find settings of a continuous cache, and measure it",
        example="txl cache runs/mine --size 2000",
        description="Find theta and lambda of a continuous cache (Grave et al. 2016) on the validation split, then "
        "measure the test split with and without it. The cache raises the probability of words that were recently "
        "seen in similar contexts.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument("--size", type=int, default=2000, metavar="N", help="tokens in the cache (default: 2000)")
    parser.add_argument("--thetas", type=fractions, metavar="X,X,...", help="to try (default: suited to the model)")
    parser.add_argument("--lambdas", type=fractions, metavar="X,X,...", help="to try (default: 0.01 to 0.5)")
    add_splits(parser)
    add_reading_options(
        parser,
        segment="tokens of each lane in one step",
        batch="lanes read in parallel, each with its own cache",
        max_tokens="read only the first N tokens of each split",
    )
    add_memory_options(parser)
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Tune the cache, measure with and without it, print the results, and add them to the run's log."""
    refuse_tuned_split(arguments)
    directory, config, checkpoint = run_to_read(arguments)
    from txl.devices import keep_freed_memory
    from txl.evaluation.cache_tuning import LAMBDAS, tune_cache_with
    from txl.evaluation.perplexity import evaluate_with

    keep_freed_memory()
    settings = evaluation_settings(arguments, config, config.eval.batch_size)
    model, vocabulary = directory.load(checkpoint, device=pick_device(arguments.device))
    corpus = run_corpus(directory, vocabulary, arguments)
    tune_on, measured = corpus.tokens(arguments.tune_on), corpus.tokens(arguments.split)
    lambdas = arguments.lambdas or LAMBDAS
    with ProgressByPart(quiet=arguments.json) as progress:
        tuning_progress = partial(progress, f"tuning on the {arguments.tune_on} split")
        tuned = tune_cache_with(model, tune_on, settings, arguments.size, arguments.thetas, lambdas, tuning_progress)
        move = partial(progress, f"{arguments.split} split")
        results = [evaluate_with(reader, measured, settings, move) for reader in (model, tuned.around(model))]
    refuse_not_a_number([tuned.plain_nll, *(result.nll for result in results)], checkpoint)
    described = measured_on(corpus, arguments.split, checkpoint)
    rows: list[Evaluation] = [{**described, **result.to_dict()} for result in results]
    tuning = asdict(tuned) | {"split": arguments.tune_on, "at_edge": tuned.at_edge}
    record(directory, EventName.CACHE, checkpoint, **tuning)
    for row in rows:
        record(directory, EventName.EVAL, checkpoint, **row)
    if arguments.json:
        print_json({"tuning": tuning, "without": rows[0], "with": rows[1]})
        return
    _print(arguments, tuned, rows)


def _print(arguments: argparse.Namespace, tuned: CacheTuning, rows: list[Evaluation]) -> None:
    print(
        f"tuned on {tuned.tokens:,} targets of the {arguments.tune_on} split: theta {tuned.theta:g}, lambda "
        f"{tuned.weight:g}\n"
        f"nats per token there: {tuned.plain_nll:.4f} without the cache, {tuned.best_nll:.4f} with it"
    )
    for name in tuned.at_edge:
        print(f"the best {name} lies at the end of the values that were tried; try more: --{name}s")
    print_rows(rows)
    best = ("--cache-size", str(tuned.size), "--cache-theta", repr(tuned.theta), "--cache-lambda", repr(tuned.weight))
    print(f"to measure this again: {eval_command(arguments, best)}")
