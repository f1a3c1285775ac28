"""The parser of a command line: argparse with a help that begins with an example, and errors as `UserError`.

Each parser keeps a list of its options, by which the command line tells errors of the library in options.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, Protocol, TypeVar

from txl.config import whole_number
from txl.errors import UserError, did_you_mean

T = TypeVar("T")
# Words of other programs for options, without the dashes.
_SYNONYMS = {"lr": "learning-rate", "text": "corpus", "data": "corpus", "epochs": "steps", "output": "out"}


def typed(expected: str) -> Callable[[Callable[[str], T]], Callable[[str], T]]:
    """Return a decorator for the function that parses an option's value, which says what was expected.

    The function raises a ValueError for another text, or an OverflowError that says which numbers are expected.
    """

    def decorated(parse: Callable[[str], T]) -> Callable[[str], T]:
        @functools.wraps(parse)
        def parsed(text: str) -> T:
            try:
                return parse(text)
            except (ValueError, OverflowError) as error:
                wanted = error if isinstance(error, OverflowError) else expected
                raise argparse.ArgumentTypeError(f"expected {wanted}, found {text!r}") from None

        return parsed

    return decorated


class Options(Protocol):
    """A parser, or a group of its options."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument or an option, as argparse does."""
        ...


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UserError`, and accepts no abbreviated options.

    Args:
        example: command line that the help shows first, for the reader to copy.
        summary: what the command does, in a few words, for the list of commands.
        settings: arguments of argparse's parser.
    """

    def __init__(self, *, example: str = "", summary: str = "", **settings: Any):
        self.example, self.summary = example, summary
        self.arguments: list[argparse.Action] = []
        self.commands: dict[str, Parser] = {}
        self._command = ""
        wide = functools.partial(argparse.HelpFormatter, max_help_position=32)
        super().__init__(allow_abbrev=False, formatter_class=wide, **settings)
        self.register("type", int, typed("a whole number")(whole_number))
        self.register("type", float, typed("a number")(float))

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add an argument or an option, see argparse."""
        action = super().add_argument(*names, **settings)
        self.arguments.append(action)
        return action

    def group(self, title: str) -> Group:
        """Return a new group of options, which has a title in the help."""
        return Group(self, self.add_argument_group(title))

    def one_of(self, required: bool = False) -> Group:
        """Return a new group of options that exclude each other."""
        return Group(self, self.add_mutually_exclusive_group(required=required))

    def add_commands(self, dest: str, metavar: str) -> Commands:
        """Return the place for commands of this parser; a parsed command line has the command's name as `dest`."""
        self._command = dest
        return Commands(self, dest, metavar)

    def format_help(self) -> str:
        """Return the help: example, usage with what must be given, description, and options in groups."""
        needed = [_needed(action) for action in self.arguments if action.required or not action.option_strings]
        self.usage = " ".join([self.prog, *needed, "COMMAND ..." if self.commands else "[options]"])
        return f"example: {self.example}\n{super().format_help()}"

    def print_help(self, file: Any = None) -> None:
        """Print the help; argparse itself would hide that standard output is full."""
        print(self.format_help(), end="", file=file, flush=True)

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the arguments; an option may have underscores for dashes.

        Raises:
            UserError: for a mistake; for an unknown command or option, the message says which may have been meant.
        """
        self._check_command(args)
        namespace = argparse.Namespace() if namespace is None else namespace
        _, unknown = self.parse_known_args(_with_dashes(args), namespace)
        if unknown:
            self.chosen(namespace)._refuse(unknown)
        return namespace

    def chosen(self, namespace: argparse.Namespace) -> Parser:
        """Return the parser of the command that a namespace names; this parser, if it names none."""
        command = self.commands.get(getattr(namespace, self._command, None) or "")
        return self if command is None else command.chosen(namespace)

    def name_of(self, setting: str) -> str:
        """Return the option, or argument, by which a user gives a setting; its own name, if this command has none."""
        for action in self.arguments:
            if action.dest == setting:
                return max(action.option_strings, key=len, default=f"{action.metavar}")
        return setting

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` with a message of argparse's."""
        raise UserError(f"{message} (see {self.prog} --help)")

    def _check_command(self, words: Sequence[str]) -> None:
        if self.commands and words and not words[0].startswith("-"):
            if words[0] not in self.commands:
                hint = did_you_mean(words[0], self.commands) or f"expected one of {', '.join(self.commands)}"
                self.error(f"unknown command {words[0]!r}; {hint}")
            self.commands[words[0]]._check_command(words[1:])

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Refuse unknown words; for an unknown option, name the option that may have been meant."""
        word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        if not word.startswith("-"):
            self.error(f"unknown argument {word}")
        names = [name for action in self.arguments for name in action.option_strings if name.startswith("--")]
        section, _, meant = word.lstrip("-").rpartition(".")
        meant = _SYNONYMS.get(meant, meant)
        near = get_close_matches(f"--{section}.{meant}" if section else f"--{meant}", names, n=1, cutoff=0.7)
        self.error(f"unknown option {word}" + (f"; did you mean {near[0]}?" if near else ""))


class Group:
    """Group of a parser's options; made by `Parser.group` and `Parser.one_of`."""

    def __init__(self, parser: Parser, container: Options):
        self._parser, self._container = parser, container

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an option, see argparse."""
        action = self._container.add_argument(*names, **settings)
        self._parser.arguments.append(action)
        return action


class Commands:
    """The commands of a parser; made by `Parser.add_commands`."""

    def __init__(self, parser: Parser, dest: str, metavar: str):
        self._parser = parser
        self._parsers = parser.add_subparsers(dest=dest, metavar=metavar, required=True, parser_class=Parser)

    def add_parser(self, name: str, *, help: str, example: str, description: str, **settings: Any) -> Parser:
        """Add a command and return its parser.

        Args:
            name: name of the command.
            help: what it does, in a few words.
            example: command line that its help shows first.
            description: what it does, in whole sentences.
            settings: arguments of argparse's parser.
        """
        words = {"help": help, "summary": help, "example": example, "description": description}
        parser = self._parsers.add_parser(name, **words, **settings)
        self._parser.commands[name] = parser
        return parser


def _needed(action: argparse.Action) -> str:
    """Return an argument, or an option that must be given, as the usage shows it."""
    value = f"{action.metavar or action.dest.upper()}"
    if action.option_strings:
        return f"{action.option_strings[0]} {value}"
    return {"?": f"[{value}]", "+": f"{value} ..."}.get(f"{action.nargs}", value)


def _with_dashes(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with dashes for the underscores in the names of options."""
    end = words.index("--") if "--" in words else len(words)
    changed = []
    for word in words[:end]:
        name, equals, value = word.partition("=")
        is_option = name.startswith("--") and " " not in name
        changed.append(name.replace("_", "-") + equals + value if is_option else word)
    return changed + list(words[end:])
