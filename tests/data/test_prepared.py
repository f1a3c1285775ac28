"""Prepared corpora that something else has changed: prepared anew with a note, never read as they are."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import txl
from txl.cli import main
from txl.data import prepared
from txl.data.lanes import LaneStream
from txl.errors import UserError


def flip(path: Path, every: int = 40) -> None:
    """Change one bit in every 40th byte of a file."""
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
    content[::every] ^= 1
    path.write_bytes(content.tobytes())


@pytest.mark.parametrize("unit", ["byte", "char", "word", "bpe"])
def test_each_altered_or_missing_file_is_noticed_by_the_next_reader(unit, tmp_path, capsys, monkeypatch):
    story = tmp_path / "story.txt"
    story.write_text("The mill turned the wheel, and the wheel the stone.\n" * 60)
    monkeypatch.setattr(prepared, "_SETTLED", -1)  # the stamps of the verified files are stored at once
    config = txl.config.DataConfig(vocab_size=300)
    corpus = txl.open_corpus(str(story), unit, config=config, data_dir=tmp_path / "data", quiet=True)
    info = corpus.info()
    files = {path.name: path.read_bytes() for path in corpus.directory.iterdir()}
    texts = set() if unit == "byte" else {"valid.text", "test.text"}
    expected = {"train.tokens", "valid.tokens", "test.tokens", "vocabulary.json", "meta.json", "verified.json", *texts}
    assert set(files) == expected
    for name in sorted(expected - {"verified.json"}):
        for damage in (flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink):
            damage(corpus.directory / name)
            again = txl.open_corpus(str(story), unit, config=config, data_dir=tmp_path / "data")
            said = capsys.readouterr().err.splitlines()[0]
            assert said.startswith("note: ")
            assert said.endswith(f"; preparing {story} anew")
            assert again.info() == info
            assert (corpus.directory / name).read_bytes() == files[name]


@pytest.mark.parametrize("new", [None, 7, math.nan, "x", True, [], {"a": 1}, 10**400])
def test_no_value_of_the_record_can_be_altered(new, story, tmp_path):
    corpus = txl.open_corpus(str(story), "word", data_dir=tmp_path, quiet=True)
    path = corpus.directory / "meta.json"
    record = json.loads(path.read_text())
    for changed in (new, record | {"bytes": new}, record | {"splits": record["splits"] | {"train": new}}):
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match="damaged|not JSON"):
            prepared.Corpus(corpus.directory)
    path.write_text("[" * 100_000)
    assert txl.open_corpus(str(story), "word", data_dir=tmp_path, quiet=True).info() == corpus.info()


def test_unchanged_files_are_read_for_verification_once(story, tmp_path, monkeypatch):
    hashed: list[Path] = []
    real = prepared.file_sha256
    monkeypatch.setattr(prepared, "file_sha256", lambda path: (hashed.append(path), real(path))[1])

    def opened() -> int:
        hashed.clear()
        txl.open_corpus(str(story), "char", data_dir=tmp_path, quiet=True)
        return len(hashed)

    assert opened() == 5  # three token files and two texts
    assert opened() == 5, "a change so soon after the last one may not show in the times"
    later = time.time() + 60
    monkeypatch.setattr(prepared.time, "time", lambda: later)
    assert [opened() for _ in range(3)] == [5, 0, 0]
    folder = next(tmp_path.iterdir())
    for damage in (b"", b"[]", b'{"meta.json": NaN}', b"[" * 100_000):
        (folder / "verified.json").write_bytes(damage)
        assert [opened() for _ in range(2)] == [5, 0]
    (folder / "test.text").touch()
    assert [opened() for _ in range(2)] == [5, 0]


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_not_a_dead_process(story, tmp_path):
    corpus = txl.open_corpus(str(story), "byte", data_dir=tmp_path, quiet=True)
    tokens = corpus.tokens("train")
    stream = LaneStream(tokens, 4, 8)
    position = stream.read(stream.start()).next
    (corpus.directory / "train.tokens").unlink()
    stream.read(position)  # still there for those that have it open
    corpus = txl.open_corpus(str(story), "byte", data_dir=tmp_path, quiet=True)
    tokens = corpus.tokens("train")
    stream = LaneStream(tokens, 4, 8)
    with open(corpus.directory / "train.tokens", "r+b") as file:
        file.truncate(10)
    for read in (lambda: stream.read(position), lambda: np.asarray(tokens), lambda: list(tokens)):
        with pytest.raises(UserError, match=r"train\.tokens: cut off at 10 bytes by another program"):
            read()


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_a_corpus_that_cannot_be_read_now_is_not_removed(number, story, tmp_path, monkeypatch):
    txl.open_corpus(str(story), "char", data_dir=tmp_path, quiet=True)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}

    def fail(path):
        raise OSError(number, os.strerror(number), str(path))

    for name in ("file_sha256", "read_json"):
        with monkeypatch.context() as patch:
            patch.setattr(prepared, name, fail)
            with pytest.raises(UserError, match=os.strerror(number)):
                txl.open_corpus(str(story), "char", data_dir=tmp_path, quiet=True)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == files


def untimed(values: dict) -> dict:
    return {name: value for name, value in values.items() if "second" not in name}


def test_a_command_that_evaluates_never_reads_an_altered_corpus(trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")  # commands write their results into the run
    data_dir = tmp_path / "data"
    words = ["eval", str(run), "--data-dir", str(data_dir), "--device", "cpu", "--max-tokens", "200"]

    def figures():
        status = main([*words, "--json"])
        said = capsys.readouterr()
        assert status == 0, said.err
        return json.loads(said.out, object_hook=untimed)

    before = figures()
    for path in data_dir.glob("*/*.tokens"):
        flip(path)
    assert figures() == before
    for path in data_dir.glob("*/*.tokens"):
        flip(path)
    assert main(words) == 0
    assert "altered since it was prepared; preparing" in capsys.readouterr().err
