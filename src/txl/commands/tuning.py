"""`txl dynamic DIR` and `txl cache DIR`: tune on the validation split, then measure the gain on the test split."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from txl.commands import measuring, options
from txl.commands.output import print_json, progress_by_part, record
from txl.commands.parser import Parser, choice, option
from txl.config import AdaptationRule
from txl.errors import Field, UserError
from txl.runs.directory import RunDirectory
from txl.runs.events import Evaluation, EventName

if TYPE_CHECKING:
    from txl.data.prepared import Corpus
    from txl.evaluation.stream import EvaluationResult

# Options of both commands that `txl eval` has too, with their defaults.
_OF_EVAL = {
    "split": "test",
    **dict.fromkeys(("mem_len", "window", "clamp_len", "segment", "batch", "max_tokens", "temperature")),
    **dict.fromkeys(("cache_size", "cache_theta", "cache_lambda")),
    **dict.fromkeys(("dynamic_epsilon", "dynamic_weights", "dynamic_statistics_segments", "dynamic_statistics_batch")),
    "dtype": "float32",
    **dict.fromkeys(("checkpoint", "data_dir", "device")),
}


def add_parser(commands: Parser) -> None:
    """Add both commands to the command line."""
    parser = commands.add_command(
        "dynamic",
        help="find settings of dynamic evaluation, and measure it",
        example="txl dynamic runs/mine --rule sgd",
        description="Find a learning rate and a decay for dynamic evaluation (Krause et al. 2018, 2019) on the "
        "validation split, then measure the test split with and without it. Dynamic evaluation scores a segment of "
        "the text, then adapts a copy of the weights to it.",
    )
    options.shared(parser, "directory")
    rule = choice(parser, "--rule", get_args(AdaptationRule), "how weights adapt, see txl eval --help", "rms")
    rule.dest = "dynamic"  # as in `txl eval`
    option(parser, "--learning-rates", "X,X,...", "to try (default: a wide range)", options.fractions)
    option(parser, "--decays", "X,X,...", "to try (default: 0 to 0.1)", options.fractions)
    measuring.add_rule_options(parser, "")
    option(parser, "--tune-tokens", "N", "tune on the first N tokens of the split of --tune-on", int)
    _add_reading(parser)
    measuring.add_cache_options(parser)
    parser.set_defaults(run=run_dynamic)

    parser = commands.add_command(
        "cache",
        help="find settings of a continuous cache, and measure it",
        example="txl cache runs/mine --size 2000",
        description="Find theta and lambda of a continuous cache (Grave et al. 2016) on the validation split, then "
        "measure the test split with and without it. The cache raises the probability of words that were recently "
        "seen in similar contexts.",
    )
    options.shared(parser, "directory")
    option(parser, "--size", "N", "tokens in the cache", int, 2000)
    option(parser, "--thetas", "X,X,...", "to try (default: suited to the model)", options.fractions)
    option(parser, "--lambdas", "X,X,...", "to try (default: 0.01 to 0.5)", options.fractions)
    _add_reading(parser)
    parser.set_defaults(run=run_cache)


def _add_reading(parser: Parser) -> None:
    """Add the options of how the splits are read."""
    option(parser, "--split", "NAME", "split to measure", default="test")
    option(parser, "--tune-on", "NAME", "split to tune on", default="valid")
    options.shared(parser, "segment", "batch", "max_tokens", "temperature", "dtype", "checkpoint")
    options.add_memory_options(parser)
    options.add_run_options(parser)


def run_dynamic(arguments: argparse.Namespace) -> None:
    """Tune dynamic evaluation, measure with and without it, print the results, and add them to the run's log."""
    _refuse_tuned_split(arguments)
    if arguments.tune_tokens is not None and arguments.tune_tokens < 2:
        raise UserError(field="tune_tokens", value=arguments.tune_tokens, expected="2 or more")
    directory, config, checkpoint = options.run_to_read(arguments)
    from txl.evaluation.dynamic import adapt_with
    from txl.evaluation.perplexity import evaluate_with
    from txl.evaluation.tuning import DECAYS, tune_dynamic_with

    adaptation = measuring.adaptation_of(arguments, learning_rate=0.0)
    settings = measuring.evaluation_settings(arguments, config, batch_size=1)
    model, vocabulary = measuring.load_to_adapt(directory, config, checkpoint, arguments)
    model = measuring.with_cache(model, arguments)
    corpus = options.run_corpus(directory, vocabulary, arguments)
    tune_on, measured = corpus.tokens(arguments.tune_on), corpus.tokens(arguments.split)
    statistics = measuring.statistics_of(model, vocabulary, directory, corpus, adaptation, settings, arguments)
    with progress_by_part(quiet=arguments.json) as progress:
        tuned = tune_dynamic_with(
            model,
            tune_on,
            adaptation,
            statistics,
            replace(settings, max_tokens=arguments.tune_tokens),
            arguments.learning_rates,
            DECAYS if arguments.decays is None else arguments.decays,
            partial(progress, f"tuning on the {arguments.tune_on} split"),
        )
        move, best = partial(progress, f"{arguments.split} split"), tuned.adaptation
        static = evaluate_with(model, measured, settings, move)
        adapted = adapt_with(model, measured, best, statistics, settings, move)
    measuring.refuse_not_a_number([static.nll], checkpoint)
    tuning = tuned.to_dict() | {"split": arguments.tune_on}
    record(directory, EventName.DYNAMIC, checkpoint, **tuning)
    measuring.refuse_not_a_number([adapted.nll], checkpoint, "learning_rates")
    rows = _recorded(directory, corpus, checkpoint, arguments.split, (static, adapted))
    times_static = static.tokens_per_second / adapted.tokens_per_second
    if arguments.json:
        print_json({"tuning": tuning, "static": rows[0], "dynamic": rows[1], "times_static": times_static})
        return
    print(
        f"tuned on {tuned.tokens:,} targets of the {arguments.tune_on} split, settings tried: {len(tuned.tried)}; "
        f"learning rate {best.learning_rate:g}, decay {best.decay:g}\n"
        f"nats per token there: {tuned.static_nll:.4f} without it, {tuned.best_nll:.4f} with it"
    )
    for row in rows:
        measuring.print_rows([row])
    print(f"with it, the test took {times_static:.1f} times as long")
    found = ("--dynamic", best.rule, "--dynamic-learning-rate", repr(best.learning_rate))
    _print_next(arguments, tuned.at_edge, (*found, "--dynamic-decay", repr(best.decay)))


def run_cache(arguments: argparse.Namespace) -> None:
    """Tune the cache, measure with and without it, print the results, and add them to the run's log."""
    _refuse_tuned_split(arguments)
    directory, config, checkpoint = options.run_to_read(arguments)
    from txl.evaluation.perplexity import evaluate_with
    from txl.evaluation.tuning import LAMBDAS, tune_cache_with

    settings = measuring.evaluation_settings(arguments, config, config.eval.batch_size)
    model, vocabulary = directory.load(checkpoint, device=options.pick_device(arguments.device))
    corpus = options.run_corpus(directory, vocabulary, arguments)
    tune_on, measured = corpus.tokens(arguments.tune_on), corpus.tokens(arguments.split)
    lambdas = arguments.lambdas or LAMBDAS
    with progress_by_part(quiet=arguments.json) as progress:
        move = partial(progress, f"tuning on the {arguments.tune_on} split")
        tuned = tune_cache_with(model, tune_on, settings, arguments.size, arguments.thetas, lambdas, move)
        move = partial(progress, f"{arguments.split} split")
        results = [evaluate_with(reader, measured, settings, move) for reader in (model, tuned.around(model))]
    measuring.refuse_not_a_number([tuned.plain_nll, *(result.nll for result in results)], checkpoint)
    tuning = asdict(tuned) | {"split": arguments.tune_on, "at_edge": tuned.at_edge}
    record(directory, EventName.CACHE, checkpoint, **tuning)
    rows = _recorded(directory, corpus, checkpoint, arguments.split, results)
    if arguments.json:
        print_json({"tuning": tuning, "without": rows[0], "with": rows[1]})
        return
    print(
        f"tuned on {tuned.tokens:,} targets of the {arguments.tune_on} split: theta {tuned.theta:g}, lambda "
        f"{tuned.weight:g}\n"
        f"nats per token there: {tuned.plain_nll:.4f} without the cache, {tuned.best_nll:.4f} with it"
    )
    measuring.print_rows(rows)
    found = ("--cache-size", str(tuned.size), "--cache-theta", repr(tuned.theta), "--cache-lambda", repr(tuned.weight))
    _print_next(arguments, tuned.at_edge, found)


def _refuse_tuned_split(arguments: argparse.Namespace) -> None:
    if arguments.split == arguments.tune_on:
        both = (Field("split"), " and ", Field("tune_on"), f" both name the split {arguments.split}")
        raise UserError(both, remedy="tune on another split than the measured one")


def _recorded(
    directory: RunDirectory, corpus: Corpus, checkpoint: Path, split: str, results: Sequence[EvaluationResult]
) -> list[Evaluation]:
    """Add results to the run's log, and return them as the log has them."""
    described = measuring.measured_on(corpus, split, checkpoint)
    rows: list[Evaluation] = [{**described, **result.to_dict()} for result in results]
    for row in rows:
        record(directory, EventName.EVAL, checkpoint, **row)
    return rows


def _print_next(arguments: argparse.Namespace, at_edge: Sequence[str], found: Sequence[str]) -> None:
    """Print what to try further, and the `txl eval` command that measures the settings found once more."""
    for name in at_edge:
        print(f"the best {name} lies at the end of the values that were tried; try more: --{name.replace(' ', '-')}s")
    given = {name: getattr(arguments, name, default) for name, default in _OF_EVAL.items()}
    given = {name: str(value) for name, value in given.items() if value != _OF_EVAL[name]}
    words = ["txl", "eval", arguments.directory, *found]
    for name, value in (given | options.config_options(arguments)).items():
        words += [f"--{name.replace('_', '-')}", value]
    print(f"to measure this again: {shlex.join(words)}")
