"""Dynamic evaluation as options of `txl eval`, and what it needs of the training split."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from txl.commands.options import bounded_int, progress_bar
from txl.errors import UserError

if TYPE_CHECKING:
    from txl.evaluation.dynamic import Adaptation, GradientStatistics
    from txl.evaluation.perplexity import EvaluationResult

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


def segments(text: str) -> int | None:
    """A whole number, or None for "all"."""
    return None if text.lower() == "all" else bounded_int(text)


segments.__name__ = "number or all"  # argparse names a type by its function when it refuses a value


def add_rule_options(parser: Any, prefix: str) -> None:
    """The options that `txl eval` and `txl dynamic` share."""
    parser.add_argument(f"--{prefix}epsilon", type=float, metavar="X", help="added to a gradient's size (2e-5)")
    parser.add_argument(
        f"--{prefix}weights", choices=_WEIGHTS, help="which adapt: all (default), feed-forward, biases (and norms)"
    )
    parser.add_argument(
        f"--{prefix}statistics-segments",
        type=segments,
        default=argparse.SUPPRESS,
        metavar="N",
        help=f"of the training split, for gradient statistics, or all ({SEGMENTS})",
    )
    parser.add_argument(
        f"--{prefix}statistics-batch", type=int, metavar="B", help=f"lanes of each of these segments ({BATCH})"
    )


def add_dynamic_options(parser: argparse.ArgumentParser) -> None:
    """Weights that follow what is read."""
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
    """The arguments with all that a preset sets and no option does.

    Raises:
        UserError: for a preset that there is not.
    """
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
    """What `add_dynamic_options` was given; None without `--dynamic`.

    Raises:
        UserError: for options that contradict each other or are out of range.
    """
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
    """The options of rms are not for sgd.

    Raises:
        UserError: if one was given.
    """
    names = [f"{prefix}{name}" for name in ("epsilon", "statistics", "statistics_batch")]
    given = [name for name in names if getattr(arguments, name, None) is not None]
    given += [name for name in vars(arguments) if name == f"{prefix}statistics_segments"]  # "all" is None
    if given:
        raise UserError(f"--{given[0].replace('_', '-')} was given, but sgd takes no gradient statistics")


def collect_statistics(
    model: Any, training_split: Callable[[], Any], request: DynamicRequest, settings: dict[str, Any], quiet: bool
) -> GradientStatistics | None:
    """The gradient statistics of a training split, read as the evaluation will be; None for sgd, which needs none."""
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
    """Weights that ran away give no result.

    Raises:
        UserError: if the loss is not a number.
    """
    if result.nll != result.nll:
        raise UserError("the weights diverged while they adapted; use a smaller --dynamic-learning-rate")
    return result


def dynamic_text(dynamic: dict[str, Any]) -> str:
    """The settings of a dynamic evaluation in words."""
    words = [f"learning rate {dynamic['learning_rate']:g}", f"decay {dynamic['decay']:g}"]
    if "epsilon" in dynamic:
        size = f"{dynamic['statistics']} of {dynamic['statistics_segments']:,} segments"
        words += [f"epsilon {dynamic['epsilon']:g}", f"gradient statistics: {size}"]
        if dynamic["statistics_batch_size"] > 1:
            words[-1] += f" of {dynamic['statistics_batch_size']} lanes"
    if dynamic["weights"] != "all":
        words.append("feed-forward layers alone" if dynamic["weights"] == "feed-forward" else "biases and norms alone")
    return f"dynamic evaluation by {dynamic['rule']} ({', '.join(words)})"
