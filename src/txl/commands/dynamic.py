"""`txl dynamic DIR`: tune dynamic evaluation on the validation split, and measure its gain on the test split."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, get_args

from txl.commands.arguments import run_corpus, run_to_read
from txl.commands.evaluation_options import (
    BATCH,
    DynamicRequest,
    add_cache_options,
    add_rule_options,
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
from txl.commands.options import add_dtype, add_memory_options, add_run_options
from txl.commands.output import ProgressByPart, print_json, record
from txl.commands.parser import Commands
from txl.config import AdaptationRule
from txl.errors import UserError
from txl.runs.events import Evaluation, EventName

if TYPE_CHECKING:
    from txl.evaluation.dynamic_tuning import DynamicGain


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
    parser.add_argument("--split", default="test", metavar="NAME", help="split to measure (default: test)")
    parser.add_argument("--tune-on", default="valid", metavar="NAME", help="split to tune on (default: valid)")
    parser.add_argument("--tune-tokens", type=int, metavar="N", help="tune on its first N tokens alone")
    parser.add_argument("--segment", type=int, metavar="T", help="tokens between two updates")
    parser.add_argument(
        "--batch", type=int, metavar="B", help="lanes that adapt the weights together (default: 1, as published)"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="measure only the first N tokens of the split")
    parser.add_argument("--temperature", type=float, metavar="X", help="softmax temperature (default: the run's)")
    add_dtype(parser)
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
        raise UserError(f"--tune-tokens is {arguments.tune_tokens}; expected 2 or more")
    directory, config, checkpoint = run_to_read(arguments)
    from txl.allocator import keep_freed_memory
    from txl.evaluation.dynamic import Adaptation
    from txl.evaluation.dynamic_tuning import DECAYS, measure_dynamic
    from txl.runs.corpus import training_tokens

    given = {name: getattr(arguments, name) for name in ("epsilon", "weights") if getattr(arguments, name) is not None}
    request = DynamicRequest(
        Adaptation(arguments.rule, learning_rate=0.0, **given),
        segments_read(arguments.statistics_segments),
        BATCH if arguments.statistics_batch is None else arguments.statistics_batch,
    )
    keep_freed_memory()
    model, vocabulary = load_to_adapt(directory, config, checkpoint, arguments)
    model = with_cache(model, arguments)
    corpus = run_corpus(directory, vocabulary, arguments)
    tune_on, measured = corpus.tokens(arguments.tune_on), corpus.tokens(arguments.split)
    settings = evaluation_settings(arguments, config, batch_size=1)
    training_split = partial(
        training_tokens, directory, vocabulary, corpus, data_dir=arguments.data_dir, quiet=arguments.json
    )
    statistics = collect_statistics(model, training_split, request, settings, quiet=arguments.json)
    with ProgressByPart(quiet=arguments.json) as progress:
        found = measure_dynamic(
            model,
            tune_on,
            measured,
            request.adaptation,
            statistics,
            learning_rates=arguments.learning_rates,
            decays=DECAYS if arguments.decays is None else arguments.decays,
            tune_tokens=arguments.tune_tokens,
            max_tokens=arguments.max_tokens,
            tuning_progress=partial(progress, f"tuning on the {arguments.tune_on} split"),
            progress=partial(progress, f"{arguments.split} split"),
            **settings,
        )
    refuse_not_a_number([found.static.nll], checkpoint)
    described = measured_on(corpus, arguments.split, checkpoint)
    rows: list[Evaluation] = [{**described, **result.to_dict()} for result in (found.static, found.adapted)]
    tuning = found.tuning.to_dict() | {"split": arguments.tune_on}
    record(directory, EventName.DYNAMIC, checkpoint, **tuning)
    refuse_divergence(found.adapted, "--learning-rates")
    for row in rows:
        record(directory, EventName.EVAL, checkpoint, **row)
    if arguments.json:
        print_json({"tuning": tuning, "static": rows[0], "dynamic": rows[1], "times_static": found.times_static})
        return
    _print(arguments, found, rows)


def _print(arguments: argparse.Namespace, found: DynamicGain, rows: list[Evaluation]) -> None:
    from txl.reporting.wording import counted

    tuned = found.tuning
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
    print(f"with it, the test took {found.times_static:.1f} times as long")
    words = ["--dynamic", arguments.rule, "--dynamic-learning-rate", repr(best.learning_rate)]
    words += ["--dynamic-decay", repr(best.decay)]
    for name in ("epsilon", "weights", "statistics_segments", "statistics_batch"):
        if getattr(arguments, name) is not None:
            words += [f"--dynamic-{name.replace('_', '-')}", str(getattr(arguments, name))]
    print(f"to measure this again: {eval_command(arguments, words)}")
