"""Every mistake on the command line prints one clear line and ends with exit code 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import options_of, small_run
from txl.cli import main

HUGE, IN_RANGE = "9" * 20, f"expected a whole number from -{2**53} to {2**53}"


@pytest.fixture
def refused(capsys):
    """Function that runs a command which must be refused, and returns the line of the error."""

    def run(*words: str) -> str:
        code = main(list(words))
        captured = capsys.readouterr()
        assert code == 2, captured
        lines = captured.err.strip().splitlines()
        assert lines[-1].startswith("txl: error: ")
        assert "Traceback" not in captured.err
        assert captured.out == ""
        return lines[-1]

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "runs/mine", "--out", "x"], "runs/mine: neither a preset nor a run directory"),
        (["train", "qqqqqq", "--out", "x"], "unknown preset 'qqqqqq'; txl presets lists them"),
        (["train", "enwik8-12l", "--out", "x"], "unknown preset 'enwik8-12l'; did you mean enwik8-12L"),
        (["train", "x", "--model.n-layr", "3"], "unknown option --model.n-layr; did you mean --model.n-layer? (see"),
        (["train", "x", "--layers", "3"], "unknown option --layers; did you mean --n-layer? (see"),
        (["train", "x", "--train.lr", "3"], "unknown option --train.lr; did you mean --train.learning-rate? (see"),
        (["export", "x"], "-o/--out (see txl export --help)"),
        (["export", "x", "y", "-o", "z"], "unknown argument y (see txl export --help)"),
        (["eval", "x", "-x"], "unknown option -x (see txl eval --help)"),
        (["generate", "x", "--prompt", "a", "hi", "--promt"], "unknown option --promt; did you mean --prompt? (see"),
        (["generate", "x", "--prompt", "-a"], "--prompt"),
        (["export", "x", "-o"], "-o/--out"),
        (["eval", "x", "--json=3"], "--json"),
        (["completion", "fish"], "'fish'"),
        (["train", "stdlib-tiny", "--out", "x", "--model.n-layer", "three"], "--model.n-layer is three; expected a whole"),
        (["train", "stdlib-tiny", "--out", "x", "--model.d-model", "63"], "--model.d-model is 63"),
        (["train", "stdlib-tiny", "--out", "x", "--train.batch-size", "-2"], "--train.batch-size is -2"),
        (["train", "stdlib-tiny", "--out", "x", "--train.learning-rate", "nan"], "--train.learning-rate is nan"),
        (["train", "stdlib-tiny", "--out", "x", "--model.window", "999"], "needs at least 998 positions of memory"),
        (["train", "stdlib-tiny", "--out", "x", "--device", "warp"], "--device: expected cpu, cuda or cuda:1, found 'warp'"),
        (["train", "stdlib-tiny", "--out", "x", "--device", "xla"],
         "--device xla: cannot be used here: this PyTorch has no such device; use --device cpu"),
        (["train", "stdlib-tiny"], "--out: missing"),
        (["train", "--out", "x"], "no preset is named, and --out holds no run"),
        (["fly"], "unknown command 'fly'; expected one of demo, presets, data, train"),
        (["evel", "x"], "unknown command 'evel'; did you mean eval"),
        (["eval", "x", "--dtype", "bfloat61"], "--dtype: invalid choice: 'bfloat61'"),
        (["train", "stdlib-tiny", "--out", "x", "--model.n_layers", "3"],
         "unknown option --model.n-layers; did you mean --model.n-layer? (see"),
        (["train", "stdlib-tiny", "--out", "x", "--epochs", "3"],
         "unknown option --epochs; did you mean --steps? (see"),
        ([], "COMMAND"),
        (["status"], "DIR"),
        (["presets", "extra"], "unknown argument extra"),
        (["data", "info", "stdlibb"], "unknown corpus 'stdlibb', and stdlibb: no such file or folder; did you mean stdlib?"),
        (["data", "prepare", "stdlib", "--unit", "letter"], "--data.unit is letter"),
        (["eval", "no-such-run"], "no-such-run: no such directory"),
        (["generate", "no-such-run"], "--prompt --prompt-file"),
        (["bench", "train", "--steps", "0"], "--steps: expected 1 or more, found '0'"),
        (["bench", "train", "--train.dtype", "bfloat16"], "--train.dtype: has no effect here; use --dtype"),
        (["demo", "--out", "/dev/null"], "--out /dev/null: a file; expected a folder"),
        (["demo", "--out", "x", "--data.corpus", "no-text"], "no-text: no such file or folder"),
        (["demo", "--test-tokens", "0"], "--test-tokens is 0"),
        (["demo", "--test-tokens", "40", "--eval.batch-size", "64"], "--test-tokens is 40"),
        (["train", "stdlib-tiny", "--out", "x", "--device", "meta"], "--device meta: cannot"),
        (["train", "stdlib-tiny", "--out", "x", "--model.layer-norm-eps", "0"],
         "--model.layer-norm-eps is 0.0"),
        (["data", "info", "stdlib", "--unit", "bpe", "--vocab-size", "9" * 12], "--data.vocab-size is 999999999999"),
        (["train", "stdlib-tiny", "--out", "x", "--train.seed", "9" * 30], "--train.seed is '999"),
        (["train", "stdlib-tiny", "--dry-run", "--corpus", "nowhere.txt"], "nowhere.txt: no such file or folder"),
        (["train", "stdlib-tiny", "--dry-run", "--init-from", "nowhere"],
         "--init-from nowhere: no such directory; expected a run directory"),
        (["train", "stdlib-tiny", "--dry-run", "--fork", "--extend"], "--fork and --extend were both given"),
        (["bench", "budget", "stdlib-tiny", "--bytes", "9", "--vocabulary", str(2**53)],
         "out of memory; use a smaller --vocabulary, model, batch, segment or memory"),
        (["bench", "budget", "stdlib-tiny", "--bytes", "99999999", "--vocabulary", "50", "--train.segment", "-5"],
         "train.segment is -5; expected 1 or more"),
        (["train", "stdlib-tiny", "--dry-run", "--model.n-layer", "9" * 12], "expected 1 or more, at most 10000"),
        (["train", "stdlib-tiny", "--out", "x\udcff"], "--out 'x\\udcff': the path is not valid UTF-8"),
        (["import", "nothing", "--out", "x\udcff"], "--out 'x\\udcff': the path is not valid UTF-8"),
        (["eval", "no such run"], "(made by txl train --out 'no such run')"),
    ],
)  # fmt: skip
def test_mistakes_in_the_command(words, expected, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(*words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "FILE", "--out", "x"], "FILE: a file, not a preset; give a text with --data.corpus FILE"),
        (["status", "FILE"], "FILE: a file; expected a run directory"),
        (["status", "LINK"], "LINK: a broken link; expected a run directory"),
        (["train", "stdlib-tiny", "--out", "FILE"], "--out FILE: a file; expected a directory"),
        (["train", "stdlib-tiny", "--out", "LINK"], "--out LINK: a broken link; expected a directory"),
        (["train", "stdlib-tiny", "--out", "x", "--init-from", "FILE"], "--init-from FILE: a file; expected a run"),
        (["import", "x.pt", "--out", "FILE"], "--out FILE: a file; expected a directory"),
        (["data", "info", "FILE", "--data-dir", "FILE"], "--data-dir FILE: a file; expected a folder"),
    ],
)  # fmt: skip
def test_a_file_or_a_broken_link_in_place_of_a_directory(words, expected, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("mine")
    Path("LINK").symlink_to("nothing")
    assert expected in refused(*words)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["FILE", "LINK"]
    assert Path("FILE").read_text() == "mine"
    monkeypatch.setenv("TXL_DATA", "FILE")
    assert "TXL_DATA FILE: a file; expected a folder" in refused("data", "info", "FILE")


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "--mem-lens", f"0,{2**53}"],
        ["eval", "--segment", str(2**53)],
        ["eval", "--cache-size", str(2**32), "--cache-theta", "0.5", "--cache-lambda", "0.1"],
        ["score", "FILE", "--segment", str(2**53), "--mem-len", str(2**53), "--out", "OUT"],
        ["score", "FILE", "--sliding", str(2**53), "--out", "OUT"],
        ["samples", "--seed", str(2**53), "--context", "20", "--max-tokens", "4"],
    ],
)
def test_the_largest_numbers_that_are_taken_can_be_borne(
    words: list[str], trained, data_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TXL_DATA", str(data_dir))
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (tmp_path / "text").write_text("The river rose in the night.\n" * 3)
    places: dict[str, str] = {"FILE": str(tmp_path / "text"), "OUT": str(tmp_path / "out")}
    assert main([words[0], str(run), *(places.get(word, word) for word in words[1:])]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eval", "RUN", "--segment", "0"], "--segment: expected 1 or more"),
        (["eval", "RUN", "--batch", "0"], "--batch: expected 1 or more"),
        (["eval", "RUN", "--mem-len", "4", "--window", "9"], "window 9 needs at least 8"),
        (["report", "RUN", "--out", ""], "-o/--out: expected a path or name, found ''"),
        (["report", "RUN", "--out", "/"], "--out /: a folder; expected the name of another file"),
        (["eval", "RUN", "--mem-len", "many"], "--mem-len: expected a whole number, found 'many'"),
        (["eval", "RUN", "--window", "wide"], "--window: expected a whole number or none, found 'wide'"),
        (["eval", "RUN", "--mem-lens", "1,x"], "--mem-lens: expected whole numbers separated by commas"),
        (["eval", "RUN", "--mem-lens", "1,2", "--window", "3"], "--window is 3; expected none with --mem-lens"),
        (["eval", "RUN", "--checkpoint", "²"], "expected best, latest or the number of a step"),
        (["eval", "RUN", "--mem-lens", "1,2", "--mem-len", "3"], "--mem-lens and --mem-len were both given"),
        (["eval", "RUN", "--split", "dev"], "has no split 'dev'; expected one of train, valid, test"),
        (["eval", "RUN", "--checkpoint", "99"], "checkpoint is 99, but "),
        (["eval", "RUN", "--checkpoint", "99"], " has the steps 8, 12"),
        (["eval", "RUN", "--data.unit", "word"], "--data.unit is word, but this model reads byte tokens"),
        (["eval", "RUN", "--data.min-count", "3"], "--data.min-count is 3, but the model has its vocabulary already"),
        (["eval", "RUN", "--max-tokens", "1"], "--max-tokens is 1"),
        (["generate", "RUN", "--prompt", ""], "the prompt is empty"),
        (["generate", "RUN", "--prompt", "x", "--max-tokens", "0"], "--max-tokens is 0"),
        (["generate", "RUN", "--prompt", "x", "--top-k", "0"], "--top-k is 0"),
        (["generate", "RUN", "--prompt", "x", "--samples", "0"], "--samples is 0"),
        (["generate", "RUN", "--prompt", "x", "--seed", "-1"], "--seed is -1"),
        (["recl", "RUN", "--longest", HUGE], f"--longest: {IN_RANGE}, found '{HUGE}'"),
        (["samples", "RUN", "--mem-len", str(2**53), "--context", "20"], "out of memory"),
        (["generate", "RUN", "--prompt", "x", "--top-k", HUGE], IN_RANGE),
        (["attention", "RUN", "--tokens", HUGE], IN_RANGE),
        (["attention", "RUN", "--heads", f"1:{HUGE}"], IN_RANGE),
        (["eval", "RUN", "--data.max-words", HUGE], "expected a whole number from"),
        (["generate", "RUN", "--prompt-file", "none.txt"], "none.txt: No such file or directory"),
        (["export", "RUN", "--out", "x\udcff"], "--out 'x\\udcff': the path is not valid UTF-8"),
    ],
)  # fmt: skip
def test_mistakes_about_a_run(words, expected, refused, trained, data_dir, monkeypatch):
    monkeypatch.setenv("TXL_DATA", str(data_dir))
    log = (trained / "log.jsonl").read_bytes()
    assert expected in refused(*[str(trained) if word == "RUN" else word for word in words])
    assert (trained / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("name", ["config.json", "vocabulary.json", "log.jsonl", "best", "latest", "checkpoints/x"])
@pytest.mark.parametrize("words", [["report", "RUN"], ["score", "RUN", "TEXT"], ["compress", "TEXT", "--model", "RUN"]])
def test_a_file_of_the_run_is_not_overwritten(words, name, refused, trained, tmp_path):
    (tmp_path / "text").write_text("The river")
    places = {"RUN": str(trained), "TEXT": str(tmp_path / "text")}
    before = {each: each.read_bytes() for each in trained.rglob("*") if each.is_file()}
    error = refused(*(places.get(word, word) for word in words), "--out", f"{trained / name}")
    assert f"--out {trained / name}: a file of the run itself; expected the name of another file" in error
    assert {each: each.read_bytes() for each in trained.rglob("*") if each.is_file()} == before


@pytest.mark.parametrize("words", [["score", "RUN", "TEXT"], ["compress", "TEXT", "--online", "--no-verify"]])
@pytest.mark.parametrize(
    ("out", "reason"),
    [("/dev/full", "No space left on device"), ("n" * 255, "File name too long"), ("/proc/x", "No such file")],
)
def test_an_output_file_that_cannot_be_written_is_named_as_it_was_given(
    words, out, reason, refused, trained, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("The river")
    places = {"RUN": str(trained), "TEXT": "text"}
    error = refused(*(places.get(word, word) for word in words), "--out", out)
    assert f"--out {out}: cannot be written ({reason}" in error
    assert error.endswith("); give another file")
    assert [each.name for each in tmp_path.iterdir()] == ["text"]


def test_a_file_with_the_name_of_an_option_is_not_called_an_option(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "split").touch()
    assert refused("eval", "split") == "txl: error: split: a file; expected a run directory"


def damaged(trained: Path, tmp_path: Path, what: str) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    checkpoint = copy / "checkpoints" / (copy / "best").read_text().strip()
    weights = checkpoint / "model.safetensors"
    config = json.loads((copy / "config.json").read_text())
    changed = {
        "config of the future": {"soul": 1},
        "wrong type": {"model": config["model"] | {"n_layer": "2"}},
        "beyond 64 bits": {"train": config["train"] | {"steps": int(HUGE)}},
        "other heads": {"model": config["model"] | {"n_head": 4, "d_head": 4}},
    }
    written = {
        "config is no JSON": ("config.json", "{"),
        "config is empty": ("config.json", ""),
        "vocabulary": ("vocabulary.json", '{"format": 1, "kind": "char", "characters": ["a"]}'),
        "vocabulary is a list": ("vocabulary.json", "[]"),
        "best is no name": ("best", "garbage\n"),
    }
    if what in changed:
        (copy / "config.json").write_text(json.dumps(config | changed[what]))
    elif what in written:
        name, content = written[what]
        (copy / name).write_text(content)
    elif what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif what == "altered":
        data = bytearray(weights.read_bytes())
        data[-3] ^= 4
        weights.write_bytes(data)
    elif what == "no checkpoints":
        shutil.rmtree(copy / "checkpoints")
    else:
        {"no manifest": checkpoint / "manifest.json", "no vocabulary": copy / "vocabulary.json"}[what].unlink()
    return copy


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("truncated", "model.safetensors: truncated: "),
        ("best is no name", "copy/best: names no checkpoint; choose a step with --checkpoint (8, 12), or restore best"),
        ("altered", "altered"),
        ("no manifest", "manifest.json"),
        ("config is no JSON", "line 1 column 2 (char 1)); restore it from a copy"),
        ("config is empty", "config.json: empty; restore it from a copy"),
        ("config of the future", "soul: not known to this version"),
        ("wrong type", "model.n_layer is '2'; expected a whole number"),
        ("beyond 64 bits", "config.json: not JSON (99999999999999999999 is beyond 64 bits)"),
        ("other heads", "config.json: model.n_head is 4, but step-00000012 was written with 2"),
        ("vocabulary", "vocabulary.json: altered since"),
        ("no vocabulary", "vocabulary.json: missing since"),
        ("vocabulary is a list", "vocabulary.json: not a vocabulary; restore it from a copy"),
        ("no checkpoints", "copy: has no checkpoint; train it with "),
    ],
)
def test_damaged_runs_are_refused(what, expected, refused, trained, tmp_path):
    directory = damaged(trained, tmp_path, what)
    assert expected in refused("generate", str(directory), "--prompt", "The ")


@pytest.mark.parametrize("words", [("generate", "--prompt-file", "-"), ("score", "-"), ("compress", "-", "--out", "x")])
def test_standard_input_that_is_closed(words, refused, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    command, *rest = words
    run = ["--model", str(trained)] if command == "compress" else [str(trained)]
    given = [command, *rest, *run] if command == "compress" else [command, *run, *rest]
    assert "standard input is closed; give a file instead of -" in refused(*given)


def test_mistakes_in_the_text(refused, tmp_path, data_dir):
    def train(text: Path, *more: str) -> str:
        out = tmp_path / "run"
        answer = refused(
            "train", "stdlib-tiny", "--out", str(out), "--data.corpus", str(text), "--data-dir", str(data_dir), *more
        )
        assert not (out / "config.json").exists()
        return answer

    text = tmp_path / "text.txt"
    assert "no such file" in train(text)
    text.touch()
    assert "empty" in train(text)
    text.write_bytes(b"short\n" * 9)
    assert "train split has 48 tokens: 16 lanes of 3, but a segment of 128 needs lanes of 129" in train(text)
    text.write_bytes(b"word " * 9000 + b"\xff")
    assert "not UTF-8 (byte 0xFF at offset 45000, line 1)" in train(text, "--data.unit", "word")
    text.write_bytes(b"word " * 9000 + b"\x00")
    assert "binary (a NUL byte at offset 45000, line 1)" in train(text, "--data.unit", "char")


def test_out_that_cannot_be_used(refused, trained, story, tmp_path, data_dir):
    words = ["train", "stdlib-tiny", "--data-dir", str(data_dir), *options_of(small_run(str(story)))]
    assert "holds a different run: model.n_layer 2 -> 3" in refused(
        *words, "--out", str(trained), "--model.n-layer", "3"
    )
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(*words, "--out", str(tmp_path / "file" / "run"))
    assert "not empty and not a run" in refused(*words, "--out", str(tmp_path))
    assert "--out /proc/run: No such file or directory" in refused(*words, "--out", "/proc/run")
