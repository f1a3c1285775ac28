"""`txl samples DIR`: passages of the test split continued by a model, beside the original text (Appendix E)."""

from __future__ import annotations

import argparse

from txl.commands import options
from txl.commands.output import print_json, print_table, progress_by_part
from txl.commands.parser import Parser, flag, option
from txl.config.values import require
from txl.errors import UserError


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "samples",
        help="continue passages of the test split, beside what follows there",
        example="txl samples runs/mine --count 3",
        description="Let a model continue passages of the test split, and show its texts beside what follows there, "
        "with measures of both (Appendix E).",
    )
    options.shared(parser, "directory")
    options.add_out(parser, "DIR", "where samples.html, .md and .json go (default: DIR/samples)")
    option(parser, "--split", "NAME", "train, valid or test", default="test")
    option(parser, "--count", "N", "passages", options.positive, 3)
    option(parser, "--context", "N", "tokens of a passage", options.positive, 512)
    option(parser, "--max-tokens", "N", "tokens to generate for each; 500 as in the paper", options.positive, 500)
    option(parser, "--seed", "S", "chooses passages and texts", int, 0)
    options.add_sampling_options(parser)
    options.add_detokenise(parser, default="auto")
    flag(parser, "--no-compile", "generate by PyTorch alone, without compiled code")
    options.shared(parser, "checkpoint")
    options.add_memory_options(parser)
    options.add_run_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Generate samples, measure them, write the three files, and print the measures."""
    require(arguments.seed >= 0, "seed", arguments.seed, "0 or more")
    sampling = options.sampling_of(arguments)
    directory, config, checkpoint = options.run_to_read(arguments)
    lengths = options.tested_lengths(arguments, config)
    from txl.analysis.samples import Plan, make_samples
    from txl.native.build import compiled_code
    from txl.reporting.samples_page import HEADINGS, About, settings_text, summary_rows, write_samples
    from txl.runs.corpus import training_tokens

    model, vocabulary = options.load_to_read(directory, checkpoint, options.pick_device(arguments.device))
    tokenised_as = options.convention(arguments.detokenise, vocabulary)
    corpus = options.run_corpus(directory, vocabulary, arguments)
    tokens = corpus.tokens(arguments.split)
    try:
        training = training_tokens(directory, vocabulary, corpus, data_dir=arguments.data_dir, quiet=arguments.json)
    except UserError as error:
        raise UserError(f"copies are looked for in the text that the run was trained on: {error}") from None
    out = options.writable_folder(directory.path / "samples" if arguments.out is None else arguments.out)
    plan = Plan(lengths, arguments.count, arguments.context, arguments.max_tokens, arguments.seed, sampling)
    compiles, unit = not arguments.no_compile, corpus.unit
    with progress_by_part(quiet=arguments.json) as progress, compiled_code(compiles):
        samples = make_samples(
            model, vocabulary, tokens, training, plan, convention=tokenised_as, compile=compiles, progress=progress
        )
    where = (str(arguments.directory), checkpoint.name, corpus.name, arguments.split)
    about = About(*where, unit, tokenised_as, settings_text(plan), len(training))
    record, paths = write_samples(samples, about, plan, out)
    if arguments.json:
        print_json(record | {"files": [str(path) for path in paths]})
        return
    print_table("measures of all samples", HEADINGS, summary_rows(samples, unit), text=HEADINGS[:1])
    print(*paths, sep="\n")
