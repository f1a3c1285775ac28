"""`txl score DIR FILE`: the surprisal of every token of a text."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from unicodedata import category

from txl.commands.evaluate import add_cache_options, trained_unknown, with_cache
from txl.commands.options import (
    add_checkpoint,
    add_device,
    add_memory_options,
    clamp_setting,
    memory_settings,
    note_lacking,
    pick_device,
    progress_bar,
    run_to_read,
    say,
)
from txl.errors import UserError
from txl.files import replacing

if TYPE_CHECKING:
    from txl.evaluation.surprisal import TokenSurprisal

COLUMNS = (
    "index", "start", "end", "word", "token", "unknown", "surprisal", "word_surprisal", "memory", "context",
)  # fmt: skip
_NAMED = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_MARK = b"\xef\xbb\xbf"
_EVERY = 4096
"""Rows between two moves of the progress display."""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("score", help="write the surprisal of every token of a text")
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument("file", metavar="FILE", help="the text (.gz, .xz, .zst too), or - for standard input")
    parser.add_argument("--out", metavar="FILE", help="where to write the table (default: standard output)")
    parser.add_argument("--format", choices=("tsv", "jsonl"), default="tsv", help="tsv (default) or JSON lines")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="read before the text, not scored")
    add_memory_options(parser)
    parser.add_argument("--segment", type=int, metavar="T", help="tokens of one step")
    parser.add_argument("--temperature", type=float, metavar="X", help="of the softmax (default: the run's)")
    parser.add_argument(
        "--sliding", type=int, metavar="L", help="predict each token from a window of L tokens of its own, recomputed"
    )
    add_cache_options(parser)
    parser.add_argument(
        "--normalise",
        action=argparse.BooleanOptionalAction,
        help="leave out a byte order mark and read \\r\\n as one line's end (default: as the training text was read)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="arithmetic (autocast)")
    add_checkpoint(parser)
    add_device(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Score the text and write the table."""
    for name in ("mem_len", "window", "segment"):
        if arguments.sliding is not None and getattr(arguments, name) is not None:
            raise UserError(f"--sliding and --{name.replace('_', '-')} were both given; a sliding window has none")
    from txl.data.sources import Piece, open_file

    run_directory, config, checkpoint = run_to_read(arguments)
    path = None if arguments.file == "-" else Path(arguments.file)
    if path is not None:
        open_file(path).close()  # before the model is loaded
    check_out(arguments.out, path)
    from txl.allocator import keep_freed_memory
    from txl.data.prepared import unknown_note
    from txl.evaluation.surprisal import surprisals

    keep_freed_memory()
    model, vocabulary = run_directory.load(checkpoint, device=pick_device(arguments.device))
    if vocabulary is None:
        raise UserError(f"{run_directory.path} has no vocabulary, so no text can be read; give one when importing")
    settings: dict[str, Any] = {
        "sliding": arguments.sliding,
        "clamp_len": clamp_setting(arguments.clamp_len, config),
    }
    if arguments.sliding is None:
        settings = memory_settings(arguments, config)
        settings["segment"] = config.eval.segment if arguments.segment is None else arguments.segment
    settings["temperature"] = config.eval.temperature if arguments.temperature is None else arguments.temperature
    note_lacking(vocabulary, arguments.prompt)
    normalise = vocabulary.normalise if arguments.normalise is None else arguments.normalise
    if normalise and vocabulary.kind == "byte":
        raise UserError("--normalise is given, but this model reads bytes, which are never changed; leave it out")
    rows = surprisals(
        with_cache(model, arguments),
        vocabulary,
        sys.stdin.buffer if path is None else path,
        prompt=arguments.prompt,
        dtype=arguments.dtype,
        normalise=normalise,
        **settings,
    )
    plain = path is not None and path.suffix not in (".gz", ".xz", ".zst")
    size = path.stat().st_size if path is not None and plain else None
    with output(arguments.out) as file:
        total = _write(rows, file, arguments.format, size, quiet=arguments.out is None and sys.stdout.isatty())
    has_mark = path is not None and next(Piece(path, 0, len(_MARK)).blocks(), b"") == _MARK
    for note in (
        _about_line_ends(total, has_mark, normalise, vocabulary.kind),
        unknown_note(vocabulary.kind, total.unknown, total.tokens, "the text", trained_unknown(run_directory)),
    ):
        if note is not None:
            say(f"note: {note}")


@dataclass
class _Total:
    """What the rows of a table add up to."""

    tokens: int = 0
    unknown: int = 0
    line_ends: int = 0
    """\\r\\n within a token: those that were read as one."""
    returns: int = 0
    """\\r that are tokens and unknown."""
    first_unknown: bool = False

    def add(self, row: TokenSurprisal) -> None:
        """Count one more."""
        self.first_unknown |= row.unknown and row.index == 0
        self.tokens += 1
        self.unknown += row.unknown
        self.line_ends += row.text.count(b"\r\n")
        self.returns += row.unknown and row.text == b"\r"


def _about_line_ends(total: _Total, has_mark: bool, normalise: bool, kind: str) -> str | None:
    """What was made of a text's byte order mark and \\r\\n, where that matters."""
    if normalise:
        from txl.data.prepared import normalised_note

        told = normalised_note("the text", int(has_mark), total.line_ends)
        return None if told is None else f"{told} (--no-normalise reads it as it is)"
    has_mark = has_mark and (kind == "bpe" or total.first_unknown)
    if kind == "byte" or not (has_mark or total.returns):
        return None
    parts = ["a byte order mark"] * has_mark
    parts += [f"{total.returns:,} \\r that the vocabulary lacks"] * (total.returns > 0)
    return f"the text has {' and '.join(parts)}; --normalise reads it without"


def check_out(out: str | None, source: Path | None) -> None:
    """Refuse an output that cannot be, before anything is computed."""
    if out is None:
        return
    path = Path(out)
    if not path.parent.is_dir():
        raise UserError(f"--out {out}: {path.parent} is not a folder; make it first")
    if path.is_dir():
        raise UserError(f"--out {out} is a folder; expected the name of a file")
    if source is not None and path.exists() and path.samefile(source):
        raise UserError(f"--out {out} is the source itself; expected another file")


@contextmanager
def output(out: str | None, binary: bool = False) -> Iterator[IO[Any]]:
    """Standard output, or a file that appears under its name when it is whole."""
    if out is None:
        yield sys.stdout.buffer if binary else sys.stdout
        return
    with replacing(Path(out)) as temporary:
        if binary:
            with open(temporary, "wb") as file:
                yield file
        else:
            with open(temporary, "w", encoding="utf-8", newline="\n") as file:
                yield file


def _write(rows: Iterator[TokenSurprisal], file: IO[str], form: str, size: int | None, quiet: bool) -> _Total:
    """The table, and what it adds up to on standard error."""
    line = _tsv if form == "tsv" else _jsonl
    bits, scored, total = 0.0, 0, _Total()
    progress, move = progress_bar("scoring", quiet=quiet or size is None)
    with progress:
        for index, row in enumerate(rows):
            total.add(row)
            if index == 0 and form == "tsv":  # not before: a text that cannot be read leaves nothing
                file.write("\t".join(COLUMNS) + "\n")
            file.write(line(row))
            if row.surprisal is not None:
                bits, scored = bits + row.surprisal, scored + 1
            if size and index % _EVERY == 0:
                move(row.end, size)
    file.flush()
    mean = f", {bits:.6g} bits, {bits / scored:.6f} a token" if scored else ""
    say(f"{total.tokens:,} tokens, {scored:,} scored{mean}")
    return total


def _tsv(row: TokenSurprisal) -> str:
    values = (
        str(row.index), str(row.start), str(row.end), "" if row.word is None else str(row.word), escaped(row.text),
        str(int(row.unknown)), _number(row.surprisal), _number(row.word_surprisal), str(row.memory), str(row.context),
    )  # fmt: skip
    return "\t".join(values) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.12g}"  # so that sums over long texts agree to six decimals


def _jsonl(row: TokenSurprisal) -> str:
    values: dict[str, Any] = {name: getattr(row, name) for name in COLUMNS if name != "token"}
    for name in ("surprisal", "word_surprisal"):
        values[name] = None if values[name] is None else float(_number(values[name]))
    values["token"] = escaped(row.text)
    return json.dumps({name: values[name] for name in COLUMNS}, ensure_ascii=False) + "\n"


def escaped(text: bytes) -> str:
    """A token in one line, from which it can be had back.

    Backslash, tab, line feed and carriage return are \\\\, \\t, \\n, \\r; bytes that are no whole character \\xNN;
    other control, format and private characters and line separators \\uNNNN or \\UNNNNNNNN.
    """
    if text.isalnum():
        return text.decode()  # ASCII, the usual case
    return "".join(map(_shown, text.decode("utf-8", errors="surrogateescape")))


def _shown(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if character in _NAMED:
        return _NAMED[character]
    if category(character)[0] == "C" or category(character) in ("Zl", "Zp"):
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character
