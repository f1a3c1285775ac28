"""Tables on a terminal, in a pipe, and with names that look like markup."""

from __future__ import annotations

import json
import re

import pytest

from txl.cli import main
from txl.commands.output import print_table

MARKED = "a[/b] [bold]text[/]"


@pytest.fixture
def terminal(monkeypatch):
    """Function that imitates a terminal of a given width."""

    def of(width: int) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat any output as a terminal
        monkeypatch.setenv("COLUMNS", str(width))

    return of


def lines(capsys) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]


def test_numbers_are_not_cut_and_text_is_wrapped(terminal, capsys):
    terminal(40)
    rows = [("a model of many words", "5.5124", "1,234,567,890"), ("b", "5.5125", "2")]
    print_table("results", ("model", "nats per token", "tokens read"), rows, text=("model",))
    shown = lines(capsys)
    assert shown[0] == "results"
    assert max(map(len, shown)) <= 40
    assert len(shown) > 5
    assert "5.5124" in "\n".join(shown)
    assert "1,234,567,890" in "\n".join(shown)


def test_a_terminal_that_is_too_narrow_for_the_numbers_gets_them_all_the_same(terminal, capsys):
    terminal(12)
    print_table("results", ("nats", "tokens"), [("5.5124", "1,234,567,890")])
    assert any(re.search(r"5\.5124 +1,234,567,890", line) for line in lines(capsys))


def test_in_a_pipe_a_row_is_a_line(capsys):
    row = ("word " * 60, "1")
    print_table("results", ("text", "number"), [row], text=("text",))
    assert len(lines(capsys)) == 4


def test_nothing_in_a_table_is_markup(capsys):
    print_table(MARKED, ("name", MARKED), [(MARKED, "[red]1[/red]")], text=("name",))
    shown = "\n".join(lines(capsys))
    assert shown.count(MARKED) >= 2
    assert "[red]1[/red]" in shown


def test_presets_fit_a_terminal_the_published_first_and_the_ablations_last(terminal, capsys):
    terminal(80)
    assert main(["presets"]) == 0
    shown = lines(capsys)
    assert max(map(len, shown)) <= 80
    names = [line.split()[0] for line in shown if re.match(r"[a-z0-9]+[\w-]* .*\d/\d", line)]
    assert names[0] == "enwik8-12L"
    kinds = ["ablation" in name for name in names]
    assert kinds == sorted(kinds)
    main(["presets", "--json"])
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["presets"]] == names


def test_a_path_with_brackets_is_a_path(trained, tmp_path, data_dir, capsys):
    text = tmp_path / "a[/b]" / "c[bold].txt"
    text.parent.parent.mkdir(exist_ok=True)
    text.parent.mkdir(parents=True)
    text.write_text("The river rose in the night, and nobody saw it.\n" * 40)
    where = ["--data.corpus", str(text), "--data-dir", str(data_dir), "--batch", "1"]
    assert main(["eval", str(trained), *where]) == 0
    assert str(text) in capsys.readouterr().out.splitlines()[0]


def test_the_cache_and_what_is_without_it_are_told_apart(trained, data_dir, capsys):
    words = ["cache", str(trained), "--size", "50", "--thetas", "0.5", "--lambdas", "0.1", "--data-dir", str(data_dir)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("nats/token") == 1
    assert re.search(r"^ *none +\d", shown, re.MULTILINE)
    assert re.search(r"^ *50 +\d", shown, re.MULTILINE)
    assert "with a continuous cache of 50 tokens, theta 0.5, lambda 0.1" in shown
