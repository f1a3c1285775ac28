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


NFD = unicodedata.normalize("NFD", "é")


@pytest.mark.parametrize(
    ("vocabulary", "text", "expected"),
    [
        (words("the", "game", "."), "the game. zebra", ["1 of the 2 words that the vocabulary lacks, such as game., are"]),
        (words("the", "game.", "game", "mill,", "Mill"), "game, The mill.", []),  # a text with its marks attached
        (words("the", rule="punctuation"), "zebra The", ["such as The, are known in lower case"]),
        (words("café"), f"caf{NFD}", [f"such as caf{NFD}, are written with accents apart"]),
        (words(f"caf{NFD}"), "café", ["convert the text to NFD"]),
        (words("the", "mill"), "zebra quagga", []),
        (CharVocabulary("abcé"), f"A{NFD}ß", ["known in lower case", "(NFD): convert the text to NFC"]),
        (seen("abcé"), f"ab{NFD}", ["2 characters of the text never", "(NFD): convert the text to NFC"]),
        (seen("abc"), "AB", ["2 characters of the text never", "2 of the 2 characters that training never saw, such as"]),
        (seen("abC"), "AB", ["2 characters of the text never occurred in the training text ('A' (U+0041), 'B' (U+0042))"]),
        (seen("ab"), "\xff", ["1 character of the text never occurred in the training text ('ÿ' (U+00FF))"]),
        (seen("abc"), "abc", []),
        (ByteVocabulary(), "’", []),
    ],
)  # fmt: skip
def test_the_cause_is_named(vocabulary, text, expected):
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
    for value in "aé🦆🦆".encode() + b"\xff":
        tally.read(bytes([value]), unknown=False)
    tally.read(b"x", unknown=False)  # completes the byte that is no character
    assert (tally.total, tally.names()) == (4, "'🦆' (U+1F986), byte 0xFF, 'x' (U+0078)")


def test_a_line_end_of_two_characters_is_one_unknown_character():
    tally = Lacking(CharVocabulary("ab", normalise=True))
    tally.read(b"\r\n", unknown=True)
    assert (tally.names(), tally.notes("it")) == ("'\\n' (U+000A)", [])


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
    assert main(["score", str(out), str(text)]) == 0
    assert (
        "note: 160 characters of the text never occurred in the training text ('—' (U+2014)," in capsys.readouterr().err
    )
    assert main(["score", str(out), str(part)]) == 0
    assert "note" not in capsys.readouterr().err
    words = ["eval", str(out), "--data.corpus", str(text), "--split", "all", "--data-dir", str(data_dir)]
    assert main(words) == 0
    told = capsys.readouterr().err
    assert "160 characters of the all split never occurred in the training text ('Ω' (U+03A9), '—' (U+2014)" in told
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
