"""Streams that are kept between requests: exact results, and constant size."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import txl
from tests.serving.conftest import LENGTHS, wait_for
from txl.analysis.observation import observed
from txl.evaluation.surprisal import surprisals
from txl.models.structure import evaluation_view
from txl.serving import scheduler as scheduler_module
from txl.serving.kept_streams import Operation
from txl.serving.requests import Limits
from txl.serving.texts import TAIL

TEXT = "12. The river rose in the night — and by morning “the lower fields” were under water.\n"
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture(autouse=True)
def nothing_left(request):
    """Delete all streams of the shared server after each test, and wait until no work is left."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for stream in server.get("/v1/streams")["data"]:
            server.client.delete(f"/v1/streams/{stream['id']}")
        wait_for(server.is_empty)


def new(server, text: str = TEXT, **settings: Any) -> str:
    return server.post("/v1/streams", {"text": text, **settings})["stream"]["id"]


def generate(server, stream: str, n: int = 20, **settings: Any) -> Any:
    return server.post(f"/v1/streams/{stream}/generate", {"max_tokens": n, **settings})


def snapshot(server, stream: str) -> bytes:
    answer = server.client.get(f"/v1/streams/{stream}/snapshot")
    assert answer.status_code == 200
    return answer.content


def restore(server, data: bytes) -> Any:
    answer = server.client.post("/v1/streams", content=data, headers=OCTETS)
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_from_a_text_the_text_of_txl_generate(server, served):
    stream = new(server, seed=5)
    expected = "".join(txl.generate(served.model, served.vocabulary, TEXT, max_tokens=60, seed=5, **LENGTHS))
    found = "".join(generate(server, stream, n)["text"] for n in (1, 2, 3, 4, 10, 40))  # characters are never cut
    assert expected.startswith(found)
    assert len(found) >= len(expected) - 1
    again = generate(server, new(server), 60, seed=5)
    assert again["seed"] == 5
    assert expected.startswith(again["text"])
    assert again["tokens_per_second"] > 0


def test_appended_text_is_scored_as_txl_score_does(server, served):
    rows = list(surprisals(served.model, served.vocabulary, TEXT * 5, segment=8, **LENGTHS))
    made = server.post("/v1/streams", {"text": TEXT[:30], "logprobs": 3})
    stream, tokens = made["stream"]["id"], made["tokens"]
    rest = TEXT[30:] + TEXT * 4
    tokens += server.post(f"/v1/streams/{stream}/append", {"text": rest[:1], "logprobs": 3})["tokens"]
    found = server.post(f"/v1/streams/{stream}/append", {"text": rest[1:], "logprobs": 3, "attention": True})
    tokens += found["tokens"]
    assert [token["position"] for token in tokens] == list(range(len(rows)))
    assert bytes(value for token in tokens for value in token["bytes"]) == (TEXT * 5).encode()
    assert "".join(token["piece"] for token in tokens) == TEXT * 5
    assert tokens[0]["surprisal"] is None
    expected = [row.surprisal for row in rows[1:]]
    assert [token["surprisal"] for token in tokens[1:]] == pytest.approx(expected, abs=1e-5)
    for token in tokens[1:]:
        log_probs = [other["logprob"] for other in token["top"]]
        assert log_probs == sorted(log_probs, reverse=True)
        assert token["rank"] == 1 or token["logprob"] <= token["top"][0]["logprob"]
    about = found["stream"]
    assert about["bits"] == pytest.approx(sum(bits for bits in expected if bits is not None), abs=1e-3)
    assert about["characters"] == 5 * len(TEXT) - 1
    assert about["bits_per_character"] == pytest.approx(about["bits"] / about["characters"])
    assert about["memory"] == about["memory_limit"] == 15


def test_how_far_back_attention_reached(server, served):
    """Compare with the attention weights of the model, for tokens that are read and tokens that are drawn."""
    made = server.post("/v1/streams", {"text": TEXT, "attention": True, "logprobs": 0})
    tokens = made["tokens"] + generate(server, made["stream"]["id"], 6, attention=True)["tokens"]
    assert tokens[0]["attention"] is None
    for position, token in enumerate(tokens[1:], start=1):
        found = token["attention"]
        seen = min(position, 16)  # keys in the window
        assert sum(found["histogram"]) == pytest.approx(1, abs=1e-3)
        assert 0 <= found["mean"] <= seen - 1
        assert 0 <= found["reach"] <= seen - 1
    ids = torch.tensor([[token["id"] for token in tokens]])
    view, weights = evaluation_view(served.model), []
    with torch.no_grad(), observed(view, lambda layer, inputs: weights.append(inputs.weights().mean(0))):
        view.hidden_states(ids[:, :-1], view.init_state(1, **LENGTHS))
    mean = torch.stack(weights).mean(0)
    for query, token in enumerate(tokens[1:]):
        distances = query - torch.arange(mean.shape[1])
        assert token["attention"]["mean"] == pytest.approx(float((mean[query] * distances).sum()), abs=0.02)
        assert token["attention"]["histogram"][0] == pytest.approx(float(mean[query, query]), abs=1e-3)


def test_progress_of_a_long_text_is_reported(server):
    stream = new(server)
    *progress, last = server.events(f"/v1/streams/{stream}/append", {"text": TEXT * 20, "logprobs": 0})
    total = len((TEXT * 20).encode())
    assert [part["read"] for part in progress] == sorted(part["read"] for part in progress)
    assert progress[-1]["read"] == progress[-1]["total"] == last["read"] == total
    assert len(progress) == math.ceil(total / 8)
    assert sum(len(part["tokens"]) for part in progress) == total
    assert last["scored"] == total


def test_streamed_generation(server):
    first, second = new(server, seed=8), new(server, seed=8)
    asked = {"max_tokens": 40, "logprobs": 2, "stop": ["zzzz"]}
    whole = generate(server, first, 40, logprobs=2, stop=["zzzz"])
    *parts, last = server.events(f"/v1/streams/{second}/generate", asked)
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert last["finish_reason"] == whole["finish_reason"]
    own = dict.fromkeys(("id", "idle_seconds", "expires_in", "created"))
    assert last["stream"] | own == whole["stream"] | own


def test_forks(server):
    stream = new(server, TEXT * 30, seed=6)
    drawn = generate(server, stream, 700, logprobs=0)["tokens"]
    about = server.get(f"/v1/streams/{stream}")
    assert about["tokens"] - about["fork_from"] >= 512
    twin = server.post(f"/v1/streams/{stream}/fork")
    assert generate(server, twin["id"], 20)["text"] == generate(server, stream, 20)["text"]
    other = server.post(f"/v1/streams/{stream}/fork", {"seed": 99})
    assert other["seed"] == 99
    at = drawn[-100]["position"]
    # Forks at a token that was drawn: `back` reads the same tokens again, `instead` begins with another token.
    back = server.post(f"/v1/streams/{stream}/fork", {"at": at})
    assert back["tokens"] == at
    # A fork draws the same text again; so does a fork of this fork at an earlier token.
    older = server.post(f"/v1/streams/{back['id']}/fork", {"at": at - 20})
    redrawn = [generate(server, server.post(f"/v1/streams/{stream}/fork", {"at": at})["id"], 40, logprobs=0)["tokens"]]
    redrawn.append(generate(server, older["id"], 60, logprobs=0)["tokens"][20:])
    for tokens in redrawn:
        assert [token["id"] for token in tokens] == [token["id"] for token in drawn[-100:-60]]
    again = server.post(
        f"/v1/streams/{back['id']}/append", {"tokens": [token["id"] for token in drawn[-100:]], "logprobs": 0}
    )
    expected = [token["logprob"] for token in drawn[-100:]]
    assert [token["logprob"] for token in again["tokens"]] == pytest.approx(expected, abs=1e-5)
    assert again["stream"]["bits"] == pytest.approx(about["bits"], abs=1e-2)
    assert again["stream"]["characters"] == pytest.approx(about["characters"], abs=2)
    instead = server.post(f"/v1/streams/{stream}/fork", {"at": at, "token": 65})
    assert instead["tokens"] == at + 1
    more = server.post(f"/v1/streams/{instead['id']}/append", {"text": "b", "logprobs": 0})
    assert more["tokens"][0]["position"] == at + 1
    for wrong in ({"at": about["fork_from"] - 1}, {"at": about["tokens"] + 21}, {"token": 256}):
        server.refused(400, f"/v1/streams/{stream}/fork", wrong)
    assert server.get(f"/v1/streams/{stream}")["tokens"] == about["tokens"] + 20


def test_a_fork_at_the_oldest_token_knows_those_before_it(server):
    stream = new(server, "é" * 600 + "a")
    assert server.get(f"/v1/streams/{stream}")["tokens"] == 1201
    restored = restore(server, snapshot(server, stream))
    generate(server, restored["id"], 3)
    for name in (stream, restored["id"]):
        kept = server.kept.get(name)
        at = server.get(f"/v1/streams/{name}")["fork_from"]
        assert at > TAIL
        twin = server.kept.get(server.post(f"/v1/streams/{name}/fork", {"at": at})["id"])
        read = list(("é" * 600 + "a").encode())
        assert twin.tail == tuple(read[at - TAIL : at])
        assert kept.state.n_token > twin.state.n_token == at


def test_memory_does_not_grow(server):
    """The size of a stream is the same after many times its memory length; ten million tokens need as much."""
    stream = new(server, TEXT)
    kept = server.kept.get(stream)
    sizes = set()
    for number in range(3):
        server.post(f"/v1/streams/{stream}/append", {"text": TEXT * 12})
        for n in (1, 7, 300 + number):
            generate(server, stream, n)
        assert len(kept.recent) <= 2 * 512 + 700 + 8
        assert len(kept.earlier) <= 2
        sizes.add(kept.nbytes)
        assert snapshot(server, stream)
    about = server.get(f"/v1/streams/{stream}")
    assert about["tokens"] > 4000
    assert len(sizes) == 1
    one = sum(tensor.nbytes for tensor in (*kept.state.keys, *kept.state.values))
    assert kept.nbytes <= 3 * one
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in (*kept.state.keys, *kept.state.values))


def test_memory_does_not_grow_within_a_request(server, monkeypatch):
    """States saved every 512 tokens of a long text are released while the text is read, also by the waiting request."""
    states, most, real = weakref.WeakSet(), [], scheduler_module.SavedEvent

    class Saved(real):
        def __init__(self, state, drawn):
            super().__init__(state, drawn)
            time.sleep(0.01)  # the time of a larger model
            states.add(state.keys[0])
            most.append(len(states))

    monkeypatch.setattr(scheduler_module, "SavedEvent", Saved)
    stream = new(server, TEXT)
    server.post(f"/v1/streams/{stream}/append", {"text": TEXT * 60})
    generate(server, stream, 2 * 512)
    assert len(most) > 10
    assert max(most) <= 8


def test_a_state_that_no_memory_is_left_for_fails_its_own_request_alone(server, monkeypatch):
    stream, other = new(server, TEXT), new(server, TEXT)

    def refuses_memory(stream):
        raise torch.OutOfMemoryError("no memory for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(server.service.engine, "save", refuses_memory)
        error = server.refused(500, f"/v1/streams/{stream}/generate", {"max_tokens": 5})
        assert "failed here" in error["message"]
        assert server.service.scheduler.is_alive()
    assert generate(server, other, 5)["usage"]["completion_tokens"] == 5
    assert generate(server, stream, 5)["usage"]["completion_tokens"] == 5


def test_numbers_of_an_idle_server(server):
    stream, metrics = new(server, TEXT * 20), server.service.metrics
    generate(server, stream, 5)
    wait_for(lambda: metrics.stream_bytes._value.get() == server.kept.get(stream).nbytes)  # updated once a second
    wait_for(lambda: metrics.running._value.get() == metrics.queued._value.get() == 0)
    assert metrics.stream_bytes._value.get() > 0


def test_empty_streams(server):
    about = server.post("/v1/streams")
    assert about["tokens"] == 0
    assert about["expires_in"] == pytest.approx(3600, abs=5)
    assert about["created"] == pytest.approx(time.time(), abs=60)
    assert about["bits_per_token"] is None
    assert "empty" in server.refused(400, f"/v1/streams/{about['id']}/generate", {})["message"]
    moved = restore(server, snapshot(server, about["id"]))
    for stream in (about, moved):
        found = server.post(f"/v1/streams/{stream['id']}/append", {"text": TEXT, "logprobs": 0})
        assert found["tokens"][0]["logprob"] is None
        assert found["scored"] == len(TEXT.encode()) - 1


def test_limits(server_with):
    server = server_with(Limits(max_kept=2, idle_seconds=0.6))
    stream = [new(server) for _ in range(2)][-1]
    answer = server.client.post("/v1/streams", json={"text": "a"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    server.refused(429, f"/v1/streams/{stream}/fork", {})
    server.refused(429, "/v1/streams", content=b"", headers=OCTETS)
    assert server.client.delete(f"/v1/streams/{stream}").json()["deleted"]
    server.refused(404, f"/v1/streams/{stream}", method="GET")
    new(server)
    wait_for(lambda: not len(server.kept))  # both streams were idle for too long


def test_one_request_at_a_time(server):
    stream = new(server)
    with server.client.stream(
        "POST", f"/v1/streams/{stream}/generate", json={"max_tokens": 60000, "stream": True}
    ) as answer:
        lines = answer.iter_lines()  # kept in a variable: deleting it closes the connection
        next(lines)
        for path, value in (("generate", {}), ("append", {"text": "a"}), ("fork", {})):
            assert server.refused(409, f"/v1/streams/{stream}/{path}", value)["code"] == "busy"
        server.refused(409, f"/v1/streams/{stream}/snapshot", method="GET")
        assert server.get(f"/v1/streams/{stream}")["busy"]
    wait_for(server.is_empty)  # the client is gone: generation ends, and the stream keeps the drawn tokens
    wait_for(lambda: not server.get(f"/v1/streams/{stream}")["busy"])
    about = server.get(f"/v1/streams/{stream}")
    assert len(TEXT.encode()) < about["tokens"] < 60000
    assert about["drawn"] == about["tokens"] - len(TEXT.encode())
    assert generate(server, stream, 5)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", ["append", "generate", "completions"])
def test_the_engine_waits_for_a_client_that_does_not_read(server_with, path):
    """What such a client has not received would fill the server's memory."""
    limit = 5_000
    server = server_with(Limits(max_reported=limit, max_tokens=200_000))
    stream, outboxes = new(server), []
    scheduler, real = server.service.scheduler, server.service.scheduler.submit
    scheduler.submit = lambda works: (outboxes.extend(work.outbox for work in works), real(works))
    body: dict[str, Any] = {"stream": True, "logprobs": 20}
    body |= {"text": TEXT * 1000} if path == "append" else {"max_tokens": 200_000}
    body |= {"prompt": "a"} if path == "completions" else {}
    route = "/v1/completions" if path == "completions" else f"/v1/streams/{stream}/{path}"
    with server.connection(route, body, buffer=4096):
        wait_for(lambda: outboxes and outboxes[0].is_overfull)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})["usage"]["completion_tokens"] == 3
        [outbox] = outboxes[:1]
        assert outbox._n_put - outbox._n_sent < limit + 21 * 128
        assert not server.is_empty()
    wait_for(server.is_empty)  # the client is gone
    if path != "completions":
        wait_for(lambda: not server.get(f"/v1/streams/{stream}")["busy"])
        about = server.get(f"/v1/streams/{stream}")
        assert len(TEXT.encode()) < about["tokens"] < len(TEXT.encode()) * 1000, "what was read or drawn is kept"


def test_a_client_that_reads_may_receive_any_number_of_log_probabilities(server_with):
    server = server_with(Limits(max_reported=5_000))
    *_, last = server.events(f"/v1/streams/{new(server)}/append", {"text": TEXT * 10, "logprobs": 20})
    assert last["object"] == "stream.append"
    assert last["read"] * 21 > 2 * 5_000


def test_the_figures_of_an_append_are_those_of_its_own_text(server, monkeypatch):
    """The stream is free before a slow client has received its last event, and another request may change it."""
    stream, real = new(server), Operation.batches

    async def slow(operation: Operation):
        async for batch in real(operation):
            yield batch
        if operation.work.ids.numel() > 9:
            await asyncio.to_thread(append_beside, server, stream, "other")

    monkeypatch.setattr(Operation, "batches", slow)
    *_, last = server.events(f"/v1/streams/{stream}/append", {"text": TEXT})
    assert (last["read"], last["scored"]) == (len(TEXT.encode()), len(TEXT.encode()))
    assert last["stream"]["tokens"] == 2 * len(TEXT.encode()) + 5
    assert last["bits"] < last["stream"]["bits"]


def append_beside(server, stream: str, text: str) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.post(f"/v1/streams/{stream}/append", json={"text": text}).is_success


@pytest.mark.parametrize(("route", "value"), [("append", {"text": TEXT * 400}), ("generate", {"max_tokens": 60000})])
def test_a_request_whose_stream_is_deleted_is_told_so(server, route, value):
    stream = new(server)
    with ThreadPoolExecutor() as beside:
        waiting = beside.submit(server.refused, 404, f"/v1/streams/{stream}/{route}", value)
        wait_for(lambda: server.get(f"/v1/streams/{stream}")["busy"])
        assert server.client.delete(f"/v1/streams/{stream}").status_code == 200
        assert waiting.result()["code"] == "no_such_stream"


def test_a_stream_whose_creation_is_broken_off_is_deleted(server):
    with server.client.stream("POST", "/v1/streams", json={"text": TEXT * 400, "stream": True}) as answer:
        assert answer.status_code == 201
        lines = answer.iter_lines()  # held, because httpx closes the connection with its last iterator
        next(lines)
        assert len(server.kept) == 1
    wait_for(lambda: server.is_empty() and len(server.kept) == 0)


def test_answers_that_would_take_too_much_memory_are_refused(server_with):
    server = server_with(Limits(max_reported=500))
    stream = new(server)
    for route, value in (("append", {"text": TEXT}), ("generate", {"max_tokens": 60})):
        error = server.refused(400, f"/v1/streams/{stream}/{route}", value | {"logprobs": 9})
        assert "one answer has at most 500" in error["message"]
        server.post(f"/v1/streams/{stream}/{route}", value)  # sums alone take no memory
        progressive = value | {"logprobs": 9, "stream": True}  # an event stream is not held in memory
        assert server.client.post(f"/v1/streams/{stream}/{route}", json=progressive).status_code == 200
    server.refused(400, "/v1/streams", {"text": TEXT, "attention": True, "logprobs": 9})
    assert len(server.kept) == 1


def test_no_more_tokens_are_drawn_than_the_limit_by_default(server_with):
    server = server_with(Limits(max_tokens=5))
    for path, value in ((f"/v1/streams/{new(server)}/generate", {}), ("/v1/completions", {"prompt": TEXT})):
        assert server.post(path, value)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("path", "value", "param"),
    [
        ("", {"logprobs": 3}, "logprobs"), ("", {"stream": True}, "stream"), ("", {"text": "a", "tokens": [1]}, "text"),
        ("", {"text": ""}, "text"), ("", {"text": 3}, "text"), ("", {"prompt": "a"}, "prompt"), ("/append", {}, "text"),
        ("/append", {"tokens": "a"}, "tokens"), ("/append", {"tokens": [999]}, "tokens"),
        ("/append", {"text": "a", "seed": 3}, "seed"), ("/generate", {"max_tokens": 0}, "max_tokens"),
        ("/generate", {"echo": True}, "echo"), ("/fork", {"at": -1}, "at"), ("/fork", {"position": 3}, "position"),
    ],
)  # fmt: skip
def test_mistakes_are_named(server, path, value, param):
    stream = f"/{new(server)}" if path else ""
    assert server.refused(400, f"/v1/streams{stream}{path}", value)["param"] == param
    assert len(server.kept) == (1 if path else 0)


def test_the_example_that_follows_a_log(server, tmp_path):
    """Only an unusual line among lines like the training text is printed; a missing server is reported."""
    log = tmp_path / "log"
    odd = "\x7fELF@@@@ ~~~~ \u00fe\u00ff\n"
    lines = [f"{number}. The river rose in the night\n" for number in range(6)]
    log.write_text("".join([*lines[:3], odd, *lines[3:]]), encoding="utf-8")
    example = Path(__file__).parents[2] / "examples" / "follow_log.py"
    first = server.post("/v1/streams", {"text": lines[0]})["stream"]["id"]
    usual = server.post(f"/v1/streams/{first}/append", {"text": lines[1]})
    bits = usual["bits"] / len(lines[1]) + 0.8

    def run(url: str) -> subprocess.CompletedProcess[str]:
        words = [str(log), "--url", url, "--bits", str(bits), "--from-start", "--once"]
        command = [sys.executable, str(example), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = run(server.url)
    assert done.returncode == 0, done.stderr
    assert odd.strip() in done.stdout
    assert "river" not in done.stdout
    gone = run("http://127.0.0.1:9")
    assert gone.returncode == 2
    assert "is txl serve running there?" in gone.stderr
