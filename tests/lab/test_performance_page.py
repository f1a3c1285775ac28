"""`docs/explanation/performance.md` agrees with the records in `results/`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("benchmarks", reason="needs benchmarks/, which only the repository contains")
from benchmarks import performance_page

ROOT = Path(__file__).parents[2]
HEADER = {
    "hardware": {"cpu": "a processor", "cores": 2, "threads": 2},
    "software": {"torch": "2.13.0"},
    "commit": "0123456789abcdef",
    "date": "2026-11-21",
}


def test_the_page_is_what_the_records_give():
    wrong = performance_page.check_page(ROOT / "results", ROOT / "docs" / "explanation")
    assert not wrong, "run python -m benchmarks.performance_page"


def results_with(folder: Path, **outputs) -> Path:
    folder.mkdir(exist_ok=True)
    for name, output in outputs.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(HEADER | {"output": output}))
    return folder


def scaling_output():
    def row(axis, value, seconds, operations):
        timed = {"seconds": seconds, "operations": operations}
        return {"axis": axis, "value": value, "training step": timed, "evaluation": timed}

    return {
        "shape": "a shape",
        "base": {"segment": 128, "memory": 128, "layers": 2, "batch": 2, "vocabulary": 204},
        "roofline": {
            "matmul_rate": {"float32": {"128": 5e10, "2048": 2e11}, "bfloat16": {"128": 6e10, "2048": 4e11}},
            "bandwidth": 4e10,
        },
        "workloads": [
            {"name": "one-token step", "operations": 10**8, "bytes_read_once": 2 * 10**8, "seconds": 0.01},
            {"name": "training step", "operations": 10**11, "bytes_read_once": 10**8, "seconds": 1.0},
        ],
        "axes": {axis: [row(axis, 128, 0.5, 10), row(axis, 256, 1.25, 20)] for axis in ("segment", "memory")},
    }


def test_numbers_are_those_of_the_records(tmp_path):
    ratios = dict.fromkeys(("shifted", "shifted, bfloat16", "compiled", "compiled, bfloat16"), 2.0) | {"compiled": 4.0}
    sizes = {"peer": 2**30} | {way: int(2**30 / ratio) for way, ratio in ratios.items()}
    memory = {"rows": [{"length": 64, "peak_bytes": sizes, "ratio": ratios}], "shape": "s", "n_layer": 4}
    results = results_with(
        tmp_path / "results", scaling=scaling_output(), training_memory=memory | {"batch_size": 2, "peer": "theirs"}
    )
    docs = tmp_path / "docs"
    docs.mkdir()
    performance_page.write_page(results, docs)
    text = (docs / "performance.md").read_text()
    # One-token step: 0.5 operations a byte at 40 GB/s allow 20 GFLOP/s, and the step reaches 10. Training step: its
    # 100 GFLOP/s are half of the matrix rate.
    assert "| one-token step | 0.5 | 10.0 | reading | 0.50 |" in text
    assert "| training step | 1,000.0 | 100.0 | arithmetic | 0.50 |" in text
    assert "| training step | 1.00 (1.00) | 2.50 (2.00) |" in text
    assert "| 64 | 1,024 | 512 (2.0) | 512 (2.0) | 256 (4.0) | 512 (2.0) |" in text
    assert "Not recorded yet: `make bench-peers`." in text
    assert performance_page.check_page(results, docs) == []

    changed = scaling_output()
    changed["roofline"]["bandwidth"] = 3e10
    results_with(results, scaling=changed)
    found = performance_page.check_page(results, docs)
    assert found == ["performance.md", "performance-roofline.svg", "performance-growth.svg"]

    (results / "scaling.json").unlink()
    performance_page.write_page(results, docs)
    assert not (docs / "performance-roofline.svg").exists()
    assert performance_page.check_page(results, docs) == []
