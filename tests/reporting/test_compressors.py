import bz2
import lzma
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

import pytest
from tests.reporting.html_page import Page

from txl.data.corpora import open_corpus
from txl.errors import UserError
from txl.evaluation.perplexity import evaluate
from txl.reporting import compressors
from txl.reporting.compressors import compress, lzma_after
from txl.reporting.report import write_report
from txl.runs.directory import RunDirectory
from txl.runs.events import EventName


@pytest.fixture(scope="module")
def source() -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:12])


def blocks(text: bytes, size: int):
    return (text[start : start + size] for start in range(0, len(text), size))


@pytest.mark.parametrize("size", [997, 65_536, 10**9])
@pytest.mark.parametrize("limit", [None, 0, 1, 5003, 200_000, 10**9])
def test_sizes_are_those_of_the_whole_text_at_once(source, size, limit):
    found, whole = compress(blocks(source, size), limit), source[:limit]
    assert found["text"] == len(whole)
    assert found["zlib"] == len(zlib.compress(whole, level=9))
    assert found["bz2"] == len(bz2.compress(whole, 9))
    assert found["lzma"] == len(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME))


def test_behind_a_text_lzma_pays_for_what_is_new(source, monkeypatch):
    text = source[-20_000:]
    alone = compress([text])["lzma"]
    assert lzma_after([], text) == pytest.approx(alone, abs=100)
    assert lzma_after(blocks(source, 997), text) < 0.02 * alone  # the source contains the text
    preset = 9 | lzma.PRESET_EXTREME
    grown = len(lzma.compress(source + source[::-1], preset=preset)) - len(lzma.compress(source, preset=preset))
    assert lzma_after(blocks(source, 65_536), source[::-1]) == grown
    # Text further back than the dictionary reaches does not help.
    monkeypatch.setattr(compressors, "_LARGEST_DICTIONARY", 65_536)
    assert lzma_after([text, bytes(60_000)], text) > 0.7 * alone
    assert lzma_after([bytes(60_000), text], text) < 0.02 * alone


def test_reads_no_further_than_the_limit():
    def endless():
        while True:
            yield b"abc" * 1000

    assert compress(endless(), 10_001)["text"] == 10_001


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc to know its own size")
def test_a_short_text_does_not_take_the_memory_of_the_largest_dictionary():
    code = """
import resource
from txl.reporting import compressors
from txl.reporting.compressors import compress, lzma_after
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 64 * 2**20,) * 2)
print(compress((bytes(2**16) for _ in range(100)), 2**20)['text'])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{2**20}\n", "")


@pytest.fixture
def tested(trained, story, data_dir, tmp_path) -> RunDirectory:
    """Run directory of a real model, with an evaluation in its log."""
    directory = RunDirectory(shutil.copytree(trained, tmp_path / "run"))
    model, _ = directory.load()
    corpus = open_corpus(str(story), data_dir=data_dir)
    for mem_len in (0, 16):
        row = evaluate(model, corpus.tokens("test"), segment=8, mem_len=mem_len, batch_size=4).to_dict()
        about = {"split": "test", "corpus": corpus.name, "unit": corpus.unit, "checkpoint": "step-00000012"}
        about["sha256_text"] = corpus.info()["splits"]["test"]["sha256_text"]
        directory.append(EventName.EVAL, 12, **about, **row)
    return directory


def test_compressors_are_measured_on_the_text_that_was_scored_and_only_once(tested, story, data_dir, monkeypatch):
    text = b"".join(open_corpus(str(story), data_dir=data_dir).text_bytes("test"))
    page = Page(write_report(tested.path, data_dir=data_dir).read_text())
    sizes = compress([text])
    assert f"the same {len(text):,} bytes and nothing else: zlib makes {sizes['zlib']:,} bytes" in page.text
    assert f"zlib (level 9) {8 * sizes['zlib'] / len(text):.3f}" in page.text
    event = tested.events()[-1]
    assert (event["event"], event["text"], event["lzma"]) == ("compression", len(text), sizes["lzma"])

    monkeypatch.setattr(compressors, "compress", None)
    assert Page(write_report(tested.path, data_dir=data_dir).read_text()).text == page.text
    assert tested.events()[-1] == event


def test_what_lzma_needs_behind_the_training_text_is_measured_when_asked_for(tested, story, data_dir):
    write_report(tested.path, data_dir=data_dir)
    corpus = open_corpus(str(story), data_dir=data_dir)
    before, text = (b"".join(corpus.text_bytes(split)) for split in ("train", "test"))
    page = Page(write_report(tested.path, data_dir=data_dir, after_training_text=True).read_text())
    grown = lzma_after([before], text)
    assert 0 < grown < compress([text])["lzma"]
    assert f"file grows by {grown:,} bytes" in page.text
    assert tested.events()[-1]["lzma_after_training_text"] == grown
    assert f"file grows by {grown:,} bytes" in Page(write_report(tested.path, data_dir=data_dir).read_text()).text


def test_a_run_that_can_only_be_read_has_its_report_elsewhere(tested, data_dir, tmp_path, monkeypatch):
    def refuse(*arguments, **fields):
        raise UserError("log.jsonl: the log cannot be written (Read-only file system)")

    monkeypatch.setattr(RunDirectory, "append", refuse)
    page = Page(write_report(tested.path, out=tmp_path / "page.html", data_dir=data_dir).read_text())
    assert "zlib (level 9)" in page.text


def test_a_report_prepares_and_downloads_nothing(tested, no_corpora):
    text = Page(write_report(tested.path).read_text()).text
    assert (
        f"zlib, bzip2 and lzma are not shown: the text that was scored is not among the corpora in {no_corpora};"
        in text
    )
    assert list(no_corpora.iterdir()) == []


def test_another_text_in_its_place_is_not_compressed_instead(tested, story, no_corpora):
    changed = story.parent / "changed" / story.name
    changed.parent.mkdir(exist_ok=True)
    changed.write_bytes(story.read_bytes().replace(b"river", b"RIVER"))
    open_corpus(str(changed), data_dir=no_corpora)
    assert "is not among the corpora" in Page(write_report(tested.path).read_text()).text
    open_corpus(str(story), data_dir=no_corpora)
    assert "zlib (level 9)" in Page(write_report(tested.path).read_text()).text


def test_a_damaged_corpus_is_passed_over(tested, story, no_corpora):
    directory = open_corpus(str(story), data_dir=no_corpora).directory
    (directory / "test.tokens").write_bytes(b"")
    assert "is not among the corpora" in Page(write_report(tested.path).read_text()).text
    (directory / "meta.json").write_text("{")
    assert "is not among the corpora" in Page(write_report(tested.path).read_text()).text
