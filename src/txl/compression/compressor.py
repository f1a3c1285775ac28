"""Compression and decompression of files and streams, in memory that does not grow with the text."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import IO

import torch

import txl
from txl.compression.codec import BlockCodec, Symbols, threads
from txl.compression.coder import Frequencies
from txl.compression.container import MOST_BLOCK, ContainerReader, ContainerWriter
from txl.compression.learning import OnlinePredictor, OnlineRecipe
from txl.compression.predictors import EnginePredictor, ModelPredictor, Predictor
from txl.config import Lengths
from txl.config.values import checked, from_plain, require
from txl.data.characters import ByteVocabulary
from txl.data.prepared import Tokens
from txl.data.vocabulary import Vocabulary
from txl.errors import CommandFailed, Field, UserError
from txl.evaluation.dynamic import Adaptation, AdaptingModel, GradientStatistics, gradient_statistics
from txl.files import JsonObject
from txl.generation.engine import decodes
from txl.models.language_model import LanguageModel
from txl.native.build import identity
from txl.runs.checkpoints import model_digest, tensors_digest

BytesDone = Callable[[int, int], None]  # receives the number of bytes done, of the text and of the compressed file
_PROBE = 24  # columns whose frequencies the header's probe covers
_MOST_LANES = 1024
_LEAST_BLOCK = 1 << 18
_LANE_OF_BLOCK = 1 << 16
_ONLINE_BLOCK = 1 << 16
_SHORTEST_LANE = 1 << 14
_USUAL_LANES = 8


@dataclass(frozen=True)
class CodingModel:
    """A trained model for coding files."""

    model: LanguageModel  # any, on the CPU, in evaluation mode
    vocabulary: Vocabulary  # of bytes, characters or BPE tokens
    lengths: Lengths | None = None  # None: the model's own; a decoder uses those of the file's header
    training_tokens: Callable[[], Tokens | torch.Tensor] | None = None  # tokens of the training split, for rms


@dataclass(frozen=True)
class DynamicRecipe:
    """Settings of a trained model's adaptation to the file, stored in the file's header."""

    adaptation: Adaptation
    segment: int = 128  # tokens of each lane coded between two updates, at most what the model reads at once
    statistics_segments: int | None = 500  # training segments read for the statistics of rms; None: all
    statistics_batch_size: int = 1

    def __post_init__(self) -> None:
        require(self.segment >= 1, "segment", self.segment, "1 token or more")


@dataclass(frozen=True)
class Sizes:
    """Numbers of bytes of the text, of the file, and of the blocks in it without header, checksums and digests."""

    text: int
    file: int
    payload: int


def compress(
    source: IO[bytes],
    sink: IO[bytes],
    *,
    model: CodingModel | None = None,
    dynamic: DynamicRecipe | None = None,
    online: OnlineRecipe | None = None,
    lanes: int | None = None,
    verify: list[str] | None = None,
    progress: BytesDone | None = None,
) -> Sizes:
    """Compress a stream of bytes, which need not be seekable, by a trained model or by one that learns the text online.

    Args:
        dynamic: settings of the trained model's adaptation to the text coded so far; None: fixed weights.
        lanes: number of parts of each block that are read in parallel; more lanes are faster and cost some bits. None:
            1 with `dynamic`, otherwise as many as leave each lane 16 KiB of the first block (8 KiB online), at most 8.
        verify: arguments with which `txl decompress` decodes this file (``["--model", DIR]``). Another process then
            decodes every block before it is written. None: no verification.
        progress: called after every block with the number of bytes done.

    Raises:
        UserError: for contradictory settings, or a vocabulary of words.
        CommandFailed: if verification fails.
    """
    if (model is None) == (online is None) or (dynamic is not None and model is None):
        raise UserError("expected a model to code by, with or without dynamic evaluation, or an online recipe")
    require(lanes is None or 1 <= lanes <= _MOST_LANES, "lanes", lanes, f"1 to {_MOST_LANES}")
    block = _ONLINE_BLOCK if online else max(_LEAST_BLOCK, (lanes or _USUAL_LANES) * _LANE_OF_BLOCK)
    text = source.read(block)
    if lanes is None:
        lanes = 1 if dynamic else min(_USUAL_LANES, max(1, len(text) // (_SHORTEST_LANE >> (online is not None))))
    header: JsonObject = {"arithmetic": _arithmetic(), "lanes": lanes, "block": block}
    if online is not None:
        header["online"] = online.to_plain()
    if model is not None:
        header["model"] = model_digest(model.model, model.vocabulary)
        header["lengths"] = {} if model.lengths is None else model.lengths.options()
    if dynamic is not None:
        header["dynamic"] = dataclasses.asdict(dynamic)
    setup = _Setup(header, model)
    header |= setup.digests()
    n_threads = torch.get_num_threads() if verify is None else max(1, torch.get_num_threads() // 2)
    codec, writer = BlockCodec(setup.predictor(), setup.symbols, lanes, n_threads), ContainerWriter()
    n_text = n_payload = 0
    with closing(VerifiedSink(sink, verify, n_threads)) as file:
        file.write(writer.header(header))
        while text:
            n_symbols, payload = codec.encode(text)
            file.write(writer.block(text, n_symbols, payload), text)
            n_text, n_payload = n_text + len(text), n_payload + len(payload)
            if progress is not None:
                progress(n_text, file.n_written)
            text = source.read(block)
        file.finish(writer.end())
    return Sizes(n_text, file.n_written, n_payload)


def decompress(
    source: IO[bytes],
    sink: IO[bytes],
    *,
    name: str,
    load: Callable[[], CodingModel] | None = None,
    progress: BytesDone | None = None,
) -> Sizes:
    """Write the text of a file that `compress` made, each block only after checking it.

    `name` is the file's in messages; `load` returns the model, for a file that needs one; `progress` is called after
    every block with the number of bytes done.
    """
    reader = ContainerReader(source, name)
    header = reader.header()
    there, here = header.get("arithmetic"), _arithmetic()
    if there != here:
        known = there if isinstance(there, dict) else {}
        apart = ", ".join(
            f"{key} {known.get(key)}, not {here.get(key)}"
            for key in {**here, **known}
            if known.get(key) != here.get(key)
        )
        raise UserError(f"{name} can be decoded only where it was made: with {apart}")
    if ("online" in header) != (load is None):
        made, remedy = ("with", "give ") if load is None else ("without", "leave out ")
        raise UserError(f"{name} was made {made} a model", remedy=(remedy, Field("model")))
    model = None if load is None else load()
    if model is not None and model_digest(model.model, model.vocabulary) != header.get("model"):
        remedy = ("if the run has been trained on since, name the checkpoint of then with ", Field("checkpoint"))
        raise UserError(f"{name} was made with another model (weights, configuration or vocabulary)", remedy=remedy)
    setup = _Setup(header, model)
    for key, value in setup.digests().items():
        if header.get(key) != value:
            of_text = ("give the text that the model was trained on (", Field("data_dir"), ")")
            problem = f"{name} cannot be decoded here: {key} {header.get(key)} there, {value} here"
            raise UserError(problem, remedy=of_text if key == "statistics" else "use the machine that made it")
    codec = BlockCodec(setup.predictor(), setup.symbols, setup.lanes, torch.get_num_threads())
    n_text = n_payload = 0
    for block in reader.blocks(setup.block):
        text = codec.decode(block, name)
        sink.write(text)
        sink.flush()
        reader.decoded(text)
        n_text, n_payload = n_text + len(text), n_payload + len(block.payload)
        if progress is not None:
            progress(n_text, reader.n_read)
    sink.flush()
    return Sizes(n_text, reader.n_read, n_payload)


def _arithmetic() -> dict[str, str]:
    """Return the versions and the hardware on which the last bit of a probability depends."""

    def short(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    compiled = identity()
    if compiled["library"] != "none":
        compiled["library"] = short(compiled["library"])
    return {"txl": txl.__version__, "torch": torch.__version__, "build": short(torch.__config__.show()), **compiled}


class _Setup:
    """Model and settings that a header describes, built identically by encoder and decoder."""

    def __init__(self, header: JsonObject, model: CodingModel | None):
        lengths, limits = header.get("lengths", {}), {"lanes": _MOST_LANES, "block": MOST_BLOCK}
        is_known = isinstance(lengths, dict) and lengths.keys() <= {"mem_len", "window", "clamp_len"}
        sizes = {name: checked(int, header.get(name), f"header.{name}") for name in limits}
        if not is_known or not all(1 <= size <= limits[name] for name, size in sizes.items()):
            raise UserError("this version of txl cannot read the file's header")
        for name, value in lengths.items():
            if type(value) is not int and (name == "mem_len" or value not in (None, "none")):
                raise UserError("wrong in the file's header", field=name, value=value, expected="a whole number")
        self.lanes, self.block = sizes["lanes"], sizes["block"]
        self._model, self._lengths = model, Lengths() if model is None else model.model.config.lengths(**lengths)
        self._online = OnlineRecipe.from_plain(header.get("online")) if model is None else None
        self.symbols = Symbols(ByteVocabulary() if model is None else model.vocabulary)
        self._dynamic: DynamicRecipe | None = None
        self.statistics: GradientStatistics | None = None  # used by rms
        if model is None or "dynamic" not in header:
            return
        recipe = self._dynamic = from_plain(DynamicRecipe, header["dynamic"], "dynamic.")
        context = model.model.context
        self._segment = recipe.segment if context is None else min(recipe.segment, context)
        if recipe.adaptation.rule != "sgd":
            if model.training_tokens is None:
                raise UserError("adaptation by rms needs the training split, on both sides; use sgd")
            with threads(1):
                self.statistics = gradient_statistics(
                    model.model,
                    model.training_tokens(),
                    weights=recipe.adaptation.weights,
                    segments=recipe.statistics_segments,
                    segment=self._segment,
                    batch_size=recipe.statistics_batch_size,
                    **self._lengths.options(),
                )

    def predictor(self) -> Predictor:
        """Return a new predictor."""
        common = self.lanes, self.symbols.start
        with threads(1):  # values computed only once, such as W_kR R, must be equal on both sides
            if self._online is not None:
                return OnlinePredictor(self._online, *common)
            assert self._model is not None
            model = self._model.model
            if self._dynamic is not None:
                adapting = AdaptingModel(model, self._dynamic.adaptation, self.statistics)
                learn = adapting.score_then_adapt
                return ModelPredictor(adapting.model, *common, self._lengths, self._segment, learn)
            if decodes(model):
                return EnginePredictor(model, *common, self._lengths)
            return ModelPredictor(model, *common, self._lengths)

    def digests(self) -> dict[str, str]:
        """Return digests of the gradient statistics, if any, and of the frequencies of a few columns of made-up tokens.

        Other digests show, before anything is decoded, that the probabilities are different.
        """
        found = {} if self.statistics is None else {"statistics": tensors_digest(self.statistics.squares)}
        predictor, frequencies = self.predictor(), Frequencies(self.symbols.escape)
        total = hashlib.blake2b(digest_size=8)
        with threads(1):
            for column in range(_PROBE):
                if column == _PROBE - 4:
                    predictor.end_block()
                log_probs = predictor.predict()
                total.update(frequencies.cumulative(log_probs).tobytes())
                predictor.read((7 * column + 13 * torch.arange(self.lanes)) % log_probs.shape[1], True)
        return found | {"probe": total.hexdigest()}


class VerifiedSink:
    """Stream for a file's records that writes a block only after a process of `txl decompress` has decoded it.

    The process, whose further `arguments` may be ``--model DIR``, decodes a block while the encoder works at the next.
    It is never sent a record before its text of the one before has been read, so neither waits for the other with a
    full pipe. Without arguments (None) every record is written at once. CommandFailed: it returned another text.
    """

    def __init__(self, sink: IO[bytes], arguments: Sequence[str] | None, n_threads: int):
        self._sink, self._process = sink, None
        self._record, self._text = b"", b""  # sent to the process, and not confirmed yet
        self.n_written = 0  # bytes written to `sink`
        if arguments is not None:
            self._messages = tempfile.TemporaryFile()  # noqa: SIM115 (until `close`)
            self._process = subprocess.Popen(
                # -P: do not import files of the working folder, which may have the name of a module.
                [sys.executable, "-P", "-m", "txl", "decompress", "-", "-o", "-", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                env=os.environ | {"OMP_NUM_THREADS": str(n_threads)},
            )

    def write(self, record: bytes, text: bytes = b"") -> None:
        """Write a record, with its text if the record is a block; with a process, when the next record is written."""
        self._confirm()
        self._record, self._text = record, text
        if self._process is None:
            self._confirm()
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(record)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def finish(self, end: bytes) -> None:
        """Write the file's end, once the process has returned all texts and no more, and no error (CommandFailed)."""
        self.write(end)
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):  # the process's own message is reported below
                self._process.stdin.close()
            if self._process.stdout.read(1) or self._process.wait():
                raise self._failure()
        self._confirm()
        self._sink.flush()

    def close(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            with suppress(OSError), self._process:  # data that could not be flushed is not needed any more
                self._messages.close()

    def _confirm(self) -> None:
        if self._process is not None and self._text:
            assert self._process.stdout is not None
            if self._process.stdout.read(len(self._text)) != self._text:
                raise self._failure()
        self.n_written += self._sink.write(self._record)
        self._record, self._text = b"", b""

    def _failure(self) -> CommandFailed:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        reason = f": {lines[-1].removeprefix('txl: ')}" if lines else ""
        return CommandFailed(f"verification failed, so nothing more was written: the file cannot be decoded{reason}")
