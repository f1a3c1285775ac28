"""Small configurations for two CPU cores: stdlib-bpe and stdlib-tiny take minutes, most others about an hour."""

from __future__ import annotations

from dataclasses import replace

from txl.config import DataConfig, EvalConfig, RunConfig, TrainConfig, TransformerXLConfig, VanillaConfig, as_family
from txl.presets.published import WT103_CUTOFFS


def stdlib_bpe() -> RunConfig:
    """Return the configuration of the demo: BPE tokens, `pre_norm`, `qk_norm`, Muon, and a linear schedule."""
    run = stdlib_tiny()
    run.name = "stdlib-bpe"
    run.model = replace(run.model, attention="fastest", pre_norm=True, qk_norm=True)
    run.data = DataConfig(corpus="stdlib", unit="bpe", vocab_size=2048)
    run.train = TrainConfig(
        steps=2400,
        batch_size=16,
        segment=128,
        reset_memory=0.05,
        optimizer="muon",
        learning_rate=3.2e-3,
        beta2=0.95,
        clip=1.0,
        schedule="linear",
        warmup_steps=60,
        log_every=20,
        eval_every=400,
        eval_tokens=30_000,
        checkpoint_every=400,
    )
    return run


def stdlib_tiny() -> RunConfig:
    """Return the smallest configuration, for bytes of the standard library."""
    return RunConfig(
        name="stdlib-tiny",
        model=TransformerXLConfig(n_layer=4, d_model=128, n_head=4, d_head=32, d_inner=384, mem_len=128, dropout=0.0),
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


def stdlib_small() -> RunConfig:
    """Return the configuration for bytes of the standard library; enwik8-small and text8-small have the same model."""
    return RunConfig(
        name="stdlib-small",
        model=TransformerXLConfig(n_layer=6, d_model=256, n_head=8, d_head=32, d_inner=1024, mem_len=256, dropout=0.0),
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


def enwik8_small() -> RunConfig:
    """Return the configuration for bytes of enwik8."""
    run = stdlib_small()
    run.name, run.data = "enwik8-small", DataConfig(corpus="enwik8", unit="byte")
    return run


def text8_small() -> RunConfig:
    """Return the configuration for characters of text8."""
    run = stdlib_small()
    run.name, run.data = "text8-small", DataConfig(corpus="text8", unit="char")
    return run


def enwik8_vanilla_small() -> RunConfig:
    """Return the Transformer of Al-Rfou et al. with auxiliary losses, with the shape and training of enwik8-small."""
    run = enwik8_small()
    run.name = "enwik8-vanilla-small"
    run.model = replace(as_family(run.model, VanillaConfig), max_segment=256, layer_losses=True, n_target=2)
    run.train.epoch_shift = 97
    run.eval = EvalConfig(segment=256, mem_len=0)
    return run


CUTOFFS = {"ptb": (1000, 4000), "wikitext-2": (2000, 10_000)}
"""Cutoffs of the adaptive softmax in small models of words, by corpus."""


def ptb_small() -> RunConfig:
    """Return the configuration for Penn Treebank."""
    return words("ptb-small", "ptb", CUTOFFS["ptb"])


def wikitext_2_small() -> RunConfig:
    """Return the configuration for WikiText-2."""
    return words("wikitext-2-small", "wikitext-2", CUTOFFS["wikitext-2"])


def words(name: str, corpus: str, cutoffs: tuple[int, ...]) -> RunConfig:
    """Return the paper's Penn Treebank recipe for a corpus of words, with a smaller model and lower dropout rates."""
    return RunConfig(
        name=name,
        model=TransformerXLConfig(
            n_layer=4,
            d_model=160,
            n_head=5,
            d_head=32,
            d_inner=480,
            mem_len=70,
            dropout=0.1,
            dropatt=0.0,
            dropout_words=0.05,
            dropout_embed=0.1,
            dropout_r=0.0,
            dropout_out=0.2,
            locked_dropout=True,
            cutoffs=cutoffs,
        ),
        data=DataConfig(corpus=corpus, unit="word"),
        train=TrainConfig(
            steps=12_000,
            batch_size=20,
            segment=70,
            random_segments=True,
            learning_rate=2e-3,
            min_learning_rate=2e-4,
            warmup_steps=200,
            average_from=9_000,
            log_every=50,
            eval_every=500,
            eval_batch_size=10,
            checkpoint_every=1000,
        ),
        eval=EvalConfig(segment=70, mem_len=280, window=280),
    )


def wikitext_2_ablation() -> RunConfig:
    """Return wikitext-2-small for the rows of Table 6, with segments of equal length, as absolute positions need."""
    run = words("wikitext-2-ablation", "wikitext-2", CUTOFFS["wikitext-2"])
    run.train.random_segments = False
    return run


def stdlib_ablation() -> RunConfig:
    """Return stdlib-tiny as the base configuration for the rows of Table 6, which train in minutes each."""
    run = stdlib_tiny()
    run.name = "stdlib-ablation"
    return run


def wt103_small() -> RunConfig:
    """Return the configuration for WikiText-103: adaptive embeddings and softmax, trained like stdlib-small."""
    run = stdlib_small()
    run.name, run.data = "wt103-small", DataConfig(corpus="wikitext-103", unit="word")
    run.model = replace(
        run.model, d_inner=768, mem_len=128, cutoffs=WT103_CUTOFFS, div_val=4, tie_projections="all_but_first"
    )
    run.train.segment = 128
    run.eval = EvalConfig(segment=64, mem_len=512, window=512)
    return run
