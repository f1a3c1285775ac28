"""Options, settings and tables that `txl eval`, `cache`, `dynamic`, `score` and other measuring commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from txl.commands.options import number_or_all, pick_device, positive, tested_lengths
from txl.commands.output import print_table, progress_bar, say
from txl.commands.parser import Options, Parser, choice, option
from txl.config import AdaptationRule, AdaptedWeights, RunConfig, StatisticsName, same_length
from txl.errors import Field, UserError
from txl.runs.directory import RunDirectory
from txl.runs.events import Evaluation, Measured

if TYPE_CHECKING:  # these modules import PyTorch or NumPy
    from txl.data.prepared import Corpus
    from txl.data.vocabulary import Vocabulary
    from txl.evaluation.dynamic import Adaptation, GradientStatistics
    from txl.evaluation.stream import Settings
    from txl.models.cache import ContinuousCache
    from txl.models.family import FamilyModel

_SEGMENTS = 500  # of the training split that are read for gradient statistics
_CACHE = ("cache_size", "cache_theta", "cache_lambda")


def add_rule_options(place: Options, prefix: str) -> None:
    """Add the options of dynamic evaluation that `txl eval` and `txl dynamic` share; both find them as `dynamic_*`."""
    segments = f"training segments that show how large gradients are, or all (default: {_SEGMENTS})"
    for action in (
        option(place, f"--{prefix}epsilon", "X", "added to a gradient's size (default: 2e-5)", float),
        choice(
            place,
            f"--{prefix}weights",
            get_args(AdaptedWeights),
            "weights that adapt; biases: with norms (default: all)",
        ),
        option(place, f"--{prefix}statistics-segments", "N", segments, number_or_all),
        option(place, f"--{prefix}statistics-batch", "B", "lanes in each of these segments (default: 1)", positive),
    ):
        action.dest = f"dynamic_{action.dest.removeprefix('dynamic_')}"


def add_dynamic_options(parser: Parser) -> None:
    """Add the options of dynamic evaluation, in which the weights adapt to the text."""
    group = parser.add_argument_group("dynamic evaluation: score a segment, then adapt a copy of the weights to it")
    rules = "update rule; rms: gradients divided by their usual size; sgd: plain gradients"
    choice(group, "--dynamic", get_args(AdaptationRule), rules)
    option(group, "--dynamic-preset", "NAME", "published settings, with their memory and segment")
    option(group, "--dynamic-learning-rate", "X", "learning rate; txl dynamic finds one", float)
    option(group, "--dynamic-decay", "X", "pull towards the trained weights (default: 0)", float)
    add_rule_options(group, "dynamic-")
    statistics = "a gradient's size: from the mean of squares (2018; default) or their sum (2019)"
    choice(group, "--dynamic-statistics", get_args(StatisticsName), statistics)
    for action in parser.arguments:
        if action.dest.startswith("dynamic_") and action.dest != "dynamic_preset":
            parser.need(action.dest, "dynamic", "dynamic_preset")
    parser.need("dynamic", "dynamic_learning_rate", "dynamic_preset")
    for name in ("dynamic", "dynamic_preset"):
        parser.exclude(name, "sliding", "mem_lens")


def with_preset(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments, with the settings of `--dynamic-preset` for options that are not given."""
    if arguments.dynamic_preset is None:
        return arguments
    from txl.evaluation.tuning import PUBLISHED

    preset = PUBLISHED.get(arguments.dynamic_preset)
    if preset is None:
        known = ", ".join(PUBLISHED)
        raise UserError(field="dynamic_preset", value=arguments.dynamic_preset, expected=f"one of {known}")
    if arguments.dynamic not in (None, preset.adaptation.rule):
        rule = f"the preset's rule is {preset.adaptation.rule}"
        raise UserError(field="dynamic", value=arguments.dynamic, but=rule, remedy="leave it out")
    values: dict[str, Any] = {f"dynamic_{name}": value for name, value in asdict(preset.adaptation).items()}
    values |= {name: getattr(preset, name) for name in ("segment", "mem_len", "window", "clamp_len")}
    values |= {"dynamic": values["dynamic_rule"], "batch": preset.batch_size}
    values["dynamic_statistics_batch"] = preset.statistics_batch_size
    values["dynamic_statistics_segments"] = preset.statistics_segments or "all"
    if arguments.mem_len is not None:  # --mem-len without --window sets the window too
        values["window"] = same_length(arguments.mem_len, arguments.window)
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    return argparse.Namespace(**vars(arguments) | values | given)


def adaptation_of(arguments: argparse.Namespace, learning_rate: float) -> Adaptation:
    """Return the settings of dynamic evaluation that the options name; refuse statistics with sgd, which has none."""
    names = ("epsilon", "statistics", "statistics_batch", "statistics_segments", "decay", "weights")
    values = {name: getattr(arguments, f"dynamic_{name}", None) for name in names}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    for name in names[:4]:
        if arguments.dynamic == "sgd" and name in given:
            raise UserError((Field(f"dynamic_{name}"), " was given, but sgd takes no gradient statistics"))
    from txl.evaluation.dynamic import Adaptation

    of_update = {name: value for name, value in given.items() if not name.startswith("statistics_")}
    return Adaptation(arguments.dynamic, learning_rate, **of_update)


def load_to_adapt(
    directory: RunDirectory, config: RunConfig, checkpoint: Path, arguments: argparse.Namespace
) -> tuple[FamilyModel, Vocabulary | None]:
    """Load a model with an attention backend that can train on this device, as dynamic evaluation needs gradients."""
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


def statistics_of(
    model: FamilyModel | ContinuousCache,
    vocabulary: Vocabulary | None,
    directory: RunDirectory,
    corpus: Corpus,
    adaptation: Adaptation,
    settings: Settings,
    arguments: argparse.Namespace,
) -> GradientStatistics | None:
    """Return gradient statistics of the training split, read with the settings of the evaluation; None for sgd."""
    from txl.evaluation.dynamic import gradient_statistics
    from txl.runs.corpus import training_tokens

    if adaptation.rule == "sgd":
        return None
    segments, quiet = arguments.dynamic_statistics_segments, arguments.json
    segments = {None: _SEGMENTS, "all": None}.get(segments, segments)
    tokens = training_tokens(directory, vocabulary, corpus, data_dir=arguments.data_dir, quiet=quiet)
    with progress_bar("gradient statistics of the train split", quiet) as move:
        return gradient_statistics(
            model,
            tokens,
            weights=adaptation.weights,
            segments=segments,
            segment=settings.segment,
            mem_len=settings.mem_len,
            window=settings.window,
            clamp_len=settings.clamp_len,
            batch_size=arguments.dynamic_statistics_batch or 1,
            dtype=settings.dtype,
            temperature=settings.temperature,
            progress=move,
        )


def add_cache_options(parser: Parser) -> None:
    """Add the options of a continuous cache around the model."""
    group = parser.add_argument_group("continuous cache (txl cache finds the settings)")
    option(group, "--cache-size", "N", "tokens in the cache", int)
    option(group, "--cache-theta", "X", "how strongly it prefers similar contexts", float)
    option(group, "--cache-lambda", "X", "its share of the probability, 0 to 1", float)
    for name, other in permutations(_CACHE, 2):
        parser.need(name, other)


def with_cache(model: FamilyModel, arguments: argparse.Namespace) -> FamilyModel | ContinuousCache:
    """Return the model, wrapped in a continuous cache if the options request one."""
    if arguments.cache_size is None:
        return model
    from txl.models.cache import ContinuousCache

    return ContinuousCache(model, *(getattr(arguments, name) for name in _CACHE))


def evaluation_settings(arguments: argparse.Namespace, config: RunConfig, batch_size: int) -> Settings:
    """Return the settings of an evaluation: the given options, else the run's test settings and `batch_size` lanes."""
    from txl.evaluation.stream import Settings

    return Settings(
        segment=arguments.segment or config.eval.segment,
        batch_size=arguments.batch or batch_size,
        max_tokens=arguments.max_tokens,
        exhaustive=getattr(arguments, "exhaustive", False),
        dtype=arguments.dtype,
        temperature=config.eval.temperature if arguments.temperature is None else arguments.temperature,
        **tested_lengths(arguments, config).options(),
    )


def measured_on(corpus: Corpus, split: str, checkpoint: Path) -> Measured:
    """Return the log's description of the text that a checkpoint was measured on."""
    digest, unit = corpus.info()["splits"][split]["sha256_text"], corpus.unit
    name = checkpoint.name
    return {"split": split, "corpus": corpus.name, "unit": unit, "sha256_text": digest, "checkpoint": name}


def refuse_not_a_number(losses: list[float], checkpoint: Path, rate: str | None = None) -> None:
    """Refuse losses that are not numbers; `rate` is the option of the learning rate by which the weights adapted."""
    if any(math.isnan(loss) for loss in losses):
        if rate is not None:
            raise UserError("the weights diverged while adapting", remedy=("use a smaller ", Field(rate)))
        problem = "losses are not numbers: training diverged or the file is damaged"
        raise UserError(problem, value=checkpoint, remedy="use another checkpoint")


def print_rows(rows: Sequence[Evaluation]) -> None:
    """Print a table of results, and below it the number of targets and the settings."""
    from txl.reporting.wording import adaptation_text, split_text
    from txl.units import ppl_text

    first, last = rows[0], rows[-1]  # in `txl cache`, the last row is the one with a cache
    columns: dict[str, Callable[[Evaluation], str]] = {}
    if len({row["cache_size"] for row in rows}) > 1:
        columns["cache"] = lambda row: "none" if row["cache_size"] is None else f"{row['cache_size']:,}"
    if first["sliding"]:
        columns["sliding window"] = lambda row: str(row["segment"])
    else:
        columns["memory"] = lambda row: str(row["mem_len"])
        columns["window"] = lambda row: "none" if row["window"] is None else str(row["window"])
    columns["nats/token"] = lambda row: f"{row['nll']:.4f}"
    if first["unit"] in ("word", "bpe"):
        columns["ppl"] = lambda row: ppl_text(row["ppl"])
    else:
        columns["bpc"] = lambda row: f"{row['bpc']:.4f}"
    columns["bits/byte"] = lambda row: "" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
    columns["tokens/s"] = lambda row: f"{row['tokens_per_second']:,.0f}"
    title = f"{first['corpus']}, {split_text(first['split'])}, {first['checkpoint']}"
    print_table(title, list(columns), [[show(row) for show in columns.values()] for row in rows])
    if first["sliding"]:
        print(f"{first['tokens']:,} targets, each from at most {first['segment']} tokens before it")
    else:
        dropped = f"; {first['dropped']:,} not scored (--exhaustive scores them)" if first["dropped"] else ""
        print(f"{first['tokens']:,} targets, lanes: {first['batch_size']}, segments of {first['segment']}{dropped}")
    if last["cache_size"] is not None:
        shown = f"theta {last['cache_theta']:g}, lambda {last['cache_lambda']:g}"
        print(f"with a continuous cache of {last['cache_size']:,} tokens, {shown}")
    if (dynamic := first.get("dynamic")) is not None:
        print(adaptation_text(dynamic))
    if first["temperature"] != 1:
        print(f"softmax at temperature {first['temperature']:g}")
    if unknown := first.get("unknown"):
        read = first["tokens"] + first["dropped"] + 1
        print(f"{unknown:,} of the {read:,} tokens read are <unk>: the true bits per byte are higher")
