"""Measure everything that requires a GPU within a few minutes, the most valuable rows first.

    python -m benchmarks.gpu --minutes 9            # on a machine with an NVIDIA GPU; or: make gpu
    python -m benchmarks.gpu --first --minutes 1.8  # numbers checked, then the steps timed: the first call on a GPU
    python -m benchmarks.gpu --rehearse             # the same rows of tiny models on a CPU; or: make gpu-rehearse

The rows: (1) the tests marked `gpu`; (2) training tokens per second of enwik8-12L, wt103-base, enwik8-24L and
stdlib-bpe with each attention, eager, compiled and captured, with the share of the dense bfloat16 rate measured in the
same run; (3) Hugging Face's model and the authors' equations in plain PyTorch; (4) decoding of 1, 32 and 256 streams,
compared with the bound by bandwidth; (5) Table 9; (6) peak memory as T and M double; (7) the time of a step by kernel;
(8) `txl train --minutes`. Most rows with compiled layers are last. With `--first`: (9) gradients beside float64, equal
bits of two runs, bfloat16 beside float32, the first steps of `ptb`; (10) one step of each model. Each of these rows has
a process of its own, all at the same time, so that kernels are compiled by all cores. Then, alone: steps of each model,
with time by kernel, and (11) an evaluation.

A row starts only if its estimate fits into the remaining minutes. Estimates are about what the rows took on an H200;
those of the compiled layers at the end are guesses. Each row is written as soon as it is measured, to `gpu-NAME.json`
and to a page `gpu-NAME.md`. A row that fails is recorded with its error, and measurement continues with the next row.
If a row ends the process or takes far too long, the other rows are measured in a new process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from benchmarks import gpu_checks, gpu_rows
from benchmarks.gpu_rows import Bench, Figures, imitate_recording

from txl.errors import UserError
from txl_lab.records import header

ITEMS = {
    9: "Numbers",
    10: "One step, kernels compiled",
    1: "Tests",
    2: "Training",
    3: "Training beside others",
    4: "Decoding",
    5: "Table 9",
    6: "Memory",
    7: "A step by kernel",
    8: "In minutes",
    11: "Evaluation",
}
AIMS = {
    2: "Aim: enwik8-12L at 0.44 of the dense bfloat16 rate, which is a step of 11.3 ms.",
    4: "Aim: 0.70 of the bandwidth's bound with 256 streams; with one, launches and time are what matters.",
    5: "Aim: beyond 1,874 at 3,800, the paper's.",
}
# Sentence above the table of another implementation
PEERS = {
    "equations": "The paper's equations in plain PyTorch, eager, with the weights of our model:",
    "huggingface": "Transformer-XL in Hugging Face transformers 4.37.2, eager, with the weights of our model:",
}
LEFT_OUT = "left out"  # status of a row for which no time was left
OLD_SHARES = (
    "The shares in this record were computed the old way. The work counted masked pairs of attention and gradients "
    "with respect to memory: divide a share of the dense rate by 1.12 for `enwik8-12L`. The bandwidth was that of sums "
    "over 256 MiB, waits of the host included: copies of gigabytes move 4.3 TB/s on an H200, so a share of the "
    "bandwidth is about 0.75 of what is written here."
)
_PATIENCE = 3.0  # multiple of a row's estimated seconds, at least a minute in all, after which the row is aborted


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement to make: a function in `gpu_rows`, its values, and estimated seconds on a GPU."""

    item: int
    function: str
    given: Figures
    estimate: float


def named(row: Figures) -> str:
    """Return the name of a row from its function and its values."""
    return " ".join([row["function"], *map(str, row["given"].values())])


def rows() -> list[Row]:
    """Return all rows, the most valuable first."""

    compiled = [("enwik8-12L", "compiled"), ("wt103-base", "compiled captured"), ("enwik8-24L", "compiled captured")]
    return [
        Row(1, "tests", {}, 110),
        _train(13, "enwik8-12L", "triton", "captured"),
        _train(4, "enwik8-12L", "shifted", "captured"),
        *(Row(4, "decoding", {"streams": streams}, 3) for streams in (256, 1, 32)),
        *(_train(2, "stdlib-bpe", attention, "captured") for attention in ("triton", "shifted")),
        *(_kernels(3, "enwik8-12L", attention, "captured") for attention in ("triton", "shifted")),
        Row(8, "in_minutes", {"minutes": 1.0}, 62),
        *(Row(5, "table9", {"length": length}, 3) for length in (3800, 800, 1800, 2800)),
        *(Row(5, "table9", {"length": 3800, "lanes": lanes}, 5) for lanes in (8, 32)),
        *(Row(5, "table9", {"length": 3800, "lanes": lanes, "segment": 512}, 5) for lanes in (1, 32)),
        _train(4, "enwik8-12L", "triton", "eager"),
        _train(4, "enwik8-12L", "shifted", "eager"),
        _train(2, "stdlib-bpe", "shifted", "eager"),
        _train(9, "wt103-base", "triton", "captured"),
        _train(5, "wt103-base", "shifted", "captured"),
        *(
            Row(6, "memory", {"attention": attention, "length": length}, 2)
            for length in (512, 1024, 2048, 4096)
            for attention in ("triton", "shifted")
        ),
        _train(15, "enwik8-12L", "triton", "compiled captured"),
        Row(3, "equations", {"preset": "enwik8-12L"}, 5),
        Row(3, "huggingface", {"dtype": "bfloat16"}, 10),
        Row(3, "huggingface", {"dtype": "float32"}, 10),
        *(_train(30, "enwik8-24L", attention, "captured") for attention in ("triton", "shifted")),
        _train(4, "enwik8-12L", "shifted", "captured", dtype="float32"),
        _train(16, "enwik8-12L", "triton", "captured", dtype="float32"),
        _train(4, "enwik8-12L", "triton", "captured", dropout=True),
        _train(2, "stdlib-bpe", "triton", "eager"),
        *(
            _train(15, preset, attention, "eager")
            for preset in ("wt103-base", "enwik8-24L")
            for attention in ("triton", "shifted")
        ),
        *(_train(60, preset, "triton", mode) for preset, mode in compiled),
        _train(60, "enwik8-12L", "shifted", "compiled captured"),
    ]


def first_rows() -> tuple[list[Row], list[Row]]:
    """Return the rows of `--first`: those that are measured at the same time, and those measured alone, in order."""
    wt103, enwik8 = ("wt103-base", "triton"), ("enwik8-12L", "triton")
    together = [
        *(Row(9, "gradients", {"shape": shape}, 40) for shape in gpu_checks.SHAPES),
        *(Row(9, "equal_bits", {"preset": preset}, 40) for preset in ("enwik8-12L", "ptb")),
        Row(9, "first_steps", {}, 40),
        Row(9, "beside_float32", {}, 40),
        _warm(*enwik8, 22),
        _warm(*enwik8, 22, dropout=True),
        _warm(*enwik8, 22, dtype="float32"),
        _warm(*wt103, 60),
        _warm("ptb", "triton", 20, dropout=True),
        _warm("stdlib-bpe", "triton", 16),
        _warm("enwik8-24L", "triton", 16),
    ]
    alone = [
        Row(2, "ptb", {"batch_size": 20}, 8),
        _train(5, *enwik8, "captured"),
        _kernels(2, *enwik8, "captured"),
        Row(2, "ptb", {"batch_size": 10}, 8),
        _train(5, *wt103, "captured"),
        _kernels(2, *wt103, "captured"),
        _train(3, *enwik8, "captured", dropout=True),
        Row(11, "evaluation", {}, 7),
        _train(2, "stdlib-bpe", "triton", "captured"),
        _kernels(1, "stdlib-bpe", "triton", "captured"),
        _train(2, *enwik8, "eager"),
        _train(6, *wt103, "captured", dropout=True),
        _train(5, *enwik8, "captured", dtype="float32"),
        _train(4, "enwik8-12L", "shifted", "captured", dtype="float32"),
        *(Row(4, "decoding", {"streams": streams}, 4) for streams in (256, 1)),
        _train(15, "enwik8-24L", "triton", "captured", dropout=True),
        _kernels(2, "enwik8-24L", "triton", "captured", dropout=True),
        Row(6, "memory", {"attention": "triton", "length": 4096}, 3),
        *(Row(5, "table9", {"length": length}, 3) for length in (3800, 800)),
    ]
    return together, alone


def _train(seconds: float, preset: str, attention: str, mode: str, **more: Any) -> Row:
    return Row(2, "training", {"preset": preset, "attention": attention, "mode": mode, **more}, seconds)


def _kernels(seconds: float, preset: str, attention: str, mode: str, **more: Any) -> Row:
    return Row(7, "kernels", {"preset": preset, "attention": attention, "mode": mode, **more}, seconds)


def _warm(preset: str, attention: str, batch_size: int, **more: Any) -> Row:
    return Row(10, "warm", {"preset": preset, "attention": attention, "batch_size": batch_size, **more}, 30)


class Measured:
    """The rows measured so far, written to `folder` with its header after each row, as a record and as its page."""

    def __init__(self, folder: Path, name: str, header: Figures):
        self.path = folder / f"gpu-{name}.json"
        self.header, self.rows, self._lock = header, list[Figures](), threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    def add(self, row: Row, outcome: Figures) -> None:
        with self._lock:
            self._add(row, outcome)

    def _add(self, row: Row, outcome: Figures) -> None:
        measured = {"item": row.item, "function": row.function, "given": row.given, **outcome}
        self.rows.append(measured | {"ended": round(time.time() - self.header["began"], 1)})
        figures = outcome.get("figures", {}).items()
        plain = [f"{name} {_number(value)}" for name, value in figures if isinstance(value, (int, float))]
        seconds = f" in {outcome['seconds']:.1f} s" if "seconds" in outcome else ""
        print(
            f"{named(self.rows[-1])}: {outcome['status']}{seconds} {outcome.get('error') or ', '.join(plain)}",
            flush=True,
        )
        self.write()

    def write(self) -> None:
        value = {**self.header, "rows": self.rows}
        self.path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        self.path.with_suffix(".md").write_text(page(value), encoding="utf-8")


def _number(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


COLUMNS = {
    "tests": ["passed", "failed", "error", "skipped"],
    "training": ["tokens_per_second", "fraction_of_rate", "step_seconds", "peak_bytes", "loss"],
    "equations": ["tokens_per_second", "largest_difference", "peak_bytes"],
    "huggingface": ["tokens_per_second", "largest_difference"],
    "decoding": ["tokens_per_second", "fraction_of_bandwidth", "step_seconds", "launches"],
    "table9": ["ratio", "published"],
    "memory": ["peak_bytes"],
    "kernels": ["launches", "microseconds"],
    "ptb": ["tokens_per_second", "step_seconds", "launches", "microseconds"],
    "gradients": ["agree"],
    "equal_bits": ["tensors", "unequal"],
    "beside_float32": ["difference"],
    "first_steps": ["largest"],
    "warm": ["step_seconds"],
    "evaluation": ["whole_seconds"],
    "in_minutes": ["seconds", "seconds_of_choice", "steps", "bits_per_byte"],
}


def page(record: Figures) -> str:
    hardware, software = record["hardware"], record["software"]
    lines = [f"# {hardware.get('gpu', hardware['cpu'])}", ""]
    if record["rehearsed"]:
        lines += ["**A rehearsal of tiny models on a CPU: none of these figures says anything about a GPU.**", ""]
    lines += [
        f"`{record['command']}`: commit {record['commit'][:7]}, {record['date']}, torch {software['torch']}, "
        f"{record['minutes']:g} minutes. Times are of steps handed over one after the other. Training is in bfloat16 "
        f"(autocast), without dropout unless it says so. Shares are of the rate of dense bfloat16 products.",
        "",
    ]
    if "began" not in record:
        lines += [OLD_SHARES, ""]
    for item, title in ITEMS.items():
        rows = [row for row in record["rows"] if row["item"] == item]
        of_item = [row for row in rows if row["status"] != LEFT_OUT]
        if not rows:
            continue
        lines += [f"## {title}", "", *([AIMS[item], ""] if item in AIMS else [])]
        for function in dict.fromkeys(row["function"] for row in of_item):
            lines += [PEERS[function], ""] if function in PEERS else []
            lines += [*_table([row for row in of_item if row["function"] == function], COLUMNS[function]), ""]
        for row in of_item:  # what does not fit into a table: errors, failed tests, the longest kernels
            figures = row.get("figures", {})
            more = [f"- {named(row)}: {row['error']}"] if "error" in row else []
            more += [f"- failed: {failure}" for failure in figures.get("failures", [])]
            if "kernels" in figures:
                more += _kernel_table(row)
            lines += [*more, ""] if more else []
        if missing := [named(row) for row in rows if row["status"] == LEFT_OUT]:
            lines += [f"Not measured, for want of minutes: {', '.join(missing)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _kernel_table(row: Figures) -> list[str]:
    figures = row["figures"]
    if "classes" not in figures:  # an older record, with shares alone
        lines = [f"Share of the time, {named(row)}:", "", "| kernel | share |", "| --- | --- |"]
        return lines + [
            f"| `{found['name'].replace('|', '/')}` | {found['share']:.3f} |" for found in figures["kernels"]
        ]
    lines = [
        f"Launches and microseconds, {named(row)}:",
        "",
        "| class | launches | microseconds |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {found['class']} | {found['launches']:,} | {found['microseconds']:,.0f} |" for found in figures["classes"]
    ]
    lines += ["", "| kernel | launches | microseconds |", "| --- | --- | --- |"]
    for found in figures["kernels"]:
        name = found["name"].replace("|", "/")
        lines.append(f"| `{name}` | {found['launches']:,} | {found['microseconds']:,.0f} |")
    return lines


def _table(of_one: list[Figures], columns: list[str]) -> list[str]:
    names = list(dict.fromkeys(name for row in of_one for name in row["given"]))
    heads = [*names, *(column.replace("_", " ") for column in columns), "status"]
    table = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in of_one:
        cells = [str(row["given"].get(name, "")) for name in names]
        for value in map(row.get("figures", {}).get, columns):
            if isinstance(value, dict):
                cells.append(", ".join(f"{name} {count}" for name, count in value.items()))
            else:
                cells.append("" if value is None else _number(value))
        table.append(f"| {' | '.join([*cells, row['status']])} |")
    return table


def measure(
    wanted: list[Row],
    bench: Bench,
    deadline: float,
    measured: Measured,
    begin: threading.Event | None = None,
    patience: float | None = None,
) -> None:
    """Measure rows one after the other in a worker, which starts at once and measures from `begin` on.

    A row that takes longer than `patience` seconds (None: a multiple of its estimate), or beyond the deadline, is given
    up.
    """
    left = list(wanted)
    while left:
        words = [sys.executable, "-m", "benchmarks.gpu", "--worker", bench.device, *["--rehearse"][: bench.rehearsed]]
        # Threads of many processes at once would wait for one another.
        env = os.environ | ({} if patience is None else {"OMP_NUM_THREADS": "1"})
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            if begin is not None:
                begin.wait()
            json.dump({"deadline": deadline, "rows": [dataclasses.asdict(each) for each in left]}, worker.stdin)
            worker.stdin.close()
            late, limit = threading.Event(), 0.0

            def give_up(worker: subprocess.Popen[str] = worker, late: threading.Event = late) -> None:
                late.set()
                worker.kill()

            while left:
                limit = patience or (600.0 if bench.rehearsed else max(60.0, _PATIENCE * left[0].estimate))
                if not bench.rehearsed:
                    limit = min(limit, max(5.0, deadline + 3 - time.time()))
                timer = threading.Timer(limit, give_up)
                timer.start()
                for line in worker.stdout:
                    if line.startswith("ROW "):
                        break
                    sys.stderr.write(line)
                else:
                    line = ""
                timer.cancel()
                if not line:
                    break
                measured.add(left.pop(0), json.loads(line[4:]))
            code = worker.wait()
        if left and (late.is_set() or code != _BROKEN):
            error = f"given up after {limit:.0f} s" if late.is_set() else f"its process ended with {code}"
            measured.add(left.pop(0), {"status": "failed", "error": error})


def measure_first(bench: Bench, deadline: float, measured: Measured) -> None:
    """Measure the rows of `first_rows`; those that are measured at the same time get at most half of the minutes."""
    together, alone = first_rows()
    begin, half = threading.Event(), time.time() + (deadline - time.time()) / 2
    with ThreadPoolExecutor(len(together) + 1) as pool:
        # The workers of the rows that are timed import and wait, so that only one process at a time is timed.
        timed = pool.submit(measure, alone, bench, deadline, measured, begin)
        at_once = threading.Semaphore(2 if bench.rehearsed else len(together))

        def check(row: Row) -> None:
            with at_once:
                patience = 600.0 if bench.rehearsed else max(10.0, half - time.time())
                measure([dataclasses.replace(row, estimate=0.0)], bench, deadline, measured, patience=patience)

        wait([pool.submit(check, row) for row in together], None if bench.rehearsed else max(1.0, half - time.time()))
        begin.set()
        timed.result()


def summary(rows: list[Figures]) -> list[str]:
    """Return a line of each row: what failed, milliseconds, launches."""
    lines = []
    for row in rows:
        figures = row.get("figures", {})
        cells = [f"{1000 * figures['step_seconds']:.2f} ms"] if "step_seconds" in figures else []
        cells += [f"{name} {_number(figures[name])}" for name in SHORT if isinstance(figures.get(name), (int, float))]
        cells += [row["error"]] if "error" in row else []
        cells += [str(failure)[:300] for failure in figures.get("failures", [])]
        lines.append(f"{row['ended']:5.0f} s  {row['status']:8} {named(row)}: {', '.join(cells)}")
    return lines


SHORT = (
    "launches",
    "microseconds",
    "fraction_of_rate",
    "fraction_of_bandwidth",
    "agree",
    "unequal",
    "difference",
    "largest",
    "whole_seconds",
    "peak_bytes",
    "ratio",
)
_BROKEN = 3  # exit code of a worker that reported its last row and cannot use the device any more


def work(bench: Bench) -> int:
    """Measure the rows read from standard input, and print a line for each."""
    if bench.rehearsed:
        torch.set_num_threads(1)
        imitate_recording()
    if bench.device.startswith("cuda"):
        torch.ones(8, 8, device=bench.device).mm(torch.ones(8, 8, device=bench.device))  # before the rows arrive
    given = json.load(sys.stdin)
    for row in (Row(**each) for each in given["rows"]):
        left = given["deadline"] - time.time()
        if not bench.rehearsed and row.estimate > left:
            error = f"its estimate of {row.estimate:.0f} s does not fit into the {max(0, left):.0f} s that are left"
            print("ROW " + json.dumps({"status": LEFT_OUT, "error": error}), flush=True)
            continue
        began, broken = time.perf_counter(), False
        try:
            function = getattr(gpu_checks if row.item in (9, 11) else gpu_rows, row.function)
            outcome: Figures = {"status": "done", "figures": function(bench, **row.given)}
        except UserError as error:
            outcome = {"status": "refused", "error": str(error)}
        except Exception as error:  # every kind of error belongs in the record
            last = traceback.format_exc().strip().splitlines()[-12:]
            message = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            outcome = {"status": "failed", "error": message, "traceback": last}
            broken = "CUDA error" in str(error)  # this process cannot use the device any more
        if bench.device.startswith("cuda") and not broken:
            torch.cuda.empty_cache()
        print("ROW " + json.dumps(outcome | {"seconds": time.perf_counter() - began}), flush=True)
        if broken:
            return _BROKEN
    return 0


def device_name(device: str) -> str:
    """Return the device's name in a form suitable for file names."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what can only be known on a GPU.")
    parser.add_argument("--minutes", type=float, default=9.0, help="no row begins that would end later (default: 9)")
    parser.add_argument("--rehearse", action="store_true", help="the same rows of tiny models on a CPU")
    parser.add_argument("--first", action="store_true", help="numbers checked, then the steps, instead of all rows")
    parser.add_argument("--out", type=Path, help="folder of the record (default: results; rehearsed: one that goes)")
    parser.add_argument("--items", default="1,2,3,4,5,6,7,8", help="which of the eight (default: all)")
    parser.add_argument("--worker", metavar="DEVICE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return work(Bench(given.worker, given.rehearse))
    if not given.rehearse and not torch.cuda.is_available():
        print("there is no NVIDIA GPU here, or PyTorch was not built for it; --rehearse needs none", file=sys.stderr)
        return 2
    began = time.time()
    deadline, bench = began + 60 * given.minutes, Bench("cpu" if given.rehearse else "cuda", given.rehearse)
    items = {int(each) for each in given.items.split(",")}
    first = "--first " if given.first else ""
    command = f"python -m benchmarks.gpu {first}{'--rehearse' if given.rehearse else f'--minutes {given.minutes:g}'}"
    with tempfile.TemporaryDirectory() as passing:
        folder = given.out or Path(passing if given.rehearse else "results")
        about = header(command, bench.device) | {"minutes": given.minutes, "rehearsed": given.rehearse, "began": began}
        measured = Measured(folder, ("first-" if given.first else "") + device_name(bench.device), about)
        if given.first:
            measure_first(bench, deadline, measured)
            print("\n".join(["", *summary(measured.rows)]))
        else:
            measure([row for row in rows() if row.item in items], bench, deadline, measured)
        if given.out or not given.rehearse:
            print(f"written: {measured.path} and {measured.path.with_suffix('.md').name}")
    bad = [row for row in measured.rows if row["status"] == "failed" or row.get("figures", {}).get("failures")]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
