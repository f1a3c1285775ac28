"""Command line of `txl`: parse the arguments, run the command, print errors. `txl.commands` holds the commands.

Exit codes: 0 success; 1 failure; 2 user error, reported in one line; 128 + N stopped by signal N, 130 by Ctrl-C
(training saves its state first).
"""

from __future__ import annotations

import argparse
import io
import os
import re
import select
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NoReturn

import txl
from txl.commands.options import bounded_int
from txl.errors import CommandFailed, ProcessLost, RunInterrupted, UserError, did_you_mean, is_out_of_memory
from txl.files import check_current_directory, is_full

COMMANDS = {
    "start": ("demo", "presets", "data"),
    "train": ("train", "status", "report"),
    "measure": ("eval", "dynamic", "cache", "score", "recl"),
    "analyse": ("attention", "samples"),
    "use": ("generate", "serve", "compress"),
    "import and export": ("import_", "export"),
}
"""Modules of `txl.commands` by task, in the order of the help."""
ENTRY_POINTS = "txl.commands"
"""Group of entry points by which other packages add commands: the name is a task, the object the names of modules."""


_PLAIN = {
    r"^the following arguments are required: ": "missing: ",
    r"^one of the arguments (.*) is required$": r"missing: one of \1",
    r"^argument (?:\S+/)?(\S+): ignored explicit argument .*$": r"\1 takes no value",
    r"^argument (\S+): not allowed with argument (\S+)$": r"\1 and \2 were both given; expected one of them",
}
"""Patterns of argparse's messages, and the wordings that replace them."""
_WORDS = {"lr": "learning-rate", "text": "corpus", "data": "corpus"}
"""Words of other programs for options, without the dashes."""
_LEAST_SIMILARITY = 0.7
"""Similarity, from 0 to 1, of a mistaken option and an option that is suggested instead."""


class _Missing(UserError):
    """Error that a required argument or option was not given."""


class _Help(argparse.HelpFormatter):
    """Help formatter that omits option spellings with underscores, and leaves room for long option names."""

    def __init__(self, prog: str, **settings: Any):
        super().__init__(prog, max_help_position=32, **settings)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "_" not in name]
        if not names:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join(names) + value


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UserError`, and accepts no abbreviated options.

    Args:
        example: command line that the help shows first, for the reader to copy.
    """

    def __init__(self, *args: Any, example: str = "", **settings: Any):
        super().__init__(*args, allow_abbrev=False, formatter_class=_Help, **settings)
        self._positionals.title = "arguments"
        self.example = example
        self.groups: dict[str, list[argparse.Action]] = {}
        """Commands by task; empty in the parser of a single command."""
        self.register("type", int, bounded_int)  # for type=int in every command

    def format_usage(self) -> str:
        """Return the usage in one line: arguments and required options. Only the help lists the other options."""
        return f"usage: {self.usage or self._needed()}\n"

    def _needed(self) -> str:
        """Return the command with its arguments and its required options."""
        words = [self.prog, *(_shown(action) for action in self._actions if not action.option_strings)]
        words += [_shown(action) for action in self._actions if action.option_strings and action.required]
        for group in self._mutually_exclusive_groups:
            if group.required:
                words.append(f"({' | '.join(_shown(action) for action in group._group_actions)})")
        return " ".join(words if self._subparsers else [*words, "[options]"])

    def format_help(self) -> str:
        """Return the help: example, usage, description, and options in groups."""
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for title, actions in self.groups.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        alone = [self._optionals] if len(self._optionals._group_actions) == 1 else []  # --help alone: listed last
        for group in [*(each for each in self._action_groups if each not in alone), *alone]:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return f"example: {self.example}\n{self.format_usage()}\n{formatter.format_help()}"

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print a help or the version; argparse itself would hide that standard output is full."""
        print(message, end="", file=file, flush=True)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert a value; refuse a value of the wrong type with the wording used for the configuration's fields."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            kind = {int: "a whole number", float: "a number"}.get(action.type, getattr(action.type, "__name__", ""))
            if error.message.startswith("invalid "):
                error.message = f"expected {kind}"
            if error.message.startswith("expected "):
                raise argparse.ArgumentError(None, f"{_name(action)} is {arg_string!r}; {error.message}") from None
            raise

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among the choices, and name the nearest choices."""
        if action.choices is not None and value not in action.choices:
            is_command = isinstance(action, argparse._SubParsersAction)
            what = f"unknown command {value!r}" if is_command else f"{_name(action)} is {value!r}"
            choices = [str(each) for each in action.choices]
            hint = did_you_mean(str(value), choices) or f"expected one of {', '.join(choices)}"
            raise argparse.ArgumentError(None, f"{what}; {hint}")

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` with the message in one line."""
        for pattern, plain in _PLAIN.items():
            message = re.sub(pattern, plain, message)
        kind = _Missing if message.startswith("missing: ") else UserError
        raise kind(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the arguments; refuse an unknown one before a missing one, which may be the same one misspelt."""
        missing = ""
        try:
            namespace, unknown = super().parse_known_args(args, namespace)
        except _Missing as error:
            missing = str(error)
            needed = [each for each in (*self._actions, *self._mutually_exclusive_groups) if each.required]
            for each in needed:
                each.required = False
            try:
                _, unknown = super().parse_known_args(args)
            finally:
                for each in needed:
                    each.required = True
        if unknown:
            self._refuse_unknown(unknown, missing)
        if missing:
            raise UserError(missing)
        return namespace, []

    def _refuse_unknown(self, unknown: list[str], missing: str) -> NoReturn:
        """Refuse unknown words, and say what may have been meant.

        Args:
            unknown: the words; the first option among them is named, else the first word.
            missing: the message that names the missing options; empty if there are none.
        """
        word = next((each.split("=")[0] for each in unknown if each.startswith("-")), unknown[0])
        if not word.startswith("-"):
            option = re.search(r"--[\w-]+", missing.partition(" (")[0])
            self.error(f"unknown argument {word}" + (f"; did you mean {option[0]} {word}?" if option else ""))
        if word in self._option_string_actions:
            self.error(f"{word} is an option and comes after --; give options before it")
        for action in self._actions:
            if not action.option_strings and word.lstrip("-") in (action.dest, str(action.metavar).lower()):
                self.error(f"unknown option {word}; give {action.metavar} as an argument: {self._needed()}")
        if re.fullmatch(r"--([\w-]+[-_])?epochs?", word) and "--steps" in self._option_string_actions:
            self.error(
                f"unknown option {word}; give a number of --steps: a pass over the text takes its training tokens "
                f"(txl data info CORPUS --unit UNIT) / tokens per step (--dry-run)"
            )
        # --model.n_layer and --model.n-layer are one option; suggest only one spelling.
        known = [name for name in self._option_string_actions if name.startswith("--") and "_" not in name]
        near = _nearest(word, known)
        self.error(f"unknown option {word}" + (f"; did you mean {near}?" if near else ""))

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """Refuse an option without its value, and tell how to write a value that begins with a dash."""
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            name, is_last = _name(action), not arg_strings_pattern
            hint = "" if is_last else f"; if it begins with -, write {name}=-x"
            raise argparse.ArgumentError(None, f"{name} needs a value{hint}") from None


def _nearest(option: str, known: Sequence[str]) -> str | None:
    """Return the known option nearest to an unknown one, if one is near; dashes and sections are not compared."""
    from difflib import SequenceMatcher

    section, _, word = option.lstrip("-").replace("_", "-").rpartition(".")
    word = _WORDS.get(word, word)

    def similarity(name: str) -> float:
        other = name.lstrip("-").rpartition(".")[2]
        begins = min(len(word), len(other)) > 2 and (word.startswith(other) or other.startswith(word))
        return begins + SequenceMatcher(None, word, other).ratio()  # --output and --out-file are near --out

    near = [name for name in known if similarity(name) >= _LEAST_SIMILARITY]
    return max(near, key=lambda name: (similarity(name), name.startswith(f"--{section}."), -len(name)), default=None)


def _name(action: argparse.Action) -> str:
    """Return an option's long name, or the name of an argument as the help shows it."""
    return next((name for name in action.option_strings if name.startswith("--")), f"{action.metavar or action.dest}")


def _shown(action: argparse.Action) -> str:
    """Return an argument, or an option with its value, as the usage shows it."""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.option_strings:
        return f"{action.option_strings[0]} {value}"
    return {"?": f"[{value}]", "+": f"{value} ...", argparse.PARSER: f"{value} ..."}.get(str(action.nargs), value)


def _modules_by_task() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each task with the full names of its commands' modules, in the order of the help.

    The laboratory's are found by its entry point, because it stands above this package. Where txl runs from its sources
    without being installed, there is no entry point, and its commands are unknown.
    """
    for task, names in COMMANDS.items():
        yield task, [f"txl.commands.{name}" for name in names]
    for point in entry_points(group=ENTRY_POINTS):
        yield point.name, point.load()
    yield "shell", ["txl.commands.completion"]


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(
        prog="txl",
        example="txl demo",
        description="Language models that read past a fixed-length context: train, measure and use them.",
        epilog="txl COMMAND --help shows an example and the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"txl {txl.__version__}", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    for task, modules in _modules_by_task():
        known = len(commands._choices_actions)
        for module in modules:
            import_module(module).add_parser(commands)
        parser.groups[task] = commands._choices_actions[known:]
    parser.set_defaults(parse=parser.parse_args)  # for commands that run other commands
    return parser


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
    arguments = argparse.Namespace()
    try:
        check_current_directory()
        arguments = build_parser().parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
        return 0
    except RunInterrupted as stop:
        _report(str(stop))
        return stop.exit_code
    except ProcessLost as loss:
        if not loss.quiet:
            _report(str(loss))
        return 1
    except CommandFailed as failure:
        _report(" ".join(str(failure).split()))
        return 1
    except UserError as error:
        return _refuse(_with_option(str(error), arguments))
    except BrokenPipeError:
        if not _reader_is_gone(sys.stdout.fileno()):
            return 1  # that of standard error, say: the command has not done its work
        _discard_output()  # the reader closed the pipe (`txl generate ... | head`): not an error
        return 0
    except OSError as error:
        if error.strerror is None:
            raise
        if error.filename is None and is_full(error) and _output_is_a_file():
            _discard_output()
            return _refuse(f"standard output: {error.strerror}; make room, or write elsewhere")
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        smaller = getattr(arguments, "smaller", "model, batch, segment or memory (txl train --dry-run estimates)")
        return _refuse(f"out of memory; use a smaller {smaller}")


def _with_option(message: str, arguments: argparse.Namespace) -> str:
    """Name an option of the command where a function of the package has named its parameter: "mem_len is -1 ..."."""
    named = re.match(r"([a-z]\w*) is [-\d']", message)  # a value, unlike "FILE is a folder"
    if named is None or named[1] in ("directory", "file", "name", "preset") or named[1] not in vars(arguments):
        return message
    return f"--{named[1].replace('_', '-')}{message[named.end(1) :]}"


def _refuse(message: str) -> int:
    """Print one line of bounded length; a file's control characters, which a terminal would obey, are written out."""
    message = re.sub(
        "[\x00-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], " ".join(map(str.strip, message.splitlines()))
    )
    if len(message) > 2000:
        message = f"{message[:1500]} ... {message[-400:]}"
    with suppress(OSError):
        print(f"txl: error: {message}", file=sys.stderr)
    return 2


def _report(message: str) -> None:
    """Print why the command ended, in the first process only; the exit code counts if standard error is gone."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print(f"txl: {' '.join(message.splitlines())}", file=sys.stderr)


def _output_is_a_file() -> bool:
    """Return whether standard output is a file or a device, which may be full, unlike a pipe or a terminal."""
    mode = os.fstat(sys.stdout.fileno()).st_mode
    return stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not sys.stdout.isatty())


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
