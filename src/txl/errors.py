"""The mistakes that a user can make, told apart from failures of the program."""

from __future__ import annotations

TYPE_CHECKING = False  # as typing's, whose import would take longer than all of this
if TYPE_CHECKING:
    from collections.abc import Iterable


class UserError(ValueError):
    """A mistake of the user's: the command line prints it as one line and exits with code 2.

    The message names the field, what came, what was expected, and what to do.
    """


class RunInterrupted(Exception):
    """Training was stopped by a signal after its state was saved; the message says how to resume."""

    def __init__(self, message: str, exit_code: int = 130):
        super().__init__(message)
        self.exit_code = exit_code
        """128 plus the number of the signal: 130 for Ctrl-C, 143 for SIGTERM."""


class ProcessLost(Exception):
    """Another process of a distributed run has died, so this one cannot go on."""

    def __init__(self, message: str = "", quiet: bool = False):
        super().__init__(message)
        self.quiet = quiet
        """True if another process tells the reason."""


class CommandFailed(Exception):
    """A command went to its end without all that it was to do; the command line prints the line and exits with 1."""


class TrainingDiverged(CommandFailed):
    """Training came to numbers that are not finite, or to a model that is of no use."""


def did_you_mean(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return a question that names the known words nearest to a mistaken one: "did you mean a or b?".

    Args:
        given: the mistaken word.
        known: what was expected.
        cutoff: the least similarity that is near, from 0 to 1.

    Returns:
        None if no known word is near.
    """
    import difflib

    near = difflib.get_close_matches(given, list(known), n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else None
