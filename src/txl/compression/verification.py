"""Verification of compression by a second process, which decodes each block before the encoder writes it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from txl.errors import CommandFailed


class VerifiedSink:
    """Stream for a file's records that writes a block only after a process of `txl decompress` has decoded it.

    The process decodes a block while the encoder works at the next one. It is never sent a record before its text of
    the one before has been read, so neither waits for the other with a full pipe.

    Args:
        sink: stream opened for writing bytes.
        arguments: arguments of the command, in addition to source and destination (``--model DIR``); None: every record
            is written at once.
        n_threads: number of threads of the process.
    """

    def __init__(self, sink: IO[bytes], arguments: Sequence[str] | None, n_threads: int):
        self._sink, self._process = sink, None
        self._record, self._text = b"", b""  # sent to the process, and not confirmed yet
        self.n_written = 0  # bytes written to `sink`
        if arguments is not None:
            self._messages = tempfile.TemporaryFile()  # noqa: SIM115 (until `close`)
            self._process = subprocess.Popen(
                # -P: do not import files of the working folder, which may have the name of a module.
                [sys.executable, "-P", "-m", "txl", "decompress", "-", "-o", "-", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                env=os.environ | {"OMP_NUM_THREADS": str(n_threads)},
            )

    def write(self, record: bytes, text: bytes = b"") -> None:
        """Write a record, with its text if the record is a block; with a process, when the next record is written.

        Raises:
            CommandFailed: if the process returned another text for the record before, or has ended.
        """
        self._confirm()
        self._record, self._text = record, text
        if self._process is None:
            self._confirm()
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(record)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def finish(self, end: bytes) -> None:
        """Write the file's end, once the process has returned all texts and no more, and no error.

        Raises:
            CommandFailed: if it did otherwise.
        """
        self.write(end)
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):  # the process's own message is reported below
                self._process.stdin.close()
            if self._process.stdout.read(1) or self._process.wait():
                raise self._failure()
        self._confirm()
        self._sink.flush()

    def close(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            with suppress(OSError), self._process:  # data that could not be flushed is not needed any more
                self._messages.close()

    def _confirm(self) -> None:
        if self._process is not None and self._text:
            assert self._process.stdout is not None
            if self._process.stdout.read(len(self._text)) != self._text:
                raise self._failure()
        self.n_written += self._sink.write(self._record)
        self._record, self._text = b"", b""

    def _failure(self) -> CommandFailed:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        reason = f": {lines[-1].removeprefix('txl: ')}" if lines else ""
        return CommandFailed(f"verification failed, so nothing more was written: the file cannot be decoded{reason}")
