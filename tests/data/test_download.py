"""Downloads from a local server that simulates every kind of failure of a server."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import txl
from txl.data import benchmarks, public
from txl.data.benchmarks import Benchmark, Download
from txl.data.public import fetch
from txl.errors import UserError

TEXT = b"".join(b"line %d of the corpus, with some words in it\n" % number for number in range(3000))


def zipped(content: bytes = TEXT, name: str = "tiny") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass
class Server:
    """A server that sends answer n to request n, and the last answer to all further requests."""

    address: str = ""
    answers: list[Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def url(self, name: str = "tiny.zip") -> str:
        return f"{self.address}/{name}"


def whole(content: bytes):
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def broken_off(content: bytes, chunked: bool = False):
    """Return an answer that announces more than `content`, or its length not at all, and disconnects after it."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", "999999")))
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(content), content) if chunked else content)
        handler.wfile.flush()
        handler.close_connection = True

    return answer


def refused(status: int):
    return lambda handler: handler.send_error(status)


def silent(server: Server):
    """Return an answer that accepts the request and sends nothing until the test is over."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        server.released.wait(20)
        handler.close_connection = True

    return answer


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            number = min(len(state.requests), len(state.answers) - 1)
            state.requests.append(self.path)
            state.answers[number](self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    state.address = f"http://127.0.0.1:{running.server_address[1]}"
    thread = threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield state
    state.released.set()
    running.shutdown()
    running.server_close()
    thread.join()


def route(server: Server, known: str | None, name: str = "tiny.zip"):
    return ((Download(server.url(name), known),),)


def test_a_download_is_verified_kept_and_not_fetched_again(server, tmp_path, capsys):
    content = zipped()
    server.answers = [whole(content)]
    for _ in range(2):
        fetch(route(server, sha256(content)), tmp_path)
        assert (tmp_path / "tiny.zip").read_bytes() == content
    assert server.requests == ["/tiny.zip"]
    assert capsys.readouterr().err == f"downloading {server.url()}\n"
    (tmp_path / "tiny.zip").write_bytes(content[:-1])  # kept files are verified again
    fetch(route(server, sha256(content)), tmp_path, quiet=True)
    assert (tmp_path / "tiny.zip").read_bytes() == content
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_that_survives_a_second_try(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "150")
    content = zipped()
    server.answers = [broken_off(content[:1000]), whole(content)]
    before = os.umask(0o027)
    try:
        fetch(route(server, None), tmp_path)
    finally:
        os.umask(before)
    assert f"/{len(content) / 1000:.1f} kB" in capsys.readouterr().err
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}


def refusal(server: Server, folder: Path, known: str | None, timeout: float = 10.0) -> str:
    with pytest.raises(UserError) as error:
        fetch(route(server, known), folder, quiet=True, timeout=timeout)
    message = str(error.value)
    assert "\n" not in message
    assert server.url() in message
    assert "data.source" in message
    assert not folder.exists() or list(folder.iterdir()) == []
    return message


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(server, tmp_path):
    server.answers, known = [whole(zipped(b"another text"))], sha256(zipped())
    assert known.removeprefix("sha256:") in refusal(server, tmp_path, known)
    assert len(server.requests) == 3


def test_what_a_server_does_not_send_is_refused_with_the_reason(server, tmp_path):
    content, known = zipped(), sha256(zipped())
    server.answers = [refused(404)]
    assert "404" in refusal(server, tmp_path, known)
    server.requests, server.answers = [], [silent(server)]
    assert "timed out" in refusal(server, tmp_path, known, timeout=0.2)
    for hash_or_none in (known, None):  # half a file is never taken for a whole one
        server.requests, server.answers = [], [broken_off(content[: len(content) // 2])]
        assert "tried 3 times" in refusal(server, tmp_path, hash_or_none)


@pytest.mark.parametrize("known", [True, False])
def test_a_transfer_that_breaks_off_is_tried_again_from_the_beginning(known, server, tmp_path):
    content = zipped()
    server.answers = [broken_off(content[:1000]), broken_off(content[:500], chunked=True), whole(content)]
    fetch(route(server, sha256(content) if known else None), tmp_path, quiet=True)
    assert (tmp_path / "tiny.zip").read_bytes() == content
    assert len(server.requests) == 3


def test_no_server_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1/tiny\.zip, tried 3 times: .*[Rr]efused"):
        fetch(((Download("http://127.0.0.1:1/tiny.zip", None),),), tmp_path, quiet=True)


def test_another_place_is_tried_when_the_first_fails(server, tmp_path):
    content = zipped()
    server.answers = [refused(404), refused(404), refused(404), whole(content)]
    places = (*route(server, sha256(content)), *route(server, sha256(content), "mirror.zip"))
    fetch(places, tmp_path, quiet=True)
    assert (tmp_path / "mirror.zip").read_bytes() == content
    server.answers = [refused(404)]
    with pytest.raises(UserError, match=r"tiny\.zip.*404.*mirror2\.zip.*404.*; try again"):
        fetch((*route(server, None), *route(server, None, "mirror2.zip")), tmp_path, quiet=True)


def test_without_a_published_hash_the_first_download_is_recorded_and_said(server, tmp_path, capsys):
    content = zipped()
    server.answers = [whole(content)]
    fetch(route(server, None), tmp_path)
    digest = hashlib.sha256(content).hexdigest()
    assert f"no published hash of tiny.zip is known; recorded sha256 {digest}" in capsys.readouterr().err
    (tmp_path / "tiny.zip").unlink()
    server.answers = [whole(zipped(b"something else"))]
    with pytest.raises(UserError, match=digest):
        fetch(route(server, None), tmp_path, quiet=True)


@pytest.fixture
def tiny(server, monkeypatch) -> Benchmark:
    """A corpus of one file, which the local server offers."""
    cut = (len(TEXT) * 9 // 10, len(TEXT) // 20, len(TEXT) - len(TEXT) * 9 // 10 - len(TEXT) // 20)
    benchmark = Benchmark(
        name="tiny",
        description="",
        unit="byte",
        layouts=({"whole": ("tiny",)},),
        folders=("",),
        archives=("tiny.zip",),
        routes=route(server, None),
        hashes={"all": f"md5:{hashlib.md5(TEXT).hexdigest()}"},
        cuts=cut,
    )
    monkeypatch.setitem(benchmarks.BENCHMARKS, "tiny", benchmark)
    return benchmark


def test_a_corpus_is_downloaded_prepared_and_then_opened_without_the_web(tiny, server, tmp_path, capsys):
    server.answers = [whole(zipped())]
    corpus = txl.open_corpus("tiny", data_dir=tmp_path)
    assert b"".join(b"".join(corpus.text_bytes(split)) for split in corpus.splits) == TEXT
    assert len(corpus.tokens("valid")) == tiny.cuts[1]
    assert "preparing tiny in byte tokens" in capsys.readouterr().err
    server.answers = [refused(500)]
    again = txl.open_corpus("tiny", data_dir=tmp_path)
    assert again.info() == corpus.info()
    assert len(server.requests) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["downloads", corpus.directory.name]


def test_an_archive_that_arrives_damaged_is_forgotten(tiny, server, tmp_path):
    # The archive is truncated on the server, so the transfer itself is complete.
    server.answers = [whole(zipped()[:-30]), whole(zipped())]
    with pytest.raises(UserError, match=r"tiny\.zip: damaged \(.*\); the download was removed"):
        txl.open_corpus("tiny", data_dir=tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]
    assert txl.open_corpus("tiny", data_dir=tmp_path, quiet=True).info()["differences"] == []


def test_a_download_of_another_text_is_not_the_corpus(tiny, server, tmp_path):
    server.answers = [whole(zipped(TEXT.replace(b"words", b"works")))]
    with pytest.raises(UserError, match=r"the download is not tiny: the md5 of .* is .*, the published one is"):
        txl.open_corpus("tiny", data_dir=tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]
    server.answers = [whole(zipped())]
    assert txl.open_corpus("tiny", data_dir=tmp_path, quiet=True).info()["differences"] == []


def test_a_full_disk_while_downloading_is_one_clear_line(tiny, server, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(public, "fetch", full)
    with pytest.raises(UserError, match=r"getting tiny into .* failed: No space left on device; nothing was kept"):
        txl.open_corpus("tiny", data_dir=tmp_path, quiet=True)
