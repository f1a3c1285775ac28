"""Table 9: slowdown of evaluating the vanilla Transformer, which recomputes its whole window for every token.

Both models have the same shape, dtype and device. Each uses its fastest attention: fused and causal for the vanilla
Transformer, and on a CPU the same compiled code for both. The vanilla Transformer computes the softmax of its last
position only. Per-token time is the time for one token in one lane: for the vanilla Transformer the time of a window of
L tokens, for Transformer-XL that of a segment of T tokens with L positions of memory, divided by T.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass

import torch

from txl.config import TransformerXLConfig, VanillaConfig, as_family
from txl.files import JsonObject
from txl.models.transformer_xl import TransformerXL
from txl.models.vanilla import VanillaTransformer
from txl_lab.speed import TABLE_9
from txl_lab.speed.workloads import timed_alternately


@dataclass(frozen=True)
class Slowdown:
    """A row of Table 9, measured here."""

    attention_length: int
    segment: int
    dtype: str
    vanilla_seconds: float  # median time per token
    transformer_xl_seconds: float  # median time per token

    @property
    def ratio(self) -> float:
        """Time of the vanilla Transformer as a multiple of Transformer-XL's."""
        return self.vanilla_seconds / self.transformer_xl_seconds

    def to_dict(self) -> JsonObject:
        """Return all figures, ready for JSON."""
        return asdict(self) | {"ratio": self.ratio, "published": TABLE_9.get(self.attention_length)}


def slowdown(
    shape: TransformerXLConfig, vocab_size: int, length: int, segment: int, steps: int, device: str, dtype: str
) -> Slowdown:
    """Time both models at an attention length, in `steps` rounds of several segments and one window."""
    torch.manual_seed(0)
    recurrent = dataclasses.replace(shape, mem_len=length, window=None, clamp_len=None)
    ours = TransformerXL(recurrent, vocab_size).to(device).eval()
    state = ours.init_state(1).filled_with_noise()
    torch.manual_seed(0)
    without = dataclasses.replace(as_family(shape, VanillaConfig), max_segment=length, attention="auto")
    theirs = VanillaTransformer(without, vocab_size).to(device).eval()
    last = torch.tensor([length - 1], device=device)

    def read_segment() -> None:
        nonlocal state
        tokens = torch.randint(vocab_size, (1, segment), device=device)
        _, state = ours.nll(tokens, tokens, state)

    def read_window() -> None:
        tokens = torch.randint(vocab_size, (1, length), device=device)
        theirs.chosen_nll(tokens, last, tokens[0, -1:], theirs.init_state(1))

    # Autocast is entered once for all steps, as in an evaluation: it then converts the weights once.
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == "bfloat16")
    with torch.no_grad(), autocast:
        of_segment, of_window = timed_alternately(read_segment, read_window, steps, device)
    return Slowdown(length, segment, dtype, of_window, of_segment / segment)
