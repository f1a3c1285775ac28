"""Generated text next to the reference: measures against counts by hand or a slow search, and `txl samples`."""

from __future__ import annotations

import json
import shutil
from html import unescape

import numpy as np
import pytest
from tests.conftest import small_run

import txl
from txl.analysis import copies as copying
from txl.analysis.copies import copies
from txl.analysis.mentions import Shared, mentions, shared_mentions
from txl.analysis.samples import draw_contexts, repeated_ngrams
from txl.cli import main
from txl.data.bpe import BpeVocabulary
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.detokenise import detokenise
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError


def test_repetition_by_hand():
    words = "the mill and the mill and the river".split()
    assert repeated_ngrams(words, 1) == (4, 8)
    assert repeated_ngrams(words, 2) == (3, 7)  # the mill, mill and, and the
    assert repeated_ngrams(words, 4) == (1, 5)  # the mill and the
    assert repeated_ngrams(words, 9) == (0, 0)
    assert repeated_ngrams([], 2) == (0, 0)


def longest_match(text: np.ndarray, position: int, training: np.ndarray) -> int:
    best = 0
    for start in range(len(training)):
        n = 0
        while position + n < len(text) and start + n < len(training) and text[position + n] == training[start + n]:
            n += 1
        best = max(best, n)
    return best


@pytest.mark.parametrize("block", [7, 53, 1 << 20])
def test_copies_are_those_of_a_slow_search_whatever_the_blocks(monkeypatch, block):
    monkeypatch.setattr(copying, "BLOCK", block)
    rng = np.random.default_rng(3)
    training = rng.integers(0, 4, 307).astype(np.uint16)
    texts = [rng.integers(0, 5, 41), training[90:131], rng.integers(0, 4, 3), training[-5:]]
    texts += [np.array([9]), np.array([])]
    for text, found in zip(texts, copies([list(map(int, text)) for text in texts], training), strict=True):
        assert found.lengths.tolist() == [longest_match(text, at, training) for at in range(len(text))]
        for position, (length, source) in enumerate(zip(found.lengths, found.sources, strict=True)):
            assert (source == -1) == (length == 0)
            assert (training[source : source + length] == text[position : position + length]).all()


def test_copies_through_the_sieve(monkeypatch):
    """Blocks above a certain size are sieved before the search, which does not change the result."""
    rng = np.random.default_rng(5)
    training = rng.integers(0, 60, 400_000).astype(np.uint8)
    text = np.concatenate([training[1000:1030], rng.integers(0, 60, 200), training[399_980:]])
    sieved = copies([text.tolist()], training)[0]
    monkeypatch.setattr(copying, "BLOCK", 10_000)
    plain = copies([text.tolist()], training)[0]
    assert (sieved.lengths == plain.lengths).all()
    assert (sieved.sources == plain.sources).all()
    assert sieved.longest == (0, 30)
    assert sieved.lengths[-20] == 20


def test_novel_ngrams_and_the_longest_copy_by_hand():
    found = copies([[1, 2, 3, 9, 2, 3]], np.array([5, 2, 3, 4, 1, 2]))[0]
    assert found.lengths.tolist() == [2, 2, 1, 0, 2, 1]
    assert found.longest == (0, 2)
    assert found.novel_ngrams(1) == (1, 6)
    assert found.novel_ngrams(2) == (2, 5)  # 3 9, 9 2
    assert found.novel_ngrams(3) == (4, 4)
    assert found.novel_ngrams(7) == (0, 0)
    assert copies([], np.array([1])) == []
    assert copies([[1, 2]], np.zeros(0, dtype=np.uint8))[0].longest == (0, 0)


STORY = """= The Tale of Mrs. Tittlemouse =

== Plot summary ==

In May 2008, Robert Boulter met J. K. Rowling ("Royal Court", New York City, 1984 – 1990s). It cost $1984, 1,984 or
1984.5. The Clayton Kershaw's record stood. He saw Du Fu's house, and Paris."""


def test_mentions_by_hand():
    found = mentions(STORY)
    assert found["headings"] == {"The Tale of Mrs. Tittlemouse", "Plot summary"}
    assert found["years"] == {"2008", "1984", "1990"}
    names = {"Mrs. Tittlemouse", "Robert Boulter", "J. K. Rowling", "Royal Court", "New York City"}
    assert found["names"] == names | {"Clayton Kershaw", "Du Fu"}
    titles = mentions("==History==\nx = y\n = Life = \n= <unk> =\n==\n=== A = b ===\n== C =")["headings"]
    assert titles == {"History", "Life", "A = b"}
    assert found["dates"] == {(None, 5, 2008)}
    assert mentions("all lower case, $N N N of N") == mentions("")


@pytest.mark.parametrize(
    ("text", "dates"),
    [
        ("On 12 July 1916 it rained.", {(12, 7, 1916)}),
        ("On July 12, 1916, it rained.", {(12, 7, 1916)}),
        ("On July 12 , 1916 , it rained .", {(12, 7, 1916)}),  # WikiText before detokenising
        ("the 1st of May, 2001; July 12th", {(1, 5, 2001), (12, 7, None)}),
        ("in mid @-@ July 1916 , or August , 1917", {(None, 7, 1916), (None, 8, 1917)}),
        ("mid-July 1916, late 5 June – 3 July 1916", {(None, 7, 1916), (5, 6, None), (3, 7, 1916)}),
        ("[[July 12]], [[1916]] and [[3 May]] [[1917]]", {(12, 7, 1916), (3, 5, 1917)}),
        ("Sept. 9, 2008; Sep. 10; Oct. 2009; Mar. 4", {(9, 9, 2008), (10, 9, None), (None, 10, 2009), (4, 3, None)}),
        ("31 December 1999 and 32 December 999", {(31, 12, 1999)}),
        ("March 10,000 men; March 10 @,@ 000 men; May 4.5 kg; June 99; Marching 5; $ 5; In July we may 5", set()),
        ("July 1916 12 August", {(None, 7, 1916), (12, 8, None)}),
        ("12 July\n1916", {(12, 7, None)}),
        ("4 February 29 @,@ 000", {(4, 2, None)}),
    ],
)
def test_dates_by_hand(text, dates):
    assert mentions(text)["dates"] == dates


def test_dates_are_found_before_and_after_detokenising():
    raw = "On 12 July 1916 , and again on March 3 , 1917 , he came ; in mid @-@ May 1918 , 1 @,@ 200 left ."
    for text in (raw, detokenise(raw, "wikitext")):
        assert mentions(text)["dates"] == {(12, 7, 1916), (3, 3, 1917), (None, 5, 1918)}


def test_dates_that_are_taken_up_by_hand():
    before = "Born on 12 July 1916, she left in May 1934, and died on March 3, 1990, or 4 March."
    after = "On July 12, 1916, and in May 1934; on 3 March 1990, May 1, 1935 and in March 1990."
    assert shared_mentions(before, after)["dates"] == Shared(in_context=4, in_continuation=5, taken_up=3, known=4)
    part = shared_mentions("In July 1916 it began.", "On 12 July 1916 it did.")["dates"]
    assert (part.taken_up, part.known) == (1, 0)  # the day is new


def test_what_is_taken_up_by_hand():
    after = "== Plot summary ==\n\nRobert Boulter and Ada Byron came in 1984 and 2011; Du Fungus did not."
    assert shared_mentions(STORY, after) == {
        "headings": Shared(in_context=2, in_continuation=1, taken_up=1, known=1),
        "names": Shared(in_context=7, in_continuation=3, taken_up=1, known=1),
        "dates": Shared(in_context=1, in_continuation=0, taken_up=0, known=0),
        "years": Shared(in_context=3, in_continuation=2, taken_up=1, known=1),
    }


def test_contexts_begin_lines_and_do_not_overlap():
    text = "".join(f"line {number} of the text\n" for number in range(300))
    pairs = BpeVocabulary.train([text], 300)
    tokens = pairs.encode(text)
    starts = draw_contexts(tokens, pairs, count=4, length=20, seed=1)
    assert all(pairs.decode(tokens[start : start + 8]).startswith("line") for start in starts)
    vocabulary = CharVocabulary("ab\n")
    tokens = vocabulary.encode("aab\n\nabab\nb\naaaaa\nabba\n" * 9)
    drawn = draw_contexts(tokens, vocabulary, count=5, length=20, seed=4)
    assert drawn == draw_contexts(tokens, vocabulary, count=5, length=20, seed=4)
    assert drawn != draw_contexts(tokens, vocabulary, count=5, length=20, seed=5)
    assert (np.diff(drawn) >= 20).all()
    text = vocabulary.decode(tokens)
    assert all((start == 0 or text[start - 1] == "\n") and text[start] != "\n" for start in drawn)
    assert max(drawn) + 20 <= len(text)
    # Too many contexts for the text overlap, but none is drawn twice.
    assert len(set(draw_contexts(tokens, vocabulary, count=30, length=20, seed=4))) == 30


def test_contexts_of_a_text_without_lines_begin_anywhere():
    tokens = np.zeros(50, dtype=np.uint8)
    assert draw_contexts(tokens, ByteVocabulary(), count=1, length=50, seed=1) == [0]
    assert sorted(draw_contexts(tokens, ByteVocabulary(), count=11, length=40, seed=1)) == list(range(11))
    with pytest.raises(UserError, match="51 tokens, but the token stream split has only 50"):
        draw_contexts(tokens, ByteVocabulary(), count=1, length=51, seed=1)
    with pytest.raises(UserError, match="lower count"):
        draw_contexts(tokens, ByteVocabulary(), count=12, length=40, seed=1)


@pytest.fixture(scope="module")
def word_run(tmp_path_factory, data_dir):
    """A run trained on a made-up text in the format of WikiText."""
    from txl.training.trainer import Trainer

    folder = tmp_path_factory.mktemp("words")
    page = ' = Du Fu = \n \n Du Fu ( 712 @-@ 770 ) was a " poet " . \n He was Li Bai \'s friend in 1984 , & <b> . \n '
    (folder / "text.txt").write_text(page * 60, encoding="utf-8")
    run = small_run(str(folder / "text.txt"), **{"data.unit": "word", "train.batch_size": "2"})
    Trainer(run, folder / "run", data_dir=data_dir, quiet=True).fit()
    return folder / "run"


SHORT = ["--count", "2", "--context", "20", "--max-tokens", "15"]


def test_the_command_writes_the_same_three_files_for_the_same_seed(word_run, data_dir, tmp_path, capsys):
    words = ["samples", str(word_run), "--data-dir", str(data_dir), *SHORT]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measures"]["reference"]["longest_copy"] == 15
    for name in ("samples.html", "samples.md", "samples.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    record = json.loads((tmp_path / "a" / "samples.json").read_text())
    assert record["detokenise"] == "wikitext"
    html = (tmp_path / "a" / "samples.html").read_text()
    markdown = (tmp_path / "a" / "samples.md").read_text()
    corpus = txl.open_corpus(str(word_run.parent / "text.txt"), unit="word", data_dir=data_dir)
    tokens = corpus.tokens("test")
    model, vocabulary = txl.load(word_run)
    assert isinstance(vocabulary, WordVocabulary)
    for sample in record["samples"]:
        start, reference = sample["position"], sample["reference"]
        assert sample["context"]["tokens"] == list(map(int, tokens[start : start + 20]))
        assert reference["tokens"] == list(map(int, tokens[start + 20 : start + 35]))
        # The generation is what `txl.generate` returns for the context.
        prompt = vocabulary.decode(sample["context"]["tokens"])
        alone = txl.generate(model, vocabulary, prompt, max_tokens=15, seed=sample["seed"], mem_len=16, window=16)
        assert "".join(alone).split() == [
            vocabulary.decode([token]).strip() for token in sample["generation"]["tokens"]
        ]
        assert sample["context"]["text"].strip() in unescape(html)
        assert reference["text"].strip() in markdown
        # The text repeats itself, so the training text contains every continuation.
        assert reference["measures"]["longest_copy"] == [0, 15]
        assert reference["measures"]["novel"]["8"] == [0, 8]
    for absent in (" @-@ ", "://", "<script", "& <b>"):
        assert absent not in html


def test_bytes_are_shown_as_they_are(trained, data_dir, tmp_path, capsys):
    words = ["samples", str(trained), "--data-dir", str(data_dir), *SHORT, "--out", str(tmp_path)]
    assert main(words) == 0, capsys.readouterr().err
    record = json.loads((tmp_path / "samples.json").read_text())
    assert (record["unit"], record["detokenise"]) == ("byte", None)
    assert set(record["measures"]["generation"]["novel"]) == {"5", "10", "20", "30", "40"}
    assert record["measures"]["generation"]["novel"]["20"] == {"share": None, "count": 0, "of": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "100000"], "the test split has only"),
        (["--split", "dev"], "no split 'dev'"),
        (["--count", "0"], "--count: "),
        (["--seed", "-1"], "--seed is -1"),
        (["--checkpoint", "7"], "checkpoint is 7, but "),
        (["--temperature", "-1"], "temperature is -1"),
        (["--detokenise", "ptb"], "this model reads byte tokens"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(trained, data_dir, tmp_path, capsys, options, message):
    out = tmp_path / "out"
    assert main(["samples", str(trained), "--data-dir", str(data_dir), "--out", str(out), *options]) == 2
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("txl: error: ")
    assert message in error
    assert not out.exists()


def test_a_run_without_a_checkpoint_or_a_folder_in_the_way(trained, data_dir, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (tmp_path / "file").write_text("")
    assert main(["samples", str(run), "--data-dir", str(data_dir), "--out", str(tmp_path / "file")]) == 2
    shutil.rmtree(run / "checkpoints")
    assert main(["samples", str(run), "--data-dir", str(data_dir)]) == 2
    first, second = capsys.readouterr().err.strip().split("\n")[-2:]
    assert "expected a folder" in first
    assert "no checkpoint" in second


def test_generate_detokenises(word_run, capsys):
    words = ["generate", str(word_run), "--prompt", 'Du Fu ( 712 @-@ 770 ) was a "', "--max-tokens", "5", "--seed", "1"]
    assert main([*words, "--json", "--detokenise"]) == 0, capsys.readouterr().err
    made = json.loads(capsys.readouterr().out)
    assert made["prompt"] == 'Du Fu (712-770) was a "'
    assert not made["samples"][0].startswith(" ")
    assert main([*words, "--detokenise", "wikitext"]) == 0
    assert capsys.readouterr().out == made["prompt"] + made["samples"][0] + "\n"
