"""`txl dynamic DIR`: tune dynamic evaluation on the validation split, and measure its gain on the test split."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, get_args

from txl.commands.arguments import run_corpus, run_to_read
from txl.commands.evaluation_options import (
    BATCH,
    DynamicRequest,
    add_cache_options,
    add_reading_options,
    add_rule_options,
    add_splits,
    eval_command,
    evaluation_settings,
    fractions,
    load_to_adapt,
    refuse_statistics,
    refuse_tuned_split,
    segments_read,
    with_cache,
)
from txl.commands.evaluation_results import (
    collect_statistics,
    measured_on,
    print_rows,
    refuse_divergence,
    refuse_not_a_number,
)
from txl.commands.options import add_memory_options, add_run_options
from txl.commands.output import ProgressByPart, print_json, record
from txl.commands.parser import Commands
from txl.config import AdaptationRule
from txl.errors import UserError
from txl.runs.events import Evaluation, EventName

if TYPE_CHECKING:
    from txl.evaluation.dynamic_tuning import DynamicTuning


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "dynamic",
        help="find settings of dynamic evaluation, and measure it",
        example="txl dynamic runs/mine --rule sgd",
        description="Find a learning rate and a decay for dynamic evaluation (Krause et al. 2018, 2019) on the "
        "validation split, then measure the test split with and without it. Dynamic evaluation scores a segment of "
        "the text, then adapts a copy of the weights to it.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument(
        "--rule",
        choices=get_args(AdaptationRule),
        default="rms",
        help="how weights adapt, see txl eval --help (default: rms)",
    )
    parser.add_argument("--learning-rates", type=fractions, metavar="X,X,...", help="to try (default: a wide range)")
    parser.add_argument("--decays", type=fractions, metavar="X,X,...", help="to try (default: 0 to 0.1)")
    add_rule_options(parser, "")
    add_splits(parser)
    parser.add_argument("--tune-tokens", type=int, metavar="N", help="tune on its first N tokens alone")
    add_reading_options(
        parser,
        segment="tokens between two updates",
        batch="lanes that adapt the weights together (default: 1, as published)",
        max_tokens="measure only the first N tokens of the split",
    )
    add_memory_options(parser)
    add_cache_options(parser)
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Tune dynamic evaluation, measure with and without it, print the results, and add them to the run's log."""
    refuse_tuned_split(arguments)
    if arguments.rule == "sgd":
        refuse_statistics(arguments, "")
    if arguments.tune_tokens is not None and arguments.tune_tokens < 2:
        raise UserError(field="tune_tokens", value=arguments.tune_tokens, expected="2 or more")
    directory, config, checkpoint = run_to_read(arguments)
    from txl.devices import keep_freed_memory
    from txl.evaluation.dynamic import Adaptation, adapt_with
    from txl.evaluation.dynamic_tuning import DECAYS, tune_dynamic_with
    from txl.evaluation.perplexity import evaluate_with

    given = {name: getattr(arguments, name) for name in ("epsilon", "weights") if getattr(arguments, name) is not None}
    request = DynamicRequest(
        Adaptation(arguments.rule, learning_rate=0.0, **given),
        segments_read(arguments.statistics_segments),
        BATCH if arguments.statistics_batch is None else arguments.statistics_batch,
    )
    keep_freed_memory()
    settings = evaluation_settings(arguments, config, batch_size=1)
    model, vocabulary = load_to_adapt(directory, config, checkpoint, arguments)
    model = with_cache(model, arguments)
    corpus = run_corpus(directory, vocabulary, arguments)
    tune_on, measured = corpus.tokens(arguments.tune_on), corpus.tokens(arguments.split)
    statistics = collect_statistics(model, vocabulary, directory, corpus, request, settings, arguments)
    with ProgressByPart(quiet=arguments.json) as progress:
        tuned = tune_dynamic_with(
            model,
            tune_on,
            request.adaptation,
            statistics,
            replace(settings, max_tokens=arguments.tune_tokens),
            arguments.learning_rates,
            DECAYS if arguments.decays is None else arguments.decays,
            partial(progress, f"tuning on the {arguments.tune_on} split"),
        )
        move = partial(progress, f"{arguments.split} split")
        static = evaluate_with(model, measured, settings, move)
        adapted = adapt_with(model, measured, tuned.adaptation, statistics, settings, move)
    refuse_not_a_number([static.nll], checkpoint)
    described = measured_on(corpus, arguments.split, checkpoint)
    rows: list[Evaluation] = [{**described, **result.to_dict()} for result in (static, adapted)]
    tuning = tuned.to_dict() | {"split": arguments.tune_on}
    record(directory, EventName.DYNAMIC, checkpoint, **tuning)
    refuse_divergence(adapted, "learning_rates")
    for row in rows:
        record(directory, EventName.EVAL, checkpoint, **row)
    times_static = static.tokens_per_second / adapted.tokens_per_second
    if arguments.json:
        print_json({"tuning": tuning, "static": rows[0], "dynamic": rows[1], "times_static": times_static})
        return
    _print(arguments, tuned, rows)
    print(f"with it, the test took {times_static:.1f} times as long")
    print(f"to measure this again: {eval_command(arguments, _options(arguments, tuned))}")


def _print(arguments: argparse.Namespace, tuned: DynamicTuning, rows: list[Evaluation]) -> None:
    from txl.reporting.wording import counted

    best = tuned.adaptation
    print(
        f"tuned on {tuned.tokens:,} targets of the {arguments.tune_on} split, {counted(len(tuned.tried), 'setting')} "
        f"tried: learning rate {best.learning_rate:g}, decay {best.decay:g}\n"
        f"nats per token there: {tuned.static_nll:.4f} without it, {tuned.best_nll:.4f} with it"
    )
    for name in tuned.at_edge:
        print(f"the best {name} lies at the end of the values that were tried; try more: --{name.replace(' ', '-')}s")
    for row in rows:
        print_rows([row])


def _options(arguments: argparse.Namespace, tuned: DynamicTuning) -> list[str]:
    """Return the options of `txl eval` with the settings found."""
    best = tuned.adaptation
    words = ["--dynamic", arguments.rule, "--dynamic-learning-rate", repr(best.learning_rate)]
    words += ["--dynamic-decay", repr(best.decay)]
    for name in ("epsilon", "weights", "statistics_segments", "statistics_batch"):
        if getattr(arguments, name) is not None:
            words += [f"--dynamic-{name.replace('_', '-')}", str(getattr(arguments, name))]
    return words
