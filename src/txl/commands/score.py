"""`txl score DIR FILE`: the surprisal of every token of a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from txl.commands.arguments import (
    check_output_file,
    note_lacking,
    pick_device,
    run_to_read,
    standard_input,
    tested_lengths,
)
from txl.commands.evaluation_options import add_cache_options, refuse_with_sliding, with_cache
from txl.commands.options import add_checkpoint, add_device, add_dtype, add_memory_options, add_out
from txl.commands.output import output, progress_bar, say
from txl.commands.parser import Commands
from txl.errors import UserError

if TYPE_CHECKING:
    from txl.data.lacking import Lacking
    from txl.evaluation.surprisal import TextTotals, TokenSurprisal

_MARK = b"\xef\xbb\xbf"
_EVERY = 4096  # rows between two updates of the progress display


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "score",
        help="write the surprisal of every token of a text",
        example="txl score runs/mine article.txt --out surprisal.tsv",
        description="Write the surprisal of every token of a text, in bits, as a table with one row a token.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument("file", metavar="FILE", help="the text (also .gz, .bz2, .xz, .zst), or - for standard input")
    add_out(parser, "FILE", "where to write the table (default: standard output)")
    parser.add_argument("--format", choices=("tsv", "jsonl"), default="tsv", help="tabs or JSON lines (default: tsv)")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to read first, without scoring it")
    parser.add_argument("--segment", type=int, metavar="T", help="tokens of one step")
    parser.add_argument("--temperature", type=float, metavar="X", help="softmax temperature (default: the run's)")
    parser.add_argument(
        "--sliding", type=int, metavar="L", help="predict each token from the L tokens before it alone; slow"
    )
    parser.add_argument(
        "--normalise",
        action=argparse.BooleanOptionalAction,
        help="leave out a byte order mark, and read \\r\\n as \\n (default: as the training text was read)",
    )
    add_dtype(parser)
    add_checkpoint(parser)
    add_device(parser)
    add_memory_options(parser)
    add_cache_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Score the text and write the table."""
    refuse_with_sliding(arguments)
    from txl.data.compressed import COMPRESSED, open_file
    from txl.data.formats import reading_note, refuse_formats
    from txl.data.pieces import Piece

    run_directory, config, checkpoint = run_to_read(arguments)
    path = None if arguments.file == "-" else Path(arguments.file)
    source = standard_input() if path is None else path
    if path is not None and path.is_fifo():  # can be read only once
        source, path = open_file(path), None
    elif path is not None:
        refuse_formats([path])  # before the model is loaded
    check_output_file(arguments.out, path)
    from txl.data.lacking import Lacking, unknown_note
    from txl.devices import keep_freed_memory
    from txl.evaluation.surprisal import line_end_note, surprisals
    from txl.runs.corpus import trained_unknown

    keep_freed_memory()
    model, vocabulary = run_directory.load(checkpoint, device=pick_device(arguments.device))
    if vocabulary is None:
        raise UserError(
            f"{run_directory.path} has no vocabulary to read the text with; import it again with --vocabulary FILE"
        )
    note_lacking(vocabulary, arguments.prompt)
    normalise = vocabulary.normalise if arguments.normalise is None else arguments.normalise
    if normalise and vocabulary.kind == "byte":
        raise UserError("--normalise is given, but this model reads bytes, which are never changed")
    rows = surprisals(
        with_cache(model, arguments),
        vocabulary,
        source,
        segment=config.eval.segment if arguments.segment is None else arguments.segment,
        **tested_lengths(arguments, config).options(),
        sliding=arguments.sliding,
        prompt=arguments.prompt,
        temperature=config.eval.temperature if arguments.temperature is None else arguments.temperature,
        dtype=arguments.dtype,
        normalise=normalise,
    )
    plain = path is not None and path.suffix not in COMPRESSED
    size = path.stat().st_size if path is not None and plain else None
    with output(arguments.out) as file:
        quiet = arguments.out is None and sys.stdout.isatty()
        total = _write(rows, file, arguments.format, size, lacking := Lacking(vocabulary, normalise), quiet)
    has_mark = path is not None and next(Piece(path, 0, len(_MARK)).blocks(), b"") == _MARK
    for note in (
        None if path is None else reading_note([path], vocabulary.kind),
        line_end_note(total, has_mark, normalise, vocabulary.kind),
        unknown_note(lacking, total.unknown, total.tokens, "the text", trained_unknown(run_directory)),
        *lacking.notes("the text"),
    ):
        if note is not None:
            say(f"note: {note}")


def _write(
    rows: Iterator[TokenSurprisal], file: IO[str], form: str, size: int | None, lacking: Lacking, quiet: bool
) -> TextTotals:
    """Write the table, tally what is lacking, print the table's totals on standard error, and return the totals."""
    from txl.evaluation.surprisal import COLUMNS, TextTotals, json_line, tsv_line

    line, total = tsv_line if form == "tsv" else json_line, TextTotals()
    progress, move = progress_bar("scoring", quiet=quiet or size is None)
    with progress:
        for index, row in enumerate(rows):
            total.add(row)
            lacking.read(row.text, row.unknown)
            if index == 0 and form == "tsv":  # not before the loop: a text that cannot be read leaves no output
                file.write("\t".join(COLUMNS) + "\n")
            file.write(line(row))
            if size and index % _EVERY == 0:
                move(row.end, size)
    file.flush()
    mean = f": {total.bits:,.6g} bits, {total.bits / total.scored:.6f} per token" if total.scored else ""
    say(f"{total.tokens:,} tokens, {total.scored:,} scored{mean}")
    return total
