"""Relative attention: the equations, the efficient backends, and what each of them supports."""

from __future__ import annotations

from txl.attention.backends import BACKENDS, Backend, RelativeAttention, attention_backend, unmeasured_note
from txl.attention.equations import KeyScope, reference_attention
from txl.attention.shifted import shifted_attention

__all__ = [
    "BACKENDS",
    "Backend",
    "KeyScope",
    "RelativeAttention",
    "attention_backend",
    "reference_attention",
    "shifted_attention",
    "unmeasured_note",
]
