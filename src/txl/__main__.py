"""The command `txl`, which is `python -m txl` too, for torchrun.

Importing PyTorch takes seconds, and a KeyboardInterrupt raised in the midst of it may be swallowed there, or end in
another error. So Ctrl-C is taken care of here, before anything else is imported, and so is what PyTorch's threads read
from the environment when it is loaded.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # as typing's, whose import would take longer than all of this
if TYPE_CHECKING:
    from types import FrameType


_SPINS = "1000"
"""Turns for which a thread of PyTorch that has nothing to do waits awake, before it sleeps. GNU OpenMP's own 300,000
take the processor from every other program; asleep at once, threads wake too late for a small model's short work."""


def command() -> None:
    """Run the command that the program was called with, and leave with its exit code: 130 or 143 if it was stopped."""
    # A shell's background job ignores Ctrl-C, and so it stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupted)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    from txl.cli import main

    code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # gloo's threads do not always survive the interpreter's end, and an abort then would look like a failed run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupted(received: int, frame: FrameType | None) -> None:
    """Raise an exception in a command at work, which has things to put away; elsewhere leave at once.

    Ctrl-C raises KeyboardInterrupt, SIGTERM SystemExit.

    Elsewhere: while modules are imported, before the command has begun, after it has ended, and when asked again.
    """
    signal.signal(received, _leave)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            break
        if frame.f_code.co_name == "_run" and frame.f_globals.get("__name__") == "txl.cli":
            if received == signal.SIGTERM:
                raise SystemExit(128 + received)
            raise KeyboardInterrupt
        frame = frame.f_back
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"txl: interrupted\n")  # not print: the signal may have come in the midst of one
    _leave(received, frame)


def _leave(received: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # the cursor, which a progress bar hides
    os._exit(128 + received)


if __name__ == "__main__":
    command()
