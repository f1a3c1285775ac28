"""Compression of whole files by models of every kind; files are decoded only where the arithmetic is the same."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import random
import re
import zlib
from typing import Any

import numpy as np
import pytest
import torch

import txl.compression.compressor as compressor
from txl.compression.codec import BlockCodec, Symbols, threads
from txl.compression.compressor import CodingModel, DynamicRecipe, Sizes, compress, decompress
from txl.compression.container import MAGIC, ContainerReader, ContainerWriter
from txl.compression.learning import OnlineRecipe
from txl.compression.predictors import Predictor
from txl.config import Lengths, RecurrentConfig, TransformerXLConfig, VanillaConfig
from txl.data.bpe import BpeVocabulary
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.errors import UserError
from txl.evaluation.dynamic import Adaptation, evaluate_dynamically
from txl.evaluation.perplexity import evaluate
from txl.models import build_model
from txl.native.build import compiled_code, why_not

TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom ... " * 5
FOREIGN = {
    "empty": b"",
    "one byte": b"\n",
    "text": TEXT,
    "random": random.Random(1).randbytes(400),
    "other scripts": "Привет, 世界! ก็ 👩‍👩‍👧".encode() * 6 + b"\xff\xfe",
}
SMALL: dict[str, Any] = {"n_layer": 2, "d_model": 16, "dropout": 0.1, "init_std": 0.3}
KINDS = {
    "transformer-xl": TransformerXLConfig(**SMALL, n_head=2, d_head=8, d_inner=24, mem_len=20),
    "transformer-xl, learned distances": TransformerXLConfig(
        **SMALL, n_head=2, d_head=8, d_inner=24, mem_len=20, encoding="shaw", max_distance=7
    ),
    "vanilla": VanillaConfig(**SMALL, n_head=2, d_head=8, d_inner=24, max_segment=12),
    "lstm": RecurrentConfig(**SMALL, kind="lstm"),
    "qrnn": RecurrentConfig(**SMALL, kind="qrnn"),
}
WRITTEN = (
    "iVRYTA0KGgoCABMAAACrRrcUaosRQkluYkqqQmmBUi0AwKP3nAE9AAAAPQAAAAsAAACg2rQkewhlsv///Ye///Z+//3XcS4jawIFAAAABQAAAAUA"
    "AADlYIiMKVkDN25vaXNl/mrAZgBCAAAAAAAAAMDSqBNisRDyP0SgTFGtC5QnaO83"
)
ONLINE = OnlineRecipe(segment=8, model=RecurrentConfig(kind="lstm", n_layer=1, d_model=16))


def coding_model(kind: str, vocabulary: Any = None, seed: int = 0) -> CodingModel:
    vocabulary = ByteVocabulary() if vocabulary is None else vocabulary
    torch.manual_seed(seed)
    model = build_model(KINDS[kind], vocabulary).eval()
    training = torch.randint(len(vocabulary), (400,), generator=torch.Generator().manual_seed(3))
    return CodingModel(model, vocabulary, None, lambda: training)


def packed(text: bytes, **settings: Any) -> tuple[bytes, Sizes]:
    file = io.BytesIO()
    sizes = compress(io.BytesIO(text), file, **settings)
    assert sizes.text == len(text)
    assert sizes.file == len(file.getvalue())
    return file.getvalue(), sizes


def unpacked(file: bytes, model: CodingModel | None = None) -> bytes:
    out = io.BytesIO()
    decompress(io.BytesIO(file), out, name="FILE", load=None if model is None else lambda: model)
    return out.getvalue()


@pytest.fixture
def small_blocks(monkeypatch):
    for name, size in (("_LEAST_BLOCK", 100), ("_LANE_OF_BLOCK", 60), ("_ONLINE_BLOCK", 150), ("_SHORTEST_LANE", 40)):
        monkeypatch.setattr(compressor, name, size)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("lanes", [None, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_comes_back_with_another_number_of_threads(kind, lanes):
    model = coding_model(kind)
    for text in FOREIGN.values() if lanes == 3 else (FOREIGN["text"],):
        with threads(1):
            file, _ = packed(text, model=model, lanes=lanes)
        with threads(3):
            assert unpacked(file, model) == text
            assert lanes == 1 or packed(text, model=model, lanes=lanes)[0] == file


class Repeats(Predictor):
    """Predictor that each byte is that before it, in numbers that every machine computes exactly."""

    def __init__(self, lanes: int):
        self._last = torch.full((lanes,), ord("\n"))

    def predict(self) -> torch.Tensor:
        return torch.full((len(self._last), 256), -torch.inf).scatter(1, self._last[:, None], 0.0)

    def read(self, tokens: torch.Tensor, whole: bool) -> None:
        self._last = tokens

    def end_block(self) -> None:
        pass


def test_a_file_of_this_format_is_written_and_decoded_as_ever():
    """A change of these bytes, a header, a coded and a stored block, needs another version of the format."""
    header, texts = {"lanes": 2, "block": 262144, "probe": "made up"}, [b"a" * 40 + b"b" * 21, b"noise"]
    codec, writer = BlockCodec(Repeats(2), Symbols(ByteVocabulary()), 2, 1), ContainerWriter()
    blocks = [writer.header(header), *(writer.block(text, *codec.encode(text)) for text in texts), writer.end()]
    assert base64.b64encode(b"".join(blocks)).decode() == WRITTEN
    codec = BlockCodec(Repeats(2), Symbols(ByteVocabulary()), 2, 1)
    reader = ContainerReader(io.BytesIO(base64.b64decode(WRITTEN)), "FILE")
    assert reader.header() == header
    for block, text in zip(reader.blocks(1000), texts, strict=True):
        assert codec.decode(block, "FILE") == text
        reader.decoded(text)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["a few bytes", "characters", "byte pairs"])
def test_what_the_vocabulary_lacks_is_escaped(name):
    vocabulary = {
        "a few bytes": ByteVocabulary([*b" abcdefghijklmnopqrstuvwxyz"]),
        "characters": CharVocabulary(sorted(set(TEXT.decode()))),
        "byte pairs": BpeVocabulary.train([TEXT.decode()], 280),
    }[name]
    model = coding_model("transformer-xl", vocabulary)
    for text in FOREIGN.values():
        assert unpacked(packed(text, model=model, lanes=2)[0], model) == text


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rule", ["sgd", "rms"])
@pytest.mark.parametrize("kind", ["transformer-xl", "vanilla", "lstm"])
def test_a_model_that_adapts(kind, rule):
    model = coding_model(kind)
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    recipe = DynamicRecipe(Adaptation(rule, 0.05 if rule == "sgd" else 1e-4, 0.001), 16, 5)
    fixed = packed(TEXT, model=model, lanes=1)[1].payload
    for lanes in (None, 3):
        with threads(1):
            file, sizes = packed(TEXT, model=model, dynamic=recipe, lanes=lanes)
        with threads(3):
            assert unpacked(file, model) == TEXT
        if lanes is None:
            assert sizes.payload < fixed  # the text repeats itself
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.model.state_dict().items())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("counts", [True, False])
def test_a_model_that_starts_from_nothing(counts):
    recipe, files = dataclasses.replace(ONLINE, counts=counts), {}
    for name, text in FOREIGN.items():
        with threads(1):
            files[name], _ = packed(text, online=recipe, lanes=3 if text is TEXT else None)
        with threads(2):
            assert unpacked(files[name]) == text
    assert packed(TEXT, online=dataclasses.replace(recipe, seed=2), lanes=3)[0] != files["text"]
    if counts:  # it has learned the text when it comes again
        small, large = (packed(text, online=recipe, lanes=1)[1].payload for text in (TEXT, TEXT * 3))
        assert large < 1.3 * small


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("vocabulary", [ByteVocabulary(), ByteVocabulary([*b" abcdefghijklmnopqrstuvwxyz"])])
@pytest.mark.parametrize("way", ["fixed", "dynamic", "online"])
def test_what_does_not_get_shorter_is_stored_and_read_all_the_same(way, vocabulary):
    """A block of noise between texts is stored; weights, counts and frequencies change as if it had been coded."""
    noise = random.Random(5).randbytes(300)
    text = TEXT[:300] + noise + TEXT[:300]
    model = coding_model("transformer-xl", vocabulary)
    ways: dict[str, dict[str, Any]] = {
        "fixed": {"model": model},
        "dynamic": {"model": model, "dynamic": DynamicRecipe(Adaptation("sgd", 0.05), 16)},
        "online": {"online": ONLINE},
    }
    file, sizes = packed(text, **ways[way], lanes=3)
    assert noise[105:140] in file
    assert sizes.payload <= len(text)
    assert unpacked(file, None if way == "online" else model) == text


def test_another_training_text_is_named():
    model = coding_model("transformer-xl")
    file, _ = packed(TEXT[:50], model=model, dynamic=DynamicRecipe(Adaptation("rms", 1e-9), 16, 5))
    other = dataclasses.replace(model, training_tokens=lambda: torch.arange(200))
    with pytest.raises(UserError, match="statistics"):
        unpacked(file, other)


@pytest.mark.parametrize(("name", "value"), [("segment", 0), ("beta1", 1.0), ("eps", -1.0)])
def test_a_recipe_that_no_model_can_learn_by(name, value):
    with pytest.raises(UserError) as error:
        dataclasses.replace(ONLINE, **{name: value})
    assert (error.value.field, error.value.value) == (f"online.{name}", value)


@pytest.mark.parametrize("kind", ["transformer-xl", "lstm"])
def test_files_are_as_long_as_an_evaluation_of_as_many_lanes_says(kind):
    """Static coding with 8 lanes matches `txl eval --batch 8`; dynamic coding with one lane matches `--dynamic`."""
    vocabulary = ByteVocabulary([*b"abcdefghijklmnop"])
    model = coding_model(kind, vocabulary)
    lengths: dict[str, Any] = {}
    if kind == "transformer-xl":
        model, lengths = dataclasses.replace(model, lengths=Lengths(20, 20)), {"mem_len": 20, "window": 20}
    draw = random.Random(6)
    text = bytes(draw.choices(b"abcdefghijklmnop", weights=range(1, 17), k=1600))
    tokens = vocabulary.encode(text.decode())
    static = evaluate(model.model, tokens, segment=16, batch_size=8, **lengths)
    assert 8 * packed(text, model=model, lanes=8)[1].payload == pytest.approx(static.bpc * len(text), rel=0.005)
    recipe = DynamicRecipe(Adaptation("sgd", 0.02, 0.001), 16)
    behind_start = np.concatenate([[Symbols(vocabulary).start], tokens])
    dynamic = evaluate_dynamically(model.model, behind_start, recipe.adaptation, segment=16, **lengths)
    assert dynamic.bpc < 0.99 * static.bpc  # the model has learnt the frequencies of the letters
    sizes = packed(text, model=model, dynamic=recipe)[1]
    assert 8 * sizes.payload == pytest.approx(dynamic.bpc * len(text), rel=0.005)


@pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")
def test_pytorch_s_and_the_compiled_step_s_files_are_not_taken_for_each_other():
    model = coding_model("transformer-xl")
    with compiled_code(False):
        file, _ = packed(TEXT, model=model)
        assert unpacked(file, model) == TEXT
    with pytest.raises(UserError, match="library"):
        unpacked(file, model)


def changed(file: bytes, **values: Any) -> bytes:
    """Return the file with other values in its header, and the header's new checksum."""
    reader = ContainerReader(io.BytesIO(file), "FILE")
    header, writer = reader.header(), ContainerWriter()
    assert file.startswith(MAGIC)
    return writer.header(header | values) + file[reader.n_read :]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"arithmetic": {"torch": "1.0"}}, "only where it was made.*torch 1.0, not"),
        ({"arithmetic": 3}, "only where it was made"),
        ({"probe": "0"}, "probe 0 there"),
        ({"model": "0"}, "another model"),
        ({"lanes": 0}, "header"),
        ({"block": 1 << 40}, "header"),
        ({"lengths": {"other": 1}}, "header"),
        ({"lengths": {"mem_len": "x"}}, "mem_len x: wrong"),
        ({"lengths": {"mem_len": None}}, "mem_len none: wrong"),
        ({"lengths": {"clamp_len": True}}, "clamp_len true: wrong"),
        ({"lengths": {"mem_len": 10**30, "window": "none"}}, "damaged"),
        ({"lengths": {"mem_len": 2**60, "window": "none"}}, "mem_len is 1152921504606846976; expected"),
        ({"lengths": {"mem_len": 20, "clamp_len": 2**60}}, "clamp_len is 1152921504606846976; expected"),
        ({"lengths": {"window": json.loads("[" * 80 + "]" * 80)}}, "damaged"),
        ({"dynamic": {}}, "dynamic.adaptation: missing"),
    ],
)
def test_another_arithmetic_and_another_model_are_refused(values, match):
    model = coding_model("transformer-xl")
    file, _ = packed(TEXT, model=model)
    with pytest.raises(UserError, match=match):
        unpacked(changed(file, **values), model)


def test_other_weights_settings_and_modes_are_refused():
    model = coding_model("transformer-xl")
    file, _ = packed(TEXT, model=model)
    online, _ = packed(TEXT[:50], online=ONLINE)
    other = coding_model("transformer-xl", seed=1)
    for given, used, match in ((file, other, "another model"), (file, None, "with a"), (online, model, "without a")):
        with pytest.raises(UserError, match=match):
            unpacked(given, used)
    for settings, match in (({}, "or an online recipe"), ({"online": ONLINE, "lanes": 0}, "lanes is 0")):
        with pytest.raises(UserError, match=match):
            compress(io.BytesIO(), io.BytesIO(), **settings)


@pytest.mark.usefixtures("small_blocks")
def test_nothing_wrong_is_written_from_a_damaged_file():
    model = coding_model("lstm")
    file, _ = packed(TEXT[:150], model=model, lanes=1)
    draw = random.Random(4)
    for _ in range(15):
        place = draw.randrange(len(file))
        damaged = file[:place] + bytes([file[place] ^ 1 << draw.randrange(8)]) + file[place + 1 :]
        for data in (damaged, file[:place]):
            out = io.BytesIO()
            with pytest.raises(UserError):
                decompress(io.BytesIO(data), out, name="FILE", load=lambda: model)
            assert TEXT.startswith(out.getvalue())


@pytest.mark.usefixtures("small_blocks")
def test_a_payload_of_other_probabilities_is_told_by_its_text():
    """The damage is like a change of the arithmetic in the middle of the file, which no probe can detect."""
    model = coding_model("lstm")
    file, _ = packed(TEXT, model=model, lanes=1)
    reader = ContainerReader(io.BytesIO(file), "FILE")
    start, (block, *_) = reader.header(), list(_blocks(reader, TEXT))
    writer = ContainerWriter()
    head = writer.header(start)
    record = bytearray(writer.block(TEXT[: block.n_bytes], block.n_symbols, block.payload))
    record[-5 - len(block.payload) // 2] ^= 1  # in the middle of the payload; the checksum is made to match
    record[-4:] = zlib.crc32(bytes(record[:-4]), zlib.crc32(head[:-4])).to_bytes(4, "little")
    out = io.BytesIO()
    with pytest.raises(UserError, match="decoded to a different text"):
        decompress(io.BytesIO(head + bytes(record)), out, name="FILE", load=lambda: model)
    assert out.getvalue() == b""


def _blocks(reader: ContainerReader, text: bytes) -> Any:
    for block in reader.blocks(1000):
        yield block
        reader.decoded(text[reader._n_bytes :][: block.n_bytes])


class Slow(io.RawIOBase):
    """Long stream of text: `most` bytes are requested at once, and `ahead` are read but not yet written."""

    def __init__(self, size: int, written: io.BytesIO):
        self.left, self.most, self.ahead, self._written, self._read = size, 0, 0, written, 0

    def read(self, count: int = -1) -> bytes:
        self.most = max(self.most, count)
        given = min(count, self.left)
        self.left -= given
        self._read += given
        blocks = len(re.findall(rb"[\x01\x02]d\0\0\0", self._written.getvalue()))  # coded and stored, of 100 bytes
        self.ahead = max(self.ahead, self._read - 100 * blocks)
        return (TEXT * 2)[:given]


class Sink(io.RawIOBase):
    """Sink that keeps the sizes of what is written alone."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def write(self, data: Any) -> int:
        self.sizes.append(len(data))
        return len(data)


@pytest.mark.usefixtures("small_blocks")
def test_a_stream_is_read_and_written_block_by_block():
    """So memory does not grow with the text."""
    model, file, sink = coding_model("lstm"), io.BytesIO(), Sink()
    source = Slow(3000, file)
    compress(source, file, model=model, lanes=1)  # pyright: ignore[reportArgumentType]
    assert source.most == 100
    assert source.ahead <= 300
    file.seek(0)
    decompress(file, sink, name="FILE", load=lambda: model)  # pyright: ignore[reportArgumentType]
    assert sink.sizes == [100] * 30


@pytest.mark.parametrize("kind", ["transformer-xl", "lstm"])
def test_the_payload_is_as_long_as_the_log_probabilities_say(kind):
    model = coding_model(kind)
    ids, bits, state = [10], 0.0, model.model.init_state(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _ in range(1000):  # bytes drawn from the model: a block of unlikely bytes would be stored
            log_probs, state = model.model.log_probs(torch.tensor([ids[-1:]]), state)
            ids.append(int(torch.multinomial(log_probs[0, 0].exp(), 1, generator=generator)))
            bits -= log_probs[0, 0, ids[-1]].item() / math.log(2)
    text = bytes(ids[1:])
    sizes = packed(text, model=model, lanes=1)[1]
    assert bits - 8 < 8 * sizes.payload < bits * 1.0001 + 16
