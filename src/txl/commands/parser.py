"""The parser of a command line: argparse with a help that begins with an example, and errors as `UserError`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NoReturn, TypeVar

import txl
from txl.config import shown, whole_number
from txl.errors import Field, UserError, did_you_mean

T = TypeVar("T")
Options = argparse._ActionsContainer  # a parser, or a group of its options
# Words of other programs for options, without the dashes.
_SYNONYMS = {"lr": "learning-rate", "text": "corpus", "data": "corpus", "epochs": "steps", "output": "out"}
# Modules of `txl.commands` by task, in the order of the help.
COMMANDS = {
    "start": ("demo", "presets", "data"),
    "train": ("train", "status_report"),
    "measure": ("eval", "tuning", "score", "recl"),
    "analyse": ("attention", "samples"),
    "use": ("generate", "serve", "compress"),
    "import and export": ("exchange",),
}
# Group of entry points by which other packages add commands: the name is a task, the object the names of modules.
ENTRY_POINTS = "txl.commands"


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


def option(
    place: Options, names: str, metavar: str, help: str, kind: Callable[[str], object] = str, default: object = None
) -> argparse.Action:
    """Add an option with a value, of one name or several (`"-o --out"`); its help ends with the default, if any."""
    help += "" if default is None else f" (default: {shown(default)})"
    return place.add_argument(*names.split(), metavar=metavar, help=help, type=kind, default=default)


def choice(place: Options, name: str, words: Sequence[str], help: str, default: str | None = None) -> argparse.Action:
    """Add an option whose value is one of some words; its help ends with the default, if any."""
    help += "" if default is None else f" (default: {default})"
    return place.add_argument(name, choices=words, help=help, default=default)


def flag(place: Options, name: str, help: str) -> None:
    """Add an option without a value."""
    place.add_argument(name, action="store_true", help=help)


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UserError`, and accepts no abbreviated options.

    Its help begins with `example`; `summary` says what the command does in the list of commands.
    """

    def __init__(self, *, example: str = "", summary: str = "", **settings: Any):
        self.example, self.summary = example, summary
        self.commands: dict[str, Parser] = {}
        self.tasks: dict[str, list[str]] = {}  # names of the commands by task; empty: the help lists them by argparse
        self._excluded: list[tuple[str, ...]] = []
        self._needed: list[tuple[str, ...]] = []
        wide = functools.partial(argparse.HelpFormatter, max_help_position=32)
        super().__init__(allow_abbrev=False, formatter_class=wide, **settings)
        self.register("type", int, typed("a whole number")(whole_number))
        self.register("type", float, typed("a number")(float))

    @property
    def arguments(self) -> list[argparse.Action]:
        """The arguments and options, without the commands."""
        return [action for action in self._actions if not isinstance(action, argparse._SubParsersAction)]

    def add_commands(self, dest: str, metavar: str) -> None:
        """Let `add_command` add commands to this parser; a parsed command line has the command's name as `dest`."""
        self._parsers = self.add_subparsers(dest=dest, metavar=metavar, required=True, parser_class=Parser)

    def add_command(self, name: str, *, help: str, example: str, description: str, add_help: bool = True) -> Parser:
        """Add a command and return its parser; `help` says what it does in a few words, `description` in sentences."""
        self.commands[name] = self._parsers.add_parser(
            name, help=help, summary=help, example=example, description=description, add_help=add_help
        )
        return self.commands[name]

    def exclude(self, name: str, *others: str) -> None:
        """Refuse an option together with any of the others."""
        self._excluded.append((name, *others))

    def need(self, name: str, *others: str) -> None:
        """Refuse an option unless one of the others is given."""
        self._needed.append((name, *others))

    def format_help(self) -> str:
        """Return the help: example, usage with what must be given, description, and options in groups."""
        if self.tasks:
            lines = [f"example: {self.example}", f"usage: {self.prog} COMMAND ...", "", f"{self.description}"]
            for task, names in self.tasks.items():
                lines += ["", f"{task}:", *(f"  {name:12}{self.commands[name].summary}" for name in names)]
            options = [(", ".join(action.option_strings), action.help) for action in self.arguments]
            lines += ["", "options:", *(f"  {names:12}{about}" for names, about in options)]
            return "\n".join([*lines, "", f"{self.epilog}", ""])
        usage = [self.prog]
        for action in self.arguments:
            value = f"{action.metavar or action.dest.upper()}"
            if action.option_strings and action.required:
                usage.append(f"{action.option_strings[0]} {value}")
            elif not action.option_strings:
                usage.append({"?": f"[{value}]", "+": f"{value} ..."}.get(f"{action.nargs}", value))
        self.usage = " ".join([*usage, "COMMAND ..." if self.commands else "[options]"])
        return f"example: {self.example}\n{super().format_help()}"

    def print_help(self, file: Any = None) -> None:
        """Print the help; argparse itself would hide that standard output is full."""
        print(self.format_help(), end="", file=file, flush=True)

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the arguments, in which options may have underscores for dashes; raise a `UserError` for a mistake."""
        self._check_command(args)
        namespace = argparse.Namespace() if namespace is None else namespace
        end = args.index("--") if "--" in args else len(args)
        words = [_with_dashes(word) for word in args[:end]]
        _, unknown = self.parse_known_args([*words, *args[end:]], namespace)
        command = self.chosen(namespace)
        if unknown:
            command._refuse(unknown)
        command._check_combinations(namespace)
        return namespace

    def chosen(self, namespace: argparse.Namespace) -> Parser:
        """Return the parser of the command that a namespace names; this parser, if it names none."""
        dest = self._parsers.dest if self.commands else ""
        command = self.commands.get(getattr(namespace, dest, None) or "")
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

    def _check_combinations(self, arguments: argparse.Namespace) -> None:
        given = {name for name, value in vars(arguments).items() if value is not None and value is not False}
        for name, *others in self._excluded:
            for other in others:
                if {name, other} <= given:
                    raise UserError((Field(name), " and ", Field(other), " were both given"), expected="one of them")
        for name, *others in self._needed:
            if name in given and given.isdisjoint(others):
                choices = [part for other in others for part in (" or ", Field(other))][1:]
                raise UserError((Field(name), " was given without ", *choices))

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


def _with_dashes(word: str) -> str:
    """Return a word of a command line, with dashes for the underscores in the name of an option."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") and " " not in name else word


class _Version(argparse.Action):
    """Option that prints the version; argparse's own would hide that standard output is full."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"txl {txl.__version__}", flush=True)
        parser.exit()


def build_parser() -> Parser:
    """Return the parser of the whole command line.

    Commands of other packages, which stand above this one, are found by their entry points. Where txl runs from its
    sources without being installed, there are none, and these commands are unknown.
    """
    parser = Parser(
        prog="txl",
        example="txl demo",
        description="Language models that read past a fixed-length context: train, measure, use them.",
        epilog="txl COMMAND --help shows an example and the options of a command.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.add_commands("command", "COMMAND")
    tasks = {task: [f"txl.commands.{name}" for name in names] for task, names in COMMANDS.items()}
    tasks |= {point.name: point.load() for point in entry_points(group=ENTRY_POINTS)}
    for task, modules in (tasks | {"shell": ["txl.commands.completion"]}).items():
        known = len(parser.commands)
        for module in modules:
            import_module(module).add_parser(parser)
        parser.tasks[task] = list(parser.commands)[known:]
    return parser
