"""The examples run as described in their docstrings."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

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
    config = txl.preset("stdlib-tiny").model
    config.n_layer, config.d_model, config.n_head, config.d_head, config.d_inner, config.mem_len = 2, 32, 2, 16, 64, 12
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
