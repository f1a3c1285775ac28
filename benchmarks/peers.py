"""Time this model and Hugging Face's in one run, with equal weights and equal memory.

    make bench-peers                         # prints one line per row, and writes results/bench-peers.json

The benchmark runs in the environment of `make oracle` (transformers 4.37.2, the last version whose Transformer-XL
works). Before the timing, both models read equal tokens with equal memory, and all log-probabilities must agree. The
peer computes in float32, as its users do; the C library keeps freed memory for both models.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import logging as transformers_logging  # pyright: ignore[reportMissingImports]
from transformers.models.deprecated.transfo_xl import (  # pyright: ignore[reportMissingImports]
    TransfoXLConfig,
    TransfoXLLMHeadModel,
)

import txl
from txl.config import RunConfig
from txl.devices import keep_freed_memory
from txl.interop.import_run import import_run
from txl.training.optimisers import build_optimizer
from txl.training.step import StepInputs, training_step
from txl_lab.records import write
from txl_lab.speed import transformer_xl_of
from txl_lab.speed.budget import ranked_tokens
from txl_lab.speed.operations import bytes_read_once, matmul_rate, read_bandwidth, training_operations

OUT = Path("results/bench-peers.json")
AGREE = 2e-4  # largest difference of a log-probability, in nats


@dataclasses.dataclass(frozen=True)
class Workload:
    """A workload to time, and the ratios to aim at in float32 and bfloat16."""

    name: str
    preset: str
    vocab_size: int
    batch_size: int
    segment: int
    memory: int
    aim: tuple[float, float]
    training: bool = False
    # Segment length for our model if it differs from the peer's `segment`; time per token is compared
    ours: int | None = None


WORKLOADS = [
    Workload("one-token step", "enwik8-12L", 204, 1, 1, 2100, (40, 70)),
    Workload("one-token step", "wt103-large", 267_735, 1, 1, 1600, (40, 90)),
    Workload("segment evaluation", "enwik8-12L", 204, 1, 80, 2100, (6, 15)),
    Workload("segment evaluation, our segment", "enwik8-12L", 204, 1, 80, 2100, (6, 15), ours=256),
    Workload("segment evaluation", "wt103-base", 267_735, 10, 64, 640, (5, 12)),
    Workload("training step", "enwik8-12L", 204, 4, 128, 128, (1.4, 4.5), training=True),
    Workload("training step", "enwik8-12L", 204, 4, 512, 512, (2.5, 8.5), training=True),
]


def median_seconds(step: Callable[[], Any], least: int = 3, budget: float = 12.0) -> float:
    """Return the median of as many runs as fit into `budget` seconds, at least `least`, after one untimed run."""
    step()
    times: list[float] = []
    while len(times) < least or (sum(times) < budget and len(times) < 50):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def text(work: Workload, segment: int) -> torch.Tensor:
    """Return random tokens [B,T], ranked as in natural text, which matters to an adaptive softmax."""
    return ranked_tokens(work.vocab_size, work.batch_size, segment)


def peer_of(run: RunConfig, work: Workload) -> Any:
    """Return Hugging Face's model in a preset's shape, with random weights."""
    shape = transformer_xl_of(run)
    torch.manual_seed(0)
    config = TransfoXLConfig(
        vocab_size=work.vocab_size,
        cutoffs=list(shape.cutoffs),
        d_model=shape.d_model,
        d_embed=shape.d_embed or shape.d_model,
        n_head=shape.n_head,
        d_head=shape.d_head,
        d_inner=shape.d_inner,
        div_val=shape.div_val,
        n_layer=shape.n_layer,
        mem_len=work.memory,
        clamp_len=-1 if work.training or run.eval.clamp_len is None else run.eval.clamp_len,
        same_length=not work.training,
        untie_r=shape.untie_r,
        proj_share_all_but_first=shape.tie_projections == "all_but_first",
        dropout=0.0,
        dropatt=0.0,
    )
    return TransfoXLLMHeadModel(config)


def ours_of(peer: Any) -> txl.TransformerXL:
    """Return our model with the peer's shape and weights."""
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(f"{folder}/theirs")
        import_run(Path(f"{folder}/theirs"), Path(f"{folder}/ours"))
        model, _ = txl.load(f"{folder}/ours")
    assert isinstance(model, txl.TransformerXL)
    return model


def compare(peer: Any, model: txl.TransformerXL, memory: list[torch.Tensor], work: Workload) -> float:
    """Return the largest difference of the models' log-probabilities; end if it is larger than rounding explains."""
    tokens = text(work, work.segment)
    with torch.no_grad():
        hidden = peer.transformer(tokens, mems=[each.transpose(0, 1) for each in memory]).last_hidden_state
        theirs = peer.crit(hidden[:, -1])
        ours, _ = model.log_probs(tokens, filled(model, memory, work.memory))
    worst = (ours[:, -1] - theirs).abs().max().item()
    if not worst < AGREE:
        sys.exit(f"{work}: log-probabilities differ by {worst}; expected less than {AGREE}")
    return worst


def filled(model: txl.TransformerXL, memory: list[torch.Tensor], mem_len: int) -> Any:
    """Return our state with the peer's memory, one [B,M,E] per layer (a window may hide its oldest positions)."""
    state = model.init_state(memory[0].shape[0], mem_len=mem_len)
    dtype = state.hidden[0].dtype
    held = tuple(each[:, each.shape[1] - state.capacity :].to(dtype) for each in memory)
    return dataclasses.replace(state, hidden=held)


def evaluation_seconds(read: Callable[[torch.Tensor, Any], Any], state: Any, work: Workload, segment: int) -> float:
    """Return the seconds in which a function reads a segment and returns the next state."""

    def step() -> None:
        nonlocal state
        with torch.no_grad():
            state = read(text(work, segment), state)

    return median_seconds(step)


def engine_step(model: txl.TransformerXL, work: Workload) -> tuple[float, bool]:
    """Return the seconds per token of the decode engine with full memory, and True if its step is compiled."""
    engine = txl.DecodeEngine(model, mem_len=work.memory)
    engine.join(text(work, work.memory + 1)[0])
    return median_seconds(engine.step), engine.compiled


def peer_seconds(peer: Any, memory: list[torch.Tensor], work: Workload, run: RunConfig) -> float:
    """Return the seconds in which the peer evaluates a segment, or trains: forward, backward, clipping and Adam."""
    mems = [layer.transpose(0, 1).contiguous() for layer in memory]
    if not work.training:
        peer.eval()
        labels = work.segment > 1

        def read(tokens: torch.Tensor, mems: Any) -> Any:
            return (peer(tokens, mems=mems, labels=tokens) if labels else peer(tokens, mems=mems)).mems

        return evaluation_seconds(read, mems, work, work.segment)
    optimizer = torch.optim.Adam(peer.parameters(), lr=run.train.learning_rate)
    peer.train()

    def step() -> None:
        nonlocal mems
        tokens = text(work, work.segment)
        out = peer(tokens, mems=mems, labels=tokens)
        optimizer.zero_grad()
        out.loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), run.train.clip)
        optimizer.step()
        mems = out.mems

    return median_seconds(step)


def our_training(
    model: txl.TransformerXL, memory: list[torch.Tensor], work: Workload, run: RunConfig, dtype: str
) -> float:
    """Return the seconds of a step of our trainer."""
    lengths = {"batch_size": work.batch_size, "segment": work.segment}
    run.train = dataclasses.replace(run.train, dtype=dtype, micro_batches=1, **lengths)
    model.train()
    optimizer = build_optimizer(model, run.train)
    states = [filled(model, memory, work.memory)]

    def step() -> None:
        nonlocal states
        tokens = text(work, work.segment)
        states = training_step(model, optimizer, StepInputs(tokens, tokens, states), run.train).states

    return median_seconds(step)


def measure(work: Workload) -> list[dict[str, Any]]:
    run = txl.preset(work.preset)
    peer = peer_of(run, work)
    model = ours_of(peer)
    torch.manual_seed(1)
    memory = [torch.randn(work.batch_size, work.memory, run.model.d_model) for _ in range(run.model.n_layer)]
    worst = compare(peer, model, memory, work)
    peer_time = peer_seconds(peer, memory, work, run)
    del peer
    rows = []
    for dtype, aim in zip(("float32", "bfloat16"), work.aim, strict=True):
        segment = work.ours or work.segment
        row: dict[str, Any] = dataclasses.asdict(work) | {"dtype": dtype, "aim": aim, "largest_difference": worst}
        if work.training:
            weights = model.state_dict()
            model = txl.TransformerXL(dataclasses.replace(model.config, attention="fastest"), work.vocab_size)
            model.load_state_dict(weights)
            row["attention"] = model.attention_name
            seconds = our_training(model, memory, work, run, dtype)
            operations = training_operations(
                model.config, work.vocab_size, work.batch_size, segment, work.memory, model.config.window
            )
            row["fraction_of_matmul_rate"] = operations / seconds / matmul_rate(getattr(torch, dtype), "cpu")
        else:
            model.to(getattr(torch, dtype))
            model.eval()
            read = model.log_probs if segment == 1 else lambda tokens, state, m=model: m.nll(tokens, tokens, state)
            state = filled(model, memory, work.memory)
            seconds = evaluation_seconds(lambda tokens, state, read=read: read(tokens, state)[1], state, work, segment)
            if segment == 1:
                row["bytes_read_once"] = bytes_read_once(model, work.memory)
                row["bandwidth"] = read_bandwidth()
                row["fraction_of_bandwidth"] = row["bytes_read_once"] / row["bandwidth"] / seconds
                drawn, row["compiled"] = engine_step(model, work)
                row |= {"engine_seconds": drawn, "engine_ratio": peer_time / drawn}
        ratio = peer_time / work.segment * segment / seconds
        row |= {"peer_seconds": peer_time, "our_seconds": seconds, "our_segment": segment, "ratio": ratio}
        rows.append(row)
        if "engine_ratio" in row:
            print(f"{work.preset}, {dtype}: a token drawn by the engine, {row['engine_ratio']:.1f} times the peer")
        extra = "".join(f", {row[key]:.2f} of the {key[12:]}" for key in row if key.startswith("fraction_of"))
        print(
            f"{work.name}, {work.preset}, B {work.batch_size} T {segment} M {work.memory}, {dtype}: "
            f"{ratio:.1f} times the peer (aim {aim}){extra}",
            flush=True,
        )
    return rows


def main() -> None:
    keep_freed_memory()
    transformers_logging.set_verbosity_error()  # the library warns of every shared tensor that it saves once
    chosen = [WORKLOADS[int(word)] for word in sys.argv[1:]] or WORKLOADS
    rows = []
    for work in chosen:
        rows += measure(work)
        gc.collect()
    if len(chosen) == len(WORKLOADS):
        write(OUT, "make bench-peers", {"peer": "transformers 4.37.2, float32", "rows": rows})
    else:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
