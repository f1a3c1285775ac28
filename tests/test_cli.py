"""The command line: what it prints, and that every mistake is one clear line with exit code 2."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import txl
from tests.conftest import small_run
from txl.cli import build_parser, main
from txl.commands.options import note_lacking
from txl.config import RunConfig, leaf_fields
from txl.data.corpora import absolute_path
from txl.data.vocabulary import CharVocabulary, WordVocabulary
from txl.errors import UserError
from txl.runs.directory import RunDirectory

HUGE, IN_RANGE = "9" * 20, f"expected a whole number from -{2**53} to {2**53}"


def options_of(run: RunConfig) -> list[str]:
    """A configuration as command-line options."""
    given = []
    for name, _, _, value in leaf_fields(run):
        if name == "name":
            continue
        text = "none" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        given.append(f"--{name.replace('_', '-')}={text}")
    return given


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused, and returns its one line."""

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


def test_presets_and_their_sizes(capsys):
    assert main(["presets", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["presets"]}
    assert rows["enwik8-12L"]["parameters"] == 41_055_436
    assert rows["enwik8-24L"]["parameters"] == 277_231_820
    assert main(["presets"]) == 0
    assert "stdlib-tiny" in capsys.readouterr().out


def test_data_list_and_info(story, data_dir, capsys):
    assert main(["data", "list"]) == 0
    assert "stdlib" in capsys.readouterr().out
    assert main(["data", "info", str(story), "--unit", "char", "--data-dir", str(data_dir), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["unit"] == "char"
    assert info["splits"]["train"]["tokens"] > info["splits"]["test"]["tokens"] > 0
    assert main(["data", "prepare", str(story), "--unit", "word", "--data-dir", str(data_dir)]) == 0
    assert "word tokens, vocabulary of" in capsys.readouterr().out


def test_train_eval_generate_report(story, data_dir, tmp_path, capsys):
    out = tmp_path / "run"
    where = ["--data-dir", str(data_dir)]
    assert main(["train", "stdlib-tiny", "--out", str(out), "--json", *options_of(small_run(str(story))), *where]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 12

    assert main(["eval", str(out), "--json", *where]) == 0
    unset = json.loads(capsys.readouterr().out)
    assert {"nll", "ppl", "bpc", "bits_per_byte", "tokens", "seconds", "tokens_per_second"} <= unset.keys()
    assert (unset["mem_len"], unset["window"], unset["segment"], unset["batch_size"]) == (16, 16, 8, 4)
    assert main(["eval", str(out), "--mem-len", "8", "--segment", "5", "--batch", "1", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["window"] == 8
    assert main(["eval", str(out), "--mem-len", "8", "--window", "none", "--clamp-len", "4", "--json", *where]) == 0
    free = json.loads(capsys.readouterr().out)
    assert (free["window"], free["clamp_len"]) == (None, 4)
    assert main(["eval", str(out), "--exhaustive", "--split", "valid", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == 0

    assert main(["eval", str(out), "--mem-lens", "0,4,16", *where]) == 0
    assert "bits/byte" in capsys.readouterr().out
    assert (out / "memory-curve.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "memory-curve.svg").stat().st_size > 1000

    generate = ["generate", str(out), "--prompt", "The ", "--max-tokens", "20", "--seed", "3"]
    texts = []
    for _ in range(2):
        assert main(generate) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("The ")
    assert main([*generate, "--samples", "2", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert len(samples) == 2
    assert "The " + samples[0] + "\n" == texts[0]

    assert main(["report", str(out), *where]) == 0
    assert capsys.readouterr().out.strip() == str(out / "report.html")
    page = (out / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "zlib" in page


def test_another_text_is_read_in_the_run_s_vocabulary(trained, tmp_path, data_dir, capsys):
    other = tmp_path / "other.txt"
    other.write_text("Quite another text.\n" * 50)
    words = ["eval", str(trained), "--data.corpus", str(other), "--data-dir", str(data_dir), "--batch", "2", "--json"]
    assert main(words) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["corpus"] == str(other)
    assert found["measured"] == f"the last 5% of {other}, 50 of its 1,000 bytes"
    assert "--split all measures everything" in printed.err


def test_another_text_is_prepared_once_and_all_of_it_can_be_measured(story, tmp_path, data_dir, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    config = small_run(str(story), **{"data.unit": "word", "train.steps": "2", "train.eval_every": "0"})
    txl.Trainer(config, run, data_dir=data_dir, quiet=True).fit()
    other.mkdir()
    (other / "a.txt").write_text("The river rose zyxa\n" * 40)
    (other / "b.txt").write_text("Nobody zyxb")
    words = ["eval", str(run), "--data.corpus", str(other), "--data-dir", str(data_dir), "--batch", "1"]
    capsys.readouterr()
    for split in ("test", "all"):
        assert main([*words, "--split", split]) == 0
        printed = capsys.readouterr()
        assert printed.err.count("preparing") == 1
        assert f"measured: {'all' if split == 'all' else 'the last 5%'} of {other}" in printed.out.replace("\n", " ")
    assert main([*words, "--split", "all", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["tokens"] == 40 * 5 + 3 - 1  # with an <eos> for each line, the last one too
    assert found["unknown"] == 40 + 1
    assert found["measured"] == f"all of {other}, 811 bytes"
    assert (found["bytes_per_token"] * 203, printed.err) == (pytest.approx(811), "")


def test_of_a_named_corpus_there_is_no_whole(trained, data_dir, capsys):
    words = ["eval", str(trained), "--data.corpus", "stdlib", "--split", "all", "--data-dir", str(data_dir)]
    assert main(words) == 2
    assert "stdlib is read by its splits, train, valid, test; only a text of your own" in capsys.readouterr().err


def test_a_run_finds_its_text_again_from_another_directory(story, data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TXL_DATA", str(data_dir))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_bytes(story.read_bytes())
    small = [option for option in options_of(small_run("my.txt")) if not option.startswith("--data.corpus")]
    assert main(["train", "stdlib-tiny", "--out", "run", "--data.corpus", "my.txt", "--quiet", *small]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["eval", "../run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["corpus"] == str(tmp_path / "my.txt")


def test_text_that_the_terminal_cannot_show_does_not_end_a_command(trained):
    command = [sys.executable, "-m", "txl", "generate", str(trained), "--prompt", "Ω\udcff", "--max-tokens", "5"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"??")


def test_a_clamp_beyond_all_distances_is_none(trained, data_dir, capsys):
    results = []
    for clamp in ("none", "9" * 15):
        assert main(["eval", str(trained), "--clamp-len", clamp, "--data-dir", str(data_dir), "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out)["nll"])
    assert results[0] == results[1]


def test_what_there_is_to_say_does_not_land_in_generated_text(trained, tmp_path):
    command = [sys.executable, "-u", "-m", "txl", "generate", str(trained), "--prompt", "The ", "--max-tokens", "9"]
    env = os.environ | {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=True)
    note, text = done.stdout.split("\n", 1)
    assert "CXX is 'no-such-compiler'" in note
    assert text.startswith("The ")


def test_a_note_about_the_warm_up_comes_where_it_matters(story, data_dir, tmp_path, capsys):
    words = ["train", "stdlib-tiny", "--out", str(tmp_path / "run"), *options_of(small_run(str(story)))]
    words += ["--train.warmup-steps=99", "--data-dir", str(data_dir)]
    assert main([*words, "--data.corpus", str(tmp_path / "missing.txt")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(words) == 0
    assert "note: the warm-up of 99 steps is not over when training ends" in capsys.readouterr().err


def test_a_drawn_seed_is_told(trained, capsys):
    words = ["generate", str(trained), "--prompt", "The ", "--max-tokens", "9", "--json"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*words, "--seed", str(first["seed"])]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == first["samples"]


@pytest.mark.parametrize(("given", "kept"), [("ptb", True), ("stdlib", True), ("./ptb", False), ("other", False)])
def test_a_known_corpus_is_not_a_folder_of_the_same_name(given, kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("ptb", "stdlib", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("a text\n" * 9)
    expected = given if kept else str(tmp_path / Path(given))
    assert absolute_path(given) == expected


def test_dry_run_shows_the_configuration_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "enwik8-12L", "--dry-run", "--model.mem-len", "99", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["model"]["mem_len"] == 99
    assert shown["tokens_per_step"] == 22 * 512
    assert shown["total_parameters"] == sum(shown["parameters"].values()) == 41_055_436 + 52 * 513
    assert main(["train", "enwik8-12L", "--dry-run"]) == 0
    assert "model.n_layer              12" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("wt103-base", 151_107_538), ("lm1b-base", 357_812_099), ("ptb", 24_038_120), ("text8-12L", 40_964_635)],
)
def test_dry_run_of_a_public_corpus_needs_no_corpus(preset, parameters, tmp_path, capsys):
    assert main(["train", preset, "--dry-run", "--json", "--data-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["total_parameters"] == parameters
    assert list(tmp_path.iterdir()) == []


def test_every_field_of_the_configuration_is_an_option_and_none_goes_away_unnoticed():
    """Users' scripts rely on these names: removing one is a change of the contract, and has to be made here too."""
    promised = (
        "n_layer d_model n_head d_head d_inner d_embed mem_len window clamp_len dropout dropatt dropout_r pre_norm "
        "untie_r cutoffs div_val attention"
    ).split()
    names = {name for name, _, _, _ in leaf_fields(RunConfig())}
    assert {f"model.{name}" for name in promised} <= names
    assert {
        f"train.{n}" for n in "steps batch_size segment learning_rate warmup_steps seed checkpoint_every".split()
    } <= names
    parsed = build_parser().parse_args(["train", "stdlib-tiny", "--model.mem_len", "3", "--train.batch-size=2"])
    assert (vars(parsed)["model.mem_len"], vars(parsed)["train.batch_size"]) == ("3", "2")


def parsers(parser: Any = None) -> Iterator[Any]:
    """Yields the parsers of all commands, those of `txl data` and `txl bench` too."""
    parser = build_parser() if parser is None else parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield each
                yield from parsers(each)


def test_every_help_begins_with_an_example_and_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    whole = build_parser()
    for each in [whole, *parsers(whole)]:
        shown = each.format_help()
        example = shown.splitlines()[0].removeprefix("example: ")
        words = shlex.split(example.removeprefix('eval "$(').removesuffix(')"'))
        assert words[: len(each.prog.split())] == each.prog.split()
        whole.parse_args(words[1:])
        lines = shown.splitlines()
        assert lines[1].startswith(f"usage: {each.prog}")
        assert max(map(len, lines)) <= 80, max(lines, key=len)
        assert "==SUPPRESS==" not in shown


def test_the_help_groups_commands_by_task(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    listed = re.findall(r"^  ([a-z]\w+)  ", shown, re.MULTILINE)
    assert sorted(listed) == sorted(each.prog.split()[1] for each in parsers() if each.prog.count(" ") == 1)
    train = shown[shown.index("\ntrain:") : shown.index("\nmeasure:")]
    assert re.findall(r"^  (\w+)", train, re.MULTILINE) == ["train", "status", "report"]


def test_the_help_of_training_shows_what_matters_first_and_the_preset_s_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        main(["train", "stdlib-tiny", "--help"])
    shown = capsys.readouterr().out
    titles = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    assert titles[:3] == ["arguments", "what matters most", "this run"]
    first = shown[shown.index("what matters most") : shown.index("this run:")]
    assert re.findall(r"^  (-[-\w]+)", first, re.MULTILINE) == [
        *(
            "-o",
            "--minutes",
            "--corpus",
            "--unit",
            "--n-layer",
            "--d-model",
            "--mem-len",
            "--steps",
            "--batch-size",
            "--segment",
        ),
        "--learning-rate",
    ]
    assert re.search(r"--steps, --train.steps N +updates of the weights \[1000\]", first)
    assert "--model.n_layer" not in shown


def test_short_forms_are_the_same_options():
    short = ["-o", "x", "--corpus", "a.txt", "--unit", "char", "--n-layer", "3", "--steps", "9", "--mem-len", "5"]
    long = ["--out", "x", "--data.corpus", "a.txt", "--data.unit", "char", "--model.n-layer", "3", "--train.steps", "9"]
    parse = build_parser().parse_args
    given, expected = (
        {name: value for name, value in vars(parse(["train", "ptb", *words])).items() if name != "parse"}
        for words in (short, [*long, "--model.mem-len", "5"])
    )
    assert given == expected
    assert vars(parse(["eval", "x", "--corpus", "a.txt"]))["data.corpus"] == "a.txt"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_a_shell_completes_commands_options_presets_and_files(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "txl.bash").write_text(capsys.readouterr().out)
    (tmp_path / "runs").mkdir()
    lines = [
        "ev",
        "train stdlib-t",
        "train ptb --data.u",
        "train ptb --unit b",
        "eval ru",
        "data inf",
        "train ptb -o ru",
    ]
    script = "source txl.bash; found=$(complete -p txl); found=${found##*-F }; function=${found%% *}\n"
    for line in lines:
        words = ["txl", *line.split(" ")]
        script += f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=(); $function; "
        script += 'echo "${COMPREPLY[*]}"\n'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["eval", "stdlib-tiny", "--data.unit", "byte bpe", "runs", "info", "runs"]


def test_completion_for_zsh_names_what_a_command_does(capsys):
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef txl")
    assert "train:'train a model, or go on with a run that was stopped'" in script
    assert "enwik8-12L" in script
    assert main(["completion", "csh"]) == 2


def test_python_m_txl_is_the_same_command():
    for words in (["--version"], ["--help"], ["train", "--help"]):
        done = subprocess.run([sys.executable, "-m", "txl", *words], capture_output=True, text=True, check=True)
        assert "txl" in done.stdout


def test_what_needs_no_torch_does_not_load_it(trained, tmp_path):
    """Importing it takes seconds; one process for all, which names the first command that did."""
    no_torch = [
        ["--help"], ["--version"], ["presets"], ["presets", "--json"], ["data", "list"], ["data", "--help"],
        ["status", str(trained)], ["status", "no-run"], ["evel"], ["train", "--help"], ["train", "stdlib-tinny"],
        ["train", "stdlib-tiny"], ["train", "stdlib-tiny", "--out", "x", "--model.n-layer", "0"],
        ["train", "stdlib-tiny", "--out", "x", "--train.steps", "many"],
        ["train", "stdlib-tiny", "--out", "x", "--data.corpus", "no-text"],
        ["train", "stdlib-tiny", "--out", "x", "--init-from", "no-run"],
        ["train", "stdlib-tiny", "--out", "x", "--fork"],
        *([name, "no-run"] for name in ("eval", "cache", "recl", "attention", "samples", "report")),
        ["score", "no-run", "text"], ["export", "no-run", "--out", "x"], ["generate", "no-run", "--prompt", "a"],
        ["generate", str(trained), "--prompt", "a", "--top-p", "7"], ["samples", str(trained), "--temperature", "-1"],
        ["eval", str(trained), "--checkpoint", "77"], ["eval", str(trained), "--data.corpus", "no-text"],
        ["cache", str(trained), "--tune-on", "test"], ["data", "info", "no-text"], ["reproduce", "table99"],
        ["bench", "train", "--steps", "0"], ["bench", "table9", "--lengths", "0"], ["bench", "budget", "stdlib-tiny"],
    ]  # fmt: skip
    code = """
import json, sys, txl, txl.cli
txl.presets(), txl.preset("ptb")
for words in json.loads(sys.argv[1]):
    try:
        txl.cli.main(words)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, words
"""
    command = [sys.executable, "-c", code, json.dumps(no_torch)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


INTERRUPTED_IMPORT = """
import os, signal, sys, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
except BaseException:
    pass  # as C extensions do, whose import asks for a module that may be missing
sys.exit(7)
"""


def command_with(module: str, folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `python -m txl` where importing a module sends the process SIGINT, swallows what comes, and exits with 7."""
    (folder / f"{module}.py").write_text(INTERRUPTED_IMPORT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "txl", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, **options)


@pytest.mark.parametrize("module", ["difflib", "torch"])  # of the command line itself, and of the command
def test_ctrl_c_while_modules_are_imported_ends_the_command_quietly(module, tmp_path):
    done = command_with(module, tmp_path, "train", "stdlib-tiny", "--out", "x")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "txl: interrupted\n")


def test_a_background_job_goes_on_ignoring_ctrl_c(tmp_path):
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    done = command_with("torch", tmp_path, "train", "stdlib-tiny", "--out", "x", **ignore)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.0])
def test_ctrl_c_at_any_moment_of_a_start(seconds, tmp_path):
    code = "import runpy, sys; print(flush=True); sys.argv = ['txl', *sys.argv[1:]]; runpy.run_module('txl', run_name='__main__')"
    words = ["train", "stdlib-tiny", "--out", "x", "--train.steps", "99999", "--data-dir", "data"]
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()  # from here on it is our code that runs
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "Error" not in said


def test_ctrl_c_while_a_command_waits(trained):
    command = [sys.executable, "-m", "txl", "generate", str(trained), "--prompt-file", "-"]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(1.5)  # it reads
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr is not None
        assert process.stderr.read() == "txl: interrupted\n"


def test_a_reader_that_leaves_early_is_no_error(trained):
    command = f"{sys.executable} -m txl generate {trained} --prompt The --max-tokens 3000 --seed 1 | head -c 20"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "enwik8-12l", "--out", "x"], "unknown preset 'enwik8-12l'; did you mean enwik8-12L"),
        (["train", "stdlib-tiny", "--out", "x", "--model.n-layr", "3"], "unknown option --model.n-layr; did you mean"),
        (["train", "stdlib-tiny", "--out", "x", "--model.n-layer", "three"], "--model.n-layer is 'three'; expected a whole"),
        (["train", "stdlib-tiny", "--out", "x", "--model.window", "wide"], "is 'wide'; expected a whole number"),
        (["train", "stdlib-tiny", "--out", "x", "--data.unit", "letter"], "expected one of byte, char, word, bpe"),
        (["train", "stdlib-tiny", "--out", "x", "--model.d-model", "63"], "model.d_model is 63; expected an even number"),
        (["train", "stdlib-tiny", "--out", "x", "--train.steps", "0"], "train.steps is 0; expected 1 or more"),
        (["train", "stdlib-tiny", "--out", "x", "--train.batch-size", "-2"], "train.batch_size is -2"),
        (["train", "stdlib-tiny", "--out", "x", "--train.learning-rate", "nan"], "train.learning_rate is nan"),
        (["train", "stdlib-tiny", "--out", "x", "--train.micro-batches", "3"], "expected a divisor of train.batch_size"),
        (["train", "stdlib-tiny", "--out", "x", "--model.window", "999"], "needs at least 998 positions of memory"),
        (["train", "stdlib-tiny", "--out", "x", "--device", "warp"], "--device warp cannot be used here"),
        (["train", "stdlib-tiny"], "--out is missing"),
        (["train"], "no preset is named, and --out holds no run"),
        (["fly"], "unknown command 'fly'; expected one of demo, presets, data, train"),
        (["evel", "x"], "unknown command 'evel'; did you mean eval"),
        (["data", "lst"], "unknown command 'lst'; did you mean list?"),
        (["eval", "x", "--dtype", "bfloat61"], "--dtype is 'bfloat61'; did you mean bfloat16 or"),
        (["train", "stdlib-tiny", "--out", "x", "--model.n_layers", "3"],
         "unknown option --model.n_layers; did you mean --model.n-layer or --model."),
        ([], "missing: COMMAND"),
        (["status"], "missing: DIR"),
        (["presets", "extra"], "unknown argument extra"),
        (["data", "info", "stdlibb"], "unknown corpus 'stdlibb', and stdlibb: no such file or folder; did you mean stdlib?"),
        (["data", "info", "no/such/file.txt"], "no/such/file.txt: no such file or folder"),
        (["data", "prepare", "stdlib", "--unit", "letter"], "--unit is 'letter'"),
        (["eval", "no-such-run"], "no-such-run: no such directory"),
        (["generate", "no-such-run", "--prompt", "x"], "no-such-run: no such directory"),
        (["generate", "no-such-run"], "missing: one of --prompt --prompt-file"),
        (["report", "no-such-run"], "no-such-run: no such directory"),
        (["bench", "train", "--steps", "0"], "--steps is 0"),
        (["bench", "train", "--train.dtype", "bfloat16"], "--train.dtype does nothing here; use --dtype"),
        (["demo", "--test-tokens", "0"], "--test-tokens is 0"),
        (["train", "stdlib-tiny", "--out", "x", "--device", "meta"], "--device meta cannot be used here"),
        (["train", "stdlib-tiny", "--out", "x", "--train.seed", "9" * 30], "--train.seed is '999"),
        (["train", "stdlib-tiny", "--out", "x", "--train.learning-rate", "inf"], "learning_rate is inf"),
        (["train", "stdlib-tiny", "--dry-run", "--train.steps", "9" * 23], "expected a whole number from -9007199254740992"),
        (["train", "stdlib-tiny", "--dry-run", "--model.cutoffs", f"5,{2**53 + 1}"], "to 9007199254740992"),
        (["bench", "budget", "enwik8-12L", "--bytes", "9", "--vocabulary", HUGE], IN_RANGE),
        (["bench", "budget", "stdlib-tiny", "--bytes", "9", "--vocabulary", str(2**53)], "out of memory"),
        (["bench", "budget", "stdlib-tiny", "--bytes", "99999999", "--vocabulary", "50", "--train.segment", "-5"],
         "train.segment is -5; expected 1 or more"),
        (["bench", "table9", "--lengths", f"8,{HUGE}"], IN_RANGE),
        (["train", "stdlib-tiny", "--dry-run", "--model.n-layer", "9" * 12], "expected 1 or more, at most 10000"),
    ],
)  # fmt: skip
def test_mistakes_in_the_command(words, expected, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(*words)
    assert list(tmp_path.iterdir()) == []


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
        (["eval", "RUN", "--mem-len", "-1"], "mem_len is -1"),
        (["eval", "RUN", "--segment", "0"], "segment is 0"),
        (["eval", "RUN", "--batch", "0"], "batch is 0"),
        (["eval", "RUN", "--mem-len", "4", "--window", "9"], "window 9 needs at least 8"),
        (["eval", "RUN", "--mem-len", "many"], "--mem-len is 'many'; expected a whole number"),
        (["eval", "RUN", "--window", "wide"], "--window is 'wide'; expected a whole number or none"),
        (["eval", "RUN", "--mem-lens", "1,x"], "--mem-lens is '1,x'; expected whole numbers separated by commas"),
        (["eval", "RUN", "--mem-lens", "1,2", "--window", "3"], "--window with --mem-lens can only be none"),
        (["eval", "RUN", "--checkpoint", "²"], "expected best, latest or the number of a step"),
        (["eval", "RUN", "--mem-lens", "1,2", "--mem-len", "3"], "--mem-len and --mem-lens were both given"),
        (["eval", "RUN", "--split", "dev"], "has no split 'dev'; expected one of train, valid, test"),
        (["eval", "RUN", "--checkpoint", "99"], "no checkpoint 99; there: step-00000008, step-00000012"),
        (["eval", "RUN", "--checkpoint", "first"], "expected best, latest or the number of a step"),
        (["eval", "RUN", "--data.unit", "word"], "--data.unit is word, but this model reads byte tokens"),
        (["eval", "RUN", "--max-tokens", "1"], "max_tokens is 1"),
        (["generate", "RUN", "--prompt", ""], "the prompt is empty"),
        (["generate", "RUN", "--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "RUN", "--prompt", "x", "--max-tokens", "-5"], "max_tokens is -5"),
        (["generate", "RUN", "--prompt", "x", "--top-k", "0"], "top_k is 0"),
        (["generate", "RUN", "--prompt", "x", "--samples", "0"], "samples is 0"),
        (["generate", "RUN", "--prompt", "x", "--seed", "-1"], "--seed is -1"),
        (["recl", "RUN", "--longest", HUGE], f"--longest is '{HUGE}'; {IN_RANGE}"),
        (["score", "RUN", "-", "--segment", HUGE], IN_RANGE),
        (["score", "RUN", "-", "--sliding", f"-{HUGE}"], IN_RANGE),
        (["samples", "RUN", "--seed", HUGE], IN_RANGE),
        (["samples", "RUN", "--mem-len", HUGE], IN_RANGE),
        (["samples", "RUN", "--mem-len", str(2**53), "--context", "20"], "out of memory"),
        (["generate", "RUN", "--prompt", "x", "--top-k", HUGE], IN_RANGE),
        (["attention", "RUN", "--tokens", HUGE], IN_RANGE),
        (["attention", "RUN", "--heads", f"1:{HUGE}"], IN_RANGE),
        (["eval", "RUN", "--window", HUGE], IN_RANGE),
        (["eval", "RUN", "--cache-size", HUGE], IN_RANGE),
        (["cache", "RUN", "--size", HUGE], IN_RANGE),
        (["eval", "RUN", "--data.max-words", HUGE], "expected a whole number from"),
        (["generate", "RUN", "--prompt-file", "none.txt"], "none.txt: No such file or directory"),
    ],
)  # fmt: skip
def test_mistakes_about_a_run(words, expected, refused, trained, data_dir, monkeypatch):
    monkeypatch.setenv("TXL_DATA", str(data_dir))
    log = (trained / "log.jsonl").read_bytes()
    assert expected in refused(*[str(trained) if word == "RUN" else word for word in words])
    assert (trained / "log.jsonl").read_bytes() == log


def damaged(trained: Path, tmp_path: Path, what: str) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    checkpoint = copy / "checkpoints" / (copy / "best").read_text().strip()
    weights = checkpoint / "model.safetensors"
    config = json.loads((copy / "config.json").read_text())
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif what == "altered":
        content = bytearray(weights.read_bytes())
        content[-3] ^= 4
        weights.write_bytes(content)
    elif what == "no manifest":
        (checkpoint / "manifest.json").unlink()
    elif what == "config is no JSON":
        (copy / "config.json").write_text("{")
    elif what == "config of the future":
        (copy / "config.json").write_text(json.dumps(config | {"soul": 1}))
    elif what == "wrong type":
        config["model"]["n_layer"] = "2"
        (copy / "config.json").write_text(json.dumps(config))
    elif what == "beyond 64 bits":
        config["train"]["steps"] = int(HUGE)
        (copy / "config.json").write_text(json.dumps(config))
    elif what == "other heads":
        config["model"] |= {"n_head": 4, "d_head": 4}
        (copy / "config.json").write_text(json.dumps(config))
    elif what == "vocabulary":
        (copy / "vocabulary.json").write_text('{"format": 1, "kind": "char", "characters": ["a"]}')
    elif what == "no checkpoints":
        shutil.rmtree(copy / "checkpoints")
    return copy


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("truncated", "truncated"),
        ("altered", "altered"),
        ("no manifest", "manifest.json"),
        ("config is no JSON", "config.json: not JSON"),
        ("config of the future", "soul is not known to this version"),
        ("wrong type", "model.n_layer is '2'; expected a whole number"),
        ("beyond 64 bits", "train.steps is 99999999999999999999; expected a whole number from"),
        ("other heads", "config.json: model.n_head is 4, but step-00000012 was written with 2"),
        ("vocabulary", "vocabulary.json: altered: its sha256"),
        ("no checkpoints", "no checkpoint best or latest"),
    ],
)
def test_damaged_runs_are_refused(what, expected, refused, trained, tmp_path):
    directory = damaged(trained, tmp_path, what)
    assert expected in refused("generate", str(directory), "--prompt", "The ")


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
    assert "not UTF-8 (byte 0xFF at offset 45000)" in train(text, "--data.unit", "word")
    text.write_bytes(b"word " * 9000 + b"\x00")
    assert "binary (a NUL byte at offset 45000)" in train(text, "--data.unit", "char")


def test_out_that_cannot_be_used(refused, trained, story, tmp_path, data_dir):
    words = ["train", "stdlib-tiny", "--data-dir", str(data_dir), *options_of(small_run(str(story)))]
    assert "holds a different run: model.n_layer 2 -> 3" in refused(
        *words, "--out", str(trained), "--model.n-layer", "3"
    )
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(*words, "--out", str(tmp_path / "file" / "run"))
    assert "not empty and not a run" in refused(*words, "--out", str(tmp_path))
    assert "--out /proc/run: No such file or directory" in refused(*words, "--out", "/proc/run")


def test_a_prompt_with_unknown_characters_or_words_is_read_with_a_note(story, data_dir, tmp_path, capsys):
    run = small_run(str(story), **{"data.unit": "char", "train.steps": "2"})
    words = ["train", "stdlib-tiny", "--out", str(tmp_path / "run"), "--data-dir", str(data_dir), "--quiet"]
    assert main([*words, *options_of(run)]) == 0
    assert main(["generate", str(tmp_path / "run"), "--prompt", "The ΩΩ", "--max-tokens", "3"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "note: the vocabulary lacks 'Ω' (U+03A9); read as <unk>\n"
    assert shown.out.startswith("The ΩΩ")
    vocabulary = WordVocabulary(["<S>", "the", "<UNK>"], eos="<S>", unk="<UNK>", boundary="end")
    note_lacking(vocabulary, "the flood")
    assert capsys.readouterr().err == "note: the vocabulary lacks flood; read as <unk>\n"
    note_lacking(CharVocabulary("x"), "abcdefghijklm")
    assert capsys.readouterr().err.endswith("'h' (U+0068) and 5 more; read as <unk>\n")


@pytest.mark.parametrize("unit", ["byte", "char", "word", "bpe"])
def test_a_prompt_may_hold_an_undecodable_byte(unit, story, data_dir, tmp_path, capsys):
    run = small_run(str(story), **{"data.unit": unit, "data.vocab_size": "280", "train.steps": "2"})
    words = ["train", "stdlib-tiny", "--out", str(tmp_path / "run"), "--data-dir", str(data_dir), "--quiet"]
    assert main([*words, *options_of(run)]) == 0
    for shape in ([], ["--json"]):
        assert main(["generate", str(tmp_path / "run"), "--prompt", "ab\udcff", "--max-tokens", "3", *shape]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["char", "word", "bpe"])
def test_a_run_of_before_goes_on_with_the_text_as_it_read_it(unit, story, data_dir, tmp_path, capsys):
    """Its config.json has no rule of words and `min_count` 1; the same command finds the same text."""
    (tmp_path / "story.txt").write_bytes(b"\xef\xbb\xbf" + story.read_bytes().replace(b"\n", b"\r\n"))
    given = {"data.unit": unit, "data.vocab_size": "280", "train.steps": "4"}
    as_before = {"data.normalise": "false", "data.min_count": "1"} | (
        {"data.word_rule": "whitespace"} if unit == "word" else {}
    )
    run = small_run(str(tmp_path / "story.txt"), **given)
    out, data = tmp_path / "run", tmp_path / "data"
    txl.Trainer(small_run(str(tmp_path / "story.txt"), **given | as_before), out, data_dir=data, quiet=True).fit()
    values = json.loads((out / "config.json").read_text())
    del values["data"]["word_rule"], values["data"]["normalise"]
    assert values["data"]["min_count"] == 1
    (out / "config.json").write_text(json.dumps(values))
    assert json.loads((out / "vocabulary.json").read_text())["format"] == 1
    assert main(["eval", str(out), "--json", "--data-dir", str(data)]) == 0
    before = json.loads(capsys.readouterr().out)
    txl.Trainer(run, out, data_dir=data, quiet=True).fit()
    assert len(list(data.iterdir())) == 1  # nothing was prepared anew
    stored = RunDirectory(out).config().data
    assert (stored.word_rule, stored.normalise) == ("whitespace" if unit == "word" else None, False)
    assert main(["eval", str(out), "--json", "--data-dir", str(data)]) == 0
    assert json.loads(capsys.readouterr().out)["nll"] == before["nll"]
    with pytest.raises(UserError, match=r"data\.normalise false -> true"):
        txl.Trainer(
            small_run(str(tmp_path / "story.txt"), **given, **{"data.normalise": "true"}), out, data_dir=data
        ).fit()


def test_a_sliding_window_has_the_run_s_temperature_and_says_what_it_is(trained, data_dir, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["eval"]["temperature"] = 1.7
    (run / "config.json").write_text(json.dumps(config))
    words = ["eval", str(run), "--sliding", "5", "--max-tokens", "40", "--data-dir", str(data_dir)]
    assert main([*words, "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["temperature"] == 1.7
    assert main([*words, "--temperature", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nll"] != own["nll"]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "39 targets, each from the 5 tokens before it alone" in table
    assert "softmax at temperature 1.7" in table
    assert "sliding window" in table
    assert "memory" not in table
