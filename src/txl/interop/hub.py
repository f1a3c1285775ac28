"""A checkpoint's path, or a model's name on the Hugging Face Hub, which is downloaded by its own client."""

from __future__ import annotations

import os
import re
from pathlib import Path

from txl.errors import UserError

_PATTERNS = ("config.json", "*.safetensors", "*.index.json", "pytorch_model*.bin", "vocab.*")


def checkpoint_path(given: str, quiet: bool = False) -> Path:
    """The path of a checkpoint on disk; a model's name is downloaded first (continued after a break, kept in a cache).

    Raises:
        UserError: if there is neither such a file nor such a model, or it cannot be had.
    """
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
