"""Commands of the README and Python code of `docs/reference/python.md` can be copied and run."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

import txl
from tests.conftest import options_of, small_run
from txl.cli import build_parser, main
from txl.commands.demo import (
    MARK,
    arithmetic_of,
    copying_of,
    rate_for_steps,
    steps_of_this_machine,
    steps_within,
    whole_lines,
)
from txl.config import validate, with_options
from txl.files import JsonObject
from txl.minutes import measured
from txl.minutes.rule import StepTimes
from txl.runs import environment
from txl.runs.directory import RunDirectory
from txl.runs.events import CompressionEvent, DemoEvent, EndEvent, SweepEvent, select

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


def test_the_demo_goes_all_the_way(story, tmp_path, data_dir, capsys):
    out = tmp_path / "demo"
    small = options_of(small_run(str(story)))
    assert main(["demo", "--out", str(out), "--data-dir", str(data_dir), "--test-tokens", "1000", *small]) == 0
    summary = "\n".join(capsys.readouterr().out.splitlines()[-22:])
    compared = ("zlib", "bz2", "lzma", "has seen training text (lzma that has seen it too: ")
    for part in (MARK, "with memory 16", "without", *compared, str(out / "report.html")):
        assert part in summary
    events = RunDirectory(out).events()
    samples = [event for event in events if event["event"] == "sample"]
    assert len({event["prompt"] for event in samples}) == 3
    assert all(event["prompt"] in story.read_text() and event["text"] for event in samples)
    [whole], [trained] = select(events, DemoEvent), select(events, EndEvent)
    assert whole["seconds"] > trained["elapsed"] > 0
    row = next(event for event in events if event["event"] == "sweep")["rows"][-1]
    assert (row["mem_len"], row["tokens"] + row["dropped"] + 1, row["dtype"]) == (16, 1000, "float32")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("le\nwhole\nlines\npar", "whole\nlines\n"),
        ("no line", "no line"),
        ("a\n\n \nb", "a\n\n \nb"),
        ("a long paragraph\nHeading\nanother paragraph", "a long paragraph\nHeading\nanother paragraph"),
        ("\ufffd\u6f22\u5b57\ufffd", "\u6f22\u5b57"),
    ],
)
def test_the_demo_goes_on_from_whole_lines(text, expected):
    assert whole_lines(text) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("avx2 avx512f", {}), ("avx512f avx512_bf16", {"train.dtype": "bfloat16"})],
)
def test_the_demo_computes_in_what_the_machine_is_fast_in(flags, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "cpu_flags", flags.split)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = arithmetic_of(tmp_path)
    assert options == expected
    validate(with_options(txl.preset("stdlib-bpe"), options))
    for dtype in ("float32", "bfloat16"):  # begun on a machine that was fast in it
        RunDirectory(tmp_path).write_config(with_options(txl.preset("stdlib-bpe"), {"train.dtype": dtype}))
        assert arithmetic_of(tmp_path) == {"train.dtype": dtype}


@pytest.mark.parametrize(
    ("step_seconds", "least", "steps"),
    # 260 seconds less 350 steps' time are left for training.
    [
        (0.05, 500, 2400),
        (0.1, 500, 2200),
        (0.15, 500, 1300),
        (0.2, 500, 900),
        (0.29, 500, 500),
        (100.0, 500, 500),
        (0.5, 900, 900),
    ],
)
def test_the_demo_takes_as_many_steps_as_fit_into_five_minutes(step_seconds, least, steps):
    assert steps_within(300, step_seconds, least, 2400) == steps


def test_the_demo_times_steps_once_and_goes_on_with_its_choice(tmp_path, monkeypatch, capsys):
    seconds = []
    monkeypatch.setattr("txl.minutes.timing.timed", lambda step, steps, device: seconds.pop())
    monkeypatch.setattr("txl.minutes.timing.training_workload", lambda *given, **options: (None, None))
    config = txl.preset("stdlib-bpe")
    seconds[:] = [0.15]
    options = steps_of_this_machine(tmp_path / "demo", config, {})
    assert options == {"train.steps": "1300"}
    assert "1,300 training steps instead of 2,400: the demo takes about 5 minutes here" in capsys.readouterr().err
    seconds[:] = [0.5]
    steps_of_this_machine(tmp_path / "other", config, {})
    assert "500 training steps instead of 2,400: the demo takes about 8 minutes here" in capsys.readouterr().err
    seconds[:] = [0.5]
    assert steps_of_this_machine(tmp_path / "other", config, {"model.init": "xavier"}) == {"train.steps": "900"}
    words = with_options(config, {"data.unit": "word"})
    assert steps_of_this_machine(tmp_path / "other", words, {}) == {}
    seconds[:] = [0.15]
    in_bytes = with_options(config, {"data.unit": "byte"})
    assert steps_of_this_machine(tmp_path / "other", in_bytes, {}) == {"train.steps": "1300"}
    (tmp_path / "demo").mkdir()
    RunDirectory(tmp_path / "demo").write_config(with_options(config, options))
    assert steps_of_this_machine(tmp_path / "demo", config, {}) == options  # nothing is timed: `seconds` is empty


def test_a_short_demo_has_a_higher_rate_and_a_run_keeps_its_own(tmp_path):
    preset = txl.preset("stdlib-bpe")
    assert rate_for_steps(tmp_path, preset, {}) == {"train.learning_rate": f"{preset.train.learning_rate:g}"}
    short = with_options(preset, {"train.steps": "500"})
    assert rate_for_steps(tmp_path, short, {}) == {"train.learning_rate": "0.0054"}
    assert rate_for_steps(tmp_path, short, {"train.learning_rate": "0.1"}) == {}
    RunDirectory(tmp_path).write_config(with_options(preset, {"train.learning_rate": "0.004"}))
    assert rate_for_steps(tmp_path, preset, {}) == {"train.learning_rate": "0.004"}


def test_a_short_demo_begins_with_heads_that_copy_and_a_run_keeps_its_first_weights(tmp_path):
    def options(out: str, **changes: str) -> dict[str, str]:
        given = {name.replace("__", "."): value for name, value in changes.items()}
        return copying_of(tmp_path / out, with_options(txl.preset("stdlib-bpe"), given), given)

    copying = {"model.init": "induction"}
    assert options("new", train__steps="2000") == copying
    assert options("new", train__steps="2001") == {}
    assert options("new", train__steps="900", model__init="xavier") == {}
    assert options("new", train__steps="900", model__pre_norm="false") == {}
    vanilla = {"model__family": "vanilla", "model__encoding": "learned", "model__mem_len": "0"}
    assert options("new", train__steps="900", model__qk_norm="false", **vanilla) == {}
    short = with_options(txl.preset("stdlib-bpe"), {"train.steps": "900"})
    for name, run, expected in (("before", short, {}), ("now", with_options(short, copying), copying)):
        (tmp_path / name).mkdir()
        RunDirectory(tmp_path / name).write_config(run)
        assert options(name, train__steps="900") == expected
        assert options(name, train__steps="900", model__init="normal") == {}
        assert options(name, train__steps="900", model__n_layer="1") == {}  # refused for the user's option alone
    validate(with_options(short, copying))


def _defined(path: Path) -> set[str]:
    """Return the functions, classes, methods and assigned names of a module, as `name` and `Class.name`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inside = [(f"{node.name}.", node.body)] if isinstance(node, ast.ClassDef) else []
        for prefix, body in [("", [node]), *inside]:
            for each in body:
                if isinstance(each, ast.FunctionDef | ast.ClassDef):
                    found.add(prefix + each.name)
                targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
                found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("page", ["explanation/model.md", "explanation/attention.md", "architecture.md"])
def test_pages_that_explain_the_code_point_to_what_is_there(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    source = ROOT / "src" / "txl"
    for path in re.findall(r"`([\w/]+/\w+\.(?:py|cpp))`", text):
        home = {"examples": ROOT, "tests": ROOT, "txl_lab": ROOT / "src"}.get(path.split("/")[0], source)
        assert (home / path).is_file(), path
    for name, path in re.findall(r"`([A-Za-z_][\w.]*)`(?:, `[\w.]+`)* in `([\w/]+\.py)`", text):
        assert name in _defined(source / path), f"{name} in {path}"
    everywhere = set().union(*(_defined(path) for path in source.rglob("*.py")))
    methods = [name for name in re.findall(r"`([A-Z]\w+\.\w+)`", text) if not name.endswith(".md")]
    assert len(methods) > 2
    assert [name for name in methods if name not in everywhere] == []
