"""Options shared by several commands, and the configurations, devices, runs, corpora and files that they name."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar

from txl.commands.output import say
from txl.config import (
    MODEL_FAMILIES,
    DataConfig,
    Lengths,
    RunConfig,
    chosen_family,
    leaf_fields,
    options,
    parsed_options,
    placeholder,
    shown,
    whole_number,
    with_options,
)
from txl.errors import UserError
from txl.files import refuse_file

if TYPE_CHECKING:
    from txl.data.detokenise import Convention
    from txl.data.prepared import Corpus
    from txl.data.vocabulary import Vocabulary
    from txl.runs.directory import RunDirectory

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

Parse = TypeVar("Parse", bound=Callable[[str], object])
_NAMED = 8
"""Most words or characters that a message lists; the others are only counted."""


def named(name: str) -> Callable[[Parse], Parse]:
    """Return a decorator that names an option's type for error messages: "expected NAME"."""

    def rename(parse: Parse) -> Parse:
        parse.__name__ = name
        return parse

    return rename


def add_config_options(
    parser: argparse.ArgumentParser,
    sections: tuple[str, ...],
    help_of: str = "",
    short: Sequence[str] = (),
    first: argparse._ArgumentGroup | None = None,
) -> None:
    """Add the fields of the configuration's sections as options: ``--model.mem-len`` for ``config.model.mem_len``.

    Args:
        parser: parser that gets the options, in one group for each section and each class of models.
        sections: sections to add: model, data, train, eval.
        help_of: family of models whose options the help shows. Empty: the family of the preset, if one precedes
            --help, else all families.
        short: fields that also have a short form, ``--mem-len`` for ``model.mem_len``.
        first: group for the fields in `short`, instead of the group of their section.
    """
    groups: dict[str, Any] = {}
    for option in sorted(options(), key=lambda each: _place(each.name, short)):
        section, _, field = option.name.partition(".")
        if section not in sections:
            continue
        title = f"{section}.*, {option.owner.title}" if option.owner else _TITLES[section]
        spellings = [option.name, *([field] if option.name in short else [])]
        flags = [f"--{name.replace('_', '-')}" for name in reversed(spellings)]
        flags += [f"--{option.name}"] if "_" in option.name else []
        switch: dict[str, Any] = (
            {"nargs": "?", "const": "true"} if option.hint is bool else {}
        )  # --model.pre-norm alone switches it on
        group = first if option.name in short else groups.get(title)
        if group is None:
            group = groups[title] = parser.add_argument_group(title)
        group.add_argument(
            *flags,
            dest=option.name,
            metavar=placeholder(option.hint),
            default=argparse.SUPPRESS,
            help=option.help,
            **switch,
        )
    if "model" in sections:
        has_preset = any(action.dest == "preset" and not action.option_strings for action in parser._actions)
        told = "show this help, with the values of PRESET" if has_preset else "show this help"
        parser.add_argument("-h", "--help", action=_Help, nargs=0, family=help_of, help=told)


_TITLES = {
    "data": "data.*, the text",
    "model": "model.*",
    "train": "train.*",
    "eval": "eval.*, defaults of commands that evaluate",
}


def _place(name: str, short: Sequence[str]) -> tuple[int, int]:
    """Return the sort key of an option: first the order of `short`, then text, model, training, evaluation."""
    if name in short:
        return 0, list(short).index(name)
    return 1, list(_TITLES).index(name.partition(".")[0])


class _Help(argparse.Action):
    """Action of `--help` that shows only the fields of one family of models, with the values of the preset."""

    def __init__(self, option_strings: list[str], dest: str, family: str, **settings: Any):
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **settings)
        self.family = family

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        family, values_of_preset = MODEL_FAMILIES.get(self.family), dict[str, Any]()
        name = getattr(namespace, "preset", None)
        if name is not None:
            given = config_options(namespace)
            with suppress(UserError):
                config = base_config(name)
                of_model = {key.partition(".")[2]: value for key, value in parsed_options(given).items()}
                family = family or chosen_family(of_model, config.model)
                values_of_preset = {key: value for key, _, _, value in leaf_fields(with_options(config, given))}
        for action in parser._actions:
            section, _, field = action.dest.partition(".")
            if family is not None and section == "model" and field not in family.__dataclass_fields__:
                action.help = argparse.SUPPRESS
            elif action.dest in values_of_preset:
                value = values_of_preset[action.dest]
                action.help = f"{action.help}" + ("" if value == () else f" [{shown(value)}]")
        parser.print_help()
        parser.exit()


def base_config(name: str) -> RunConfig:
    """Return the configuration of a preset, or of a run directory (such as an imported model, to fine-tune it)."""
    from txl.presets import preset, presets

    if name in presets() or not (Path(name) / "config.json").is_file():
        if name not in presets() and Path(name).is_file():
            raise UserError(f"{name} is a file, not a preset; give a text with --data.corpus {shlex.quote(name)}")
        if os.sep in name:
            raise UserError(f"{name} is neither a preset nor a run directory (it has no config.json)")
        return preset(name)
    from txl.runs.directory import RunDirectory

    config = RunDirectory(name).config()
    config.train.planned_minutes = None  # planned for that run's text and steps
    return config


def config_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the given options of `add_config_options`: text by dotted field name."""
    return {name: value for name, value in vars(arguments).items() if "." in name}


def data_config(arguments: argparse.Namespace, base: DataConfig) -> DataConfig:
    """Return the corpus configuration `base` with the given ``--data.*`` options set, and with absolute paths."""
    from txl.data.corpora import with_absolute_paths

    return with_absolute_paths(with_options(RunConfig(data=base), config_options(arguments)).data)


@named("a path or name")
def not_empty(text: str) -> str:
    """Return a path or name; refuse an empty one, such as an unset variable of the shell."""
    if not text:
        raise ValueError
    return text


def standard_input() -> IO[bytes]:
    """Return standard input, for reading bytes."""
    if sys.stdin is None:
        raise UserError("standard input is closed; give a file instead of -")
    return sys.stdin.buffer


def add_out(parser: argparse._ActionsContainer, metavar: str, help: str, **settings: Any) -> None:
    """Add the option for the output path of a command."""
    parser.add_argument("-o", "--out", type=not_empty, metavar=metavar, help=help, **settings)


def add_data_dir(parser: argparse._ActionsContainer) -> None:
    """Add the option for the folder of prepared corpora."""
    parser.add_argument(
        "--data-dir",
        type=not_empty,
        metavar="DIR",
        help="folder of prepared corpora (default: $TXL_DATA, else the user's cache)",
    )


def add_device(parser: argparse._ActionsContainer) -> None:
    """Add the option for the device that the model runs on."""
    parser.add_argument(
        "--device", type=_device, metavar="NAME", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)"
    )


_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla", "meta")
"""Device types of PyTorch."""


@named("cpu, cuda or cuda:1")
def _device(text: str) -> str:
    """Return the name of a device; refuse an unknown device type here, before PyTorch is imported."""
    if not text or (text.partition(":")[0] not in _DEVICES and not entry_points(group="torch.backends")):
        raise ValueError
    return text


def add_checkpoint(parser: argparse._ActionsContainer) -> None:
    """Add the option for the checkpoint to load."""
    parser.add_argument(
        "--checkpoint", metavar="WHICH", help="best, latest, or a step's number (default: best, else latest)"
    )


def add_dtype(parser: argparse._ActionsContainer) -> None:
    """Add the option for the number format of an evaluation."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="number format of matrix products (default: float32)",
    )


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of memory, window and clamp; the defaults are the run's test settings."""
    group = parser.add_argument_group("memory (default: the run's test settings)")
    group.add_argument(
        "--mem-len", type=int, metavar="M", help="positions of memory; without --window, the window is M too"
    )
    group.add_argument(
        "--window", type=limit, metavar="N", help="keys that a query attends to, its own included; none: no limit"
    )
    group.add_argument(
        "--clamp-len", type=limit, metavar="C", help="distances above C count as C; none: every distance as it is"
    )


def add_sampling_options(parser: argparse._ActionsContainer) -> argparse._MutuallyExclusiveGroup:
    """Add the options for drawing tokens; return the group of `--temperature`, for options that exclude it."""
    parser.add_argument(
        "--top-k",
        type=_top_k,
        default=40,
        metavar="K",
        help="draw from the K likeliest tokens; none: all (default: 40)",
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the fewest tokens whose probabilities reach P"
    )
    temperature = parser.add_mutually_exclusive_group()
    temperature.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="below 1: likely tokens more often; 0: always the likeliest (default: 1)",
    )
    return temperature


@named("a whole number or none")
def _top_k(text: str) -> int | None:
    return None if text.lower() == "none" else bounded_int(text)


def add_detokenise(parser: argparse._ActionsContainer, default: str) -> None:
    """Add the option for joining the tokenised words of a benchmark into ordinary text."""
    parser.add_argument(
        "--detokenise",
        nargs="?",
        const="auto",
        default=default,
        choices=("auto", "wikitext", "ptb", "lm1b", "none"),
        help="join a benchmark's words and marks into ordinary text; auto: detect the benchmark from the vocabulary "
        f"(default: {default})",
    )


def convention(name: str, vocabulary: Vocabulary | None) -> Convention | None:
    """Return the tokenisation convention that `--detokenise` selects; None if there is none."""
    from txl.data.detokenise import check_convention, convention_of

    if name == "none":
        return None
    if name == "auto":
        return convention_of(vocabulary)
    if vocabulary is not None and vocabulary.kind != "word":
        raise UserError(f"--detokenise is {name}, but this model reads {vocabulary.kind} tokens; leave it out")
    return check_convention(name)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add the option for machine-readable output."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that read a run and a corpus: `--data.*`, checkpoint, data folder, device, JSON."""
    add_checkpoint(parser)
    add_device(parser)
    add_json(parser)
    text = parser.add_argument_group("text (default: the run's own)")
    add_config_options(parser, ("data",), short=("data.corpus",), first=text)
    add_data_dir(text)


def bounded_int(text: str) -> int:
    """Return a whole number in the range that all arithmetic represents exactly; `txl.cli` uses this for type `int`.

    Raises:
        ValueError: if the text is not a whole number.
        argparse.ArgumentTypeError: if the number is out of range.
    """
    try:
        return whole_number(text)
    except OverflowError as error:
        raise argparse.ArgumentTypeError(f"expected {error}") from None


@named("a whole number or all")
def number_or_all(text: str) -> int | Literal["all"]:
    """Return a whole number, or "all"."""
    return "all" if text.lower() == "all" else bounded_int(text)


@named("a whole number or none")
def limit(text: str) -> int | Literal["none"]:
    """Return a whole number, or "none"."""
    return "none" if text.lower() == "none" else bounded_int(text)


@named("whole numbers separated by commas")
def numbers(text: str) -> list[int]:
    """Return whole numbers separated by commas."""
    return [bounded_int(part) for part in text.split(",")]


def tested_lengths(arguments: argparse.Namespace, run: RunConfig) -> Lengths:
    """Return memory length, window and clamp of an evaluation: the given options, else the run's test settings.

    ``--mem-len M`` without ``--window`` means window M (`Lengths.tested`); without memory each segment is read alone.
    """
    return run.eval.lengths.tested(arguments.mem_len, arguments.window, arguments.clamp_len)


def clamp_setting(given: int | Literal["none"] | None, run: RunConfig) -> int | Literal["none"]:
    """Return the clamp of an evaluation, a number or "none": the given one, else that of the run's test settings."""
    return run.eval.lengths.options()["clamp_len"] if given is None else given


def pick_device(name: str | None) -> str:
    """Return the device to use: the named one, else a GPU if there is one, else the CPU."""
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.startswith("cpu:"):
        chosen = "cpu"  # there is one
    try:
        torch.zeros(1, device=chosen).item()
        if chosen.startswith("cuda:"):
            torch.cuda.set_device(chosen)  # streams, events and our kernels are those of the current GPU
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        if "aten::" in reason:  # words for PyTorch's own developers
            reason = "this PyTorch has no such device"
        raise UserError(f"--device {chosen} cannot be used here: {reason}; use --device cpu") from None
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32, in an LSTM too
    return chosen


def existing_run(path: str, option: str = "") -> Path:
    """Return the path of a run directory, given to `option` or as an argument; refuse what is not a run directory."""
    directory, what = Path(path), f"{option} {path}".lstrip()
    refuse_file(directory, what, "a run directory")
    if not directory.is_dir():
        made_by = f"txl train --out {shlex.quote(path)}"
        raise UserError(f"{what}: no such directory; expected a run directory (made by {made_by})")
    if not (directory / "config.json").is_file():
        raise UserError(f"{what}: not a run directory (it has no config.json)")
    return directory


def run_to_read(arguments: argparse.Namespace) -> tuple[RunDirectory, RunConfig, Path]:
    """Return the run directory that a command names, its configuration and checkpoint, without importing PyTorch."""
    from txl.runs.directory import RunDirectory

    directory = RunDirectory(existing_run(arguments.directory))
    config, checkpoint = directory.config(), directory.checkpoint(arguments.checkpoint)
    if "data.corpus" in config_options(arguments):
        check_corpus(data_config(arguments, config.data).corpus)
    return directory, config, checkpoint


def check_corpus(name: str) -> None:
    """Refuse a corpus that does not exist, before any slow work begins."""
    from txl.data.catalogue import BENCHMARKS
    from txl.data.corpora import STDLIB, own_files

    if name and name != STDLIB and name not in BENCHMARKS:
        own_files(name)


def writable_folder(path: str | Path) -> Path:
    """Return a folder for results after checking that it is writable; folders made for the check are removed."""
    folder = Path(path)
    refuse_file(folder, f"--out {path}", "a folder")
    made = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]  # the innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--out {path} cannot be written ({error.strerror}); give another folder") from None
    finally:
        for each in made:
            with suppress(OSError):
                each.rmdir()
    return folder


def refuse_below_one(arguments: argparse.Namespace, *names: str) -> None:
    """Refuse the first of the named options whose number is below 1; options that were not given are skipped."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; expected 1 or more")


def check_output_file(out: str | None, source: Path | None) -> None:
    """Refuse an output file that cannot be written, before anything is computed."""
    if out is None:
        return
    path = Path(out)
    if not path.parent.is_dir():
        raise UserError(f"--out {out}: {path.parent} is not a folder; make it first")
    if path.is_dir():
        raise UserError(f"--out {out} is a folder; expected the name of a file")
    if source is not None and path.exists() and path.samefile(source):
        raise UserError(f"--out {out} is the source itself; expected another file")
    if _is_of_a_run(path.resolve()):
        raise UserError(f"--out {out} is a file of the run itself; expected another file")


_OF_A_RUN = ("config.json", "vocabulary.json", "log.jsonl", "best", "latest", "checkpoints")
"""Files of a run directory without which the run is lost."""


def _is_of_a_run(path: Path) -> bool:
    """Return whether a resolved path is that of a file in `_OF_A_RUN`, or below its folder of checkpoints."""
    return any(
        path.relative_to(folder).parts[0] in _OF_A_RUN
        and (folder / "config.json").is_file()
        and (folder / "checkpoints").is_dir()
        for folder in path.parents
    )


def run_corpus(
    run: RunDirectory, vocabulary: Vocabulary | None, arguments: argparse.Namespace, whole: bool = False
) -> Corpus:
    """Open the corpus that the run was trained on, or the corpus that the options name, in the run's vocabulary."""
    from txl.runs.corpus import is_trained_on, open_run_corpus

    options = config_options(arguments)
    corpus = open_run_corpus(run, vocabulary, options, data_dir=arguments.data_dir, whole=whole, quiet=arguments.json)
    if not options and not is_trained_on(run, corpus):
        if run.started() is None:
            say(f"note: the log of {run.path} does not say which text the model was trained on")
        else:
            say(f"note: {corpus.name} on this machine is not the text that this model was trained on")
    return corpus


def note_lacking(vocabulary: Vocabulary | None, prompt: str) -> None:
    """Print a note with the words or characters of a prompt that are read as `<unk>`."""
    lacking = [] if vocabulary is None else vocabulary.lacking(prompt)
    if lacking:
        words = vocabulary is not None and vocabulary.kind == "word"
        shown = [each if words else f"{each!r} (U+{ord(each):04X})" for each in lacking[:_NAMED]]
        more = f" and {len(lacking) - _NAMED:,} more" if len(lacking) > _NAMED else ""
        say(f"note: the vocabulary lacks {', '.join(shown)}{more}; read as <unk>")
