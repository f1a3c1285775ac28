"""Options of the command line: names, help, short forms and completion."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from txl.cli import main
from txl.commands.parser import Parser, build_parser
from txl.config import RunConfig, leaf_fields
from txl.errors import UserError


def test_every_field_of_the_configuration_is_an_option_and_none_goes_away_unnoticed():
    """Users' scripts rely on these option names. Removing one breaks such scripts, so this list must change too."""
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


def parsers(parser: Parser) -> Iterator[Parser]:
    """Yield a parser and those of its commands."""
    yield parser
    for command in parser.commands.values():
        yield from parsers(command)


def test_every_help_begins_with_an_example_and_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    whole = build_parser()
    for each in parsers(whole):
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
    assert listed == list(build_parser().commands)
    train = shown[shown.index("\ntrain:") : shown.index("\nmeasure:")]
    assert re.findall(r"^  (\w+)", train, re.MULTILINE) == ["train", "status", "report"]


def test_the_help_of_training_shows_what_matters_first_and_the_preset_s_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        main(["train", "stdlib-tiny", "--help"])
    shown = capsys.readouterr().out
    titles = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    assert titles[:4] == ["positional arguments", "options", "what matters most", "this run"]
    first = shown[shown.index("what matters most") : shown.index("this run:")]
    expected = (
        "-o --minutes --corpus --unit --n-layer --d-model --mem-len --steps --batch-size --segment --learning-rate"
    )
    assert re.findall(r"^  (-[-\w]+)", first, re.MULTILINE) == expected.split()
    assert re.search(r"--steps N, --train.steps N +updates of the weights \[1000\]", first)
    assert "--model.n_layer" not in shown


def test_short_forms_are_the_same_options():
    short = ["-o", "x", "--corpus", "a.txt", "--unit", "char", "--n-layer", "3", "--steps", "9", "--mem-len", "5"]
    long = ["--out", "x", "--data.corpus", "a.txt", "--data.unit", "char", "--model.n-layer", "3", "--train.steps", "9"]
    parse = build_parser().parse_args
    given, expected = (vars(parse(["train", "ptb", *words])) for words in (short, [*long, "--model.mem-len", "5"]))
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
    assert "train:'train a model, or resume a run'" in script
    assert "enwik8-12L" in script
    assert main(["completion", "csh"]) == 2


def test_the_help_of_import_lists_the_settings_that_a_checkpoint_may_lack(capsys):
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    shown = capsys.readouterr().out
    listed = set(re.findall(r"--model\.([-\w]+)", shown))
    lengths = {"mem-len", "window", "clamp-len"}
    assert listed == lengths | {"pre-norm", "layer-norm-eps", "cutoffs", "div-val", "dropout", "dropatt"}
    for name in ("no-such-field", "n-layer", "family"):  # those of the file, and of no model that is imported
        with pytest.raises(UserError, match=f"unknown option --model.{name}"):
            build_parser().parse_args(["import", "model.pt", "--out", "runs/a", f"--model.{name}", "3"])
