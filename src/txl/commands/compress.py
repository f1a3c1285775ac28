"""`txl compress FILE` and `txl decompress FILE`: lossless compression of a file by a model's probabilities."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING

from txl.commands.arguments import check_output_file, existing_run, standard_input, tested_lengths
from txl.commands.options import add_checkpoint, add_data_dir, add_json, add_memory_options
from txl.commands.output import output, print_json, progress_bar, say
from txl.commands.parser import Commands, Parser
from txl.config.values import from_plain, require
from txl.errors import Field, UserError
from txl.runs.events import EventName

if TYPE_CHECKING:
    from txl.compression.compressor import CodingModel, DynamicRecipe, Sizes
    from txl.data.prepared import Tokens

_LEARNING_RATE = 0.03  # of sgd for a run whose log has no dynamic evaluation


def add_parser(commands: Commands) -> None:
    """Add both commands to the command line."""
    parser = commands.add_parser(
        "compress",
        help="compress a file by a model's probabilities, without loss",
        example="txl compress notes.txt --model runs/mine -o notes.txlz",
        description="Compress a file by a model's probabilities, without loss. txl decompress restores it, with the "
        "same program, model and kind of machine. A second process decodes it at once to make sure.",
    )
    parser.add_argument("file", metavar="FILE", help="any file, or - for standard input")
    _add_ends(parser)
    parser.add_argument("--model", metavar="DIR", help="a run directory; its units are bytes, characters or BPE tokens")
    parser.add_argument(
        "--online", action="store_true", help="no trained model: a small one learns the file as it goes"
    )
    parser.add_argument(
        "--dynamic",
        nargs="?",
        const="run",
        choices=("run", "rms", "sgd"),
        help="let the model adapt to what it has coded: as in the last dynamic evaluation in the run's log (run, the "
        f"default; without one, sgd at learning rate {_LEARNING_RATE}), or by the rule rms or sgd",
    )
    parser.add_argument("--dynamic-learning-rate", type=float, metavar="X", help="of --dynamic rms or sgd")
    parser.add_argument("--dynamic-decay", type=float, metavar="X", help="of --dynamic rms or sgd (default: 0)")
    parser.add_argument("--segment", type=int, metavar="T", help="tokens between two updates of --dynamic rms or sgd")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of the first weights of --online (default: 1)")
    parser.add_argument(
        "--lanes", type=int, metavar="B", help="code B parts of a block in parallel: faster, and a larger file"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not decode it at once in a second process")
    add_checkpoint(parser)
    add_data_dir(parser)
    add_json(parser)
    add_memory_options(parser)
    parser.set_defaults(run=run)

    parser = commands.add_parser(
        "decompress",
        help="restore a file that txl compress made",
        example="txl decompress notes.txlz --model runs/mine -o notes.txt",
        description="Restore a file that txl compress made. Another model, or arithmetic that differs, is refused.",
    )
    parser.add_argument("file", metavar="FILE", help="the compressed file, or - for standard input")
    _add_ends(parser)
    parser.add_argument("--model", metavar="DIR", help="the run directory that it was compressed with")
    add_checkpoint(parser)
    add_data_dir(parser)
    add_json(parser)
    parser.set_defaults(run=run_decompress)


def _add_ends(parser: Parser) -> None:
    parser.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="OUT",
        help="where to write, or - for standard output; it appears when whole, with mode and time of FILE",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def run(arguments: argparse.Namespace) -> None:
    """Compress the file, and print sizes and speed."""
    _check(arguments)
    with _source(arguments) as (source, like):
        from txl.compression.compressor import compress
        from txl.compression.learning import OnlineRecipe

        model = dynamic = online = None
        if arguments.online:
            online = OnlineRecipe() if arguments.seed is None else OnlineRecipe(seed=arguments.seed)
        else:
            model, dynamic = _load(arguments, lengths=True), _dynamic(arguments)
        same = {name: getattr(arguments, name) for name in ("model", "checkpoint", "data_dir")}
        verify = [f"--{name.replace('_', '-')}={value}" for name, value in same.items() if value is not None]
        start = time.perf_counter()
        with _sink(arguments, like, "compressing") as (sink, move):
            sizes = compress(
                source,
                sink,
                model=model,
                dynamic=dynamic,
                online=online,
                lanes=arguments.lanes,
                verify=None if arguments.no_verify else verify,
                progress=lambda text, _: move(text),
            )
        _report(arguments, sizes, time.perf_counter() - start, verified=not arguments.no_verify)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before anything is loaded."""

    def given(*names: str) -> str | None:
        return next((name for name in names if getattr(arguments, name) is not None), None)

    if (arguments.model is None) != arguments.online:
        raise UserError(("expected one of ", Field("model"), " and ", Field("online")))
    of_model = given("mem_len", "window", "clamp_len", "checkpoint", "data_dir", "dynamic")
    if arguments.online and of_model:
        raise UserError("for a trained model", field=of_model, remedy=("leave it out with ", Field("online")))
    of_rule = given("dynamic_learning_rate", "dynamic_decay", "segment")
    if of_rule and arguments.dynamic not in ("rms", "sgd"):
        expected = (Field("dynamic", "rms"), " or ", Field("dynamic", "sgd"), " with it")
        raise UserError("no other settings", field=of_rule, expected=expected)
    if arguments.seed is not None and not arguments.online:
        raise UserError("a trained model has its weights", field="seed", remedy=("use it with ", Field("online")))
    if arguments.seed is not None:
        require(0 <= arguments.seed < 2**63, "seed", arguments.seed, "0 to 2^63 - 1")


def run_decompress(arguments: argparse.Namespace) -> None:
    """Decompress the file, and print sizes and speed."""
    for name in ("checkpoint", "data_dir"):
        if getattr(arguments, name) is not None and arguments.model is None:
            raise UserError("the model is missing", field=name, expected=(Field("model", "DIR"), " with it"))
    with _source(arguments) as (source, like):
        from txl.compression.compressor import decompress

        start = time.perf_counter()
        with _sink(arguments, like, "decompressing") as (sink, move):
            sizes = decompress(
                source,
                sink,
                name="standard input" if arguments.file == "-" else arguments.file,
                load=None if arguments.model is None else lambda: _load(arguments, lengths=False),
                progress=lambda _, file: move(file),
            )
        _report(arguments, sizes, time.perf_counter() - start)


@contextmanager
def _source(arguments: argparse.Namespace) -> Iterator[tuple[IO[bytes], os.stat_result | None]]:
    """Check source and destination, then yield the opened source and its status (None for pipes and devices)."""
    path = None if arguments.file == "-" else Path(arguments.file)
    check_output_file(None if arguments.out == "-" else arguments.out, path)
    if arguments.out != "-" and not arguments.force and Path(arguments.out).is_file():
        remedy = ("add ", Field("force"), " to replace it, or give another file")
        raise UserError("it exists", field="out", value=arguments.out, remedy=remedy)
    if arguments.out == "-" and arguments.json:
        remedy = ("leave out ", Field("json"), ", or write to a file")
        raise UserError("standard output is for the result", field="out", value="-", remedy=remedy)
    if arguments.out == "-" and sys.stdout.isatty() and arguments.command == "compress":
        raise UserError("a terminal", field="out", value="-", expected="a file or a pipe for compressed bytes")
    if path is None:
        yield standard_input(), None
        return
    if path.is_dir():
        raise UserError("a folder", value=path, expected="a file")
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        yield file, status if stat.S_ISREG(status.st_mode) else None


@contextmanager
def _sink(
    arguments: argparse.Namespace, like: os.stat_result | None, title: str
) -> Iterator[tuple[IO[bytes], Callable[[int], None]]]:
    """Yield the opened destination, and a function that shows how many bytes of the source are done."""
    progress, move = progress_bar(title, quiet=arguments.json or like is None)
    with progress, output(None if arguments.out == "-" else arguments.out, binary=True, like=like) as sink:
        yield sink, lambda done: move(done, 0 if like is None else like.st_size)


def _load(arguments: argparse.Namespace, lengths: bool) -> CodingModel:
    """Return the model that codes a file; if `lengths`, with the memory lengths that options and run set."""
    from txl.compression.compressor import CodingModel
    from txl.runs.corpus import open_run_corpus, training_tokens
    from txl.runs.directory import RunDirectory

    run_directory = RunDirectory(existing_run(arguments.model))
    model, vocabulary = run_directory.load(run_directory.checkpoint(arguments.checkpoint), device="cpu")
    if vocabulary is None:
        remedy = ("import it again with ", Field("vocabulary"))
        raise UserError("no vocabulary to read the file with", value=run_directory.path, remedy=remedy)

    def training() -> Tokens:
        corpus = open_run_corpus(run_directory, vocabulary, data_dir=arguments.data_dir, quiet=True)
        return training_tokens(run_directory, vocabulary, corpus, data_dir=arguments.data_dir, quiet=True)

    chosen = tested_lengths(arguments, run_directory.config()) if lengths else None
    return CodingModel(model.eval(), vocabulary, chosen, training)


def _dynamic(arguments: argparse.Namespace) -> DynamicRecipe | None:
    """Return the settings of adapting the model: those of the options, or of the run's newest dynamic evaluation."""
    if arguments.dynamic is None:
        return None
    from txl.compression.compressor import DynamicRecipe
    from txl.evaluation.dynamic import Adaptation
    from txl.runs.directory import RunDirectory

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
        except UserError:
            remedy = ("give ", Field("dynamic", "sgd"), " and ", Field("dynamic_learning_rate"))
            damage = "the newest dynamic evaluation is damaged"
            raise UserError(damage, value=run.path / "log.jsonl", remedy=remedy) from None
    if arguments.dynamic_learning_rate is None:
        expected = (Field("dynamic_learning_rate"), " with it")
        raise UserError(
            "no rate", field="dynamic", value=arguments.dynamic, expected=expected, remedy="txl dynamic finds one"
        )
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
