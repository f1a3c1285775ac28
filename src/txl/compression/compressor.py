"""Compression and decompression of files and streams, in memory that does not grow with the text."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import IO, TypeGuard

import torch

from txl.compression.arithmetic import arithmetic, difference, threads
from txl.compression.codec import BlockCodec
from txl.compression.coder import Frequencies
from txl.compression.container import MOST_BLOCK, ContainerReader, ContainerWriter
from txl.compression.learning import OnlinePredictor, OnlineRecipe
from txl.compression.predictors import ModelPredictor, Predictor, fixed_predictor
from txl.compression.symbols import Symbols
from txl.compression.verification import VerifiedSink
from txl.config import Lengths
from txl.config.values import from_plain
from txl.data.characters import ByteVocabulary
from txl.data.prepared import Tokens
from txl.data.vocabulary import Vocabulary
from txl.errors import Field, UserError
from txl.evaluation.dynamic import Adaptation, AdaptingModel, GradientStatistics, gradient_statistics
from txl.files import JsonObject
from txl.models.language_model import LanguageModel
from txl.runs.digests import model_digest, tensors_digest

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

    def identity(self) -> str:
        """Return a digest of weights, configuration and vocabulary."""
        return model_digest(self.model, self.vocabulary)


@dataclass(frozen=True)
class DynamicRecipe:
    """Settings of a trained model's adaptation to the file, stored in the file's header."""

    adaptation: Adaptation
    segment: int = 128  # tokens of each lane coded between two updates, at most what the model reads at once
    statistics_segments: int | None = 500  # training segments read for the statistics of rms; None: all
    statistics_batch_size: int = 1

    def segment_of(self, model: LanguageModel) -> int:
        """Return the segment length for a model, at most the number of tokens that the model reads at once."""
        return self.segment if model.context is None else min(self.segment, model.context)

    def statistics(self, model: CodingModel, lengths: Lengths) -> GradientStatistics | None:
        """Return the gradient statistics that rms needs, computed with one thread; None for sgd."""
        if self.adaptation.rule == "sgd":
            return None
        if model.training_tokens is None:
            raise UserError("adaptation by rms needs the training split, on both sides; use sgd")
        with threads(1):
            return gradient_statistics(
                model.model,
                model.training_tokens(),
                weights=self.adaptation.weights,
                segments=self.statistics_segments,
                segment=self.segment_of(model.model),
                batch_size=self.statistics_batch_size,
                **lengths.options(),
            )


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
    """Compress a stream of bytes by means of a model's probabilities.

    Args:
        source: stream opened for reading bytes; it need not be seekable.
        sink: stream opened for writing bytes.
        model: trained model to code by; None: `online` is used instead.
        dynamic: settings of the model's adaptation to the text coded so far; None: fixed weights.
        online: recipe of a model that learns the text during coding, in place of a trained model.
        lanes: number of parts of each block that are read in parallel; more lanes are faster and cost some bits. None:
            1 with `dynamic`, otherwise as many as leave each lane 16 KiB of the first block (8 KiB online), at most 8.
        verify: arguments with which `txl decompress` decodes this file (``["--model", DIR]``). Another process then
            decodes every block before it is written. None: no verification.
        progress: called after every block with the number of bytes done.

    Raises:
        UserError: for contradictory settings, or a vocabulary of words.
        CommandFailed: if verification fails.
    """
    if (model is None) == (online is None):
        raise UserError("expected a model to code by, or an online recipe, and not both")
    if dynamic is not None and model is None:
        raise UserError("dynamic evaluation needs a trained model; an online model always learns")
    if dynamic is not None and dynamic.segment < 1:
        raise UserError(field="segment", value=dynamic.segment, expected="1 token or more")
    if lanes is not None and not 1 <= lanes <= _MOST_LANES:
        raise UserError(field="lanes", value=lanes, expected=f"1 to {_MOST_LANES}")
    block = _ONLINE_BLOCK if online else max(_LEAST_BLOCK, (lanes or _USUAL_LANES) * _LANE_OF_BLOCK)
    text = source.read(block)
    if lanes is None:
        lanes = 1 if dynamic else min(_USUAL_LANES, max(1, len(text) // (_SHORTEST_LANE >> (online is not None))))
    header = _described(model, dynamic, online) | {"lanes": lanes, "block": block}
    setup = _Setup(header, model)
    if setup.statistics is not None:
        header["statistics"] = setup.statistics
    header["probe"] = setup.probe()
    n_threads = torch.get_num_threads() if verify is None else max(1, torch.get_num_threads() // 2)
    codec, writer = setup.codec(n_threads), ContainerWriter()
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


def _described(model: CodingModel | None, dynamic: DynamicRecipe | None, online: OnlineRecipe | None) -> JsonObject:
    """Return the part of a header that describes the arithmetic, the model and its adaptation."""
    header: JsonObject = {"arithmetic": arithmetic()}
    if online is not None:
        header["online"] = online.to_plain()
    if model is not None:
        header["model"] = model.identity()
        header["lengths"] = {} if model.lengths is None else model.lengths.options()
        if dynamic is not None:
            header["dynamic"] = dataclasses.asdict(dynamic)
    return header


def decompress(
    source: IO[bytes],
    sink: IO[bytes],
    *,
    name: str,
    load: Callable[[], CodingModel] | None = None,
    progress: BytesDone | None = None,
) -> Sizes:
    """Write the text of a file that `compress` made, each block only after checking it.

    Args:
        source: stream opened for reading bytes.
        sink: stream opened for writing bytes.
        name: name of the file in messages.
        load: function that returns the model, for a file that needs a model.
        progress: called after every block with the number of bytes done.
    """
    reader = ContainerReader(source, name)
    header = reader.header()
    written = header.get("arithmetic")
    apart = difference(written if isinstance(written, dict) else {}, arithmetic())
    if apart is not None:
        raise UserError(f"{name} can be decoded only where it was made; the differences here: {apart}")
    if ("online" in header) != (load is None):
        if load is None:
            raise UserError(f"{name} was made with a model", remedy=("name its run directory with ", Field("model")))
        raise UserError(f"{name} was made without a model", remedy=("leave ", Field("model"), " out"))
    model = None if load is None else load()
    if model is not None and model.identity() != header.get("model"):
        raise UserError(
            f"{name} was made with another model (weights, configuration or vocabulary differ)",
            remedy=("if the run has been trained on since, name the checkpoint of then with ", Field("checkpoint")),
        )
    setup = _Setup(header, model)
    if "statistics" in header and setup.statistics != header["statistics"]:
        raise UserError(
            f"{name} cannot be decoded here: the training split gives other gradient statistics",
            remedy=("give the text that the model was trained on (", Field("data_dir"), ")"),
        )
    if setup.probe() != header.get("probe"):
        raise UserError(f"{name} cannot be decoded here: the same model gives other numbers on this machine")
    codec = setup.codec(torch.get_num_threads())
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


def _is_whole(value: object, most: int) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= most


class _Setup:
    """Model and settings that a header describes, built identically by encoder and decoder."""

    def __init__(self, header: JsonObject, model: CodingModel | None):
        lanes, block, lengths = header.get("lanes"), header.get("block"), header.get("lengths", {})
        is_known = isinstance(lengths, dict) and lengths.keys() <= {"mem_len", "window", "clamp_len"}
        if not (is_known and _is_whole(lanes, _MOST_LANES) and _is_whole(block, MOST_BLOCK)):
            raise UserError("this version of txl cannot read the file's header")
        for name, value in lengths.items():
            if type(value) is not int and (name == "mem_len" or value not in (None, "none")):
                raise UserError("wrong in the file's header", field=name, value=value, expected="a whole number")
        self._lanes, self.block, self._model = lanes, block, model
        self._online = None if model is not None else OnlineRecipe.from_plain(header.get("online"))
        self._lengths = Lengths() if model is None else model.model.config.lengths(**lengths)
        self._dynamic: DynamicRecipe | None = None
        self._statistics: GradientStatistics | None = None
        if model is not None and "dynamic" in header:
            recipe = from_plain(DynamicRecipe, header["dynamic"], "dynamic.")
            self._dynamic, self._statistics = recipe, recipe.statistics(model, self._lengths)
        self._symbols = Symbols(ByteVocabulary() if model is None else model.vocabulary)

    @property
    def statistics(self) -> str | None:
        """Digest of the gradient statistics used by rms; None without statistics."""
        return None if self._statistics is None else tensors_digest(self._statistics.squares)

    def codec(self, n_threads: int) -> BlockCodec:
        """Return a new encoder or decoder."""
        return BlockCodec(self._predictor(), self._symbols, self._lanes, n_threads)

    def probe(self) -> str:
        """Return a digest of the frequencies of a few columns of made-up tokens, learning included.

        A different digest shows, before anything is decoded, that the probabilities are different.
        """
        predictor, frequencies = self._predictor(), Frequencies(self._symbols.escape)
        total = hashlib.blake2b(digest_size=8)
        with threads(1):
            for column in range(_PROBE):
                if column == _PROBE - 4:
                    predictor.end_block()
                log_probs = predictor.predict()
                total.update(frequencies.cumulative(log_probs).tobytes())
                lanes = torch.arange(self._lanes)
                predictor.read((7 * column + 13 * lanes) % log_probs.shape[1], True)
        return total.hexdigest()

    def _predictor(self) -> Predictor:
        with threads(1):  # values computed only once, such as W_kR R, must be equal on both sides
            if self._online is not None:
                return OnlinePredictor(self._online, self._lanes, self._symbols.start)
            assert self._model is not None
            if self._dynamic is None:
                return fixed_predictor(self._model.model, self._lanes, self._symbols.start, self._lengths)
            adapting = AdaptingModel(self._model.model, self._dynamic.adaptation, self._statistics)
            return ModelPredictor(
                adapting.model,
                self._lanes,
                self._symbols.start,
                self._lengths,
                self._dynamic.segment_of(adapting.model),
                adapting.score_then_adapt,
            )
