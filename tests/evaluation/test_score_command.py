"""`txl score`: the table of a text, constant RAM use, and refusals."""

from __future__ import annotations

import csv
import gc
import io
import json
import math
import os
import re
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.conftest import small_run

import txl
from txl.cli import main
from txl.evaluation.surprisal import escaped
from txl.runs.directory import RunDirectory

UNITS = ("byte", "char", "word", "bpe")
HEADINGS = ["index", "start", "end", "word", "token", "unknown", "surprisal", "word_surprisal", "memory", "context"]


@pytest.fixture(scope="module")
def runs(story, data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("units")
    for unit in UNITS:
        options = {"data.unit": unit, "data.vocab_size": "300", "train.steps": "4"}
        txl.Trainer(small_run(str(story), **options), folder / unit, data_dir=data_dir, quiet=True).fit()
    return folder


@pytest.fixture(scope="module")
def text(story, tmp_path_factory):
    """A folder with three splits; the tests score the file `test.txt`."""
    folder = tmp_path_factory.mktemp("splits")
    for split in ("train", "valid"):
        (folder / f"{split}.txt").write_bytes(b"as it was\n")
    (folder / "test.txt").write_bytes(story.read_bytes()[:1500].rsplit(b"\n", 1)[0] + " zzyzx\tQ — “end”".encode())
    return folder


def rows_of(table: str) -> list[dict[str, str]]:
    rows = list(csv.reader(io.StringIO(table, newline="\n"), delimiter="\t", quoting=csv.QUOTE_NONE))
    assert rows[0] == HEADINGS
    return [dict(zip(HEADINGS, row, strict=True)) for row in rows[1:]]


def unescaped(token: str) -> bytes:
    def one(match: re.Match[str]) -> str:
        mark = match[1]
        if mark[0] == "x":
            return chr(0xDC00 + int(mark[1:], 16))
        return chr(int(mark[1:], 16)) if mark[0] in "uU" else {"\\": "\\", "t": "\t", "n": "\n", "r": "\r"}[mark]

    pattern = r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[\\tnr])"
    return re.sub(pattern, one, token).encode("utf-8", errors="surrogateescape")


@pytest.mark.parametrize("unit", UNITS)
def test_a_text_of_windows_is_scored_as_that_of_unix_and_that_is_said(unit, runs, text, tmp_path, capsys):
    unix, windows = tmp_path / "unix.txt", tmp_path / "windows.txt"
    unix.write_bytes(text.joinpath("test.txt").read_bytes()[:600])
    windows.write_bytes(b"\xef\xbb\xbf" + unix.read_bytes().replace(b"\n", b"\r\n"))
    ends = unix.read_bytes().count(b"\n")
    tables, told = {}, {}
    for name, words in {
        "unix": [str(unix)], "windows": [str(windows)], "raw": [str(windows), "--no-normalise"],
    }.items():  # fmt: skip
        assert main(["score", str(runs / unit), *words]) == 0
        shown = capsys.readouterr()
        tables[name], told[name] = rows_of(shown.out), shown.err
    values = {
        name: [(row["unknown"], row["surprisal"], row["word"], row["word_surprisal"]) for row in rows]
        for name, rows in tables.items()
    }
    assert (values["windows"] == values["unix"]) == (unit != "byte")
    if unit == "byte":
        assert "never occurred in the training text ('\\ufeff' (U+FEFF), '\\r' (U+000D))" in told["windows"]
        assert "note" not in told["unix"]
        return
    data = windows.read_bytes()
    for row in tables["windows"]:
        assert unescaped(row["token"]) == data[int(row["start"]) : int(row["end"])]
    assert f"without byte order marks (1) and with \\n for {ends} line ends \\r\\n" in told["windows"]
    assert "byte order mark" not in told["unix"]


@pytest.mark.parametrize("unit", UNITS)
def test_the_table_says_what_eval_says(unit, runs, text, data_dir, tmp_path, capsys, monkeypatch):
    run, file, out = str(runs / unit), text / "test.txt", tmp_path / "table.tsv"
    assert main(["score", run, str(file), "--out", str(out)]) == 0, capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [out]
    rows = rows_of(out.read_text(encoding="utf-8"))
    options = ["--data.corpus", str(text), "--batch", "1", "--json", "--data-dir", str(data_dir)]
    capsys.readouterr()
    assert main(["eval", run, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    scored = [float(row["surprisal"]) for row in rows if row["surprisal"]]
    assert len(scored) == result["tokens"]
    assert sum(scored) == pytest.approx(result["nll"] * result["tokens"] / math.log(2), abs=1e-6)
    assert sum(row["unknown"] == "1" for row in rows) == result["unknown"]
    data = file.read_bytes()
    for row in rows:
        assert unescaped(row["token"]) == data[int(row["start"]) : int(row["end"])]
    if unit != "word":
        assert b"".join(unescaped(row["token"]) for row in rows) == data
    # One sum for each word between white space, except the first word, whose first token is not scored.
    by_word: dict[str, float] = {}
    for row in rows[1:]:
        by_word[row["word"]] = by_word.get(row["word"], 0.0) + float(row["surprisal"])
    sums = {row["word"]: float(row["word_surprisal"]) for row in rows if row["word_surprisal"]}
    assert list(sums) == [str(number) for number in range(1, len(data.decode().split()))]
    assert all(value == pytest.approx(by_word[word], rel=1e-6) for word, value in sums.items())

    # JSON lines from standard input to standard output hold the same values.
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["score", run, "-", "--format", "jsonl"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(each) for each in found[:1]] == [HEADINGS]
    for each, row in zip(found, rows, strict=True):
        shown = {key: "" if value is None else value for key, value in each.items()}
        assert (shown["token"], str(shown["word"]), shown["unknown"]) == (
            row["token"],
            row["word"],
            row["unknown"] == "1",
        )
        for name in ("surprisal", "word_surprisal"):
            assert shown[name] == (float(row[name]) if row[name] else "")


def test_a_named_pipe_is_read_once(runs, text, tmp_path, capsys):
    run, file, pipe = str(runs / "byte"), text / "test.txt", tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["score", run, str(file)]) == 0
    expected = capsys.readouterr().out
    with ThreadPoolExecutor() as beside:
        writing = beside.submit(pipe.write_bytes, file.read_bytes())
        assert main(["score", run, str(pipe)]) == 0
        writing.result(timeout=60)
    assert capsys.readouterr().out == expected


def test_settings_and_checkpoints_are_those_of_eval(runs, text, data_dir, capsys):
    run = str(runs / "byte")
    settings = ["--mem-len", "12", "--window", "9", "--clamp-len", "5", "--segment", "7", "--checkpoint", "4"]
    corpus = ["--data.corpus", str(text), "--data-dir", str(data_dir), "--json"]
    file = str(text / "test.txt")
    for given in (
        settings,
        ["--sliding", "11"],
        ["--sliding", "11", "--temperature", "1.3", "--clamp-len", "2"],
        ["--temperature", "1.2"],
    ):
        assert main(["score", run, file, *given]) == 0, capsys.readouterr().err
        rows = rows_of(capsys.readouterr().out)
        lanes = [] if "--sliding" in given else ["--batch", "1"]
        assert main(["eval", run, *corpus, *given, *lanes]) == 0
        result = json.loads(capsys.readouterr().out)
        total = sum(float(row["surprisal"]) for row in rows[1:])
        assert total == pytest.approx(result["nll"] * result["tokens"] / math.log(2), abs=1e-6)


def test_memory_does_not_grow_with_the_file(runs, tmp_path, monkeypatch, capsys):
    """Compare texts of three and twelve blocks. The table is written to a file, so no captured output fills RAM."""
    monkeypatch.setattr("txl.data.pieces.BLOCK", 1 << 13)
    run = str(runs / "word")
    line = b"The river rose in the night, and by morning the lower fields were under water.\n"
    peaks = []
    # Cyclic garbage counts until it is collected: collect often, and only objects that these commands create.
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50, 1, 1)
    for count in (1, 1, 4):  # the first call creates what is created only once
        file = tmp_path / "text.txt"
        file.write_bytes(line * (count * 300))
        gc.collect()
        tracemalloc.start()
        assert main(["score", run, str(file), "--segment", "128", "--out", str(tmp_path / "table.tsv")]) == 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    assert (tmp_path / "table.tsv").stat().st_size > 20 * peaks[2] / 64
    assert peaks[2] < 1.1 * peaks[1]


@pytest.mark.parametrize("content", [b"", b"\xff\xfd", b"a b\nc d \xe2\x80", b"a\x00b"])
def test_texts_that_cannot_be_read_leave_nothing(content, runs, tmp_path, capsys):
    file, out = tmp_path / "bad.txt", tmp_path / "table.tsv"
    file.write_bytes(content)
    out.write_text("old")
    for unit in ("word", "char", "bpe"):
        for where in ([], ["--out", str(out)]):
            assert main(["score", str(runs / unit), str(file), *where]) == 2
            captured = capsys.readouterr()
            assert captured.err.startswith("txl: error: ")
            assert len(captured.err.splitlines()) == 1
            assert captured.out == ""
    assert out.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [file, out]
    assert main(["score", str(runs / "byte"), str(file)]) == (0 if content else 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.txt"], "missing.txt: No such file"),
        (["."], "Is a directory"),
        (["text.txt", "--out", "nowhere/table.tsv"], "nowhere is not a folder"),
        (["text.txt", "--out", "."], "a folder"),
        (["text.txt", "--out", "./text.txt"], ": the source itself"),
        (["text.txt", "--sliding", "4", "--mem-len", "3"], "--sliding and --mem-len"),
        (["text.txt", "--segment", "0"], "--segment: expected 1 or more"),
        (["text.txt", "--window", "30"], "window"),
        (["text.txt", "--checkpoint", "77"], "77"),
        (["text.txt", "--cache-size", "9"], "--cache-theta"),
        (["text.txt.gz"], "text.txt.gz"),
    ],
)
def test_one_line_for_what_cannot_be(words, message, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("It was.")
    (tmp_path / "text.txt.gz").write_text("It was not packed.")
    assert main(["score", str(runs / "byte"), *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert (tmp_path / "text.txt").read_text() == "It was."


def test_a_run_without_a_vocabulary_is_refused(runs, monkeypatch, capsys):
    load = RunDirectory.load
    monkeypatch.setattr(RunDirectory, "load", lambda *given, **more: (load(*given, **more)[0], None))
    assert main(["score", str(runs / "byte"), __file__]) == 2
    assert "has no vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (b"a", "a"),
        (b" \t\r\n", " \\t\\r\\n"),
        (b"\\n", "\\\\n"),
        (b"\xe2\x80", "\\xe2\\x80"),
        ("“é😀".encode(), "“é😀"),
        (b"\x00\x7f", "\\u0000\\u007f"),
        ("\u0085\u2028\u202e\U000e0001".encode(), "\\u0085\\u2028\\u202e\\U000e0001"),
    ],
)
def test_tokens_take_one_line_and_can_be_had_back(token, shown):
    assert escaped(token) == shown
    assert unescaped(shown) == token
    assert len(shown.splitlines()) == 1
