"""Detokenisation of examples written by hand, and of real text whose tokenisation is known."""

from __future__ import annotations

import re

import pytest

from txl.data.characters import ByteVocabulary
from txl.data.detokenise import Convention, convention_of, detokenise, text_decoder
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError

CASES: dict[Convention, list[tuple[str, str]]] = {
    "wikitext": [
        (" He had a guest @-@ starring role . ", "He had a guest-starring role."),
        ("It cost $ 20 @,@ 000 @.@ 50 , or 3 @.@ 5 % .", "It cost $20,000.50, or 3.5%."),
        ("US $ 3 million and £ 7", "US$3 million and £7"),
        (" = Robert Boulter = ", "= Robert Boulter ="),
        (" = = Career ( 2000 – 2005 ) = = ", "== Career (2000 – 2005) =="),
        (" = = = Influence on Du Fu 's work = = = ", "=== Influence on Du Fu's work ==="),
        ('as " Craig " in " Teddy \'s Story " ;', 'as "Craig" in "Teddy\'s Story";'),
        ('( " Chinese poetry " ) .', '("Chinese poetry").'),
        ('the Beach Boys \' " Surfer Girl "', 'the Beach Boys\' "Surfer Girl"'),
        ("he said ' yes ' and didn 't go", "he said 'yes' and didn't go"),
        ("<unk> 's <unk> 've", "<unk>'s <unk>'ve"),
        ("' Heroes ' 's end ( UK ) 's \" It \" 's", "'Heroes''s end (UK)'s \"It\"'s"),
        ("women ’ s work", "women’s work"),
        ("95 km / h at 10 : 30 , 5 ° C , [ 3 ]", "95 km/h at 10:30, 5°C, [3]"),
        ("chapter 2 : 15 men ; No. # 1 !", "chapter 2:15 men; No. #1!"),  # two digits are taken for minutes
        ("x = y", "x = y"),
        ("", ""),
    ],
    "ptb": [
        (" no it was n't black monday ", "no it wasn't black monday"),
        (
            "ca n't wo n't we 're they 'll i 'm he 'd you 've the company 's",
            "can't won't we're they'll i'm he'd you've the company's",
        ),
        ("standard & poor 's N traders ' profits", "standard & poor's N traders' profits"),
        ("plunged $ N to c$ N", "plunged $N to c$N"),
        (r"capital cities\/abc", "capital cities/abc"),
        ("get 'em", "get 'em"),
        ("<unk> corp. 's portfolio", "<unk> corp.'s portfolio"),
    ],
    "lm1b": [
        ('" But make no mistake : we will , " he said .', '"But make no mistake: we will," he said.'),
        ("BAGHDAD -- An Iraqi ( AP ) - more ...", "BAGHDAD -- An Iraqi (AP) - more..."),
        ("I 'm not , and Terry O 'Neill can 't", "I'm not, and Terry O'Neill can't"),
        ("a $ 5 bill and and / or", "a $5 bill and and/or"),
        ("one @-@ two", "one @-@ two"),
    ],
}


@pytest.mark.parametrize("convention", CASES)
def test_examples_by_hand(convention):
    for tokenised, expected in CASES[convention]:
        assert detokenise(tokenised, convention) == expected


def test_lines_stay_and_quotation_marks_begin_anew_with_each():
    assert detokenise('he said " no\n\n" yes " he said') == 'he said "no\n\n"yes" he said'


REAL: list[tuple[str, Convention]] = [
    ("wikitext-2/test.txt", "wikitext"),
    ("wikitext-103/test.txt", "wikitext"),
    ("ptb/ptb.test.txt", "ptb"),
    ("lm1b/1b_benchmark.test.tokens", "lm1b"),
]


@pytest.mark.parametrize(("name", "convention"), REAL)
def test_only_spaces_go_from_real_text(test_data, name, convention):
    text = (test_data / name).read_text(encoding="utf-8")
    written = detokenise(text, convention)
    assert written.count("\n") == text.count("\n")
    assert len(written) < 0.99 * len(text)
    if convention == "wikitext":
        text = re.sub(r" @([-,.])@ ", r"\1", text)
    if convention == "ptb":
        text = text.replace("\\/", "/").replace("\\*", "*")
    for before, after in zip(text.split("\n"), written.split("\n"), strict=True):
        assert "".join(before.split()) == "".join(after.split())


def vocabulary(*words: str) -> WordVocabulary:
    return WordVocabulary(["<eos>", "<unk>", *words])


def test_the_vocabulary_tells_the_convention():
    assert convention_of(vocabulary("@-@", ",", "the")) == "wikitext"
    assert convention_of(vocabulary("n't", "the", "'s")) == "ptb"
    assert convention_of(vocabulary(",", ".", "'s", "the")) == "lm1b"
    assert convention_of(vocabulary(",", ".", "'s", "the", "and,", "or,")) is None
    assert convention_of(vocabulary("the", "mill.")) is None
    assert convention_of(ByteVocabulary()) is None
    assert convention_of(None) is None


def test_the_decoder_gives_token_by_token_what_the_whole_text_is():
    text = ' = A = \nThe " old @-@ new " mill ( 3 @.@ 5 ) \'s " end'
    words = vocabulary(*dict.fromkeys(text.split()))
    ids = words.encode(text).tolist()
    whole = detokenise(text)
    for cut in range(len(ids)):
        before = words.decode(ids[:cut])
        decoder = text_decoder(words, "wikitext", after=before)
        assert detokenise(before) + "".join(decoder.push(token) for token in ids[cut:]) == whole


def test_what_cannot_be_detokenised_is_refused():
    with pytest.raises(UserError, match="expected one of wikitext, ptb, lm1b"):
        detokenise("a", "moses")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="only words"):
        text_decoder(ByteVocabulary(), "ptb")
