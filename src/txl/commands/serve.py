"""`txl serve DIR`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from txl.commands.arguments import pick_device, run_to_read, tested_lengths
from txl.commands.options import add_checkpoint, add_device, add_memory_options, not_empty, positive
from txl.commands.output import say
from txl.commands.parser import Commands, typed
from txl.errors import Field, UserError

if TYPE_CHECKING:
    from txl.config import EvalConfig
    from txl.serving.kept_streams import KeptStreams
    from txl.serving.requests import Limits

T = TypeVar("T")
KEY_VARIABLE = "TXL_API_KEY"
_NEEDED = ("starlette", "uvicorn", "prometheus_client", "sse_starlette")
_LOCAL = ("127.0.0.1", "localhost", "::1")
_LIMITS = {
    "max_queue": "texts that wait for a turn (default: 128)",
    "max_kept": "streams kept between requests (default: 64)",
    "max_body": "bytes of a request (default: 8388608)",
    "max_prompt": "tokens of a prompt (default: 1048576)",
    "max_tokens": "tokens generated for one text (default: 65536)",
}


def _value(expected: str, kind: Callable[[str], T], holds: Callable[[T], bool]) -> Callable[[str], T]:
    """Return the function that parses the value of an option, which must be of a kind and fulfil a condition."""

    @typed(expected)
    def parse(text: str) -> T:
        value = kind(text)
        if not holds(value):
            raise ValueError
        return value

    return parse


def _is_host(text: str) -> bool:
    return urlsplit(f"//{text}").hostname == text.lower() and re.fullmatch(r"[\w.:-]+", text, re.ASCII) is not None


def _is_origin(text: str) -> bool:
    """Return whether a browser could send the text as `Origin`: in small letters, without path and default port."""
    parts = urlsplit(text)
    has_default_port = parts.port is not None and parts.port == {"http": 80, "https": 443}.get(parts.scheme)
    is_plain = bool(parts.scheme and parts.netloc) and text == f"{parts.scheme}://{parts.netloc}".lower()
    return text == "null" or (is_plain and not has_default_port)


_port = _value("0 to 65535", int, lambda port: 0 <= port < 1 << 16)
_seconds = _value("seconds above 0", float, lambda seconds: 0 < seconds < float("inf"))
_name = _value("printable characters, in one line", str, lambda name: name.isprintable() and name != "")
_host = _value("a host name without scheme and port (lm.example.org)", str, _is_host)
_origin = _value("scheme, host and port as a browser sends them (https://example.org)", str, _is_origin)


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, with a page to try it",
        example="txl serve runs/mine --port 8000",
        description="Serve a model over HTTP: a page to try it in a browser, and an interface for programs that is "
        "like OpenAI's. Ctrl-C stops it.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8000, metavar="N", help="port; 0: any free one (default: 8000)")
    parser.add_argument(
        "--name", type=_name, metavar="NAME", help="the model's name for clients (default: the directory's)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="precision of weights and memory (default: the run's)"
    )
    add_checkpoint(parser)
    add_device(parser)
    access = parser.group("who may use it")
    access.add_argument(
        "--api-key", metavar="KEY", help=f"key that clients have to send (default: ${KEY_VARIABLE}, or none)"
    )
    access.add_argument(
        "--allow-host", type=_host, action="append", default=[], metavar="NAME",
        help="another name of this server; may be repeated",
    )  # fmt: skip
    access.add_argument(
        "--allow-origin", type=_origin, action="append", default=[], metavar="ORIGIN",
        help="another site whose pages may use it; may be repeated",
    )  # fmt: skip
    limits = parser.group("limits")
    limits.add_argument("--max-streams", type=positive, metavar="N", help="texts generated at once (default: 8)")
    for name, text in _LIMITS.items():
        limits.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N", help=text)
    limits.add_argument(
        "--idle", type=_seconds, metavar="SECONDS", help="time after which an unused stream is deleted (default: 3600)"
    )
    limits.add_argument(
        "--streams",
        type=not_empty,
        metavar="DIR",
        help="save streams there, every 10 seconds and at the end, and open them again",
    )
    add_memory_options(parser)
    parser.set_defaults(run=run, smaller="--max-streams or --mem-len")


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal stops the server."""
    began = time.perf_counter()
    key = _key(arguments.api_key)
    run_directory, config, checkpoint = run_to_read(arguments)
    lengths = tested_lengths(arguments, config).options()
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"txl serve needs {', '.join(missing)}", remedy="pip install 'transformer-xl[serve]'")
    import torch

    from txl.devices import keep_freed_memory
    from txl.serving.app import address_of, bound_socket, build_app, serve
    from txl.serving.guard import Access
    from txl.serving.service import Served, Service

    listening = bound_socket(arguments.host, arguments.port)
    with listening:
        keep_freed_memory()
        # One thread here, so that only the engine's thread has a team of workers. If two teams share the processors,
        # OpenMP puts them to sleep between any two products, and a step of a small model takes 1.5 times as long.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        model, vocabulary = run_directory.load(checkpoint, device=pick_device(arguments.device))
        if vocabulary is None:
            remedy = ("import it again with ", Field("vocabulary"))
            raise UserError("no vocabulary to serve text with", value=run_directory.path, remedy=remedy)
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
        service = Service(served, _limits(arguments))
        hosts = tuple(name.lower() for name in (arguments.host, *arguments.allow_host))
        access = Access(key, hosts, tuple(arguments.allow_origin))
        app = build_app(service, access, None if arguments.streams is None else Path(arguments.streams))
        kept: KeptStreams = app.app.state.kept
        n_opened = len(kept)
        if key is None and arguments.host not in _LOCAL:
            say(
                f"note: anyone who reaches {arguments.host} may use this server; --api-key or {KEY_VARIABLE} sets a key"
            )

        def ready(stop: Callable[[], None]) -> None:
            about = service.describe()["txl"]
            memory = f"memory {about['mem_len']}" + ("" if about["window"] is None else f", window {about['window']}")
            say(
                f"serving {service.model_id} ({about['parameters']:,} parameters, {checkpoint.name}, {about['dtype']}, "
                f"{memory}, up to {served.max_streams} texts at once) at {address_of(listening)}; "
                f"started in {time.perf_counter() - began:.1f} seconds, Ctrl-C stops"
            )
            for note in _differences(config.eval, about["window"]):
                say(f"note: {note}")
            if n_opened:
                say(f"{_streams(n_opened)} opened from {arguments.streams}")

        gc.freeze()  # a full collection would go through all objects of PyTorch, while all requests wait
        sys.setswitchinterval(0.001)  # a thread that reads a large request gives way to the others after 1 ms, not 5
        serve(app, service, listening, ready)
    say(_farewell(kept, arguments.streams))


def _differences(settings: EvalConfig, window: int | None) -> Iterator[str]:
    """Yield the reasons why log-probabilities of this server differ from those of `txl score`."""
    from txl.generation.engine import PROMPT_SEGMENT

    if settings.temperature != 1:
        yield f"log-probabilities are those of temperature 1; txl score uses the run's, {settings.temperature:g}"
    if window is None and settings.segment > PROMPT_SEGMENT:
        yield (
            f"texts are read in segments of {PROMPT_SEGMENT} tokens; txl score uses the run's, {settings.segment}, and "
            f"without a window its log-probabilities differ"
        )
    if window is None and settings.segment < PROMPT_SEGMENT:
        yield (
            f"streams, and prompts with echo and logprobs, are read in segments of {settings.segment} tokens, as by "
            f"txl score; other prompts in segments of {PROMPT_SEGMENT}, as by txl generate; without a window their "
            f"numbers differ slightly"
        )


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count:,} streams"


def _farewell(kept: KeptStreams, folder: str | None) -> str:
    """Return the last line of output: the streams that were saved or lost, if there are any."""
    if folder is not None:
        lost = sum(stream.changed for stream in kept)
        parts = [f"{_streams(len(kept) - lost)} saved in {folder}"] if len(kept) > lost else []
        parts += [f"{_streams(lost)} could not be written"] if lost else []
        return "; ".join(["stopped", *parts])
    return f"stopped; {_streams(len(kept))} lost, --streams DIR saves them" if len(kept) else "stopped"


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


def _limits(arguments: argparse.Namespace) -> Limits:
    from txl.serving.requests import Limits

    values = {name: getattr(arguments, name) for name in _LIMITS} | {"idle_seconds": arguments.idle}
    return Limits(**{name: value for name, value in values.items() if value is not None})
