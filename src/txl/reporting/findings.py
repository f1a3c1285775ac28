"""Parts of a run's log that reports are made of: the result, the evaluations beside it, the run's progress."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from txl.files import JsonObject
from txl.reporting.compressors import SETTINGS
from txl.runs.events import (
    CompressionEvent,
    Evaluation,
    EventName,
    ReasonEvent,
    SampleEvent,
    StartEvent,
    TrainEvent,
    ValidEvent,
    select,
)

_BEGINNINGS = {EventName.START, EventName.RESUME}
_OF_TRAINING = _BEGINNINGS | {EventName.TRAIN, EventName.STOP, EventName.END}


@dataclass(frozen=True)
class Findings:
    """The parts of a log that a summary and a report are made of."""

    stretches: list[StartEvent]
    """The `start` and `resume` events."""
    train: list[TrainEvent]
    """One line a step, without those that a crash made the run repeat."""
    valid: list[ValidEvent]
    result: Evaluation | None
    """The evaluation that counts, see `_result`."""
    without_memory: Evaluation | None
    """The same targets under the same settings, with memory 0."""
    curve: list[Evaluation]
    """The newest sweep over memory lengths, by memory length; see `_own_way` for which one."""
    others: list[Evaluation]
    """Evaluations that are neither the result nor its pair nor part of the curve, newest first."""
    samples: list[SampleEvent]
    """All of the checkpoint that was sampled last."""
    compression: CompressionEvent | None
    """Sizes that compressors give the bytes that `result` is about."""
    stopped: ReasonEvent | None
    """The `stop` event, if the last thing that training did was to stop before its end."""
    ended: bool
    """True once the last step has been taken."""
    diverged: str | None
    """Why the model that came of it is of no use, if it is of none."""

    @property
    def start(self) -> StartEvent:
        """The newest event that describes the run: configuration, corpus, parameters, hardware, software."""
        return self.stretches[-1]

    @property
    def unit(self) -> str:
        """Unit of the training text's tokens."""
        return self.start["corpus"]["unit"]

    @property
    def best(self) -> ValidEvent | None:
        """The validation with the lowest loss."""
        return min(self.valid, key=lambda event: event["nll"], default=None)

    @property
    def speed(self) -> float:
        """Tokens a second while training: the median of the log's lines."""
        return statistics.median(event["tokens_per_second"] for event in self.train)

    def unknown_tokens(self, row: Evaluation) -> int | None:
        """Return how many of the tokens that an evaluation read are <unk>; None if the log does not say."""
        if (unknown := row.get("unknown")) is not None:
            return unknown
        split = self.split_of(row)
        return None if split is None else split.get("unknown")

    def split_of(self, row: Evaluation) -> JsonObject | None:
        """Return the counts and hashes of the split that was evaluated, if it is the training corpus's."""
        corpus = self.start["corpus"]
        return corpus["splits"].get(row["split"]) if row["corpus"] == corpus["name"] else None


def findings(events: Sequence[JsonObject]) -> Findings | None:
    """Return the parts of a log that reports are made of; None for a log without a `start` event."""
    stretches = select(events, StartEvent)
    if not stretches:
        return None
    start = stretches[-1]
    rows, curve = _evaluations(events, start)
    result, without = _result(rows, start)
    if curve and result is not None and (curve[0]["corpus"], curve[0]["split"]) != (result["corpus"], result["split"]):
        curve = []
    shown = [row for row in (result, without, *curve) if row is not None]
    train = select(_kept(events, EventName.TRAIN, "loss"), TrainEvent)
    valid = select(_kept(events, EventName.VALID, "nll"), ValidEvent)
    samples = select(events, SampleEvent)
    last = [event for event in events if event["event"] in _OF_TRAINING][-1]
    return Findings(
        stretches=stretches,
        train=train,
        valid=valid,
        result=result,
        without_memory=without,
        curve=curve,
        others=[row for row in reversed(rows) if row not in shown],
        samples=[each for each in samples if each["checkpoint"] == samples[-1]["checkpoint"]],
        compression=None if result is None else _compression(events, result),
        stopped=next(iter(select([last], ReasonEvent, EventName.STOP)), None),
        ended=max((event["step"] for event in train), default=0) >= start["config"]["train"]["steps"],
        diverged=last.get("diverged"),
    )


def scored_bytes(row: Evaluation) -> int | None:
    """Return the bytes of text that an evaluation read; None where the text is not known.

    Exact for a whole split and for bytes; else the tokens read times the split's mean bytes a token.
    """
    width = row.get("bytes_per_token")
    return None if width is None else round(tokens_read(row) * width)


def tokens_read(row: Evaluation) -> int:
    """Return how many tokens an evaluation read: its targets, those not scored, and the stream's first token."""
    return row["tokens"] + row["dropped"] + 1


def _evaluations(events: Sequence[JsonObject], start: StartEvent) -> tuple[list[Evaluation], list[Evaluation]]:
    """Return all evaluations in order (of equal ones the newest), and the newest sweep on a test split.

    The sweep is one without a cache, and made the run's own way if there is such a one.
    """
    newest: dict[tuple[object, ...], Evaluation] = {}
    curves: list[list[Evaluation]] = []
    for event in events:
        rows: list[Evaluation] = {EventName.EVAL: [event], EventName.SWEEP: event.get("rows", [])}.get(
            event["event"], []
        )
        for row in rows:
            key = (*_targets(row), row["mem_len"], row["window"])
            newest.pop(key, None)  # so that it goes to the end
            newest[key] = row
        if event["event"] == EventName.SWEEP and event["split"] == "test":
            finite = [row for row in rows if math.isfinite(row["nll"]) and row["cache_size"] is None]
            if len({row["mem_len"] for row in finite}) > 1:
                curves.append(sorted(finite, key=lambda row: row["mem_len"]))
    curves = [curve for curve in curves if all(_own_way(row, start) for row in curve)] or curves
    return list(newest.values()), curves[-1] if curves else []


def _targets(row: Evaluation) -> tuple[object, ...]:
    """Return the settings that two evaluations must share to differ by memory alone."""
    names = ("corpus", "split", "checkpoint", "tokens", "dropped", "segment", "batch_size", "clamp_len", "dtype")
    names += ("cache_size", "cache_theta", "cache_lambda", "temperature", "sliding", "exhaustive")
    adapting = tuple((row.get("dynamic") or {}).items())
    values: Mapping[str, object] = row
    return (*(values[name] for name in names), adapting)


def _own_way(row: Evaluation, start: StartEvent) -> bool:
    """Return whether an evaluation was made as the run's configuration says, if nothing else is asked for.

    A temperature of its own belongs to the run's test settings; a sliding window or exhaustive lanes never do.
    """
    own = start["config"]["eval"]["temperature"]
    return row["temperature"] == own and not row["sliding"] and not row["exhaustive"]


def _result(rows: list[Evaluation], start: StartEvent) -> tuple[Evaluation | None, Evaluation | None]:
    """Return the result and its pair without memory.

    The result is of the test split, of the corpus that the run was trained on and made the run's own way if there are
    such evaluations, and of the newest kind (checkpoint, targets, segment). Of its memory lengths it is the one of the
    configuration's test settings, else the longest: never the one that happened to come out best.
    """
    rows = [row for row in rows if row["split"] == "test" and math.isfinite(row["nll"])]
    # Neither a cache nor weights that follow what they read are the model.
    rows = [row for row in rows if row["cache_size"] is None and row.get("dynamic") is None]
    rows = [row for row in rows if row["corpus"] == start["corpus"]["name"]] or rows
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


def _kept(events: Sequence[JsonObject], kind: EventName, loss: str) -> list[JsonObject]:
    """Return one event a step: a run that went on from an earlier checkpoint has logged some steps twice."""
    by_step: dict[int, JsonObject] = {}
    for event in events:
        if event["event"] in _BEGINNINGS:
            by_step = {step: kept for step, kept in by_step.items() if step <= event["step"]}
        elif event["event"] == kind and math.isfinite(event[loss]):
            by_step[event["step"]] = event
    return [by_step[step] for step in sorted(by_step)]


def _compression(events: Sequence[JsonObject], result: Evaluation) -> CompressionEvent | None:
    """Return the newest measurement of the compressors over the bytes of `result`."""
    wanted = (result["corpus"], result["split"], scored_bytes(result), SETTINGS)
    for event in reversed(select(events, CompressionEvent)):
        if (event["corpus"], event["split"], event["text"], event["settings"]) == wanted:
            return event
    return None
