"""The paper's corpora: layouts of sources, exact preparation, known counts. Small texts stand in for large ones."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import shutil
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import txl
from txl.config import DataConfig
from txl.data import benchmarks
from txl.data.benchmarks import BENCHMARKS
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.corpora import list_corpora
from txl.data.public import read_words
from txl.data.vocabularies import vocabulary_from_json
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError

TRAIN = "the river rose\n\n the <unk> and the River rose N\n" * 3 + "so it was\n"
VALID = "the river\nfell <unk>\n"
TEST = "it was so\n"


def stand_in(monkeypatch, name: str, **known) -> None:
    """Replace the known numbers and hashes of a public corpus, so that a small text is accepted as this corpus."""
    nothing = {"tokens": {}, "tokens_both": {}, "vocabulary": None, "original_vocabulary": None, "hashes": {}}
    monkeypatch.setitem(BENCHMARKS, name, dataclasses.replace(BENCHMARKS[name], **(nothing | known)))


def write(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def ids(corpus, split: str) -> list[int]:
    return np.asarray(corpus.tokens(split)).tolist()


def words_of(corpus) -> list[str]:
    assert isinstance(corpus.vocabulary, WordVocabulary)
    return corpus.vocabulary.words


def test_every_public_corpus_is_listed_and_says_where_it_comes_from():
    names = [each["name"] for each in list_corpora()]
    assert names == ["stdlib", "enwik8", "text8", "wikitext-103", "wikitext-2", "lm1b", "ptb"]
    for benchmark in BENCHMARKS.values():
        for download in (each for route in benchmark.routes for each in route):
            assert download.url.startswith(("http://", "https://"))
        for known in [each.hash for route in benchmark.routes for each in route] + [*benchmark.hashes.values()]:
            if known is not None:
                algorithm, digest = known.split(":")
                assert len(digest) == hashlib.new(algorithm).digest_size * 2


@pytest.mark.parametrize(
    ("name", "tokens", "size"),
    [("ptb", [929_589, 73_760, 82_430], 10_000), ("wikitext-2", [2_088_628, 217_646, 245_569], 33_278)],
)
def test_real_corpora_have_the_known_counts_and_hashes(name, tokens, size, test_data, data_dir):
    corpus = txl.open_corpus(name, source=test_data / name, data_dir=data_dir, quiet=True)
    assert corpus.unit == "word"
    assert [len(corpus.tokens(split)) for split in corpus.splits] == tokens
    assert len(corpus.vocabulary) == size
    assert corpus.info()["differences"] == []
    assert isinstance(corpus.vocabulary, WordVocabulary)
    counted = Counter((test_data / name).joinpath(benchmark_file(test_data / name, "train")).read_text().split())
    assert corpus.vocabulary.words[1:] == [word for word, _ in counted.most_common()]
    # Once prepared from a folder, the corpus opens without the folder.
    assert txl.open_corpus(name, data_dir=data_dir, quiet=True).directory == corpus.directory


def benchmark_file(folder: Path, split: str) -> str:
    return next(path.name for path in folder.iterdir() if split in path.name)


def test_the_authors_penn_treebank_is_in_lower_case_and_counts_all_splits(test_data, data_dir):
    ours = txl.open_corpus("ptb", source=test_data / "ptb", data_dir=data_dir, quiet=True)
    theirs = txl.open_corpus("ptb", source=test_data / "ptb", data_dir=data_dir, quiet=True, like_original=True)
    counted: Counter[str] = Counter()
    for split in ("train", "valid", "test"):
        counted.update((test_data / "ptb" / f"ptb.{split}.txt").read_text().lower().split())
    assert words_of(theirs) == ["<eos>", *[word for word, _ in counted.most_common()]]
    assert len(theirs.vocabulary) == 10_000
    assert "N" in words_of(ours)
    assert "N" not in words_of(theirs)
    text = (test_data / "ptb" / "ptb.valid.txt").read_text()
    expected = [word for line in text.splitlines() for word in [*line.lower().split(), "<eos>"]]
    words = words_of(theirs)
    assert [words[number] for number in ids(theirs, "valid")] == expected


def test_a_mismatch_says_by_how_much(test_data, tmp_path):
    folder = tmp_path / "ptb"
    shutil.copytree(test_data / "ptb", folder)
    valid = folder / "ptb.valid.txt"
    valid.write_text(valid.read_text().removesuffix("\n") + " and more\n")
    with pytest.raises(UserError, match=r"is not ptb: the valid split has 73,762 tokens, 2 too many: expected 73,760"):
        txl.open_corpus("ptb", source=folder, data_dir=tmp_path / "data", quiet=True)
    assert list((tmp_path / "data").iterdir()) == []
    corpus = txl.open_corpus("ptb", source=folder, data_dir=tmp_path / "data", quiet=True, verify=False)
    assert "2 too many" in corpus.info()["differences"][0]
    with pytest.raises(UserError, match="2 too many"):  # an unverified corpus is never opened as a verified one
        txl.open_corpus("ptb", source=folder, data_dir=tmp_path / "data", quiet=True)


LAYOUTS = {
    "upstream": {"ptb.train.txt": TRAIN, "ptb.valid.txt": VALID, "ptb.test.txt": TEST, "ptb.char.train.txt": "no"},
    "plain": {"train.txt": TRAIN, "valid.txt": VALID, "test.txt": TEST},
    "other names": {"train.txt": TRAIN, "dev.txt": VALID, "test.txt": TEST},
    "inside": {f"simple-examples/data/ptb.{name}.txt": text for name, text in
               (("train", TRAIN), ("valid", VALID), ("test", TEST))},
}  # fmt: skip


def tarred(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.parametrize(
    ("layout", "packed"), [*((layout, "") for layout in LAYOUTS), ("plain", "gz"), ("inside", "tgz")]
)
def test_sources_in_the_layouts_that_people_have(layout, packed, tmp_path, monkeypatch):
    stand_in(monkeypatch, "ptb")
    folder, files = tmp_path / "source", LAYOUTS[layout]
    folder.mkdir()
    if packed == "tgz":
        tarred(
            folder / "simple-examples.tgz", {f"./{name}": text for name, text in files.items()} | {"./lm.cc": "main"}
        )
        (folder / "ptb.train.txt").write_text("notes of somebody\n")  # beside a complete archive: of no account
    else:
        for name, text in files.items():
            path = folder / (f"{name}.gz" if packed == "gz" else name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(text.encode()) if packed == "gz" else text.encode())
    corpus = txl.open_corpus("ptb", source=folder, data_dir=tmp_path / "data", quiet=True)
    assert [each["bytes"] for each in corpus.info()["splits"].values()] == [len(TRAIN), len(VALID), len(TEST)]
    expected = "the river rose <eos> <eos> the <unk> and the River rose N <eos>".split()
    words = words_of(corpus)
    assert [words[number] for number in ids(corpus, "train")][: len(expected)] == expected
    assert words[:3] == ["<eos>", "the", "rose"]
    assert [words[number] for number in ids(corpus, "valid")] == ["the", "river", "<eos>", "<unk>", "<unk>", "<eos>"]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [corpus.directory.name]
    if packed == "":  # a source that changes is prepared anew
        test = next(path for path in folder.rglob("*test*"))
        test.write_text(TEST + TEST)
        again = txl.open_corpus("ptb", source=folder, data_dir=tmp_path / "data", quiet=True)
        assert (len(corpus.tokens("test")), len(again.tokens("test"))) == (4, 8)


def test_an_archive_may_be_the_source_itself(tmp_path, monkeypatch):
    stand_in(monkeypatch, "wikitext-2")
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as file:
        for name, text in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
            file.writestr(f"wikitext-2/wiki.{name}.tokens", text)
        file.writestr("../../escaped/wiki.train.tokens", "outside")
    corpus = txl.open_corpus("wikitext-2", source=tmp_path / "mine.zip", data_dir=tmp_path / "data", quiet=True)
    assert len(corpus.tokens("test")) == 4
    assert not (tmp_path.parent / "escaped").exists()
    content = (tmp_path / "mine.zip").read_bytes()
    encrypted = content.replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01")
    encrypted = encrypted.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01")
    (tmp_path / "mine.zip").write_bytes(encrypted)
    with pytest.raises(UserError, match=r"mine\.zip: cannot be read \(.* is encrypted"):
        txl.open_corpus("wikitext-2", source=tmp_path / "mine.zip", data_dir=tmp_path / "data", quiet=True)
    (tmp_path / "mine.zip").write_bytes(content[:-40])
    with pytest.raises(UserError, match=r"mine\.zip: damaged \(.*\)"):
        txl.open_corpus("wikitext-2", source=tmp_path / "mine.zip", data_dir=tmp_path / "data", quiet=True)


@pytest.mark.parametrize("there", [(), ("train", "test")])
def test_a_source_that_lacks_files_says_which_and_what_was_expected(there, tmp_path):
    (tmp_path / "source").mkdir()
    write(tmp_path / "source", **{f"{split}__txt": TRAIN for split in there})
    missing = "no valid file of ptb is there" if there else "no train and no valid and no test file of ptb is there"
    for source, problem in (
        (tmp_path / "source", missing),
        (tmp_path / "nowhere", "no such file or folder"),
        (Path(__file__), "one file cannot be ptb"),
    ):
        with pytest.raises(UserError, match=rf"{problem}; expected a folder with ptb\.train\.txt, ptb\.valid\.txt, "):
            txl.open_corpus("ptb", source=source, data_dir=tmp_path / "data", quiet=True)


WIKI = ("<page>\n  été &amp; <b>\x00\n" * 50).encode()
CUTS = (900, 50, len(WIKI) - 950)


def test_enwik8_keeps_its_newlines_unless_it_is_to_be_like_the_original(tmp_path, monkeypatch):
    stand_in(monkeypatch, "enwik8", cuts=CUTS, hashes={"all": f"md5:{hashlib.md5(WIKI).hexdigest()}"})
    source = write(tmp_path / "source", enwik8=WIKI)
    ours = txl.open_corpus("enwik8", source=source, data_dir=tmp_path / "data", quiet=True)
    assert len(ours.vocabulary) == 256
    assert bytes(ids(ours, "train")) == WIKI[:900]
    assert b"".join(ours.text_bytes("test")) == WIKI[950:]

    theirs = txl.open_corpus("enwik8", source=source, data_dir=tmp_path / "data", quiet=True, like_original=True)
    vocabulary = theirs.vocabulary
    assert isinstance(vocabulary, ByteVocabulary)
    kept = WIKI.replace(b"\n", b"")
    assert vocabulary.values == [value for value, _ in Counter(kept).most_common()]
    assert bytes(vocabulary.values[number] for number in ids(theirs, "train")) == WIKI[:900].replace(b"\n", b"")
    assert b"".join(theirs.text_bytes("valid")) == WIKI[900:950].replace(b"\n", b"")
    # Bits per byte count the bytes that the model read, which include no newlines.
    assert theirs.tokens("valid").n_bytes == len(theirs.tokens("valid")) == len(WIKI[900:950].replace(b"\n", b""))
    assert vocabulary.decode(vocabulary.encode("été")) == "été"
    with pytest.raises(UserError, match=r"bytes that the vocabulary of \d+ lacks: 0x0A, 0x5A; leave them out"):
        vocabulary.encode("été\nZ")
    assert vocabulary_from_json(vocabulary.to_json()) == vocabulary

    monkeypatch.setitem(BENCHMARKS, "enwik8", dataclasses.replace(BENCHMARKS["enwik8"], original_vocabulary=(204, 204)))
    wrong = f"the vocabulary has {len(vocabulary)} tokens, {204 - len(vocabulary)} too few: expected 204"
    with pytest.raises(UserError, match=wrong):
        txl.open_corpus("enwik8", source=source, data_dir=tmp_path / "other", quiet=True, like_original=True)


def test_enwik8_from_splits_from_one_file_and_from_a_zip_is_the_same(tmp_path, monkeypatch):
    stand_in(monkeypatch, "enwik8", cuts=CUTS, hashes={"all": f"md5:{hashlib.md5(WIKI).hexdigest()}"})
    numbers = " ".join(map(str, WIKI[:900]))  # train.txt as the authors' script writes it, next to train.txt.raw
    splits = write(
        tmp_path / "splits",
        train__txt=numbers,
        train__txt__raw=WIKI[:900],
        valid__txt=WIKI[900:950],
        test__txt=WIKI[950:],
    )
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as file:
        file.writestr("enwik8", WIKI)
    write(tmp_path / "whole", enwik8=WIKI)
    identities = {
        txl.open_corpus("enwik8", source=source, data_dir=tmp_path / "data", quiet=True).info()["identity"]
        for source in (splits, tmp_path / "enwik8.zip", tmp_path / "whole", tmp_path / "whole" / "enwik8")
    }
    assert len(identities) == 1
    write(tmp_path / "short", enwik8=WIKI[:-7])
    short = rf"enwik8 has {len(WIKI) - 7:,} bytes, 7 too few: expected {len(WIKI):,}"
    with pytest.raises(UserError, match=short):
        txl.open_corpus("enwik8", source=tmp_path / "short", data_dir=tmp_path / "data", quiet=True)
    write(tmp_path / "other", enwik8=WIKI.replace(b"page", b"Page"))
    with pytest.raises(UserError, match=r"the md5 of .*enwik8 is .*, the published one is"):
        txl.open_corpus("enwik8", source=tmp_path / "other", data_dir=tmp_path / "data", quiet=True)
    # A cut inside a character is moved to the next character, unless the unit is byte.
    write(tmp_path / "accents", enwik8="é" * 500)
    text = txl.open_corpus(
        "enwik8", "char", source=tmp_path / "accents", data_dir=tmp_path / "data", verify=False, quiet=True
    )
    assert sum(len(text.tokens(split)) for split in text.splits) == 500


def test_text8_has_no_unknown_and_is_stripped_like_the_original(tmp_path, monkeypatch):
    text = " anarchism is a zebra that quickly jumped over five foxes " + "words without end " * 60
    cuts = (900, 100, len(text) - 1000)
    stand_in(monkeypatch, "text8", cuts=cuts, tokens=dict(zip(("train", "valid", "test"), cuts, strict=True)))
    source = write(tmp_path / "source", text8=text)
    ours = txl.open_corpus("text8", source=source, data_dir=tmp_path / "data", quiet=True)
    vocabulary = ours.vocabulary
    assert isinstance(vocabulary, CharVocabulary)
    assert vocabulary.unk_id is None
    assert vocabulary.characters == [character for character, _ in Counter(text[:900]).most_common()]
    assert vocabulary.decode(ids(ours, "train")) == text[:900]
    with pytest.raises(UserError, match=r"lacks: 'A' \(U\+0041\)"):
        vocabulary.encode("A")
    assert vocabulary_from_json(vocabulary.to_json()) == vocabulary
    theirs = txl.open_corpus("text8", source=source, data_dir=tmp_path / "data", quiet=True, like_original=True)
    for split, part in (("train", text[:900]), ("valid", text[900:1000]), ("test", text[1000:])):
        assert theirs.vocabulary.decode(ids(theirs, split)) == part.strip()


SENTENCES = {
    "train": ["The mill stood .", "Nobody came .", "The flood rose quickly ."],
    "valid": ["The flood came ."],
    "test": ["Somebody stood .", "The mill ."],
}
WORDS = ["<S>", "</S>", "<UNK>", "The", ".", "mill", "stood", "flood", "came", "rose", "Nobody"]


def lm1b_source(folder: Path) -> Path:
    for number, line in enumerate(SENTENCES["train"], 1):
        shard = folder / "training-monolingual.tokenized.shuffled" / f"news.en-{number:05}-of-00100"
        shard.parent.mkdir(parents=True, exist_ok=True)
        shard.write_text(line + "\n")
    held = folder / "heldout-monolingual.tokenized.shuffled" / "news.en.heldout-00000-of-00050"
    held.parent.mkdir()
    held.write_text("".join(f"{line}\n" for line in SENTENCES["valid"]))
    (folder / "1b_word_vocab.txt").write_text("".join(f"{word} {99 - number}\n" for number, word in enumerate(WORDS)))
    return folder


@pytest.mark.parametrize("boundary", ["end", "both"])
def test_lm1b_has_its_own_vocabulary_and_boundaries(boundary, tmp_path, monkeypatch):
    stand_in(monkeypatch, "lm1b", tokens={"train": 16, "valid": 6}, tokens_both={"train": 18, "valid": 6})
    source = lm1b_source(tmp_path / "source")
    corpus = txl.open_corpus("lm1b", source=source, data_dir=tmp_path / "data", quiet=True, boundary=boundary)
    vocabulary = corpus.vocabulary
    assert isinstance(vocabulary, WordVocabulary)
    assert vocabulary.words == WORDS
    between = ["<S>"] if boundary == "end" else ["<S>", "<S>"]
    expected = ["<S>"]
    for number, line in enumerate(SENTENCES["train"]):
        words = [word if word in WORDS else "<UNK>" for word in line.split()]
        expected += [*words, *(between if number < 2 else ["<S>"])]
    assert [WORDS[number] for number in ids(corpus, "train")] == expected
    assert ids(corpus, "valid") == ids(corpus, "test")
    assert corpus.info()["boundary"] == boundary
    sentences = corpus.tokens("train").sentences
    assert sentences is not None
    assert (sentences.boundary_id, sentences.boundary) == (0, boundary)
    # A prompt is encoded like the corpus: each sentence begins with a boundary.
    assert [WORDS[number] for number in vocabulary.encode("The mill\nNobody")] == [
        "<S>", "The", "mill", *between, "Nobody"
    ]  # fmt: skip
    assert vocabulary.decode(vocabulary.encode("The mill")) == "\nThe mill"
    assert vocabulary_from_json(vocabulary.to_json()) == vocabulary


def test_lm1b_settings_that_do_not_go_are_refused(tmp_path, monkeypatch):
    stand_in(monkeypatch, "lm1b")
    source = lm1b_source(tmp_path / "source")
    for field, value in (("boundary", "start"), ("max_words", 5)):
        config = dataclasses.replace(DataConfig(unit="word"), **{field: value})
        with pytest.raises(UserError) as caught:
            txl.open_corpus("lm1b", source=source, data_dir=tmp_path, config=config)
        assert (caught.value.field, caught.value.value) == (f"data.{field}", value)
    (source / "1b_word_vocab.txt").write_text("just\nwords\n")
    with pytest.raises(UserError, match=r"a word vocabulary needs <S>; expected One Billion Word's 1b_word_vocab\.txt"):
        txl.open_corpus("lm1b", source=source, data_dir=tmp_path / "data", quiet=True)
    vocabulary = "<S>\n<UNK>\na\x85b\nc\u2028d 7\r\ne\n"  # lines end at newlines alone
    (source / "1b_word_vocab.txt").write_text(vocabulary, encoding="utf-8", newline="")
    assert len(read_words(source / "1b_word_vocab.txt", "end")) == 5
    (source / "1b_word_vocab.txt").unlink()
    with pytest.raises(UserError, match=r"no vocabulary file of lm1b is there"):
        txl.open_corpus("lm1b", source=source, data_dir=tmp_path / "data", quiet=True)


def test_a_public_corpus_in_another_models_vocabulary(tmp_path, monkeypatch):
    stand_in(monkeypatch, "ptb", tokens={"train": 1})
    source = write(tmp_path / "source", train__txt=TRAIN, valid__txt=VALID, test__txt=TEST)
    vocabulary = WordVocabulary(["<eos>", "<unk>", "river"])
    corpus = txl.open_corpus("ptb", source=source, vocabulary=vocabulary, data_dir=tmp_path / "data", quiet=True)
    assert ids(corpus, "valid") == [1, 2, 0, 1, 1, 0]
    with pytest.raises(UserError) as caught:
        txl.open_corpus("stdlib", source=tmp_path, data_dir=tmp_path, quiet=True)
    assert (caught.value.field, caught.value.value) == ("data.source", str(tmp_path))


def test_known_numbers_agree_with_each_other():
    lm1b = benchmarks.LM1B
    sentences = {"train": 30_301_028, "valid": 6_075, "test": 6_075}
    for split, count in sentences.items():
        assert lm1b.tokens_both[split] == lm1b.tokens[split] - 1 + count
    for benchmark in BENCHMARKS.values():
        if benchmark.cuts:
            assert sum(benchmark.cuts) == 100_000_000
