"""Measure how long one client's hostile request of 8 MB keeps the other clients of a server waiting.

    python -m benchmarks.hostile results/hostile.json
    python -m benchmarks.hostile --unit bpe --only text     # one unit, and the requests whose name has "text"

For each unit, a server in a process of its own serves a small model with random weights. A second process asks
`/health` every 10 milliseconds, whether or not the answers before have come. Meanwhile one request is sent. The waiting
times are those of the questions that were open between the request's first byte and its answer; if the answer takes
longer than `LEAVES` seconds, the client leaves. The result is the 99th percentile and the largest waiting time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import multiprocessing
import pydoc_data.topics
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from benchmarks.server_process import ask, served

import txl
from txl.data.bpe import BpeVocabulary
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.devices import keep_freed_memory
from txl.serving.service import Served, Service
from txl_lab.records import write

SIZE = (8 << 20) - 64  # length of the hostile part of a body in bytes; bodies up to 8 MiB are accepted.
LEAVES = 5.0
NATURAL = "\n".join(pydoc_data.topics.topics.values())
TEXTS = {
    "natural": NATURAL,
    "spaces": " ",
    "digits": "0123456789",
    "one word": "abcdefghij",
    "marks": "!",
    "lines": "a\n",
    "CJK": "天地玄黃宇宙洪荒",
}
ROUTES = {"/tokenize": "prompt", "/v1/completions": "prompt", "/v1/streams": "text", "/v1/streams/ID/append": "text"}
IDS = {"/detokenize": "tokens", "/v1/completions": "prompt", "/v1/streams": "tokens", "/v1/streams/ID/append": "tokens"}


def vocabulary(unit: str) -> Vocabulary:
    """Return a vocabulary of a unit, made from `NATURAL`."""
    if unit == "byte":
        return ByteVocabulary()
    if unit == "char":
        return CharVocabulary(sorted(set(NATURAL)), normalise=True)
    if unit == "bpe":
        return BpeVocabulary.train([NATURAL], 8192, normalise=True)
    words = WordVocabulary(["<eos>", "<unk>"], rule="punctuation").cut(NATURAL)
    common = [word for word, _ in Counter(words).most_common(8000) if word != "<eos>"]
    return WordVocabulary(["<eos>", "<unk>", *common], rule="punctuation", normalise=True)


def service_of(unit: str, threads: int) -> Service:
    keep_freed_memory()
    run, symbols = txl.preset("stdlib-tiny"), vocabulary(unit)
    torch.manual_seed(0)
    model = txl.build_model(run.model, symbols).eval()
    gc.freeze()
    sys.setswitchinterval(0.001)
    return Service(Served(model, symbols, unit, threads=1, mem_len=8192, window=8192))


def ask_health(url: str, tell: Any) -> None:
    """Between each two messages, ask `/health` every 10 ms; then send when each question was asked and answered."""
    place = urlsplit(url)
    found: list[tuple[float, float]] = []
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(began: float) -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(place.hostname, place.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readexactly(int(re.findall(rb"(?i)content-length: (\d+)", head)[0]))
        found.append((began, time.monotonic()))
        idle.append((reader, writer))

    async def run() -> None:
        tasks, due = set(), time.monotonic()
        while not tell.poll():
            task = asyncio.create_task(ask(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += 0.01
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.gather(*tasks)

    tell.send("ready")
    while True:
        tell.recv()
        found.clear()
        idle.clear()
        asyncio.run(run())
        tell.recv()
        tell.send(found)


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield the name, the route and the body of each request."""

    def filled(text: str) -> str:
        value = json.dumps(text, ensure_ascii=False)[1:-1]
        return f'"{value * (SIZE // len(value.encode()))}"'

    def of(entry: str, values: str) -> bytes:
        return f'{{"{entry}":{values}}}'.encode()

    def many(value: str, count: int | None = None) -> str:
        return "[" + ",".join([value] * (count or SIZE // (len(value) + 1))) + "]"

    for path, entry in ROUTES.items():
        for name, text in TEXTS.items():
            yield f"{path} text {name}", path, of(entry, filled(text))
        escapes = {r"\u4e2d": 6, r"a\n": 3, r"\ud83d\ude00": 12, r"\"": 2, r"\ud800": 6}
        for escape, width in escapes.items():
            yield f"{path} text {escape}", path, of(entry, '"' + escape * (SIZE // width) + '"')
    yield "/v1/completions 128 texts", "/v1/completions", of("prompt", many(json.dumps(NATURAL[: SIZE // 160]), 128))
    yield (
        "/v1/completions echo",
        "/v1/completions",
        json.dumps({"prompt": NATURAL[:500_000], "echo": True, "logprobs": 0, "max_tokens": 0}).encode(),
    )
    for path, entry in IDS.items():
        yield f"{path} 4M ids", path, of(entry, many("7"))
        yield f"{path} 1M ids", path, of(entry, many("77", 1 << 20))
        yield f"{path} 100,000 ids", path, of(entry, many("77", 100_000))
        yield f"{path} [[[[", path, of(entry, "[" * SIZE)
    for value in ("[]", "{}", '""', "1.5e3", "-1", "true", "9" * 4300, "null"):
        for path in ("/v1/completions", "/detokenize"):
            yield f"{path} list of {value[:8]}", path, of(IDS[path], many(value))
    yield "/v1/completions 128 x 20,000 ids", "/v1/completions", of("prompt", many(many("77", 20_000), 128))
    for path in sorted(ROUTES.keys() | IDS.keys() | {"/v1/streams/ID/generate", "/v1/streams/ID/fork"}):
        keys = ",".join(f'"{number:06d}":1' for number in range(SIZE // 11))
        yield f"{path} 700,000 names", path, f"{{{keys}}}".encode()
        yield f"{path} a name of 8 MB", path, of("x" * SIZE, "1")
        fields = ("n", "seed", "stop", "max_tokens", "logprobs", "at", "model", "stream_options")
        for entry in fields if path in ("/v1/completions", "/v1/streams/ID/generate") else ():
            yield f"{path} {entry} list", path, of(entry, many("7"))
            yield f"{path} {entry} text", path, of(entry, '"' + "y" * SIZE + '"')
            yield f"{path} {entry} number", path, of(entry, "9" * 1_000_000)
    yield "spaces", "/tokenize", b'{"prompt":' + b" " * SIZE + b'"a"}'
    chance = random.Random(0)
    yield "snapshot noise", "snapshot", chance.randbytes(SIZE)
    deep = b'{"__metadata__":{"txl_stream":' + b"[" * SIZE
    yield "snapshot header", "snapshot", len(deep).to_bytes(8, "little") + deep
    lists = json.dumps({"__metadata__": {"txl_stream": many("[]")}}).encode()
    yield "snapshot lists", "snapshot", len(lists).to_bytes(8, "little") + lists
    yield "chunks of 1 byte", "chunked", b"2\r\n[]\r\n" * (SIZE // 7)


def send(url: str, path: str, body: bytes, stream: str) -> tuple[str, float, float]:
    """Send one request; return its status, and when its first byte was sent and its answer came."""
    place = urlsplit(url)
    kind = "application/octet-stream" if path == "snapshot" else "application/json"
    framing = "Transfer-Encoding: chunked" if path == "chunked" else f"Content-Length: {len(body)}"
    path = {"snapshot": "/v1/streams", "chunked": "/tokenize"}.get(path, path).replace("ID", stream)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode()
    with socket.create_connection((place.hostname or "", place.port or 0)) as connection:
        began = time.monotonic()
        connection.settimeout(LEAVES)
        try:
            connection.sendall(head + body)
            connection.settimeout(max(0.1, began + LEAVES - time.monotonic()))
            answer = http.client.HTTPResponse(connection, method="POST")
            answer.begin()
            answer.read()
            status = str(answer.status)
        except (TimeoutError, ConnectionError, http.client.HTTPException):
            status = "left"
        return status, began, time.monotonic()


def measure(unit: str, only: str) -> dict[str, Any]:
    context, results = multiprocessing.get_context("spawn"), {}
    ours, theirs = context.Pipe()
    with served(service_of, unit) as url:
        prober = context.Process(target=ask_health, args=(url, theirs))
        prober.start()
        ours.recv()
        try:
            for name, path, body in bodies():
                if only in name:
                    results[name] = waits_during(url, path, body, ours)
                    print(f"{unit:5} {name:45} {results[name]}", flush=True)
        finally:
            prober.terminate()
            prober.join()
    return results


def waits_during(url: str, path: str, body: bytes, prober: Any) -> dict[str, Any]:
    """Send one request, and return its status and how long questions waited meanwhile."""
    stream = json.loads(ask(url, "POST", "/v1/streams", {"seed": 1}).read())["id"]
    prober.send(None)
    time.sleep(0.3)
    status, began, ended = send(url, path, body, stream)
    time.sleep(0.1)
    prober.send(None)
    waits = sorted(1000 * (end - start) for start, end in prober.recv() if end > began and start < ended)
    for kept in json.loads(ask(url, "GET", "/v1/streams").read())["data"]:
        ask(url, "DELETE", f"/v1/streams/{kept['id']}").read()
    return {
        "status": status,
        "seconds": round(ended - began, 3),
        "questions": len(waits),
        "p99_ms": round(waits[min(len(waits) - 1, int(0.99 * len(waits)))], 1),
        "largest_ms": round(waits[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", help="file for the result")
    parser.add_argument("--unit", action="append", choices=("byte", "char", "word", "bpe"))
    parser.add_argument("--only", default="", help="part of the names of the requests to send")
    given = parser.parse_args()
    found = {unit: measure(unit, given.only) for unit in given.unit or ("byte", "char", "word", "bpe")}
    every = [each for unit in found.values() for each in unit.values()]
    worst = {key: max(each[key] for each in every) for key in ("p99_ms", "largest_ms")}
    print("worst:", worst)
    if given.out:
        write(Path(given.out), "python -m benchmarks.hostile", {"worst": worst, "units": found})


if __name__ == "__main__":
    main()
