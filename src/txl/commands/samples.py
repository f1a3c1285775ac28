"""`txl samples DIR`: passages of the test split continued by a model, beside the original text (Appendix E)."""

from __future__ import annotations

import argparse

from txl.commands.arguments import (
    convention,
    pick_device,
    run_corpus,
    run_to_read,
    tested_lengths,
    writable_folder,
)
from txl.commands.options import (
    add_detokenise,
    add_memory_options,
    add_out,
    add_run_options,
    add_sampling_options,
    positive,
)
from txl.commands.output import ProgressByPart, print_json, print_table
from txl.commands.parser import Commands
from txl.errors import UserError


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "samples",
        help="continue passages of the test split, beside what follows there",
        example="txl samples runs/mine --count 3",
        description="Let a model continue passages of the test split, and show its texts beside what follows there, "
        "with measures of both (Appendix E).",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    add_out(parser, "DIR", "where samples.html, .md and .json go (default: DIR/samples)")
    parser.add_argument("--split", default="test", metavar="NAME", help="train, valid or test (default: test)")
    parser.add_argument("--count", type=positive, default=3, metavar="N", help="passages (default: 3)")
    parser.add_argument("--context", type=positive, default=512, metavar="N", help="tokens of a passage (default: 512)")
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=500,
        metavar="N",
        help="tokens to generate for each (default: 500, as the paper)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="chooses passages and texts (default: 0)")
    add_sampling_options(parser)
    add_detokenise(parser, default="auto")
    parser.add_argument("--no-compile", action="store_true", help="generate by PyTorch alone, without compiled code")
    add_memory_options(parser)
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Generate samples, measure them, write the three files, and print the measures."""
    if arguments.seed < 0:
        raise UserError(field="seed", value=arguments.seed, expected="0 or more")
    from txl.generation.sampling import Sampling

    sampling = Sampling(arguments.top_k, arguments.top_p, arguments.temperature)
    directory, config, checkpoint = run_to_read(arguments)
    lengths = tested_lengths(arguments, config)
    from txl.analysis.samples import Plan, make_samples
    from txl.devices import keep_freed_memory
    from txl.native.build import compiled_code
    from txl.reporting.samples_page import HEADINGS, About, settings_text, summary_rows, write_samples
    from txl.runs.corpus import training_tokens

    keep_freed_memory()
    model, vocabulary = directory.load(checkpoint, device=pick_device(arguments.device))
    tokenised_as = convention(arguments.detokenise, vocabulary)
    corpus = run_corpus(directory, vocabulary, arguments)
    tokens = corpus.tokens(arguments.split)
    try:
        training = training_tokens(directory, vocabulary, corpus, data_dir=arguments.data_dir, quiet=arguments.json)
    except UserError as error:
        raise UserError(f"copies are looked for in the text that the run was trained on: {error}") from None
    assert vocabulary is not None  # run_corpus has refused None
    out = writable_folder(directory.path / "samples" if arguments.out is None else arguments.out)
    plan = Plan(lengths, arguments.count, arguments.context, arguments.max_tokens, arguments.seed, sampling)
    with ProgressByPart(quiet=arguments.json) as progress, compiled_code(not arguments.no_compile):
        samples = make_samples(
            model,
            vocabulary,
            tokens,
            training,
            plan,
            convention=tokenised_as,
            compile=not arguments.no_compile,
            progress=progress,
        )
    about = About(
        str(arguments.directory),
        checkpoint.name,
        corpus.name,
        arguments.split,
        corpus.unit,
        tokenised_as,
        settings_text(plan),
        len(training),
    )
    record, paths = write_samples(samples, about, plan, out)
    if arguments.json:
        print_json(record | {"files": [str(path) for path in paths]})
        return
    print_table("measures of all samples", HEADINGS, summary_rows(samples, about.unit), text=HEADINGS[:1])
    for path in paths:
        print(path)
