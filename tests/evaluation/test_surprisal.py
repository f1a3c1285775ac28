"""Surprisal of every token, against `txl.evaluate` and against sums over words by hand."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch

import txl
from txl.config import model_from_dict
from txl.data.characters import ByteVocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError
from txl.models.cache import ContinuousCache

TEXT = "The naïve café — it opened\nat  noon, 日本 time. " * 5
SHAPE: dict[str, Any] = {"n_layer": 2, "d_model": 8}
HEADS: dict[str, Any] = {"n_head": 2, "d_head": 4, "d_inner": 11}
KINDS: dict[str, dict[str, Any]] = {
    "transformer-xl": {"mem_len": 6, "window": 7},
    "clamped": {"mem_len": 9, "clamp_len": 4},
    "vanilla": {"encoding": "learned", "max_segment": 13, "mem_len": 0},
    "lstm": {"kind": "lstm", "mem_len": 0},
    "qrnn": {"kind": "qrnn", "mem_len": 0},
}


def model_of(vocab_size: int = 256, **fields: Any):
    torch.manual_seed(3)
    heads = {} if "kind" in fields else HEADS
    model = txl.build_model(model_from_dict(SHAPE | heads | fields), vocab_size)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.4)
    return model.double()


def bits(rows) -> list[float]:
    return [row.surprisal for row in rows if row.surprisal is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segment", [5, 13])
def test_sums_are_the_evaluation_s(kind, segment):
    model, vocabulary = model_of(**KINDS[kind]), ByteVocabulary()
    rows = list(txl.surprisals(model, vocabulary, TEXT, segment=segment))
    expected = txl.evaluate(model, vocabulary.encode(TEXT), segment=segment, batch_size=1)
    assert [row.index for row in rows] == list(range(len(TEXT.encode())))
    assert rows[0].surprisal is None
    assert len(bits(rows)) == expected.tokens
    assert sum(bits(rows)) == pytest.approx(expected.nll * expected.tokens / math.log(2), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_sliding_windows(kind):
    model, vocabulary = model_of(**KINDS[kind]), ByteVocabulary()
    for context in (1, 12):
        rows = list(txl.surprisals(model, vocabulary, TEXT, sliding=context))
        expected = txl.evaluate_sliding(model, vocabulary.encode(TEXT), context=context)
        assert sum(bits(rows)) == pytest.approx(expected.nll * expected.tokens / math.log(2), abs=1e-9)
        assert [row.context for row in rows] == [min(at, context) for at in range(len(rows))]
    assert len(list(txl.surprisals(model, vocabulary, "ab", sliding=12))) == 2


def test_temperature_and_cache():
    model, vocabulary = model_of(mem_len=6), ByteVocabulary()
    ids = vocabulary.encode(TEXT)
    settings: dict[str, Any]
    for each, settings in ((model, {"temperature": 1.3}), (ContinuousCache(model, 9, 0.3, 0.2), {})):
        rows = list(txl.surprisals(each, vocabulary, TEXT, segment=7, **settings))
        expected = txl.evaluate(each, ids, segment=7, batch_size=1, **settings)
        assert sum(bits(rows)) == pytest.approx(expected.nll * expected.tokens / math.log(2), abs=1e-9)


def test_what_a_prediction_sees_is_what_changes_it():
    """Memory and context count keys. With one layer, context is the number of tokens that influence a prediction."""
    model, vocabulary = model_of(n_layer=1, mem_len=6, window=7), ByteVocabulary()
    text = "abcdefghijklmnopqrstuvwx"
    plain = list(txl.surprisals(model, vocabulary, text, segment=4))
    assert [row.context for row in plain] == [0, 1, 2, 3, 4, 5, 6, *[7] * 17]
    assert [row.memory for row in plain[:13]] == [0, 0, 0, 0, 0, 4, 4, 4, 3, 6, 5, 4, 3]
    felt = [0] * len(text)
    for at in range(len(text)):
        changed = list(txl.surprisals(model, vocabulary, text[:at] + "Z" + text[at + 1 :], segment=4))
        for place in range(at + 1, len(text)):
            felt[place] += abs(bits(changed)[place - 1] - bits(plain)[place - 1]) > 1e-12
    assert felt == [row.context for row in plain]
    rows = list(txl.surprisals(model_of(**KINDS["lstm"]), vocabulary, text, segment=4))
    assert [(row.memory, row.context) for row in rows] == [(0, at) for at in range(len(text))]
    rows = list(txl.surprisals(model_of(**KINDS["vanilla"]), vocabulary, text, segment=4))
    assert [row.context for row in rows[:7]] == [0, 1, 2, 3, 4, 1, 2]


def test_words_sum_their_tokens():
    model, vocabulary = model_of(mem_len=6), ByteVocabulary()
    text = "ab  cd\n é. "
    rows = list(txl.surprisals(model, vocabulary, text))
    assert [row.word for row in rows] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    sums = {row.index: row.word_surprisal for row in rows if row.word_surprisal is not None}
    value = [0.0, *bits(rows)]
    assert sums == {5: pytest.approx(sum(value[2:6])), 10: pytest.approx(sum(value[6:11]))}  # the first word has no sum
    # With a prompt, the first word has a sum too; all surprisals are those of the text after the prompt.
    rows = list(txl.surprisals(model, vocabulary, text, prompt="Well, "))
    assert [row.index for row in rows] == list(range(12))
    whole = list(txl.surprisals(model, vocabulary, "Well, " + text))
    assert [row.surprisal for row in rows] == [row.surprisal for row in whole[6:]]
    assert rows[1].word_surprisal == pytest.approx(sum(bits(rows)[:2]))


def test_words_of_a_word_vocabulary_and_unknown_ones():
    vocabulary = WordVocabulary(["<eos>", "<unk>", "a", "b"])
    rows = list(txl.surprisals(model_of(4, mem_len=3), vocabulary, "a b\nzebra a"))
    assert [row.text for row in rows] == [b"a", b"b", b"\n", b"zebra", b"a", b""]
    assert [row.unknown for row in rows] == [False, False, False, True, False, False]
    assert [row.word for row in rows] == [0, 1, None, 2, 3, None]
    assert rows[5].start == rows[5].end == 11
    for row in rows[1:]:
        assert row.word_surprisal == (None if row.word is None else row.surprisal)


def test_files_streams_and_strings_are_one(tmp_path):
    model, vocabulary = model_of(mem_len=6), ByteVocabulary()
    path = tmp_path / "x.txt"
    path.write_bytes(TEXT.encode())
    rows = list(txl.surprisals(model, vocabulary, TEXT))
    assert list(txl.surprisals(model, vocabulary, path)) == rows
    assert list(txl.surprisals(model, vocabulary, io.BytesIO(TEXT.encode()))) == rows


def test_the_model_is_left_in_its_mode_and_gradients_on():
    model = model_of(mem_len=6, dropout=0.5).train()
    rows = txl.surprisals(model, ByteVocabulary(), TEXT, segment=4)
    for _ in range(7):
        next(rows)
    assert model.training
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"segment": 0}, "segment is 0"),
        ({"sliding": 0}, "sliding is 0"),
        ({"dtype": "float16"}, "dtype"),
        ({"temperature": 0.0}, "temperature"),
        ({"mem_len": -1}, "mem_len"),
        ({"window": 9, "mem_len": 4}, "window"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(UserError, match=message):
        txl.surprisals(model_of(mem_len=6), ByteVocabulary(), TEXT, **settings)


def test_texts_that_cannot_be():
    with pytest.raises(UserError, match="empty"):
        list(txl.surprisals(model_of(mem_len=6), ByteVocabulary(), ""))
    with pytest.raises(UserError, match="at most 13"):
        txl.surprisals(model_of(**KINDS["vanilla"]), ByteVocabulary(), TEXT, segment=14)
    assert list(txl.surprisals(model_of(**KINDS["vanilla"]), ByteVocabulary(), TEXT))  # a default segment that fits
    broken = model_of(mem_len=6)
    broken.softmax.bias.data.fill_(float("nan"))
    with pytest.raises(UserError, match="damaged"):
        list(txl.surprisals(broken, ByteVocabulary(), TEXT))
    marked = WordVocabulary(["<S>", "<unk>"], eos="<S>", boundary="end")
    with pytest.raises(UserError, match="leave the prompt out"):
        txl.surprisals(model_of(4, mem_len=3), marked, "a", prompt="b")
