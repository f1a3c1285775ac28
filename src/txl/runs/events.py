"""Events of a run's log: their names, and the fields of each event's line in log.jsonl.

Every line is an object with `event`, `step` and `time`, and the fields of its event. `EVENTS` is the only list of
events and fields: `RunDirectory.append` accepts no others, and `select` returns typed lines to readers.

Losses are in nats per token, times in seconds. A `NotRequired` field is missing if it does not apply.
"""

import functools
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import UnionType
from typing import Any, NotRequired, TypedDict, TypeVar, cast, get_args, get_origin, get_type_hints, is_typeddict

from txl.files import JsonObject


class EventName(StrEnum):
    """Value of `event` in a line of the log."""

    START = "start"
    RESUME = "resume"
    EXTEND = "extend"
    REFUSED = "refused"
    TRAIN = "train"
    VALID = "valid"
    CHECKPOINT = "checkpoint"
    SAVE_FAILED = "save failed"
    AVERAGE = "average"
    SKIPPED = "skipped"
    SPIKE = "spike"
    ROLLBACK = "rollback"
    STOP = "stop"
    END = "end"
    IMPORT = "import"
    EVAL = "eval"
    SWEEP = "sweep"
    CACHE = "cache"
    DYNAMIC = "dynamic"
    SAMPLE = "sample"
    COMPRESSION = "compression"
    DEMO = "demo"


_LATEST = 1e11  # seconds since 1970 of a time in the year 5138; no calendar holds much later ones


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
    """A checkpoint cannot be used and is set aside (`refused`), a checkpoint cannot be written (`save failed`), or
    training stops before its end (`stop`)."""

    reason: str  # reason in words; for `stop`, the name of the signal or "not finite"


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


class AverageEvent(LogEvent):
    """From this step on, the weights of every step are averaged."""


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


# Fields of each event's line.
EVENTS: dict[EventName, type[LogEvent]] = {
    EventName.START: StartEvent,
    EventName.RESUME: StartEvent,
    EventName.EXTEND: ExtendEvent,
    EventName.REFUSED: ReasonEvent,
    EventName.TRAIN: TrainEvent,
    EventName.VALID: ValidEvent,
    EventName.CHECKPOINT: CheckpointEvent,
    EventName.SAVE_FAILED: ReasonEvent,
    EventName.AVERAGE: AverageEvent,
    EventName.SKIPPED: SkippedEvent,
    EventName.SPIKE: SpikeEvent,
    EventName.ROLLBACK: RollbackEvent,
    EventName.STOP: ReasonEvent,
    EventName.END: EndEvent,
    EventName.IMPORT: ImportEvent,
    EventName.EVAL: EvalEvent,
    EventName.SWEEP: SweepEvent,
    EventName.CACHE: CacheEvent,
    EventName.DYNAMIC: DynamicEvent,
    EventName.SAMPLE: SampleEvent,
    EventName.COMPRESSION: CompressionEvent,
    EventName.DEMO: DemoEvent,
}

EventT = TypeVar("EventT", bound=LogEvent)


def select(events: Iterable[Mapping[str, object]], kind: type[EventT], name: EventName | None = None) -> list[EventT]:
    """Return the lines of one kind of event, in order.

    Args:
        events: lines of a log.
        kind: type of the events, which defines their fields.
        name: name of the event, if several events have this type; None: all of them.
    """
    names = {other for other, fields in EVENTS.items() if fields is kind} if name is None else {name}
    return [cast("EventT", event) for event in events if event["event"] in names]


def fields_of(name: EventName) -> frozenset[str]:
    """Return the fields that an event may have, without the fields that every line has."""
    kind = EVENTS[name]
    return (kind.__required_keys__ | kind.__optional_keys__) - LogEvent.__required_keys__


def is_complete(event: Mapping[str, object]) -> bool:
    """Return whether a line has the required fields of its event, and values of the declared types at any depth.

    The line of an unknown event, which a later version may have written, needs the fields of every line.
    """
    name = event.get("event")
    kind = EVENTS.get(cast("EventName", name), LogEvent) if isinstance(name, str) else LogEvent
    return fits(event, kind) and 0 <= cast("float", event["time"]) < _LATEST


def fits(value: object, hint: Any) -> bool:
    """Return whether a JSON value has a declared type; a TypedDict may have further entries."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
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


_hints_of = functools.cache(get_type_hints)
