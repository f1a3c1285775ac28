"""`txl compress FILE` and `txl decompress FILE`: lossless compression of a file by a model's probabilities."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from txl.commands.arguments import check_output_file, existing_run, standard_input, tested_lengths
from txl.commands.options import add_checkpoint, add_data_dir, add_json, add_memory_options
from txl.commands.output import output, print_json, progress_bar, say
from txl.commands.parser import Commands, Parser
from txl.config.values import from_plain
from txl.errors import UserError
from txl.runs.events import EventName

if TYPE_CHECKING:
    from txl.compression.compressor import CodingModel, DynamicRecipe, Sizes
    from txl.data.prepared import Tokens

_LEARNING_RATE = 0.03
"""Learning rate of sgd for a run whose log has no dynamic evaluation."""


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
    if (arguments.model is None) != arguments.online:
        raise UserError("expected one of --model DIR and --online")
    of_model = ("mem_len", "window", "clamp_len", "checkpoint", "data_dir")
    given = [name for name in of_model if getattr(arguments, name) is not None]
    if arguments.online and given:
        raise UserError(f"--{given[0].replace('_', '-')} is for a trained model; leave it out with --online")
    rule_options = ("dynamic_learning_rate", "dynamic_decay", "segment")
    given = [name for name in rule_options if getattr(arguments, name) is not None]
    if given and arguments.dynamic not in ("rms", "sgd"):
        raise UserError(f"--{given[0].replace('_', '-')} belongs to --dynamic rms or --dynamic sgd")
    if arguments.online and arguments.dynamic:
        raise UserError("--online and --dynamic were both given; an online model learns anyway")
    if arguments.seed is not None and not arguments.online:
        raise UserError("--seed is for --online alone; a trained model has its weights")
    if arguments.seed is not None and not 0 <= arguments.seed < 2**63:
        raise UserError(f"--seed is {arguments.seed}; expected 0 to 2^63 - 1")
    with _source(arguments) as (source, like):
        from txl.compression.compressor import compress
        from txl.compression.learning import OnlineRecipe

        verify: list[str] = []
        if arguments.online:
            recipe = OnlineRecipe()
            coded: dict[str, Any] = {
                "online": recipe if arguments.seed is None else replace(recipe, seed=arguments.seed)
            }
        else:
            coded = {"model": _load(arguments, lengths=True), "dynamic": _dynamic(arguments)}
            for name in ("model", "checkpoint", "data_dir"):
                if getattr(arguments, name) is not None:
                    verify.append(f"--{name.replace('_', '-')}={getattr(arguments, name)}")
        start = time.perf_counter()
        progress, move = progress_bar("compressing", quiet=arguments.json or like is None)
        with progress, output(None if arguments.out == "-" else arguments.out, binary=True, like=like) as sink:
            sizes = compress(
                source,
                sink,
                lanes=arguments.lanes,
                verify=None if arguments.no_verify else verify,
                progress=lambda text, _: move(text, like.st_size if like else 0),
                **coded,
            )
        _report(arguments, sizes, time.perf_counter() - start, verified=not arguments.no_verify)


def run_decompress(arguments: argparse.Namespace) -> None:
    """Decompress the file, and print sizes and speed."""
    given = [name for name in ("checkpoint", "data_dir") if getattr(arguments, name) is not None]
    if given and arguments.model is None:
        raise UserError(f"--{given[0].replace('_', '-')} belongs to --model DIR, which is missing")
    with _source(arguments) as (source, like):
        from txl.compression.compressor import decompress

        name = "standard input" if arguments.file == "-" else arguments.file
        start = time.perf_counter()
        progress, move = progress_bar("decompressing", quiet=arguments.json or like is None)
        with progress, output(None if arguments.out == "-" else arguments.out, binary=True, like=like) as sink:
            sizes = decompress(
                source,
                sink,
                name=name,
                load=None if arguments.model is None else lambda: _load(arguments, lengths=False),
                progress=lambda _, file: move(file, like.st_size if like else 0),
            )
        _report(arguments, sizes, time.perf_counter() - start)


@contextmanager
def _source(arguments: argparse.Namespace) -> Iterator[tuple[IO[bytes], os.stat_result | None]]:
    """Check source and destination, then yield the opened source and its status (None for pipes and devices)."""
    path = None if arguments.file == "-" else Path(arguments.file)
    check_output_file(None if arguments.out == "-" else arguments.out, path)
    if arguments.out != "-" and not arguments.force and Path(arguments.out).is_file():
        raise UserError(f"--out {arguments.out} exists; add --force to replace it, or give another file")
    if arguments.out == "-" and arguments.json:
        raise UserError("--json and -o - both write to standard output; leave out --json, or write to a file")
    if arguments.out == "-" and sys.stdout.isatty() and arguments.command == "compress":
        raise UserError("-o - would write a compressed file to the terminal; name a file, or pipe it on")
    if path is None:
        yield standard_input(), None
        return
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a file")
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        yield file, status if stat.S_ISREG(status.st_mode) else None


def _load(arguments: argparse.Namespace, lengths: bool) -> CodingModel:
    """Return the model that codes a file; if `lengths`, with the memory lengths that options and run set."""
    from txl.compression.compressor import CodingModel
    from txl.runs.corpus import open_run_corpus, training_tokens
    from txl.runs.directory import RunDirectory

    run_directory = RunDirectory(existing_run(arguments.model))
    model, vocabulary = run_directory.load(run_directory.checkpoint(arguments.checkpoint), device="cpu")
    if vocabulary is None:
        raise UserError(
            f"{run_directory.path} has no vocabulary to read the file with; import it again with --vocabulary FILE"
        )

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
        names = {each.name for each in fields(Adaptation)}
        recipe = {name: used[name] for name in ("statistics_segments", "statistics_batch_size") if name in used}
        recipe["adaptation"] = {name: value for name, value in used.items() if name in names}
        recipe["segment"] = measured[-1]["segment"]
        try:
            return from_plain(DynamicRecipe, recipe)
        except UserError:
            raise UserError(
                f"{run.path / 'log.jsonl'}: the newest dynamic evaluation is damaged; give --dynamic sgd "
                f"--dynamic-learning-rate X"
            ) from None
    if arguments.dynamic_learning_rate is None:
        raise UserError(f"--dynamic {arguments.dynamic} needs --dynamic-learning-rate; txl dynamic finds one")
    adaptation = Adaptation(arguments.dynamic, arguments.dynamic_learning_rate, arguments.dynamic_decay or 0.0)
    return DynamicRecipe(adaptation, 128 if arguments.segment is None else arguments.segment)


def _report(arguments: argparse.Namespace, sizes: Sizes, seconds: float, **more: object) -> None:
    """Print sizes and speed, on standard error or as one JSON object."""
    bits = 8 * sizes.file / sizes.text if sizes.text else None
    if arguments.json:
        print_json(
            {
                "bytes": sizes.text,
                "compressed_bytes": sizes.file,
                "payload_bytes": sizes.payload,
                "bits_per_byte": bits,
                "seconds": seconds,
                "bytes_per_second": sizes.text / seconds,
                **more,
            }
        )
        return
    shown = "" if bits is None else f", {bits:.4f} bits per byte"
    there, back = (sizes.text, sizes.file) if arguments.command == "compress" else (sizes.file, sizes.text)
    speed = f"{sizes.text / 1000 / seconds:,.1f} kB/s"
    say(f"{there:,} -> {back:,} bytes{shown}; {speed}" + ("; decoded and compared" if more.get("verified") else ""))
