"""`txl eval DIR`: loss of a trained model, at one or several memory lengths."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from txl.commands import measuring, options
from txl.commands.output import print_json, progress_bar, record, say
from txl.commands.parser import Parser, flag, option
from txl.errors import Field, UserError
from txl.files import reason_of
from txl.runs.events import Evaluation, EventName, Measured


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "eval",
        help="measure perplexity and bits per character",
        example="txl eval runs/mine --mem-lens 0,128,512",
        description="Measure a trained model on a text: perplexity, bits per character and bits per byte. The result "
        "is added to the run's log.",
    )
    options.shared(parser, "directory")
    option(parser, "--split", "NAME", "train, valid, test; all: the whole of a text of your own", default="test")
    option(parser, "--mem-lens", "M,M,...", "measure at several memory lengths", options.numbers)
    options.shared(parser, "segment", "batch", "max_tokens", "temperature", "dtype")
    flag(parser, "--exhaustive", "score also the first token of each lane, and those left over at the end")
    option(parser, "--sliding", "L", "predict each token from the L tokens before it alone; slow", options.positive)
    options.add_memory_options(parser)
    measuring.add_cache_options(parser)
    measuring.add_dynamic_options(parser)
    options.shared(parser, "checkpoint")
    options.add_run_options(parser)
    parser.exclude("mem_lens", "mem_len")
    parser.exclude("sliding", "mem_len", "mem_lens", "window", "segment")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Evaluate the model, print the results, and add them to the run's log."""
    if arguments.mem_lens is not None and arguments.window not in (None, "none"):
        expected = ("none with ", Field("mem_lens"), "; without it each memory length is its own window")
        raise UserError(field="window", value=arguments.window, expected=expected)
    directory, config, checkpoint = options.run_to_read(arguments)
    from txl.data.corpora import is_named
    from txl.data.pieces import WHOLE
    from txl.evaluation.dynamic import adapt_with
    from txl.evaluation.perplexity import evaluate_at_lengths, evaluate_with
    from txl.evaluation.sliding import WINDOWS, evaluate_sliding_with
    from txl.evaluation.stream import EvaluationResult
    from txl.reporting.wording import measured_part
    from txl.runs.corpus import is_trained_on, trained_unknown

    arguments = measuring.with_preset(arguments)
    if arguments.dynamic is None:
        adaptation, settings = None, measuring.evaluation_settings(arguments, config, config.eval.batch_size)
        model, vocabulary = directory.load(checkpoint, device=options.pick_device(arguments.device))
    else:
        adaptation = measuring.adaptation_of(arguments, arguments.dynamic_learning_rate)
        # With several lanes, which adapt the weights together, dynamic evaluation is a different algorithm.
        settings = measuring.evaluation_settings(arguments, config, batch_size=1)
        model, vocabulary = measuring.load_to_adapt(directory, config, checkpoint, arguments)
    model, split, sweeps = measuring.with_cache(model, arguments), arguments.split, arguments.mem_lens is not None
    corpus = options.run_corpus(directory, vocabulary, arguments, whole=split == WHOLE)
    tokens, statistics = corpus.tokens(split), None
    if adaptation is not None:
        statistics = measuring.statistics_of(model, vocabulary, directory, corpus, adaptation, settings, arguments)
    results: list[EvaluationResult] = []
    stopped: BaseException | None = None
    try:
        with progress_bar(f"{split} split", quiet=arguments.json) as move:
            if sweeps:
                settings = replace(settings, window=arguments.window)
                for result in evaluate_at_lengths(model, tokens, arguments.mem_lens, settings, move):
                    results.append(result)
            elif adaptation is not None:
                results.append(adapt_with(model, tokens, adaptation, statistics, settings, move))
            elif arguments.sliding is not None:
                settings = replace(settings, batch_size=arguments.batch or WINDOWS)
                results.append(evaluate_sliding_with(model, tokens, arguments.sliding, settings, move))
            else:
                results.append(evaluate_with(model, tokens, settings, move))
    except (KeyboardInterrupt, SystemExit) as stop:
        if not results:
            raise
        stopped = stop  # the memory lengths that were measured are kept
    rate = None if adaptation is None else "dynamic_learning_rate"
    measuring.refuse_not_a_number([result.nll for result in results], checkpoint, rate)
    part, hint = measured_part(corpus, split, results[0].tokens + results[0].dropped + 1), None
    if is_trained_on(directory, corpus):
        part += ", its training text included" if split == WHOLE else ""
    elif split != WHOLE and not is_named(corpus.name):
        hint = f"--split {WHOLE} measures everything"
    described: Measured = {**measuring.measured_on(corpus, split, checkpoint), "measured": part}
    rows: list[Evaluation] = [{**described, **result.to_dict()} for result in results]
    if sweeps:
        record(directory, EventName.SWEEP, checkpoint, **described, rows=rows)
    else:
        record(directory, EventName.EVAL, checkpoint, **rows[0])
    measured = f"measured: {part}" + ("" if hint is None else f"; {hint}")
    if arguments.json:
        if hint is not None:
            say(f"note: {measured}")
        print_json({**described, "rows": rows} if sweeps else rows[0])
    else:
        measuring.print_rows(rows)
        for note in corpus.notes(split, trained_unknown(directory), directory.vocabulary()):
            say(f"note: {note}")
        if split == WHOLE or hint is not None:
            print(measured)
    if sweeps:
        _draw_curve(directory.path, rows)
    if stopped is not None:
        say(f"stopped after {len(results)} of {len(arguments.mem_lens)} memory lengths")
        raise stopped


def _draw_curve(folder: Path, rows: list[Evaluation]) -> None:
    """Draw quality against memory length, as memory-curve.svg and .png in the run directory."""
    from txl.reporting.plots import save_memory_curve

    for path in (folder / "memory-curve.svg", folder / "memory-curve.png"):
        try:
            save_memory_curve(rows, path)
        except OSError as error:
            say(f"note: {path} cannot be written ({reason_of(error)})")
            return
    say(f"curve: {folder / 'memory-curve.svg'} and .png")
