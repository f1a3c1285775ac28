"""Compare the server with `txl generate` and with the engine alone, in one run with random weights.

    python -m benchmarks.serving results/serving.json
    python -m benchmarks.serving FILE quick       # a test run of a few seconds

For each shape, the benchmark measures: one text from the server and from `txl.generate`, alternately; 1, 8 and 32 texts
at once from the server and from the engine alone, with equal prompts; latency of the first token and of the following
pieces, with half and all of 8 places taken; and the time to save and restore a stream with full memory. The server runs
in a separate process, as usual; the time that the client needs counts against the server.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from benchmarks.server_process import ask, served

import txl
from txl.data.characters import ByteVocabulary
from txl.models.language_model import LanguageModel
from txl.serving.service import Served, Service
from txl_lab.records import measure_and_record

# Number of tokens of a text, and number of rounds, for each shape
PRESETS = {"enwik8-12L": (200, 5), "stdlib-tiny": (1000, 7)}
QUICK = {"stdlib-tiny": (40, 2)}
PROMPT = "The river rose in the night, and by morning the lower fields were under water. " * 4
TOGETHER = (1, 8, 32)
PLACES = 8


def made(preset: str) -> tuple[LanguageModel, ByteVocabulary, dict[str, Any]]:
    """Return a model of a preset's shape, its vocabulary, and its test settings."""
    run, vocabulary = txl.preset(preset), ByteVocabulary()
    torch.manual_seed(0)
    model = txl.build_model(run.model, vocabulary).eval()
    return model, vocabulary, dict(run.eval.lengths.options())


def service_of(preset: str, places: int, threads: int) -> Service:
    model, vocabulary, lengths = made(preset)
    return Service(Served(model, vocabulary, preset, max_streams=places, threads=threads, **lengths))


def arrivals(url: str, n_token: int, seed: int) -> list[float]:
    """Return the time at which a text was requested, and the arrival times of its pieces."""
    times = [time.perf_counter()]
    value = {"prompt": PROMPT, "max_tokens": n_token, "seed": seed, "stream": True}
    for line in ask(url, "POST", "/v1/completions", value):
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    return times


def text_rate(url: str, n_token: int) -> float:
    """Return the tokens per second of one streamed text, from the first token to the last."""
    times = arrivals(url, n_token, 1)
    return (n_token - 1) / (times[-1] - times[1])


def generate_rate(preset: str, n_token: int) -> float:
    """Return the tokens per second of `txl.generate` with the settings of the command `txl generate`."""
    model, vocabulary, lengths = made(preset)
    times = []
    for _ in txl.generate(model, vocabulary, PROMPT, max_tokens=n_token, seed=1, **lengths):
        times.append(time.perf_counter())
    return (n_token - 1) / (times[-1] - times[0])


def engine_rate(preset: str, n_stream: int, n_token: int) -> float:
    """Return the tokens per second of the engine alone, which reads prompts in turn and decodes them together."""
    model, vocabulary, lengths = made(preset)
    engine = txl.DecodeEngine(model, max_streams=n_stream, **lengths)
    began = time.perf_counter()
    for seed in range(n_stream):
        engine.join(torch.as_tensor(vocabulary.encode(PROMPT)), seed=seed)
    for _ in range(n_token):
        engine.step()
    return n_stream * n_token / (time.perf_counter() - began)


def together_rate(url: str, n_stream: int, n_token: int) -> float:
    """Return the tokens per second of simultaneous texts from the first request to the last token, prompts included."""
    times: list[tuple[float, float]] = []
    gate = threading.Barrier(n_stream)

    def request(seed: int) -> None:
        gate.wait()
        found = arrivals(url, n_token, seed)
        times.append((found[0], found[-1]))

    with ThreadPoolExecutor(n_stream) as pool:
        list(pool.map(request, range(n_stream)))
    return n_stream * n_token / (max(end for _, end in times) - min(began for began, _ in times))


def latency(url: str, n_client: int, n_token: int, n_request: int) -> dict[str, float]:
    """Return the milliseconds to the first token and between pieces, for clients that send requests in sequence."""
    firsts: list[float] = []
    gaps: list[float] = []

    def request(client: int) -> None:
        for number in range(n_request):
            times = arrivals(url, n_token, 100 * client + number)
            firsts.append(times[1] - times[0])
            gaps.extend(after - before for before, after in pairwise(times[1:]))

    with ThreadPoolExecutor(n_client) as pool:
        list(pool.map(request, range(n_client)))

    def at(values: list[float], part: float) -> float:
        return round(1000 * sorted(values)[min(len(values) - 1, int(part * len(values)))], 3)

    return {
        "clients": n_client,
        "first_token_ms_median": at(firsts, 0.5),
        "first_token_ms_p95": at(firsts, 0.95),
        "piece_ms_median": at(gaps, 0.5),
        "piece_ms_p95": at(gaps, 0.95),
    }


def snapshots(url: str, rounds: int) -> dict[str, float]:
    """Return the milliseconds to save and to restore a stream with full memory."""
    about = json.loads(ask(url, "POST", "/v1/streams", {}).read())
    n_byte = about["memory_limit"] + 1000
    text = (PROMPT * (n_byte // len(PROMPT) + 1))[:n_byte]
    ask(url, "POST", f"/v1/streams/{about['id']}/append", {"text": text}).read()
    saving, restoring, data = [], [], b""
    for _ in range(rounds):
        began = time.perf_counter()
        data = ask(url, "GET", f"/v1/streams/{about['id']}/snapshot").read()
        saving.append(time.perf_counter() - began)
        began = time.perf_counter()
        back = json.loads(ask(url, "POST", "/v1/streams", data, "application/octet-stream").read())
        restoring.append(time.perf_counter() - began)
        ask(url, "DELETE", f"/v1/streams/{back['id']}").read()
    return {
        "bytes": len(data),
        "save_ms": round(1000 * statistics.median(saving), 2),
        "restore_ms": round(1000 * statistics.median(restoring), 2),
    }


def measure(preset: str, n_token: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": n_token, "rounds": rounds, "threads": torch.get_num_threads()}
    with served(service_of, preset, max(TOGETHER)) as url:
        arrivals(url, 8, 1)
        pairs = [(generate_rate(preset, n_token), text_rate(url, n_token)) for _ in range(rounds)]
        found["one_text"] = {
            "generate_tokens_per_second": round(statistics.median(ours for ours, _ in pairs), 2),
            "server_tokens_per_second": round(statistics.median(theirs for _, theirs in pairs), 2),
            "server_over_generate": round(statistics.median(theirs / ours for ours, theirs in pairs), 4),
            "each_round": [round(theirs / ours, 4) for ours, theirs in pairs],
        }
        found["together"] = []
        for n_stream in TOGETHER:
            sizes = (n_stream, n_token)
            both = [(engine_rate(preset, *sizes), together_rate(url, *sizes)) for _ in range(max(2, rounds // 2))]
            ours, theirs = (statistics.median(rates) for rates in zip(*both, strict=True))
            ratio = statistics.median(server / engine for engine, server in both)
            row = {"texts": n_stream, "engine_tokens_per_second": round(ours, 2)}
            row |= {"server_tokens_per_second": round(theirs, 2), "server_over_engine": round(ratio, 4)}
            found["together"].append(row)
        found["snapshot"] = snapshots(url, rounds)
    with served(service_of, preset, PLACES) as url:
        arrivals(url, 8, 1)
        found["latency"] = {
            name: latency(url, clients, max(20, n_token // 4), rounds)
            for name, clients in (("half_load", PLACES // 2), ("full_load", PLACES))
        }
    return found


def main(quick: str = "") -> dict[str, Any]:
    return {preset: measure(preset, *sizes) for preset, sizes in (QUICK if quick else PRESETS).items()}


if __name__ == "__main__":
    measure_and_record("serving", main, keeps_memory=False)
