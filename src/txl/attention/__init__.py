"""Relative attention: the functions that compute A^rel, and when each of them is used.

| when | function | where |
|---|---|---|
| tests, `model.attention` reference: **the oracle** for all other functions | `reference_attention` | `equations.py` |
| training, `shifted` (`auto`, except on some GPUs) | `shifted_attention` | `shifted.py` |
| training, `compiled` (`fastest` on a CPU) | `compiled_attention` | `backends.py`, `native/attention.py` |
| training and segments on an NVIDIA GPU, `triton` | `triton_attention` | `triton_attention.py`, `triton_kernels.py` |
| segments without gradients, CPU with a compiler | `reading_attention` | `native/attention.py`, `attend.cpp` |
| other segments without gradients (CUDA, fewer than 8 queries) | `shifted_attention` | `shifted.py` |
| one token without gradients on a CPU with a compiler | `_read_token` | `models/transformer_xl.py`, `decode.cpp` |
| one token of many streams on a CPU with a compiler | `CompiledStep` | `generation/steps.py`, `decode.cpp` |
| one token of many streams elsewhere; on CUDA as a graph | `StaticStep` | `generation/steps.py` |
| Transformers without memory, which have term (a) alone | `causal_attention` | `backends.py` |

"Training" is any segment with gradients or dropout. A model exported for other programs contains a copy of all this.

`attention_backend` turns `model.attention` into a `Backend` when the model is built. Then `TransformerXL.hidden_states`
chooses between segments and one token, and `Backend.__call__` chooses the function for a segment. If a module has a
hook or is of another class, all modules are called, and none of the one-token functions is used.
"""

from __future__ import annotations

from txl.attention.backends import (
    BACKENDS,
    Backend,
    RelativeAttention,
    attention_backend,
    attention_note,
    untimed_rival,
)
from txl.attention.equations import AttentionRefused, KeyScope, Operands, reference_attention
from txl.attention.shifted import shifted_attention

__all__ = [
    "BACKENDS",
    "AttentionRefused",
    "Backend",
    "KeyScope",
    "Operands",
    "RelativeAttention",
    "attention_backend",
    "attention_note",
    "reference_attention",
    "shifted_attention",
    "untimed_rival",
]
