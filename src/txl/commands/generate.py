"""`txl generate DIR`: text from a trained model, printed while it is generated."""

from __future__ import annotations

import argparse
import secrets
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from txl.commands import options
from txl.commands.output import print_json, record
from txl.commands.parser import Parser, choice, flag, option
from txl.config.values import require
from txl.data.compressed import open_file
from txl.data.formats import refuse_format
from txl.errors import UserError
from txl.generation.sampling import GenerationOptions
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName

KEPT = 2000  # characters of a text that the run's log keeps


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "generate",
        help="continue a prompt",
        example='txl generate runs/mine --prompt "The river"',
        description="Continue a prompt. Text appears as it is made, or with --samples and --json when it is whole; the "
        "run's log keeps its beginning.",
    )
    options.shared(parser, "directory")
    source = parser.add_mutually_exclusive_group(required=True)
    option(source, "--prompt", "TEXT", "text to continue, of any length")
    option(source, "--prompt-file", "FILE", "a file with the prompt (also .gz, .bz2, .xz, .zst; -: standard input)")
    option(parser, "-n --max-tokens", "N", "tokens to generate", int, 200)
    option(parser, "--samples", "N", "different continuations", int, 1)
    options.add_sampling_options(parser).add_argument(
        "--greedy", action="store_const", const=0.0, dest="temperature", help="the likeliest token: --temperature 0"
    )
    option(parser, "--seed", "S", "the same seed gives the same text (default: random)", int)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    flag(parser, "--no-unk", "never draw <unk>, even if it is a word of the training text")
    choice(parser, "--dtype", options.DTYPES, "precision of weights and memory, on a CPU (default: the run's)")
    flag(parser, "--no-compile", "generate by PyTorch alone, without compiled code")
    options.add_detokenise(parser, default="none")
    options.shared(parser, "checkpoint", "device", "json")
    options.add_memory_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Generate and print texts, and add them to the run's log."""
    prompt = arguments.prompt
    if prompt is None:
        path = Path(arguments.prompt_file)
        with nullcontext(options.standard_input()) if arguments.prompt_file == "-" else open_file(path) as file:
            data = file.read()
        refuse_format(path, data)
        try:
            prompt = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"not UTF-8 at byte {error.start}", value=path, remedy="give the prompt as UTF-8") from None
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed  # drawn here, so that the log has it
    require(seed >= 0, "seed", seed, "0 or more")
    # Made before PyTorch is imported, so that a mistake is refused at once.
    settings = GenerationOptions(
        arguments.max_tokens,
        arguments.samples,
        options.sampling_of(arguments),
        seed,
        arguments.stop,
        arguments.no_unk,
        compile=not arguments.no_compile,
    )
    run_directory, config, checkpoint = options.run_to_read(arguments)
    lengths = options.tested_lengths(arguments, config).options()
    import torch

    from txl.data.detokenise import detokenise
    from txl.generation.text import generate_samples_with, generate_with
    from txl.native.build import compiled_code

    model, vocabulary = run_directory.load(checkpoint, device=options.pick_device(arguments.device))
    options.note_lacking(vocabulary, prompt)
    tokenised_as = options.convention(arguments.detokenise, vocabulary)
    shown = prompt if tokenised_as is None else detokenise(prompt, tokenised_as)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    settings = replace(settings, dtype=dtype, detokenise=tokenised_as, **lengths)
    with compiled_code(settings.compile):
        if settings.samples == 1 and not arguments.json:
            pieces, beginning = generate_with(model, vocabulary, prompt, settings), list[str]()
            try:
                first = next(pieces, "")  # any notes are printed while it is generated, and so not within the text
                sys.stdout.write(shown)
                for piece in chain([first], pieces):
                    if len(beginning) < KEPT:  # generation may run for days, and the log keeps no more
                        beginning.append(piece)
                    sys.stdout.write(piece)
                    sys.stdout.flush()
                sys.stdout.write("\n")
            finally:  # a text that is interrupted is logged too
                if beginning:
                    record_sample(run_directory, checkpoint, shown, "".join(beginning), settings)
            return
        texts = generate_samples_with(model, vocabulary, prompt, settings)
    if arguments.json:
        made = {"prompt": shown, "samples": texts, "checkpoint": checkpoint.name, "max_tokens": settings.max_tokens}
        how = {"dtype": arguments.dtype, "detokenise": tokenised_as, "seed": seed, "stop": arguments.stop}
        how["forbid_unknown"] = settings.forbid_unknown
        print_json({**made, **how, **asdict(settings.sampling), **lengths})
    else:
        for number, text in enumerate(texts, start=1):
            print(f"----- sample {number} of {len(texts)}\n{shown}{text}")
    for number, text in enumerate(texts):  # sample i is drawn with seed + i (`generate_samples`)
        record_sample(run_directory, checkpoint, shown, text, replace(settings, seed=(seed + number) % 2**63))


def record_sample(run: RunDirectory, checkpoint: Path, prompt: str, text: str, settings: GenerationOptions) -> None:
    """Add a text (only the beginning of a long one) to the run's log, from which the report reads it."""
    made = {"prompt": prompt[-KEPT:], "text": text[:KEPT], "checkpoint": checkpoint.name, "seed": settings.seed}
    window = None if settings.window == "none" else settings.window  # as evaluations are logged
    made |= {"max_tokens": settings.max_tokens, "mem_len": settings.mem_len, "window": window}
    record(run, EventName.SAMPLE, checkpoint, **made, **asdict(settings.sampling))
