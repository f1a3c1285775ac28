"""Small configurations for two CPU cores: stdlib-bpe and stdlib-tiny take minutes, most others about an hour."""

from __future__ import annotations

from dataclasses import replace

from txl.config import DataConfig, EvalConfig, RunConfig, TrainConfig, TransformerXLConfig, VanillaConfig, as_family
from txl.presets.published import BYTES, PTB, TEXT8, WIKITEXT_2, WIKITEXT_103, WORDS_OF_WIKITEXT_2, WT103_CUTOFFS
from txl.presets.recipe import TABLE_6, Preset, ablation_presets, changed

CUTOFFS = {"ptb": (1000, 4000), "wikitext-2": (2000, 10_000)}  # of the adaptive softmax
OURS, CPU_HOUR = "this project", "about an hour on two CPU cores"

# fmt: off
_TINY = RunConfig(
    name="stdlib-tiny",
    model=TransformerXLConfig(n_layer=4, d_model=128, n_head=4, d_head=32, d_inner=384, mem_len=128, dropout=0.0),
    data=DataConfig(corpus="stdlib", unit="byte"),
    train=TrainConfig(
        steps=1000, batch_size=16, segment=128, learning_rate=2e-3, warmup_steps=100,
        log_every=20, eval_every=250, eval_tokens=50_000, checkpoint_every=500,
    ),
    eval=EvalConfig(segment=128, mem_len=256, window=256),
)
_BPE = changed(
    _TINY, "stdlib-bpe",
    model={"attention": "fastest", "pre_norm": True, "qk_norm": True}, data={"unit": "bpe", "vocab_size": 2048},
    train={
        "steps": 2400, "reset_memory": 0.05, "optimizer": "muon", "learning_rate": 3.2e-3, "beta2": 0.95, "clip": 1.0,
        "schedule": "linear", "warmup_steps": 60, "eval_every": 400, "eval_tokens": 30_000, "checkpoint_every": 400,
    },
)
_BYTES_SMALL = RunConfig(
    name="stdlib-small",
    model=TransformerXLConfig(n_layer=6, d_model=256, n_head=8, d_head=32, d_inner=1024, mem_len=256, dropout=0.0),
    data=DataConfig(corpus="stdlib", unit="byte"),
    train=TrainConfig(
        steps=4000, batch_size=16, segment=256, learning_rate=1e-3, warmup_steps=200,
        log_every=50, eval_every=500, eval_tokens=100_000, checkpoint_every=500,
    ),
    eval=EvalConfig(segment=128, mem_len=1024, window=1024),
)
_ENWIK8 = changed(_BYTES_SMALL, "enwik8-small", data={"corpus": "enwik8"})
# The paper's Penn Treebank recipe with a smaller model and lower dropout rates.
PTB_SMALL = RunConfig(
    name="ptb-small",
    model=TransformerXLConfig(
        n_layer=4, d_model=160, n_head=5, d_head=32, d_inner=480, mem_len=70, cutoffs=CUTOFFS["ptb"],
        dropout=0.1, dropatt=0.0, dropout_words=0.05, dropout_embed=0.1, dropout_r=0.0, dropout_out=0.2,
        locked_dropout=True,
    ),
    data=DataConfig(corpus="ptb", unit="word"),
    train=TrainConfig(
        steps=12_000, batch_size=20, segment=70, random_segments=True,
        learning_rate=2e-3, min_learning_rate=2e-4, warmup_steps=200, average_from=9_000,
        log_every=50, eval_every=500, eval_batch_size=10, checkpoint_every=1000,
    ),
    eval=EvalConfig(segment=70, mem_len=280, window=280),
)
WIKITEXT_2_SMALL = changed(
    PTB_SMALL, "wikitext-2-small", data={"corpus": "wikitext-2"}, model={"cutoffs": CUTOFFS["wikitext-2"]}
)

SMALL = [
    WORDS_OF_WIKITEXT_2,
    Preset(_BPE, "the demo: minutes on two CPU cores", OURS, "none", 2048),
    Preset(_TINY, "minutes on two CPU cores, in bytes", OURS, "none", BYTES),
    Preset(_BYTES_SMALL, CPU_HOUR, OURS, "none", BYTES),
    Preset(_ENWIK8, CPU_HOUR, OURS, "none", BYTES),
    # The Transformer of Al-Rfou et al. with auxiliary losses, with the shape and training of enwik8-small.
    Preset(
        replace(
            changed(
                _ENWIK8, "enwik8-vanilla-small", train={"epoch_shift": 97},
                eval={"segment": 256, "mem_len": 0, "window": None},
            ),
            model=replace(as_family(_ENWIK8.model, VanillaConfig), max_segment=256, layer_losses=True, n_target=2),
        ),
        CPU_HOUR, OURS, "none", BYTES,
    ),
    Preset(
        changed(_BYTES_SMALL, "text8-small", data={"corpus": "text8", "unit": "char"}), CPU_HOUR, OURS, "none", TEXT8
    ),
    Preset(PTB_SMALL, CPU_HOUR, OURS, "none", PTB),
    Preset(WIKITEXT_2_SMALL, CPU_HOUR, OURS, "none", WIKITEXT_2),
    Preset(  # adaptive embeddings and softmax
        changed(
            _BYTES_SMALL, "wt103-small", data={"corpus": "wikitext-103", "unit": "word"}, train={"segment": 128},
            model={
                "d_inner": 768, "mem_len": 128,
                "cutoffs": WT103_CUTOFFS, "div_val": 4, "tie_projections": "all_but_first",
            },
            eval={"segment": 64, "mem_len": 512, "window": 512},
        ),
        CPU_HOUR, OURS, "none", WIKITEXT_103,
    ),
]
# fmt: on

# Absolute positions need segments of equal length.
_ABLATION = changed(WIKITEXT_2_SMALL, "wikitext-2-ablation", train={"random_segments": False})
_ROWS = [replace(row, best=None, attention_length=None) for row in TABLE_6]
SMALL_ABLATIONS = [
    *ablation_presets(_ROWS, _ABLATION, "WikiText-2, as Table 6", OURS, WIKITEXT_2),
    *ablation_presets(_ROWS, changed(_TINY, "stdlib-ablation"), "standard library, as Table 6", OURS, BYTES),
]
