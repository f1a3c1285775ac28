"""The command `txl`: parse, call, print. Each command is a module of `txl.commands`.

Exit codes: 0 done, 1 a failure, 2 a mistake of the user's in one clear line, 130 or 143 training stopped by Ctrl-C or
SIGTERM after its state was saved.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import txl
from txl.commands.options import bounded_int
from txl.errors import CommandFailed, ProcessLost, RunInterrupted, UserError, did_you_mean

COMMANDS = (
    "presets",
    "data",
    "train",
    "status",
    "evaluate",
    "cache",
    "dynamic",
    "score",
    "recl",
    "attention",
    "reproduce",
    "generate",
    "serve",
    "samples",
    "compress",
    "report",
    "import_",
    "export",
    "bench",
    "demo",
)
"""The modules of `txl.commands`, in the order of the help."""

_NO_ROOM = r"out of memory|not enough memory|can't allocate|calculation overflowed"
"""Messages of PyTorch for tensors that do not fit into memory; the last is for sizes beyond 64 bits."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s, and which never guesses an abbreviated option."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.register("type", int, bounded_int)  # every type=int, of every command

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among the choices, naming the nearest."""
        if action.choices is not None and value not in action.choices:
            what = f"unknown command {value!r}" if action.dest in ("command", "action", "workload") else None
            choices = [str(each) for each in action.choices]
            hint = did_you_mean(str(value), choices) or f"expected one of {', '.join(choices)}"
            raise argparse.ArgumentError(None if what else action, f"{what or f'invalid choice: {value!r}'}; {hint}")

    def error(self, message: str) -> NoReturn:
        """Refuse, in one line."""
        raise UserError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse; refuse an unknown option here, where those with similar names are known."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].split("=")[0]
            # --model.n_layer is --model.n-layer too; one spelling is enough.
            known = [name for name in self._option_string_actions if name.startswith("--") and "_" not in name]
            if not option.startswith("-"):
                self.error(f"unknown argument {option}")
            hint = did_you_mean(option.replace("_", "-"), known)
            self.error(f"unknown option {option}" + (f"; {hint}" if hint else ""))
        return namespace, []


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="txl", description="Transformer-XL: language models that read past a fixed-length context.")
    parser.add_argument("--version", action="version", version=f"txl {txl.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        import_module(f"txl.commands.{command}").add_parser(commands)
    parser.set_defaults(parse=parser.parse_args)  # a command that runs others parses their words with it
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("txl: interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str] | None) -> int:
    """Run one command; Ctrl-C raises KeyboardInterrupt in this function alone (see `txl.__main__`)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # text that the terminal's encoding lacks must not end a command
    try:
        arguments = build_parser().parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
        return 0
    except RunInterrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"txl: {stop}", file=sys.stderr)
        return stop.exit_code
    except ProcessLost as loss:
        if not loss.quiet and os.environ.get("RANK", "0") == "0":
            print(f"txl: {loss}", file=sys.stderr)
        return 1
    except CommandFailed as failure:
        if os.environ.get("RANK", "0") == "0":
            print(f"txl: {' '.join(str(failure).split())}", file=sys.stderr)
        return 1
    except UserError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        # The reader of our output has gone (`txl generate ... | head`): not an error. What is still buffered must go
        # nowhere, or Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.strerror is None:
            raise
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    except (MemoryError, RuntimeError) as error:
        # torch has no one class for it: OutOfMemoryError on a GPU, RuntimeErrors of several wordings on a CPU.
        if not isinstance(error, MemoryError) and not re.search(_NO_ROOM, str(error)):
            raise
        return _refuse("out of memory; use a smaller model, batch, segment or memory (txl train --dry-run estimates)")


def _refuse(message: str) -> int:
    print(f"txl: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
