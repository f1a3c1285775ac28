"""The commands of the command line, and their output."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import txl
from tests.conftest import options_of, small_run
from txl.cli import main
from txl.commands.options import note_lacking
from txl.commands.output import output, print_json
from txl.data.characters import CharVocabulary
from txl.data.corpora import absolute_path
from txl.data.user_text import find_files
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError
from txl.evaluation import perplexity
from txl.runs.directory import RunDirectory


def test_presets_and_their_sizes(capsys):
    assert main(["presets", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["presets"]}
    assert rows["enwik8-12L"]["parameters"] == 41_055_436
    assert rows["enwik8-24L"]["parameters"] == 277_231_820
    assert main(["presets"]) == 0
    assert "stdlib-tiny" in capsys.readouterr().out


def test_a_result_that_the_log_cannot_take_is_printed(trained, data_dir, monkeypatch, capsys):
    def refuse(directory: RunDirectory, *_: object, **__: object) -> None:
        raise UserError(f"{directory.path / 'log.jsonl'}: the log cannot be written (Permission denied)")

    monkeypatch.setattr(RunDirectory, "append", refuse)
    assert main(["eval", str(trained), "--data-dir", str(data_dir)]) == 0
    captured = capsys.readouterr()
    assert "bits/byte" in captured.out
    refusal = f"{trained / 'log.jsonl'}: the log cannot be written (Permission denied)"
    assert captured.err == f"note: {refusal}; the result was not added\n"


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
    (out / "memory-curve.png").unlink()
    (out / "memory-curve.png").mkdir()  # so that it cannot be written
    assert main(["eval", str(out), "--mem-lens", "0,4", *where]) == 0
    assert f"note: {out / 'memory-curve.png'} cannot be written (Is a directory)\n" in capsys.readouterr().err

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
    logged = [event for event in RunDirectory(out).events() if event["event"] == "sample"][-2:]
    assert [(event["seed"], event["text"]) for event in logged] == [(3, samples[0]), (4, samples[1])]
    assert main([*generate[:-1], "4"]) == 0
    assert capsys.readouterr().out == "The " + samples[1] + "\n"

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
    assert "stdlib has the splits train, valid, test; the split all" in capsys.readouterr().err


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


def test_a_text_that_is_interrupted_is_logged(trained, tmp_path, monkeypatch, capsys):
    run = RunDirectory(shutil.copytree(trained, tmp_path / "run"))

    def interrupted(*arguments, **settings):
        yield "The river"
        raise KeyboardInterrupt

    monkeypatch.setattr("txl.generation.text.generate_with", interrupted)
    assert main(["generate", str(run.path), "--prompt", "Once "]) == 130
    assert capsys.readouterr().out == "Once The river"
    assert [(event["event"], event["text"]) for event in run.events()[-1:]] == [("sample", "The river")]


@pytest.mark.parametrize("more", [[], ["--samples", "2"]])
def test_no_compile_means_no_compiled_code(more, trained, monkeypatch, capsys):
    def used():
        raise AssertionError("the compiled library was asked for")

    monkeypatch.setattr("txl.native.build._load", used)
    words = ["generate", str(trained), "--prompt", "The ", "--max-tokens", "3", *more]
    assert main([*words, "--no-compile"]) == 0
    assert "The " in capsys.readouterr().out
    with pytest.raises(AssertionError, match="asked for"):
        main(words)


def test_a_sweep_that_is_interrupted_keeps_what_it_has(trained, tmp_path, data_dir, monkeypatch, capsys):
    run, seen, evaluate = RunDirectory(shutil.copytree(trained, tmp_path / "run")), [], perplexity.evaluate_with

    def interrupted(model, tokens, settings, *more):
        if seen:
            raise KeyboardInterrupt
        seen.append(settings.mem_len)
        return evaluate(model, tokens, settings, *more)

    monkeypatch.setattr(perplexity, "evaluate_with", interrupted)
    words = ["eval", str(run.path), "--data-dir", str(data_dir), "--mem-lens"]
    assert main([*words, "4,8"]) == 130
    assert "stopped after 1 of 2 memory lengths" in capsys.readouterr().err
    assert [row["mem_len"] for row in run.events()[-1]["rows"]] == seen == [4]


def test_text_that_the_terminal_cannot_show_does_not_end_a_command(trained):
    command = [sys.executable, "-m", "txl", "generate", str(trained), "--prompt", "Ω\udcff", "--max-tokens", "5"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=env)
    assert done.returncode == 0
    assert done.stderr.startswith(b"note: 2 characters of the prompt never occurred in the training text")
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


def test_characters_that_standard_output_lacks_are_not_lost(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252", errors="replace"))
    print_json({"text": "日 é"})
    with output(None) as file:
        file.write("本\n")
    sys.stdout.flush()
    lines = written.getvalue().splitlines()
    assert json.loads(lines[0]) == {"text": "日 é"}
    assert lines[1].decode() == "本"


def test_a_path_through_a_link_and_up_again_names_the_file_that_the_system_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/sub")
    (tmp_path / "real" / "a.txt").write_text("the file that link/../a.txt names")
    (tmp_path / "a.txt").write_text("another")
    assert absolute_path("link/../a.txt") == str(tmp_path.resolve() / "real" / "a.txt")
    assert find_files(absolute_path("link/../[a].txt"))[0].samefile(tmp_path / "real" / "a.txt")
    assert absolute_path("real/../a.txt") == str(tmp_path.resolve() / "a.txt")


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
    size = {"data.vocab_size": "280"} if unit == "bpe" else {}
    run = small_run(str(story), **{"data.unit": unit, "train.steps": "2", **size})
    words = ["train", "stdlib-tiny", "--out", str(tmp_path / "run"), "--data-dir", str(data_dir), "--quiet"]
    assert main([*words, *options_of(run)]) == 0
    for shape in ([], ["--json"]):
        assert main(["generate", str(tmp_path / "run"), "--prompt", "ab\udcff", "--max-tokens", "3", *shape]) == 0
    assert "Traceback" not in capsys.readouterr().err


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
    assert "39 targets, each from at most 5 tokens before it" in table
    assert "softmax at temperature 1.7" in table
    assert "sliding window" in table
    assert "memory" not in table
