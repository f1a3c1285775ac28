"""Contents of a run's log that reports use: the result, the other evaluations, and the progress of training."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from txl.files import JsonObject
from txl.reporting.compressors import SETTINGS
from txl.runs.events import (
    AdaptationSettings,
    CompressionEvent,
    Evaluation,
    EventName,
    ReasonEvent,
    SampleEvent,
    SplitRecord,
    StartEvent,
    TrainEvent,
    ValidEvent,
    fits,
    select,
)

_BEGINNINGS = {EventName.START, EventName.RESUME}
_RETURNS = _BEGINNINGS | {EventName.ROLLBACK}
_OF_TRAINING = _BEGINNINGS | {EventName.TRAIN, EventName.STOP, EventName.END}


@dataclass(frozen=True)
class Findings:
    """The contents of a log that a summary and a report use."""

    stretches: list[StartEvent]  # the `start` and `resume` events
    train: list[TrainEvent]  # one event per logged step, also if a crash made the run repeat the step; sorted by step
    valid: list[ValidEvent]
    result: Evaluation | None  # the evaluation reported as the result of the run, see `_result`
    without_memory: Evaluation | None  # the evaluation of the same targets under the same settings with memory 0
    curve: list[Evaluation]  # the newest sweep over memory lengths, sorted by memory length; see `_evaluations`
    others: list[Evaluation]  # all evaluations except `result`, `without_memory` and `curve`, newest first
    samples: list[SampleEvent]  # all samples of the checkpoint that was sampled last
    compression: CompressionEvent | None  # compressed sizes of the bytes that `result` was measured on
    stopped: ReasonEvent | None  # the `stop` event, if training stopped before its end and has not been resumed since
    ended: bool  # true if the last configured step has been trained, or training has ended before it by itself
    converged: bool  # true if training ended because the validation loss no longer improved (`train.patience`)
    diverged: str | None  # reason why the trained model is unusable; None if it is usable

    @property
    def start(self) -> StartEvent:
        """The newest event that describes the run: configuration, corpus, parameters, hardware, software."""
        return self.stretches[-1]

    @property
    def unit(self) -> str:
        """Unit of the training text's tokens."""
        return self.start["corpus"]["unit"]

    @property
    def speed(self) -> float:
        """Tokens per second in training: the median over the log's `train` events."""
        return statistics.median(event["tokens_per_second"] for event in self.train)

    def split_of(self, row: Evaluation) -> SplitRecord | None:
        """Return the counts and hashes of the evaluated split; None if it is not part of the training corpus."""
        corpus = self.start["corpus"]
        return corpus["splits"].get(row["split"]) if row["corpus"] == corpus["name"] else None


def findings(events: Sequence[JsonObject], checkpoint: str | None = None) -> Findings | None:
    """Return the contents of a log that reports use; None for a log without a `start` or `resume` event.

    The result is preferably of the given `checkpoint`, that which commands read by default.
    """
    stretches = [event for event in select(events, StartEvent) if "train" in event["corpus"]["splits"]]
    if not stretches:
        return None
    start = stretches[-1]
    rows, curves = _evaluations(events)
    result, without = _result(rows, start, checkpoint)
    compression = None
    if result is not None:
        of_result = (result["corpus"], result["split"])
        curves = [curve for curve in curves if (curve[0]["corpus"], curve[0]["split"]) == of_result]
        wanted = (*of_result, scored_bytes(result), SETTINGS)
        for event in select(events, CompressionEvent):  # the newest counts
            if (event["corpus"], event["split"], event["text"], event["settings"]) == wanted:
                compression = event
    curves = [curve for curve in curves if all(_own_way(row, start) for row in curve)] or curves
    curve = curves[-1] if curves else []
    shown = [row for row in (result, without, *curve) if row is not None]
    train = select(_last_of_steps(events, EventName.TRAIN, "loss"), TrainEvent)
    samples = select(events, SampleEvent)
    last = [event for event in events if event["event"] in _OF_TRAINING][-1]
    trained = max((event["step"] for event in train), default=0)
    return Findings(
        stretches=stretches,
        train=train,
        valid=select(_last_of_steps(events, EventName.VALID, "nll"), ValidEvent),
        result=result,
        without_memory=without,
        curve=curve,
        others=[row for row in reversed(rows) if row not in shown],
        samples=[sample for sample in samples if sample["checkpoint"] == samples[-1]["checkpoint"]],
        compression=compression,
        stopped=next(iter(select([last], ReasonEvent, EventName.STOP)), None),
        ended=last["event"] == EventName.END or trained >= start["config"]["train"]["steps"],
        converged=bool(last.get("converged")),
        diverged=last.get("diverged"),
    )


def scored_bytes(row: Evaluation) -> int | None:
    """Return the number of bytes of text that an evaluation read; None if the log lacks the bytes per token.

    The number is exact for a whole split and for the unit `byte`. Otherwise it is the number of tokens read times the
    split's mean number of bytes per token.
    """
    width = row["bytes_per_token"]
    return None if width is None else round(tokens_read(row) * width)


def tokens_read(row: Evaluation) -> int:
    """Return the number of tokens that an evaluation read: scored and unscored targets, and the first token."""
    return row["tokens"] + row["dropped"] + 1


def _evaluations(events: Sequence[JsonObject]) -> tuple[list[Evaluation], list[list[Evaluation]]]:
    """Return all evaluations, and all sweeps on a test split without a cache, both in order of time.

    Of evaluations with equal settings only the newest is returned.
    """
    newest: dict[tuple[object, ...], Evaluation] = {}
    curves: list[list[Evaluation]] = []
    for event in events:
        rows = cast("list[Evaluation]", [event] if event["event"] == EventName.EVAL else event.get("rows", []))
        for row in rows:
            if fits(row["dynamic"], AdaptationSettings | None):
                key = (*_targets(row), row["mem_len"], row["window"])
                newest.pop(key, None)  # the new row goes to the end
                newest[key] = row
        if event["event"] == EventName.SWEEP and event["split"] == "test":
            finite = [row for row in rows if math.isfinite(row["nll"]) and row["cache_size"] is None]
            if len({row["mem_len"] for row in finite}) > 1:
                curves.append(sorted(finite, key=lambda row: row["mem_len"]))
    return list(newest.values()), curves


def _targets(row: Evaluation) -> tuple[object, ...]:
    """Return the settings that two evaluations must share to differ only by memory length and window."""
    names = ("corpus", "split", "checkpoint", "tokens", "dropped", "segment", "batch_size", "clamp_len", "dtype")
    names += ("cache_size", "cache_theta", "cache_lambda", "temperature", "sliding", "exhaustive")
    values: Mapping[str, object] = row
    return (*(values[name] for name in names), json.dumps(row["dynamic"]))


def _own_way(row: Evaluation, start: StartEvent) -> bool:
    """Return whether an evaluation was made in the run's own way, as `txl eval` does without further options.

    The run's test settings can contain a temperature, but never a sliding window or exhaustive lanes. Of the text that
    the run was trained on, the whole split is then read.
    """
    corpus, own = start["corpus"], cast("Mapping[str, object]", start["config"]["eval"])
    split = corpus["splits"].get(row["split"]) if row["corpus"] == corpus["name"] else None
    values: Mapping[str, object] = row
    names = ("temperature", "segment", "batch_size", "clamp_len")
    same = all(values[name] == own[name] for name in names if name in own)
    is_whole = split is None or tokens_read(row) == split["tokens"]
    return same and is_whole and row["dtype"] != "bfloat16" and not row["sliding"] and not row["exhaustive"]


def _result(
    rows: list[Evaluation], start: StartEvent, checkpoint: str | None
) -> tuple[Evaluation | None, Evaluation | None]:
    """Return the result and the corresponding evaluation without memory.

    The result is an evaluation on the test split, if possible of the training corpus, of the default checkpoint and in
    the run's own way (`_own_way`), from the newest group of evaluations with equal checkpoint, targets and settings
    (`_targets`). From this group it has the memory length of the configuration's test settings, or else the largest
    memory length: the choice never depends on the loss.
    """
    rows = [row for row in rows if row["split"] == "test" and math.isfinite(row["nll"])]
    # With a cache or dynamic evaluation, the loss is not that of the trained model alone.
    rows = [row for row in rows if row["cache_size"] is None and row["dynamic"] is None]
    rows = [row for row in rows if row["corpus"] == start["corpus"]["name"]] or rows
    rows = [row for row in rows if row["checkpoint"] == checkpoint] or rows
    rows = [row for row in rows if _own_way(row, start)] or rows
    if not rows:
        return None, None
    same = [row for row in rows if _targets(row) == _targets(rows[-1])]
    wanted = start["config"]["eval"]
    lengths = {row["mem_len"] for row in same}
    length = wanted["mem_len"] if wanted["mem_len"] in lengths else max(lengths)
    of_length = [row for row in same if row["mem_len"] == length]
    result = next((row for row in reversed(of_length) if row["window"] == wanted["window"]), of_length[-1])
    without = next((row for row in reversed(same) if row["mem_len"] == 0), None)
    return result, None if result["mem_len"] == 0 else without


def _last_of_steps(events: Sequence[JsonObject], kind: EventName, loss: str) -> list[JsonObject]:
    """Return the newest event of each step: after a resume or a rollback, a run logs some steps a second time."""
    by_step: dict[int, JsonObject] = {}
    for event in events:
        if event["event"] in _RETURNS:
            by_step = {step: line for step, line in by_step.items() if step <= event["step"]}
        elif event["event"] == kind and math.isfinite(event.get(loss, math.nan)):
            by_step[event["step"]] = event
    return [by_step[step] for step in sorted(by_step)]
