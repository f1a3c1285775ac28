"""`txl eval DIR`: loss of a trained model, at one or several memory lengths."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from txl.commands.arguments import pick_device, run_corpus, run_to_read
from txl.commands.evaluation_options import (
    DynamicRequest,
    add_cache_options,
    add_dynamic_options,
    add_reading_options,
    dynamic_request,
    evaluation_settings,
    load_to_adapt,
    refuse_together,
    refuse_with_sliding,
    with_cache,
    with_preset,
)
from txl.commands.evaluation_results import (
    collect_statistics,
    measured_on,
    print_rows,
    refuse_divergence,
    refuse_not_a_number,
)
from txl.commands.options import add_memory_options, add_run_options, numbers, positive
from txl.commands.output import print_json, progress_bar, record, say
from txl.commands.parser import Commands
from txl.errors import Field, UserError
from txl.files import reason_of
from txl.runs.events import EventName

if TYPE_CHECKING:
    from txl.data.prepared import Corpus, Tokens
    from txl.evaluation.dynamic import GradientStatistics
    from txl.evaluation.stream import EvaluationResult, Settings
    from txl.models.language_model import LanguageModel
    from txl.runs.directory import RunDirectory
    from txl.runs.events import Evaluation, Measured


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "eval",
        help="measure perplexity and bits per character",
        example="txl eval runs/mine --mem-lens 0,128,512",
        description="Measure a trained model on a text: perplexity, bits per character and bits per byte. The result "
        "is added to the run's log.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument(
        "--split",
        default="test",
        metavar="NAME",
        help="train, valid or test (default: test); all: the whole of a text of your own",
    )
    parser.add_argument("--mem-lens", type=numbers, metavar="M,M,...", help="measure at several memory lengths")
    add_reading_options(
        parser,
        segment="tokens of each lane in one step",
        batch="lanes: parts of the text that are read in parallel",
        max_tokens="read only the first N tokens of the split",
    )
    parser.add_argument(
        "--exhaustive",
        action="store_true",
        help="score every token but the first of the text: also the first of each lane, and those left over at the end",
    )
    parser.add_argument(
        "--sliding", type=positive, metavar="L", help="predict each token from the L tokens before it alone; slow"
    )
    add_memory_options(parser)
    add_cache_options(parser)
    add_dynamic_options(parser)
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Evaluate the model, print the results, and add them to the run's log."""
    _refuse_contradictions(arguments)
    directory, config, checkpoint = run_to_read(arguments)
    arguments = with_preset(arguments)
    dynamic = dynamic_request(arguments)
    from txl.data.pieces import WHOLE
    from txl.devices import keep_freed_memory

    keep_freed_memory()
    # With several lanes, which adapt the weights together, dynamic evaluation is a different algorithm.
    settings = evaluation_settings(arguments, config, config.eval.batch_size if dynamic is None else 1)
    if dynamic is None:
        model, vocabulary = directory.load(checkpoint, device=pick_device(arguments.device))
    else:
        model, vocabulary = load_to_adapt(directory, config, checkpoint, arguments)
    model = with_cache(model, arguments)
    corpus = run_corpus(directory, vocabulary, arguments, whole=arguments.split == WHOLE)
    tokens = corpus.tokens(arguments.split)
    statistics = None
    if dynamic is not None:
        statistics = collect_statistics(model, vocabulary, directory, corpus, dynamic, settings, arguments)
    results: list[EvaluationResult] = []
    try:
        for result in _measured(model, tokens, settings, dynamic, statistics, arguments):
            results.append(result)
    except (KeyboardInterrupt, SystemExit):
        if results:
            _finish(directory, checkpoint, corpus, results, arguments)
            say(f"stopped after {len(results)} of {len(arguments.mem_lens)} memory lengths")
        raise
    _finish(directory, checkpoint, corpus, results, arguments)


def _finish(
    directory: RunDirectory,
    checkpoint: Path,
    corpus: Corpus,
    results: list[EvaluationResult],
    arguments: argparse.Namespace,
) -> None:
    """Record and print the results."""
    refuse_not_a_number([result.nll for result in results], checkpoint)
    described, hint = describe(directory, checkpoint, corpus, results[0], arguments.split)
    rows: list[Evaluation] = [{**described, **result.to_dict()} for result in results]
    _record(directory, checkpoint, described, rows, arguments)
    _print(directory, corpus, described, rows, hint, arguments)
    if arguments.mem_lens is not None:
        draw_curve(directory.path, rows)


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Refuse options that exclude each other."""
    refuse_together(arguments, "mem_lens", ("mem_len",))
    if arguments.mem_lens is not None and arguments.window not in (None, "none"):
        expected = ("none with ", Field("mem_lens"), "; without it each memory length is its own window")
        raise UserError(field="window", value=arguments.window, expected=expected)
    refuse_with_sliding(arguments)


def _measured(
    model: LanguageModel,
    tokens: Tokens,
    settings: Settings,
    dynamic: DynamicRequest | None,
    statistics: GradientStatistics | None,
    arguments: argparse.Namespace,
) -> Iterator[EvaluationResult]:
    """Yield the result, or one for each memory length of `--mem-lens` as soon as it is there."""
    from txl.evaluation.dynamic import adapt_with
    from txl.evaluation.perplexity import evaluate_at_lengths, evaluate_with
    from txl.evaluation.sliding import WINDOWS, evaluate_sliding_with

    progress, move = progress_bar(f"{arguments.split} split", quiet=arguments.json)
    with progress:
        if dynamic is not None:
            yield refuse_divergence(adapt_with(model, tokens, dynamic.adaptation, statistics, settings, move))
        elif arguments.sliding is not None:
            windows = WINDOWS if arguments.batch is None else arguments.batch
            yield evaluate_sliding_with(model, tokens, arguments.sliding, replace(settings, batch_size=windows), move)
        elif arguments.mem_lens is None:
            yield evaluate_with(model, tokens, settings, move)
        else:
            settings = replace(settings, window=arguments.window)
            yield from evaluate_at_lengths(model, tokens, arguments.mem_lens, settings, move)


def describe(
    directory: RunDirectory, checkpoint: Path, corpus: Corpus, result: EvaluationResult, split: str
) -> tuple[Measured, str | None]:
    """Return the log's description of the measured text, and a hint for measuring all of it (None if not needed)."""
    from txl.data.corpora import is_named
    from txl.data.pieces import WHOLE
    from txl.reporting.wording import measured_part
    from txl.runs.corpus import is_trained_on

    part, hint = measured_part(corpus, split, result.tokens + result.dropped + 1), None
    if is_trained_on(directory, corpus):
        part += ", its training text included" if split == WHOLE else ""
    elif split != WHOLE and not is_named(corpus.name):
        hint = f"--split {WHOLE} measures everything"
    return {**measured_on(corpus, split, checkpoint), "measured": part}, hint


def _record(
    directory: RunDirectory,
    checkpoint: Path,
    described: Measured,
    rows: list[Evaluation],
    arguments: argparse.Namespace,
) -> None:
    """Add the results to the run's log."""
    if arguments.mem_lens is None:
        record(directory, EventName.EVAL, checkpoint, **rows[0])
    else:
        record(directory, EventName.SWEEP, checkpoint, **described, rows=rows)


def _print(
    directory: RunDirectory,
    corpus: Corpus,
    described: Measured,
    rows: list[Evaluation],
    hint: str | None,
    arguments: argparse.Namespace,
) -> None:
    """Print the results, and the measured part of the text where it is not obvious."""
    from txl.data.pieces import WHOLE
    from txl.runs.corpus import trained_unknown

    measured = "; ".join([f"measured: {described.get('measured')}", *([hint] if hint else [])])
    if arguments.json:
        if hint is not None:
            say(f"note: {measured}")
        print_json(rows[0] if arguments.mem_lens is None else {**described, "rows": rows})
        return
    print_rows(rows)
    for note in corpus.notes(arguments.split, trained_unknown(directory), directory.vocabulary()):
        say(f"note: {note}")
    if arguments.split == WHOLE or hint is not None:
        print(measured)


def draw_curve(directory: Path, rows: list[Evaluation]) -> None:
    """Draw quality against memory length, as memory-curve.svg and .png in the run directory."""
    from txl.reporting.plots import save_memory_curve

    for path in (directory / "memory-curve.svg", directory / "memory-curve.png"):
        try:
            save_memory_curve(rows, path)
        except OSError as error:
            say(f"note: {path} cannot be written ({reason_of(error)})")
            return
    say(f"curve: {directory / 'memory-curve.svg'} and .png")
