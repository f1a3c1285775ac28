"""Detection of code that waits for its device, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

AHEAD = "meta"
"""Device whose numbers cannot be read: reading a number raises an error."""


class Waits(TorchDispatchMode):
    """Mode that fails where the host would wait for a device: at each synchronous copy between host and device."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result, options = func(*args, **(kwargs or {})), kwargs or {}
        given = {
            each.device.type for each in tree_leaves((args, options)) if isinstance(each, torch.Tensor) and each.dim()
        }
        if len(given | {each.device.type for each in tree_leaves(result) if isinstance(each, torch.Tensor)}) > 1:
            assert options.get("non_blocking") or (len(args) > 2 and args[2] is True), f"{func} waits"
        return result
