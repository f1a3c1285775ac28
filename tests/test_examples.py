"""The examples run as described in their docstrings."""

from __future__ import annotations

import csv
import http.server
import importlib.util
import re
import runpy
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import txl

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_training_in_one_file(story, data_dir):
    sizes = "--steps 60 --batch-size 4 --segment 32 --n-layer 2 --d-model 32 --eval-tokens 2000 --max-tokens 20"
    command = [sys.executable, EXAMPLES / "train.py", "--corpus", story, "--data-dir", data_dir, *sizes.split()]
    done = subprocess.run([*command, "--prompt", "The river"], capture_output=True, text=True, check=True)
    losses = [float(found) for found in re.findall(r"step +\d+: ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] < 8.5  # a uniform model has 8 bits
    measured = re.findall(r"memory +(\d+): ([\d.]+) bits a byte on ([\d,]+) tokens", done.stdout)
    assert [int(mem_len) for mem_len, _, _ in measured] == [0, 32, 64]
    assert len({n_token for _, _, n_token in measured}) == 1
    assert all(float(bits) < losses[0] for _, bits, _ in measured)
    assert done.stdout.split(" tokens of the test split\n")[-1].strip("\n")  # the generated text


def test_a_model_trained_by_the_example_can_begin_a_text(monkeypatch):
    """A text of a period that only memory can hold: without emptied lanes, the first predictions are confidently wrong."""
    specification = importlib.util.spec_from_file_location("train_example", EXAMPLES / "train.py")
    assert specification is not None
    assert specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    small = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "mem_len": 12}
    config = replace(txl.preset("stdlib-tiny").model, **small)
    period = torch.randint(5, (37,), generator=torch.Generator().manual_seed(7))
    text = period.repeat(100)
    lanes = torch.stack([text[9 * lane : 9 * lane + 12 * 291] for lane in range(8)])
    first = {}
    for probability in (0.0, example.RESET_MEMORY):
        monkeypatch.setattr(example, "RESET_MEMORY", probability)
        torch.manual_seed(1)
        model = txl.build_model(config, 5)
        example.train_model(model, lanes, Namespace(learning_rate=5e-3, segment=12, steps=290))
        begun = torch.stack([text[place : place + 40] for place in range(37)])
        with torch.no_grad():
            nll, _ = model.eval().nll(begun[:, :-1], begun[:, 1:], model.init_state(37))
        assert nll[:, 25:].mean() < 0.3  # with memory both know the period
        first[probability] = nll[:, :3].mean().item()
    assert first[example.RESET_MEMORY] < 0.8 * first[0.0]


def run(name: str, *words: object) -> str:
    """Run an example, and return its output."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


COEFFICIENTS = re.compile(r"^([a-z ]+?) +(-?[\d.]+) ms per [a-z ]+ \[(-?[\d.]+), (-?[\d.]+)\]$", re.MULTILINE)


def test_reading_times_that_were_drawn_are_explained_as_they_were_drawn(trained, story, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(story.read_bytes().splitlines(keepends=True)[:60]))
    printed = run("reading_times.py", trained, text, "--simulate", 12, "--out", tmp_path / "study")
    found = {name: (float(value), float(low), float(high)) for name, value, low, high in COEFFICIENTS.findall(printed)}
    assert list(found) == ["surprisal", "surprisal of the word before", "length", "log frequency"]
    value, low, high = found["surprisal"]
    assert low < 4 < high  # the coefficient that --simulate draws with
    assert low < value < high < 8
    assert (tmp_path / "study" / "reading_times.png").read_bytes().startswith(b"\x89PNG")
    rows = (tmp_path / "study" / "words.tsv").read_text(encoding="utf-8").splitlines()
    assert rows[0] == "word\ttext\tsurprisal"
    assert len(rows) - 1 == len(text.read_text(encoding="utf-8").split()) - 1  # the first word has no surprisal


def test_reading_times_of_a_table_are_read_and_pauses_left_out(trained, story, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(story.read_bytes().splitlines(keepends=True)[:20]))
    times = tmp_path / "times.tsv"
    pause = "7\tada\t99999\n"
    rows = [f"{word}\t{reader}\t{200 + 10 * word % 37}\n" for reader in ("ada", "ben") for word in range(60)]
    times.write_text("word\treader\tmilliseconds\n" + pause + "".join(rows))
    printed = run("reading_times.py", trained, text, "--times", times, "--out", tmp_path / "study")
    assert "116 reading times of 2 readers" in printed  # two readers; no surprisal of the word before for words 0 and 1


@pytest.mark.parametrize(
    ("separator", "encoding", "decimals"), [(",", "utf-8-sig", "."), (";", "utf-8-sig", ","), ("\t", "utf-8", ".")]
)
def test_tables_of_excel_and_r_are_read(separator, encoding, decimals, tmp_path):
    rows = [["reader", "note", "milliseconds", "word"], ["Ada", "a, b; c", f"312{decimals}5", "7"]]
    rows += [["Ben", "", each, "8"] for each in ("NA", "", "NaN")] + [["NA", "", "200", "9"], ["Ben", "", "200", "9.0"]]
    with open(tmp_path / "times.csv", "w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    found = runpy.run_path(str(EXAMPLES / "reading_times.py"))["read_times"](tmp_path / "times.csv")
    assert found.word.tolist() == [7, 9]
    assert found.reader.tolist() == [0, 1]
    assert found.milliseconds.tolist() == [312.5, 200]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            b"word,reader\n1,a\n",
            "no column 'milliseconds' in its first line, 'word,reader'; expected the columns word,",
        ),
        (b"", "no column 'word' in its first line, ''"),
        (b"word,reader,milliseconds\n1,a,200\nx,a,300\n", "times, line 3: invalid literal for int"),
        (b"word,reader,milliseconds\n1,a,fast\n", "times, line 2: could not convert string to float: 'fast'"),
        ("word,reader,milliseconds\n".encode("utf-16"), "times: not a table in UTF-8"),
        (b"word,reader,milliseconds\n1,J\xf6rg,200\n", "times: not a table in UTF-8"),
    ],
)
def test_tables_that_cannot_be_read_are_refused(table, said, tmp_path):
    (tmp_path / "times").write_bytes(table)
    with pytest.raises(txl.UserError, match=re.escape(said)):
        runpy.run_path(str(EXAMPLES / "reading_times.py"))["read_times"](tmp_path / "times")


def test_mistakes_give_one_line(trained, story, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # listens, and then no longer
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    (tmp_path / "log").write_text("a line\n")
    (tmp_path / "times").write_text("word,reader,milliseconds\n" + "100000,a,200\n" * 20)
    cases: list[tuple[tuple[object, ...], str]] = [
        (
            ("reading_times.py", trained, story, "--times", tmp_path / "times", "--out", tmp_path),
            "0 reading times belong",
        ),
        (("reading_times.py", trained, story, "--times", tmp_path / "none"), "No such file or directory"),
        (("train.py", "--corpus", tmp_path / "none.txt"), "none.txt"),
        (("fine_tune.py", tmp_path / "none.pt", "--corpus", tmp_path / "log", "--out", tmp_path / "out"), "none.pt"),
        (("reading_times.py", tmp_path / "none", tmp_path / "log", "--simulate", 2), "none"),
        (("follow_log.py", tmp_path / "none.log", "--once"), "No such file or directory"),
        (("follow_log.py", tmp_path / "log", "--once", "--from-start", "--url", url), "is txl serve running there?"),
    ]
    for words, said in cases:
        assert said in mistake(*words)


def test_another_program_than_the_server_is_named(tmp_path):
    (tmp_path / "log").write_text("a line\n")
    with http.server.HTTPServer(("127.0.0.1", 0), Silent) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        said = mistake("follow_log.py", tmp_path / "log", "--once", "--from-start", "--url", url)
        other.shutdown()
    assert "HTTP Error 404: Not Found; is it txl serve?" in said


class Silent(http.server.BaseHTTPRequestHandler):
    """Server that knows no path."""

    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def mistake(*words: object) -> str:
    """Run an example that must end with exit code 2 and one line, and return the line."""
    command = [sys.executable, str(EXAMPLES / str(words[0])), *map(str, words[1:])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_fine_tuning_an_imported_checkpoint(tmp_path):
    symbols = ["<eos>", "<unk>", *(f"w{number}" for number in range(27))]
    (tmp_path / "vocab.txt").write_text("\n".join(symbols))
    lines = [" ".join(symbols[2 + (line + place) % 27] for place in range(9)) for line in range(600)]
    (tmp_path / "my.txt").write_text("\n".join(lines) + "\n")
    golden = Path(__file__).parent / "interop" / "golden" / "plain.pt"
    words = [golden, "--vocabulary", tmp_path / "vocab.txt", "--corpus", tmp_path / "my.txt", "--out", tmp_path / "out"]
    words += ["--data-dir", tmp_path / "data", "--steps", 150, "--batch-size", 4, "--segment", 8, "--dropout", 0]
    words += ["--learning-rate", 0.02, "--eval-tokens", 200]
    for _ in range(2):  # the second time, the example finds its runs and prints the same
        printed = run("fine_tune.py", *words)
        found = re.search(r"perplexity on \d+ tokens: ([\d.]+) before, ([\d.]+) after", printed)
        assert found is not None, printed
        assert float(found[2]) < len(symbols) < float(found[1])  # worse than guessing before, better after
