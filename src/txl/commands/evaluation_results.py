"""Results of the commands that measure a model (`txl eval`, `cache`, `dynamic`): statistics, refusals, tables."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from txl.commands.evaluation_options import DynamicRequest
from txl.commands.output import print_table, progress_bar
from txl.errors import Field, UserError

if TYPE_CHECKING:
    from txl.data.prepared import Corpus
    from txl.data.vocabulary import Vocabulary
    from txl.evaluation.dynamic import GradientStatistics
    from txl.evaluation.stream import EvaluationResult, Settings
    from txl.models.language_model import LanguageModel
    from txl.runs.directory import RunDirectory
    from txl.runs.events import Evaluation, Measured


def collect_statistics(
    model: LanguageModel,
    vocabulary: Vocabulary | None,
    directory: RunDirectory,
    corpus: Corpus,
    request: DynamicRequest,
    settings: Settings,
    arguments: argparse.Namespace,
) -> GradientStatistics | None:
    """Return gradient statistics of the training split, read with the settings of the evaluation; None for sgd."""
    from txl.evaluation.dynamic import gradient_statistics
    from txl.runs.corpus import training_tokens

    if request.adaptation.rule == "sgd":
        return None
    quiet = arguments.json
    tokens = training_tokens(directory, vocabulary, corpus, data_dir=arguments.data_dir, quiet=quiet)
    progress, move = progress_bar("gradient statistics of the train split", quiet=quiet)
    with progress:
        return gradient_statistics(
            model,
            tokens,
            weights=request.adaptation.weights,
            segments=request.statistics_segments,
            segment=settings.segment,
            mem_len=settings.mem_len,
            window=settings.window,
            clamp_len=settings.clamp_len,
            batch_size=request.statistics_batch_size,
            dtype=settings.dtype,
            temperature=settings.temperature,
            progress=move,
        )


def measured_on(corpus: Corpus, split: str, checkpoint: Path) -> Measured:
    """Return the log's description of the text that a checkpoint was measured on."""
    return {
        "split": split,
        "corpus": corpus.name,
        "unit": corpus.unit,
        "sha256_text": corpus.info()["splits"][split]["sha256_text"],
        "checkpoint": checkpoint.name,
    }


def refuse_divergence(result: EvaluationResult, field: str = "dynamic_learning_rate") -> EvaluationResult:
    """Return the result; refuse it if the adapted weights diverged (`field` sets the learning rate)."""
    if math.isnan(result.nll):
        raise UserError("the weights diverged while adapting", remedy=("use a smaller ", Field(field)))
    return result


def refuse_not_a_number(losses: list[float], checkpoint: Path) -> None:
    """Refuse losses that are not numbers: the weights are damaged, or training diverged."""
    if any(math.isnan(loss) for loss in losses):
        problem = "losses are not numbers: training diverged or the file is damaged"
        raise UserError(problem, value=checkpoint, remedy="use another checkpoint")


def print_rows(rows: Sequence[Evaluation]) -> None:
    """Print a table of results, and below it the number of targets and the settings."""
    from txl.reporting.wording import adaptation_text, split_text
    from txl.units import ppl_text

    by_word = rows[0]["unit"] in ("word", "bpe")
    columns: list[tuple[str, Callable[[Evaluation], str]]] = [
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
    lanes = "1 lane" if first["batch_size"] == 1 else f"{first['batch_size']} lanes"
    dropped = f"; {first['dropped']:,} not scored (--exhaustive scores them)" if first["dropped"] else ""
    if first["sliding"]:
        print(f"{first['tokens']:,} targets, each from at most {first['segment']} tokens before it")
    else:
        print(f"{first['tokens']:,} targets in {lanes}, segments of {first['segment']}{dropped}")
    last = rows[-1]  # in `txl cache`, the row with a cache
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
