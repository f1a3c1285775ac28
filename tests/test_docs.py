"""The documentation: generated tables are complete, commands parse, and links lead to files."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

import txl
from txl.commands.parser import build_parser
from txl.config import options

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
specification = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
assert specification is not None
assert specification.loader is not None
conf = importlib.util.module_from_spec(specification)
specification.loader.exec_module(conf)


def of(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_commands_are_ones_that_the_program_knows(page):
    parser = build_parser()
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("txl "):
                assert callable(parser.parse_args(shlex.split(line, comments=True)[1:]).run), line


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "explanation" or page.stem == "architecture"], ids=of
)
def test_functions_and_files_of_the_code_are_where_they_are_said_to_be(page):
    """Check phrases like "`score_terms` in `attention/equations.py`", also with several names joined by "and"."""
    text, package = " ".join(page.read_text(encoding="utf-8").split()), Path(txl.__file__).parent
    for name in re.findall(r"`([\w/]+/\w+\.(?:py|cpp))`", text):
        assert any((home / name).is_file() for home in (package, package.parent, DOCS.parent)), name
    for names, file in re.findall(r"((?:`[\w.]+`(?:, | and )?)+) (?:in|\() ?`([\w/]+\.py)`", text):
        source = (package / file).read_text(encoding="utf-8")
        for name in re.findall(r"(\w+)`", names):
            assert re.search(rf"^\s*(?:def |class |async def )?{name}\b(?:[(:\[]| =)", source, flags=re.MULTILINE), name


def test_the_perplexities_of_fine_tuning_are_those_of_the_record():
    record = json.loads((DOCS.parent / "results" / "fine-tuning.json").read_text(encoding="utf-8"))
    page = (DOCS / "how-to" / "fine-tune.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (not tuned|[\d.e-]+).* \| ([\d.]+) \| ([\d.]+) \|$", page, flags=re.MULTILINE)
    assert [(None if rate == "not tuned" else float(rate), new, old) for rate, new, old in rows] == [
        (row["learning_rate"], f"{row['new']['ppl']:.2f}", f"{row['old']['ppl']:.2f}")
        for row in record["output"]["rows"]
    ]


def test_every_page_is_in_the_table_of_contents():
    listed = re.findall(r"^([\w/-]+)$", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(f"{name}.md" for name in listed) == sorted(of(page) for page in PAGES if page.name != "index.md")


def test_generated_tables_name_everything():
    python, commands, fields, presets = conf.python(), conf.commands(), conf.options(), conf.presets()
    assert sorted(re.findall(r":: txl\.(\w+)$", python, flags=re.MULTILINE)) == sorted(dir(txl))
    names = re.findall(r"^\| `txl\.(\w+)` \| \w", conf.python_names(), flags=re.MULTILINE)
    assert sorted(names) == sorted(dir(txl))
    assert {f"`{name}`" for name in txl.presets()} == set(re.findall(r"^\| (`[\w-]+`)", presets, flags=re.MULTILINE))
    names = {f"--{option.name.replace('_', '-')}" for option in options()}
    assert names == set(re.findall(r"^\| `(--[\w.-]+)`", fields, flags=re.MULTILINE))
    assert set(build_parser().commands) == set(re.findall(r"^## txl ([\w-]+)", commands, flags=re.MULTILINE))


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "reference"], ids=of)
def test_generated_lists_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert text == conf.written(text), "run python docs/conf.py"


def test_lists_replace_what_stands_in_their_place():
    page = "A\n<!-- generated: presets -->\nstand-in\n<!-- end -->\nB\n<!-- generated: changes -->\nstand-in\n<!-- end -->\n"
    written, filled = conf.written(page), conf.filled(page)
    assert ("stdlib-tiny" in written, written.count("stand-in")) == (True, 1)
    assert ("## 0.2.0" in filled, filled.count("stand-in")) == (True, 1)


def test_a_marker_that_nothing_fills_ends_the_build():
    for fill in (conf.filled, conf.written):
        with pytest.raises(KeyError, match="nothing"):
            fill("<!-- generated: nothing -->\n<!-- end -->\n")
