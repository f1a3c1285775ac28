"""The mistakes that a user can make, told apart from failures of the program."""


class UserError(ValueError):
    """A mistake of the user's: the command line prints it as one line and exits with code 2.

    The message names the field, what came, what was expected, and what to do.
    """


class RunInterrupted(Exception):
    """Training was stopped by a signal after its state had been saved; the message says how to go on."""

    def __init__(self, message: str, exit_code: int = 130):
        super().__init__(message)
        self.exit_code = exit_code
        """128 plus the number of the signal: 130 for Ctrl-C, 143 for SIGTERM."""


class ProcessLost(Exception):
    """Another process of a distributed run has died, so this one cannot go on."""

    def __init__(self, message: str = "", quiet: bool = False):
        super().__init__(message)
        self.quiet = quiet
        """Whether the reason is another process's to tell."""


class CommandFailed(Exception):
    """A command went to its end without all that it was to do; the command line prints the line and exits with 1."""


class TrainingDiverged(CommandFailed):
    """Training came to numbers that are not finite, or to a model that is of no use."""
