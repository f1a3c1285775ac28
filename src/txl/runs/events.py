"""The events of a run's log: their names, and the fields of each one's line in log.jsonl.

Every line is an object with `event`, `step` and `time`, and the fields of its event. `EVENTS` is the only list of both:
`RunDirectory.append` writes no other event and no other field, and readers get typed lines from `select`.

Losses are in nats a token, times in seconds. A field that is `NotRequired` is left out where it has nothing to say, or
was not written by an earlier version.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NotRequired, TypedDict, TypeVar, cast

from txl.files import JsonObject


class EventName(StrEnum):
    """The value of `event` in a line of the log."""

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


class LogEvent(TypedDict):
    """A line of the log."""

    event: str
    step: int
    """Steps of training made when it happened; of a measurement, those of its checkpoint."""
    time: float
    """Seconds since 1970."""


class StartEvent(LogEvent):
    """Training begins (`start`), or goes on from a checkpoint (`resume`)."""

    config: JsonObject
    """The run's configuration (`RunConfig.to_dict`)."""
    corpus: JsonObject
    """Name, unit, identity and splits of the corpus (`Corpus.info`)."""
    parameters: dict[str, int]
    """Number of parameters by part of the model."""
    total_parameters: int
    attention: str
    """The attention backend in use."""
    compiled: bool
    """True if `torch.compile` compiles the layers."""
    hardware: JsonObject
    software: dict[str, str]
    command: list[str]
    """The words of the command line."""
    init_from: str | None
    """The directory that the first weights came from, as an absolute path; None: drawn at random."""
    init_note: str | None
    """Classifiers of auxiliary losses that were left out or begun anew."""
    processes: int
    run: str
    """Identifies the run; the same in all of its lines."""


class ExtendEvent(LogEvent):
    """A run gets more steps than it began with."""

    from_steps: int
    to_steps: int
    changes: list[str]
    """Differences from a run that had all steps from the start."""


class ReasonEvent(LogEvent):
    """A checkpoint that cannot be used is set aside (`refused`), one cannot be written (`save failed`), or training
    stops before its end (`stop`)."""

    reason: str
    """In words; of a stop the signal's name, or "not finite"."""


class TrainEvent(LogEvent):
    """Figures of the steps since the last such line."""

    loss: float
    """Mean over the targets of these steps."""
    learning_rate: float
    grad_norm: float
    """Norm of the last update's gradient, before clipping."""
    tokens_per_second: float
    tokens: int
    """Targets trained on since the run began."""
    tokens_read: int
    """Tokens of all segments since the run began."""
    elapsed: float
    """Seconds of training since the run began."""


class EvaluationFigures(TypedDict):
    """Figures of an evaluation and the settings that it was made under (`EvaluationResult.to_dict`)."""

    nll: float
    ppl: float
    bpc: float
    """Bits a token."""
    bits_per_byte: float | None
    bytes_per_token: float | None
    tokens: int
    """Targets scored."""
    dropped: int
    """Targets of the split that were not scored."""
    unknown: NotRequired[int | None]
    """Tokens read that are `<unk>`."""
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
    dynamic: JsonObject | None
    """Rule and settings of dynamic evaluation."""


class ValidEvent(LogEvent, EvaluationFigures):
    """An evaluation on the validation split while training."""

    averaged: int | None
    """Steps whose weights are averaged in the evaluated model; None: no average."""


class Measured(TypedDict):
    """Part of a corpus that a checkpoint was evaluated on."""

    split: str
    corpus: str
    unit: str
    sha256_text: NotRequired[str]
    """Hash of the split's text."""
    checkpoint: str
    measured: NotRequired[str]
    """Part of the corpus that was scored, in words."""


class Evaluation(EvaluationFigures, Measured):
    """An evaluation of a checkpoint on a split of a corpus."""


class EvalEvent(LogEvent, Evaluation):
    """One evaluation."""


class SweepEvent(LogEvent, Measured):
    """Evaluations of a checkpoint at several memory lengths."""

    rows: list[Evaluation]
    """One a memory length."""


class CheckpointEvent(LogEvent):
    """A checkpoint is written."""

    directory: str
    best: bool
    """True if it is the best so far."""
    copy_seconds: float
    """Time that training waited for the copy of its state."""
    write_seconds: float


class AverageEvent(LogEvent):
    """From here on the weights of every step are averaged."""


class SkippedEvent(LogEvent):
    """An update is skipped, because its loss or gradient is not finite."""

    in_a_row: int
    loss: str
    """In words, as JSON has no numbers that are not finite."""
    grad_norm: str
    epoch: int
    offset: int
    """Position of the segment in every lane."""
    tokens: list[int]
    """Lanes and length of the segment."""


class SpikeEvent(LogEvent):
    """The loss of an update leaps."""

    loss: float
    grad_norm: float
    recent_mean: float
    """Mean loss of the recent updates."""


class RollbackEvent(LogEvent):
    """Training goes back to an earlier checkpoint, whose step is the event's."""

    from_step: int


class EndEvent(LogEvent):
    """The last step is made."""

    elapsed: float
    converged: NotRequired[bool]
    """True: `train.patience` ended it."""
    diverged: NotRequired[str]
    """Why the model is of no use."""


class ImportEvent(LogEvent):
    """The run is an imported model."""

    source: str
    """Kind of the foreign checkpoint."""
    config: JsonObject
    total_parameters: int
    command: list[str]


class CacheEvent(LogEvent):
    """A continuous cache is tuned (`CacheTuning`)."""

    split: str
    """Tuned on."""
    size: int
    thetas: list[float]
    lambdas: list[float]
    nll: list[list[float]]
    """Nats a token by theta and lambda."""
    plain_nll: float
    tokens: int
    theta: float
    weight: float
    """The best lambda."""
    best_nll: float
    at_edge: list[str]


class DynamicEvent(LogEvent):
    """Dynamic evaluation is tuned (`DynamicTuning`)."""

    split: str
    """Tuned on."""
    learning_rates: list[float]
    decays: list[float]
    tried: list[dict[str, float | None]]
    """Learning rate, decay and nll; None where the weights diverged."""
    static_nll: float
    tokens: int
    adaptation: JsonObject
    best_nll: float
    at_edge: list[str]


class SampleEvent(LogEvent):
    """A text is generated."""

    prompt: str
    """Its end."""
    text: str
    """Its beginning."""
    checkpoint: str
    top_k: int | None
    top_p: float | None
    temperature: float
    seed: int | None
    max_tokens: int
    mem_len: int | None
    window: int | None


class CompressionEvent(LogEvent):
    """General compressors are run over the bytes of an evaluation."""

    corpus: str
    split: str
    settings: str
    text: int
    """Bytes of the text; all others: bytes of it compressed."""
    zlib: int
    bz2: int
    lzma: int
    lzma_after_training_text: NotRequired[int]
    """Bytes by which lzma's file grows when the text follows the training text."""


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
}
"""The fields of the line of each event."""

EventT = TypeVar("EventT", bound=LogEvent)


def select(events: Iterable[Mapping[str, object]], kind: type[EventT], name: EventName | None = None) -> list[EventT]:
    """Return the lines of one kind of event, in order.

    Args:
        events: lines of a log.
        kind: which have these fields.
        name: of which event, where several have them.
    """
    names = {each for each, has in EVENTS.items() if has is kind} if name is None else {name}
    return [cast("EventT", event) for event in events if event["event"] in names]


def fields_of(name: EventName) -> frozenset[str]:
    """Return the fields that an event may have, without those of every line."""
    kind = EVENTS[name]
    return (kind.__required_keys__ | kind.__optional_keys__) - LogEvent.__required_keys__
