"""Options shared by several commands, and the types of their values."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Literal

from txl.commands.config_options import add_config_options
from txl.commands.parser import Group, Options, Parser, typed
from txl.config import whole_number


@typed("a path or name")
def not_empty(text: str) -> str:
    """Return a path or name; refuse an empty one, such as an unset variable of the shell."""
    if not text:
        raise ValueError
    return text


def add_out(parser: Options, metavar: str, help: str, **settings: Any) -> None:
    """Add the option for the output path of a command."""
    parser.add_argument("-o", "--out", type=not_empty, metavar=metavar, help=help, **settings)


def add_data_dir(parser: Options) -> None:
    """Add the option for the folder of prepared corpora."""
    parser.add_argument(
        "--data-dir",
        type=not_empty,
        metavar="DIR",
        help="folder of prepared corpora (default: $TXL_DATA, else the user's cache)",
    )


def add_device(parser: Options) -> None:
    """Add the option for the device that the model runs on."""
    parser.add_argument(
        "--device", type=_device, metavar="NAME", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)"
    )


# Device types of PyTorch.
_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla", "meta")


@typed("cpu, cuda or cuda:1")
def _device(text: str) -> str:
    """Return the name of a device; refuse an unknown device type here, before PyTorch is imported."""
    if not text or (text.partition(":")[0] not in _DEVICES and not entry_points(group="torch.backends")):
        raise ValueError
    return text


def add_checkpoint(parser: Options) -> None:
    """Add the option for the checkpoint to load."""
    parser.add_argument(
        "--checkpoint", metavar="WHICH", help="best, latest, or a step's number (default: best, else latest)"
    )


def add_dtype(parser: Options) -> None:
    """Add the option for the number format of an evaluation."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="number format of matrix products (default: float32)",
    )


def add_memory_options(parser: Parser) -> None:
    """Add the options of memory, window and clamp; the defaults are the run's test settings."""
    group = parser.group("memory (default: the run's test settings)")
    group.add_argument(
        "--mem-len", type=int, metavar="M", help="positions of memory; without --window, the window is M too"
    )
    group.add_argument(
        "--window", type=limit, metavar="N", help="keys that a query attends to, its own included; none: no limit"
    )
    group.add_argument(
        "--clamp-len", type=limit, metavar="C", help="distances above C count as C; none: every distance as it is"
    )


def add_sampling_options(parser: Parser) -> Group:
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
    temperature = parser.one_of()
    temperature.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="below 1: likely tokens more often; 0: always the likeliest (default: 1)",
    )
    return temperature


@typed("a whole number or none")
def _top_k(text: str) -> int | None:
    return None if text.lower() == "none" else whole_number(text)


def add_detokenise(parser: Options, default: str) -> None:
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


def add_json(parser: Options) -> None:
    """Add the option for machine-readable output."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def add_run_options(parser: Parser) -> None:
    """Add the options of commands that read a run and a corpus: `--data.*`, checkpoint, data folder, device, JSON."""
    add_checkpoint(parser)
    add_device(parser)
    add_json(parser)
    text = parser.group("text (default: the run's own)")
    add_config_options(parser, ("data",), short=("data.corpus",), first=text)
    add_data_dir(text)


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
