"""Table 9: slowdown of evaluating the vanilla Transformer, which recomputes its whole window for every token.

Both models have the same shape, dtype and device. Each uses its fastest attention: fused and causal for the vanilla
Transformer, and on a CPU the same compiled code for both; on an NVIDIA GPU the steps of both are recorded. The vanilla
Transformer computes the softmax of its last position only. Per-token time is the time for one token in one lane: for
the vanilla Transformer the time of B windows of L tokens, divided by B; for Transformer-XL that of a segment of T
tokens in B lanes with L positions of memory, divided by B T.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass

import torch

from txl.config import TransformerXLConfig, VanillaConfig, as_family
from txl.evaluation.recorded import WARM, RecordedWindows
from txl.evaluation.stream import nll_step
from txl.files import JsonObject
from txl.models.language_model import State
from txl.models.transformer_xl import TransformerXL
from txl.models.vanilla import VanillaTransformer
from txl_lab.speed import TABLE_9
from txl_lab.speed.operations import forward_operations, visible_pairs
from txl_lab.speed.workloads import timed_alternately


@dataclass(frozen=True)
class Slowdown:
    """A row of Table 9, measured here."""

    attention_length: int
    segment: int
    dtype: str
    vanilla_seconds: float  # median time per token
    transformer_xl_seconds: float  # median time per token
    lanes: int = 1  # number of lanes and of windows B that are computed at once
    vanilla_operations: int | None = None  # per token, counted as in `txl_lab.speed.operations`; None: not counted
    transformer_xl_operations: int | None = None

    @property
    def ratio(self) -> float:
        """Time of the vanilla Transformer as a multiple of Transformer-XL's."""
        return self.vanilla_seconds / self.transformer_xl_seconds

    def to_dict(self) -> JsonObject:
        """Return all figures, ready for JSON."""
        return asdict(self) | {"ratio": self.ratio, "published": TABLE_9.get(self.attention_length)}


def slowdown(
    shape: TransformerXLConfig,
    vocab_size: int,
    length: int,
    segment: int,
    steps: int,
    device: str,
    dtype: str,
    lanes: int = 1,
) -> Slowdown:
    """Time both models at an attention length, in `steps` rounds of several segments and one window in each lane."""
    torch.manual_seed(0)
    recurrent = dataclasses.replace(shape, mem_len=length, window=None, clamp_len=None)
    ours = TransformerXL(recurrent, vocab_size, device, getattr(torch, dtype)).to(device).eval()
    state: State = ours.init_state(lanes).filled_with_noise()
    torch.manual_seed(0)
    without = dataclasses.replace(as_family(shape, VanillaConfig), max_segment=length, attention="auto")
    theirs = VanillaTransformer(without, vocab_size).to(device).eval()
    last = torch.arange(1, lanes + 1, device=device) * length - 1
    read, window = nll_step(ours, 1.0), RecordedWindows(theirs, 1.0)
    counted, empty = torch.ones(lanes, segment, dtype=torch.bool, device=device), theirs.init_state(lanes)

    def read_segment() -> None:
        nonlocal state
        tokens = torch.randint(vocab_size, (lanes, segment), device=device)
        _, state = read(tokens, tokens, state, counted)

    def read_window() -> None:
        tokens = torch.randint(vocab_size, (lanes, length), device=device)
        window(tokens, last, tokens[:, -1], empty)

    # Autocast is entered once for all steps, as in an evaluation: it then converts the weights once.
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == "bfloat16")
    with torch.no_grad(), autocast:
        for _ in range(WARM + 2 if device.startswith("cuda") else 0):  # after which both are recorded
            read_segment()
            read_window()
        of_segment, of_window = timed_alternately(read_segment, read_window, steps, device)
    return Slowdown(
        length,
        segment,
        dtype,
        of_window / lanes,
        of_segment / (lanes * segment),
        lanes,
        *_operations(shape, vocab_size, length, segment),
    )


def _operations(
    shape: TransformerXLConfig, vocab_size: int, length: int, segment: int
) -> tuple[int, int] | tuple[None, None]:
    """Return the operations per token of both models; None for a softmax whose operations are not counted."""
    if shape.cutoffs or shape.d_embed not in (None, shape.d_model):
        return None, None
    window = forward_operations(shape, vocab_size, 1, length, 0, frozen=True, scored=1)
    # The vanilla Transformer's attention has no position scores: two products of all pairs, not three.
    window -= shape.n_layer * 2 * visible_pairs(length, 0) * shape.n_head * shape.d_head
    return window, forward_operations(shape, vocab_size, 1, segment, length, frozen=True) // segment
