"""`txl eval DIR`: the loss of a trained model, at one memory length or many."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txl.commands.evaluations import (
    add_cache_options,
    add_dynamic_options,
    collect_statistics,
    dynamic_request,
    evaluation_settings,
    print_rows,
    refuse_divergence,
    refuse_not_a_number,
    with_cache,
    with_preset,
)
from txl.commands.options import add_memory_options, add_run_options, numbers, pick_device, run_corpus, run_to_read
from txl.commands.output import print_json, progress_bar, record, say
from txl.errors import UserError
from txl.runs.events import EventName

if TYPE_CHECKING:
    from txl.commands.options import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("eval", help="measure perplexity, bits per character and bits per byte")
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument(
        "--split",
        default="test",
        metavar="NAME",
        help="train, valid, test (default), or all: a text of yours as a whole",
    )
    add_memory_options(parser)
    parser.add_argument("--mem-lens", type=numbers, metavar="M,M,...", help="measure at several memory lengths")
    parser.add_argument("--segment", type=int, metavar="T", help="tokens of a lane in one step")
    parser.add_argument("--batch", type=int, metavar="B", help="lanes read in parallel")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="read only the first N tokens of the split")
    parser.add_argument("--temperature", type=float, metavar="X", help="of the softmax (default: the run's)")
    parser.add_argument(
        "--sliding", type=int, metavar="L", help="predict each token from a window of L tokens of its own, recomputed"
    )
    add_cache_options(parser)
    add_dynamic_options(parser)
    parser.add_argument("--exhaustive", action="store_true", help="score also the targets that equal lanes drop")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="arithmetic (autocast)")
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Evaluate, print, and add the result to the run's log."""
    _refuse_contradictions(arguments)
    directory, config, checkpoint = run_to_read(arguments)
    arguments = with_preset(arguments)
    dynamic = dynamic_request(arguments)
    from txl.allocator import keep_freed_memory
    from txl.data.corpora import is_named
    from txl.data.sources import WHOLE
    from txl.evaluation.dynamic import evaluate_dynamically
    from txl.evaluation.perplexity import evaluate, evaluate_memory_lengths
    from txl.evaluation.sliding import evaluate_sliding
    from txl.reporting.wording import measured_part
    from txl.runs.corpus import is_trained_on, trained_unknown, training_tokens

    keep_freed_memory()
    model, vocabulary = directory.load(checkpoint, device=pick_device(arguments.device))
    model = with_cache(model, arguments)
    whole = arguments.split == WHOLE
    corpus = run_corpus(directory, vocabulary, arguments, whole)
    tokens = corpus.tokens(arguments.split)

    # With more lanes, dynamic evaluation is another algorithm.
    settings = evaluation_settings(arguments, config, 1 if dynamic is not None else config.eval.batch_size)
    read = {"max_tokens": arguments.max_tokens, "exhaustive": arguments.exhaustive}
    statistics = None
    if dynamic is not None:
        training_split = partial(
            training_tokens, directory, vocabulary, corpus, data_dir=arguments.data_dir, quiet=arguments.json
        )
        statistics = collect_statistics(model, training_split, dynamic, settings, quiet=arguments.json)
    progress, move = progress_bar(f"{arguments.split} split", quiet=arguments.json)
    with progress:
        if dynamic is not None:
            adapted = evaluate_dynamically(
                model, tokens, dynamic.adaptation, statistics, **settings, **read, progress=move
            )
            results = [refuse_divergence(adapted)]
        elif arguments.sliding is not None:
            sliding = {name: settings[name] for name in ("dtype", "temperature", "clamp_len")}
            if arguments.batch is not None:
                sliding["batch_size"] = arguments.batch
            results = [
                evaluate_sliding(
                    model,
                    tokens,
                    context=arguments.sliding,
                    max_tokens=arguments.max_tokens,
                    **sliding,
                    progress=move,
                )
            ]
        elif arguments.mem_lens is None:
            results = [evaluate(model, tokens, **settings, **read, progress=move)]
        else:
            del settings["mem_len"]
            settings["window"] = arguments.window
            results = evaluate_memory_lengths(model, tokens, arguments.mem_lens, **settings, **read, progress=move)
    refuse_not_a_number([result.nll for result in results], checkpoint)

    part, hint = measured_part(corpus, arguments.split, results[0].tokens + results[0].dropped + 1), None
    if is_trained_on(directory, corpus):
        part += ", its training text included" if whole else ""
    elif not whole and not is_named(corpus.name):
        hint = f"--split {WHOLE} measures everything"
    described = {
        "split": arguments.split,
        "corpus": corpus.name,
        "unit": corpus.unit,
        "sha256_text": corpus.info()["splits"][arguments.split]["sha256_text"],
        "checkpoint": checkpoint.name,
        "measured": part,
    }
    rows = [described | result.to_dict() for result in results]
    if arguments.mem_lens is None:
        record(directory, EventName.EVAL, checkpoint, **rows[0])
        shown: dict[str, Any] = rows[0]
    else:
        record(directory, EventName.SWEEP, checkpoint, **described, rows=rows)
        shown = described | {"rows": rows}
    if arguments.json:
        if hint is not None:
            say(f"note: measured: {part}; {hint}")
        print_json(shown)
    else:
        print_rows(rows)
        for note in corpus.notes(arguments.split, trained_unknown(directory)):
            say(f"note: {note}")
        if whole or hint is not None:
            print("; ".join(["measured: " + part, *([hint] if hint else [])]))
    if arguments.mem_lens is not None:
        _draw_curve(directory.path, rows)


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Refuse options that exclude each other."""
    if arguments.mem_lens is not None and arguments.mem_len is not None:
        raise UserError("--mem-len and --mem-lens were both given; expected one of them")
    if arguments.mem_lens is not None and arguments.window not in (None, "none"):
        raise UserError("--window with --mem-lens can only be none; without it each memory length is its own window")
    for name in ("mem_len", "mem_lens", "window", "segment"):
        if arguments.sliding is not None and getattr(arguments, name) is not None:
            raise UserError(f"--sliding and --{name.replace('_', '-')} were both given; a sliding window has none")


def _draw_curve(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Draw quality against memory length, as memory-curve.svg and .png in the run directory."""
    from txl.reporting.plots import save_memory_curve

    try:
        for ending in ("svg", "png"):
            save_memory_curve(rows, directory / f"memory-curve.{ending}")
        say(f"curve: {directory / 'memory-curve.svg'} and .png")
    except OSError as error:
        say(f"note: the curve was not drawn ({error})")
