"""Servers on free ports, in threads of the test process, so that tests can inspect the state of a server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from txl.runs.directory import RunDirectory
from txl.serving.app import address_of, bound_socket, build_app, serve
from txl.serving.guard import Access
from txl.serving.kept_streams import KeptStreams
from txl.serving.requests import Limits
from txl.serving.service import Served, Service

LENGTHS = {"mem_len": 16, "window": 16, "clamp_len": "none"}  # evaluation lengths of the small run of `trained`


class Running:
    """Running server, with helpers for tests."""

    def __init__(self, service: Service, app: Starlette, url: str):
        self.service, self.app, self.url = service, app, url
        self.kept: KeptStreams = app.state.kept
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, value: Any = None) -> Any:
        """Post JSON and return the JSON of the answer; the test fails unless the request succeeds."""
        answer = self.client.post(path, json=value or {})
        assert answer.is_success, answer.text
        return answer.json()

    def complete(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the choices of a completion."""
        return self.post("/v1/completions", fields)["choices"]

    def events(self, path: str, value: Any) -> list[dict[str, Any]]:
        """Return the objects of an event stream, which must end with [DONE]."""
        answer = self.client.post(path, json=value | {"stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        *events, done = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    def get(self, path: str) -> Any:
        """Return the JSON of a route."""
        answer = self.client.get(path)
        assert answer.is_success, answer.text
        return answer.json()

    def refused(
        self, status: int, path: str, value: Any = None, method: str = "POST", **settings: Any
    ) -> dict[str, Any]:
        """Send a request that must be refused with `status`, and return its error."""
        given = settings if settings or value is None else {"json": value}
        answer = self.client.request(method, path, **given)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]

    def connection(self, path: str = "", body: Any = b"", headers: str = "", buffer: int = 0) -> socket.socket:
        """Return a connection that has sent a POST with a body (bytes, or a value as JSON); without a path: nothing."""
        url, connection = httpx.URL(self.url), socket.socket()
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect((url.host, url.port))
        connection.settimeout(30)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if path:
            size = "" if "Content-Length" in headers or "Transfer" in headers else f"Content-Length: {len(data)}\r\n"
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}{size}\r\n"
            connection.sendall(head.encode() + data)
        return connection

    def is_empty(self) -> bool:
        """Return True if no text is being read or generated and no request waits."""
        scheduler = self.service.scheduler
        return not (self.service.engine.streams or scheduler._queued or scheduler._busy())


@contextmanager
def running(service: Service, access: Access = Access(), folder: Path | None = None) -> Iterator[Running]:  # noqa: B008
    listening = bound_socket("127.0.0.1", 0)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # a client that does not read is noticed soon
    app = build_app(service, access, folder)
    started, stops = threading.Event(), []
    ready = lambda stop: (stops.append(stop), started.set())  # noqa: E731
    thread = threading.Thread(target=serve, args=(app, service, listening, ready), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield Running(service, app.app, address_of(listening))
    finally:
        stops[0]()
        thread.join(30)
        assert not thread.is_alive()
        assert not service.scheduler.is_alive()


@pytest.fixture(scope="session")
def served(trained) -> Served:
    """Small run, loaded for serving as in `txl serve`."""
    model, vocabulary = RunDirectory(trained).load()
    assert vocabulary is not None
    return Served(model, vocabulary, "small", max_streams=4, segment=8, **LENGTHS)


@pytest.fixture(scope="module")
def server(served) -> Iterator[Running]:
    """Server that all tests of a file share."""
    with running(Service(served, Limits(max_kept=8))) as found:
        yield found


@pytest.fixture
def server_with(served):
    """Function that starts a server with given settings; the server stops when the test ends."""
    with ExitStack() as stack:

        def start(limits: Limits | None = None, **changes: Any) -> Running:
            return stack.enter_context(running(Service(replace(served, **changes), limits or Limits())))

        yield start


def wait_for(happens: Callable[[], Any], seconds: float = 30) -> None:
    """Wait until `happens` returns a true value; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, f"still false after {seconds} s"
        time.sleep(0.005)
