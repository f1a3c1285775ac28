"""Options that several commands share, and what they name: devices, runs, corpora, configurations, output files."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, Literal

from txl.commands.output import say
from txl.commands.parser import Options, Parser, choice, flag, option, typed
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
    validate,
    whole_number,
    with_options,
)
from txl.errors import Field, UserError, named
from txl.files import refuse_file
from txl.generation.sampling import Sampling
from txl.runs.directory import RunDirectory

if TYPE_CHECKING:  # these modules import NumPy, which `txl --help` does not need
    from txl.data.detokenise import Convention
    from txl.data.prepared import Corpus
    from txl.data.vocabulary import Vocabulary
    from txl.models.family import FamilyModel

DTYPES = ("float32", "bfloat16")
# Device types of PyTorch.
_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla", "meta")
# Files of a run directory without which the run is lost.
_OF_A_RUN = ("config.json", "vocabulary.json", "log.jsonl", "best", "latest", "checkpoints")
# Sections of the configuration, in the order of the help.
_TITLES = {
    "data": "data.*, the text",
    "model": "model.*",
    "train": "train.*",
    "eval": "eval.*, defaults of commands that evaluate",
}


@typed("a path or name")
def not_empty(text: str) -> str:
    """Return a path or name; refuse an empty one, such as an unset variable of the shell."""
    if not text:
        raise ValueError
    return text


@typed("cpu, cuda or cuda:1")
def _device(text: str) -> str:
    """Return the name of a device; refuse an unknown device type here, before PyTorch is imported."""
    if not text or (text.partition(":")[0] not in _DEVICES and not entry_points(group="torch.backends")):
        raise ValueError
    return text


@typed("1 or more")
def positive(text: str) -> int:
    """Return a whole number above 0."""
    number = whole_number(text)
    if number < 1:
        raise ValueError
    return number


@typed("a whole number or all")
def number_or_all(text: str) -> int | Literal["all"]:
    """Return a whole number, or "all"."""
    return "all" if text.lower() == "all" else whole_number(text)


@typed("a whole number or none")
def limit(text: str) -> int | Literal["none"]:
    """Return a whole number, or "none"."""
    return "none" if text.lower() == "none" else whole_number(text)


@typed("whole numbers separated by commas")
def numbers(text: str) -> list[int]:
    """Return whole numbers separated by commas."""
    return [whole_number(part) for part in text.split(",")]


@typed("numbers separated by commas")
def fractions(text: str) -> list[float]:
    """Return numbers separated by commas."""
    return [float(part) for part in text.split(",")]


# Names, placeholder, help and type of options that several commands have.
_SHARED = {
    "directory": ("directory", "DIR", "a run directory", str),
    "data_dir": ("--data-dir", "DIR", "folder of prepared corpora (default: $TXL_DATA, or a cache)", not_empty),
    "device": ("--device", "NAME", "cpu, cuda, cuda:1 ... (default: a GPU if there is one)", _device),
    "checkpoint": ("--checkpoint", "WHICH", "best, latest, or a step's number (default: best, else latest)", str),
    "segment": ("--segment", "T", "tokens of each lane in one step", positive),
    "batch": ("--batch", "B", "lanes: parts of the text that are read in parallel", positive),
    "max_tokens": ("--max-tokens", "N", "read only the first N tokens of a split", int),
    "temperature": ("--temperature", "X", "softmax temperature (default: the run's)", float),
}  # fmt: skip


def shared(place: Options, *names: str) -> None:
    """Add options that several commands have, by name: those of `_SHARED`, dtype and json."""
    for name in names:
        if name == "json":
            flag(place, "--json", "print the result as one JSON object")
        elif name == "dtype":
            choice(place, "--dtype", DTYPES, "number format of matrix products", "float32")
        else:
            option(place, *_SHARED[name])


def add_out(place: Options, metavar: str, help: str, **settings: Any) -> None:
    """Add the option for the output path of a command."""
    place.add_argument("-o", "--out", type=not_empty, metavar=metavar, help=help, **settings)


def add_memory_options(parser: Parser) -> None:
    """Add the options of memory, window and clamp; the defaults are the run's test settings."""
    group = parser.add_argument_group("memory (default: the run's test settings)")
    option(group, "--mem-len", "M", "positions of memory; without --window, the window is M too", int)
    option(group, "--window", "N", "keys that a query attends to, its own included; none: no limit", limit)
    option(group, "--clamp-len", "C", "distances above C count as C; none: every distance as it is", limit)


def add_sampling_options(parser: Parser) -> Options:
    """Add the options for drawing tokens; return the group of `--temperature`, for options that exclude it."""
    option(parser, "--top-k", "K", "draw from the K likeliest tokens; none: all", limit, 40)
    option(parser, "--top-p", "P", "draw from the fewest tokens whose probabilities reach P", float)
    group = parser.add_mutually_exclusive_group()
    option(group, "--temperature", "X", "below 1: likely tokens more often; 0: always the likeliest", float, 1.0)
    return group


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """Return the settings that `add_sampling_options` has read; bad ones are refused without importing PyTorch."""
    top_k = None if arguments.top_k == "none" else arguments.top_k
    return Sampling(top_k, arguments.top_p, arguments.temperature)


def add_detokenise(parser: Parser, default: str) -> None:
    """Add the option for joining the tokenised words of a benchmark into ordinary text."""
    parser.add_argument(
        "--detokenise",
        nargs="?",
        const="auto",
        default=default,
        choices=("auto", "wikitext", "ptb", "lm1b", "none"),
        help=f"join a benchmark's words into ordinary text; auto: of which one, by the vocabulary (default: {default})",
    )


def add_run_options(parser: Parser, text: str = "text (default: the run's own)") -> None:
    """Add the options of commands that read a run and a corpus: `--data.*`, data folder, device, JSON."""
    shared(parser, "device", "json")
    group = parser.add_argument_group(text)
    add_config_options(parser, ("data",), short=("data.corpus",), first=group)
    shared(group, "data_dir")


def add_config_options(
    parser: Parser,
    sections: tuple[str, ...],
    help_of: str = "",
    short: Sequence[str] = (),
    first: Options | None = None,
    fields: Collection[str] = (),
) -> None:
    """Add the fields of the configuration's sections as options: ``--model.mem-len`` for ``config.model.mem_len``.

    Fields of the text also have a short form, ``--word-rule`` for ``data.word_rule``, unless the command itself has an
    option or an argument of this name; fields in `short` have one too and come first, in the group `first`. The help
    shows the options of the family `help_of`, else of the preset's, if one precedes --help, else of all families.
    `fields` names the fields that get an option; empty: all of the sections.
    """
    groups: dict[str, Options] = {}
    known = {name: number for number, name in enumerate((*short, *_TITLES))}
    for item in sorted(options(), key=lambda item: known.get(item.name, known[item.name.partition(".")[0]])):
        section, _, field = item.name.partition(".")
        if section not in sections or (fields and item.name not in fields):
            continue
        is_free = all(action.dest != field for action in parser.arguments)
        names = [field, item.name] if item.name in short or (section == "data" and is_free) else [item.name]
        title = f"{section}.*, {item.owner.title}" if item.owner else _TITLES[section]
        group = first if item.name in short else groups.get(title)
        if group is None:
            group = groups[title] = parser.add_argument_group(title)
        # --model.pre-norm alone switches it on.
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if item.hint is bool else {}
        flags = [f"--{name.replace('_', '-')}" for name in names]
        metavar, default = placeholder(item.hint), argparse.SUPPRESS
        group.add_argument(*flags, dest=item.name, metavar=metavar, default=default, help=item.help, **switch)
    if "model" in sections:
        has_preset = any(action.dest == "preset" for action in parser.arguments)
        about = "show this help, with the values of PRESET" if has_preset else "show this help"
        parser.add_argument("-h", "--help", action=_Help, nargs=0, family=help_of, help=about)


class _Help(argparse.Action):
    """Action of `--help` that shows only the fields of one family of models, with the values of the preset."""

    def __init__(self, option_strings: list[str], dest: str, family: str, **settings: Any):
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **settings)
        self.family = family

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *value: Any) -> None:
        assert isinstance(parser, Parser)
        family, values = MODEL_FAMILIES.get(self.family), dict[str, str]()
        preset, changes = getattr(namespace, "preset", None), config_options(namespace)
        if preset is not None:
            with suppress(UserError):
                config = base_config(preset)
                of_model = {name.partition(".")[2]: value for name, value in parsed_options(changes).items()}
                family = family or chosen_family(of_model, config.model)
                fields = leaf_fields(with_options(config, changes))
                values = {name: shown(value) for name, _, _, value in fields if value != ()}
        of_family = None if family is None else {f"model.{item.name}" for item in dataclasses.fields(family)}
        for action in parser.arguments:
            if of_family is not None and action.dest.startswith("model.") and action.dest not in of_family:
                action.help = argparse.SUPPRESS
            elif action.dest in values:
                action.help = f"{action.help} [{values[action.dest]}]"
        parser.print_help()
        parser.exit()


def base_config(name: str) -> RunConfig:
    """Return the configuration of a preset, or of a run directory (such as an imported model, to fine-tune it)."""
    from txl.presets import preset, presets

    if name not in presets():
        if (Path(name) / "config.json").is_file():
            config = RunDirectory(name).config()
            config.train.planned_minutes = None  # planned for that run's text and steps
            return config
        if Path(name).is_file():
            remedy = ("give a text with ", Field("data.corpus", name))
            raise UserError("a file, not a preset", value=name, remedy=remedy)
        if os.sep in name:
            raise UserError("neither a preset nor a run directory (it has no config.json)", value=name)
    return preset(name)


def run_config(base: RunConfig, changes: dict[str, str]) -> RunConfig:
    """Return a configuration with the given options set, checked as far as possible without PyTorch."""
    from txl.data.corpora import refuse_unused, with_absolute_paths

    config = with_options(base, changes)
    if config.data.corpus != base.data.corpus and "data.source" not in changes:
        config.data.source = None  # the base's source belongs to the base's own corpus
    config.data = with_absolute_paths(config.data)
    validate(config)
    refuse_unused(config.data, changes)
    if os.environ.get("RANK", "0") == "0":  # so that only one process reports it
        check_corpus(config.data.corpus)
    return config


def config_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the given options of `add_config_options`: text by dotted field name."""
    return {name: value for name, value in vars(arguments).items() if "." in name}


def data_config(arguments: argparse.Namespace, base: DataConfig) -> DataConfig:
    """Return the corpus configuration `base` with the given ``--data.*`` options set, and with absolute paths."""
    from txl.data.corpora import with_absolute_paths

    return with_absolute_paths(with_options(RunConfig(data=base), config_options(arguments)).data)


def standard_input() -> IO[bytes]:
    """Return standard input, for reading bytes."""
    if sys.stdin is None:
        raise UserError("standard input is closed", remedy="give a file instead of -")
    return sys.stdin.buffer


def convention(name: str, vocabulary: Vocabulary | None) -> Convention | None:
    """Return the tokenisation convention that `--detokenise` selects; None if there is none."""
    from txl.data.detokenise import check_convention, convention_of

    if name in ("none", "auto"):
        return None if name == "none" else convention_of(vocabulary)
    if vocabulary is not None and vocabulary.kind != "word":
        raise UserError(f"this model reads {vocabulary.kind} tokens", field="detokenise", value=name, expected="none")
    return check_convention(name)


def tested_lengths(arguments: argparse.Namespace, run: RunConfig) -> Lengths:
    """Return memory length, window and clamp of an evaluation: the given options, else the run's test settings."""
    return run.eval.lengths.tested(arguments.mem_len, arguments.window, arguments.clamp_len)


def pick_device(name: str | None) -> str:
    """Return the device to use, the named one or a GPU or the CPU, after preparing this process to compute there."""
    import torch

    from txl.devices import check_device, chosen_device, keep_freed_memory

    keep_freed_memory()
    chosen = chosen_device(name)
    check_device(chosen)
    if chosen.startswith("cuda:"):
        torch.cuda.set_device(chosen)  # streams, events and our kernels are those of the current GPU
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32, in an LSTM too
    return chosen


def existing_run(path: str, field: str = "") -> Path:
    """Return the path of a run directory, an argument or the value of `field`; refuse what is not a run directory."""
    directory, expected = Path(path), "a run directory"
    refuse_file(directory, field, expected)
    if not directory.is_dir():
        expected += f" (made by txl train --out {shlex.quote(path)})"
        raise UserError("no such directory", field=field, value=path, expected=expected)
    if not (directory / "config.json").is_file():
        raise UserError("not a run directory (it has no config.json)", field=field, value=path, expected=expected)
    return directory


def run_to_read(arguments: argparse.Namespace) -> tuple[RunDirectory, RunConfig, Path]:
    """Return the run directory that a command names, its configuration and checkpoint, without importing PyTorch."""
    directory = RunDirectory(existing_run(arguments.directory))
    config, checkpoint = directory.config(), directory.checkpoint(arguments.checkpoint)
    if "data.corpus" in config_options(arguments):
        check_corpus(data_config(arguments, config.data).corpus)
    return directory, config, checkpoint


def load_to_read(run: RunDirectory, checkpoint: Path, device: str) -> tuple[FamilyModel, Vocabulary]:
    """Load a model and the vocabulary that a text is read with; refuse a run without one."""
    model, vocabulary = run.load(checkpoint, device=device)
    if vocabulary is None:
        remedy = "import it again with its vocabulary"
        raise UserError("has no vocabulary, so no text can be read", value=run.path, remedy=remedy)
    return model, vocabulary


def check_corpus(name: str) -> None:
    """Refuse a corpus that does not exist, or is a file that holds no text, before any slow work begins."""
    from txl.data.benchmarks import BENCHMARKS
    from txl.data.corpora import STDLIB, own_files
    from txl.data.user_text import refuse_no_text

    if name and name != STDLIB and name not in BENCHMARKS:
        files = own_files(name)
        if len(files) == 1:  # of a folder's files, some may not be read
            refuse_no_text(files)


def run_corpus(
    run: RunDirectory, vocabulary: Vocabulary | None, arguments: argparse.Namespace, whole: bool = False
) -> Corpus:
    """Open the corpus that the run was trained on, or the corpus that the options name, in the run's vocabulary."""
    from txl.runs.corpus import is_trained_on, open_run_corpus

    given = config_options(arguments)
    corpus = open_run_corpus(run, vocabulary, given, data_dir=arguments.data_dir, whole=whole, quiet=arguments.json)
    if not given and not is_trained_on(run, corpus):
        if run.log().started is None:
            say(f"note: the log of {run.path} does not say which text the model was trained on")
        else:
            say(f"note: {corpus.name} on this machine is not the text that this model was trained on")
    return corpus


def note_lacking(vocabulary: Vocabulary | None, prompt: str) -> None:
    """Print notes on words and characters of a prompt that are read as `<unk>`, or that training never saw."""
    from txl.data.lacking import Lacking

    if vocabulary is None:
        return
    tally = Lacking(vocabulary)
    lacking = vocabulary.lacking(prompt)
    for symbol in [*lacking, *vocabulary.unseen(prompt)]:
        tally.add(symbol)
    if lacking:
        say(f"note: the vocabulary lacks {named(lacking)}; read as <unk>")
    for note in tally.notes("the prompt"):
        say(f"note: {note}")


def writable_folder(path: str | Path) -> Path:
    """Return a folder for results after checking that it is writable; folders made for the check are removed."""
    folder = Path(path)
    refuse_file(folder, "out", "a folder")
    missing = [part for part in (folder, *folder.parents) if not os.path.lexists(part)]  # the innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise UserError(problem, field="out", value=path, remedy="give another folder") from None
    finally:
        for part in missing:
            with suppress(OSError):
                part.rmdir()
    return folder


def check_output_file(out: str | None, source: Path | None) -> None:
    """Refuse an output file that is the source or one of a run's, or is in no folder, before anything is computed."""
    if out is None:
        return
    path, problem, resolved = Path(out), "", Path(out).resolve()
    runs = [run for run in resolved.parents if (run / "config.json").is_file() and (run / "checkpoints").is_dir()]
    if not path.parent.is_dir():
        problem = f"{path.parent} is not a folder"
    elif path.is_dir():
        problem = "a folder"
    elif source is not None and path.exists() and path.samefile(source):
        problem = "the source itself"
    elif any(resolved.relative_to(run).parts[0] in _OF_A_RUN for run in runs):
        problem = "a file of the run itself"
    if problem:
        raise UserError(problem, field="out", value=out, expected="the name of another file")
