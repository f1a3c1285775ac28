"""One model that is served: its engine's thread, its texts and its limits."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
import torch

import txl
from txl.config.sections import Limit
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError
from txl.files import JsonObject
from txl.generation.engine import DecodeEngine
from txl.models.language_model import LanguageModel
from txl.native.build import identity
from txl.serving.metrics import Metrics
from txl.serving.requests import ApiError, Limits
from txl.serving.scheduler import Scheduler, Unavailable
from txl.serving.texts import Texts
from txl.serving.work import Work


@dataclass(frozen=True)
class Served:
    """A model to be served, and its settings."""

    model: LanguageModel
    vocabulary: Vocabulary
    name: str
    """The name by which clients ask for the model."""
    max_streams: int = 8
    """Texts that are decoded at the same time."""
    dtype: torch.dtype | None = None
    mem_len: int | None = None
    window: Limit = None
    clamp_len: Limit = None
    segment: int = 128
    """Tokens scored at once; with an exact window it changes no result."""
    threads: int | None = None
    """Threads that a step computes with; None: as many as PyTorch uses here."""
    model_hash: str = ""
    """Hash of the weights; empty: computed."""


class Service:
    """A served model with the thread that steps its engine.

    Raises:
        UserError: for a model that the engine does not decode.
    """

    grace = 5.0
    """Seconds that running requests have when the server stops."""

    def __init__(self, served: Served, limits: Limits = Limits()):  # noqa: B008 (a value)
        self.served, self.limits, self.metrics = served, limits, Metrics()
        lengths = {"mem_len": served.mem_len, "window": served.window, "clamp_len": served.clamp_len}
        self.engine = DecodeEngine(served.model, max_streams=served.max_streams, dtype=served.dtype, **lengths)
        self.empty = self.engine.empty_state()
        self.texts, self.model_id, self.segment = Texts(served.vocabulary, served.name), served.name, served.segment
        self.created = int(time.time())
        state = served.model.init_state(1, **lengths)
        self.identity: JsonObject = {
            "model": served.model_hash or weights_hash(served.model),
            "dtype": str(self.empty.keys[0].dtype).removeprefix("torch."),
            "mem_len": state.mem_len,
            "window": state.window,
            "clamp_len": state.clamp_len,
        }
        """Model and settings that a saved stream has to have in common with this service."""
        self.kernel = f"{'compiled' if self.engine.compiled else 'pytorch'} {' '.join(identity().values())}"
        """Step and library that the last bits of numbers depend on as well."""
        self.memory = state.capacity
        self.fingerprint = "txl-" + hashlib.sha256(repr((self.identity, self.kernel)).encode()).hexdigest()[:16]
        self.scheduler = Scheduler(
            self.engine, self.metrics, limits.max_queue, served.threads or torch.get_num_threads()
        )
        self._farewell: anyio.Event | None = None
        self._stopping: threading.Thread | None = None

    def start(self) -> None:
        """Start the engine's thread."""
        self.scheduler.start()

    def begin_to_stop(self) -> None:
        """Accept nothing more, and end what runs after a grace period; returns at once."""
        if self._stopping is None:
            self._stopping = threading.Thread(target=self.scheduler.stop, args=(self.grace,), name="txl stop")
            self._stopping.start()

    def stop(self) -> None:
        """Let what runs end, within a grace period; then end it, and wait for that."""
        self.begin_to_stop()
        assert self._stopping is not None
        self._stopping.join()

    def farewell(self) -> anyio.Event:
        """Return the event that says that the server is stopping; event streams then end by themselves."""
        if self._farewell is None:
            self._farewell = anyio.Event()
        return self._farewell

    def submit(self, works: Sequence[Work]) -> None:
        """Queue works.

        Raises:
            ApiError: if the queue is full, or the server is stopping.
        """
        try:
            self.scheduler.submit(works)
        except Unavailable as refused:
            raise ApiError(refused.status, str(refused), headers={"Retry-After": str(refused.retry_after)}) from None

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name; none at all is this one's.

        Raises:
            ApiError: if it is another's.
        """
        if name is not None and name != self.model_id:
            raise ApiError(
                404,
                f"the model {name[:80]!r} does not exist here; this server has {self.model_id!r}",
                param="model",
                code="model_not_found",
            )

    def describe(self) -> JsonObject:
        """Return the model as `/v1/models` lists it."""
        model = self.served.model
        return {
            "id": self.model_id,
            "object": "model",
            "created": self.created,
            "owned_by": "transformer-xl",
            "txl": {
                "version": txl.__version__,
                "parameters": sum(each.numel() for each in model.parameters()),
                "vocabulary": {"kind": self.texts.vocabulary.kind, "size": len(self.texts.vocabulary)},
                "memory": self.memory,
                **self.identity,
                "kernel": self.kernel,
                "max_streams": self.engine.max_streams,
                "limits": asdict(self.limits),
            },
        }


def weights_hash(model: LanguageModel) -> str:
    """Return the sha256 of a model's weights, names and shapes included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def served_name(directory: Path) -> str:
    """Return the name that a run directory is served under.

    Raises:
        UserError: if the directory has none.
    """
    name = directory.resolve().name
    if not name:
        raise UserError(f"{directory} has no name to serve it under; give --name")
    return name
