"""FlexAttention as the kernel of the factorised form: causality, window and memory as a mask of blocks, never [T,S].

On a CUDA device it is compiled to one fused kernel. On a CPU PyTorch has its forward pass alone.

Shapes: B lanes, T queries, M positions of memory, S = M + T keys, H heads, D width of a value, W width of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from txl.attention.scope import KeyScope


class FlexKernel:
    """A `FusedKernel`. Compiled at its first call on a CUDA device."""

    def __init__(self) -> None:
        self._compiled: Callable[..., Any] | None = None

    def mask(self, scope: KeyScope, n_query: int, n_lane: int, device: torch.device) -> BlockMask:
        """See `FusedKernel.mask`."""
        memory, window = scope.memory, scope.window
        first = None if scope.filled is None else memory - torch.tensor(scope.filled, device=device)

        def sees(lane: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = query + memory - key
            seen = distance >= 0
            if window is not None:
                seen = seen & (distance < window)
            return seen if first is None else seen & (key >= first[lane])

        lanes = None if first is None else n_lane
        return create_block_mask(sees, lanes, None, n_query, memory + n_query, device=device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
        """See `FusedKernel.attend`."""
        function: Callable[..., Any] = flex_attention
        if query.device.type == "cuda":
            if self._compiled is None:
                self._compiled = torch.compile(flex_attention)
            function = self._compiled
        return function(query, key, value, block_mask=mask, scale=scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlexKernel:
        """A copy of a model compiles its own."""
        return FlexKernel()
