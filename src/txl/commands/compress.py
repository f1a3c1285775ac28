"""`txl compress FILE` and `txl decompress FILE`: lossless compression of a file by a model's probabilities."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING

from txl.commands import options
from txl.commands.output import output, print_json, progress_bar, say
from txl.commands.parser import Parser, flag, option
from txl.config.values import from_plain, require
from txl.errors import Field, UserError
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName

if TYPE_CHECKING:
    from txl.compression.compressor import CodingModel, DynamicRecipe, Sizes
    from txl.data.prepared import Tokens

_LEARNING_RATE = 0.03  # of sgd for a run whose log has no dynamic evaluation
_OF_A_RULE = ("dynamic_learning_rate", "dynamic_decay", "segment")


def add_parser(commands: Parser) -> None:
    """Add both commands to the command line."""
    parser = commands.add_command(
        "compress",
        help="compress a file by a model's probabilities, without loss",
        example="txl compress notes.txt --model runs/mine -o notes.txlz",
        description="Compress a file by a model's probabilities, without loss. txl decompress restores it, with the "
        "same program, model and kind of machine. A second process decodes it at once to make sure.",
    )
    option(parser, "file", "FILE", "any file, or - for standard input")
    _add_out(parser)
    model = parser.add_mutually_exclusive_group(required=True)
    option(model, "--model", "DIR", "a run directory; its units are bytes, characters or BPE tokens")
    flag(model, "--online", "no trained model: a small one learns the file as it goes")
    parser.add_argument(
        "--dynamic",
        nargs="?",
        const="run",
        choices=("run", "rms", "sgd"),
        help="let the model adapt to what it has coded: as in the last dynamic evaluation in the run's log (run, the "
        f"default; without one, sgd at learning rate {_LEARNING_RATE}), or by the rule rms or sgd",
    )
    option(parser, "--dynamic-learning-rate", "X", "of --dynamic rms or sgd", float)
    option(parser, "--dynamic-decay", "X", "of --dynamic rms or sgd (default: 0)", float)
    option(parser, "--segment", "T", "tokens between two updates of --dynamic rms or sgd", int)
    option(parser, "--seed", "S", "seed of the first weights of --online (default: 1)", int)
    option(parser, "--lanes", "B", "code B parts of a block in parallel: faster, and a larger file", int)
    flag(parser, "--no-verify", "do not decode it at once in a second process")
    options.shared(parser, "checkpoint", "data_dir", "json")
    options.add_memory_options(parser)
    parser.exclude("online", "mem_len", "window", "clamp_len", "checkpoint", "data_dir", "dynamic")
    parser.need("seed", "online")
    for name in _OF_A_RULE:
        parser.need(name, "dynamic")
    parser.set_defaults(run=run)

    parser = commands.add_command(
        "decompress",
        help="restore a file that txl compress made",
        example="txl decompress notes.txlz --model runs/mine -o notes.txt",
        description="Restore a file that txl compress made. Another model, or arithmetic that differs, is refused.",
    )
    option(parser, "file", "FILE", "the compressed file, or - for standard input")
    _add_out(parser)
    option(parser, "--model", "DIR", "the run directory that it was compressed with")
    options.shared(parser, "checkpoint", "data_dir", "json")
    for name in ("checkpoint", "data_dir"):
        parser.need(name, "model")
    parser.set_defaults(run=run_decompress)


def _add_out(parser: Parser) -> None:
    about = "where to write, or - for standard output; it appears when whole, with mode and time of FILE"
    options.add_out(parser, "OUT", about, required=True)
    flag(parser, "--force", "replace OUT if it exists")


def run(arguments: argparse.Namespace) -> None:
    """Compress the file, and print sizes and speed."""
    if arguments.dynamic == "run":
        for name in _OF_A_RULE:
            if getattr(arguments, name) is not None:
                raise UserError("of a rule", field=name, expected=(Field("dynamic", "rms"), " or sgd with it"))
    seed = 1 if arguments.seed is None else arguments.seed
    require(0 <= seed < 2**63, "seed", seed, "0 to 2^63 - 1")
    _check_ends(arguments)
    # Imported and loaded before OUT is opened: a signal during an import ends the process at once, without cleaning up.
    from txl.compression.compressor import compress
    from txl.compression.learning import OnlineRecipe

    model, dynamic = None if arguments.online else _load(arguments), _dynamic(arguments)
    same = {name: getattr(arguments, name) for name in ("model", "checkpoint", "data_dir")}
    verify = [f"--{name.replace('_', '-')}={value}" for name, value in same.items() if value is not None]
    start = time.perf_counter()
    with _opened(arguments) as (source, sink, move):
        sizes = compress(
            source,
            sink,
            model=model,
            dynamic=dynamic,
            online=OnlineRecipe(seed=seed) if arguments.online else None,
            lanes=arguments.lanes,
            verify=None if arguments.no_verify else verify,
            progress=lambda text, _: move(text),
        )
    _report(arguments, sizes, time.perf_counter() - start, verified=not arguments.no_verify)


def run_decompress(arguments: argparse.Namespace) -> None:
    """Decompress the file, and print sizes and speed."""
    _check_ends(arguments)
    from txl.compression.compressor import decompress

    start = time.perf_counter()
    with _opened(arguments) as (source, sink, move):
        sizes = decompress(
            source,
            sink,
            name="standard input" if arguments.file == "-" else arguments.file,
            load=None if arguments.model is None else lambda: _load(arguments),
            progress=lambda _, file: move(file),
        )
    _report(arguments, sizes, time.perf_counter() - start)


def _check_ends(arguments: argparse.Namespace) -> None:
    """Refuse source and destination that cannot be used, before anything is imported."""
    path, out = (None if name == "-" else Path(name) for name in (arguments.file, arguments.out))
    options.check_output_file(None if out is None else arguments.out, path)
    if out is not None and not arguments.force and out.is_file():
        remedy = ("add ", Field("force"), " to replace it, or give another file")
        raise UserError("it exists", field="out", value=out, remedy=remedy)
    if out is None and arguments.json:
        remedy = ("leave out ", Field("json"), ", or write to a file")
        raise UserError("standard output is for the result", field="out", value="-", remedy=remedy)
    if out is None and sys.stdout.isatty() and arguments.command == "compress":
        raise UserError("a terminal", field="out", value="-", expected="a file or a pipe for compressed bytes")
    if path is not None and stat.S_ISDIR(path.stat().st_mode):
        raise UserError("a folder", value=path, expected="a file")


@contextmanager
def _opened(arguments: argparse.Namespace) -> Iterator[tuple[IO[bytes], IO[bytes], Callable[[int], None]]]:
    """Open source and destination; yield them and a function that shows progress in the source."""
    out = None if arguments.out == "-" else arguments.out
    with nullcontext(options.standard_input()) if arguments.file == "-" else open(arguments.file, "rb") as source:
        status = None if arguments.file == "-" else os.fstat(source.fileno())
        like = status if status is not None and stat.S_ISREG(status.st_mode) else None
        bar = progress_bar(f"{arguments.command}ing", quiet=arguments.json or like is None)
        with bar as move, output(out, binary=True, like=like) as sink:
            yield source, sink, lambda done: move(done, 0 if like is None else like.st_size)


def _load(arguments: argparse.Namespace) -> CodingModel:
    """Return the model that codes a file; to compress, with the memory lengths that options and run set."""
    from txl.compression.compressor import CodingModel
    from txl.runs.corpus import open_run_corpus, training_tokens

    directory = RunDirectory(options.existing_run(arguments.model))
    model, vocabulary = options.load_to_read(directory, directory.checkpoint(arguments.checkpoint), "cpu")

    def training() -> Tokens:
        corpus = open_run_corpus(directory, vocabulary, data_dir=arguments.data_dir, quiet=True)
        return training_tokens(directory, vocabulary, corpus, data_dir=arguments.data_dir, quiet=True)

    lengths = options.tested_lengths(arguments, directory.config()) if arguments.command == "compress" else None
    return CodingModel(model.eval(), vocabulary, lengths, training)


def _dynamic(arguments: argparse.Namespace) -> DynamicRecipe | None:
    """Return the settings of adapting the model: those of the options, or of the run's newest dynamic evaluation."""
    if arguments.dynamic is None:
        return None
    from txl.compression.compressor import DynamicRecipe
    from txl.evaluation.dynamic import Adaptation

    if arguments.dynamic == "run":
        run = RunDirectory(Path(arguments.model))
        measured = [event for event in run.events() if event["event"] == EventName.EVAL and event.get("dynamic")]
        if not measured:
            say(f"note: no dynamic evaluation of this run is in its log; sgd at learning rate {_LEARNING_RATE} is used")
            return DynamicRecipe(Adaptation("sgd", _LEARNING_RATE))
        used = measured[-1]["dynamic"]
        names = {field.name for field in fields(Adaptation)}
        recipe = {name: used[name] for name in ("statistics_segments", "statistics_batch_size") if name in used}
        recipe["adaptation"] = {name: value for name, value in used.items() if name in names}
        recipe["segment"] = measured[-1]["segment"]
        try:
            return from_plain(DynamicRecipe, recipe)
        except UserError as error:
            remedy = ("give ", Field("dynamic", "sgd"), " and a rate")
            raise UserError(("damaged: ", error), value=run.path / "log.jsonl", remedy=remedy) from None
    if arguments.dynamic_learning_rate is None:
        expected = (Field("dynamic_learning_rate"), " with it; txl dynamic finds one")
        raise UserError("no rate", field="dynamic", value=arguments.dynamic, expected=expected)
    adaptation = Adaptation(arguments.dynamic, arguments.dynamic_learning_rate, arguments.dynamic_decay or 0.0)
    return DynamicRecipe(adaptation, 128 if arguments.segment is None else arguments.segment)


def _report(arguments: argparse.Namespace, sizes: Sizes, seconds: float, **more: object) -> None:
    """Print sizes and speed, on standard error or as one JSON object."""
    bits = 8 * sizes.file / sizes.text if sizes.text else None
    if arguments.json:
        result = {"bytes": sizes.text, "compressed_bytes": sizes.file, "payload_bytes": sizes.payload}
        speeds = {"bits_per_byte": bits, "seconds": seconds, "bytes_per_second": sizes.text / seconds}
        print_json(result | speeds | more)
        return
    shown = "" if bits is None else f", {bits:.4f} bits per byte"
    there, back = (sizes.text, sizes.file) if arguments.command == "compress" else (sizes.file, sizes.text)
    speed = f"{sizes.text / 1000 / seconds:,.1f} kB/s"
    say(f"{there:,} -> {back:,} bytes{shown}; {speed}" + ("; decoded and compared" if more.get("verified") else ""))
