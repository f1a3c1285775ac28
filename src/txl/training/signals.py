"""Ctrl-C and SIGTERM as requests to stop once the state can be saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """A request to stop: the number of the signal that was received; None if none was."""

    received: int | None = None


@contextmanager
def stop_requests(notice: str | None = None) -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM instead of ending the program; a second signal ends it at once.

    Only the main thread can install signal handlers; in another thread no signal is recorded.

    Args:
        notice: line that is printed on standard error at the first signal, to confirm it to the user; None: no line.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(received: int, frame: FrameType | None) -> None:
        if request.received is not None:
            # Not SystemExit: another thread may be writing, and its interruption would print errors.
            with suppress(OSError):
                if os.isatty(2):
                    os.write(2, b"\x1b[?25h\n")  # show the cursor, which a live panel hides
            os._exit(128 + received)
        request.received = received
        if notice is not None:
            # Not print: the signal may have arrived during a print, and buffered files are not reentrant. Ctrl-C also
            # ends a reader of standard error, such as tee; that must not keep the program from saving.
            with suppress(OSError):
                os.write(2, f"\n{notice}\n".encode())

    previous = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for each, handler in previous.items():
            # None: the previous handler was not set from Python and cannot be restored from Python.
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
