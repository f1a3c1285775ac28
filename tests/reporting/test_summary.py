from pathlib import Path

import pytest
from tests.reporting.fake_run import FakeRun, evaluation, whole_run

from txl.reporting.report import summary_lines, write_report


def test_lines_with_the_numbers_of_the_log(tmp_path):
    run = whole_run(tmp_path / "run")
    events = run.directory.events()
    rows = next(event for event in events if event["event"] == "sweep")["rows"]
    without, result = rows[0]["bits_per_byte"], rows[-1]["bits_per_byte"]
    lines = summary_lines(events, Path("runs/demo/report.html"))
    assert lines == [
        f"stdlib test, 640,400 targets: {result:.3f} bits per byte with memory 256, {without:.3f} without "
        f"(memory: {1 - result / without:.1%} fewer bits)",
        f"the same 640,413 bytes: zlib {8 * 0.264:.3f}, bz2 {8 * 0.241:.3f}, lzma {8 * 0.221:.3f}; unlike these, the model "
        f"has seen training text",
        lines[2],
        "report: runs/demo/report.html",
    ]
    assert lines[2].startswith("1,315,072 parameters, 8,192,000 tokens trained on in float32 at 2")
    assert lines[2].endswith(" tokens/s on Example CPU @ 2.50GHz avx2 avx512f (2 cores)")


def test_what_lzma_needs_behind_the_training_text_stands_beside(tmp_path):
    run = whole_run(tmp_path / "run")
    event = next(event for event in run.directory.events() if event["event"] == "compression")
    fields = {name: value for name, value in event.items() if name not in ("event", "step", "time")}
    run.log("compression", run.steps, **fields, lzma_after_training_text=128_083)
    told = "the model has seen training text (lzma that has seen it too: 1.600)"
    assert summary_lines(run.directory.events())[1].endswith(told)
    page = write_report(run.directory.path).read_text()
    assert "lzma, training text seen" in page
    assert "it sees the last 64 MiB at most, lzma’s file grows by 128,083 bytes" in page


@pytest.mark.parametrize(
    ("unit", "mem_len", "changes", "end"),
    [
        ("byte", 256, {"bits_per_byte": None, "bytes_per_token": None}, "1.443 bpc with memory 256"),
        ("word", 256, {"bits_per_byte": None, "bytes_per_token": None}, "2.718 ppl with memory 256"),
        ("byte", 256, {"temperature": 1.5}, "1.443 bits per byte with memory 256, temperature 1.5"),
        ("byte", 0, {}, "1.443 bits per byte, without memory"),
    ],
)
def test_the_result_says_its_unit_and_its_settings(tmp_path, unit, mem_len, changes, end):
    run = FakeRun(tmp_path / "run", unit=unit)
    run.start()
    run.train(last=20)
    run.log("eval", 4000, **evaluation(1.0, mem_len, unit=unit, **changes))
    assert summary_lines(run.directory.events())[0] == f"stdlib test, 640,400 targets: {end}"


def test_what_is_missing_is_said(tmp_path):
    run = FakeRun(tmp_path / "run")
    assert summary_lines(run.directory.events()) == ["nothing has been trained here yet: run txl train"]
    run.start()
    run.train(last=20)
    lines = summary_lines(run.directory.events())
    assert lines[0] == "no result on the test split yet: run txl eval DIR --mem-lens 0,128,256"
    assert lines[2] == "report: run txl report DIR"
