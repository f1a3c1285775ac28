"""Tokens with byte offsets and word numbers: ids equal those of a corpus, offsets and words those of a plain loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from txl.data.bpe import BpeVocabulary
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.located import located_tokens
from txl.data.pieces import Piece
from txl.data.prepare import Recipe, prepare
from txl.data.prepared import Corpus
from txl.data.vocabularies import vocabulary_from_json
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError

SEEN = "the cat sat on the mat.\n“naïve” cafés — 日本 語 😀 ran\u00a0off \u3000 \n\n  x\r\n"
VOCABULARIES = {
    "byte": ByteVocabulary(),
    "char": CharVocabulary(sorted(set(SEEN))[:-3]),
    "word": WordVocabulary(["<eos>", "<unk>", *dict.fromkeys(SEEN.split())][:-2]),
    "marks": WordVocabulary(["<eos>", "<unk>", "the", "\uffed.", "mat", "“￭"], rule="punctuation"),
    "end": WordVocabulary(["<S>", "<unk>", "the", "cat"], eos="<S>", boundary="end"),
    "both": WordVocabulary(["<S>", "<unk>", "the", "cat"], eos="<S>", boundary="both"),
    "bpe": BpeVocabulary.train([SEEN * 20], 300),
}


def located(data: bytes, vocabulary, size: int = 1 << 20):
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    return list(located_tokens(Piece(Path("x.txt")), blocks, vocabulary))


def words_by_hand(text: str) -> list[int | None]:
    """Return the word number of each byte; a byte of white space has the number of the next word."""
    owner, number, inside = [], -1, False
    for character in text:
        solid = not character.isspace()
        number += solid and not inside
        inside = solid
        owner += [number if solid else number + 1] * len(character.encode())
    return owner


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=SEEN + "zq\t\x1c", max_size=60), size=st.integers(1, 70))
@example(text="a\n b", size=2)
@example(text="", size=1)
@example(text=" \n ", size=1)
def test_offsets_and_words_do_not_depend_on_blocks(name, text, size):
    data, vocabulary = text.encode(), VOCABULARIES[name]
    tokens = located(data, vocabulary)
    if name != "bpe":  # byte pairs do not cross the edges of blocks
        assert located(data, vocabulary, size) == tokens
    owner = words_by_hand(text)
    place = 0
    for token in located(data, vocabulary, size):
        assert token.start >= place
        assert token.text == data[token.start : token.end]
        solid = [at for at in range(token.start, token.end) if not _is_white(text, at)]
        assert token.is_text == bool(solid)
        if vocabulary.kind == "word":
            assert token.word == (owner[solid[0]] if solid else None)
            assert not data[place : token.start].decode().strip()
        else:
            assert token.start == place
            assert token.word == owner[solid[0] if solid else token.start]
        place = token.end
    if vocabulary.kind != "word":
        assert place == len(data)


def _is_white(text: str, at: int) -> bool:
    for character in text:
        at -= len(character.encode())
        if at < 0:
            return character.isspace()
    raise IndexError


def assert_ids_of_a_corpus(name, end, tmp_path):
    """Compare the ids of located tokens with those of a prepared corpus of the same text."""
    vocabulary = VOCABULARIES[name]
    path = tmp_path / "x.txt"
    path.write_bytes((SEEN * 30 + "the cat" + end).encode())
    recipe = Recipe(vocabulary.kind, vocabulary=vocabulary)
    prepare(tmp_path / "corpus", "x", lambda: {"train": [Piece(path)]}, recipe, quiet=True)
    tokens = list(located_tokens(Piece(path), Piece(path).blocks(), vocabulary))
    assert [token.id for token in tokens] == np.asarray(Corpus(tmp_path / "corpus").tokens("train")).tolist()


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("end", ["", "\n", "\n \n"])
def test_ids_are_those_of_a_corpus_of_the_same_text(name, end, tmp_path):
    assert_ids_of_a_corpus(name, end, tmp_path)


def test_long_bpe_text_is_cut_where_a_corpus_is(tmp_path, monkeypatch):
    monkeypatch.setattr("txl.data.bpe.BPE_CHUNK", 101)
    assert_ids_of_a_corpus("bpe", "", tmp_path)


def test_sentence_marks_stand_nowhere_in_the_text():
    rows = [(token.id, token.start, token.end, token.word) for token in located(b"the cat\ncat", VOCABULARIES["both"])]
    assert rows == [
        (0, 0, 0, None), (2, 0, 3, 0), (3, 4, 7, 1), (0, 7, 8, None), (0, 8, 8, None), (3, 8, 11, 2), (0, 11, 11, None),
    ]  # fmt: skip


NORMALISING = {
    "char": CharVocabulary(sorted(set(SEEN))[:-3], normalise=True),
    "word": WordVocabulary(["<eos>", "<unk>", *dict.fromkeys(SEEN.split())], normalise=True),
    "marks": WordVocabulary(["<eos>", "<unk>", "the", "\uffed.", "mat"], rule="punctuation", normalise=True),
    "bpe": BpeVocabulary.train([SEEN * 20], 300, normalise=True),
}


@pytest.mark.parametrize("name", NORMALISING)
@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="ab.é \n\ufeff", max_size=30), begins=st.booleans(), size=st.integers(1, 9))
def test_a_text_of_windows_has_the_tokens_of_unix_at_its_own_places(name, text, begins, size):
    vocabulary = NORMALISING[name]
    data = (("\ufeff" if begins else "") + text.replace("\n", "\r\n")).encode()
    text = text if begins else text.removeprefix("\ufeff")
    assume(text)
    whole, unix = located(data, vocabulary), located(text.encode(), as_it_is(vocabulary))
    for tokens in (whole, located(data, vocabulary, size)) if name != "bpe" else (whole,):
        assert [(token.id, token.word) for token in tokens] == [(token.id, token.word) for token in unix]
        for token, expected in zip(tokens, unix, strict=True):
            assert token.text == data[token.start : token.end] == expected.text.replace(b"\n", b"\r\n")
    assert [token.id for token in located(data, vocabulary)] == [
        token.id for token in located_tokens(Piece(Path("x")), [data], as_it_is(vocabulary), normalise=True)
    ]


def as_it_is(vocabulary):
    """Return a copy of the vocabulary that does not normalise texts."""
    return vocabulary_from_json({**vocabulary.to_json(), "normalise": False})


def test_marks_are_parts_of_the_word_that_they_touch():
    rows = [(token.id, token.start, token.end, token.word) for token in located(b"the mat.\n", NORMALISING["marks"])]
    assert rows == [(2, 0, 3, 0), (4, 4, 7, 1), (3, 7, 8, 1), (0, 8, 9, None)]


def test_bytes_that_are_no_utf8_are_read_as_bytes():
    data = b"a \xff\xe2\x80 b\x00"
    tokens = located(data, ByteVocabulary(), 3)
    assert [token.text for token in tokens] == [bytes([each]) for each in data]
    assert [token.word for token in tokens] == [0, 1, 1, 1, 1, 2, 2, 2]
    for name in ("char", "word", "bpe"):
        with pytest.raises(UserError, match=r"x\.txt: not UTF-8 \(byte 0xFF at offset 2\)"):
            located(data, VOCABULARIES[name], 3)


def test_tokens_that_do_not_spell_the_text_are_refused():
    from tokenizers import normalizers

    tokenizer = type(VOCABULARIES["bpe"].tokenizer).from_str(VOCABULARIES["bpe"].tokenizer.to_str())
    tokenizer.normalizer = normalizers.Replace("cat", "mat.")
    with pytest.raises(UserError, match="do not spell the text"):
        located(b"the cat", BpeVocabulary(tokenizer))
