"""Commands of the README and Python code of `docs/reference/python.md` can be copied and run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import options_of, small_run
from txl.cli import build_parser, main
from txl.files import JsonObject
from txl.minutes import measured
from txl.minutes.rule import StepTimes
from txl.runs.events import CompressionEvent, SweepEvent, select

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "interop" / "golden"
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SMALL = [
    option
    for option in options_of(small_run("my.txt", **{"train.steps": "4"}))
    if not option.startswith(("--data.corpus", "--model.n-layer", "--train.dtype"))
]

EXCLUDED = ("--train.steps", "--train.planned-minutes", "--data.source")
"""Options that cannot be given with `--minutes`."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("txl ")]


def test_every_command_is_one_that_the_program_knows():
    assert len(commands()) > 7
    for words in commands():
        build_parser().parse_args(words)


def test_the_commands_run_in_the_order_of_the_readme(story, tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXL_DATA", str(data_dir))
    monkeypatch.setattr(measured, "measured_speed", lambda *_: StepTimes(4.0, 1e-6))  # so that few steps fit
    (tmp_path / "my.txt").write_bytes(story.read_bytes() * (1 + 60_000 // len(story.read_bytes())))
    (tmp_path / "other.txt").write_bytes(story.read_bytes()[:3000])
    (tmp_path / "model.pt").write_bytes((GOLDEN / "plain.pt").read_bytes())
    (tmp_path / "vocab.txt").write_text("\n".join(["<eos>", "<unk>", *(f"w{number}" for number in range(27))]))
    ran = set()
    for words in commands():
        if words[0] == "serve":
            continue  # runs for ever; the test above parses this command
        small = []
        if words[0] == "train":
            small = [each for each in SMALL if "--minutes" not in words or not each.startswith(EXCLUDED)]
        assert main([*words, *small]) == 0, (words, capsys.readouterr().err)
        ran.add(words[0])
    assert ran == {"train", "eval", "generate", "score", "import", "export"}
    assert (tmp_path / "runs" / "mine" / "memory-curve.svg").is_file()
    assert (tmp_path / "surprisal.tsv").read_text(encoding="utf-8").startswith("index\tstart\tend")


def test_the_speeds_are_those_of_the_record():
    rows = json.loads((ROOT / "results" / "bench-peers.json").read_text(encoding="utf-8"))["output"]["rows"]

    def told(name: str, segment: int) -> str:
        ratios = [row["ratio"] for row in rows if (row["name"], row["segment"]) == (name, segment)]
        return " / ".join(f"{ratio:.1f}" for ratio in ratios[:2])  # float32, bfloat16; enwik8-12L comes first

    dtypes = "ours in float32 / bfloat16, theirs in float32"
    token = f"| on two CPU cores (AMD EPYC): speed of generating a token, enwik8-12L, {dtypes} | "
    assert f"{token}{told('one-token step', 1)} times faster |" in README
    assert f"T = M = 512, {dtypes} | {told('training step', 512)} times faster |" in README


def test_the_speed_on_a_gpu_is_that_of_the_record():
    rows = json.loads((ROOT / "results" / "gpu-nvidia-h200-peers.json").read_text(encoding="utf-8"))["rows"]

    def speed(function: str, **given: str) -> float:
        (row,) = [row for row in rows if row["function"] == function and row["given"] == given]
        return row["figures"]["tokens_per_second"]

    theirs = speed("huggingface", dtype="bfloat16")
    ours = [
        speed("training", preset="enwik8-12L", attention="triton", mode=mode) / theirs for mode in ("captured", "eager")
    ]
    assert f"both in bfloat16 | {ours[0]:.1f} times faster with `--train.capture true`" in README
    assert f", {ours[1]:.1f} without |" in README


def test_the_time_to_quality_is_that_of_the_record():
    texts = json.loads((ROOT / "results" / "quality.json").read_text(encoding="utf-8"))["output"]["texts"]
    measured = {each["text"]: each["muon_of_authors"]["seconds"] * each["settings"]["peer_ratio"] for each in texts}
    said = re.findall(r"in (0\.\d\d)\s+of its time|in (0\.\d\d)\s+on|in (0\.\d\d)\s+on", README)
    assert [float("".join(each)) for each in said] == [round(measured[name], 2) for name in ("stdlib", "ptb", "enwik8")]


def test_the_demo_needs_the_bits_of_its_records():
    def output(name: str) -> list[JsonObject]:
        return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))["output"]["measurements"]

    def bits(name: str) -> str:
        (sweep,) = select(output(name), SweepEvent)
        return f"{sweep['rows'][-1]['bits_per_byte']:.3f}"

    seeds = [bits(f"demo{seed}") for seed in ("", "-seed-2", "-seed-3")]
    assert f"| {seeds[0]}; other seeds {seeds[1]} and {seeds[2]} |" in README
    assert f"1,500 steps | {bits('demo-1500')} |" in README
    assert f"in float32 | {bits('demo-500')} |" in README
    (sizes,) = select(output("demo"), CompressionEvent)
    assert "lzma_after_training_text" in sizes
    lzma, after, bz2 = (
        8 * size / sizes["text"] for size in (sizes["lzma"], sizes["lzma_after_training_text"], sizes["bz2"])
    )
    assert f"| {lzma:.3f}; {after:.3f} |" in README
    assert f"| `bz2` | {bz2:.3f} |" in README


def test_the_python_runs(story, tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXL_DATA", str(data_dir))
    (tmp_path / "my.txt").write_bytes(story.read_bytes())
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    assert '"my.txt", 200' in code
    smaller = "run.train.batch_size, run.train.segment, run.model.mem_len = 4, 8, 8\ntxl.Trainer"
    code = code.replace('"my.txt", 200', '"my.txt", 3').replace("txl.Trainer", smaller)
    exec(compile(code, "python.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert 0 < float(printed[0]) < 10


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_what_the_readme_points_to_is_there(target):
    assert (Path(__file__).parent.parent / target).exists(), target
