from __future__ import annotations

import bz2
import dataclasses
import errno
import gzip
import lzma
import os
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zstandard

import txl
from txl.config import DataConfig
from txl.data import prepare as prepare_module
from txl.data.characters import CharVocabulary
from txl.data.pieces import BLOCK
from txl.data.user_text import stdlib_pieces, user_pieces
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError


def text_of(corpus, split: str) -> bytes:
    return b"".join(corpus.text_bytes(split))


def split_bytes(path: str) -> dict[str, bytes]:
    pieces = user_pieces(path)
    return {name: b"".join(b for piece in parts for b in piece.blocks()) for name, parts in pieces.items()}


def test_a_file_is_cut_90_5_5_at_characters(tmp_path):
    path = tmp_path / "ducks.txt"
    content = "🦆".encode() * 1001
    path.write_bytes(content)
    splits = split_bytes(str(path))
    assert b"".join(splits.values()) == content
    assert all(len(part) % 4 == 0 for part in splits.values())
    assert len(splits["train"]) == 3604  # 0.9 * 4004 = 3603.6, moved to the next character
    assert len(splits["valid"]) == 3804 - 3604


def test_a_folder_is_its_files_in_order(tmp_path):
    for name, size in (("b.txt", 60), ("a.txt", 40), (".hidden", 40)):
        (tmp_path / name).write_bytes(name[:1].encode() * size)
    for text in (tmp_path, tmp_path / "*.txt"):
        assert b"".join(split_bytes(str(text)).values()) == b"a" * 40 + b"b" * 60


@pytest.mark.parametrize(
    ("ending", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstandard.compress)],
)
def test_compressed_files_read_like_plain_ones(ending, compress, tmp_path, data_dir):
    plain, path = tmp_path / "log.txt", tmp_path / f"log.txt{ending}"
    plain.write_bytes(b"".join(b"line %d of the log\n" % number for number in range(300)))
    path.write_bytes(compress(plain.read_bytes()))
    assert split_bytes(str(path)) == split_bytes(str(plain))
    identities = {
        txl.open_corpus(str(each), data_dir=data_dir, quiet=True).info()["identity"] for each in (path, plain)
    }
    assert len(identities) == 1
    path.write_bytes(path.read_bytes()[:-20])
    assert "it may be incomplete" in refusal(str(path), data_dir, "byte")


@pytest.mark.parametrize("unit", ["byte", "char", "bpe"])
def test_lossless_units_give_the_text_back(unit, story, data_dir):
    config = DataConfig(vocab_size=300)
    corpus = txl.open_corpus(str(story), unit, config=config, data_dir=data_dir, quiet=True)
    original = story.read_bytes()
    for split in ("valid", "test"):
        text = text_of(corpus, split)
        assert text in original
        assert corpus.vocabulary.decode(corpus.tokens(split)) == text.decode()
    assert b"".join(text_of(corpus, split) for split in ("train", "valid", "test")) == original
    info = corpus.info()
    assert sum(record["bytes"] for record in info["splits"].values()) == len(original)
    assert all(record["tokens"] == len(corpus.tokens(name)) for name, record in info["splits"].items())


def test_characters_unseen_in_training_are_one_counted_unknown(tmp_path, data_dir):
    path = tmp_path / "letters.txt"
    path.write_text("ab" * 90 + "xyzabababa" + "abababab" + "ac", encoding="utf-8")
    corpus = txl.open_corpus(str(path), "char", data_dir=data_dir, quiet=True)
    assert len(corpus.vocabulary) == 3  # <unk>, a, b
    assert corpus.info()["splits"]["valid"]["unknown"] == 3
    assert corpus.vocabulary.spell(np.array([1, 2])) == b"ab"
    assert corpus.vocabulary.spell(np.array([1, 0, 2])) is None
    assert corpus.info()["splits"]["test"]["unknown"] == 1


def test_words_are_split_at_white_space_with_an_eos_a_line(tmp_path, data_dir):
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "train.txt").write_text(" the mill \n\nthe clock\n")
    (folder / "valid.txt").write_text("the flood")  # no line end: the last line still has an <eos>
    (folder / "test.txt").write_text("clock the\n")
    config = DataConfig(min_count=1)
    corpus = txl.open_corpus(str(folder), "word", config=config, data_dir=data_dir, quiet=True)
    vocabulary = corpus.vocabulary
    assert isinstance(vocabulary, WordVocabulary)
    assert vocabulary.words == ["<eos>", "the", "mill", "clock", "<unk>"]
    assert np.asarray(corpus.tokens("train")).tolist() == [1, 2, 0, 0, 1, 3, 0]
    assert np.asarray(corpus.tokens("valid")).tolist() == [1, 4, 0]
    assert corpus.info()["splits"]["valid"]["unknown"] == 1
    with pytest.raises(UserError, match="the text of the train split is not kept"):
        text_of(corpus, "train")


def windows(text: str) -> bytes:
    return b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()


@pytest.mark.parametrize(
    ("unit", "block"),
    [("byte", BLOCK), ("bpe", BLOCK), *((unit, n) for unit in ("char", "word") for n in (1, 7, BLOCK))],
)
def test_own_text_of_windows_is_read_like_that_of_unix_but_for_bytes(unit, block, tmp_path, monkeypatch):
    # bpe is tested with one block only: byte pairs do not cross block edges, and \r\n moves text across these edges.
    monkeypatch.setattr("txl.data.pieces.BLOCK", block)
    config, text = DataConfig(vocab_size=280), "The \r mill\n\nstood “still” \ufeff there\n" * 8
    opened = {}
    for kind, content in (("unix", text.encode()), ("windows", windows(text))):
        folder = tmp_path / kind
        folder.mkdir()
        for split in ("train", "valid", "test"):
            (folder / f"{split}.txt").write_bytes(content)
        opened[kind] = txl.open_corpus(str(folder), unit, config=config, data_dir=tmp_path / "data", quiet=True)
    unix, other = opened["unix"], opened["windows"]
    if unit == "byte":
        assert np.asarray(other.tokens("train")).astype(np.uint8).tobytes() == windows(text)
        assert other.info()["splits"]["train"]["bytes"] == len(windows(text))
        assert other.notes("test") == []
        return
    assert other.info()["identity"] == unix.info()["identity"]
    assert other.info()["splits"]["test"] == unix.info()["splits"]["test"]
    assert text_of(other, "test") == text.encode()
    assert other.info()["normalised"] == {"byte_order_marks": 3, "line_ends": 72}
    assert "is read without byte order marks (3) and with \\n for 72 line ends \\r\\n" in other.notes("test")[0]
    assert "normalised" not in unix.info()
    if block == BLOCK:
        kept = dataclasses.replace(config, normalise=False, min_count=1)
        raw = txl.open_corpus(str(tmp_path / "windows"), unit, config=kept, data_dir=tmp_path / "data", quiet=True)
        assert text_of(raw, "test") == windows(text)
        assert not raw.vocabulary.normalise
        assert any("\ufeff" in str(each) for each in getattr(raw.vocabulary, "words", ["\ufeff"]))


def test_a_cut_between_splits_may_go_through_a_line_end(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes(b"a\r\n" * 60)
    for position in range(3):  # the cuts at 90% and 95% move with the length of the beginning
        path.write_bytes(b"b" * position + b"a\r\n" * 60)
        corpus = txl.open_corpus(str(path), "char", data_dir=tmp_path, quiet=True)
        assert isinstance(corpus.vocabulary, CharVocabulary)
        assert set(corpus.vocabulary.characters) == {"\n", "a", "b"} - ({"b"} if position == 0 else set())
        texts = [corpus.vocabulary.decode(corpus.tokens(split)) for split in ("train", "valid", "test")]
        assert "".join(texts) == "b" * position + "a\n" * 60


def test_not_utf8_is_named_at_its_own_place_in_a_text_of_windows(tmp_path):
    content = windows("one\ntwo\n" * 400)
    (tmp_path / "latin.txt").write_bytes(content + b"caf\xe9 au lait" + content)
    for unit in ("char", "word", "bpe"):
        assert f"byte 0xE9 at offset {len(content) + 3}" in refusal(str(tmp_path / "latin.txt"), tmp_path, unit)


def test_words_and_characters_across_blocks_are_whole(tmp_path, data_dir, monkeypatch):
    """Blocks of 3 bytes cut words and characters everywhere, a single block cuts none. The tokens must be equal."""
    path = tmp_path / "small.txt"
    path.write_text("naïve wörds, 日本 and   more\n\n" * 40, encoding="utf-8")
    prepared = {}
    for block in (3, BLOCK):
        monkeypatch.setattr("txl.data.pieces.BLOCK", block)
        for unit in ("char", "word"):
            corpus = txl.open_corpus(str(path), unit, data_dir=tmp_path / str(block), quiet=True)
            prepared[block, unit] = (corpus.vocabulary.to_json(), np.asarray(corpus.tokens("train")).tolist())
    for unit in ("char", "word"):
        assert prepared[3, unit] == prepared[BLOCK, unit]


def test_min_count_and_max_words_cut_the_vocabulary(story, data_dir):
    full = txl.open_corpus(str(story), "word", config=DataConfig(min_count=1), data_dir=data_dir, quiet=True)
    counted = Counter(np.asarray(full.tokens("train")).tolist())
    frequent = sum(count >= 5 for word, count in counted.items() if word != full.vocabulary.eos_id)
    cut = txl.open_corpus(str(story), "word", config=DataConfig(min_count=5), data_dir=data_dir, quiet=True)
    assert len(cut.vocabulary) == frequent + 2
    few = txl.open_corpus(str(story), "word", config=DataConfig(max_words=7), data_dir=data_dir, quiet=True)
    assert len(few.vocabulary) == 9


def test_a_corpus_is_prepared_once_and_again_when_its_file_changes(tmp_path, data_dir, monkeypatch):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"first version of the notes\n" * 20)
    calls = []
    real = prepare_module.prepare
    monkeypatch.setattr("txl.data.corpora.prepare", lambda *args: calls.append(args[0]) or real(*args))
    first = txl.open_corpus(str(path), data_dir=data_dir, quiet=True)
    assert txl.open_corpus(str(path), data_dir=data_dir, quiet=True).directory == first.directory
    assert len(calls) == 1
    path.write_bytes(b"another version of the notes\n" * 20)
    second = txl.open_corpus(str(path), data_dir=data_dir, quiet=True)
    assert len(calls) == 2
    assert second.info()["identity"] != first.info()["identity"]
    (tmp_path / "copy.txt").write_bytes(path.read_bytes())  # the text decides the identity, not its place
    copy = txl.open_corpus(str(tmp_path / "copy.txt"), data_dir=data_dir, quiet=True)
    assert copy.info()["identity"] == second.info()["identity"]


def test_a_given_vocabulary_encodes_another_text(story, tmp_path, data_dir):
    vocabulary = txl.open_corpus(str(story), "char", data_dir=data_dir, quiet=True).vocabulary
    other = tmp_path / "other.txt"
    other.write_text("The mill stood still. Ω\n" * 30, encoding="utf-8")
    corpus = txl.open_corpus(str(other), vocabulary=vocabulary, data_dir=data_dir, quiet=True)
    assert corpus.vocabulary == vocabulary
    assert corpus.unit == "char"
    assert corpus.info()["splits"]["train"]["unknown"] > 0


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free the disk or choose another data_dir"), (errno.EROFS, "choose another")]
)
def test_what_cannot_be_written_leaves_nothing_half_prepared(number, remedy, story, tmp_path, monkeypatch):
    def fail(*given):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(prepare_module, "_build", fail)
    with pytest.raises(UserError, match=f"{os.strerror(number)}; nothing was kept; {remedy}"):
        txl.open_corpus(str(story), data_dir=tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_prepare_at_once(story, tmp_path):
    code = f"import txl; print(txl.open_corpus({str(story)!r}, 'word', data_dir={str(tmp_path)!r}).info()['identity'])"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate()[0] for process in running]
    assert all(process.returncode == 0 for process in running)
    assert answers[0] == answers[1]
    assert len(list(tmp_path.iterdir())) == 1


def test_stdlib_is_split_by_file_and_deterministic(data_dir):
    corpus = txl.open_corpus("stdlib", data_dir=data_dir, quiet=True)
    info = corpus.info()
    sizes = {name: record["bytes"] for name, record in info["splits"].items()}
    total = sum(sizes.values())
    assert total > 5_000_000
    assert 0.87 < sizes["train"] / total < 0.93
    assert 0.03 < sizes["valid"] / total < 0.07
    pieces = stdlib_pieces()
    paths = [piece.path for parts in pieces.values() for piece in parts]
    assert len(paths) == len(set(paths)) > 500
    assert not any({"site-packages", "dist-packages", "__pycache__"} & set(path.parts) for path in paths)
    assert all(parts == sorted(parts, key=lambda piece: piece.path) for parts in pieces.values())
    assert {part.path.name for part in pieces["train"]} != {part.path.name for part in stdlib_pieces()["test"]}
    assert pieces == stdlib_pieces()


@pytest.mark.parametrize(("unit", "megabytes"), [("byte", 16), ("char", 16), ("word", 16), ("bpe", 3)])
def test_memory_does_not_grow_with_the_text(unit, megabytes, tmp_path):
    """The text is one line. Holding the line as Python strings or ids would take several times the allowed memory."""
    path = tmp_path / "long.txt"
    with open(path, "w") as file:
        for _ in range(megabytes * 10):
            file.write("one line with words that never ends and goes on ... " * 1923)
    code = (
        "import resource, txl; from txl.config import DataConfig; import tokenizers, numpy, txl.data.corpora;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        f"txl.open_corpus({str(path)!r}, {unit!r}, config=DataConfig(vocab_size=300), data_dir={str(tmp_path)!r},"
        " quiet=True);"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"
    )
    grown = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert grown < 100, f"{grown:.0f} MiB for a text of {megabytes} MB"


def refusal(name: str, data_dir: Path, unit: str | None = None) -> str:
    with pytest.raises(UserError) as error:
        txl.open_corpus(name, unit, data_dir=data_dir, quiet=True)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bad_input_is_refused_in_one_line(tmp_path):
    assert "no such file or folder" in refusal(str(tmp_path / "none.txt"), tmp_path)
    assert "no file is there" in refusal(str(tmp_path / "*.nothing"), tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refusal(str(tmp_path / "pipe"), tmp_path)
    (tmp_path / "days.txt").write_text("日" * 7)  # a cut in the last character leaves no split for it
    assert "too few to cut" in refusal(str(tmp_path / "days.txt"), tmp_path, "char")
    assert "did you mean stdlib?" in refusal("stdlab", tmp_path)
    (tmp_path / "empty.txt").touch()
    assert "empty; expected some text" in refusal(str(tmp_path / "empty.txt"), tmp_path)
    (tmp_path / "tiny.txt").write_text("abc")
    assert "3 bytes are too few" in refusal(str(tmp_path / "tiny.txt"), tmp_path)
    (tmp_path / "folder").mkdir()
    assert "cannot be read (File name too long)" in refusal("x" * 5000, tmp_path)
    assert "no file is there" in refusal(str(tmp_path / "folder"), tmp_path)
    assert "expected one of byte, char, word, bpe" in refusal("stdlib", tmp_path, "syllable")


@pytest.mark.parametrize("unit", ["char", "word", "bpe"])
def test_text_that_is_not_utf8_is_refused_with_byte_and_offset(unit, tmp_path):
    good = "naïve text\n".encode() * 200
    (tmp_path / "latin.txt").write_bytes(good + b"caf\xe9 au lait" + good)
    message = refusal(str(tmp_path / "latin.txt"), tmp_path, unit)
    assert f"byte 0xE9 at offset {len(good) + 3}" in message
    (tmp_path / "binary.bin").write_bytes(good + b"\0" + good)
    assert f"a NUL byte at offset {len(good)}" in refusal(str(tmp_path / "binary.bin"), tmp_path, unit)
    (tmp_path / "cut.txt").write_bytes(good * 3 + "é".encode()[:1])
    assert "byte 0xC3" in refusal(str(tmp_path / "cut.txt"), tmp_path, unit)
    # The unit byte accepts any content.
    txl.open_corpus(str(tmp_path / "binary.bin"), "byte", data_dir=tmp_path, quiet=True)


def test_the_standard_library_can_be_read_in_every_unit():
    """Only files that are not UTF-8 are left out. A few exist, to test how Python reads source files."""
    pieces, text = stdlib_pieces(), stdlib_pieces("char")
    left_out = {piece.path for parts in pieces.values() for piece in parts}
    left_out -= {piece.path for parts in text.values() for piece in parts}
    for path in left_out:
        with pytest.raises(UnicodeDecodeError):
            path.read_bytes().decode("utf-8")
    kept = [piece for piece in pieces["test"] if piece.path not in left_out]
    assert text["test"] == kept


def test_a_text_without_words_is_refused_as_words_before_it_fills_memory(tmp_path):
    path = tmp_path / "genome.txt"
    path.write_bytes(b"ACGT" * 800_000)
    assert "characters without white space are too long for a word; use the unit bpe" in refusal(
        str(path), tmp_path, "word"
    )
    path.write_bytes(b"ACGT\t" * 800_000)  # tabs are white space too, however long the line
    assert len(txl.open_corpus(str(path), "word", data_dir=tmp_path, quiet=True).vocabulary) == 3


def test_more_different_words_than_memory_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("txl.data.prepare.MOST_WORDS", 1000)
    path = tmp_path / "numbers.txt"
    path.write_text(" ".join(map(str, range(5000))))
    assert "more than 1,000 different words; use the unit bpe or char" in refusal(str(path), tmp_path, "word")


def test_byte_pairs_of_a_long_text_are_learnt_from_all_over_it(tmp_path, monkeypatch):
    monkeypatch.setattr("txl.data.bpe.BPE_TRAINING_BYTES", 40_000)
    monkeypatch.setattr("txl.data.bpe.BPE_CHUNK", 4_000)
    path = tmp_path / "long.txt"
    path.write_text("first part " * 20_000 + "secondly " * 20_000)
    config = DataConfig(vocab_size=300)
    corpus = txl.open_corpus(str(path), "bpe", config=config, data_dir=tmp_path, quiet=True)
    assert corpus.vocabulary.decode(corpus.tokens("test")) == text_of(corpus, "test").decode()
    for word in (" first", " secondly"):
        assert len(corpus.vocabulary.encode(word)) == 1


def test_what_a_killed_process_left_is_removed_later(story, tmp_path):
    for name, age in (("old", 2 * 86_400), ("new", 10)):
        left = tmp_path / f".story-byte-0123.partial-{name}"
        left.mkdir()
        os.utime(left, (time.time() - age, time.time() - age))
    txl.open_corpus(str(story), data_dir=tmp_path, quiet=True)
    assert {path.name.split("-")[-1] for path in tmp_path.glob(".*")} == {"new"}


def test_progress_is_a_line_where_there_is_no_terminal_and_nothing_if_quiet(story, tmp_path, capsys):
    txl.open_corpus(str(story), data_dir=tmp_path / "loud")
    assert capsys.readouterr().err == f"preparing {story} in byte tokens\n"
    txl.open_corpus(str(story), data_dir=tmp_path / "quiet", quiet=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("unit", ["byte", "char", "word", "bpe"])
def test_progress_is_a_bar_on_a_terminal(unit, story, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "150")
    txl.open_corpus(str(story), unit, config=DataConfig(vocab_size=300), data_dir=tmp_path)
    shown = capsys.readouterr().err
    assert "story.txt: encoding test" in shown
    assert f"/{len(story.read_bytes()) // 20 / 1000:.1f} kB" in shown


def test_prepared_files_have_the_permissions_of_any_new_file(story, tmp_path):
    before = os.umask(0o027)
    try:
        corpus = txl.open_corpus(str(story), "char", data_dir=tmp_path, quiet=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(corpus.directory.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in corpus.directory.iterdir()} == {0o640}
