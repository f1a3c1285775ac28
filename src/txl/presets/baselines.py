"""Models that the paper's tables compare with, at their published sizes, and small ones for a CPU.

Sources: awd-lstm-lm (Merity, Keskar and Socher) for AWD-LSTM and QRNN, mos (Yang and Dai) for the mixture of
softmaxes, fairseq (Baevski and Auli) for adaptive input. Optimisers, schedules and the trigger of averaging are those
of the sources, but weight decay does not apply to biases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from txl.config import DataConfig, EvalConfig, RecurrentConfig, RunConfig, TrainConfig, VanillaConfig
from txl.presets.small import CUTOFFS, words

WT103_SPLITS = (2800, 20_000, 76_000)
"""Cutoffs of the adaptive softmax for WikiText-103 in awd-lstm-lm."""


def ptb_awd_lstm() -> RunConfig:
    """Return the AWD-LSTM for Penn Treebank, 24M parameters: 3 layers of 1,150, embeddings of 400; 500 epochs."""
    return RunConfig(
        name="ptb-awd-lstm",
        model=RecurrentConfig(
            kind="lstm",
            n_layer=3,
            d_model=400,
            d_hidden=1150,
            weight_drop=0.5,
            dropout=0.25,
            dropout_words=0.1,
            dropout_embed=0.4,
            dropout_out=0.4,
            locked_dropout=True,
            activation_reg=2.0,
            temporal_reg=1.0,
            init_std=0.0577,  # that of awd-lstm-lm, which draws uniformly from -0.1 to 0.1
        ),
        data=DataConfig(corpus="ptb", unit="word"),
        train=TrainConfig(
            steps=500 * 681,
            batch_size=20,
            segment=70,
            random_segments=True,
            optimizer="sgd",
            learning_rate=30.0,
            schedule="constant",
            weight_decay=1.2e-6,
            average_patience=5,
            eval_every=681,
            eval_batch_size=10,
        ),
        eval=EvalConfig(segment=70, mem_len=0, batch_size=1),
    )


def wikitext_2_awd_lstm() -> RunConfig:
    """Return the AWD-LSTM for WikiText-2, 33M parameters: the shape of `ptb_awd_lstm`; 750 epochs of 383 steps."""
    run = ptb_awd_lstm()
    run.name, run.data.corpus = "wikitext-2-awd-lstm", "wikitext-2"
    run.model.dropout, run.model.dropout_embed = 0.2, 0.65
    run.train.batch_size, run.train.steps, run.train.eval_every = 80, 750 * 383, 383
    return run


def ptb_awd_lstm_mos() -> RunConfig:
    """Return AWD-LSTM-MoS, 22M parameters: 15 softmaxes over 3 layers of 960, 960, 620; 1,000 epochs of 1,135 steps."""
    run = ptb_awd_lstm()
    run.name = "ptb-awd-lstm-mos"
    run.model = replace(
        run.model, d_model=280, d_hidden=960, d_last=620, n_softmax=15, dropout=0.225, dropout_latent=0.29
    )
    run.train.batch_size, run.train.learning_rate = 12, 20.0
    run.train.steps, run.train.eval_every = 1000 * 1135, 1135
    return run


def ptb_qrnn() -> RunConfig:
    """Return the QRNN for Penn Treebank, 24M parameters: 4 layers of 1,550, the first reads two tokens; 550 epochs."""
    run = ptb_awd_lstm()
    run.name = "ptb-qrnn"
    run.model = replace(
        run.model, kind="qrnn", n_layer=4, d_hidden=1550, kernel_sizes=(2, 1), weight_drop=0.1, dropout=0.3
    )
    run.train.clip, run.train.steps = 0.2, 550 * 681
    return run


def wt103_qrnn() -> RunConfig:
    """Return the QRNN for WikiText-103: 4 layers of 2,500, 14 epochs of 12,604 steps with Adam.

    It has 153.9M parameters, as in awd-lstm-lm. The paper says 151M, the number for a first layer that reads one token
    instead of two. As in awd-lstm-lm, the learning rate is divided by ten after 12 epochs.
    """
    epoch = 12_604
    return RunConfig(
        name="wt103-qrnn",
        model=RecurrentConfig(
            kind="qrnn",
            n_layer=4,
            d_model=400,
            d_hidden=2500,
            kernel_sizes=(2, 1),
            dropout=0.1,
            locked_dropout=True,
            cutoffs=WT103_SPLITS,
            init_std=0.0577,
        ),
        data=DataConfig(corpus="wikitext-103", unit="word"),
        train=TrainConfig(
            steps=14 * epoch,
            batch_size=60,
            segment=140,
            random_segments=True,
            learning_rate=1e-3,
            schedule="steps",
            decay_at=(12 * epoch,),
        ),
        eval=EvalConfig(segment=140, mem_len=0),
    )


def wt103_lstm() -> RunConfig:
    """Return the LSTM of Table 8, with a shape of ours that gives 151M parameters.

    The paper only says that all models of its group have the same parameter budget. The LSTM has three layers like
    AWD-LSTM and trains like the QRNN.
    """
    run = wt103_qrnn()
    run.name = "wt103-lstm"
    run.model = replace(run.model, kind="lstm", kernel_sizes=RecurrentConfig().kernel_sizes, n_layer=3, d_hidden=1760)
    return run


def wt103_adaptive() -> RunConfig:
    """Return the WikiText-103 model of Baevski and Auli's published training command, 247M parameters.

    It has 16 pre-norm layers, sinusoids at the input, embeddings of 1024, 256 and 64 features tied with the softmax's
    tail clusters, and no LayerNorm at the end. Differences: their attention has biases (0.07M), ours has none; our
    softmax has 267,737 biases, including those of the two tail clusters, theirs has none. They trained on eight GPUs
    with 3 x 3,072 tokens each and Nesterov momentum 0.99. They test with a context window; its limit, a window that
    slides by one token, is `txl eval --sliding`.
    """
    return RunConfig(
        name="wt103-adaptive",
        model=VanillaConfig(
            encoding="sinusoid",
            max_segment=3072,
            n_layer=16,
            d_model=1024,
            n_head=8,
            d_head=128,
            d_inner=4096,
            pre_norm=True,
            init="xavier",
            dropout=0.3,
            dropatt=0.1,
            dropout_inner=0.1,
            dropout_out=0.2,
            dropout_tail=0.2,
            cutoffs=(20_000, 60_000),
            div_val=4,
            tie_projections="tails",
        ),
        data=DataConfig(corpus="wikitext-103", unit="word"),
        train=TrainConfig(
            steps=286_000,
            batch_size=24,
            segment=3072,
            optimizer="sgd",
            momentum=0.99,
            learning_rate=1.0,
            min_learning_rate=1e-4,
            warmup_steps=16_000,
            clip=0.1,
        ),
        eval=EvalConfig(segment=3072, mem_len=0),
    )


SMALL_AWD: dict[str, float] = {
    "weight_drop": 0.2,
    "dropout_embed": 0.2,
    "dropout_out": 0.3,
    "activation_reg": 1.0,
    "temporal_reg": 0.5,
}
"""Regularisation of AWD-LSTM, with lower rates for a smaller model."""


def small_recurrent(corpus: str, model: Literal["lstm", "awd-lstm", "qrnn"]) -> RunConfig:
    """Return a recurrent network with training and dropout as in `small.words`, and about as many parameters.

    Args:
        corpus: "ptb" or "wikitext-2".
        model: kind of network; "awd-lstm" is an LSTM with the regularisation `SMALL_AWD`.
    """
    cutoffs, lstm = CUTOFFS[corpus], model != "qrnn"
    run = words(f"{corpus}-{model}-small", corpus, cutoffs)
    run.model = RecurrentConfig(
        kind="lstm" if lstm else "qrnn",
        n_layer=2 if lstm else 4,
        d_model=160,
        d_hidden=360 if lstm else 320,
        kernel_sizes=(2,) if lstm else (2, 1),
        dropout=0.1,
        dropout_words=0.05,
        dropout_embed=0.1,
        dropout_out=0.2,
        locked_dropout=True,
        cutoffs=cutoffs,
        init_std=0.0577,
    )
    if model == "awd-lstm":
        run.model = replace(run.model, **SMALL_AWD)
    run.eval = EvalConfig(segment=70, mem_len=0)
    return run


def small_mos() -> RunConfig:
    """Return ptb-awd-lstm-small with three softmaxes."""
    run = small_recurrent("ptb", "awd-lstm")
    run.name = "ptb-awd-lstm-mos-small"
    run.model = replace(run.model, cutoffs=(), n_softmax=3, d_last=240, d_hidden=280, d_model=140)
    return run


def small_adaptive() -> RunConfig:
    """Return the adaptive-input Transformer for WikiText-2, about as large as wikitext-2-small."""
    run = words("wikitext-2-adaptive-small", "wikitext-2", ())
    run.model = replace(
        wt103_adaptive().model,
        max_segment=128,
        n_layer=6,
        d_model=256,
        d_head=32,
        d_inner=768,
        dropout=0.2,
        dropout_out=None,
        dropout_tail=0.1,
        cutoffs=CUTOFFS["wikitext-2"],
    )
    run.train.segment, run.train.random_segments, run.train.batch_size, run.train.learning_rate = 128, False, 16, 1e-3
    run.eval = EvalConfig(segment=128, mem_len=0)
    return run
