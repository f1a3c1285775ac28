"""`txl serve DIR`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from txl.commands import options
from txl.commands.output import say
from txl.commands.parser import Parser, choice, option, typed
from txl.errors import UserError

if TYPE_CHECKING:
    from txl.serving.kept_streams import KeptStreams

T = TypeVar("T")
KEY_VARIABLE = "TXL_API_KEY"
_NEEDED = ("starlette", "uvicorn", "prometheus_client", "sse_starlette")
_LIMITS = {
    "max_queue": "texts that wait for a turn (default: 128)",
    "max_kept": "streams kept between requests (default: 64)",
    "max_body": "bytes of a request (default: 8388608)",
    "max_prompt": "tokens of a prompt (default: 1048576)",
    "max_tokens": "tokens generated for one text (default: 65536)",
}


def _checked(text: T, holds: bool) -> T:
    if not holds:
        raise ValueError
    return text


@typed("0 to 65535")
def _port(text: str) -> int:
    return _checked(int(text), 0 <= int(text) < 1 << 16)


@typed("seconds above 0")
def _seconds(text: str) -> float:
    return _checked(float(text), 0 < float(text) < float("inf"))


@typed("printable characters, in one line")
def _name(text: str) -> str:
    return _checked(text, text.isprintable() and text != "")


@typed("a host name without scheme and port (lm.example.org)")
def _host(text: str) -> str:
    is_name = urlsplit(f"//{text}").hostname == text.lower() and re.fullmatch(r"[\w.:-]+", text, re.ASCII) is not None
    return _checked(text, is_name)


@typed("scheme, host and port as a browser sends them (https://example.org)")
def _origin(text: str) -> str:
    """Return what a browser could send as `Origin`: in small letters, without path and default port."""
    parts = urlsplit(text)
    has_default_port = parts.port is not None and parts.port == {"http": 80, "https": 443}.get(parts.scheme)
    is_plain = bool(parts.scheme and parts.netloc) and text == f"{parts.scheme}://{parts.netloc}".lower()
    return _checked(text, text == "null" or (is_plain and not has_default_port))


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "serve",
        help="serve a model over HTTP, with a page to try it",
        example="txl serve runs/mine --port 8000",
        description="Serve a model over HTTP: a page to try it in a browser, and an interface for programs that is "
        "like OpenAI's. Ctrl-C stops it.",
    )
    options.shared(parser, "directory")
    option(parser, "--host", "NAME", "address to listen at", default="127.0.0.1")
    option(parser, "--port", "N", "port; 0: any free one", _port, 8000)
    option(parser, "--name", "NAME", "the model's name for clients (default: the directory's)", _name)
    choice(parser, "--dtype", options.DTYPES, "precision of weights and memory (default: the run's)")
    options.shared(parser, "checkpoint", "device")
    access = parser.add_argument_group("who may use it")
    option(access, "--api-key", "KEY", f"key that clients have to send (default: ${KEY_VARIABLE}, or none)")
    hosts, origins = "another name of this server; may be repeated", "another site whose pages may use it; repeatable"
    access.add_argument("--allow-host", type=_host, action="append", default=[], metavar="NAME", help=hosts)
    access.add_argument("--allow-origin", type=_origin, action="append", default=[], metavar="ORIGIN", help=origins)
    limits = parser.add_argument_group("limits")
    option(limits, "--max-streams", "N", "texts generated at once (default: 8)", options.positive)
    for name, text in _LIMITS.items():
        option(limits, f"--{name.replace('_', '-')}", "N", text, options.positive)
    idle = option(limits, "--idle", "SECONDS", "time after which an unused stream is deleted (default: 3600)", _seconds)
    idle.dest = "idle_seconds"
    streams = "save streams there, every 10 seconds and at the end, and open them again"
    option(limits, "--streams", "DIR", streams, options.not_empty)
    options.add_memory_options(parser)
    parser.set_defaults(run=run, smaller="--max-streams or --mem-len")


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal stops the server."""
    began, key = time.perf_counter(), _key(arguments.api_key)
    run_directory, config, checkpoint = options.run_to_read(arguments)
    lengths = options.tested_lengths(arguments, config).options()
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"txl serve needs {', '.join(missing)}", remedy="pip install 'transformer-xl[serve]'")
    import torch

    from txl.generation.engine import PROMPT_SEGMENT
    from txl.serving.app import address_of, bound_socket, build_app, serve
    from txl.serving.guard import Access
    from txl.serving.requests import Limits
    from txl.serving.service import Served, Service

    listening, folder = bound_socket(arguments.host, arguments.port), arguments.streams
    with listening:
        # One thread here, so that only the engine's thread has a team of workers. If two teams share the processors,
        # OpenMP puts them to sleep between any two products, and a step of a small model takes 1.5 times as long.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        model, vocabulary = options.load_to_read(run_directory, checkpoint, options.pick_device(arguments.device))
        served = Served(
            model,
            vocabulary,
            arguments.name or run_directory.path.resolve().name,
            arguments.max_streams or Served.max_streams,
            getattr(torch, arguments.dtype) if arguments.dtype else None,
            segment=config.eval.segment,
            threads=threads,
            **lengths,
        )
        limits = {name: getattr(arguments, name) for name in (*_LIMITS, "idle_seconds")}
        service = Service(served, Limits(**{name: value for name, value in limits.items() if value is not None}))
        hosts = tuple(name.lower() for name in (arguments.host, *arguments.allow_host))
        access = Access(key, hosts, tuple(arguments.allow_origin))
        app = build_app(service, access, None if folder is None else Path(folder))
        kept: KeptStreams = app.app.state.kept
        n_opened = len(kept)
        if key is None and arguments.host not in ("127.0.0.1", "localhost", "::1"):
            say(
                f"note: anyone who reaches {arguments.host} may use this server; {KEY_VARIABLE} or --api-key sets a key"
            )

        def ready(stop: Callable[[], None]) -> None:
            about, own = service.describe()["txl"], config.eval
            memory = f"memory {about['mem_len']}" + ("" if about["window"] is None else f", window {about['window']}")
            say(
                f"serving {service.model_id} ({about['parameters']:,} parameters, {checkpoint.name}, {about['dtype']}, "
                f"{memory}, up to {served.max_streams} texts at once) at {address_of(listening)}; "
                f"started in {time.perf_counter() - began:.1f} seconds, Ctrl-C stops"
            )
            if own.temperature != 1:
                say(
                    f"note: log-probabilities are those of temperature 1; txl score uses the run's, {own.temperature:g}"
                )
            if about["window"] is None and own.segment != PROMPT_SEGMENT:
                read = f"texts are read in segments of {PROMPT_SEGMENT} tokens"
                if own.segment < PROMPT_SEGMENT:
                    read = f"streams, and prompts with echo and logprobs, are read in segments of {own.segment} tokens"
                    read += f", other prompts in {PROMPT_SEGMENT}"
                say(
                    f"note: {read}; txl score uses the run's, {own.segment}, and without a window log-probabilities "
                    f"depend on them"
                )
            if n_opened:
                say(f"streams opened from {folder}: {n_opened}")

        gc.freeze()  # a full collection would go through all objects of PyTorch, while all requests wait
        sys.setswitchinterval(0.001)  # a thread that reads a large request gives way to the others after 1 ms, not 5
        serve(app, service, listening, ready)
    say(farewell(kept, folder))


def farewell(kept: KeptStreams, folder: str | None) -> str:
    """Return the last line of output: how many streams were saved or lost, if there are any."""
    lost = len(kept) if folder is None else sum(stream.changed for stream in kept)
    saved = f"; streams saved in {folder}: {len(kept) - lost}" if len(kept) > lost else ""
    why = "--streams DIR saves them" if folder is None else f"{folder} could not be written"
    return f"stopped{saved}" + (f"; streams lost: {lost} ({why})" if lost else "")


def _key(option: str | None) -> str | None:
    """Return the key that clients must send, from the option, else from the environment; None: no key is set."""
    name, key = ("api_key", option) if option is not None else (KEY_VARIABLE, os.environ.get(KEY_VARIABLE))
    if not key and option is None:
        return None
    key = (key or "").strip()  # clients' keys are stripped too
    if not key:
        raise UserError("empty", field=name, remedy="leave it out to ask for none")
    if not (key.isascii() and key.isprintable()):
        raise UserError("it holds characters that HTTP headers cannot carry", field=name, expected="printable ASCII")
    return key
