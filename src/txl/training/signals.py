"""Ctrl-C and SIGTERM as a request to stop at a good moment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """The number of the signal that asked for a stop, if one has."""

    received: int | None = None


@contextmanager
def stop_requests(notice: str | None = None) -> Iterator[StopRequest]:
    """Note SIGINT and SIGTERM instead of dying of them; a second one ends the program at once.

    Outside the main thread, which alone can have handlers, nothing is noted.

    Args:
        notice: a line that the first signal prints on standard error, so that a person need not ask twice.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(received: int, frame: FrameType | None) -> None:
        if request.received is not None:
            # Not SystemExit: another thread may be in the middle of writing, and would be torn out of it noisily.
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # the cursor, which a live panel hides
            os._exit(128 + received)
        request.received = received
        if notice is not None:
            # Not print: the signal may have come in the middle of one, and buffered files cannot be entered twice.
            os.write(2, f"\n{notice}\n".encode())

    previous = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for each, handler in previous.items():
            # None: the handler was not set from Python, and cannot be put back from it.
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
