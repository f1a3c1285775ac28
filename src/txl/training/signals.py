"""Signals (`STOP_SIGNALS`) as requests to stop once the state can be saved."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from txl.errors import STOP_SIGNALS

# Signals of which the second one does not wait for the state to be saved. A closed terminal may send several SIGHUP,
# and the SIGTERM at a time limit follows the SIGUSR1 that warned of it.
_URGENT = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopRequest:
    """A request to stop."""

    received: int | None = None  # number of the signal that was received; None if none was


@contextmanager
def stop_requests(quiet: bool = False) -> Iterator[StopRequest]:
    """Record the signals that ask for a stop; confirm the first one on standard error unless `quiet`.

    A second Ctrl-C or SIGTERM has the effect that it had before: the command ends at once, and in a notebook Ctrl-C
    raises KeyboardInterrupt. SIGHUP, SIGUSR1 and SIGUSR2 are left alone where they are ignored (`nohup`) or the caller
    handles them. Outside the main thread, which alone can install handlers, no signal is recorded.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(received: int, frame: FrameType | None) -> None:
        if received in _URGENT and request.received in _URGENT:
            handler = previous[signal.Signals(received)]
            if callable(handler):
                handler(received, sys._getframe())  # that of the command ends the process (see `txl.__main__`)
            if received == signal.SIGINT:
                raise KeyboardInterrupt
            os._exit(128 + received)
        if request.received is None and not quiet:
            again = "; interrupt again to stop without saving" if received in _URGENT else ""
            # Not print: the signal may have arrived during a print, and buffered files are not reentrant. Ctrl-C also
            # ends a reader of standard error, such as tee; that must not keep the program from saving.
            with suppress(OSError):
                os.write(2, f"\nstopping after this step{again}\n".encode())
        if request.received is None or received in _URGENT:
            request.received = received

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    usual = [handler for handler in (signal.SIG_DFL, before[signal.SIGTERM]) if handler != signal.SIG_IGN]
    previous = {number: handler for number, handler in before.items() if number in _URGENT or handler in usual}
    for number in previous:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            # None: the previous handler was not set from Python and cannot be restored from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
