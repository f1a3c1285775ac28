"""Exceptions that the command line reports in one line, such as user errors, unlike failures of the program."""

from __future__ import annotations

import signal

TYPE_CHECKING = False  # not typing's: importing typing takes longer than the rest of this module
if TYPE_CHECKING:
    from collections.abc import Iterable

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
STOP_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that ask a command to stop: Ctrl-C, `kill`, a closed terminal, and two that clusters send before a time limit
(Windows has only the first two). A command that a signal has stopped exits with 128 plus the signal's number."""


class UserError(ValueError):
    """User error: the command line prints the message as one line and exits with code 2.

    The message names the field, the given value, the expected values, and a remedy.
    """


class RunInterrupted(Exception):
    """Stop of training by a signal, after the state was saved; the message tells how to resume."""

    def __init__(self, message: str, exit_code: int = 130):
        super().__init__(message)
        self.exit_code = exit_code
        """128 plus the number of the signal: 130 for Ctrl-C, 143 for SIGTERM (see `STOP_SIGNALS`)."""


class ProcessLost(Exception):
    """Loss of another process of a distributed run, after which this process cannot continue."""

    def __init__(self, message: str = "", quiet: bool = False):
        super().__init__(message)
        self.quiet = quiet
        """True if another process prints the reason."""


class CommandFailed(Exception):
    """Command that ended without doing all of its work; the command line prints the message and exits with code 1."""


class TrainingDiverged(CommandFailed):
    """Training that led to numbers that are not finite, or to a useless model."""


def did_you_mean(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return a question with the known words nearest to a mistaken word: "did you mean a or b?".

    Args:
        given: the mistaken word.
        known: the expected words.
        cutoff: least similarity of a near word, from 0 to 1.

    Returns:
        The question; None if no known word is near.
    """
    import difflib

    near = difflib.get_close_matches(given, list(known), n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else None


def brief(value: object) -> str:
    """Return a value from a file as text for a message.

    Only the first elements of the first two levels are converted: lists that share parts may stand for more elements
    than any memory holds.
    """
    import reprlib

    shown = reprlib.Repr()
    shown.maxlevel, shown.maxstring, shown.maxother = 2, 60, 60
    shown.maxlist = shown.maxtuple = shown.maxdict = shown.maxset = shown.maxfrozenset = 6
    return shown.repr(value)


def cause(error: Exception) -> str:
    """Return " (message)" for a ValueError, whose message is in words; "" for other exceptions, such as KeyErrors."""
    return f" ({error})" if isinstance(error, ValueError) else ""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a tensor does not fit into memory.

    PyTorch has no single class for this: OutOfMemoryError on a GPU, RuntimeErrors of several wordings on a CPU, one of
    them for sizes beyond 64 bits.
    """
    wordings = ("out of memory", "not enough memory", "can't allocate", "calculation overflowed")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(wording in str(error) for wording in wordings)
    )


def named(symbols: Iterable[str]) -> str:
    """Return words, or characters with their code points, as a list for a message, which names eight of them."""
    listed = list(symbols)
    shown = ", ".join(each if len(each) > 1 else _named(each) for each in listed[:8])
    return shown + (f" and {len(listed) - 8:,} more" if len(listed) > 8 else "")


def _named(character: str) -> str:
    code = ord(character)  # Python keeps a byte that is not UTF-8 as U+DC80 to U+DCFF
    return f"byte 0x{code - 0xDC00:02X}" if 0xDC80 <= code <= 0xDCFF else f"{character!r} (U+{code:04X})"
