"""Run directories like those written by training and evaluation, made in a moment and without a model."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from txl.config import RunConfig, with_options
from txl.reporting.compressors import SETTINGS
from txl.runs.directory import RunDirectory

LENGTHS = (0, 32, 64, 128, 256)
CACHE = {"cache_size": 2000, "cache_theta": 0.6, "cache_lambda": 0.05}
BYTES_PER_TOKEN = {"byte": 1.0, "char": 1.02, "word": 5.4, "bpe": 3.7}
COMMAND = ("/usr/bin/txl", "train", "stdlib-tiny", "--out", "runs/my demo")
START = 1_790_000_000.0
MEASURED = ("split", "corpus", "unit", "checkpoint", "sha256_text")
"""Fields that say what an evaluation was measured on."""
PARTS = {"embedding": 131_072, "positions": 65_792, "attention": 327_680, "feed_forward": 788_480, "norms": 2_048}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def corpus_info(name: str, unit: str) -> dict[str, Any]:
    """Return made-up facts of a corpus in the form of `Corpus.info()`."""
    splits = {
        split: {
            "tokens": tokens, "bytes": round(tokens * BYTES_PER_TOKEN[unit]),
            "unknown": 1_204 if unit == "word" and split != "train" else 0,
            "sha256_tokens": sha256(f"{name} {split} tokens"), "sha256_text": sha256(f"{name} {split} text"),
        }
        for split, tokens in {"train": 11_274_210, "valid": 612_018, "test": 640_413}.items()
    }  # fmt: skip
    size = 256 if unit == "byte" else 8192
    return {"name": name, "unit": unit, "vocabulary_size": size, "splits": splits, "identity": sha256(name)}


def evaluation(nll: float, mem_len: int, *, unit: str = "byte", **changes: Any) -> Any:
    """Return a record as logged by `txl eval`."""
    bpc = nll / math.log(2)
    row = {
        "split": "test", "corpus": "stdlib", "unit": unit, "checkpoint": "step-00004000",
        "sha256_text": sha256("stdlib test text"), "nll": nll, "tokens": 640_400, "dropped": 12, "unknown": None,
        "bytes_per_token": BYTES_PER_TOKEN[unit], "seconds": 20.0, "tokens_per_second": 32_020.0,
        "segment": 128, "mem_len": mem_len, "window": mem_len or None, "clamp_len": None, "batch_size": 10,
        "exhaustive": False, "sliding": False, "dtype": "float32", "temperature": 1.0, "dynamic": None,
        "cache_size": None, "cache_theta": None, "cache_lambda": None,
        "ppl": math.exp(nll), "bpc": bpc, "bits_per_byte": bpc / BYTES_PER_TOKEN[unit],
    }  # fmt: skip
    return row | changes


class FakeRun:
    """Writer of the events of a run, with one method per kind of event and a made-up clock."""

    def __init__(self, path: Path, corpus: str = "stdlib", unit: str = "byte", options: dict[str, str] | None = None):
        path.mkdir(parents=True)
        self.directory = RunDirectory(path)
        base = {"data.corpus": corpus, "data.unit": unit, "train.steps": "4000", "train.warmup_steps": "200"}
        base |= {"model.n_layer": "4", "model.d_model": "128", "model.mem_len": "128", "train.learning_rate": "0.002"}
        base |= {"eval.mem_len": "256", "eval.window": "256"}
        self.config = with_options(RunConfig(name="stdlib-tiny"), base | (options or {}))
        self.directory.write_config(self.config)
        self.unit, self.steps, self.time = unit, self.config.train.steps, START
        self.corpus = corpus_info(corpus, unit)
        self.random = random.Random(5)

    @property
    def path(self) -> Path:
        return self.directory.path

    def log(self, event: str, step: int, **fields: Any) -> None:
        """Append an event like `RunDirectory.append`, at the time of the made-up clock."""
        self.time += 1.0
        line = json.dumps({"event": event, "step": step, "time": self.time, **fields})
        with open(self.path / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def start(self, event: str = "start", step: int = 0, command: Sequence[str] = COMMAND) -> None:
        hardware = {"cpu": "Example CPU @ 2.50GHz avx2 avx512f", "cores": 2, "threads": 2, "memory_bytes": 8 * 2**30}
        self.log(
            event, step, config=self.config.to_dict(), corpus=self.corpus, parameters=PARTS,
            total_parameters=sum(PARTS.values()), attention="shifted", compiled=False, init_from=None, init_note=None,
            processes=1, run="0123456789abcdef", hardware=hardware | {"device": "cpu"}, command=list(command),
            software={"python": "3.11.9", "torch": "2.13.0+cpu", "txl": "0.1.0", "system": "Linux-6.1-x86_64"},
        )  # fmt: skip

    def loss(self, step: int) -> float:
        """Return the loss in nats per token: 5.5 at first, later about 1.3 (words and BPE tokens: about 4.2)."""
        end = 1.1 if self.unit in ("byte", "char") else 4.0
        return end + (5.5 - end) / (1 + step / 60) ** 0.75

    def train(self, first: int = 10, last: int | None = None, every: int = 10, valid_every: int = 500) -> None:
        peak = self.config.train.learning_rate
        for step in range(first, (self.steps if last is None else last) + 1, every):
            warm = min(1.0, step / 200) * 0.5 * (1 + math.cos(math.pi * max(0, step - 200) / (self.steps - 200)))
            self.log(
                "train", step, loss=self.loss(step) + self.random.gauss(0, 0.05), learning_rate=peak * warm,
                grad_norm=0.2 + 3 / (1 + step / 30) + abs(self.random.gauss(0, 0.08)), tokens=step * 2048,
                tokens_read=step * 2048, tokens_per_second=21_000 + self.random.gauss(0, 400), elapsed=step * 0.0613,
            )  # fmt: skip
            if step % valid_every == 0:
                row = evaluation(self.loss(step) + 0.06, 128, unit=self.unit, tokens=49_990, dropped=9, window=None)
                row = {name: value for name, value in row.items() if name not in MEASURED}
                self.log("valid", step, averaged=None, **row)
                times = {"copy_seconds": 0.1, "write_seconds": 0.1}
                self.log("checkpoint", step, directory=f"step-{step:08}", best=True, **times)

    def end(self) -> None:
        self.log("end", self.steps, elapsed=self.steps * 0.0613)

    def sweep(self, lengths: tuple[int, ...] = LENGTHS, **changes: Any) -> None:
        end, given = self.loss(self.steps) + 0.08, {"corpus": self.corpus["name"]} | changes
        rows = [evaluation(end + 0.16 / (1 + length / 40), length, unit=self.unit, **given) for length in lengths]
        shared = {name: rows[0][name] for name in MEASURED}
        self.log("sweep", self.steps, **shared, rows=rows)

    def sample(self, prompt: str, text: str, **changes: Any) -> None:
        settings = {"top_k": 40, "top_p": None, "temperature": 0.8, "seed": 1, "max_tokens": 400}
        settings |= {"mem_len": 256, "window": 256}
        settings |= {"prompt": prompt, "text": text, "checkpoint": "step-00004000"}
        self.log("sample", self.steps, **(settings | changes))

    def compression(self, text: int, zlib: int, lzma: int) -> None:
        fields = {"corpus": self.corpus["name"], "split": "test", "settings": SETTINGS}
        self.log("compression", self.steps, **fields, text=text, zlib=zlib, bz2=text * 241 // 1000, lzma=lzma)


def begun(path: Path, **options: str) -> FakeRun:
    run = FakeRun(path, unit=options.get("data.unit", "byte"), options={"train.steps": "100"} | options)
    run.start()
    run.train(valid_every=50)
    return run


def whole_run(path: Path, unit: str = "byte", options: dict[str, str] | None = None) -> FakeRun:
    """Write and return a finished run with all kinds of events in its log."""
    run = FakeRun(path, unit=unit, options=options)
    run.start()
    run.train()
    run.end()
    run.sweep()
    n_bytes = round(640_413 * BYTES_PER_TOKEN[unit])
    run.compression(n_bytes, n_bytes * 264 // 1000, n_bytes * 221 // 1000)
    run.sample(
        "def read_config(path):\n    ",
        'with open(path, "rb") as file:\n        return json.load(file)\n\n\ndef write(self, value: str | None) -> None:\n'
        '    """Write <b>bold</b> & "quoted" text.\n\n\tReturns:\n        None\n    """\n    self._stream.write(\x1b[0m\x07)\n',
    )
    run.sample(
        "class Stream:\n    ",
        "# \u05e9\u05dc\u05d5\u05dd \u202eright to left\u202c, na\u00efve \u2014 caf\u00e9 \u00b7 \ufffd\n" * 3,
        temperature=1.0, top_p=0.95, seed=None,
    )  # fmt: skip
    run.sample("import ", "os\nimport sys\n" * 12, temperature=0.0)
    return run
