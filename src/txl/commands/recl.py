"""`txl recl DIR DIR ...`: the relative effective context length of a group of models (Section 4.3, Appendix C)."""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txl.commands.options import (
    absolute_path,
    add_config_options,
    add_data_dir,
    add_device,
    add_json,
    config_options,
    existing_run,
    pick_device,
    print_json,
    progress_bar,
    say,
)
from txl.errors import UserError

if TYPE_CHECKING:
    from txl.run_directory import RunDirectory


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("recl", help="measure how much context each model of a group still gains from")
    parser.add_argument("directories", metavar="DIR", nargs="+", help="run directories with the same vocabulary")
    parser.add_argument("--split", default="test", metavar="NAME", help="train, valid or test (default: test)")
    parser.add_argument("--step", type=int, default=64, metavar="N", help="tokens between context lengths (64)")
    parser.add_argument("--longest", type=int, default=512, metavar="N", help="the longest context length (512)")
    parser.add_argument("--targets", type=int, default=1000, metavar="N", help="targets, spread over the split (1000)")
    parser.add_argument(
        "--r", type=_fractions, default=[0.1, 0.5, 1.0], metavar="R,R,...", help="fractions of the hardest targets"
    )
    parser.add_argument("--threshold", type=float, default=0.01, metavar="G", help="least relative gain (0.01)")
    parser.add_argument("--batch", type=int, default=16, metavar="B", help="windows computed at once (16)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="arithmetic (autocast)")
    parser.add_argument("--out", metavar="FOLDER", help="write recl.html, its figures and recl.json there")
    add_config_options(parser, ("data",))
    add_data_dir(parser)
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _fractions(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers with commas between them") from None


def run(arguments: argparse.Namespace) -> None:
    """Score every model at every context length, and print what follows."""
    from txl.allocator import keep_freed_memory
    from txl.commands.evaluate import open_run_corpus, split_tokens
    from txl.evaluation.sliding import losses_at_context
    from txl.run_directory import RunDirectory

    lengths = _lengths(arguments)
    paths = [existing_run(each) for each in arguments.directories]
    names = [path.name if [other.name for other in paths].count(path.name) == 1 else str(path) for path in paths]
    if len(set(names)) < len(names):
        raise UserError(f"a run directory was given twice: {', '.join(names)}; expected different ones")
    _check_corpora([RunDirectory(path) for path in paths], arguments)
    folder = _folder(arguments.out)
    keep_freed_memory()
    device = pick_device(arguments.device)
    tokens, shared, corpus, targets, parameters = None, None, None, range(0), {}
    losses: dict[str, dict[int, Any]] = {}
    for name, path in zip(names, paths, strict=True):
        directory = RunDirectory(path)
        model, vocabulary = directory.load(device=device)
        if tokens is None:
            shared, corpus = vocabulary, open_run_corpus(directory, vocabulary, arguments)
            tokens = split_tokens(corpus, arguments.split)
            targets = _spread(len(tokens), lengths[-1], arguments)
        if vocabulary != shared:
            raise UserError(f"{path} has another vocabulary than {paths[0]}; their losses cannot be compared")
        parameters[name] = sum(parameter.numel() for parameter in model.parameters())
        losses[name] = {}
        for length in lengths:
            progress, move = progress_bar(f"{name}, {length} tokens", quiet=arguments.json)
            with progress:
                losses[name][length] = losses_at_context(
                    model,
                    tokens,
                    context=length,
                    targets=targets,
                    batch_size=arguments.batch,
                    dtype=arguments.dtype,
                    progress=move,
                )
    assert corpus is not None  # there is a run
    result = _result(names, parameters, losses, arguments) | {"corpus": corpus.name}
    if folder is not None:
        from txl.reporting.recl_page import write_recl

        folder.mkdir(parents=True, exist_ok=True)
        *_, page = write_recl(folder, result, ["txl", *sys.argv[1:]])
        say(f"page: {page}")
    if arguments.json:
        print_json(result)
    else:
        _print(result)


def _check_corpora(directories: list[RunDirectory], arguments: argparse.Namespace) -> None:
    """Runs of different corpora need to be told which text they are compared on.

    Raises:
        UserError: if they are not told.
    """
    if config_options(arguments):
        return
    trained_on: dict[str, RunDirectory] = {}
    for directory in directories:
        started = [event for event in directory.events() if event["event"] == "start"]
        identity = started[-1].get("corpus", {}).get("identity") if started else None
        trained_on.setdefault(identity or absolute_path(directory.config().data.corpus), directory)
    if len(trained_on) > 1:
        described = ", ".join(f"{each.path} {each.config().data.corpus or 'no'}" for each in trained_on.values())
        raise UserError(f"the runs have different corpora ({described}); say which to compare on: --data.corpus NAME")


def _folder(out: str | None) -> Path | None:
    """Where the page goes, refused before anything is computed."""
    if out is None:
        return None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {out} is a file; expected a folder")
    return folder


def _result(
    names: list[str], parameters: dict[str, int], losses: dict[str, dict[int, Any]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Everything that was found, ready for JSON."""
    from txl.evaluation.effective_context import perplexity_gains, relative_effective_context_length, relative_gains

    lengths = sorted(losses[names[0]])
    pairs = [(short, long) for short in lengths for long in lengths if long > short]
    found = {r: relative_effective_context_length(losses, r, arguments.threshold) for r in arguments.r}

    def gains(function: Any, chosen: Any) -> dict[str, list[dict[str, Any]]]:
        return {
            str(r): [{"short": short, "long": long, "gain": function(losses, short, long, r)} for short, long in chosen]
            for r in arguments.r
        }

    return {
        "split": arguments.split,
        "targets": len(losses[names[0]][lengths[0]]),
        "context_lengths": lengths,
        "threshold": arguments.threshold,
        "models": [
            {
                "name": name,
                "parameters": parameters[name],
                "recl": {str(r): each[name] for r, each in found.items()},
                "ppl": {str(length): values.mean().exp().item() for length, values in losses[name].items()},
            }
            for name in names
        ],
        "relative_gains": gains(relative_gains, list(pairwise(lengths))),
        "perplexity_gains": gains(perplexity_gains, pairs),
    }


def _lengths(arguments: argparse.Namespace) -> list[int]:
    """step, 2 * step, ... up to the longest."""
    for name in ("step", "longest", "targets", "batch"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} is {getattr(arguments, name)}; expected 1 or more")
    if arguments.longest < 2 * arguments.step:
        raise UserError(
            f"--longest is {arguments.longest} and --step {arguments.step}; expected two context lengths or more"
        )
    for r in arguments.r:
        if not 0 < r <= 1:
            raise UserError(f"--r has {r}; expected fractions above 0 and at most 1")
    return list(range(arguments.step, arguments.longest + 1, arguments.step))


def _spread(n_token: int, longest: int, arguments: argparse.Namespace) -> range:
    """Targets at equal distances over the whole split, each with the longest context before it."""
    room = n_token - longest
    if room < arguments.targets:
        raise UserError(
            f"{arguments.targets} targets behind {longest} tokens do not fit into the {n_token:,} tokens of the "
            f"{arguments.split} split; lower --targets or --longest"
        )
    step = room // arguments.targets
    return range(longest, longest + step * arguments.targets, step)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, models = Console(), result["models"]
    heading = f"{result['split']} split, {result['targets']:,} targets"
    table = Table(title=f"relative effective context length, {heading}")
    table.add_column("model")
    for column in ("parameters", *(f"r = {r}" for r in result["relative_gains"])):
        table.add_column(column, justify="right")
    for each in models:
        table.add_row(each["name"], f"{each['parameters']:,}", *(f"{length:,}" for length in each["recl"].values()))
    console.print(table)
    table = Table(title="perplexity by context length")
    table.add_column("context", justify="right")
    for each in models:
        table.add_column(each["name"], justify="right")
    for length in result["context_lengths"]:
        table.add_row(f"{length:,}", *(f"{each['ppl'][str(length)]:.3f}" for each in models))
    console.print(table)
    print("Table 8 compares groups of the same parameter budget; the largest length means that gains never stopped")
