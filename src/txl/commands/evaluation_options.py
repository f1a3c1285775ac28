"""Options of the commands that measure a model (`txl eval`, `cache`, `dynamic`, `score` ...), and their settings."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from txl.commands.arguments import pick_device, tested_lengths
from txl.commands.config_options import config_options
from txl.commands.options import add_dtype, number_or_all, positive
from txl.commands.output import say
from txl.commands.parser import Options, Parser, typed
from txl.config import AdaptationRule, AdaptedWeights, RunConfig, StatisticsName, same_length
from txl.errors import Field, UserError

if TYPE_CHECKING:
    from txl.data.vocabulary import Vocabulary
    from txl.evaluation.dynamic import Adaptation
    from txl.evaluation.stream import Settings
    from txl.models.cache import ContinuousCache
    from txl.models.family import FamilyModel
    from txl.runs.directory import RunDirectory

SEGMENTS, BATCH = 500, 1  # of the training split, and their lanes, that are read for gradient statistics
_LENGTHS = ("segment", "mem_len", "window", "clamp_len")


@dataclass(frozen=True)
class DynamicRequest:
    """Settings of dynamic evaluation from the options; `statistics_segments` None: all segments."""

    adaptation: Adaptation
    statistics_segments: int | None
    statistics_batch_size: int


def segments_read(option: int | Literal["all"] | None) -> int | None:
    """Return the number of segments that are read for gradient statistics: an option's value; None: all segments."""
    return SEGMENTS if option is None else None if option == "all" else option


def add_reading_options(parser: Options, segment: str, batch: str, max_tokens: str) -> None:
    """Add the options of how a split is read, with the help of the first three of them."""
    parser.add_argument("--segment", type=positive, metavar="T", help=segment)
    parser.add_argument("--batch", type=positive, metavar="B", help=batch)
    parser.add_argument("--max-tokens", type=int, metavar="N", help=max_tokens)
    parser.add_argument("--temperature", type=float, metavar="X", help="softmax temperature (default: the run's)")
    add_dtype(parser)


def add_splits(parser: Options) -> None:
    """Add the options of the splits that a command tunes on and measures."""
    parser.add_argument("--split", default="test", metavar="NAME", help="split to measure (default: test)")
    parser.add_argument("--tune-on", default="valid", metavar="NAME", help="split to tune on (default: valid)")


def add_rule_options(parser: Options, prefix: str) -> None:
    """Add the options of dynamic evaluation that `txl eval` and `txl dynamic` share."""
    parser.add_argument(
        f"--{prefix}epsilon", type=float, metavar="X", help="added to a gradient's size (default: 2e-5)"
    )
    parser.add_argument(
        f"--{prefix}weights",
        choices=get_args(AdaptedWeights),
        help="weights that adapt; biases: biases and norms (default: all)",
    )
    parser.add_argument(
        f"--{prefix}statistics-segments",
        type=number_or_all,
        metavar="N",
        help=f"number of training segments from which gradient sizes are measured, or all (default: {SEGMENTS})",
    )
    parser.add_argument(
        f"--{prefix}statistics-batch",
        type=positive,
        metavar="B",
        help=f"lanes in each of these segments (default: {BATCH})",
    )


def add_dynamic_options(parser: Parser) -> None:
    """Add the options of dynamic evaluation, in which the weights adapt to the text."""
    group = parser.group("dynamic evaluation: score a segment, then adapt a copy of the weights to it")
    group.add_argument(
        "--dynamic",
        choices=get_args(AdaptationRule),
        help="update rule; rms: gradients divided by their usual size; sgd: plain gradients",
    )
    group.add_argument("--dynamic-preset", metavar="NAME", help="published settings, with their memory and segment")
    group.add_argument("--dynamic-learning-rate", type=float, metavar="X", help="learning rate; txl dynamic finds one")
    group.add_argument("--dynamic-decay", type=float, metavar="X", help="pull towards the trained weights (default: 0)")
    add_rule_options(group, "dynamic-")
    group.add_argument(
        "--dynamic-statistics",
        choices=get_args(StatisticsName),
        help="a gradient's size: from the mean of squares (2018; default) or their sum (2019)",
    )


def with_preset(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments, with the settings of `--dynamic-preset` for options that are not given."""
    if arguments.dynamic_preset is None:
        return arguments
    from txl.evaluation.dynamic_tuning import PUBLISHED

    if arguments.dynamic_preset not in PUBLISHED:
        known = ", ".join(PUBLISHED)
        raise UserError(field="dynamic_preset", value=arguments.dynamic_preset, expected=f"one of {known}")
    preset = PUBLISHED[arguments.dynamic_preset]
    if arguments.dynamic not in (None, preset.adaptation.rule):
        rule = f"the preset's rule is {preset.adaptation.rule}"
        raise UserError(field="dynamic", value=arguments.dynamic, but=rule, remedy="leave it out")
    values: dict[str, Any] = {name: getattr(preset, name) for name in _LENGTHS}
    if arguments.mem_len is not None:  # --mem-len without --window sets the window too
        values["window"] = same_length(arguments.mem_len, arguments.window)
    values |= {"batch": preset.batch_size, "dynamic_statistics_batch": preset.statistics_batch_size}
    adaptation = asdict(preset.adaptation)
    values["dynamic"] = adaptation.pop("rule")
    values |= {f"dynamic_{name}": value for name, value in adaptation.items()}
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    values["dynamic_statistics_segments"] = preset.statistics_segments or "all"
    return argparse.Namespace(**vars(arguments) | values | given)


def dynamic_request(arguments: argparse.Namespace) -> DynamicRequest | None:
    """Return the dynamic evaluation that the options request; None without `--dynamic`."""
    options = {name: value for name, value in vars(arguments).items() if name.startswith("dynamic_")}
    options = {name.removeprefix("dynamic_"): value for name, value in options.items() if value is not None}
    if arguments.dynamic is None:
        if options:
            problem = (Field(f"dynamic_{next(iter(options))}"), " was given without ", Field("dynamic"), " rms or sgd")
            raise UserError(problem)
        return None
    refuse_together(arguments, "dynamic", ("sliding", "mem_lens"))
    if arguments.dynamic_learning_rate is None:
        needed = (Field("dynamic"), " needs ", Field("dynamic_learning_rate"))
        raise UserError(needed, remedy="txl dynamic finds it on the validation split")
    if arguments.dynamic == "sgd":
        refuse_statistics(arguments, "dynamic_")
    from txl.evaluation.dynamic import Adaptation

    names = ("learning_rate", "decay", "epsilon", "statistics", "weights")
    return DynamicRequest(
        Adaptation(arguments.dynamic, **{name: options[name] for name in names if name in options}),
        segments_read(arguments.dynamic_statistics_segments),
        options.get("statistics_batch", BATCH),
    )


def load_to_adapt(
    directory: RunDirectory, config: RunConfig, checkpoint: Path, arguments: argparse.Namespace
) -> tuple[FamilyModel, Vocabulary | None]:
    """Load a model for dynamic evaluation.

    Dynamic evaluation needs gradients: if the model's attention backend cannot train on this device, another is used.
    """
    import torch

    from txl.attention import AttentionRefused
    from txl.models import FAMILIES

    device, attention = pick_device(arguments.device), None
    try:
        FAMILIES[type(config.model)].check_training(config.model, device, getattr(torch, arguments.dtype))
    except AttentionRefused as error:
        attention = "auto"
        say(f"note: {error.reason}; the attention of auto, the same function, is used")
    if device != "cpu" and getattr(config.model, "attention", None) == "fastest":
        attention = "auto"  # without a device, "fastest" would choose for a CPU
    return directory.load(checkpoint, device, attention)


def refuse_statistics(arguments: argparse.Namespace, prefix: str) -> None:
    """Refuse options of gradient statistics, which sgd does not use."""
    for name in ("epsilon", "statistics", "statistics_batch", "statistics_segments"):
        if getattr(arguments, f"{prefix}{name}", None) is not None:
            raise UserError((Field(f"{prefix}{name}"), " was given, but sgd takes no gradient statistics"))


def add_cache_options(parser: Parser) -> None:
    """Add the options of a continuous cache around the model."""
    group = parser.group("continuous cache (txl cache finds the settings)")
    group.add_argument("--cache-size", type=int, metavar="N", help="tokens in the cache")
    group.add_argument("--cache-theta", type=float, metavar="X", help="how strongly it prefers similar contexts")
    group.add_argument("--cache-lambda", type=float, metavar="X", help="its share of the probability, 0 to 1")


def with_cache(model: FamilyModel, arguments: argparse.Namespace) -> FamilyModel | ContinuousCache:
    """Return the model, wrapped in a continuous cache if the options request one."""
    names = ("cache_size", "cache_theta", "cache_lambda")
    missing = [name for name in names if getattr(arguments, name) is None]
    if len(missing) == len(names):
        return model
    if missing:
        needed = (
            "a continuous cache needs ",
            Field(missing[0]),
            *((" and ", Field(missing[1])) if missing[1:] else ()),
        )
        raise UserError((*needed, " too"), remedy="txl cache finds theta and lambda")
    from txl.models.cache import ContinuousCache

    return ContinuousCache(model, *(getattr(arguments, name) for name in names))


def evaluation_settings(arguments: argparse.Namespace, config: RunConfig, batch_size: int) -> Settings:
    """Return the settings of an evaluation: the given options, else the run's test settings.

    Args:
        arguments: parsed arguments of the command.
        config: configuration of the run.
        batch_size: number of lanes if --batch is not given.
    """
    from txl.evaluation.stream import Settings

    return Settings(
        segment=config.eval.segment if arguments.segment is None else arguments.segment,
        batch_size=batch_size if arguments.batch is None else arguments.batch,
        max_tokens=arguments.max_tokens,
        exhaustive=getattr(arguments, "exhaustive", False),
        dtype=arguments.dtype,
        temperature=config.eval.temperature if arguments.temperature is None else arguments.temperature,
        **tested_lengths(arguments, config).options(),
    )


def refuse_with_sliding(arguments: argparse.Namespace) -> None:
    """Refuse options of memory and segments together with a sliding window, which has neither."""
    refuse_together(arguments, "sliding", ("mem_len", "mem_lens", "window", "segment"))


def refuse_together(arguments: argparse.Namespace, name: str, others: Sequence[str]) -> None:
    """Refuse an option together with one of others, which contradict it."""
    for other in others:
        if getattr(arguments, name) is not None and getattr(arguments, other, None) is not None:
            raise UserError((Field(name), " and ", Field(other), " were both given"), expected="one of them")


def refuse_tuned_split(arguments: argparse.Namespace) -> None:
    """Refuse to measure the split that settings are tuned on."""
    if arguments.split == arguments.tune_on:
        raise UserError(
            (Field("split"), " and ", Field("tune_on"), f" both name the split {arguments.split}"),
            remedy="tune on another split than the measured one",
        )


@typed("numbers separated by commas")
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
    """Return the `txl eval` command that repeats the measurement of a tuning command with the settings found.

    Args:
        arguments: parsed arguments of the tuning command.
        found: options with the settings found.
    """
    words = ["txl", "eval", arguments.directory, *found]
    for name, default in _OF_EVAL.items():
        value = getattr(arguments, name, default)
        if value != default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name, value in config_options(arguments).items():
        words += [f"--{name.replace('_', '-')}", value]
    return shlex.join(words)
