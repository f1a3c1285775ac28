"""More clients than a server can serve, most of which misbehave: the server returns to its previous state."""

from __future__ import annotations

import gc
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx

from tests.serving.conftest import running, wait_for
from txl.generation.engine import StreamState
from txl.serving.requests import Limits
from txl.serving.service import Service

PROMPT = "12. The river rose in the night"


def texts(server) -> list[str]:
    value = {"prompt": [PROMPT, "Nobody"], "max_tokens": 30, "seed": 1}
    return [choice["text"] for choice in server.post("/v1/completions", value)["choices"]]


def test_clients_that_disconnect_at_random(server_with):
    server = server_with(Limits(max_queue=300, max_kept=300))
    expected = texts(server)
    stream = server.post("/v1/streams", {"text": PROMPT, "seed": 2})["stream"]["id"]

    def misbehave(number: int) -> None:
        chance = random.Random(number)
        value = {"prompt": PROMPT * chance.randrange(1, 30), "max_tokens": 1000, "n": chance.randrange(1, 4)}
        value |= {"stream": chance.random() < 0.6, "logprobs": chance.choice([None, 2]), "echo": chance.random() < 0.3}
        path = "/v1/completions"
        if chance.random() < 0.2:
            path, value = "/v1/streams", {"text": PROMPT * 50, "stream": True, "attention": True}
        elif chance.random() < 0.2:
            path, value = f"/v1/streams/{stream}/fork", {"at": chance.randrange(1, 20), "token": 65}
        body = json.dumps(value).encode()
        sent = body if chance.random() < 0.8 else body[: chance.randrange(len(body))]
        with server.connection(path, sent, f"Content-Length: {len(body)}\r\n") as connection, suppress(TimeoutError):
            connection.settimeout(0.05 + 0.4 * chance.random())
            while connection.recv(chance.choice([10, 10_000])):
                if chance.random() < 0.1:
                    break

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(misbehave, range(100)))
    wait_for(server.is_empty)
    assert texts(server) == expected
    wait_for(lambda: not any(kept["busy"] for kept in server.get("/v1/streams")["data"]))
    for kept in server.get("/v1/streams")["data"]:
        assert server.client.delete(f"/v1/streams/{kept['id']}").status_code == 200
    server.client.close()
    wait_for(lambda: not server.service.scheduler._busy())
    gc.collect()
    left = [state for state in gc.get_objects() if type(state) is StreamState and state is not server.service.empty]
    assert not left
    assert len(server.service.engine._free) == server.service.engine.max_streams


def test_beyond_what_it_can_carry_it_says_so_at_once(server_with):
    server = server_with(Limits(max_queue=3), max_streams=2)
    expected = texts(server)
    answers: list[httpx.Response] = []
    gate = threading.Barrier(24)

    def ask(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            gate.wait()
            answers.append(client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 150, "seed": number}))

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(ask, range(24)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 3
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
    assert texts(server) == expected
    assert server.is_empty()


def test_more_requests_at_once_than_are_answered(server_with):
    server = server_with(Limits(max_requests=2))
    body = {"prompt": "a", "max_tokens": 60000, "stream": True}
    with server.connection("/v1/completions", body) as first, server.connection("/v1/completions", body) as second:
        for connection in (first, second):
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        answer = server.client.get("/v1/models")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
    wait_for(server.is_empty)
    wait_for(lambda: server.client.get("/v1/models").status_code == 200)


def test_a_client_that_leaves_ends_its_text_within_a_step(server):
    before = server.service.metrics.steps._value.get()
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 60000, "stream": True, "n": 3}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        [work] = {work for work, _ in server.service.scheduler._running}
        assert not work.cancelled
    wait_for(lambda: work.cancelled)
    steps = server.service.metrics.steps._value.get()
    wait_for(server.is_empty)
    assert server.service.metrics.steps._value.get() - steps <= 2
    assert server.service.metrics.steps._value.get() - before < 60000


def test_stopping_ends_what_runs(served):
    service = Service(served)
    service.grace = 0.3
    with running(service) as server:
        stream = server.post("/v1/streams", {"text": PROMPT})["stream"]["id"]
        found: list[str] = []

        def listen() -> None:
            value = {"max_tokens": 60000, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/streams/{stream}/generate", json=value, timeout=60) as answer:
                found.extend(answer.iter_lines())

        thread = threading.Thread(target=listen)
        thread.start()
        wait_for(lambda: service.engine.streams)
    thread.join(20)
    assert not thread.is_alive()
    events = [json.loads(line.removeprefix("data: ")) for line in found if line.startswith("data: ")]
    assert events[-1]["error"]["message"] == "the server has stopped"
    assert not service.engine.streams
