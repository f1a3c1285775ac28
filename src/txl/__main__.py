"""Entry point of the command `txl`; `python -m txl` runs the same command, for use with torchrun.

Importing PyTorch takes seconds. A KeyboardInterrupt raised during the import may be swallowed, or end in another error.
So this module handles Ctrl-C before anything else is imported. It also sets the environment variables that PyTorch's
threads read when PyTorch is loaded.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

# Spin iterations of an idle PyTorch thread before it sleeps. GNU OpenMP's default of 300,000 takes the processor from
# every other program; without spinning, threads wake too late for the short operations of a small model.
_SPINS = "1000"


def command() -> None:
    """Run the given command, and exit with its exit code: 128 plus the number of the signal that has stopped it."""
    from txl.errors import STOP_SIGNALS

    for number in STOP_SIGNALS:
        # A shell starts background jobs with Ctrl-C ignored, nohup ignores SIGHUP; leave this setting as it is.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupted)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    from txl.cli import main

    code = main()
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        # gloo's threads sometimes abort while the interpreter shuts down, which would look like a failed run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupted(received: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt or SystemExit in a running command, so that it can clean up.

    The process exits at once while modules are imported, outside the command, and at a second Ctrl-C or SIGTERM, which
    training passes on. A second SIGHUP is ignored: a closed terminal may send two.
    """
    signal.signal(received, _leave if received in (signal.SIGINT, signal.SIGTERM) else signal.SIG_IGN)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_filename.startswith("<frozen importlib") or module == "txl.training.signals":
            break
        if frame.f_code.co_name == "_run" and module == "txl.cli":
            if received == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + received)
        frame = frame.f_back
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"txl: interrupted\n")  # not print: the signal may have interrupted a print
    _leave(received, frame)


def _leave(received: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # show the cursor, which a progress bar hides
    os._exit(128 + received)


if __name__ == "__main__":
    command()
