"""Status of a run, from its log and checkpoints; reading the status changes no file."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from txl.errors import UserError
from txl.files import JsonObject
from txl.runs.checkpoints import VerifiedCheckpoint, checkpoint_names
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName, RunLog, TrainEvent, ValidEvent, select
from txl.units import duration, metric

_ATTEMPTS = 5  # to list and verify checkpoints, if training deletes one in the meantime
_TELL_STATE = {EventName.START, EventName.RESUME, EventName.TRAIN, EventName.STOP, EventName.END, EventName.IMPORT}
_TELL_STEP = (_TELL_STATE - {EventName.IMPORT}) | {EventName.CHECKPOINT, EventName.VALID, EventName.SKIPPED}


@dataclass(frozen=True)
class RunStatus:
    """State, progress and problems of a run, as printed by `txl status`."""

    directory: str
    state: str  # in words: training, finished, imported, stopped (reason), ended (killed), not started or unknown
    step: int
    steps: int
    loss: float | None  # nats per token, from the newest `train` event
    valid_nll: float | None
    tokens_per_second: float | None
    seconds_since_last_event: float | None
    last_good_checkpoint: str | None
    best_checkpoint: str | None
    refused: tuple[str, ...]  # reasons why checkpoints newer than `last_good_checkpoint` cannot be used
    restarts: int
    skipped: int
    spikes: int
    rollbacks: int
    failed_saves: int
    torn_lines: int  # lines of the log that are unreadable or lack fields; a crash leaves one at the end
    unit: str | None

    def to_dict(self) -> JsonObject:
        """Return all fields as plain JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the status as lines of text."""
        share = f"{self.step:,} of {self.steps:,} ({100 * self.step / max(1, self.steps):.1f}%)"
        rows: list[tuple[str, object]] = [("step", share)]
        for label, nll in (("loss", self.loss), ("validation", self.valid_nll)):
            if nll is not None:
                rows.append((label, f"{nll:.4f} nats, {' '.join(metric(self.unit or '', nll))}"))
        if self.tokens_per_second is not None:
            rows.append(("speed", f"{self.tokens_per_second:,.0f} tokens/s"))
        if self.seconds_since_last_event is not None:
            rows.append(("last event", f"{duration(self.seconds_since_last_event)} ago"))
        good = self.last_good_checkpoint
        rows.append(("last checkpoint", "none" if good is None else f"{good}, verified now"))
        rows.append(("best checkpoint", self.best_checkpoint or "none"))
        rows.append(("restarts", self.restarts))
        counts: list[tuple[str, object]] = [
            ("skipped updates", self.skipped),
            ("loss spikes", self.spikes),
            ("rollbacks", self.rollbacks),
            ("failed saves", self.failed_saves),
            ("torn log lines", self.torn_lines),
        ]
        rows += [row for row in counts if row[1]] + [("refused", reason) for reason in self.refused]
        return [f"{self.directory}: {self.state}", *(f"{label:16} {value}" for label, value in rows)]


def run_status(path: Path) -> RunStatus:
    """Read the status of a run directory."""
    directory = RunDirectory(path)
    steps, log = directory.config().train.steps, directory.log()
    events, best = log.events, directory.pointer("best")
    good, refused = _good_checkpoint(directory, log.run_id)
    train, valid = select(events, TrainEvent), select(events, ValidEvent)
    counts = Counter(event["event"] for event in events)
    return RunStatus(
        directory=str(path),
        state=_state(directory, log),
        step=next((event["step"] for event in reversed(events) if event["event"] in _TELL_STEP), 0),
        steps=steps,
        loss=train[-1]["loss"] if train else None,
        valid_nll=valid[-1]["nll"] if valid else None,
        tokens_per_second=train[-1]["tokens_per_second"] if train else None,
        seconds_since_last_event=max(0.0, time.time() - events[-1]["time"]) if events else None,
        last_good_checkpoint=good,
        best_checkpoint=best.name if best is not None and best.is_dir() else None,
        refused=tuple(refused),
        restarts=counts[EventName.RESUME] + max(0, counts[EventName.START] - 1),
        skipped=counts[EventName.SKIPPED],
        spikes=counts[EventName.SPIKE],
        rollbacks=counts[EventName.ROLLBACK],
        failed_saves=counts[EventName.SAVE_FAILED],
        torn_lines=log.torn,
        unit=None if log.resumed is None else log.resumed["corpus"]["unit"],
    )


def _state(directory: RunDirectory, log: RunLog) -> str:
    if directory.is_locked():
        return "training"
    of_training = [event for event in log.events if event["event"] in _TELL_STATE]
    if not of_training:
        return "unknown (log.jsonl is missing or incomplete)" if directory.lacks_log() else "not started"
    last = of_training[-1]
    if last["event"] == EventName.END:
        return f"finished, but the model is of no use: {last['diverged']}" if last.get("diverged") else "finished"
    if last["event"] == EventName.IMPORT:
        return "imported"
    ended = f"stopped ({last['reason']})" if last["event"] == EventName.STOP else "ended unexpectedly (killed?)"
    if directory.newest() is None:
        return f"{ended} before its first checkpoint; the same command begins again"
    return f"{ended}; the same command continues"


def _good_checkpoint(directory: RunDirectory, run_id: str | None) -> tuple[str | None, list[str]]:
    """Return the newest intact checkpoint, and the reasons why newer ones cannot be used."""
    refused: list[str] = []
    for _ in range(_ATTEMPTS):
        refused, is_stale = [], False
        for name in reversed(checkpoint_names(directory.checkpoints)):
            path = directory.checkpoints / name
            try:
                VerifiedCheckpoint(path).verify(run_id)
                return name, refused
            except UserError as error:
                if path.exists():
                    refused.append(str(error))
                else:  # training has deleted it in the meantime
                    is_stale = True
        if not is_stale:
            break
    return None, refused
