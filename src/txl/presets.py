"""Configurations by name: the paper's, each with its source and published number, and small ones for a CPU.

Where the paper and the authors' published scripts disagree, the scripts' settings are used.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from txl.config import DataConfig, EvalConfig, ModelConfig, RunConfig, TrainConfig
from txl.errors import UserError


@dataclass(frozen=True)
class Preset:
    """A named configuration and where it comes from."""

    name: str
    description: str
    source: str
    published: str
    """The published result, or "none"."""
    vocab_size: int
    """Size of the vocabulary that the published parameter count is for."""
    make: Callable[[], RunConfig]


def _enwik8_12l() -> RunConfig:
    return RunConfig(
        name="enwik8-12L",
        model=ModelConfig(
            n_layer=12, d_model=512, n_head=8, d_head=64, d_inner=2048, mem_len=512, dropout=0.1, dropatt=0.0
        ),
        data=DataConfig(corpus="enwik8", unit="byte"),
        train=TrainConfig(steps=400_000, batch_size=22, segment=512, learning_rate=2.5e-4, warmup_steps=0),
        eval=EvalConfig(segment=80, mem_len=2100, window=2100, clamp_len=820),
    )


def _enwik8_24l() -> RunConfig:
    return RunConfig(
        name="enwik8-24L",
        model=ModelConfig(
            n_layer=24, d_model=1024, n_head=8, d_head=128, d_inner=3072, mem_len=768, dropout=0.15, dropatt=0.15
        ),
        data=DataConfig(corpus="enwik8", unit="byte"),
        train=TrainConfig(steps=400_000, batch_size=64, segment=768, learning_rate=2.5e-4, warmup_steps=4000),
        eval=EvalConfig(segment=128, mem_len=3800, window=3800, clamp_len=1000),
    )


def _stdlib_tiny() -> RunConfig:
    return RunConfig(
        name="stdlib-tiny",
        model=ModelConfig(n_layer=4, d_model=128, n_head=4, d_head=32, d_inner=384, mem_len=128, dropout=0.0),
        data=DataConfig(corpus="stdlib", unit="byte"),
        train=TrainConfig(
            steps=1000,
            batch_size=16,
            segment=128,
            learning_rate=2e-3,
            warmup_steps=100,
            log_every=20,
            eval_every=250,
            eval_tokens=50_000,
            checkpoint_every=500,
        ),
        eval=EvalConfig(segment=128, mem_len=256, window=256),
    )


def _stdlib_small() -> RunConfig:
    return RunConfig(
        name="stdlib-small",
        model=ModelConfig(n_layer=6, d_model=256, n_head=8, d_head=32, d_inner=1024, mem_len=256, dropout=0.0),
        data=DataConfig(corpus="stdlib", unit="byte"),
        train=TrainConfig(
            steps=4000,
            batch_size=16,
            segment=256,
            learning_rate=1e-3,
            warmup_steps=200,
            log_every=50,
            eval_every=500,
            eval_tokens=100_000,
            checkpoint_every=500,
        ),
        eval=EvalConfig(segment=128, mem_len=1024, window=1024),
    )


_OUR_OWN = "this project"
_ENWIK8_PAPER = "Table 2 of the paper; the authors' PyTorch scripts"


def presets() -> dict[str, Preset]:
    """All presets by name, the paper's first."""
    every = [
        Preset("enwik8-12L", "12 layers on enwik8", _ENWIK8_PAPER, "1.06 bpc (enwik8 test, 41M)", 204, _enwik8_12l),
        Preset("enwik8-24L", "24 layers on enwik8", _ENWIK8_PAPER, "0.99 bpc (enwik8 test, 277M)", 204, _enwik8_24l),
        Preset("stdlib-tiny", "the demo: minutes on two CPU cores", _OUR_OWN, "none", 256, _stdlib_tiny),
        Preset("stdlib-small", "about an hour on a CPU", _OUR_OWN, "none", 256, _stdlib_small),
    ]
    return {each.name: each for each in every}


def find_preset(name: str) -> Preset:
    """The preset of a name.

    Raises:
        UserError: with the nearest names, if there is none.
    """
    by_name = presets()
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(by_name)}"
        raise UserError(f"unknown preset {name!r}; {hint}")
    return by_name[name]


def preset(name: str) -> RunConfig:
    """A new configuration of that name, yours to change.

    Raises:
        UserError: with the nearest names, if there is none.
    """
    return find_preset(name).make()
