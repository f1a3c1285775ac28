"""Devices, runs, corpora, lengths and output files that the arguments of a command name, checked before slow work."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Literal

from txl.commands.config_options import config_options, data_config
from txl.commands.output import say
from txl.config import Lengths, RunConfig
from txl.errors import UserError, named
from txl.files import refuse_file

if TYPE_CHECKING:
    from txl.data.detokenise import Convention
    from txl.data.prepared import Corpus
    from txl.data.vocabulary import Vocabulary
    from txl.runs.directory import RunDirectory


def standard_input() -> IO[bytes]:
    """Return standard input, for reading bytes."""
    if sys.stdin is None:
        raise UserError("standard input is closed", remedy="give a file instead of -")
    return sys.stdin.buffer


def convention(name: str, vocabulary: Vocabulary | None) -> Convention | None:
    """Return the tokenisation convention that `--detokenise` selects; None if there is none."""
    from txl.data.detokenise import check_convention, convention_of

    if name == "none":
        return None
    if name == "auto":
        return convention_of(vocabulary)
    if vocabulary is not None and vocabulary.kind != "word":
        raise UserError(f"this model reads {vocabulary.kind} tokens", field="detokenise", value=name, expected="none")
    return check_convention(name)


def tested_lengths(arguments: argparse.Namespace, run: RunConfig) -> Lengths:
    """Return memory length, window and clamp of an evaluation: the given options, else the run's test settings.

    ``--mem-len M`` without ``--window`` means window M (`Lengths.tested`); without memory each segment is read alone.
    """
    return run.eval.lengths.tested(arguments.mem_len, arguments.window, arguments.clamp_len)


def clamp_setting(clamp_len: int | Literal["none"] | None, run: RunConfig) -> int | Literal["none"]:
    """Return the clamp of an evaluation, a number or "none": the given one, else that of the run's test settings."""
    return run.eval.lengths.options()["clamp_len"] if clamp_len is None else clamp_len


def pick_device(name: str | None) -> str:
    """Return the device to use: the named one, else a GPU if there is one, else the CPU."""
    import torch

    from txl.devices import check_device, chosen_device

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
    from txl.runs.directory import RunDirectory

    directory = RunDirectory(existing_run(arguments.directory))
    config, checkpoint = directory.config(), directory.checkpoint(arguments.checkpoint)
    if "data.corpus" in config_options(arguments):
        check_corpus(data_config(arguments, config.data).corpus)
    return directory, config, checkpoint


def check_corpus(name: str) -> None:
    """Refuse a corpus that does not exist, or is a file that holds no text, before any slow work begins."""
    from txl.data.benchmarks import BENCHMARKS
    from txl.data.corpora import STDLIB, own_files
    from txl.data.user_text import refuse_no_text

    if name and name != STDLIB and name not in BENCHMARKS:
        files = own_files(name)
        if len(files) == 1:  # of a folder's files, some may not be read
            refuse_no_text(files)


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
    """Refuse an output file that cannot be written, before anything is computed."""
    if out is None:
        return
    path, problem = Path(out), ""
    if not path.parent.is_dir():
        problem = f"{path.parent} is not a folder"
    elif path.is_dir():
        problem = "a folder"
    elif source is not None and path.exists() and path.samefile(source):
        problem = "the source itself"
    elif _is_of_a_run(path.resolve()):
        problem = "a file of the run itself"
    if problem:
        raise UserError(problem, field="out", value=out, expected="the name of another file")


# Files of a run directory without which the run is lost.
_OF_A_RUN = ("config.json", "vocabulary.json", "log.jsonl", "best", "latest", "checkpoints")


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
