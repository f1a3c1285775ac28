"""Options that several commands share, and what they name: configurations, devices, runs, corpora and files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from txl.commands.output import say
from txl.config import (
    MODEL_FAMILIES,
    DataConfig,
    ModelConfig,
    RunConfig,
    chosen_family,
    options,
    parsed_options,
    whole_number,
    with_options,
)
from txl.errors import UserError

if TYPE_CHECKING:
    from txl.data.detokenise import Convention
    from txl.data.prepared import Corpus
    from txl.data.vocabulary import Vocabulary
    from txl.runs.directory import RunDirectory

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

Parse = TypeVar("Parse", bound=Callable[[str], object])
_NAMED = 8
"""Words or characters that a message names before it only counts them."""


def named(name: str) -> Callable[[Parse], Parse]:
    """Return a decorator that names an option's type for the message in which argparse refuses a value."""

    def rename(parse: Parse) -> Parse:
        parse.__name__ = name
        return parse

    return rename


def add_config_options(parser: argparse.ArgumentParser, sections: tuple[str, ...], help_of: str = "") -> None:
    """Add the fields of the configuration's sections as options: ``--model.mem-len`` for ``config.model.mem_len``.

    Args:
        parser: where they are added, those of each class of models as a group.
        sections: model, data, train, eval.
        help_of: a family of models whose options alone are shown in the help. Empty: that of the preset, if one stands
            before --help, else all of them.
    """
    groups: dict[str, Any] = {}
    for option in options():
        section = option.name.partition(".")[0]
        if section not in sections:
            continue
        title = f"{section}, {option.owner.title}" if option.owner else section
        flag = f"--{option.name.replace('_', '-')}"
        flags = [flag] if flag == f"--{option.name}" else [flag, f"--{option.name}"]
        switch: dict[str, Any] = (
            {"nargs": "?", "const": "true"} if option.hint is bool else {}
        )  # --model.pre-norm alone switches it on
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            *flags, dest=option.name, metavar="X", default=argparse.SUPPRESS, help=option.help, **switch
        )
    if "model" in sections:
        parser.add_argument(
            "-h", "--help", action=_Help, nargs=0, family=help_of, help="show this help message and exit"
        )


class _Help(argparse.Action):
    """`--help` that shows the fields of one family of models alone."""

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
        family = MODEL_FAMILIES.get(self.family) or _family_of_preset(namespace)
        for action in parser._actions:
            section, _, name = action.dest.partition(".")
            if family is not None and section == "model" and name not in family.__dataclass_fields__:
                action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def _family_of_preset(namespace: argparse.Namespace) -> type[ModelConfig] | None:
    """Return the family of models of the configuration named before --help; None if none is named."""
    name = getattr(namespace, "preset", None)
    if name is None:
        return None
    with suppress(UserError):
        given = {name.partition(".")[2]: value for name, value in parsed_options(config_options(namespace)).items()}
        return chosen_family(given, base_config(name).model)
    return None


def base_config(name: str) -> RunConfig:
    """Return the configuration of a preset, or that of a run directory (an imported model's, to fine-tune it)."""
    from txl.presets import preset, presets

    if name in presets() or not (Path(name) / "config.json").is_file():
        return preset(name)
    from txl.runs.directory import RunDirectory

    return RunDirectory(name).config()


def config_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return those options of `add_config_options` that were given."""
    return {name: value for name, value in vars(arguments).items() if "." in name}


def data_config(arguments: argparse.Namespace, base: DataConfig) -> DataConfig:
    """Return a corpus's configuration with the given ``--data.*`` options set."""
    from txl.data.corpora import with_absolute_paths

    return with_absolute_paths(with_options(RunConfig(data=base), config_options(arguments)).data)


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of prepared corpora."""
    parser.add_argument("--data-dir", metavar="DIR", help="where prepared corpora live (default: TXL_DATA, or a cache)")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option for the device that the model runs on."""
    parser.add_argument(
        "--device", type=_device, metavar="D", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)"
    )


_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla", "meta")
"""Kinds of devices of PyTorch."""


def _device(text: str) -> str:
    """Return the name of a device; one of an unknown kind is refused here, before PyTorch is imported."""
    if text.partition(":")[0] not in _DEVICES and not entry_points(group="torch.backends"):
        reason = f"expected one of {', '.join(_DEVICES)}"
        raise argparse.ArgumentError(None, f"--device {text} cannot be used here ({reason}); try --device cpu")
    return text


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the option for the checkpoint that is used."""
    parser.add_argument("--checkpoint", metavar="WHICH", help="best, latest or a step (default: best, else latest)")


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of memory, window and clamp; unset, they are the run's test settings."""
    parser.add_argument("--mem-len", type=int, metavar="M", help="positions of memory; alone it also sets --window M")
    parser.add_argument("--window", type=limit, metavar="N", help="keys a query sees, itself included, or none")
    parser.add_argument("--clamp-len", type=limit, metavar="C", help="distances above it count as it, or none")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of drawing tokens."""
    parser.add_argument("--top-k", type=_top_k, default=40, metavar="K", help="draw from the K likeliest, or none")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest that hold probability P")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="below 1 is safer, 0 is greedy")


@named("number or none")
def _top_k(text: str) -> int | None:
    return None if text.lower() == "none" else bounded_int(text)


def add_detokenise(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option for putting the words of a benchmark together again."""
    parser.add_argument(
        "--detokenise",
        nargs="?",
        const="auto",
        default=default,
        choices=("auto", "wikitext", "ptb", "lm1b", "none"),
        help=f"put a benchmark's words together again: auto tells by the vocabulary how (default: {default})",
    )


def convention(name: str, vocabulary: Vocabulary | None) -> Convention | None:
    """Return the way of tokenising that `--detokenise` names; None for none."""
    from txl.data.detokenise import check_convention, convention_of

    if name == "none":
        return None
    if name == "auto":
        return convention_of(vocabulary)
    if vocabulary is not None and vocabulary.kind != "word":
        raise UserError(f"--detokenise is {name}, but this model reads {vocabulary.kind} tokens; leave it out")
    return check_convention(name)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for machine-readable output."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that read a run and a corpus: `--data.*`, checkpoint, data folder, device, JSON."""
    add_config_options(parser, ("data",))
    add_checkpoint(parser)
    add_data_dir(parser)
    add_device(parser)
    add_json(parser)


def bounded_int(text: str) -> int:
    """Return a whole number that no arithmetic rounds; every option of type `int` is read by this (`txl.cli`).

    Raises:
        ValueError: if it is no whole number.
        argparse.ArgumentTypeError: if it is out of range.
    """
    try:
        return whole_number(text)
    except OverflowError as error:
        raise argparse.ArgumentTypeError(f"{text}: expected {error}") from None


@named("number or all")
def number_or_all(text: str) -> int | None:
    """Return a whole number, or None for "all"."""
    return None if text.lower() == "all" else bounded_int(text)


@named("number or none")
def limit(text: str) -> int | Literal["none"]:
    """Return a whole number, or "none"."""
    return "none" if text.lower() == "none" else bounded_int(text)


@named("list of numbers")
def numbers(text: str) -> list[int]:
    """Return whole numbers separated by commas."""
    return [bounded_int(part) for part in text.split(",")]


def memory_settings(arguments: argparse.Namespace, run: RunConfig) -> dict[str, Any]:
    """Return `mem_len`, `window` and `clamp_len` of an evaluation: as given, else the run's test settings.

    ``--mem-len M`` without ``--window`` means window M, as the authors' `same_length`; without memory each segment is
    read alone.
    """
    lengths = run.eval.length_options()
    if arguments.mem_len is not None:
        lengths |= {"mem_len": arguments.mem_len, "window": arguments.mem_len or "none"}
    given = {"window": arguments.window, "clamp_len": arguments.clamp_len}
    return lengths | {name: value for name, value in given.items() if value is not None}


def clamp_setting(given: int | Literal["none"] | None, run: RunConfig) -> int | Literal["none"]:
    """Return the clamp of an evaluation: what was given, else the run's test settings; a number or "none"."""
    return run.eval.length_options()["clamp_len"] if given is None else given


def pick_device(name: str | None) -> str:
    """Return the device to use: the one asked for, else a GPU if there is one."""
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {chosen} cannot be used here ({reason}); try --device cpu") from None
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32, in an LSTM too
    return chosen


def existing_run(path: str) -> Path:
    """Return the path of a run directory."""
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(f"{path}: no such directory; expected a run directory (made by txl train --out {path})")
    if not (directory / "config.json").is_file():
        raise UserError(f"{path}: not a run directory (it has no config.json)")
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
    """Refuse a corpus that is not there, before anything that takes long."""
    from txl.data.catalogue import BENCHMARKS
    from txl.data.corpora import STDLIB, own_files

    if name and name != STDLIB and name not in BENCHMARKS:
        own_files(name)


def writable_folder(path: str | Path) -> Path:
    """Return a folder for results once a file could be written there; folders made to try are removed again."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {path} cannot be written into: it is a file; expected a folder")
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


def run_corpus(
    run: RunDirectory, vocabulary: Vocabulary | None, arguments: argparse.Namespace, whole: bool = False
) -> Corpus:
    """Open the corpus that the run was trained on, or the one that the options name, in the run's own vocabulary."""
    from txl.runs.corpus import is_trained_on, open_run_corpus

    options = config_options(arguments)
    corpus = open_run_corpus(run, vocabulary, options, data_dir=arguments.data_dir, whole=whole, quiet=arguments.json)
    if not options and not whole and not is_trained_on(run, corpus):
        say(f"note: {corpus.name} on this machine is not the text that this model was trained on")
    return corpus


def note_lacking(vocabulary: Vocabulary | None, prompt: str) -> None:
    """Say which words or characters of a prompt are read as `<unk>`."""
    lacking = [] if vocabulary is None else vocabulary.lacking(prompt)
    if lacking:
        words = vocabulary is not None and vocabulary.kind == "word"
        shown = [each if words else f"{each!r} (U+{ord(each):04X})" for each in lacking[:_NAMED]]
        more = f" and {len(lacking) - _NAMED:,} more" if len(lacking) > _NAMED else ""
        say(f"note: the vocabulary lacks {', '.join(shown)}{more}; read as <unk>")
