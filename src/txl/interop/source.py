"""Source of an import: tensors by the authors' names, and the settings that the checkpoint's file states.

The authors' names are those in their PyTorch code; names of other implementations are converted to the authors' names:
`word_emb.emb_layers.i.weight`, `word_emb.emb_projs.i`, `layers.n.dec_attn.{qkv_net,r_net,o_net}.weight`,
`layers.n.dec_attn.layer_norm.*`, `layers.n.pos_ff.CoreNet.{0,3}.*`, `layers.n.pos_ff.layer_norm.*`, `r_w_bias` (u) and
`r_r_bias` (v), in every layer's `dec_attn` if they are not shared, `crit.cluster_{weight,bias}`,
`crit.out_layers.i.{weight,bias}`, `crit.out_projs.i`.

If a model on the Hugging Face Hub is named instead of a path, `checkpoint_path` downloads it with the Hub's own client.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from txl.config import FieldValues
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError

_PATTERNS = ("config.json", "*.safetensors", "*.index.json", "pytorch_model*.bin", "vocab.*", "added_tokens.json")


def checkpoint_path(name: str, quiet: bool = False) -> Path:
    """Return the path of a checkpoint on disk; if `name` is that of a model on the Hub, download it first.

    The Hub's client resumes an interrupted download and caches a complete one.
    """
    path = Path(os.path.expanduser(name))
    if path.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or path.with_name(path.name + ".index").exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (disable_progress_bars if quiet else enable_progress_bars)()
    try:
        folder = snapshot_download(name, allow_patterns=list(_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{name}: no such file or directory, and not found on the Hub ({reason})") from None
    return Path(folder)


@dataclass
class Source:
    """A foreign checkpoint."""

    kind: str
    """Name of the implementation that wrote the checkpoint, for messages."""
    tensors: dict[str, Tensor]
    """Tensors by the authors' names, with cluster i's logit in row i-1."""
    settings: FieldValues = field(default_factory=dict)
    """Fields of `TransformerXLConfig` that the file states; other fields are derived from the tensors."""
    segment: int | None = None
    """Number of tokens in a segment; None if the file does not state it."""
    vocabulary: Callable[[], Vocabulary | None] = lambda: None
    """Function that reads the file's vocabulary, None if the file contains none; not called if the user gives one."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user."""


def window_of(same_length: object, mem_len: object, itself_extra: bool) -> int | None:
    """Return the `window` of `same_length`: `mem_len` keys, or one more if the query's own key is extra."""
    if not same_length or not isinstance(mem_len, int) or mem_len < 1:
        return None
    return mem_len + 1 if itself_extra else mem_len


def window_after(mem_len: object, window: Any, new_mem_len: int) -> Any:
    """Return the window after a change of the memory length, which that of `same_length` follows and others do not."""
    if not isinstance(mem_len, int) or not isinstance(window, int) or not 0 <= window - mem_len <= 1:
        return window
    return new_mem_len + window - mem_len if new_mem_len > 0 else None


def length_or_none(value: object) -> int | None:
    """Return a clamp from the authors' notation; None for -1 or 0, which mean no clamp."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
