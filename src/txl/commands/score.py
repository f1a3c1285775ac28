"""`txl score DIR FILE`: the surprisal of every token of a text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from txl.commands import options
from txl.commands.measuring import add_cache_options, with_cache
from txl.commands.output import output, progress_bar, say
from txl.commands.parser import Parser, choice, option
from txl.data.compressed import COMPRESSED, open_file
from txl.data.formats import reading_note, refuse_formats
from txl.data.pieces import Piece
from txl.errors import UserError

_MARK = b"\xef\xbb\xbf"
_EVERY = 4096  # rows between two updates of the progress display


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "score",
        help="write the surprisal of every token of a text",
        example="txl score runs/mine article.txt --out surprisal.tsv",
        description="Write the surprisal of every token of a text, in bits, as a table with one row a token.",
    )
    options.shared(parser, "directory")
    option(parser, "file", "FILE", "the text (also .gz, .bz2, .xz, .zst), or - for standard input")
    options.add_out(parser, "FILE", "where to write the table (default: standard output)")
    choice(parser, "--format", ("tsv", "jsonl"), "tabs or JSON lines", "tsv")
    option(parser, "--prompt", "TEXT", "text to read first, without scoring it")
    options.shared(parser, "segment", "temperature")
    option(parser, "--sliding", "L", "predict each token from the L tokens before it alone; slow", options.positive)
    parser.add_argument(
        "--normalise",
        action=argparse.BooleanOptionalAction,
        help="leave out a byte order mark, and read \\r\\n as \\n (default: as the training text was read)",
    )
    options.shared(parser, "dtype", "checkpoint", "device")
    options.add_memory_options(parser)
    add_cache_options(parser)
    parser.exclude("sliding", "mem_len", "window", "segment")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Score the text and write the table."""
    run_directory, config, checkpoint = options.run_to_read(arguments)
    path = None if arguments.file == "-" else Path(arguments.file)
    source = options.standard_input() if path is None else path
    if path is not None and path.is_fifo():  # can be read only once
        source, path = open_file(path), None
    elif path is not None:
        refuse_formats([path])  # before the model is loaded
    options.check_output_file(arguments.out, path)
    from txl.data.lacking import Lacking, unknown_note
    from txl.evaluation.surprisal import COLUMNS, TextTotals, json_line, line_end_note, surprisals, tsv_line
    from txl.runs.corpus import trained_unknown

    model, vocabulary = options.load_to_read(run_directory, checkpoint, options.pick_device(arguments.device))
    prompt = arguments.prompt or ""
    options.note_lacking(vocabulary, prompt)
    normalise = vocabulary.normalise if arguments.normalise is None else arguments.normalise
    if normalise and vocabulary.kind == "byte":
        raise UserError("this model reads bytes, which are never changed", field="normalise", remedy="leave it out")
    rows = surprisals(
        with_cache(model, arguments),
        vocabulary,
        source,
        segment=arguments.segment or config.eval.segment,
        **options.tested_lengths(arguments, config).options(),
        sliding=arguments.sliding,
        prompt=prompt,
        temperature=config.eval.temperature if arguments.temperature is None else arguments.temperature,
        dtype=arguments.dtype,
        normalise=normalise,
    )
    size = None if path is None or path.suffix in COMPRESSED else path.stat().st_size
    quiet = size is None or (arguments.out is None and sys.stdout.isatty())
    lacking, total, as_table = Lacking(vocabulary, normalise), TextTotals(), arguments.format == "tsv"
    with output(arguments.out) as file, progress_bar("scoring", quiet) as move:
        for index, row in enumerate(rows):
            total.add(row)
            lacking.read(row.text, row.unknown)
            if index == 0 and as_table:  # not before the loop: a text that cannot be read leaves no output
                file.write("\t".join(COLUMNS) + "\n")
            file.write(tsv_line(row) if as_table else json_line(row))
            if size is not None and index % _EVERY == 0:
                move(row.end, size)
        file.flush()
    mean = f": {total.bits:,.6g} bits, {total.bits / total.scored:.6f} per token" if total.scored else ""
    say(f"{total.tokens:,} tokens, {total.scored:,} scored{mean}")
    has_mark = path is not None and next(Piece(path, 0, len(_MARK)).blocks(), b"") == _MARK
    for note in (
        None if path is None else reading_note([path], vocabulary.kind),
        line_end_note(total, has_mark, normalise),
        unknown_note(lacking, total.unknown, total.tokens, "the text", trained_unknown(run_directory)),
        *lacking.notes("the text"),
    ):
        if note is not None:
            say(f"note: {note}")
