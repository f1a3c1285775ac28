"""Measure the memory of `txl compress` and `txl decompress` at regular intervals over a long stream.

    python -m benchmarks.compression_memory results/compression-memory.json MIB [MIB ...]

Random letters are coded by a small recurrent model, in many lanes (which is fast) and blocks of 1 MiB, and decoded
again. Each length runs in a separate process. Only the compressed file is stored, on disk.
"""

from __future__ import annotations

import hashlib
import tempfile
from typing import IO, Any, cast

import numpy as np
import torch

import txl.compression.compressor as files
from txl.config import RecurrentConfig
from txl.data.characters import ByteVocabulary
from txl.models import build_model
from txl_lab.records import measure_and_record, process_bytes, run_alone

LETTERS, LANES = b"\nabcdefghijklmno", 256
SHAPE = RecurrentConfig(kind="lstm", n_layer=1, d_model=16)


class Letters:
    """A stream of random letters, generated as it is read; what is written to it instead is only digested."""

    def __init__(self, size: int = 0):
        self.left, self.digest, self.flush = size, hashlib.sha256(), lambda: None
        self._random = np.random.default_rng(1)

    def read(self, count: int) -> bytes:
        count = min(count, self.left)
        self.left -= count
        drawn = self._random.integers(len(LETTERS), size=count, dtype=np.uint8)
        text = np.frombuffer(LETTERS, dtype=np.uint8)[drawn].tobytes()
        self.digest.update(text)
        return text

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return len(data)


def case(text_size: str) -> dict[str, Any]:
    """Compress and decompress; return peak memory, and memory held after each of at most 16 equal parts."""
    mib = int(text_size)
    files._LANE_OF_BLOCK = (1 << 20) // LANES  # many lanes in a small block, for speed; decoders read its size
    torch.manual_seed(0)
    vocabulary = ByteVocabulary(list(LETTERS))
    model = files.CodingModel(build_model(SHAPE, vocabulary).eval(), vocabulary)
    start = process_bytes("VmRSS")
    held: dict[str, list[int]] = {"compress": [], "decompress": []}
    peaks = {}
    every = max(1, mib // 16) << 20

    def note(way: str, done: int) -> None:
        if done % every == 0:
            held[way].append(process_bytes("VmRSS"))

    with tempfile.TemporaryFile() as file:
        source, sink = Letters(mib << 20), Letters()
        sizes = files.compress(
            cast(IO[bytes], source), file, model=model, lanes=LANES, progress=lambda text, _: note("compress", text)
        )
        peaks["compress"] = process_bytes("VmHWM")
        file.seek(0)
        files.decompress(
            file,
            cast(IO[bytes], sink),
            name="the file",
            load=lambda: model,
            progress=lambda text, _: note("decompress", text),
        )
        peaks["decompress"] = process_bytes("VmHWM")  # peak over compress and decompress
    return {
        "text": f"{mib} MiB of random letters, 16 kinds",
        "bytes": sizes.text,
        "compressed_bytes": sizes.file,
        "model": {"family": SHAPE.family, "kind": SHAPE.kind, "n_layer": SHAPE.n_layer, "d_model": SHAPE.d_model},
        "lanes": LANES,
        "block": 1 << 20,
        "bytes_held_before": start,
        "peak_memory_bytes": peaks,
        "bytes_held": held,
        "round_trip": source.digest.digest() == sink.digest.digest(),
    }


def measure(*mib: str) -> list[dict[str, Any]]:
    return [run_alone("compression_memory", text_size) for text_size in mib]


if __name__ == "__main__":
    measure_and_record("compression_memory", measure, case, keeps_memory=False)
