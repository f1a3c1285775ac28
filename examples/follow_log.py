"""Follow a log file and print the lines that surprise a model, by a stream of `txl serve` that reads along.

    txl serve runs/logs &
    python examples/follow_log.py /var/log/syslog --bits 3

A stream remembers what it has read, in memory that does not grow, however long the log becomes. Each new line is
appended to it, and costs bits: few if the model saw it coming. Only Python's own library is used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    """Read options, then follow the file."""
    parser = argparse.ArgumentParser(description="Print the lines of a log that surprise a model.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where txl serve listens")
    parser.add_argument("--bits", type=float, default=3.0, help="bits per character above which a line is printed")
    parser.add_argument("--from-start", action="store_true", help="begin with the lines that are there already")
    parser.add_argument("--once", action="store_true", help="stop at the end of the file")
    options = parser.parse_args()
    stream = Stream(options.url, os.environ.get("TXL_API_KEY"))
    for line in new_lines(options.file, options.from_start, options.once):
        bits = stream.surprisal(line)
        if bits > options.bits:
            print(f"{bits:6.2f}  {line}", end="", flush=True)


def new_lines(path: Path, from_start: bool, once: bool) -> Iterator[str]:
    """Yield each whole line as it is written; a file that was replaced or cut short is read from its beginning."""
    while True:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            opened = os.fstat(file.fileno()).st_ino
            if not from_start:
                file.seek(0, os.SEEK_END)
            from_start, part = True, ""
            while True:
                part += file.readline()
                if part.endswith("\n"):
                    yield part
                    part = ""
                    continue
                if once:
                    return
                time.sleep(0.5)
                try:
                    now = path.stat()
                except FileNotFoundError:  # between the old log and the new one
                    continue
                if now.st_ino != opened or now.st_size < file.tell():
                    break


class Refused(Exception):
    """What the server does not do, or why it cannot be reached, in one line."""


def message_of(error: urllib.error.HTTPError) -> str:
    """Return why a server refused a request."""
    try:
        return json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):  # another program listens there
        return f"{error}; is it txl serve?"


class Stream:
    """A stream of the server, made anew if the server has forgotten it."""

    def __init__(self, url: str, key: str | None):
        self._url, self._key, self._id = url.rstrip("/"), key, None

    def surprisal(self, text: str) -> float:
        """Return the bits per character of a text that follows all texts before it."""
        while True:
            try:
                if self._id is None:
                    self._id = self._post("/v1/streams", {"text": "\n"})["stream"]["id"]
                found = self._post(f"/v1/streams/{self._id}/append", {"text": text})
                return found["bits"] / len(text)
            except urllib.error.HTTPError as error:
                if (
                    error.code == 404 and self._id is not None
                ):  # it was idle for too long, or the server was started anew
                    self._id = None
                elif error.code in (409, 429, 503):
                    time.sleep(float(error.headers.get("Retry-After", "1")))
                else:
                    raise Refused(f"{self._url}: {message_of(error)}") from None
            except (urllib.error.URLError, TimeoutError, ValueError, KeyError, TypeError) as error:
                reason = getattr(error, "reason", error)
                raise Refused(f"{self._url}: {reason}; is txl serve running there?") from None

    def _post(self, path: str, value: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url + path, json.dumps(value).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, Refused) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
