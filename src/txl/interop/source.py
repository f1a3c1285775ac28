"""What every reader of a foreign checkpoint hands on: tensors by the authors' names, and what the file says of itself.

The authors' names (their PyTorch code; Hugging Face's and NVIDIA's are brought to them):
`word_emb.emb_layers.i.weight`, `word_emb.emb_projs.i`, `layers.n.dec_attn.{qkv_net,r_net,o_net}.weight`,
`layers.n.dec_attn.layer_norm.*`, `layers.n.pos_ff.CoreNet.{0,3}.*`, `layers.n.pos_ff.layer_norm.*`, `r_w_bias` (u) and
`r_r_bias` (v), in every layer's `dec_attn` if they are not shared, `crit.cluster_{weight,bias}`,
`crit.out_layers.i.{weight,bias}`, `crit.out_projs.i`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from txl.data.vocabulary import Vocabulary


@dataclass
class Source:
    """A foreign checkpoint."""

    kind: str
    """For people: which implementation wrote it."""
    tensors: dict[str, Tensor]
    """By the authors' names, with cluster i's logit in row i-1."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `TransformerXLConfig` that the file states; the others are found from the tensors."""
    segment: int | None = None
    """Tokens of a segment, if the file states it."""
    vocabulary: Vocabulary | None = None
    """The vocabulary, if the file brings it."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""


def window_of(same_length: Any, mem_len: Any, itself_extra: bool) -> int | None:
    """The `window` that `same_length` means: `mem_len` keys, the query's own among them, or in addition to them."""
    if not same_length or not isinstance(mem_len, int) or mem_len < 1:
        return None
    return mem_len + 1 if itself_extra else mem_len


def length_or_none(value: Any) -> int | None:
    """A clamp as the authors write it: -1 or 0 is none."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
