"""The mistakes that a user can make, told apart from failures of the program."""


class UserError(ValueError):
    """A mistake of the user's: the command line prints it as one line and exits with code 2.

    The message names the field, what came, what was expected, and what to do.
    """


class RunInterrupted(Exception):
    """Training was stopped by the user after its state had been saved; the message says how to go on."""
