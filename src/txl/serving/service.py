"""A served model: the thread of its decode engine, its vocabulary and its limits."""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import anyio
import torch

import txl
from txl.config.sections import Limit
from txl.data.vocabulary import Vocabulary
from txl.files import JsonObject
from txl.generation.engine import DecodeEngine
from txl.models.language_model import LanguageModel
from txl.native.build import identity
from txl.runs.checkpoints import model_digest
from txl.serving.requests import ApiError, Limits, Metrics
from txl.serving.scheduler import Scheduler
from txl.serving.texts import Texts


@dataclass(frozen=True)
class Served:
    """A model to be served, and its settings."""

    model: LanguageModel
    vocabulary: Vocabulary
    name: str  # by which clients request the model
    max_streams: int = 8  # texts decoded at the same time
    dtype: torch.dtype | None = None
    mem_len: int | None = None
    window: Limit = None
    clamp_len: Limit = None
    segment: int = 128  # tokens scored at once; with a window, results do not depend on this number
    threads: int | None = None  # that compute a step; None: PyTorch's present number


class Service:
    """A served model, with the thread that steps its decode engine (UserError if it cannot decode the model)."""

    grace = 5.0  # seconds for which running requests may continue when the server stops

    def __init__(self, served: Served, limits: Limits = Limits()):  # noqa: B008 (a value)
        self.served, self.limits, self.metrics = served, limits, Metrics()
        lengths = {"mem_len": served.mem_len, "window": served.window, "clamp_len": served.clamp_len}
        self.engine = DecodeEngine(served.model, max_streams=served.max_streams, dtype=served.dtype, **lengths)
        self.empty = self.engine.empty_state()
        self.texts, self.model_id, self.segment = Texts(served.vocabulary, served.name), served.name, served.segment
        self.engine.prepare(forbidden=self.texts.forbidden)  # so that no answer waits for the recording of a step
        self.created = int(time.time())
        state = served.model.init_state(1, **lengths)
        # Digest of weights, configuration and vocabulary, and settings; a snapshot must have the same.
        self.identity: JsonObject = {
            "model": model_digest(served.model, served.vocabulary),
            "dtype": str(self.empty.keys[0].dtype).removeprefix("torch."),
            "mem_len": state.lengths.mem_len,
            "window": state.lengths.window,
            "clamp_len": state.lengths.clamp_len,
        }
        # Kind of step, library and processor, on which the last bits of results also depend.
        self.kernel = f"{'compiled' if self.engine.compiled else 'pytorch'} {' '.join(identity().values())}"
        self.memory = state.capacity
        self.fingerprint = "txl-" + hashlib.sha256(repr((self.identity, self.kernel)).encode()).hexdigest()[:16]
        n_threads = served.threads or torch.get_num_threads()
        self.scheduler = Scheduler(self.engine, self.metrics, limits.max_queue, n_threads)
        # For long texts; only one thread, to leave the other processors to the engine and to short texts.
        self.encoder = ThreadPoolExecutor(1, "txl encode")
        self.farewell = anyio.Event()  # set when the server stops, so that event streams end by themselves
        self._stopping = threading.Thread(target=lambda: self.scheduler.stop(self.grace), name="txl stop")

    def begin_to_stop(self) -> None:
        """Accept no more works, and end running works after the grace period; return at once."""
        if self._stopping.ident is None:
            self._stopping.start()

    def stop(self) -> None:
        """Stop as `begin_to_stop` does, and wait until all works have ended."""
        self.begin_to_stop()
        self._stopping.join()
        self.encoder.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str) -> None:
        """Refuse the name of another model (ApiError)."""
        if name != self.model_id:
            message = f"the model {name[:80]!r} does not exist here; this server has {self.model_id!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def describe(self) -> JsonObject:
        """Return the model as a JSON object of `/v1/models`."""
        return {
            "id": self.model_id,
            "object": "model",
            "created": self.created,
            "owned_by": "transformer-xl",
            "txl": {
                "version": txl.__version__,
                "parameters": sum(parameter.numel() for parameter in self.served.model.parameters()),
                "vocabulary": {"kind": self.texts.vocabulary.kind, "size": len(self.texts.vocabulary)},
                "memory": self.memory,
                **self.identity,
                "kernel": self.kernel,
                "max_streams": self.engine.max_streams,
                "limits": asdict(self.limits),
            },
        }
