"""Words and punctuation marks: cuts of a text, decoding to the same text, and equal cuts by exported tokenizers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import txl
from txl.config import DataConfig
from txl.data.detokenise import convention_of, text_decoder
from txl.data.word_vocabulary import WordVocabulary
from txl.data.words import EOS, JOINER, UNK, holds_word, word_spans, words_and_ends
from txl.errors import UserError
from txl.interop.export_run import tokenizer_files

RULES = ("whitespace", "punctuation")
PIECES = [*"ab1é_ \t\n,.-'\"($“😀<>", " ", "हि", JOINER, EOS, UNK]
TEXT = st.lists(st.sampled_from(PIECES), max_size=20).map("".join)


@given(
    text=st.lists(st.sampled_from(["<u>", "<u", ">", "a", " ", "\n"]), max_size=8).map("".join), size=st.integers(1, 9)
)
@example(text="a<u> a", size=4)
@example(text="a <u>a", size=5)
@example(text="<u>", size=9)
def test_a_word_that_stands_alone_is_found_wherever_blocks_end(text, size):
    content = text.encode()
    blocks = [content[start : start + size] for start in range(0, len(content), size)]
    assert holds_word(blocks, "<u>") == ("<u>" in text.split())


def cut(text: str) -> list[str]:
    return words_and_ends(text, rule="punctuation")


def vocabulary_of(*texts: str) -> WordVocabulary:
    words = dict.fromkeys(word for text in texts for word in cut(text))
    return WordVocabulary([EOS, UNK, *(word for word in words if word not in (EOS, UNK))], rule="punctuation")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Isbell, and", "Isbell ￭, and"),
        ('"Well-known," he said.', '"￭ Well ￭-￭ known ￭, ￭" he said ￭.'),
        ("don't ... (3.14) f_oo", "don ￭'￭ t . ￭. ￭. (￭ 3 ￭.￭ 14 ￭) f_oo"),
        ("a , b", "a , b"),
        ("हिन्दी।", "हिन्दी ￭।"),
        ("the <unk>, <unk> x<unk>", "the <unk> ￭, <unk> x ￭<￭ unk ￭>"),
        ("end.\n\n", "end ￭. <eos> <eos>"),
    ],
)
def test_marks_are_words_of_their_own_by_hand(text, words):
    assert cut(text) == words.split()
    assert words_and_ends(text) == text.replace("\n", " <eos> ").split()


@given(text=TEXT)
@example(text=f"{JOINER}, a{JOINER}b ,{JOINER} {JOINER}{JOINER}")
def test_a_text_comes_back_but_for_the_width_of_its_white_space(text):
    vocabulary = vocabulary_of(text)
    lines = (" ".join(line.split()) for line in text.split("\n"))
    if EOS not in text:  # <eos> in the text is decoded as a line end
        assert vocabulary.decode(vocabulary.encode(text)) == "\n".join(lines)


@pytest.mark.parametrize("rule", RULES)
@given(text=TEXT)
def test_spans_are_those_of_the_words(rule, text):
    words = words_and_ends(text, rule=rule)
    spans = word_spans(text, rule)
    assert len(spans) == len(words)
    for word, (start, end) in zip(words, spans, strict=True):
        found = text[start:end]
        assert found == word or (found == "\n" and word == EOS) or (rule == "punctuation" and found in word)


@settings(max_examples=25, deadline=None)  # tokenizers compiles regular expressions for each example
@given(text=TEXT, known=TEXT)
def test_the_exported_tokenizer_cuts_alike(text, known):
    vocabulary = vocabulary_of(known, "a, b")
    tokenizer = Tokenizer.from_str(tokenizer_files(vocabulary)["tokenizer.json"])
    assert tokenizer.encode(text).ids == vocabulary.encode(text).tolist()


def test_the_exported_tokenizer_puts_words_together_too():
    text = '"Well-known," he (or she) said... 3.14!'
    vocabulary = vocabulary_of(text)
    tokenizer = Tokenizer.from_str(tokenizer_files(vocabulary)["tokenizer.json"])
    assert tokenizer.decode(vocabulary.encode(text).tolist()) == text


def test_what_is_generated_joins_the_prompt_and_needs_no_detokenising():
    vocabulary = vocabulary_of("the mill, (the mill)")
    decoder = vocabulary.decoder("the mill")
    ids = vocabulary.encode("x, (the mill)")[1:]
    assert "".join(decoder.push(int(token)) for token in ids) == ", (the mill)"
    assert convention_of(vocabulary) is None
    with pytest.raises(UserError, match="detokenise is wikitext, but this vocabulary already marks"):
        text_decoder(vocabulary, "wikitext")
    with pytest.raises(UserError, match="rule punctuation has <eos> and <unk>, not <S> and <unk>"):
        WordVocabulary(["<S>", "<unk>"], eos="<S>", rule="punctuation")


@pytest.fixture
def own(tmp_path):
    """A folder with three splits: `rare,` and `once` occur once in `train`, `new` never."""
    texts = {
        "train": "the mill, the mill, rare, once\n" + "the mill\n" * 3,
        "valid": "the mill\n",
        "test": "new mill\n",
    }
    for split, text in texts.items():
        (tmp_path / f"{split}.txt").write_text(text)
    return tmp_path


def words_of(corpus) -> WordVocabulary:
    assert isinstance(corpus.vocabulary, WordVocabulary)
    return corpus.vocabulary


def open_words(folder, **config):
    return txl.open_corpus(
        str(folder), "word", config=DataConfig(**config), data_dir=folder.with_name("data"), quiet=True
    )


def test_own_text_has_marks_apart_and_an_unknown_that_is_trained(own):
    corpus = open_words(own)
    assert words_of(corpus).words == ["<eos>", "the", "mill", JOINER + ",", "<unk>"]
    assert words_of(corpus).rule == "punctuation"
    assert {split: record["unknown"] for split, record in corpus.info()["splits"].items()} == {
        "train": 2, "valid": 0, "test": 1,
    }  # fmt: skip
    (note,) = corpus.notes("test", corpus.unknown_share("train"))
    assert note.startswith("1 of 3 words of the test split (33.3%) are <unk> (in training 10.5%): they count as one")
    assert corpus.notes("valid") == []


def test_own_text_can_be_read_as_before(own):
    corpus = open_words(own, word_rule="whitespace", min_count=1, normalise=False)
    assert words_of(corpus).words == ["<eos>", "the", "mill", "mill,", "rare,", "once", "<unk>"]
    assert words_of(corpus).to_json() == {"format": 1, "kind": "word", "words": words_of(corpus).words}
    (note,) = corpus.notes("test", corpus.unknown_share("train"))
    assert "which training never saw" in note
    assert "noise" in note
    assert "data.min_count 2" in note


def test_text_with_unknown_words_was_cut_before_and_is_left_so(own, capsys):
    (own / "train.txt").write_text("the mill , the <unk> @-@ once\n" * 2 + "twice\n")
    corpus = open_words(own)
    assert words_of(corpus).words == ["<eos>", "the", "mill", ",", "<unk>", "@-@", "once", "twice"]
    assert capsys.readouterr().err == ""
    txl.open_corpus(str(own), "word", data_dir=own.with_name("loud"))
    assert "is already cut into words" in capsys.readouterr().err
    apart = open_words(own, word_rule="punctuation", min_count=3)
    assert words_of(apart).words[:3] == ["<eos>", "<unk>", "the"]
    assert words_of(apart).rule == "punctuation"
    (own / "train.txt").write_text("the mill , twelve @-@ year @-@ old mill\n")
    assert open_words(own).vocabulary == WordVocabulary(
        ["<eos>", "<unk>", "mill", "@-@"], normalise=True
    )  # the text has no <unk>, so rare words become <unk>


def test_words_cut_by_blocks_are_the_same(own, monkeypatch):
    whole = np.asarray(open_words(own).tokens("train")).tolist()
    monkeypatch.setattr("txl.data.pieces.BLOCK", 3)
    again = txl.open_corpus(str(own), "word", data_dir=own.with_name("blocks"), quiet=True)
    assert np.asarray(again.tokens("train")).tolist() == whole
