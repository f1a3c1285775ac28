"""Shared by commands that evaluate a model: options of caches and dynamic evaluation, settings, results.

They are `txl eval`, `txl cache`, `txl dynamic` and `txl score`.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txl.commands.options import config_options, memory_settings, named, number_or_all
from txl.commands.output import print_table, progress_bar
from txl.config import RunConfig
from txl.errors import UserError

if TYPE_CHECKING:
    from txl.data.prepared import Tokens
    from txl.evaluation.dynamic import Adaptation, GradientStatistics
    from txl.evaluation.perplexity import EvaluationResult
    from txl.models.cache import ContinuousCache
    from txl.models.family import FamilyModel
    from txl.models.language_model import LanguageModel

_RULES, _STATISTICS, _WEIGHTS = ("rms", "sgd"), ("mean", "sum"), ("all", "feed-forward", "biases")
SEGMENTS, BATCH = 500, 1
"""Segments of the training split that are read for gradient statistics, and their lanes, where nothing is said."""
_LENGTHS = ("segment", "mem_len", "window", "clamp_len")


@dataclass(frozen=True)
class DynamicRequest:
    """Dynamic evaluation as it was asked for."""

    adaptation: Adaptation
    statistics_segments: int | None
    statistics_batch_size: int


def add_rule_options(parser: argparse._ActionsContainer, prefix: str) -> None:
    """Add the options of dynamic evaluation that `txl eval` and `txl dynamic` share."""
    parser.add_argument(f"--{prefix}epsilon", type=float, metavar="X", help="added to a gradient's size (2e-5)")
    parser.add_argument(
        f"--{prefix}weights", choices=_WEIGHTS, help="which adapt: all (default), feed-forward, biases (and norms)"
    )
    parser.add_argument(
        f"--{prefix}statistics-segments",
        type=number_or_all,
        default=argparse.SUPPRESS,
        metavar="N",
        help=f"of the training split, for gradient statistics, or all ({SEGMENTS})",
    )
    parser.add_argument(
        f"--{prefix}statistics-batch", type=int, metavar="B", help=f"lanes of each of these segments ({BATCH})"
    )


def add_dynamic_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of dynamic evaluation: weights that follow what is read."""
    group = parser.add_argument_group("dynamic evaluation", "score a segment, then adapt the weights to it")
    group.add_argument("--dynamic", choices=_RULES, help="the rule: rms (Krause et al.) or plain sgd")
    group.add_argument("--dynamic-preset", metavar="NAME", help="published settings, memory and segment among them")
    group.add_argument("--dynamic-learning-rate", type=float, metavar="X", help="its learning rate (see txl dynamic)")
    group.add_argument("--dynamic-decay", type=float, metavar="X", help="towards the trained weights (default: 0)")
    add_rule_options(group, "dynamic-")
    group.add_argument(
        "--dynamic-statistics",
        choices=_STATISTICS,
        help="gradient size from the mean of squares (default; 2018) or their sum (2019)",
    )


def with_preset(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the settings of `--dynamic-preset` where no option sets them."""
    if arguments.dynamic_preset is None:
        return arguments
    from txl.evaluation.dynamic_presets import PUBLISHED

    if arguments.dynamic_preset not in PUBLISHED:
        known = ", ".join(PUBLISHED)
        raise UserError(f"--dynamic-preset is {arguments.dynamic_preset!r}; expected one of {known}")
    preset = PUBLISHED[arguments.dynamic_preset]
    values: dict[str, Any] = {name: getattr(preset, name) for name in _LENGTHS}
    if arguments.mem_len is not None and arguments.window is None:
        values["window"] = None  # --mem-len alone also sets the window
    values |= {"batch": preset.batch_size, "dynamic_statistics_batch": preset.statistics_batch_size}
    adaptation = asdict(preset.adaptation)
    values["dynamic"] = adaptation.pop("rule")
    values |= {f"dynamic_{name}": value for name, value in adaptation.items()}
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    # None is a value of this one.
    given.setdefault("dynamic_statistics_segments", preset.statistics_segments)
    return argparse.Namespace(**vars(arguments) | values | given)


def dynamic_request(arguments: argparse.Namespace) -> DynamicRequest | None:
    """Return the dynamic evaluation that the options ask for; None without `--dynamic`."""
    given = {
        name: value for name, value in vars(arguments).items() if name.startswith("dynamic_") and value is not None
    }
    if "dynamic_statistics_segments" in vars(arguments):
        given["dynamic_statistics_segments"] = arguments.dynamic_statistics_segments
    if arguments.dynamic is None:
        if given:
            raise UserError(f"--{next(iter(given)).replace('_', '-')} was given without --dynamic rms or sgd")
        return None
    for name in ("sliding", "mem_lens"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--dynamic and --{name.replace('_', '-')} were both given; expected one of them")
    if arguments.dynamic_learning_rate is None:
        raise UserError("--dynamic needs --dynamic-learning-rate; txl dynamic finds it on the validation split")
    if arguments.dynamic == "sgd":
        refuse_statistics(arguments, "dynamic_")
    from txl.evaluation.dynamic import Adaptation

    names = ("learning_rate", "decay", "epsilon", "statistics", "weights")
    settings = {name: given[f"dynamic_{name}"] for name in names if f"dynamic_{name}" in given}
    return DynamicRequest(
        Adaptation(arguments.dynamic, **settings),
        given.get("dynamic_statistics_segments", SEGMENTS),
        given.get("dynamic_statistics_batch", BATCH),
    )


def refuse_statistics(arguments: argparse.Namespace, prefix: str) -> None:
    """Refuse options of gradient statistics, which sgd does not take."""
    names = [f"{prefix}{name}" for name in ("epsilon", "statistics", "statistics_batch")]
    given = [name for name in names if getattr(arguments, name, None) is not None]
    given += [name for name in vars(arguments) if name == f"{prefix}statistics_segments"]  # "all" is None
    if given:
        raise UserError(f"--{given[0].replace('_', '-')} was given, but sgd takes no gradient statistics")


def collect_statistics(
    model: LanguageModel,
    training_split: Callable[[], Tokens],
    request: DynamicRequest,
    settings: dict[str, Any],
    quiet: bool,
) -> GradientStatistics | None:
    """Return gradient statistics of a training split, read as the evaluation will be; None for sgd."""
    from txl.evaluation.dynamic import gradient_statistics

    if request.adaptation.rule == "sgd":
        return None
    tokens = training_split()
    progress, move = progress_bar("gradient statistics of the train split", quiet=quiet)
    names = ("segment", "mem_len", "window", "clamp_len", "dtype", "temperature")
    with progress:
        return gradient_statistics(
            model,
            tokens,
            weights=request.adaptation.weights,
            segments=request.statistics_segments,
            batch_size=request.statistics_batch_size,
            progress=move,
            **{name: settings[name] for name in names},
        )


def refuse_divergence(result: EvaluationResult) -> EvaluationResult:
    """Return the result, unless the adapted weights diverged."""
    if math.isnan(result.nll):
        raise UserError("the weights diverged while they adapted; use a smaller --dynamic-learning-rate")
    return result


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a continuous cache around the model."""
    parser.add_argument("--cache-size", type=int, metavar="N", help="with a continuous cache of the last N tokens")
    parser.add_argument("--cache-theta", type=float, metavar="X", help="its theta (txl cache finds both)")
    parser.add_argument("--cache-lambda", type=float, metavar="X", help="its share of the probability")


def with_cache(model: FamilyModel, arguments: argparse.Namespace) -> FamilyModel | ContinuousCache:
    """Return the model, in a continuous cache if the options ask for one."""
    names = ("cache_size", "cache_theta", "cache_lambda")
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is None]
    if len(missing) == len(names):
        return model
    if missing:
        raise UserError(f"a continuous cache needs {' and '.join(missing)} too; txl cache finds theta and lambda")
    from txl.models.cache import ContinuousCache

    return ContinuousCache(model, *(getattr(arguments, name) for name in names))


def refuse_not_a_number(losses: list[float], checkpoint: Path) -> None:
    """Refuse losses that are not numbers: the weights are damaged, or of a training that diverged."""
    if any(math.isnan(loss) for loss in losses):
        raise UserError(
            f"{checkpoint}: the model's losses are not numbers: training diverged, or it is damaged; use another one"
        )


def evaluation_settings(arguments: argparse.Namespace, config: RunConfig, batch_size: int) -> dict[str, Any]:
    """Return the settings of an evaluation: those given as options, else the run's test settings.

    Args:
        arguments: of the command.
        config: the run's.
        batch_size: lanes, if --batch does not say.
    """
    return {
        "segment": config.eval.segment if arguments.segment is None else arguments.segment,
        "batch_size": batch_size if arguments.batch is None else arguments.batch,
        "dtype": arguments.dtype,
        "temperature": config.eval.temperature if arguments.temperature is None else arguments.temperature,
        **memory_settings(arguments, config),
    }


@named("list of numbers")
def fractions(text: str) -> list[float]:
    """Return numbers separated by commas."""
    return [float(part) for part in text.split(",")]


_OF_EVAL = {
    "split": "test",
    **dict.fromkeys(("mem_len", "window", "clamp_len", "segment", "batch", "max_tokens", "temperature")),
    **dict.fromkeys(("cache_size", "cache_theta", "cache_lambda")),
    "dtype": "float32",
    **dict.fromkeys(("checkpoint", "data_dir", "device")),
}
"""Options of `txl eval` that `txl cache` and `txl dynamic` have too, with their defaults."""


def eval_command(arguments: argparse.Namespace, found: Sequence[str]) -> str:
    """Return the `txl eval` command that measures what was tuned, on the same tokens in the same way.

    Args:
        arguments: of the command that tuned.
        found: options for what it found.
    """
    words = ["txl", "eval", arguments.directory, *found]
    for name, default in _OF_EVAL.items():
        value = getattr(arguments, name, default)
        if value != default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name, value in config_options(arguments).items():
        words += [f"--{name.replace('_', '-')}", value]
    return shlex.join(words)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a table of results, with what was scored below it."""
    from txl.reporting.wording import adaptation_text, split_text
    from txl.units import ppl_text

    by_word = rows[0]["unit"] in ("word", "bpe")
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("memory", lambda row: str(row["mem_len"])),
        ("window", lambda row: "none" if row["window"] is None else str(row["window"])),
    ]
    if rows[0]["sliding"]:
        columns = [("sliding window", lambda row: str(row["segment"]))]
    columns += [
        ("nats/token", lambda row: f"{row['nll']:.4f}"),
        ("ppl", lambda row: ppl_text(row["ppl"])) if by_word else ("bpc", lambda row: f"{row['bpc']:.4f}"),
        ("bits/byte", lambda row: "" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"),
        ("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
    ]
    if len({row["cache_size"] for row in rows}) > 1:
        columns.insert(0, ("cache", lambda row: "none" if row["cache_size"] is None else f"{row['cache_size']:,}"))
    first = rows[0]
    print_table(
        f"{first['corpus']}, {split_text(first['split'])}, {first['checkpoint']}",
        [heading for heading, _ in columns],
        [[show(row) for _, show in columns] for row in rows],
    )
    dropped = f"; {first['dropped']:,} not scored (--exhaustive scores them)" if first["dropped"] else ""
    if first["sliding"]:
        print(f"{first['tokens']:,} targets, each from the {first['segment']} tokens before it alone")
    else:
        print(f"{first['tokens']:,} targets in {first['batch_size']} lanes, segments of {first['segment']}{dropped}")
    last = rows[-1]  # of `txl cache`, the one with a cache
    if last["cache_size"] is not None:
        shown = f"theta {last['cache_theta']:g}, lambda {last['cache_lambda']:g}"
        print(f"with a continuous cache of {last['cache_size']:,} tokens, {shown}")
    if first["dynamic"] is not None:
        print(adaptation_text(first["dynamic"]))
    if first["temperature"] != 1:
        print(f"softmax at temperature {first['temperature']:g}")
    if first["unknown"]:
        read = first["tokens"] + first["dropped"] + 1
        print(f"{first['unknown']:,} of the {read:,} tokens read are <unk>: bits per byte are a lower bound")
