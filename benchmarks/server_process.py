"""A server of `txl serve` in a process of its own, for measurements, and requests to it."""

from __future__ import annotations

import http.client
import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import torch

from txl.serving.app import address_of, bound_socket, build_app, serve
from txl.serving.service import Service


@contextmanager
def served(make: Callable[..., Service], *arguments: Any) -> Iterator[str]:
    """Serve what `make` returns for the arguments in a new process within the block, and yield the server's address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(make, arguments, theirs))
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(make: Callable[..., Service], arguments: tuple[Any, ...], tell: Any) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in `txl serve`
    service = make(*arguments, threads)
    listening = bound_socket("127.0.0.1", 0)
    serve(build_app(service), service, listening, lambda stop: tell.send(address_of(listening)))


def ask(
    url: str, method: str, path: str, value: Any = None, kind: str = "application/json"
) -> http.client.HTTPResponse:
    """Return the answer to a request, of which only the head has been read; bytes are sent as they are."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    body = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    connection.request(method, path, body, {} if body is None else {"Content-Type": kind})
    answer = connection.getresponse()
    assert answer.status in (200, 201, 204), answer.read()
    return answer
