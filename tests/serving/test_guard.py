"""Access control, accepted forms of requests, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable

import httpx
import pytest
from starlette.responses import PlainTextResponse

from tests.serving.conftest import running, wait_for
from txl.serving.guard import Access, Guard
from txl.serving.requests import Limits, Metrics
from txl.serving.service import Service

KEY = "a key that nobody knows"
ROUTES = [
    ("GET", "/v1/models"), ("GET", "/v1/models/small"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info"), ("GET", "/metrics"),
    ("GET", "/v1/streams"), ("POST", "/v1/streams"), ("GET", "/v1/streams/stream-1"), ("DELETE", "/v1/streams/stream-1"),
    ("POST", "/v1/streams/stream-1/append"), ("POST", "/v1/streams/stream-1/generate"),
    ("POST", "/v1/streams/stream-1/fork"), ("GET", "/v1/streams/stream-1/snapshot"), ("GET", "/no/such/route"),
    ("GET", "/health/more"), ("GET", "//health"), ("GET", "/static/../v1/models"), ("OPTIONS", "/v1/completions"),
]  # fmt: skip


@pytest.fixture(scope="module")
def locked(served):
    access = Access(KEY, hosts=("served.example",), origins=("https://friend.example",))
    with running(Service(served, Limits(max_body=2000, body_seconds=0.7, write_seconds=0.7)), access) as found:
        yield found


def test_the_table_of_routes_is_whole(server):
    paths = {route.path for route in server.app.routes}
    named = {path.replace("stream-1", "{id}").replace("small", "{id:path}") for _, path in ROUTES}
    assert paths - {"/", "/static", "/health"} <= named


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_wants_the_key(locked, method, path):
    for given in (None, "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"):
        headers = {} if given is None else {"authorization": given}
        url = httpx.URL(locked.url).copy_with(raw_path=path.encode())
        answer = locked.client.request(method, url, headers=headers, json={} if method == "POST" else None)
        assert answer.status_code == 401, (given, answer.text)
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    answer = locked.client.request(
        method, path, headers={"authorization": f"Bearer {KEY}"}, json={} if method == "POST" else None
    )
    assert answer.status_code not in (401, 403, 500)


def test_health_and_the_page_need_no_key(locked):
    assert locked.client.get("/health").status_code == 200
    assert locked.client.get("/").status_code == 200
    page = locked.client.get("/static/index.html")
    assert (page.status_code, page.headers["cache-control"]) == (200, "no-cache")
    assert locked.client.get("/static/nothing.js").status_code == 404


def test_files_outside_of_the_page_s_cannot_be_had(server):
    url = httpx.URL(server.url)
    for path in (b"/static/../app.py", b"/static/%2e%2e/app.py", b"/static/..%2fapp.py", b"/static//etc/passwd"):
        assert server.client.get(url.copy_with(raw_path=path)).status_code == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:8000", 200), ("192.168.1.5", 200), ("served.example", 200),
        ("SERVED.EXAMPLE:8000", 200), ("evil.example", 403), ("localhost.evil.example", 403), ("", 403),
        ("127.0.0.1.evil.example", 403), ("localhost@evil.example", 403), ("evil.example/localhost", 403), ("[", 403), ("[::1", 403),
    ],
)  # fmt: skip
def test_hosts(locked, host, status):
    assert locked.client.get("/health", headers={"host": host}).status_code == status


def test_origins(locked):
    key = {"authorization": f"Bearer {KEY}"}
    for origin in (locked.url, "http://evil.example", "null", "file://", "x", "http://["):
        answer = locked.client.get("/v1/models", headers=key | {"origin": origin})
        assert answer.status_code == (200 if origin == locked.url else 403)
        assert "access-control-allow-origin" not in answer.headers
    evil = key | {"origin": "http://evil.example"}
    assert locked.client.post("/v1/streams", headers=evil, json={}).status_code == 403


OPENAI_JS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    + ("x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout")
)


def test_the_client_of_openai_in_a_page_of_an_allowed_origin(locked):
    asks = {"access-control-request-method": "POST", "access-control-request-headers": OPENAI_JS}
    friend = {"origin": "https://friend.example"}
    asked = locked.client.options("/v1/completions", headers=friend | asks)
    assert asked.headers["access-control-allow-headers"] == OPENAI_JS
    assert {"Origin", "Access-Control-Request-Headers"} <= set(asked.headers["vary"].split(", "))
    answer = locked.client.get("/v1/models", headers=friend)
    assert answer.status_code == 401
    assert answer.headers["access-control-expose-headers"] == "*"  # Retry-After and Content-Disposition, for instance
    for given in (asked, answer, locked.client.get("/v1/models", headers=friend | {"authorization": f"Bearer {KEY}"})):
        assert given.headers["access-control-allow-origin"] == "https://friend.example"
    asked = locked.client.options("/v1/completions", headers=asks | {"origin": "https://evil.example"})
    assert asked.status_code == 403
    assert not any(name.startswith("access-control") for name in asked.headers)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
def test_post_takes_json_alone(server, kind):
    headers = {"content-type": kind} if kind else {}
    for path in ("/v1/completions", "/v1/streams", "/tokenize"):
        error = server.refused(415, path, content=b'{"prompt": "a"}', headers=headers)
        assert f"Content-Type is {kind or 'missing'}; expected application/json" in error["message"]
    server.refused(415, "/v1/completions", content=b"{}", headers={"content-type": "application/octet-stream"})


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"3", b'"text"', b"null", b'{"prompt": "a"', b'{"prompt": NaN}', b'{"temperature": Infinity}', b"\xff\xfe",
     b'{"prompt": "\xe2\x80"}', b'{"prompt": "\\ud800"}', b'{"prompt": ["a", "\\udc80"]}', b'{"stop": "\\ud800", "prompt": "a"}',
     b'{"\\ud800": 1}', b'{"user": "\\ud800", "prompt": "a"}', b"[" * 100_000, b'{"a":' * 50_000, b"\x00", b'{"seed": 1e999}'],
)  # fmt: skip
def test_bodies_that_are_no_requests(server, body):
    error = server.refused(400, "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500


def test_wrong_methods(server):
    for place in ("GET /v1/completions", "PUT /v1/completions", "DELETE /v1/models", "POST /health"):
        method, path = place.split()
        error = server.refused(405, path, {} if method in ("POST", "PUT") else None, method=method)
        assert method in error["message"]
    server.refused(400, "/v1/models", method="GET", content=b"{}")
    assert server.client.head("/health").status_code == 200


def test_large_bodies(locked, server):
    key = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    body = json.dumps({"prompt": "a" * 3000, "max_tokens": 1}).encode()
    locked.refused(413, "/v1/completions", content=body, headers=key)

    parts = (body[start : start + 100] for start in range(0, len(body), 100))
    locked.refused(413, "/v1/completions", content=parts, headers=key)
    ten = json.dumps({"prompt": "a" * 10_000_000}).encode()
    server.refused(413, "/v1/completions", content=ten, headers={"content-type": "application/json"})
    server.refused(400, "/v1/completions", {"prompt": "a" * (1 << 20) + "a"})
    assert server.is_empty()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a b" * 700_000}),
        ("/v1/completions", {"prompt": "a b" * 700_000}),
        ("/v1/streams", {"text": "a b" * 700_000}),
        ("/detokenize", {"tokens": [7] * 2_000_000}),
        ("/v1/completions", {"prompt": [7] * 2_000_000}),
        ("/v1/streams", {"tokens": [7] * 2_000_000}),
    ],
)
def test_too_many_tokens_are_refused_before_they_are_encoded(server, monkeypatch, path, body):
    monkeypatch.setattr(server.service.texts, "encode", lambda text: pytest.fail("it was encoded"))
    monkeypatch.setattr(server.service.texts, "checked", lambda ids, what: pytest.fail("it was checked"))
    assert "at most 1,048,576 are read" in server.refused(400, path, body)["message"]


def test_values_of_a_wrong_type_are_shown_in_short(server):
    for name in ("n", "seed", "max_tokens", "stop", "logprobs", "suffix", "stream_options", "user", "model"):
        for value in ([1] * 200_000, "x" * 200_000, {"a": [1] * 2000}):
            answer = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, name: value})
            if (name, type(value)) == ("user", str):
                continue
            assert answer.status_code in (400, 404), name
            assert len(answer.json()["error"]["message"]) < 300


def test_a_connection_is_read_in_small_parts(server, monkeypatch):
    """A body in chunks of one byte takes long to parse, so other connections have their turn in between."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    sizes = []
    received = H11Protocol.data_received

    def spy(self, data):
        sizes.append(len(data))
        received(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", spy)
    body = b'{"prompt": "' + b"a" * 50_000 + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % value for value in body) + b"0\r\n\r\n"
    with server.connection("/tokenize", chunks, "Transfer-Encoding: chunked\r\n") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert sum(sizes) > 300_000
    assert max(sizes) <= 1 << 13


def begun(server, n_byte: int, n_sent: int) -> socket.socket:
    """Return a connection that has sent a part of a body."""
    part = b'{"prompt":"' + b"a" * (n_sent - 11)
    return server.connection("/tokenize", part, f"Content-Length: {n_byte}\r\n")


def test_bodies_in_flight_have_a_limit(server_with):
    server = server_with(Limits(max_body=4 << 20, max_bodies=5 << 20))
    guard = server.app.state.guard
    with begun(server, 4 << 20, 4_000_000):
        wait_for(lambda: sum(guard._held.values()) > 3_900_000)
        with begun(server, 4 << 20, 3_000_000) as second:
            wait_for(lambda: 0 in guard._held.values())  # what the second has sent is dropped
            assert server.post("/tokenize", {"prompt": "a" * 60_000})["count"] == 60_000
            second.sendall(b"a" * ((4 << 20) - 3_000_000))  # the answer comes when the client has sent all
            answer = b""
            while not answer.endswith(b"}"):
                answer += second.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in answer
            assert b"too many large requests at the same time" in answer
    wait_for(lambda: not guard._held)
    assert server.post("/tokenize", {"prompt": "a" * 1_000_000})["count"] == 1_000_000


def test_memory_is_returned_after_large_requests(server_with, monkeypatch):
    returned = []
    monkeypatch.setattr("txl.serving.guard.return_freed_memory", lambda: returned.append(1))
    monkeypatch.setattr("txl.serving.guard._PAUSE", 0.3)
    server = server_with()
    server.post("/tokenize", {"prompt": "a" * 60_000})
    time.sleep(0.4)
    assert not returned
    for _ in range(3):
        server.post("/tokenize", {"prompt": "a" * 100_000})
    wait_for(lambda: returned)
    returned.clear()
    server.refused(413, "/tokenize", {"prompt": "a" * 9_000_000})
    wait_for(lambda: returned, 5)


def ends(connection: socket.socket) -> float:
    """Return the seconds until the server closes a connection."""
    began = time.monotonic()
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - began


def test_bodies_that_do_not_come(locked):
    key = f"Authorization: Bearer {KEY}\r\n"
    for body, size in ((b"{", "Content-Length: 100\r\n"), (b"5\r\n{", "Transfer-Encoding: chunked\r\n")):
        with locked.connection("/v1/completions", body, key + size) as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")
            assert ends(connection) < 5


def answered(body: bytes, receives: Callable[[int], bool]) -> list[bytes]:
    """Return the parts of an answer that a client has received; `receives` says whether it takes a part of a number."""
    parts: list[bytes] = []

    async def app(scope, receive, send) -> None:
        await PlainTextResponse(body)(scope, receive, send)

    async def send(message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(0.01 if receives(len(parts)) else 60)
            parts.append(message["body"])

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")]}
    guard = Guard(app, Access(), Limits(write_seconds=0.5), 0, Metrics())  # pyright: ignore[reportArgumentType]
    asyncio.run(guard(scope, receive, send))
    assert guard._active == 0
    return parts


def test_who_takes_an_answer_slowly_gets_all_of_it_and_who_does_not_is_given_up():
    body = b"a" * 3_000_000
    parts = answered(body, lambda number: True)
    assert b"".join(parts) == body
    assert max(map(len, parts)) <= 1 << 16
    assert answered(body, lambda number: number < 3) == parts[:3]
    assert answered(b"", lambda number: True) == [b""]


def test_an_event_stream_that_nobody_receives_leaves_the_engine(server_with):
    server = server_with(Limits(write_seconds=0.3))
    body = {"prompt": "a", "max_tokens": 60000, "stream": True, "logprobs": 100}
    with server.connection("/v1/completions", body, buffer=4096):
        wait_for(lambda: server.service.engine.streams)
        wait_for(server.is_empty)
    assert server.service.metrics.tokens_generated._value.get() < 60000


def test_nonsense_instead_of_http(server):
    for said in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\r\n" * 50, b"A" * 100_000):
        with server.connection() as connection:
            try:
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                ends(connection)
            except ConnectionError:
                pass
    assert server.get("/health") == {"status": "ok"}
