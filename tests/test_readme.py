"""What the README says can be copied and pasted: every command and every line of Python in it is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

import txl
from tests.conftest import small_run
from tests.test_cli import options_of
from txl.cli import build_parser, main
from txl.models import build_model

GOLDEN = Path(__file__).parent / "interop" / "golden"
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SMALL = [
    option
    for option in options_of(small_run("my.txt", **{"train.steps": "4"}))
    if not option.startswith(("--data.corpus", "--model.n-layer", "--train.dtype"))
]
PRESETS = (Path(__file__).parent.parent / "docs" / "presets.md").read_text(encoding="utf-8")
PAPERS_OWN = [
    *("enwik8-12L", "enwik8-18L", "enwik8-24L", "text8-24L", "wt103-base", "wt103-large"),
    *("lm1b-base", "lm1b-large", "ptb"),
]
PUBLISHED = [name for name, each in txl.presets().items() if each.source != "this project"] + ["wikitext-2"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    table = re.findall(r"\| `(txl [^`]*)` \|", README)
    return [shlex.split(line, comments=True)[1:] for line in [*lines, *table] if line.startswith("txl ")]


def test_every_command_is_one_that_the_program_knows():
    assert len(commands()) > 12
    for words in commands():
        build_parser().parse_args(words)


@pytest.mark.parametrize(
    "page", sorted((Path(__file__).parent.parent / "docs").glob("*.md")), ids=lambda page: page.name
)
def test_commands_of_the_other_pages_are_ones_that_the_program_knows(page):
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("txl "):
                build_parser().parse_args(shlex.split(line, comments=True)[1:])
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (PRESETS, PUBLISHED),
        (README, PAPERS_OWN),
    ],
    ids=["all", "the paper's own"],
)
def test_the_tables_of_presets_are_true(text, names):
    rows = re.findall(r"^\| `([^`]+)` \| [^|]* \| ([^|]*) \| ([\d,]+) \| `txl train ", text, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == names
    for name, published, parameters in rows:
        each = txl.presets()[name]
        assert published == ("-" if each.published == "none" else each.published), name
        with torch.device("meta"):
            model = build_model(each.make().model, each.vocab_size)
        assert parameters == f"{sum(parameter.numel() for parameter in model.parameters()):,}", name


def test_the_page_of_presets_names_every_one():
    named = re.findall(r"`([\w-]+\*?)`", PRESETS)
    families = tuple(name.removesuffix("*") for name in named if name.endswith("*"))
    assert [name for name in txl.presets() if name not in named and not name.startswith(families)] == []


def test_the_commands_run_in_the_order_of_the_readme(story, tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXL_DATA", str(data_dir))
    for name in ("my.txt", "other.txt"):
        (tmp_path / name).write_bytes(story.read_bytes())
    (tmp_path / "model.pt").write_bytes((GOLDEN / "plain.pt").read_bytes())
    (tmp_path / "vocab.txt").write_text("\n".join(["<eos>", "<unk>", *(f"w{number}" for number in range(27))]))
    ran = set()
    for words in commands():
        if words[0] in ("bench", "demo", "serve") or {"prepare", *PUBLISHED} & set(words):
            continue  # too long for a test, without an end, or a download; their parsing is tested above
        small = SMALL if words[0] == "train" else []
        assert main([*words, *small]) == 0, (words, capsys.readouterr().err)
        ran.add(words[0])
    of_training = {"train", "eval", "generate", "report", "data", "import", "export", "status"}
    assert ran == of_training | {"recl", "score", "attention", "compress", "decompress"}
    assert (tmp_path / "other.back").read_bytes() == (tmp_path / "other.txt").read_bytes()
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
    assert (tmp_path / "runs" / "mine" / "memory-curve.svg").is_file()
    assert (tmp_path / "runs" / "mine" / "surprisal.tsv").read_text(encoding="utf-8").startswith("index\tstart\tend")


def test_the_python_runs(story, tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXL_DATA", str(data_dir))
    (tmp_path / "my.txt").write_bytes(story.read_bytes())
    code = "\n".join(blocks("python"))
    assert '"my.txt", 200' in code
    smaller = "run.train.batch_size, run.train.segment, run.model.mem_len = 4, 8, 8\ntxl.Trainer"
    code = code.replace('"my.txt", 200', '"my.txt", 3').replace("txl.Trainer", smaller)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert 0 < float(printed[0]) < 10


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_what_the_readme_points_to_is_there(target):
    assert (Path(__file__).parent.parent / target).exists(), target


def test_the_demo_goes_all_the_way(tmp_path, data_dir, capsys):
    out = tmp_path / "demo"
    words = ["demo", "--out", str(out), "--data-dir", str(data_dir), "--test-tokens", "3000"]
    small = [option for option in options_of(small_run("stdlib")) if not option.startswith("--data.corpus")]
    assert main([*words, *small]) == 0
    summary = "\n".join(capsys.readouterr().out.splitlines()[-3:])
    for part in ("with memory 16", "without", "zlib", "lzma", str(out / "report.html")):
        assert part in summary
