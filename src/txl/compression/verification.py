"""Verification of compression by a second process, which decodes each block before the encoder writes it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from txl.errors import CommandFailed


class Verifier:
    """A process of `txl decompress` that decodes the file's records, and a thread that compares them with the text.

    Args:
        arguments: arguments of the command, in addition to source and destination (``--model DIR``).
        n_threads: number of threads of the process.
    """

    def __init__(self, arguments: Sequence[str], n_threads: int):
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (until `close`)
        self._process = subprocess.Popen(
            # -P: do not import files of the working folder, which may have the name of a module.
            [sys.executable, "-P", "-m", "txl", "decompress", "-", "-o", "-", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=os.environ | {"OMP_NUM_THREADS": str(n_threads)},
        )
        self._expected: SimpleQueue[bytes | None] = SimpleQueue()
        self._outcomes: SimpleQueue[bool] = SimpleQueue()
        self._reader = threading.Thread(target=self._compare, daemon=True)
        self._reader.start()

    def send(self, record: bytes, text: bytes | None = None) -> None:
        """Send a record of the file to the process, with its text if the record is a block.

        Raises:
            CommandFailed: if the process has ended.
        """
        if text is not None:
            self._expected.put(text)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(record)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def take(self) -> None:
        """Wait until the oldest block has been compared.

        Raises:
            CommandFailed: if the decoded text differs from the original.
        """
        if not self._outcomes.get():
            raise self._failure()

    def finish(self) -> None:
        """Close the input after the whole file has been sent, and wait until the process has ended.

        Raises:
            CommandFailed: if the process returns more text, or an error.
        """
        self._expected.put(None)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process's own message is reported below
            self._process.stdin.close()
        if not self._outcomes.get() or self._process.wait():
            raise self._failure()

    def close(self) -> None:
        """End the process, if it still runs."""
        self._process.kill()
        self._process.wait()
        self._expected.put(None)
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # data that could not be flushed is not needed any more
                    pipe.close()
        self._complaints.close()

    def _compare(self) -> None:
        assert self._process.stdout is not None
        while True:
            text = self._expected.get()
            try:
                found = self._process.stdout.read(1 if text is None else len(text))
            except ValueError:  # closed
                found = None
            self._outcomes.put(found == (text or b""))
            if text is None or found != text:
                return

    def _failure(self) -> CommandFailed:
        self._process.kill()
        self._process.wait()
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip().splitlines()
        reason = f": {said[-1].removeprefix('txl: ')}" if said else ""
        return CommandFailed(f"verification failed, so nothing more was written: the file cannot be decoded{reason}")
