"""`txl generate DIR`: text from a trained model, printed while it is generated."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from txl.commands.arguments import convention, note_lacking, pick_device, run_to_read, standard_input, tested_lengths
from txl.commands.options import (
    add_checkpoint,
    add_detokenise,
    add_device,
    add_json,
    add_memory_options,
    add_sampling_options,
)
from txl.commands.output import print_json, record, say
from txl.commands.parser import Commands
from txl.errors import UserError
from txl.runs.events import EventName

if TYPE_CHECKING:
    from txl.generation.sampling import GenerationOptions
    from txl.runs.directory import RunDirectory

KEPT = 2000  # characters of a text that the run's log keeps


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        example='txl generate runs/mine --prompt "The river"',
        description="Continue a prompt. Text appears as it is made, or with --samples and --json when it is whole; the "
        "run's log keeps its beginning.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    source = parser.one_of(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="text to continue, of any length")
    source.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="read the prompt from a file (also .gz, .bz2, .xz, .zst; - for standard input)",
    )
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=200, metavar="N", help="tokens to generate (default: 200)"
    )
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="different continuations (default: 1)")
    add_sampling_options(parser).add_argument(
        "--greedy",
        action="store_const",
        const=0.0,
        dest="temperature",
        help="always the likeliest token: --temperature 0",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text (default: random)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    parser.add_argument(
        "--no-unk", action="store_true", help="never draw <unk>, even if it is a word of the training text"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="precision of weights and memory, on a CPU (default: the run's)",
    )
    parser.add_argument("--no-compile", action="store_true", help="generate by PyTorch alone, without compiled code")
    add_detokenise(parser, default="none")
    add_checkpoint(parser)
    add_device(parser)
    add_json(parser)
    add_memory_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Generate and print texts, and add them to the run's log."""
    prompt = _prompt(arguments)
    from txl.generation.sampling import GenerationOptions, Sampling

    if arguments.seed is not None and arguments.seed < 0:
        raise UserError(field="seed", value=arguments.seed, expected="0 or more")
    if any("\\n" in text for text in arguments.stop):
        say("note: --stop has a backslash and an n, not a line end; in bash a line end is $'\\n'")
    # Made before PyTorch is imported, so that a mistake is refused at once.
    options = GenerationOptions(
        arguments.max_tokens,
        arguments.samples,
        Sampling(arguments.top_k, arguments.top_p, arguments.temperature),
        secrets.randbelow(2**31) if arguments.seed is None else arguments.seed,  # so that the log records it
        arguments.stop,
        arguments.no_unk,
        compile=not arguments.no_compile,
    )
    run_directory, config, checkpoint = run_to_read(arguments)
    lengths = tested_lengths(arguments, config).options()
    import torch

    from txl.data.detokenise import detokenise
    from txl.devices import keep_freed_memory
    from txl.generation.text import generate_samples_with, generate_with
    from txl.native.build import compiled_code

    keep_freed_memory()
    model, vocabulary = run_directory.load(checkpoint, device=pick_device(arguments.device))
    note_lacking(vocabulary, prompt)
    tokenised_as = convention(arguments.detokenise, vocabulary)
    shown = prompt if tokenised_as is None else detokenise(prompt, tokenised_as)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    options = replace(options, dtype=dtype, detokenise=tokenised_as, **lengths)
    with compiled_code(options.compile):
        if options.samples == 1 and not arguments.json:
            beginning: list[str] = []
            try:
                _stream(shown, generate_with(model, vocabulary, prompt, options), beginning)
            finally:  # a text that is interrupted is logged too
                if beginning:
                    record_sample(run_directory, checkpoint, shown, "".join(beginning), options)
            return
        texts = generate_samples_with(model, vocabulary, prompt, options)
    if arguments.json:
        print_json(
            {
                "prompt": shown,
                "samples": texts,
                "checkpoint": checkpoint.name,
                "dtype": arguments.dtype,
                "detokenise": tokenised_as,
                "max_tokens": options.max_tokens,
                **asdict(options.sampling),
                "seed": options.seed,
                "stop": arguments.stop,
                "forbid_unknown": options.forbid_unknown,
                **lengths,
            }
        )
    else:
        for number, text in enumerate(texts, start=1):
            print(f"----- sample {number} of {len(texts)}\n{shown}{text}")
    assert options.seed is not None
    for number, text in enumerate(texts):  # sample i is drawn with seed + i (`generate_samples`)
        record_sample(run_directory, checkpoint, shown, text, replace(options, seed=(options.seed + number) % 2**63))


def _stream(prompt: str, pieces: Iterator[str], beginning: list[str]) -> None:
    """Print the prompt and then the text while it is generated; its first pieces are appended to `beginning`."""
    first = next(pieces, "")  # any notes are printed while the first piece is generated, and so not within the text
    sys.stdout.write(prompt)
    for piece in chain([first], pieces):
        if len(beginning) < KEPT:  # generation may run for days, and the log keeps no more
            beginning.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def record_sample(run: RunDirectory, checkpoint: Path, prompt: str, text: str, options: GenerationOptions) -> None:
    """Add a text (only the beginning of a long one) to the run's log, from which the report reads it."""
    record(
        run,
        EventName.SAMPLE,
        checkpoint,
        prompt=prompt[-KEPT:],
        text=text[:KEPT],
        checkpoint=checkpoint.name,
        **asdict(options.sampling),
        seed=options.seed,
        max_tokens=options.max_tokens,
        mem_len=options.mem_len,
        window=None if options.window == "none" else options.window,  # as evaluations are logged
    )


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None:
        return arguments.prompt
    from txl.data.compressed import open_file
    from txl.data.formats import refuse_format

    path = Path(arguments.prompt_file)
    with nullcontext(standard_input()) if arguments.prompt_file == "-" else open_file(path) as file:
        data = file.read()
    refuse_format(path, data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{arguments.prompt_file}: not UTF-8 at byte {error.start}; give the prompt as UTF-8") from None
