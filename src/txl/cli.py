"""Command line of `txl`: parse the arguments, run the command, print errors. `txl.commands` holds the commands.

Exit codes: 0 success; 1 failure; 2 user error, reported in one line; 128 + N stopped by signal N, 130 by Ctrl-C
(training saves its state first).
"""

from __future__ import annotations

import argparse
import io
import os
import select
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress

from txl.commands.parser import build_parser
from txl.errors import ProcessLost, RunInterrupted, TxlError, UserError, is_out_of_memory
from txl.files import check_current_directory, is_full

# Control characters of a file's content, which a terminal would obey, and how a message writes them.
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0))}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        _report("interrupted")
        return 130


def _run(argv: Sequence[str] | None) -> int:
    """Run one command; Ctrl-C raises KeyboardInterrupt only while this function runs (see `txl.__main__`)."""
    if sys.stdout is None:
        return _refuse("standard output is closed; expected a terminal, a file or a pipe")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # characters that the terminal cannot encode must not end a command
    parser, arguments = build_parser(), argparse.Namespace()
    try:
        check_current_directory()
        parser.parse_args(sys.argv[1:] if argv is None else argv, arguments)
        arguments.run(arguments)
        sys.stdout.flush()
        return 0
    except UserError as error:
        return _refuse(error.text(parser.chosen(arguments).name_of))
    except TxlError as error:
        if not (isinstance(error, ProcessLost) and error.quiet):
            _report(error.text(parser.chosen(arguments).name_of))
        return error.exit_code if isinstance(error, RunInterrupted) else 1
    except BrokenPipeError:
        if not _reader_is_gone(sys.stdout.fileno()):
            return 1  # that of standard error, say: the command has not done its work
        _discard_output()  # the reader closed the pipe (`txl generate ... | head`): not an error
        return 0
    except OSError as error:
        if error.strerror is None:
            raise
        mode = os.fstat(sys.stdout.fileno()).st_mode if error.filename is None and is_full(error) else 0
        if stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not sys.stdout.isatty()):  # a pipe or terminal is never full
            _discard_output()
            return _refuse(f"standard output: {error.strerror}; make room, or write elsewhere")
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        smaller = getattr(arguments, "smaller", "model, batch, segment or memory (txl train --dry-run estimates)")
        return _refuse(f"out of memory; use a smaller {smaller}")


def _refuse(message: str) -> int:
    """Print one line of bounded length; a file's control characters, which a terminal would obey, are written out."""
    message = " ".join(map(str.strip, message.splitlines())).translate(_ESCAPES)
    if len(message) > 2000:
        message = f"{message[:1500]} ... {message[-400:]}"
    with suppress(OSError):
        print(f"txl: error: {message}", file=sys.stderr)
    return 2


def _report(message: str) -> None:
    """Print why the command ended, in the first process only; the exit code counts if standard error is gone."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print(f"txl: {' '.join(message.split())}", file=sys.stderr)


def _discard_output() -> None:
    """Let the null device take what is left in the buffer of standard output; otherwise Python complains at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_is_gone(descriptor: int) -> bool:
    """Return whether a descriptor is that of a pipe whose reader has closed it; False where this is not known."""
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
