"""Compare size, speed and memory of `txl compress` with general compressors, and verify every decoded file.

    python -m benchmarks.compression results/compression.json TEXT[:BYTES] WAY [WAY ...]

A way is ``peers`` (xz, zstd, bzip2 and 7z's PPMd, as far as they are installed) or the options of one `txl compress`,
in quotes: ``"--online"``, ``"--model runs/mine --lanes 4"``. The rows are added to the rows in the file; a row of the
same text and way is replaced. CPU seconds are recorded besides wall-clock seconds, which include other work of the
machine.

For a file coded by a trained model, the record also has the settings in the file's header, the result of `txl eval` for
the text with these settings and as many lanes, and the speed that would result if every token cost one read of all
weights at the measured bandwidth.
"""

from __future__ import annotations

import filecmp
import json
import math
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_lab.records import git, write

PEERS = {
    "xz -9e": ("xz -9e -c IN", "xz -dc FILE"),
    "zstd --ultra -22": ("zstd --ultra -22 -q -c IN", "zstd -dqc FILE"),
    "bzip2 -9": ("bzip2 -9 -c IN", "bzip2 -dc FILE"),
    "7z PPMd (order 16, 192 MB)": ("7z a -m0=PPMd:o=16:mem=192m -bd -bso0 FILE IN", "7z e -so FILE"),
}


def timed(words: Sequence[str], out: Path | None) -> dict[str, float | None]:
    """Run a command with its standard output in a file, and return seconds, CPU seconds and peak memory.

    A process inherits the peak of its parent process. A peak that is not well above that of this process is therefore
    unknown: None.
    """
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    with open(out or os.devnull, "wb") as file:
        process = subprocess.Popen(list(words), stdout=file)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(words)} ended with {process.returncode}")
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_memory_bytes": usage.ru_maxrss * 1024 if usage.ru_maxrss > 1.1 * ours else None,
    }


def measure(text: Path, pack: Sequence[str], unpack: Sequence[str], folder: Path) -> dict[str, Any]:
    file, back = folder / "text.packed", folder / "back"  # 7z adds a suffix to a name without one
    for each in (file, back):
        each.unlink(missing_ok=True)
    names = {"IN": str(text), "FILE": str(file), "OUT": str(back)}
    there = timed([names.get(word, word) for word in pack], folder / "printed" if "FILE" in pack else file)
    size = file.stat().st_size
    returned = timed([names.get(word, word) for word in unpack], None if "OUT" in unpack else back)
    if not filecmp.cmp(text, back, shallow=False):
        sys.exit(f"{shlex.join(pack)}: another text came back")
    n_bytes = text.stat().st_size
    return {
        "bytes": n_bytes,
        "compressed_bytes": size,
        "bits_per_byte": round(8 * size / n_bytes, 4),
        "compress": there,
        "decompress": returned,
        "round_trip": True,
    }


def model_of(run: str) -> dict[str, Any]:
    """Return a description of a run's model and its training, and the number of bytes of its weights."""
    from txl.runs.directory import RunDirectory

    directory = RunDirectory(run)
    config, checkpoint = directory.config(), directory.checkpoint()
    about = {"configuration": config.name, "corpus": config.data.corpus, "unit": config.data.unit}
    about |= {"checkpoint": checkpoint.name, "seed": config.train.seed, "dtype_of_training": config.train.dtype}
    return {"model": about, "weights_bytes": (checkpoint / "model.safetensors").stat().st_size}


def evaluated(text: Path, run: str, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the result of `txl eval` for a text, with the lanes and settings of the compressed file.

    The evaluation does not score the first token of a lane; the file contains all tokens.
    """
    lengths, dynamic = settings["lengths"], settings.get("dynamic")
    options = {"mem-len": lengths["mem_len"], "window": lengths["window"], "clamp-len": lengths["clamp_len"]}
    options = {name: "none" if value is None else value for name, value in options.items()}
    if dynamic is not None:
        rule = dynamic["adaptation"]
        options |= {"dynamic": rule["rule"], "segment": dynamic["segment"]}
        options |= {
            f"dynamic-{name.replace('_', '-')}": value
            for name, value in rule.items()
            if name != "rule" and (rule["rule"] == "rms" or name in ("learning_rate", "decay", "weights"))
        }
    words = [sys.executable, "-m", "txl", "eval", run, "--data.corpus", str(text), "--split", "all", "--json"]
    words += ["--batch", str(settings["lanes"]), "--data-dir", str(folder / "data")]
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    told = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    kept = ("nll", "tokens", "dropped", "segment", "bits_per_byte", "bytes_per_token")
    return {name: told[name] for name in kept} | {"bytes": round(told["nll"] * told["tokens"] / math.log(2) / 8, 1)}


def rows_of(text: Path, shown: str, way: str, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of one way."""
    if way == "peers":
        return [
            {"text": shown, "way": name} | measure(text, pack.split(), unpack.split(), folder)
            for name, (pack, unpack) in PEERS.items()
            if shutil.which(pack.split()[0])
        ]
    from txl.compression.container import ContainerReader

    options = shlex.split(way)
    program = [sys.executable, "-m", "txl"]
    model = options[options.index("--model") :][:2] if "--model" in options else []
    row = measure(
        text,
        [*program, "compress", "IN", *options, "--json", "-o", "FILE"],
        [*program, "decompress", "FILE", *model, "-o", "OUT"],
        folder,
    )
    told = json.loads((folder / "printed").read_text(encoding="utf-8"))
    row["payload_bytes"] = told["payload_bytes"]
    if model:
        row |= model_of(model[1])
        row["compressed_bytes_and_weights"] = row["compressed_bytes"] + row["weights_bytes"]
        with open(folder / "text.packed", "rb") as file:
            header = ContainerReader(file, file.name).header()
        names = ("lanes", "block", "lengths", "dynamic", "online")
        row["settings"] = {name: header[name] for name in names if name in header}
        row["eval"] = evaluated(text, model[1], row["settings"], folder)
        code = "from txl_lab.speed.operations import read_bandwidth; print(read_bandwidth())"
        bandwidth = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)  # our peak stays
        row["bandwidth"] = float(bandwidth.stdout)
        row["bytes_per_second_at_bandwidth"] = row["eval"]["bytes_per_token"] * row["bandwidth"] / row["weights_bytes"]
    row["commit"] = git("rev-parse", "HEAD")
    return [{"text": shown, "way": f"txl compress {way}"} | row]


def main(target: Path, text: str, ways: Sequence[str]) -> None:
    path, _, count = text.partition(":")
    data = Path(path).read_bytes()[: int(count) if count else None]
    shown = Path(path).name + (f", first {int(count):,} bytes" if count else "")
    for way in ways:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "text").write_bytes(data)
            rows = rows_of(folder / "text", shown, way, folder)
        known = json.loads(target.read_text(encoding="utf-8"))["output"] if target.exists() else []
        new = {(row["text"], row["way"]) for row in rows}
        kept = [row for row in known if (row["text"], row["way"]) not in new]
        write(target, "python -m benchmarks.compression FILE TEXT[:BYTES] WAY ... (the rows say which)", [*kept, *rows])
        for row in rows:
            print(row["text"], row["way"], row["compressed_bytes"], row["bits_per_byte"], flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(f"usage: {sys.argv[0]} FILE TEXT[:BYTES] WAY [WAY ...]")
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
