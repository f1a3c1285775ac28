"""The error of an attention backend that cannot train a model on a device, in a dtype, or on this machine."""

from __future__ import annotations

from txl.errors import Field, UserError


class AttentionRefused(UserError):
    """Refusal of a backend, with another backend as its last remedy.

    Args:
        backend: name of the backend, as `model.attention` gives it.
        why: phrase that follows the name; after a semicolon, a remedy of its own.
        instead: value of `model.attention` that works.
    """

    def __init__(self, backend: str, why: str, instead: str = "shifted"):
        self._arguments = backend, why, instead
        self.reason = f"model.attention {backend} {why}"
        """The message without the last remedy, for callers that take the other backend themselves."""
        problem = f" {backend} {why}{', or' if ';' in why else ';'} use "
        super().__init__((Field("model.attention"), problem, Field("model.attention", instead)))

    def __reduce__(self) -> tuple[type[AttentionRefused], tuple[str, str, str]]:
        """Return how pickle makes the error again in another process."""
        return type(self), self._arguments
