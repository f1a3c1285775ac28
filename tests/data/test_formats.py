"""Files that are no UTF-8 text: refused by the name of their format, with a remedy that works."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import shutil
import subprocess
import tarfile

import numpy as np
import pytest
import zstandard
from tests.data.test_corpora import refusal, text_of

import txl
from txl.cli import main
from txl.errors import UserError
from txl.evaluation.surprisal import surprisals
from txl.minutes.measured import text_facts

TEXT = "The river ran by the mill; it turned the wheel — day and night.\n" * 2000


def saved(write) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


FORMATS = {
    "gzip data": gzip.compress(TEXT.encode()),
    "bzip2 data": bz2.compress(TEXT.encode()),
    "xz data": lzma.compress(TEXT.encode()),
    "zstd data": zstandard.compress(TEXT.encode()),
    "an archive": tarfile.TarInfo("a.txt").tobuf() + bytes(1024),
    "a PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n" + bytes(range(256)) * 300,
    "UTF-16": TEXT.encode("utf-16"),
    "UTF-16 ": b"\xfe\xff" + TEXT.encode("utf-16-be"),
    "UTF-16  ": TEXT.encode("utf-16-le"),
    "UTF-16   ": TEXT.encode("utf-16-be"),
    "UTF-32": TEXT.encode("utf-32"),
    "binary data (NumPy": saved(lambda file: np.save(file, np.arange(220, dtype=np.uint16))),
    "a ZIP file (.docx, .xlsx, .epub, .npz and .pt too)": saved(lambda file: np.savez(file, ids=np.arange(220))),
    "binary data (NumPy ": b"PAR1\x15\x04\x15\x00" + bytes(range(256)) + b"PAR1",
    "binary data (NumPy  ": pickle.dumps({"ids": list(range(300))}),
    "a recording": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(300),
    "a recording ": b"RIFF\x24\0\0\0WAVEfmt " + bytes(300),
}


@pytest.mark.parametrize("what", FORMATS)
def test_a_file_that_is_no_text_is_refused_by_name_unless_its_bytes_are_asked_for(what, tmp_path):
    path = tmp_path / "novel.txt"
    path.write_bytes(FORMATS[what])
    assert refusal(str(path), tmp_path / "data", "bpe").startswith(f"{path}: {what.strip()}")
    with pytest.raises(UserError, match=r"novel\.txt: "):
        txl.open_corpus(str(path), whole=True, data_dir=tmp_path / "data", quiet=True)
    with pytest.raises(UserError, match=r"novel\.txt: "):
        text_facts(str(path))  # the beginning of --minutes
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())
    path.with_suffix(".txt.gz").write_bytes(gzip.compress(FORMATS[what]))
    assert f"novel.txt.gz: {what.strip()}" in refusal(f"{path}.gz", tmp_path / "data", "byte")
    path = path.with_suffix(".bin")
    path.write_bytes(FORMATS[what] * 2)
    corpus = txl.open_corpus(str(path), "byte", data_dir=tmp_path / "data", quiet=True)
    assert b"".join(text_of(corpus, split) for split in corpus.splits) == FORMATS[what] * 2
    assert corpus.notes("test") == []
    assert "only the unit byte reads other files" in refusal(str(path), tmp_path / "data", "char")


def test_commands_refuse_a_file_that_is_no_text_wherever_a_text_is_read(trained, tmp_path, capsys):
    path = tmp_path / "novel.txt"
    path.write_bytes(FORMATS["a PDF"])
    said, out = f"{path}: a PDF", ["--out", str(tmp_path / "run")]
    for words in (
        ["train", "stdlib-tiny", *out, "--dry-run"],
        ["train", *out, "--minutes", "1"],
        ["eval", str(trained)],
    ):
        assert main([*words, "--corpus", str(path), "--data-dir", str(tmp_path / "data")]) == 2
        assert f"txl: error: {said}" in capsys.readouterr().err
    assert main(["score", str(trained), str(path)]) == 2
    assert f"txl: error: {said}" in capsys.readouterr().err
    assert main(["generate", str(trained), "--prompt-file", str(path)]) == 2
    assert f"txl: error: {said}" in capsys.readouterr().err


def test_the_library_refuses_them_too(trained, tmp_path):
    model, vocabulary = txl.load(trained, device="cpu")
    assert vocabulary is not None
    (tmp_path / "novel.txt").write_bytes(FORMATS["a PDF"])
    with pytest.raises(UserError, match=r"novel\.txt: a PDF"):
        list(surprisals(model, vocabulary, tmp_path / "novel.txt"))
    with pytest.raises(UserError, match="the text: a PDF, not UTF-8 text; give UTF-8 text"):
        list(surprisals(model, vocabulary, io.BytesIO(FORMATS["a PDF"])))


@pytest.mark.parametrize("begin", ["PAR1", "%PDF-1.7", "BZh91AY&SY", "RIFF....WAVE"])
def test_a_text_may_begin_with_the_letters_of_a_format(begin, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(f"{begin} is how such a file begins.\n{TEXT}", encoding="utf-8")
    corpus = txl.open_corpus(str(path), "byte", data_dir=tmp_path / "data", quiet=True)
    assert corpus.notes("test") == []


def test_in_a_folder_only_the_texts_that_are_read_matter(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "cover.png").write_bytes(FORMATS["a recording"])
    txl.open_corpus(str(tmp_path), "byte", data_dir=tmp_path / ".data", quiet=True)
    assert "cover.png: a recording" in refusal(str(tmp_path / "*"), tmp_path / ".data", "byte")


@pytest.mark.skipif(shutil.which("iconv") is None, reason="the remedies call iconv")
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "latin-1"])
@pytest.mark.parametrize("name", ["my  novel.txt", "my  novel.txt.gz"])
def test_the_commands_in_the_messages_work(name, encoding, tmp_path):
    path, text = tmp_path / name, "Ein schöner Müller\n" * 99
    path.write_bytes(gzip.compress(text.encode(encoding)) if path.suffix == ".gz" else text.encode(encoding))
    message = refusal(str(path), tmp_path / "data", "char")
    made = tmp_path / "my  novel.utf8.txt"
    command = message.partition(": ")[2].partition(": ")[2].partition(" (only")[0]
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert made.read_text(encoding="utf-8") == text


def test_a_prompt_is_read_from_a_compressed_file(trained, tmp_path, capsys):
    (tmp_path / "prompt.txt.gz").write_bytes(gzip.compress(b"The river"))
    words = ["generate", str(trained), "--device", "cpu", "--max-tokens", "3", "--greedy"]
    said = []
    for prompt in (["--prompt", "The river"], ["--prompt-file", str(tmp_path / "prompt.txt.gz")]):
        assert main([*words, *prompt]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


def test_a_bad_byte_is_named_with_its_offset_and_line(tmp_path):
    path = tmp_path / "long.txt"
    before = "naïve\n".encode() * 200_000
    for bad, said in ((b"\xe9", "byte 0xE9"), (b"\0", "a NUL byte")):
        path.write_bytes(before + b"caf" + bad + b"\n")
        assert f"{said} at offset {len(before) + 3}, line 200,001)" in refusal(str(path), tmp_path / "data", "char")


def test_the_unit_byte_says_that_a_text_is_in_another_encoding(trained, tmp_path, capsys):
    path = tmp_path / "novel.txt"
    path.write_bytes("Ein schöner Müller\n".encode("latin-1") * 30)
    for _ in range(2):  # when it is prepared, and later
        assert main(["data", "info", str(path), "--data-dir", str(tmp_path / "data")]) == 0
        said = capsys.readouterr().out
        assert f"note: {path} is not UTF-8 (byte 0xF6 at offset 7): its bytes are read as they are" in said
        assert "iconv -f LATIN1 -t UTF-8 >" in said
    assert main(["score", str(trained), str(path), "--out", str(tmp_path / "s.tsv")]) == 0
    assert "is not UTF-8 (byte 0xF6" in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["byte", "char"])
def test_json_lines_are_noted(unit, tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"text": f"第{number}章"}) + "\n" for number in range(300)))
    corpus = txl.open_corpus(str(path), unit, data_dir=tmp_path / "data", quiet=True)
    assert [f"{path} holds JSON, which is read as it is" in note for note in corpus.notes("test")] == [True]
    assert "note" in corpus.info()


def test_a_text_that_is_the_name_of_a_file_is_noted(trained, tmp_path, monkeypatch, caplog):
    model, vocabulary = txl.load(trained, device="cpu")
    assert vocabulary is not None
    monkeypatch.chdir(tmp_path)
    list(surprisals(model, vocabulary, "article.txt"))
    assert caplog.messages == []
    (tmp_path / "article.txt").write_text(TEXT, encoding="utf-8")
    assert len(list(surprisals(model, vocabulary, "article.txt"))) == len("article.txt")
    note = "note: the text is 'article.txt' itself; to score the file of this name, give a pathlib.Path"
    assert caplog.messages == [note]
