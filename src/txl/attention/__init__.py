"""Relative attention: the equations, the efficient backends, and what each of them supports."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from txl.attention.reference import reference_attention
from txl.attention.scope import KeyScope
from txl.attention.shifted import shifted_attention
from txl.errors import UserError

__all__ = ["KeyScope", "RelativeAttention", "attention_backend", "reference_attention", "shifted_attention"]


class RelativeAttention(Protocol):
    """The signature of every backend; shapes as in `reference_attention`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        u: Tensor,
        v: Tensor,
        scope: KeyScope,
        dropout: float = 0.0,
    ) -> Tensor:
        """[B,T,H,D], [B,S,H,D] twice, [S,H,D], [H,D] twice -> [B,T,H,D]."""
        ...


def attention_backend(name: str) -> tuple[str, RelativeAttention]:
    """The backend that a configuration asks for, with its resolved name ("auto" becomes "shifted").

    Raises:
        UserError: for a name that is not a backend.
    """
    backends: dict[str, RelativeAttention] = {"reference": reference_attention, "shifted": shifted_attention}
    resolved = "shifted" if name == "auto" else name
    if resolved not in backends:
        raise UserError(f"model.attention is {name!r}; expected one of auto, {', '.join(backends)}")
    return resolved, backends[resolved]
