"""Check constant memory and absence of drift over a stream of a million tokens, with fixed weights.

    python -m benchmarks.long_stream results/long-stream.json [TOKENS]

A small float32 model reads one long stream and keeps its keys and values from segment to segment. With an exact window
of W keys, every layer sees W - 1 positions back, so that the loss of a token depends only on the last n_layer * (W - 1)
+ 1 tokens. The end of the stream is therefore read again from empty memory, in float32 and in float64, and must give
equal losses. The memory of the process is recorded throughout.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor

from txl.config import TransformerXLConfig
from txl.models.transformer_xl import TransformerXL
from txl_lab.records import measure_and_record, process_bytes

SHAPE = TransformerXLConfig(
    n_layer=4, d_model=64, n_head=4, d_head=16, d_inner=128, mem_len=128, window=129, dropout=0.0
)
VOCABULARY, SEGMENT, LAST = 256, 100, 500
"""SEGMENT does not divide the size of the memory's buffers, so that these move; LAST final tokens are compared."""


def lively_model(shape: TransformerXLConfig) -> TransformerXL:
    """Return a model with weights that are large enough for every term of the attention to matter."""
    torch.manual_seed(0)
    model = TransformerXL(shape, VOCABULARY).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.15)
    return model


def read(model: TransformerXL, tokens: Tensor, segment: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the losses of a stream's last `LAST` targets, and about 100 pairs (tokens read, bytes held).

    The stream has the shape [1,L+1].
    """
    state, n_token = model.init_state(1), tokens.shape[1] - 1
    held, losses = [], []
    with torch.inference_mode():
        for number, start in enumerate(range(0, n_token, segment)):
            end = min(start + segment, n_token)
            nll, state = model.nll(tokens[:, start:end], tokens[:, start + 1 : end + 1], state)
            if end > n_token - LAST:
                losses.append(nll)
            if number % max(1, n_token // segment // 100) == 0:
                held.append((end, process_bytes("VmRSS")))
    return torch.cat(losses, dim=1)[:, -LAST:], held


def measure(n_token: int) -> dict[str, Any]:
    """Read the whole stream, and its end again from empty memory; return the differences and the bytes held."""
    model = lively_model(SHAPE)
    assert SHAPE.window is not None
    reach = SHAPE.n_layer * (SHAPE.window - 1)
    tokens = torch.randint(VOCABULARY, (1, n_token + 1), generator=torch.Generator().manual_seed(1))
    began = time.perf_counter()
    losses, held = read(model, tokens, SEGMENT)
    seconds = time.perf_counter() - began
    end = tokens[:, -(LAST + reach + 1) :]
    fresh, _ = read(model, end, SEGMENT)
    exact, _ = read(copy.deepcopy(model).double(), end, LAST + reach)
    settled = [size for read_by_then, size in held if read_by_then > n_token // 10]
    return {
        "segment": SEGMENT,
        "tokens": n_token,
        "seconds": seconds,
        "bytes_after_a_tenth": settled[0],
        "bytes_at_the_end": settled[-1],
        "largest_growth_after_a_tenth": max(settled) - settled[0],
        "largest_difference_from_fresh_float32": (losses - fresh).abs().max().item(),
        "largest_difference_from_fresh_float64": (losses.double() - exact).abs().max().item(),
        "rounding_of_fresh_float32": (fresh.double() - exact).abs().max().item(),
        "held": held,
    }


def main(n_token: str = "1000000") -> dict[str, Any]:
    """Measure over a million tokens, or over the number given on the command line."""
    return measure(int(n_token))


if __name__ == "__main__":
    measure_and_record("long_stream", main, keeps_memory=False)
