"""Notes on what a text has that a vocabulary or its training text lacks: the true cause, and nothing without one."""

from __future__ import annotations

import json
import unicodedata

import pytest
from tests.conftest import small_run

import txl
from txl.cli import main
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.lacking import Lacking
from txl.data.vocabularies import load_vocabulary, vocabulary_from_json
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.interop.import_run import import_run
from txl.training.trainer import Trainer


def notes(vocabulary: Vocabulary, text: str) -> list[str]:
    tally = Lacking(vocabulary)
    for symbol in vocabulary.lacking(text):
        tally.add(symbol)
    tally.read(text.encode(), unknown=False)
    return tally.notes("the text")


def words(*names: str, **settings) -> WordVocabulary:
    return WordVocabulary(["<eos>", "<unk>", *names], **settings)


def seen(text: str) -> ByteVocabulary:
    vocabulary = ByteVocabulary()
    vocabulary.seen = frozenset(map(ord, text))
    return vocabulary


ENGLISH = "the game of a thousand and well known did 1 000 , . ( )".split()
NFD = unicodedata.normalize("NFD", "é")


@pytest.mark.parametrize(
    ("vocabulary", "text", "expected"),
    [
        (
            words(*ENGLISH, "@-@", "'t", "didn", "Hello"),
            "Hello, (game) game. 1,000 well-known didn't zebra",
            ["6 of the 7 words that the vocabulary lacks are known without the punctuation that touches them, such as "
             "Hello,: the training text is tokenised (`game .`, `1 @,@ 000`, `well @-@ known`, `didn 't`); tokenise this "
             "text in the same way"],
        ),
        (
            words(*"the company 's n't did fall N analysts said".split(), *map(str, range(200))),
            "The company's shares didn't fall 3.5%, analysts said.",
            ["4 of the 6 words that the vocabulary lacks are known without the punctuation", "1 of the 6 words that the "
             "vocabulary lacks are known in lower case, such as The: the training text is in lower case"],
        ),
        (words(*ENGLISH, "'s", lower=True), "The GAME.", ["such as game.: the training text is tokenised (`game .`, `did"]),
        (words(*ENGLISH), "the game.", ["such as game.: the training text is tokenised (`game .`); tokenise"]),
        (words("the", "game.", "game", "mill,", "Mill"), "game, The mill.", []),  # a text with its marks attached
        (words(*ENGLISH, rule="punctuation"), "zebra; The", ["are known in lower case, such as The"]),
        (words("café"), f"caf{NFD}", ["accents apart from their letters (NFD), such as cafe\u0301: convert the text to NFC"]),
        (words(f"caf{NFD}"), "café", ["accents in one with their letters (NFC), such as café: convert the text to NFD"]),
        (words("我们"), "今天我们去看了一场很好的电影", ["1 of the 1 words that the vocabulary lacks are long, such as 今天我们"]),
        (words("我", "们"), "今天我们去看了一场很好的电影", ["put spaces between them, as in the training text"]),
        (words(), "ACGT" * 8, ["for a text without spaces between words, use the unit char or bpe"]),
        (words("the", "mill"), "zebra quagga", []),
        (words("the", '￭"', rule="punctuation"), 'the “', ['other characters of the same kind: " for “']),
        (words("the", '￭"', rule="punctuation"), '"the', []),  # a mark that is known on the other side of a word
        (CharVocabulary("abcé"), f"A{NFD}ß", ["known in lower case, such as A", "(NFD): convert the text to NFC"]),
        (
            seen("abc'-\n"),
            "a’b — “c”",
            ["6 characters of the text never occurred in the training text ('’' (U+2019), ' ' (U+0020), '—' (U+2014), "
             "'“' (U+201C), '”' (U+201D)): the model's probabilities there are noise; replace them, or train",
             "the training text has other characters of the same kind: ' for ’, - for —"],
        ),
        (seen("abcé"), f"ab{NFD}", ["2 characters of the text never", "(NFD): convert the text to NFC"]),
        (seen("abc"), "AB", ["2 characters of the text never", "2 of the 2 characters that training never saw are known in "
                             "lower case"]),
        (seen("abC"), "AB", ["2 characters of the text never occurred in the training text ('A' (U+0041), 'B' (U+0042))"]),
        (seen("abc"), "abc", []),
        (ByteVocabulary(), "’", []),
    ],
)  # fmt: skip
def test_the_cause_is_named_and_what_to_do(vocabulary, text, expected):
    found = notes(vocabulary, text)
    assert len(found) == len(expected)
    for note, part in zip(found, expected, strict=True):
        assert part in note


def test_characters_of_a_text_are_counted_across_blocks_and_tokens(tmp_path):
    path = tmp_path / "text.txt"
    text = "aé🦆" * 400_000
    path.write_bytes(text.encode() + b"\xff")
    corpus = txl.open_corpus(str(path), "byte", data_dir=tmp_path / "data", whole=True, quiet=True)
    assert corpus.symbols("all") == {ord("a"): 400_000, ord("é"): 400_000, ord("🦆"): 400_000, 0xDCFF: 1}
    tally = Lacking(seen("aé"))
    for value in "aé🦆🦆".encode():
        tally.read(bytes([value]), unknown=False)
    assert (tally.total, tally.names()) == (2, "'🦆' (U+1F986)")
    assert tally.notes("it")[0].startswith("2 characters of it never occurred")


def test_a_line_end_of_two_characters_is_one_unknown_character():
    tally = Lacking(CharVocabulary("ab", normalise=True))
    tally.read(b"\r\n", unknown=True)
    assert (tally.names(), tally.notes("it")) == ("'\\n' (U+000A)", [])


def test_a_byte_that_is_no_character_is_named_as_a_byte():
    tally = Lacking(seen("ab"))
    tally.read(b"\xff", unknown=False)
    assert "never occurred in the training text (byte 0xFF)" in tally.notes("it")[0]


CURLY = "They could — “really”. Ω\n"


@pytest.mark.parametrize("unit", ["byte", "bpe"])
def test_a_run_tells_what_its_training_text_never_had(unit, story, data_dir, tmp_path, capsys):
    plain, text, out = tmp_path / "plain.txt", tmp_path / "curly.txt", tmp_path / "run"
    plain.write_text(story.read_text().replace("“", '"').replace("”", '"').replace("—", "-"))
    text.write_text(CURLY * 40)
    part = tmp_path / "part.txt"
    part.write_text(plain.read_text()[:500])
    options = {"data.unit": unit, "train.steps": "2", **({"data.vocab_size": "280"} if unit == "bpe" else {})}
    Trainer(small_run(str(plain), **options), out, data_dir=data_dir, quiet=True).fit()
    vocabulary = txl.load(out)[1]
    assert vocabulary is not None
    assert vocabulary.unseen(CURLY) == ["—", "“", "”", "Ω"]
    assert vocabulary == vocabulary_from_json(vocabulary.to_json())
    expected = (
        "note: 160 characters of the text never occurred in the training text ('—' (U+2014), '“' (U+201C), '”' (U+201D), "
        "'Ω' (U+03A9)): the model's probabilities there are noise; replace them, or train on text that has them\n"
        'note: the training text has other characters of the same kind: - for —, " for “, " for ”\n'
    )
    assert main(["score", str(out), str(text)]) == 0
    assert capsys.readouterr().err.endswith(expected)
    assert main(["score", str(out), str(part)]) == 0
    assert "note" not in capsys.readouterr().err
    words = ["eval", str(out), "--data.corpus", str(text), "--split", "all", "--data-dir", str(data_dir)]
    assert main(words) == 0
    told = capsys.readouterr().err
    assert "160 characters of the all split never occurred in the training text ('Ω' (U+03A9), '—' (U+2014)" in told
    assert told.endswith(expected.splitlines()[-1] + "\n")
    assert main(["generate", str(out), "--prompt", "Ω", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().err.startswith(
        "note: 1 character of the prompt never occurred in the training text ('Ω'"
    )

    # Further training adds its text; an export and its import keep the record.
    tuned = tmp_path / "tuned"
    run = small_run(str(text), **options)
    Trainer(run, tuned, data_dir=data_dir, quiet=True, init_from=out).fit()
    assert main(["export", str(tuned), "--format", "safetensors", "--out", str(tmp_path / "plain")]) == 0
    import_run(tmp_path / "plain", tmp_path / "again")
    for each in (tuned, tmp_path / "again"):
        vocabulary = txl.load(each)[1]
        assert vocabulary is not None
        assert vocabulary.unseen(CURLY + "miller€") == ["€"]
    given = ["--vocabulary", str(tuned / "vocabulary.json")]
    assert main(["import", str(tmp_path / "plain"), "--out", str(tmp_path / "given"), *given]) == 0
    assert "seen" not in json.loads((tmp_path / "given" / "vocabulary.json").read_text())  # of unknown origin

    for seen in (["a"], [-1], [0x110000], 3, {}):
        (tmp_path / "vocabulary.json").write_text(json.dumps(vocabulary.to_json() | {"seen": seen}))
        with pytest.raises(txl.UserError, match="seen is not a list of code points"):
            load_vocabulary(tmp_path / "vocabulary.json")
