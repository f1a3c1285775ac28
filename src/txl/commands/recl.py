"""`txl recl DIR DIR ...`: the relative effective context length of a group of models (Section 4.3, Appendix C)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from txl.commands.arguments import (
    clamp_setting,
    existing_run,
    pick_device,
    run_corpus,
    writable_folder,
)
from txl.commands.config_options import add_config_options, config_options
from txl.commands.evaluation_options import fractions
from txl.commands.options import add_data_dir, add_device, add_dtype, add_json, add_out, limit, positive
from txl.commands.output import print_json, print_table, progress_bar, say
from txl.commands.parser import Commands
from txl.config import TransformerXLConfig
from txl.errors import Field, UserError
from txl.files import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

    from txl.models.family import FamilyModel
    from txl.runs.directory import RunDirectory


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "recl",
        help="measure how long a context each of several models makes use of",
        example="txl recl runs/small runs/large --targets 500",
        description="Measure the relative effective context length of a group of models (Section 4.3, Appendix C): the "
        "context length beyond which a model's loss no longer improves, compared with the best model of the group.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", help="run directories with the same vocabulary")
    parser.add_argument("--split", default="test", metavar="NAME", help="train, valid or test (default: test)")
    parser.add_argument(
        "--step", type=positive, default=64, metavar="N", help="tokens between context lengths (default: 64)"
    )
    parser.add_argument(
        "--longest", type=positive, default=512, metavar="N", help="longest context (default: 512 tokens)"
    )
    parser.add_argument(
        "--targets",
        type=positive,
        default=1000,
        metavar="N",
        help="least number of tokens to predict, spread over the split (default: 1000)",
    )
    parser.add_argument(
        "--r",
        type=fractions,
        default=[0.1, 0.5, 1.0],
        metavar="R,R,...",
        help="shares of the targets, the hardest first (default: 0.1,0.5,1.0)",
    )
    parser.add_argument(
        "--threshold", type=float, default=0.01, metavar="G", help="least relative gain that counts (default: 0.01)"
    )
    parser.add_argument(
        "--clamp-len", type=limit, metavar="C", help="distances above C count as C, or none (default: the run's)"
    )
    parser.add_argument(
        "--window",
        type=limit,
        default="none",
        metavar="W",
        help="keys that a Transformer-XL's token sees, itself included; none: all of the context (default: none)",
    )
    parser.add_argument(
        "--batch", type=positive, default=16, metavar="B", help="contexts read in parallel (default: 16)"
    )
    add_dtype(parser)
    add_out(parser, "DIR", "write a page there: recl.html, its figures, recl.json")
    add_device(parser)
    add_json(parser)
    text = parser.group("text (default: the runs' own)")
    add_config_options(parser, ("data",), short=("data.corpus",), first=text)
    add_data_dir(text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Score every model at every context length, and print the relative effective context lengths.

    Scoring large models takes hours, so all checks are made before scoring begins.
    """
    paths = [existing_run(directory) for directory in arguments.directories]
    short = [path.resolve().name for path in paths]
    names = [name if short.count(name) == 1 else str(path) for name, path in zip(short, paths, strict=True)]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"a run directory was given twice: {', '.join(names)}; expected different ones")
    lengths = _lengths(arguments)
    folder = None if arguments.out is None else writable_folder(arguments.out)
    from txl.runs.directory import RunDirectory

    directories = [RunDirectory(path) for path in paths]
    from txl.runs.corpus import refuse_different_corpora, shared_vocabulary

    vocabulary = shared_vocabulary(directories)
    if "data.corpus" not in config_options(arguments):
        refuse_different_corpora(directories)
    corpus = run_corpus(directories[0], vocabulary, arguments)
    tokens = corpus.tokens(arguments.split)
    targets = _targets(len(tokens), lengths[-1], arguments)
    from txl.devices import keep_freed_memory
    from txl.evaluation.effective_context import group_record
    from txl.evaluation.sliding import losses_at_contexts

    keep_freed_memory()
    device = pick_device(arguments.device)
    clamps, windows = _clamps(directories, arguments.clamp_len), _windows(directories, arguments.window)
    # All models are loaded before the first is scored, so that a damaged one is found now and not after hours.
    models = [directory.load(device=device)[0] for directory in directories]
    described = [_described(*each) for each in zip(names, paths, models, clamps, windows, strict=True)]
    losses: dict[str, dict[int, Tensor]] = {}
    for name, clamp_len, window in zip(names, clamps, windows, strict=True):
        progress, move = progress_bar(name, quiet=arguments.json)
        with progress:
            losses[name] = losses_at_contexts(
                models.pop(0),
                tokens,
                contexts=lengths,
                targets=targets,
                batch_size=arguments.batch,
                window=window,
                clamp_len=clamp_len,
                dtype=arguments.dtype,
                progress=move,
            )
    result = {"split": arguments.split, **group_record(described, losses, arguments.r, arguments.threshold)}
    result["corpus"] = corpus.name
    # Scoring took hours: print the results before anything else can fail.
    if arguments.json:
        print_json(result)
    else:
        _print(result)
    if folder is not None:
        from txl.reporting.recl_page import write_recl

        folder.mkdir(parents=True, exist_ok=True)
        *_, page = write_recl(folder, result, ["txl", *sys.argv[1:]])
        say(f"page: {page}")


def _clamps(directories: list[RunDirectory], option: int | Literal["none"] | None) -> list[int | Literal["none"]]:
    """Return the clamp of each run: that of the option if the model's scores depend on distance, else the run's."""
    configs = [directory.config() for directory in directories]
    if option not in (None, "none") and not any(config.model.tells_distances for config in configs):
        raise UserError(field="clamp_len", value=option, but="none of these models uses relative distances")
    return [clamp_setting(option if config.model.tells_distances else None, config) for config in configs]


def _windows(directories: list[RunDirectory], option: int | Literal["none"]) -> list[int | Literal["none"]]:
    """Return the window of each run: that of the option for a Transformer-XL, "none" for other models."""
    have_one = [isinstance(directory.config().model, TransformerXLConfig) for directory in directories]
    if option != "none" and option < 1:
        raise UserError(field="window", value=option, expected="1 key or more, or none")
    if option != "none" and not any(have_one):
        raise UserError(field="window", value=option, but="no model here is a Transformer-XL")
    return [option if has_one else "none" for has_one in have_one]


def _described(
    name: str, path: Path, model: FamilyModel, clamp_len: int | Literal["none"], window: int | Literal["none"]
) -> JsonObject:
    """Return a model's size and limits."""
    try:
        state = model.init_state(1, mem_len=0, window="none", clamp_len=clamp_len)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return {
        "name": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "longest_context": model.context,
        "clamp_len": state.lengths.clamp_len,
        "window": None if window == "none" else window,
    }


def _lengths(arguments: argparse.Namespace) -> range:
    """Check the options, and return the context lengths: step, 2 * step, ... up to the longest."""
    from txl.evaluation.effective_context import check_fractions

    if arguments.longest < 2 * arguments.step:
        expected = ("two context lengths or more, that is twice ", Field("step", arguments.step))
        raise UserError(field="longest", value=arguments.longest, expected=expected)
    if arguments.longest % arguments.step:
        expected = ("a multiple of ", Field("step", arguments.step))
        raise UserError(field="longest", value=arguments.longest, expected=expected)
    for r in arguments.r:
        check_fractions(r, arguments.threshold)
        if arguments.r.count(r) > 1:
            raise UserError((Field("r"), f" has {r} twice"), expected="different fractions, each a column of the table")
    return range(arguments.step, arguments.longest + 1, arguments.step)


def _targets(n_token: int, longest: int, arguments: argparse.Namespace) -> range:
    """Return the positions of targets at equal distances over the split, each preceded by the longest context."""
    from txl.evaluation.effective_context import spread_targets

    if n_token - longest < arguments.targets:
        raise UserError(
            f"{arguments.targets} targets behind {longest} tokens do not fit into the {n_token:,} tokens of the "
            f"{arguments.split} split",
            remedy=("lower ", Field("targets"), " or ", Field("longest")),
        )
    return spread_targets(n_token, longest, arguments.targets, arguments.step)


def _print(result: JsonObject) -> None:
    from txl.reporting.recl_page import limited_contexts
    from txl.units import ppl_text

    models = result["models"]
    heading = f"{result['split']} split, {result['targets']:,} targets"
    print_table(
        f"relative effective context length in tokens, {heading}",
        ("model", "parameters", *(f"r = {r}" for r in result["relative_gains"])),
        [(model["name"], f"{model['parameters']:,}", *(f"{n:,}" for n in model["recl"].values())) for model in models],
        text=("model",),
    )
    print_table(
        "perplexity by context length",
        ("context", *(model["name"] for model in models)),
        [(f"{n:,}", *(ppl_text(model["ppl"][str(n)]) for model in models)) for n in result["context_lengths"]],
    )
    for note in limited_contexts(result):
        print(note)
    print(f"{result['context_lengths'][-1]:,} means that a model still gained at the longest context")
    print("the paper's Table 8 compares models of the same number of parameters")
