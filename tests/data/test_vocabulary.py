from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from txl.data import bpe as module
from txl.data.bpe import BpeVocabulary
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.located import located_tokens
from txl.data.pieces import Piece
from txl.data.vocabularies import load_vocabulary, vocabulary_from_json
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError

TEXT = "Größe\tund  Gewicht\r\n\n  naïve — 日本 🦆🦆\n" * 20
BPE = BpeVocabulary.train([TEXT], 400)
ALL = {
    "byte": ByteVocabulary(),
    "char": CharVocabulary(sorted(set(TEXT))),
    "word": WordVocabulary(["<eos>", "the", "<unk>", "mill"]),
    "marks": WordVocabulary(["<eos>", "the", "<unk>", "\uffed,"], rule="punctuation"),
    "bpe": BPE,
    "small letters": WordVocabulary(["the", "mill"], eos=None, unk=None, lower=True),
    "small characters": CharVocabulary("aéb", unk_id=2, lower=True),
}


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
@example(text=TEXT)
def test_bytes_and_byte_pairs_hold_any_text(text):
    for vocabulary in (ALL["byte"], BPE):
        ids = vocabulary.encode(text)
        assert (ids.dtype, vocabulary.decode(ids)) == (np.int64, text)
    assert ALL["char"].decode(ALL["char"].encode(TEXT)) == TEXT


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_characters_spread_over_tokens_appear_whole_and_only_once(kind):
    decoder = ALL[kind].decoder()
    pieces = [decoder.push(int(token)) for token in ALL[kind].encode("é🦆ß")] + [decoder.flush()]
    assert "".join(pieces) == "é🦆ß"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_bytes_that_are_no_character_are_replaced_not_lost():
    decoder = ALL["byte"].decoder()
    assert decoder.push(0xC3) == ""
    assert decoder.push(ord("a")) == "\N{REPLACEMENT CHARACTER}a"
    assert decoder.push(0xE2) == ""
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}"


def _kind(character: str) -> str:
    """Return the class of a character by which the BPE library cuts a text into pieces."""
    if character.isdecimal():
        return "digit"
    return "letter" if character.isalnum() else "space" if character.isspace() else "mark"


@given(text=st.text(alphabet="aZé中1٣_!+́ \n\t", max_size=90))
def test_merges_are_learned_in_pieces_of_which_only_long_ones_are_cut(text):
    with mock.patch.object(module, "BPE_LONGEST", 8):
        parts = module._without_long_pieces(text)
    assert "".join(parts) == text
    cuts = set(accumulate(map(len, parts[:-1])))
    end = 0
    for _, run in groupby(text, _kind):
        begin, end = end, end + len(list(run))
        inside = [begin, *(cut for cut in sorted(cuts) if begin < cut < end), end]
        assert len(inside) == 2 or end - begin > 8
        assert all(after - before <= 8 for before, after in pairwise(inside))
        cuts -= set(inside)
    assert not cuts


def test_the_bound_of_pieces_serves_learning_alone():
    text = "ab" * 5000
    vocabulary = BpeVocabulary.train([text], 300)
    assert vocabulary.longest == module.BPE_LONGEST
    assert vocabulary.encode("x" + text).tolist() == [*vocabulary.encode("x"), *vocabulary.encode(text)]
    assert vocabulary.encode_block("x" + text).tolist() == vocabulary.encode("x" + text).tolist()


def test_bpe_merges_what_is_frequent():
    assert len(BPE.encode(TEXT)) < len(TEXT.encode()) / 2
    assert len(BPE) <= 400
    with pytest.raises(UserError, match="data.vocab_size is 200; expected 257 or more"):
        BpeVocabulary.train([TEXT], 200)


def test_characters_that_are_lacking_are_unknown_or_named():
    vocabulary = CharVocabulary("cab")
    assert (vocabulary.unk_id, len(vocabulary)) == (0, 4)
    assert vocabulary.encode("aq🦆b\U0010ffff").tolist() == [2, 0, 0, 3, 0]
    assert vocabulary.lacking("aq🦆bq") == ["q", "🦆"]
    with pytest.raises(UserError, match=r"lacks: 'q' \(U\+0071\), '🦆' \(U\+1F986\); leave them out"):
        CharVocabulary("abc", unknown=False).encode("aq🦆b")


def test_words_that_are_lacking_are_named_once_whatever_stands_first():
    for boundary in (None, "end", "both"):
        vocabulary = WordVocabulary(["<S>", "the", "<UNK>"], eos="<S>", unk="<UNK>", boundary=boundary)
        assert vocabulary.lacking("the flood\n<UNK> flood the\n") == ["flood"]
    apart = WordVocabulary(["<eos>", "<unk>", "mill"], rule="punctuation")
    assert apart.lacking("mill, (mill)") == [",", "(", ")"]
    assert ALL["bpe"].lacking("anything") == ALL["byte"].lacking("anything") == []


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_undecodable_bytes_of_a_command_line_are_the_bytes_they_were(kind):
    text = "naïve \udcff\udcc3\udca9\udce2 end"
    assert BPE.spelled_bytes(BPE.encode(text)) == len("naïve ".encode()) + 4 + len(" end")
    assert ALL[kind].decode(ALL[kind].encode(text)) == "naïve \ufffdé\ufffd end"
    with pytest.raises(UserError, match=r"half a surrogate pair \(U\+D800 at character 2\), which is no character"):
        ALL[kind].encode("ab\ud800")


def test_texts_are_normalised_where_the_vocabulary_says_so():
    text = "\ufeffthe mill\r\nthe\r \ufeff\r\n"
    plain = "the mill\nthe\r \ufeff\n"
    for kind in ("char", "word", "bpe"):
        values = ALL[kind].to_json()
        reads = vocabulary_from_json(values | {"format": 2, "normalise": True})
        assert reads.encode(text).tolist() == ALL[kind].encode(plain).tolist()
        assert ALL[kind].encode(text).tolist() != ALL[kind].encode(plain).tolist()
        assert reads.to_json() == values | {"format": 2, "normalise": True}
        assert reads != ALL[kind]
        assert ALL[kind].to_json()["format"] == 1
    assert not ALL["byte"].normalise


def test_words_lines_and_the_unknown():
    vocabulary = ALL["word"]
    ids = vocabulary.encode("the mill\n\nthe flood")
    assert ids.tolist() == [1, 3, 0, 0, 1, 2]
    assert vocabulary.decode(ids) == "the mill\n\nthe <unk>"
    for after, expected in (("the", " mill\nthe"), ("the ", "mill\nthe"), ("", "mill\nthe")):
        decoder = vocabulary.decoder(after)
        assert "".join(decoder.push(token) for token in (3, 0, 1)) == expected


def test_words_are_ordered_by_count_then_appearance_and_unk_has_the_place_of_its_count():
    counted = {"b": 3, "rare": 1, "a": 3, "c": 5, "once": 1, "<eos>": 2}
    # An <unk> in the text counts like any other word: words of equal count keep their order of appearance.
    for counts, min_count, max_words, expected in (
        (counted, 1, None, ["<eos>", "c", "b", "a", "rare", "once", "<unk>"]),
        (counted, 2, None, ["<eos>", "c", "b", "a", "<unk>"]),
        (counted, 1, 1, ["<eos>", "<unk>", "c"]),
        ({"<unk>": 9, "a": 1}, 1, None, ["<eos>", "<unk>", "a"]),
        ({"a": 2, "<unk>": 2, "b": 2}, 1, None, ["<eos>", "a", "<unk>", "b"]),
    ):
        assert WordVocabulary.of_counts(Counter(counts), min_count, max_words).words == expected


@pytest.mark.parametrize("kind", ALL)
def test_a_vocabulary_survives_json(kind, tmp_path):
    ALL[kind].save(tmp_path / "vocabulary.json")
    loaded = load_vocabulary(tmp_path / "vocabulary.json")
    assert loaded == ALL[kind]
    assert type(loaded) is type(ALL[kind])
    assert loaded.encode("the").tolist() == ALL[kind].encode("the").tolist() if kind != "char" else True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a vocabulary"),
        ('{"format": 1, "kind": "word"}', "not a vocabulary$"),
        ('{"format": 1, "kind": "word", "words": ["a"]}', "needs <eos>"),
        ('{"format": 1, "kind": "word", "words": ["a", "a"]}', "a word twice"),
        ('{"format": 1, "kind": "char", "characters": ["ab"]}', "not one character"),
        ('{"format": 1, "kind": "syllable"}', "kind 'syllable'"),
        ('{"format": 4, "kind": "byte"}', "format 4; this version reads formats 1 to 3"),
        (
            '{"format": 2, "kind": "word", "words": ["<eos>", "<unk>"], "rule": "x"}',
            "expected one of whitespace, punct",
        ),
        ('{"format": 1, "kind": "bpe", "tokenizer": {}}', "not a vocabulary"),
        ('{"format": 1, "kind": "word", "words": ["<eos>", "<unk>", 3]}', "not a vocabulary"),
        (
            r'{"format": 1, "kind": "word", "words": ["<eos>", "<unk>", "a\ud800"]}',
            "holds '.ud800', which UTF-8 cannot",
        ),
        (r'{"format": 1, "kind": "char", "characters": ["\udcff"]}', "holds '.udcff', which UTF-8 cannot write"),
        ('{"format": 3, "kind": "char", "characters": ["a"], "unk_id": 2}', "unk_id is 2; expected the id of <unk>"),
        (
            '{"format": 3, "kind": "word", "words": ["a"], "eos": null, "unk": null, "boundary": "end"}',
            "and a word for",
        ),
    ],
)
def test_files_that_are_no_vocabulary_are_refused(content, message, tmp_path):
    path = tmp_path / "vocabulary.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as refusal:
        load_vocabulary(path)
    assert str(path) in str(refusal.value)


PADDING = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
PADDING |= {"pad_type_id": 0, "pad_token": "e"}
OTHER: dict[str, object] = {
    "padding": PADDING,
    "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    "post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "e", "type_id": 0}}], "pair": [],
        "special_tokens": {"e": {"id": "e", "ids": [1], "tokens": ["e"]}},
    },
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"},
    "added_tokens": [
        {"id": 256, "content": "e", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", [*OTHER, "dropout", "continuing_subword_prefix"])
def test_a_tokenizer_that_holds_more_than_its_merges_is_refused(name):
    values = BPE.to_json()
    if name in OTHER:
        values["tokenizer"][name] = OTHER[name]
    else:  # with a prefix, the library would panic
        values["tokenizer"]["model"][name] = 0.5 if name == "dropout" else "##"
        name = "model"
    with pytest.raises(UserError, match=f"tokenizer has a {name} that is not plain byte-level BPE"):
        vocabulary_from_json(values)


def test_capitals_are_read_as_small_letters_and_places_stay():
    words, characters = ALL["small letters"], ALL["small characters"]
    assert words.encode("THE Mill\nthe").tolist() == [0, 1, 0]
    assert words.decode([0, 1]) == "the mill"
    with pytest.raises(UserError, match="words that the vocabulary lacks: flood, i̇s, 'x' .U.0078.; leave them out"):
        words.encode("the Flood İs X flood")
    assert characters.encode("AÉbxB").tolist() == [0, 1, 3, 2, 3]
    assert characters.decode([0, 2, 1, 3]) == "a<unk>éb"
    assert characters.lacking("AXbY") == ["X", "Y"]
    assert characters.spell(np.array([0])) is characters.spelled_bytes(np.array([0])) is None
    text = "THE İİ Mill".encode()
    lower = WordVocabulary(["the", "<unk>", "mill"], eos=None, lower=True)
    located = list(located_tokens(Piece(Path("x")), [text], lower))
    assert [(token.id, text[token.start : token.end].decode()) for token in located] == [
        (0, "THE"),
        (1, "İİ"),
        (2, "Mill"),
    ]
    assert words.to_json()["format"] == characters.to_json()["format"] == 3


def test_vocabularies_of_some_bytes_and_of_a_closed_alphabet():
    few = ByteVocabulary(list("ba é".encode()))
    assert few.encode("é a").tolist() == [3, 4, 2, 1]
    assert few.decode([3, 4, 2, 0]) == "é b"
    closed = CharVocabulary("b a", unknown=False)
    assert closed.encode("a b").tolist() == [2, 1, 0]
    assert closed.decode([2, 1, 0]) == "a b"
    with pytest.raises(UserError, match=r"'c' \(U\+0063\)"):
        closed.encode_block("abc")
    with pytest.raises(UserError, match="a byte twice"):
        ByteVocabulary([1, 1])
    with pytest.raises(UserError, match="a character twice"):
        CharVocabulary("aa")


WHITE = (" ", "  ", "\n", "\t", "\r\n", "\x1c", "\x85", "\xa0", "\u2003", "\u3000", "\u200b")
PARTS = (*WHITE, "'s", "'", "abc", "The", "12", "\u5929\u5730", "e\u0301", "!", "...", "_", "\x00", "\U0001f600")
PARTS += ("\u2167", "\ufeff", "<eos>", "\udc80")


@pytest.mark.parametrize("kind", ["bpe", "bpe as written", "whitespace", "punctuation", "sentences"])
def test_a_text_encoded_in_parts_has_the_same_tokens(kind, monkeypatch):
    words = ["<eos>", "<unk>", "abc", "The", "!", "\uffed!", "12"]
    vocabulary = {
        "bpe": lambda: BpeVocabulary.train(["The abc's 12 abc! The\n\n12" * 9], 300, normalise=True),
        "bpe as written": lambda: BpeVocabulary.train(["The\tabc\r\n12\r\n"] * 9, 300),
        "whitespace": lambda: WordVocabulary(words),
        "punctuation": lambda: WordVocabulary(words, rule="punctuation", normalise=True),
        "sentences": lambda: WordVocabulary(words, boundary="both"),
    }[kind]()
    chance = random.Random(1)
    for _ in range(2000):
        text = "".join(chance.choices(PARTS[: None if kind.startswith("bpe") else -1], k=chance.randrange(14)))
        whole = vocabulary.encode(text).tolist()
        with monkeypatch.context() as changed:
            changed.setattr("txl.data.vocabulary._AT_ONCE", chance.randrange(1, 6))
            changed.setattr("txl.data.bpe._LONG", 3)
            assert vocabulary.encode(text).tolist() == whole, repr(text)


def test_long_texts_are_encoded_by_bpe_outside_of_the_interpreter_s_lock():
    vocabulary = BpeVocabulary.train(["The river rose in the night. " * 9], 300)
    text = "The river rose. " * 20_000
    expected = vocabulary.tokenizer.encode(text).ids
    batches = []

    class Spy:
        def encode(self, text):
            pytest.fail("`Tokenizer.encode` keeps all other threads waiting")

        def encode_batch_fast(self, texts):
            batches.extend(texts)
            return tokenizer.encode_batch_fast(texts)

    tokenizer: Any = vocabulary.tokenizer
    cast(Any, vocabulary).tokenizer = Spy()
    assert vocabulary.encode(text).tolist() == expected
    assert max(map(len, batches)) < 70_000
    assert "".join(batches) == text


def test_bpe_of_other_borders_is_not_cut():
    plain = BpeVocabulary.train(["The river rose."], 257)
    assert plain.border is not None
    for changes in ({"add_prefix_space": True}, {"use_regex": False}):
        tokenizer = Tokenizer.from_str(plain.tokenizer.to_str())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False} | changes)
        assert BpeVocabulary(tokenizer).border is None
