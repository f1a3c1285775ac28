"""Models that the paper's tables compare with, at their published sizes, and small ones for a CPU.

Sources: awd-lstm-lm (Merity, Keskar and Socher) for AWD-LSTM and QRNN, mos (Yang and Dai) for the mixture of
softmaxes, fairseq (Baevski and Auli) for adaptive input. Optimisers, schedules and the trigger of averaging are those
of the sources, but weight decay does not apply to biases.
"""

from __future__ import annotations

from dataclasses import replace

from txl.config import DataConfig, EvalConfig, RecurrentConfig, RunConfig, TrainConfig, VanillaConfig
from txl.presets.published import PTB, WIKITEXT_2, WIKITEXT_103
from txl.presets.recipe import Preset, changed
from txl.presets.small import CPU_HOUR, CUTOFFS, OURS, PTB_SMALL, WIKITEXT_2_SMALL

_INIT_STD = 0.0577  # of the initial weights: that of awd-lstm-lm, which draws uniformly from -0.1 to 0.1

# fmt: off
# 3 layers of 1,150, embeddings of 400; 500 epochs of 681 steps.
_PTB_AWD_LSTM = RunConfig(
    name="ptb-awd-lstm",
    model=RecurrentConfig(
        kind="lstm", n_layer=3, d_model=400, d_hidden=1150,
        weight_drop=0.5, dropout=0.25, dropout_words=0.1, dropout_embed=0.4, dropout_out=0.4, locked_dropout=True,
        activation_reg=2.0, temporal_reg=1.0, init_std=_INIT_STD,
    ),
    data=DataConfig(corpus="ptb", unit="word"),
    train=TrainConfig(
        steps=500 * 681, batch_size=20, segment=70, random_segments=True,
        optimizer="sgd", learning_rate=30.0, schedule="constant", weight_decay=1.2e-6, average_patience=5,
        eval_every=681, eval_batch_size=10,
    ),
    eval=EvalConfig(segment=70, mem_len=0, batch_size=1),
)
# 750 epochs of 383 steps.
_WIKITEXT_2_AWD_LSTM = changed(
    _PTB_AWD_LSTM, "wikitext-2-awd-lstm", data={"corpus": "wikitext-2"},
    model={"dropout": 0.2, "dropout_embed": 0.65}, train={"batch_size": 80, "steps": 750 * 383, "eval_every": 383},
)
# 15 softmaxes over 3 layers of 960, 960, 620; 1,000 epochs of 1,135 steps.
_PTB_MOS = changed(
    _PTB_AWD_LSTM, "ptb-awd-lstm-mos",
    model={
        "d_model": 280, "d_hidden": 960, "d_last": 620, "n_softmax": 15, "dropout": 0.225, "dropout_latent": 0.29
    },
    train={"batch_size": 12, "learning_rate": 20.0, "steps": 1000 * 1135, "eval_every": 1135},
)
# 4 layers of 1,550, the first reads two tokens; 550 epochs.
_PTB_QRNN = changed(
    _PTB_AWD_LSTM, "ptb-qrnn",
    model={
        "kind": "qrnn", "n_layer": 4, "d_hidden": 1550, "kernel_sizes": (2, 1), "weight_drop": 0.1, "dropout": 0.3
    },
    train={"clip": 0.2, "steps": 550 * 681},
)
# 153.9M parameters, as in awd-lstm-lm; the paper's 151M are those of a first layer that reads one token instead of two.
# 14 epochs of 12,604 steps with Adam; the learning rate falls to a tenth after 12 epochs.
_WT103_QRNN = RunConfig(
    name="wt103-qrnn",
    model=RecurrentConfig(
        kind="qrnn", n_layer=4, d_model=400, d_hidden=2500, kernel_sizes=(2, 1), dropout=0.1, locked_dropout=True,
        cutoffs=(2800, 20_000, 76_000), init_std=_INIT_STD,
    ),
    data=DataConfig(corpus="wikitext-103", unit="word"),
    train=TrainConfig(
        steps=14 * 12_604, batch_size=60, segment=140, random_segments=True,
        learning_rate=1e-3, schedule="steps", decay_at=(12 * 12_604,),
    ),
    eval=EvalConfig(segment=140, mem_len=0),
)
# Baevski and Auli's published training command, 247M parameters, on eight GPUs with 3 x 3,072 tokens each. Differences:
# their attention has biases (0.07M), ours has none; our softmax has 267,737 biases, theirs has none. They test with a
# context window; its limit, a window that slides by one token, is `txl eval --sliding`.
_WT103_ADAPTIVE = RunConfig(
    name="wt103-adaptive",
    model=VanillaConfig(
        encoding="sinusoid", max_segment=3072, n_layer=16, d_model=1024, n_head=8, d_head=128, d_inner=4096,
        pre_norm=True, init="xavier",
        dropout=0.3, dropatt=0.1, dropout_inner=0.1, dropout_out=0.2, dropout_tail=0.2,
        cutoffs=(20_000, 60_000), div_val=4, tie_projections="tails",
    ),
    data=DataConfig(corpus="wikitext-103", unit="word"),
    train=TrainConfig(
        steps=286_000, batch_size=24, segment=3072, optimizer="sgd", momentum=0.99,
        learning_rate=1.0, min_learning_rate=1e-4, warmup_steps=16_000, clip=0.1,
    ),
    eval=EvalConfig(segment=3072, mem_len=0),
)

_MERITY_2017 = "Table 5 (Merity et al. 2017); awd-lstm-lm"
_MERITY_2018 = "Tables 1 and 8 (Merity et al. 2018); awd-lstm-lm"
_AWD_CODE = "awd-lstm-lm, whose result it is"
BASELINES = [
    Preset(
        _WT103_ADAPTIVE, "WikiText-103, adaptive input", "Table 1 (Baevski and Auli); fairseq", "20.5 ppl (247M)",
        WIKITEXT_103,
    ),
    Preset(_WT103_QRNN, "WikiText-103, QRNN", _MERITY_2018, "33.0 ppl (151M)", WIKITEXT_103),
    # The models of a group in Table 8 have the same parameter budget; three layers are those of AWD-LSTM.
    Preset(
        changed(
            _WT103_QRNN, "wt103-lstm",
            model={"kind": "lstm", "kernel_sizes": RecurrentConfig().kernel_sizes, "n_layer": 3, "d_hidden": 1760},
        ),
        "WikiText-103, LSTM", "Table 8; shape ours, to 151M", "none", WIKITEXT_103,
    ),
    Preset(_PTB_AWD_LSTM, "Penn Treebank, AWD-LSTM", _MERITY_2017, "58.8 ppl (24M)", PTB),
    Preset(_PTB_MOS, "Penn Treebank, AWD-LSTM-MoS", "Table 5 (Yang et al. 2017); mos", "55.97 ppl (22M)", PTB),
    Preset(_PTB_QRNN, "Penn Treebank, QRNN", _AWD_CODE, "58.3 ppl", PTB),
    Preset(_WIKITEXT_2_AWD_LSTM, "WikiText-2, AWD-LSTM", _AWD_CODE, "65.6 ppl (33M)", WIKITEXT_2),
]

# Regularisation of AWD-LSTM, with lower rates for a smaller model.
SMALL_AWD: dict[str, float] = {
    "weight_drop": 0.2, "dropout_embed": 0.2, "dropout_out": 0.3, "activation_reg": 1.0, "temporal_reg": 0.5,
}


def _recurrent(corpus: str) -> tuple[RunConfig, RunConfig, RunConfig]:
    """Return an LSTM, an AWD-LSTM and a QRNN with training, dropout and size of the corpus's small Transformer-XL."""
    base = WIKITEXT_2_SMALL if corpus == "wikitext-2" else PTB_SMALL
    shape = RecurrentConfig(
        kind="lstm", n_layer=2, d_model=160, d_hidden=360, kernel_sizes=(2,), cutoffs=CUTOFFS[corpus],
        dropout=0.1, dropout_words=0.05, dropout_embed=0.1, dropout_out=0.2, locked_dropout=True, init_std=_INIT_STD,
    )
    lstm = replace(changed(base, f"{corpus}-lstm-small", eval={"mem_len": 0, "window": None}), model=shape)
    awd_lstm = changed(lstm, f"{corpus}-awd-lstm-small", model=SMALL_AWD)
    qrnn = {"kind": "qrnn", "n_layer": 4, "d_hidden": 320, "kernel_sizes": (2, 1)}
    return lstm, awd_lstm, changed(lstm, f"{corpus}-qrnn-small", model=qrnn)


_PTB_SMALL, _WIKITEXT_2_SMALL = _recurrent("ptb"), _recurrent("wikitext-2")
_MOS_SMALL = changed(
    _PTB_SMALL[1], "ptb-awd-lstm-mos-small",
    model={"cutoffs": (), "n_softmax": 3, "d_last": 240, "d_hidden": 280, "d_model": 140},
)
_ADAPTIVE_SMALL = replace(
    changed(
        WIKITEXT_2_SMALL, "wikitext-2-adaptive-small",
        train={"segment": 128, "random_segments": False, "batch_size": 16, "learning_rate": 1e-3},
        eval={"segment": 128, "mem_len": 0, "window": None},
    ),
    model=replace(
        _WT103_ADAPTIVE.model, max_segment=128, n_layer=6, d_model=256, d_head=32, d_inner=768,
        dropout=0.2, dropout_out=None, dropout_tail=0.1, cutoffs=CUTOFFS["wikitext-2"],
    ),
)
# Baselines for ptb-small and wikitext-2-small, with the same training budget.
SMALL_BASELINES = [
    Preset(run, CPU_HOUR, OURS, "none", PTB if run.data.corpus == "ptb" else WIKITEXT_2)
    for run in (*_PTB_SMALL, *_WIKITEXT_2_SMALL, _MOS_SMALL, _ADAPTIVE_SMALL)
]
# fmt: on
