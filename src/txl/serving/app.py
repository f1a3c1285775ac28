"""The server's ASGI application, with its routes and error handlers, and the function that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.resources import files
from pathlib import Path
from types import FrameType

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from txl.errors import STOP_SIGNALS, Field, UserError
from txl.files import reason_of
from txl.serving import stream_routes
from txl.serving.completions import completions
from txl.serving.exchange import FAILED, beside, checked_ids, encoded
from txl.serving.guard import STATIC, Access, Guard
from txl.serving.kept_streams import KeptStreams
from txl.serving.requests import ApiError, body_of, json_response
from txl.serving.scheduler import ENGINE_FAILED
from txl.serving.schemas import DetokenizeRequest, TokenizeRequest, checked
from txl.serving.service import Service

_PLAYGROUND = Path(str(files("txl.serving"))) / "playground"
_READ_AT_ONCE = 1 << 13  # bytes; in chunks of one byte, they take about 20 ms
_CONTENT = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " + (
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def build_app(service: Service, access: Access = Access(), streams_folder: Path | None = None) -> Guard:  # noqa: B008 (a value)
    """Return the ASGI application of a service (UserError if `streams_folder` cannot be used); it starts the engine."""
    kept = KeptStreams(service, streams_folder)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.scheduler.start()
        kept.start()
        try:
            yield
        finally:
            service.farewell.set()
            await asyncio.to_thread(service.stop)
            await kept.stop()

    app = Starlette(
        routes=[
            Route("/", _page),
            Mount(STATIC.rstrip("/"), StaticFiles(directory=_PLAYGROUND)),
            Route("/health", _health),
            Route("/metrics", _metrics),
            Route("/v1/models", _models),
            Route("/v1/models/{id:path}", _models),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", _no_chat, methods=["GET", "POST"]),
            Route("/tokenize", _tokenize, methods=["POST"]),
            Route("/detokenize", _detokenize, methods=["POST"]),
            Route("/tokenizer_info", _tokenizer_info),
            Route("/v1/streams", stream_routes.every, methods=["GET"]),
            Route("/v1/streams", stream_routes.create, methods=["POST"]),
            Route("/v1/streams/{id}", stream_routes.one, methods=["GET", "DELETE"]),
            Route("/v1/streams/{id}/append", stream_routes.append, methods=["POST"]),
            Route("/v1/streams/{id}/generate", stream_routes.generate, methods=["POST"]),
            Route("/v1/streams/{id}/fork", stream_routes.fork, methods=["POST"]),
            Route("/v1/streams/{id}/snapshot", stream_routes.take_snapshot, methods=["GET"]),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _refused, Exception: _refused},
        lifespan=lifespan,
    )
    app.state.service, app.state.kept = service, kept
    states = (*service.empty.keys, *service.empty.values)  # each [H,0,D]
    full = sum(state.element_size() * state.shape[0] * state.shape[2] * service.memory for state in states)
    app.state.guard = Guard(app, access, service.limits, full + (1 << 20), service.metrics)
    return app.state.guard


async def _page(request: Request) -> Response:
    page = (_PLAYGROUND / "index.html").read_bytes()
    return Response(page, media_type="text/html", headers={"Content-Security-Policy": _CONTENT})


async def _health(request: Request) -> Response:
    if not request.app.state.service.scheduler.is_alive():
        raise ApiError(503, ENGINE_FAILED, headers={"Retry-After": "60"})
    return json_response({"status": "ok"})


async def _metrics(request: Request) -> Response:
    exposition = generate_latest(request.app.state.service.metrics.registry)
    return Response(exposition, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _models(request: Request) -> Response:
    service: Service = request.app.state.service
    if "id" not in request.path_params:
        return json_response({"object": "list", "data": [service.describe()]})
    service.check_model(request.path_params["id"])
    return json_response(service.describe())


async def _no_chat(request: Request) -> Response:
    message = "this model continues text and has no chat template; use /v1/completions"
    raise ApiError(404, message, code="unsupported_endpoint")


async def _tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    text = checked(TokenizeRequest, await body_of(request), service).prompt
    if text is None:
        raise ApiError(400, "prompt is missing; expected a string", param="prompt")
    ids = await encoded(request, text, "prompt")

    def answer() -> Response:
        return json_response({"tokens": ids.tolist(), "count": ids.numel(), "max_model_len": service.limits.max_prompt})

    return await beside(ids.numel(), answer)


async def _detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    tokens = checked(DetokenizeRequest, await body_of(request), service).tokens
    if tokens is None:
        raise ApiError(400, "tokens is missing; expected a list of token ids", param="tokens")
    if tokens:
        await checked_ids(request, tokens, "tokens")
    return await beside(len(tokens), lambda: json_response({"prompt": service.texts.vocabulary.decode(tokens)}))


async def _tokenizer_info(request: Request) -> Response:
    return json_response(request.app.state.service.texts.describe())


async def _refused(request: Request, error: Exception) -> Response:
    """Return the answer to a request that a route, or Starlette, has refused or failed to answer."""
    if isinstance(error, ApiError):
        return error.response()
    if not isinstance(error, HTTPException):
        return ApiError(500, FAILED).response()
    place = request.url.path[:200]
    messages = {
        404: f"no route {place!r}; docs/reference/server.md lists them",
        405: f"{place} does not accept {request.method}",
    }
    message = messages.get(error.status_code) or str(error.detail)
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0: any free port (UserError if it cannot listen there)."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=512, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        remedy = ("give another ", Field("host"), " or ", Field("port"))
        raise UserError(f"cannot listen at {host} port {port} ({reason_of(error)})", remedy=remedy) from None


def address_of(listening: socket.socket) -> str:
    """Return the URL at which a socket listens."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _SmallReads(H11Protocol):
    """uvicorn's protocol for HTTP, reading little from a connection before the other connections' turn.

    A body in chunks of one byte takes long to parse: 256 KiB at once, asyncio's, would keep all others waiting.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin with a connection."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # an attribute of asyncio's own transports, not of uvloop's
            transport.max_size = _READ_AT_ONCE  # pyright: ignore[reportAttributeAccessIssue]


class _Server(uvicorn.Server):
    """uvicorn's server, changed so that the process continues after a signal has stopped the server."""

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]):
        super().__init__(config)
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server; SIGINT while the server is stopping stops it at once."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self._stopping()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at `STOP_SIGNALS` while the server runs, if in the main thread: other threads receive no signals."""
        is_main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS if is_main}
        handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}  # nohup
        for number in handlers:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def serve(app: Guard, service: Service, listening: socket.socket, ready: Callable[[Callable[[], None]], None]) -> None:
    """Serve at a listening socket until one of `STOP_SIGNALS` arrives, then end running requests and return.

    `ready` is called once the server answers requests, with a function that stops the server from any thread.
    """
    config = uvicorn.Config(
        app,
        http=_SmallReads,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(service.grace) + 5,
        h11_max_incomplete_event_size=1 << 16,
    )
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)
    server = _Server(config, service.begin_to_stop)

    async def run() -> None:
        task = asyncio.create_task(server.serve([listening]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready(lambda: server.handle_exit(signal.SIGTERM, None))
        await task

    asyncio.run(run())
