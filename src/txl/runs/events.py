"""The log of a run, log.jsonl: names and fields of its events, and the reading of the whole log.

Every line is an object with `event`, `step` and `time`, and the fields of its event. `EVENTS` is the only list of
events and fields: `RunDirectory.append` accepts no others, and `select` returns typed lines to readers.

Losses are in nats per token, times in seconds. A `NotRequired` field is missing if it does not apply.
"""

import functools
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, NotRequired, Self, TypedDict, TypeVar, cast

from txl.errors import UserError
from txl.files import JsonObject, opened, parsed_json

_LATEST = 1e11  # seconds since 1970 of a time in the year 5138; no calendar holds much later ones
# Fields in which null stands for infinity or NaN, which JSON cannot represent.
_FIGURES = ("loss", "grad_norm", "nll", "ppl", "bpc")


class LogEvent(TypedDict):
    """A line of the log."""

    event: str
    step: int  # number of training steps made before the event; for a measurement, the step of its checkpoint
    time: float  # seconds since 1970


class SplitRecord(TypedDict):
    """Sizes and hashes of a split of a corpus."""

    tokens: int
    bytes: int
    unknown: int
    sha256_text: str
    sha256_tokens: str


class CorpusRecord(TypedDict):
    """The corpus that a run is trained on (`Corpus.info`)."""

    name: str
    unit: str
    vocabulary_size: int
    identity: str
    splits: dict[str, SplitRecord]


class TrainSettings(TypedDict):
    """Entries of a logged configuration's `train` that readers use."""

    steps: int
    dtype: str


class EvalSettings(TypedDict):
    """Entries of a logged configuration's `eval` that readers use."""

    mem_len: int
    window: int | None


class LoggedConfig(TypedDict):
    """Configuration of a run (`RunConfig.to_dict`)."""

    model: JsonObject
    train: TrainSettings
    eval: EvalSettings


class Hardware(TypedDict):
    """The machine of a run."""

    cpu: str
    cores: int
    threads: int
    memory_bytes: int | None
    device: str
    gpu: NotRequired[str]


class StartEvent(LogEvent):
    """Training begins (`start`), or continues from a checkpoint (`resume`)."""

    config: LoggedConfig
    corpus: CorpusRecord
    parameters: dict[str, int]  # number of parameters of each part of the model
    total_parameters: int
    attention: str  # attention backend in use
    compiled: bool  # true if `torch.compile` compiles the layers
    hardware: Hardware
    software: dict[str, str]
    command: list[str]  # words of the command line (`sys.argv`)
    init_from: str | None  # absolute path of the directory whose weights the run began with; None: random weights
    init_note: str | None  # classifiers of auxiliary losses that were left out or newly initialised, in words
    processes: int
    run: str  # identifier of the run, the same in all of its `start` and `resume` lines


class ExtendEvent(LogEvent):
    """The number of steps of a run changes: more by `--extend`, or fewer (or as many as first) to end in time."""

    from_steps: int
    to_steps: int
    changes: list[str]  # differences from a run that is configured with `to_steps` from the start


class ReasonEvent(LogEvent):
    """A checkpoint is set aside (`refused`) or cannot be written (`save failed`), or training stops early (`stop`)."""

    reason: str  # in words; for `stop`, the name of the signal or "not finite"


class TrainEvent(LogEvent):
    """Measures of the training steps since the previous `train` line."""

    loss: float  # mean loss over the targets of these steps
    learning_rate: float
    grad_norm: float  # norm of the gradient of the last update, before clipping
    tokens_per_second: float
    tokens: int  # number of targets trained on since the run began
    tokens_read: int  # number of tokens of all segments read since the run began
    elapsed: float  # seconds of training since the run began


class AdaptationSettings(TypedDict):
    """Rule and settings of dynamic evaluation (`txl.evaluation.dynamic.adapt_with`)."""

    rule: str
    learning_rate: float
    decay: float
    weights: str
    epsilon: NotRequired[float]
    statistics: NotRequired[str]
    statistics_segments: NotRequired[int]
    statistics_batch_size: NotRequired[int]


class EvaluationFigures(TypedDict):
    """Results and settings of an evaluation (`EvaluationResult.to_dict`)."""

    nll: float
    ppl: float
    bpc: float  # bits per token
    bits_per_byte: float | None
    bytes_per_token: float | None
    tokens: int  # number of targets scored
    dropped: int  # number of targets of the split that were not scored
    unknown: int | None  # number of tokens read that are `<unk>`
    seconds: float
    tokens_per_second: float
    segment: int
    mem_len: int
    window: int | None
    clamp_len: int | None
    batch_size: int
    exhaustive: bool
    dtype: str
    temperature: float
    sliding: bool
    cache_size: int | None
    cache_theta: float | None
    cache_lambda: float | None
    dynamic: JsonObject | None  # `AdaptationSettings`, which `txl compress` checks before it uses them


class ValidEvent(LogEvent, EvaluationFigures):
    """An evaluation on the validation split during training."""

    averaged: int | None  # number of steps whose weights are averaged in the evaluated model; None: no average


class Measured(TypedDict):
    """Part of a corpus that a checkpoint was evaluated on."""

    split: str
    corpus: str
    unit: str
    sha256_text: str  # hash of the split's text
    checkpoint: str
    measured: NotRequired[str]  # part of the corpus that was scored, in words


class Evaluation(EvaluationFigures, Measured):
    """An evaluation of a checkpoint on a split of a corpus."""


class EvalEvent(LogEvent, Evaluation):
    """One evaluation."""


class SweepEvent(LogEvent, Measured):
    """Evaluations of a checkpoint at several memory lengths."""

    rows: list[Evaluation]  # one evaluation per memory length


class CheckpointEvent(LogEvent):
    """A checkpoint is written."""

    directory: str
    best: bool  # true if the checkpoint is the best so far
    copy_seconds: float  # time for which training waited while its state was copied
    write_seconds: float


class SkippedEvent(LogEvent):
    """An update is skipped, because its loss or gradient is not finite."""

    in_a_row: int
    loss: str  # loss as a string, as JSON has no infinite numbers and no NaN
    grad_norm: str
    epoch: int
    offset: int  # offset of the segment in every lane
    tokens: list[int]  # number of lanes and length of the segment: [B, T]


class SpikeEvent(LogEvent):
    """The loss of an update is far above the mean of the recent updates."""

    loss: float
    grad_norm: float
    recent_mean: float  # mean loss of the recent updates


class RollbackEvent(LogEvent):
    """Training returns to an earlier checkpoint, whose step is `step`."""

    from_step: int


class EndEvent(LogEvent):
    """Training ends."""

    elapsed: float
    converged: NotRequired[bool]  # true if `train.patience` ended training
    diverged: NotRequired[str]  # reason why the model is unusable


class ImportEvent(LogEvent):
    """The run is an imported model."""

    source: str  # kind of the imported checkpoint
    config: JsonObject
    total_parameters: int
    command: list[str]


class CacheEvent(LogEvent):
    """A continuous cache is tuned (`CacheTuning`)."""

    split: str  # split that the tuning used
    size: int
    thetas: list[float]
    lambdas: list[float]
    nll: list[list[float]]  # nats per token, by theta and lambda
    plain_nll: float
    tokens: int
    theta: float
    weight: float  # the best lambda
    best_nll: float
    at_edge: list[str]


class DynamicEvent(LogEvent):
    """Dynamic evaluation is tuned (`DynamicTuning`)."""

    split: str  # split that the tuning used
    learning_rates: list[float]
    decays: list[float]
    tried: list[dict[str, float | None]]  # learning rate, decay and nll of each trial; None: the weights diverged
    static_nll: float
    tokens: int
    adaptation: JsonObject
    best_nll: float
    at_edge: list[str]


class SampleEvent(LogEvent):
    """A text is generated."""

    prompt: str  # end of the prompt
    text: str  # beginning of the generated text
    checkpoint: str
    top_k: int | None
    top_p: float | None
    temperature: float
    seed: int | None
    max_tokens: int
    mem_len: int | None
    window: int | None


class CompressionEvent(LogEvent):
    """General-purpose compressors are run on the bytes of the text of an evaluation."""

    corpus: str
    split: str
    settings: str
    text: int  # size of the text in bytes; the fields below are compressed sizes in bytes
    zlib: int
    bz2: int
    lzma: int
    lzma_after_training_text: NotRequired[int]  # bytes that the text adds to lzma's output of the training text


class DemoEvent(LogEvent):
    """`txl demo` ends."""

    seconds: float  # time of the whole command, with preparation, training, evaluation, texts and report


class EventName(StrEnum):
    """Value of `event` in a line of the log, and the type of that line."""

    line: type[LogEvent]

    def __new__(cls, name: str, line: type[LogEvent]) -> Self:  # noqa: D102
        member = str.__new__(cls, name)
        member._value_, member.line = name, line
        return member

    START = "start", StartEvent
    RESUME = "resume", StartEvent
    EXTEND = "extend", ExtendEvent
    REFUSED = "refused", ReasonEvent
    TRAIN = "train", TrainEvent
    VALID = "valid", ValidEvent
    CHECKPOINT = "checkpoint", CheckpointEvent
    SAVE_FAILED = "save failed", ReasonEvent
    AVERAGE = "average", LogEvent  # from this step on, the weights of every step are averaged
    SKIPPED = "skipped", SkippedEvent
    SPIKE = "spike", SpikeEvent
    ROLLBACK = "rollback", RollbackEvent
    STOP = "stop", ReasonEvent
    END = "end", EndEvent
    IMPORT = "import", ImportEvent
    EVAL = "eval", EvalEvent
    SWEEP = "sweep", SweepEvent
    CACHE = "cache", CacheEvent
    DYNAMIC = "dynamic", DynamicEvent
    SAMPLE = "sample", SampleEvent
    COMPRESSION = "compression", CompressionEvent
    DEMO = "demo", DemoEvent


EVENTS: dict[EventName, type[LogEvent]] = {name: name.line for name in EventName}
EventT = TypeVar("EventT", bound=LogEvent)


def select(events: Iterable[Mapping[str, object]], kind: type[EventT], name: EventName | None = None) -> list[EventT]:
    """Return the lines of one kind of event, in order; of one name, if several events have this type."""
    names = {other for other, fields in EVENTS.items() if fields is kind} if name is None else {name}
    return [cast("EventT", event) for event in events if event["event"] in names]


def fields_of(name: EventName) -> frozenset[str]:
    """Return the fields that an event may have, without the fields that every line has."""
    return (name.line.__required_keys__ | name.line.__optional_keys__) - LogEvent.__required_keys__


def fits(value: object, hint: Any) -> bool:
    """Return whether a JSON value has a declared type; a TypedDict may have further entries."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if typing.is_typeddict(hint):
        return isinstance(value, dict) and all(
            fits(value[name], field) if name in value else name not in hint.__required_keys__
            for name, field in _hints_of(hint).items()
        )
    if origin is UnionType:
        return any(fits(value, choice) for choice in arguments)
    if origin is list:
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, arguments[1]) for item in value.values())
    return hint is Any or type(value) is hint or (hint is float and type(value) is int)


_hints_of = functools.cache(typing.get_type_hints)


@dataclass(frozen=True)
class RunLog:
    """The lines of a run's log."""

    events: list[JsonObject]  # in order, with NaN for null in `_FIGURES`
    torn: int  # number of lines that are left out: cut off by a crash, or without fields of their event

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a log; a missing file is an empty log.

        A line needs the fields of its event with values of the declared types at any depth. The line of an unknown
        event, which a later version may have written, needs the fields of every line.
        """
        try:
            with opened(path) as file:
                text = file.read().decode("utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return cls([], 0)
        except OSError as error:
            raise UserError(f"{path}: the log cannot be read ({error.strerror})") from None
        # Not splitlines, which would also split at U+2028 and similar characters that a logged text may hold.
        lines, events = [line for line in text.split("\n") if line.strip()], []
        for line in lines:
            try:
                event = _with_nan(parsed_json(line))
            except ValueError:
                continue
            name = event.get("event")
            kind = EVENTS.get(cast("EventName", name), LogEvent) if isinstance(name, str) else LogEvent
            if fits(event, kind) and 0 <= event["time"] < _LATEST:
                events.append(event)
        return cls(events, len(lines) - len(events))

    @property
    def started(self) -> StartEvent | None:
        """The newest `start` event; None for an imported model."""
        return next(reversed(select(self.events, StartEvent, EventName.START)), None)

    @property
    def resumed(self) -> StartEvent | None:
        """The newest `start` or `resume` event."""
        return next(reversed(select(self.events, StartEvent)), None)

    @property
    def is_import(self) -> bool:
        """True for an imported model that was not trained here."""
        return self.started is None and bool(select(self.events, ImportEvent))

    @property
    def run_id(self) -> str | None:
        """Unique identifier of the run; None for an imported model."""
        return None if self.started is None else self.started["run"]

    @property
    def trained_on(self) -> JsonObject:
        """Record of the training corpus (`Corpus.info`); empty for an imported model."""
        return {} if self.started is None else cast("JsonObject", self.started["corpus"])


def _with_nan(event: Any) -> JsonObject:
    """Return an event, or a row of a sweep, with NaN for null in `_FIGURES`; what is no object becomes an empty one."""
    if not isinstance(event, dict):
        return {}
    if isinstance(rows := event.get("rows"), list):
        event = event | {"rows": [_with_nan(row) if isinstance(row, dict) else row for row in rows]}
    return event | {name: math.nan for name in _FIGURES if event.get(name, 0) is None}
