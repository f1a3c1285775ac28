"""`txl dynamic DIR`: tune dynamic evaluation on the validation split, and measure what it brings on the test split."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

from txl.commands.dynamic_options import (
    BATCH,
    SEGMENTS,
    DynamicRequest,
    add_rule_options,
    collect_statistics,
    refuse_divergence,
    refuse_statistics,
)
from txl.commands.evaluate import (
    add_cache_options,
    checkpoint_step,
    open_run_corpus,
    print_rows,
    record,
    refuse_not_a_number,
    split_tokens,
    training_tokens,
    with_cache,
)
from txl.commands.options import (
    add_checkpoint,
    add_config_options,
    add_data_dir,
    add_device,
    add_json,
    add_memory_options,
    config_options,
    existing_run,
    memory_settings,
    pick_device,
    print_json,
    progress_bar,
)
from txl.errors import UserError
from txl.runs.events import EventName

if TYPE_CHECKING:
    from txl.evaluation.dynamic_tuning import DynamicTuning

_OF_EVAL = {
    "split": "test",
    **dict.fromkeys(("mem_len", "window", "clamp_len", "segment", "batch", "max_tokens", "temperature")),
    **dict.fromkeys(("cache_size", "cache_theta", "cache_lambda")),
    "dtype": "float32",
    **dict.fromkeys(("checkpoint", "data_dir", "device")),
}
"""Options that `txl eval` has too, with their defaults, which are the same there."""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "dynamic",
        help="tune dynamic evaluation (Krause et al. 2018, 2019) and measure it",
        description="Find learning rate and decay of dynamic evaluation on the validation split, then measure the test "
        "split with and without it.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument("--rule", choices=("rms", "sgd"), default="rms", help="default: rms")
    parser.add_argument("--learning-rates", type=_fractions, metavar="X,X,...", help="to try (default: many)")
    parser.add_argument("--decays", type=_fractions, metavar="X,X,...", help="to try (default: 0 to 0.1)")
    add_rule_options(parser, "")
    parser.add_argument("--split", default="test", metavar="NAME", help="to measure (default: test)")
    parser.add_argument("--tune-on", default="valid", metavar="NAME", help="split to tune on (default: valid)")
    parser.add_argument("--tune-tokens", type=int, metavar="N", help="read only its first N tokens")
    add_memory_options(parser)
    parser.add_argument("--segment", type=int, metavar="T", help="tokens between two updates")
    parser.add_argument("--batch", type=int, metavar="B", help="lanes that adapt the weights together (1)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="measure only the first N tokens of the split")
    parser.add_argument("--temperature", type=float, metavar="X", help="of the softmax (default: the run's)")
    add_cache_options(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="arithmetic (autocast)")
    add_config_options(parser, ("data",))
    add_checkpoint(parser)
    add_data_dir(parser)
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _fractions(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


_fractions.__name__ = "list of numbers"  # argparse names a type by its function when it refuses a value


def run(arguments: argparse.Namespace) -> None:
    """Tune, measure, print, and add the results to the run's log."""
    from txl.allocator import keep_freed_memory
    from txl.evaluation.dynamic import Adaptation, evaluate_dynamically
    from txl.evaluation.dynamic_tuning import DECAYS, tune_dynamic
    from txl.evaluation.perplexity import evaluate
    from txl.runs.directory import RunDirectory

    if arguments.split == arguments.tune_on:
        raise UserError(
            f"--split and --tune-on are both {arguments.split}; what is tuned on a split is not measured there"
        )
    if arguments.rule == "sgd":
        refuse_statistics(arguments, "")
    given = {name: getattr(arguments, name) for name in ("epsilon", "weights") if getattr(arguments, name) is not None}
    request = DynamicRequest(
        Adaptation(arguments.rule, learning_rate=0.0, **given),
        getattr(arguments, "statistics_segments", SEGMENTS),
        BATCH if arguments.statistics_batch is None else arguments.statistics_batch,
    )
    keep_freed_memory()
    directory = RunDirectory(existing_run(arguments.directory))
    config = directory.config()
    checkpoint = directory.checkpoint(arguments.checkpoint)
    model, vocabulary = directory.load(checkpoint, device=pick_device(arguments.device))
    model = with_cache(model, arguments)
    corpus = open_run_corpus(directory, vocabulary, arguments)
    tune_on, measured = (split_tokens(corpus, name) for name in (arguments.tune_on, arguments.split))
    common = {
        "segment": config.eval.segment if arguments.segment is None else arguments.segment,
        "batch_size": 1 if arguments.batch is None else arguments.batch,
        "dtype": arguments.dtype,
        "temperature": config.eval.temperature if arguments.temperature is None else arguments.temperature,
        **memory_settings(arguments, config),
    }
    training_split = partial(training_tokens, directory, vocabulary, corpus, arguments)
    statistics = collect_statistics(model, training_split, request, common, quiet=arguments.json)
    progress, move = progress_bar(f"tuning on the {arguments.tune_on} split", quiet=arguments.json)
    with progress:
        tuned = tune_dynamic(
            model,
            tune_on,
            request.adaptation,
            statistics,
            learning_rates=arguments.learning_rates,
            decays=DECAYS if arguments.decays is None else arguments.decays,
            max_tokens=arguments.tune_tokens,
            progress=move,
            **common,
        )
    refuse_not_a_number([tuned.static_nll], checkpoint)
    progress, move = progress_bar(f"{arguments.split} split", quiet=arguments.json)
    with progress:
        static = evaluate(model, measured, max_tokens=arguments.max_tokens, **common, progress=move)
        adapted = refuse_divergence(
            evaluate_dynamically(
                model,
                measured,
                tuned.adaptation,
                statistics,
                max_tokens=arguments.max_tokens,
                **common,
                progress=move,
            )
        )
    refuse_not_a_number([static.nll], checkpoint)
    described = {
        "split": arguments.split,
        "corpus": corpus.name,
        "unit": corpus.unit,
        "unknown": corpus.info()["splits"][arguments.split]["unknown"],
        "checkpoint": checkpoint.name,
    }
    rows = [described | result.to_dict() for result in (static, adapted)]
    cost = static.tokens_per_second / adapted.tokens_per_second
    tuning = tuned.to_dict() | {"split": arguments.tune_on}
    step = checkpoint_step(checkpoint)
    record(directory, EventName.DYNAMIC, step, **tuning)
    for row in rows:
        record(directory, EventName.EVAL, step, **row)
    if arguments.json:
        print_json({"tuning": tuning, "static": rows[0], "dynamic": rows[1], "times_static": cost})
        return
    _print(arguments, tuned, rows, cost)


def _print(arguments: argparse.Namespace, tuned: DynamicTuning, rows: list[dict[str, Any]], cost: float) -> None:
    best = tuned.adaptation
    print(
        f"tuned on {tuned.tokens:,} targets of the {arguments.tune_on} split: learning rate {best.learning_rate:g}, "
        f"decay {best.decay:g} ({tuned.static_nll:.4f} -> {tuned.best_nll:.4f} nats a token, {len(tuned.tried)} tried)"
    )
    for name in tuned.at_edge:
        print(f"the best {name} is at an end of those that may be tried; give others: --{name.replace(' ', '-')}s")
    for row in rows:
        print_rows([row])
    print(f"scoring and adapting took {cost:.1f} times as long as scoring")
    print(f"the same again: {shlex.join(_again(arguments, tuned))}")


def _again(arguments: argparse.Namespace, tuned: DynamicTuning) -> list[str]:
    """The words of the command that evaluates with what was found, on the same tokens in the same way."""
    words = ["txl", "eval", arguments.directory, "--dynamic", arguments.rule]
    words += ["--dynamic-learning-rate", repr(tuned.adaptation.learning_rate)]
    words += ["--dynamic-decay", repr(tuned.adaptation.decay)]
    for name in ("epsilon", "weights", "statistics_segments", "statistics_batch"):
        if getattr(arguments, name, None) is not None:
            words += [f"--dynamic-{name.replace('_', '-')}", str(getattr(arguments, name))]
    if getattr(arguments, "statistics_segments", SEGMENTS) is None:
        words += ["--dynamic-statistics-segments", "all"]
    for name, default in _OF_EVAL.items():
        value = getattr(arguments, name)
        if value != default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name, value in config_options(arguments).items():
        words += [f"--{name.replace('_', '-')}", value]
    return words
