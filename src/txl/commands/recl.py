"""`txl recl DIR DIR ...`: the relative effective context length of a group of models (Section 4.3, Appendix C)."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from txl.commands import options
from txl.commands.output import print_json, print_table, progress_bar, say
from txl.commands.parser import Parser, option
from txl.config import TransformerXLConfig
from txl.errors import Field, UserError
from txl.files import JsonObject
from txl.runs.directory import RunDirectory

if TYPE_CHECKING:
    from txl.models.family import FamilyModel


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "recl",
        help="measure how long a context each of several models makes use of",
        example="txl recl runs/small runs/large --targets 500",
        description="Measure the relative effective context length of a group of models (Section 4.3, Appendix C): the "
        "context length beyond which a model's loss no longer improves, compared with the best model of the group.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", help="run directories with the same vocabulary")
    option(parser, "--split", "NAME", "train, valid or test", default="test")
    option(parser, "--step", "N", "tokens between context lengths", options.positive, 64)
    option(parser, "--longest", "N", "longest context, in tokens", options.positive, 512)
    option(parser, "--targets", "N", "least number of tokens to predict, spread over the split", options.positive, 1000)
    option(parser, "--r", "R,R,...", "shares of the targets, the hardest first", options.fractions, "0.1,0.5,1.0")
    option(parser, "--threshold", "G", "least relative gain that counts", float, 0.01)
    option(parser, "--clamp-len", "C", "distances above C count as C, or none (default: the run's)", options.limit)
    window = "keys that a Transformer-XL's token sees, itself included; none: all of the context"
    option(parser, "--window", "W", window, options.limit, "none")
    option(parser, "--batch", "B", "contexts read in parallel", options.positive, 16)
    options.shared(parser, "dtype")
    options.add_out(parser, "DIR", "write a page there: recl.html, its figures, recl.json")
    options.add_run_options(parser, "text (default: the runs' own)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Score every model at every context length, and print the relative effective context lengths.

    Scoring large models takes hours, so all checks are made before scoring begins.
    """
    paths = [options.existing_run(directory) for directory in arguments.directories]
    short = [path.resolve().name for path in paths]
    names = [name if short.count(name) == 1 else str(path) for name, path in zip(short, paths, strict=True)]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"a run directory was given twice: {', '.join(names)}; expected different ones")
    step, longest = arguments.step, arguments.longest
    if longest < 2 * step or longest % step:
        expected = ("two context lengths or more, multiples of ", Field("step", step))
        raise UserError(field="longest", value=longest, expected=expected)
    folder = None if arguments.out is None else options.writable_folder(arguments.out)
    from txl.evaluation.effective_context import check_fractions, group_record, spread_targets
    from txl.evaluation.sliding import losses_at_contexts
    from txl.reporting.recl_page import write_recl
    from txl.runs.corpus import refuse_different_corpora, shared_vocabulary

    for r in arguments.r:
        check_fractions(r, arguments.threshold)
        if arguments.r.count(r) > 1:
            raise UserError((Field("r"), f" has {r} twice"), expected="different fractions, each a column of the table")
    directories = [RunDirectory(path) for path in paths]
    vocabulary = shared_vocabulary(directories)
    if "data.corpus" not in options.config_options(arguments):
        refuse_different_corpora(directories)
    corpus = options.run_corpus(directories[0], vocabulary, arguments)
    tokens = corpus.tokens(arguments.split)
    if len(tokens) - longest < arguments.targets:
        problem = f"behind {longest} tokens they do not fit into the {len(tokens):,} of the {arguments.split} split"
        remedy = ("lower ", Field("targets"), " or ", Field("longest"))
        raise UserError(problem, field="targets", value=arguments.targets, remedy=remedy)
    targets = spread_targets(len(tokens), longest, arguments.targets, step)
    models, described = _loaded(directories, names, arguments)
    losses = {}
    for model_about in described:
        with progress_bar(model_about["name"], quiet=arguments.json) as move:
            losses[model_about["name"]] = losses_at_contexts(
                models.pop(0),
                tokens,
                contexts=range(step, longest + 1, step),
                targets=targets,
                batch_size=arguments.batch,
                window=model_about["window"] or "none",
                clamp_len="none" if model_about["clamp_len"] is None else model_about["clamp_len"],
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
        folder.mkdir(parents=True, exist_ok=True)
        *_, page = write_recl(folder, result, ["txl", *sys.argv[1:]])
        say(f"page: {page}")


def _loaded(
    directories: list[RunDirectory], names: list[str], arguments: argparse.Namespace
) -> tuple[list[FamilyModel], list[JsonObject]]:
    """Return the models, and of each its size and limits: the options' clamp and window if its scores can have them."""
    window = arguments.window
    configs = [directory.config() for directory in directories]
    tell = [config.model.tells_distances for config in configs]
    if arguments.clamp_len not in (None, "none") and not any(tell):
        raise UserError(
            field="clamp_len", value=arguments.clamp_len, but="none of these models uses relative distances"
        )
    have_window = [isinstance(config.model, TransformerXLConfig) for config in configs]
    if window != "none" and window < 1:
        raise UserError(field="window", value=window, expected="1 key or more, or none")
    if window != "none" and not any(have_window):
        raise UserError(field="window", value=window, but="no model here is a Transformer-XL")
    device = options.pick_device(arguments.device)
    # All models are loaded before the first is scored, so that a damaged one is found now and not after hours.
    models = [directory.load(device=device)[0] for directory in directories]
    described: list[JsonObject] = []
    for name, directory, model, config, uses_clamp, has_window in zip(
        names, directories, models, configs, tell, have_window, strict=True
    ):
        own = config.eval.lengths.options()["clamp_len"]
        clamp_len = own if arguments.clamp_len is None or not uses_clamp else arguments.clamp_len
        try:
            state = model.init_state(1, mem_len=0, window="none", clamp_len=clamp_len)
        except UserError as error:
            raise UserError(f"{directory.path}: {error}") from None
        described.append(
            {
                "name": name,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "longest_context": model.context,
                "clamp_len": state.lengths.clamp_len,
                "window": window if has_window and window != "none" else None,
            }
        )
    return models, described


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
