"""Errors that the command line reports in one line, and words for messages.

A message names settings as the library does: parameters of functions (`mem_len`) and fields of the configuration
(`train.batch_size`). Only the command line knows how a user sets them; it passes `TxlError.text` a function that turns
the name of a setting into an option.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# Signals that ask a command to stop: Ctrl-C, `kill`, a closed terminal, and two that clusters send before a time limit
# (Windows has only the first two). A command that a signal has stopped exits with 128 plus the signal's number.
STOP_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


@dataclass(frozen=True)
class Field:
    """Mention of a setting in a message, by name and perhaps with a value: "mem_len", "train.capture false"."""

    name: str
    value: object = ...

    def text(self, name_of: Callable[[str], str] = str) -> str:
        """Return the mention in words; `name_of` as for `TxlError.text`."""
        name = name_of(self.name)
        return name if self.value is ... else f"{name} {_in_message(self.value, quotes_numbers=False)}"


class TxlError(Exception):
    """Error that the command line reports in one line, without a traceback.

    Each text is a string, or a tuple of strings, `Field`s and other errors, which are written one after the other:
    ``("give another ", Field("out"))``. The message is "FIELD is VALUE, but BUT; expected EXPECTED; REMEDY", or, with a
    problem, "FIELD VALUE: PROBLEM; expected EXPECTED; REMEDY". Parts that are not given are left out.

    Args:
        problem: what is wrong; empty if the other parts say it.
        field: name of the setting that is wrong, as for `Field`.
        value: value that the setting has; `...`: none is named. Without a field: the file or run that is wrong.
        but: what the value contradicts.
        expected: what the value should be.
        remedy: what to do.
    """

    def __init__(
        self,
        problem: Text = "",
        *,
        field: str = "",
        value: object = ...,
        but: Text = "",
        expected: Text = "",
        remedy: Text = "",
    ):
        super().__init__(problem)
        self.problem, self.field, self.value = problem, field, value
        self.but, self.expected, self.remedy = but, expected, remedy

    def text(self, name_of: Callable[[str], str] = str) -> str:
        """Return the message; `name_of` turns the name of a setting into the words that a user knows, an option."""
        words = [name_of(self.field)] if self.field else []
        words += [] if self.value is ... else [_in_message(self.value)]
        problem, but, expected, remedy = (
            _written(text, name_of) for text in (self.problem, self.but, self.expected, self.remedy)
        )
        statement = ": ".join(part for part in ((" " if problem else " is ").join(words), problem) if part)
        statement += f", but {but}" if but else ""
        return "; ".join(part for part in (statement, expected and f"expected {expected}", remedy) if part)

    def __str__(self) -> str:
        return self.text()


Text = str | Field | TxlError | tuple[str | Field | TxlError, ...]


class UserError(TxlError, ValueError):
    """User's mistake; the command line prints one line and exits with code 2."""


class RunInterrupted(TxlError):
    """Stop of training by a signal, after the state was saved; the message tells how to resume."""

    def __init__(self, message: Text, exit_code: int = 130):
        super().__init__(message)
        self.exit_code = exit_code


class ProcessLost(TxlError):
    """Loss of another process of a distributed run; `quiet` if another process prints the reason."""

    def __init__(self, message: Text = "", quiet: bool = False):
        super().__init__(message)
        self.quiet = quiet


class CommandFailed(TxlError):
    """Command that ended without doing all of its work; the command line exits with code 1."""


class TrainingDiverged(CommandFailed):
    """Training that led to numbers that are not finite, or to a useless model."""


def _written(text: Text, name_of: Callable[[str], str]) -> str:
    if isinstance(text, str):
        return text
    if isinstance(text, tuple):
        return "".join(_written(part, name_of) for part in text)
    return text.text(name_of)


def shown(value: object) -> str:
    """Return a value as a user writes it: none, true, [1, 2]."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def _in_message(value: object, quotes_numbers: bool = True) -> str:
    """Return a value for a message: a text in quotes unless it is one word and no number, a list by its beginning."""
    if isinstance(value, (list, tuple, dict)):
        return brief(list(value) if isinstance(value, tuple) else value)
    text = shown(value)
    is_word = text.isprintable() and text.split() == [text]
    is_like_number = quotes_numbers and isinstance(value, str) and text.lstrip("+-")[:1].isdigit()
    return text if is_word and not is_like_number else repr(text)


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return "did you mean a or b?" with the known words near a mistaken one; None if none is as near as `cutoff`."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else None


def brief(value: object) -> str:
    """Return the beginning of a value from a file: lists that share parts may stand for more than memory holds."""
    import reprlib

    limited = reprlib.Repr()
    limited.maxlevel, limited.maxstring, limited.maxother = 2, 60, 60
    limited.maxlist = limited.maxtuple = limited.maxdict = limited.maxset = limited.maxfrozenset = 6
    return limited.repr(value)


def cause(error: Exception) -> str:
    """Return " (message)" for a ValueError, whose message is in words; "" for other exceptions, such as KeyErrors."""
    return f" ({error})" if isinstance(error, ValueError) else ""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a tensor does not fit into memory."""
    # PyTorch has no single class for this. Libraries of a GPU (cuBLAS, cuDNN) have names for it; the last wording is
    # that for sizes beyond 64 bits.
    wordings = ("out of memory", "not enough memory", "can't allocate", "ALLOC_FAILED", "MemoryAllocation")
    wordings += ("calculation overflowed",)
    says_so = isinstance(error, RuntimeError) and any(wording in str(error) for wording in wordings)
    # The end of a recording that failed raises an exception of its own.
    first = error.__cause__ or error.__context__
    ends_recording = isinstance(error, RuntimeError) and "captur" in str(error)
    return (
        isinstance(error, MemoryError)
        or says_so
        or (ends_recording and isinstance(first, Exception) and is_out_of_memory(first))
    )


def named(symbols: Iterable[str]) -> str:
    """Return words, or characters with their code points, as a list for a message, which names eight of them."""
    words = []
    for symbol in symbols:
        code = ord(symbol) if len(symbol) == 1 else 0  # Python keeps a byte that is not UTF-8 as U+DC80 to U+DCFF
        name = f"byte 0x{code - 0xDC00:02X}" if 0xDC80 <= code <= 0xDCFF else f"{symbol!r} (U+{code:04X})"
        words.append(name if len(symbol) == 1 else symbol)
    return ", ".join(words[:8]) + (f" and {len(words) - 8:,} more" if len(words) > 8 else "")
