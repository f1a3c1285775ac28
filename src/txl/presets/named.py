"""All configurations that have a name, with what is known of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from txl.config import RunConfig
from txl.presets import baselines, published, small
from txl.presets.ablation import TABLE_6, TABLE_7, TABLE_10, UNPUBLISHED, Row, apply


@dataclass(frozen=True)
class Preset:
    """A named configuration and where it comes from."""

    name: str
    description: str
    source: str
    published: str
    """The published result on the corpus's test split, or "none"."""
    vocab_size: int
    """Size of the vocabulary that the published parameter count is for."""
    make: Callable[[], RunConfig]


_SCRIPTS = "the authors' PyTorch scripts"
_OURS = "this project"
_CPU_HOUR = "about an hour on two CPU cores"
_AWD = "awd-lstm-lm"
_LM1B_WORDS = 793_472
_WT103_WORDS = 267_735


def _rows(rows: Iterable[Row], base: Callable[[], RunConfig], corpus: str, source: str, words: int) -> list[Preset]:
    """A preset for every row of an ablation."""
    return [
        Preset(
            base().name + row.suffix,
            f"{corpus}, {row.description}",
            source,
            row.published,
            words,
            lambda row=row: apply(row, base()),
        )
        for row in rows
    ]


def named_presets() -> dict[str, list[Preset]]:
    """All presets by what they are for, the paper's first."""
    return {
        "the paper's models": [*_characters(), *_words()],
        "models that the paper compares with": _baselines(),
        "this project's, for a CPU (wikitext-2: the recipe of ptb)": [*_own(), *_small_baselines()],
        "rows of the ablations, Tables 6, 7 and 10": _ablations(),
    }


def _characters() -> list[Preset]:
    """enwik8 and text8: Tables 2 and 3."""
    return [
        Preset(
            "enwik8-12L",
            "enwik8, 12 layers",
            f"Table 2; {_SCRIPTS}",
            "1.06 bpc",
            204,
            lambda: published.characters_12l("enwik8"),
        ),
        Preset(
            "enwik8-18L",
            "enwik8, 18 layers",
            "Table 2; shape ours, to 88M",
            "1.03 bpc",
            204,
            published.enwik8_18l,
        ),
        Preset(
            "enwik8-24L",
            "enwik8, 24 layers",
            f"Table 2; {_SCRIPTS}",
            "0.99 bpc",
            204,
            lambda: published.characters_24l("enwik8"),
        ),
        Preset(
            "text8-12L",
            "text8, 12 layers",
            f"{_SCRIPTS}",
            "none",
            27,
            lambda: published.characters_12l("text8"),
        ),
        Preset(
            "text8-24L",
            "text8, 24 layers",
            f"Table 3; {_SCRIPTS}",
            "1.08 bpc",
            27,
            lambda: published.characters_24l("text8"),
        ),
    ]


def _words() -> list[Preset]:
    """The paper's models of words: Tables 1, 4 and 5."""
    return [
        Preset(
            "wt103-base",
            "WikiText-103, base",
            f"Table 1; {_SCRIPTS}",
            "24.0 ppl",
            _WT103_WORDS,
            published.wt103_base,
        ),
        Preset(
            "wt103-large",
            "WikiText-103, large",
            f"Table 1; {_SCRIPTS}",
            "18.3 ppl",
            _WT103_WORDS,
            published.wt103_large,
        ),
        Preset(
            "lm1b-base",
            "One Billion Word, base",
            f"Table 4; {_SCRIPTS}",
            "23.5 ppl (0.46B)",
            _LM1B_WORDS,
            published.lm1b_base,
        ),
        Preset(
            "lm1b-large",
            "One Billion Word, large",
            f"Table 4; {_SCRIPTS}",
            "21.8 ppl",
            _LM1B_WORDS,
            published.lm1b_large,
        ),
        Preset(
            "ptb",
            "Penn Treebank",
            "Table 5; the authors' later recipe, d_inner ours",
            "54.52 ppl",
            10_000,
            published.ptb,
        ),
    ]


def _baselines() -> list[Preset]:
    """What the paper's models are compared with: Tables 1 to 3, 5 and 8."""
    return [
        Preset(
            "enwik8-vanilla-12L",
            "enwik8, vanilla Transformer, 12 layers",
            "Table 2 (Al-Rfou et al.), with their auxiliary losses",
            "1.11 bpc (44M)",
            256,
            lambda: published.vanilla("enwik8", 12),
        ),
        Preset(
            "enwik8-vanilla-64L",
            "enwik8, vanilla Transformer, 64 layers",
            "Table 2 (Al-Rfou et al.), with their auxiliary losses",
            "1.06 bpc (235M)",
            256,
            lambda: published.vanilla("enwik8", 64),
        ),
        Preset(
            "text8-vanilla-12L",
            "text8, vanilla Transformer, 12 layers",
            "Table 3 (Al-Rfou et al.), with their auxiliary losses",
            "1.18 bpc (44M)",
            256,
            lambda: published.vanilla("text8", 12),
        ),
        Preset(
            "text8-vanilla-64L",
            "text8, vanilla Transformer, 64 layers",
            "Table 3 (Al-Rfou et al.), with their auxiliary losses",
            "1.13 bpc (235M)",
            256,
            lambda: published.vanilla("text8", 64),
        ),
        Preset(
            "wt103-adaptive",
            "WikiText-103, adaptive input",
            "Table 1 (Baevski and Auli); fairseq",
            "20.5 ppl (247M)",
            _WT103_WORDS,
            baselines.wt103_adaptive,
        ),
        Preset(
            "wt103-qrnn",
            "WikiText-103, QRNN",
            f"Tables 1 and 8 (Merity et al. 2018); {_AWD}",
            "33.0 ppl (151M)",
            _WT103_WORDS,
            baselines.wt103_qrnn,
        ),
        Preset(
            "wt103-lstm",
            "WikiText-103, LSTM",
            "Table 8; shape ours, to 151M",
            "none",
            _WT103_WORDS,
            baselines.wt103_lstm,
        ),
        Preset(
            "ptb-awd-lstm",
            "Penn Treebank, AWD-LSTM",
            f"Table 5 (Merity et al. 2017); {_AWD}",
            "58.8 ppl (24M)",
            10_000,
            baselines.ptb_awd_lstm,
        ),
        Preset(
            "ptb-awd-lstm-mos",
            "Penn Treebank, AWD-LSTM-MoS",
            "Table 5 (Yang et al. 2017); mos",
            "55.97 ppl (22M)",
            10_000,
            baselines.ptb_awd_lstm_mos,
        ),
        Preset(
            "ptb-qrnn",
            "Penn Treebank, QRNN",
            f"{_AWD}, whose result it is",
            "58.3 ppl",
            10_000,
            baselines.ptb_qrnn,
        ),
        Preset(
            "wikitext-2-awd-lstm",
            "WikiText-2, AWD-LSTM",
            f"{_AWD}, whose result it is",
            "65.6 ppl (33M)",
            33_278,
            baselines.wikitext_2_awd_lstm,
        ),
    ]


def _own() -> list[Preset]:
    """This project's: the recipe for Penn Treebank on WikiText-2, and what trains on a CPU."""
    return [
        Preset("wikitext-2", "WikiText-2, as ptb", _OURS, "none", 33_278, published.wikitext_2),
        Preset("stdlib-bpe", "the demo: minutes on two CPU cores", _OURS, "none", 2048, small.stdlib_bpe),
        Preset("stdlib-tiny", "minutes on two CPU cores, in bytes", _OURS, "none", 256, small.stdlib_tiny),
        Preset(
            "stdlib-small",
            _CPU_HOUR,
            _OURS,
            "none",
            256,
            lambda: small.characters("stdlib-small", "stdlib", "byte"),
        ),
        Preset(
            "enwik8-small",
            _CPU_HOUR,
            _OURS,
            "none",
            256,
            lambda: small.characters("enwik8-small", "enwik8", "byte"),
        ),
        Preset(
            "enwik8-vanilla-small",
            _CPU_HOUR,
            _OURS,
            "none",
            256,
            lambda: small.vanilla_characters("enwik8-vanilla-small", "enwik8", "byte"),
        ),
        Preset(
            "text8-small",
            _CPU_HOUR,
            _OURS,
            "none",
            27,
            lambda: small.characters("text8-small", "text8", "char"),
        ),
        Preset("ptb-small", _CPU_HOUR, _OURS, "none", 10_000, lambda: small.words("ptb-small", "ptb", (1000, 4000))),
        Preset(
            "wikitext-2-small",
            _CPU_HOUR,
            _OURS,
            "none",
            33_278,
            lambda: small.words("wikitext-2-small", "wikitext-2", (2000, 10_000)),
        ),
        Preset("wt103-small", _CPU_HOUR, _OURS, "none", _WT103_WORDS, small.wt103),
    ]


def _small_baselines() -> list[Preset]:
    """What ptb-small and wikitext-2-small are compared with, in the same budget."""
    kinds: list[tuple[str, Literal["lstm", "qrnn"], bool]] = [
        ("lstm", "lstm", False),
        ("awd-lstm", "lstm", True),
        ("qrnn", "qrnn", False),
    ]
    shapes = [("ptb", 10_000, (1000, 4000)), ("wikitext-2", 33_278, (2000, 10_000))]
    return [
        Preset(
            f"{corpus}-{model}-small",
            _CPU_HOUR,
            _OURS,
            "none",
            vocab_size,
            functools.partial(baselines.small_recurrent, f"{corpus}-{model}-small", corpus, cutoffs, kind, awd=awd),
        )
        for corpus, vocab_size, cutoffs in shapes
        for model, kind, awd in kinds
    ] + [
        Preset("ptb-awd-lstm-mos-small", _CPU_HOUR, _OURS, "none", 10_000, baselines.small_mos),
        Preset("wikitext-2-adaptive-small", _CPU_HOUR, _OURS, "none", 33_278, baselines.small_adaptive),
    ]


def _ablations() -> list[Preset]:
    """The rows of the paper's ablations, and the same rows on small bases."""
    return [
        Preset(
            "wt103-ablation",
            "WikiText-103, ablation",
            "Table 6; shape ours, to 128M",
            "26.77 ppl",
            _WT103_WORDS,
            published.wt103_ablation,
        ),
        *_rows(TABLE_6[1:], published.wt103_ablation, "WikiText-103", "Table 6; shape ours, to 128M", _WT103_WORDS),
        Preset(
            "wt103-ablation-151M",
            "WikiText-103, ablation, the standard size",
            f"Table 6; {_SCRIPTS}",
            "23.09 ppl",
            _WT103_WORDS,
            published.wt103_ablation_151m,
        ),
        *_rows(TABLE_10, published.wt103_ablation, "WikiText-103", "Table 10; shape ours, to 128M", _WT103_WORDS),
        Preset(
            "lm1b-ablation",
            "One Billion Word, ablation",
            "Table 7; shape ours, to 0.3B",
            "25.2 ppl",
            _LM1B_WORDS,
            published.lm1b_ablation,
        ),
        *_rows(TABLE_7[1:], published.lm1b_ablation, "One Billion Word", "Table 7; shape ours, to 0.3B", _LM1B_WORDS),
        *_rows(UNPUBLISHED, small.wikitext_2_ablation, "WikiText-2, as Table 6", _OURS, 33_278),
        *_rows(UNPUBLISHED, small.stdlib_ablation, "standard library, as Table 6", _OURS, 256),
    ]
