"""Source of an import: tensors by the authors' names, and what the checkpoint's file says of itself.

The authors' names (their PyTorch code; Hugging Face's and NVIDIA's are brought to them):
`word_emb.emb_layers.i.weight`, `word_emb.emb_projs.i`, `layers.n.dec_attn.{qkv_net,r_net,o_net}.weight`,
`layers.n.dec_attn.layer_norm.*`, `layers.n.pos_ff.CoreNet.{0,3}.*`, `layers.n.pos_ff.layer_norm.*`, `r_w_bias` (u) and
`r_r_bias` (v), in every layer's `dec_attn` if they are not shared, `crit.cluster_{weight,bias}`,
`crit.out_layers.i.{weight,bias}`, `crit.out_projs.i`.

`checkpoint_path` downloads a model named on the Hugging Face Hub with the Hub's own client.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from txl.config import FieldValues
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError

_PATTERNS = ("config.json", "*.safetensors", "*.index.json", "pytorch_model*.bin", "vocab.*")


def checkpoint_path(given: str, quiet: bool = False) -> Path:
    """Return the path of a checkpoint on disk; download a model's name first (continued after a break, then cached)."""
    path = Path(os.path.expanduser(given))
    if path.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", given) or path.with_name(path.name + ".index").exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (disable_progress_bars if quiet else enable_progress_bars)()
    try:
        folder = snapshot_download(given, allow_patterns=list(_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{given}: no such file or directory, and not to be had from the Hub ({reason})") from None
    return Path(folder)


@dataclass
class Source:
    """A foreign checkpoint."""

    kind: str
    """For people: which implementation wrote it."""
    tensors: dict[str, Tensor]
    """Tensors by the authors' names, with cluster i's logit in row i-1."""
    settings: FieldValues = field(default_factory=dict)
    """Fields of `TransformerXLConfig` that the file states; the others are found from the tensors."""
    segment: int | None = None
    """Tokens of a segment, if the file states it."""
    vocabulary: Vocabulary | None = None
    """The vocabulary, if the file brings it."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user."""


def window_of(same_length: object, mem_len: object, itself_extra: bool) -> int | None:
    """Return the `window` that `same_length` means: `mem_len` keys, the query's own among them or in addition."""
    if not same_length or not isinstance(mem_len, int) or mem_len < 1:
        return None
    return mem_len + 1 if itself_extra else mem_len


def length_or_none(value: object) -> int | None:
    """Return a clamp as the authors write it: -1 or 0 is none."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
