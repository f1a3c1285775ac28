"""All presets, each with its description, source and published result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from txl.config import RunConfig
from txl.presets import baselines, published, small
from txl.presets.ablation import TABLE_6, TABLE_7, TABLE_10, UNPUBLISHED, Ablation, apply


@dataclass(frozen=True)
class Preset:
    """A named configuration with its source and published result."""

    name: str
    description: str
    source: str
    published: str
    """Published result on the test split of the corpus, or "none"."""
    vocab_size: int
    """Vocabulary size to which the published number of parameters refers."""
    make: Callable[[], RunConfig]


def named_presets() -> dict[str, list[Preset]]:
    """Return all presets, grouped by purpose, with the paper's models first."""
    return {
        "the paper's models": _paper(),
        "models that the paper compares with": [*_vanilla(), *_baselines()],
        "this project's, for a CPU (wikitext-2: the recipe of ptb)": [*_own(), *_small_baselines()],
        "rows of the ablations, Tables 6, 7 and 10": _ablations(),
    }


# Tokens in the vocabulary.
_TEXT8, _ENWIK8, _BYTES, _BPE, _PTB, _WT2, _WT103, _LM1B = 27, 204, 256, 2048, 10_000, 33_278, 267_735, 793_472
# Sources.
_SCRIPTS = "the authors' PyTorch scripts"
_AL_RFOU = "(Al-Rfou et al.), with their auxiliary losses"
_BAEVSKI = "Table 1 (Baevski and Auli); fairseq"
_MERITY_2017 = "Table 5 (Merity et al. 2017); awd-lstm-lm"
_MERITY_2018 = "Tables 1 and 8 (Merity et al. 2018); awd-lstm-lm"
_YANG_2017 = "Table 5 (Yang et al. 2017); mos"
_AWD_CODE = "awd-lstm-lm, whose result it is"
_OURS = "this project"
_PTB_RECIPE = "Table 5; the authors' later recipe, d_inner ours"
_CPU_HOUR = "about an hour on two CPU cores"

# fmt: off


def _paper() -> list[Preset]:
    p = published
    return [
        Preset("enwik8-12L", "enwik8, 12 layers", f"Table 2; {_SCRIPTS}", "1.06 bpc", _ENWIK8, p.enwik8_12l),
        Preset("enwik8-18L", "enwik8, 18 layers", "Table 2; shape ours, to 88M", "1.03 bpc", _ENWIK8, p.enwik8_18l),
        Preset("enwik8-24L", "enwik8, 24 layers", f"Table 2; {_SCRIPTS}", "0.99 bpc", _ENWIK8, p.enwik8_24l),
        Preset("text8-12L", "text8, 12 layers", _SCRIPTS, "none", _TEXT8, p.text8_12l),
        Preset("text8-24L", "text8, 24 layers", f"Table 3; {_SCRIPTS}", "1.08 bpc", _TEXT8, p.text8_24l),
        Preset("wt103-base", "WikiText-103, base", f"Table 1; {_SCRIPTS}", "24.0 ppl", _WT103, p.wt103_base),
        Preset("wt103-large", "WikiText-103, large", f"Table 1; {_SCRIPTS}", "18.3 ppl", _WT103, p.wt103_large),
        Preset("lm1b-base", "One Billion Word, base", f"Table 4; {_SCRIPTS}", "23.5 ppl (0.46B)", _LM1B, p.lm1b_base),
        Preset("lm1b-large", "One Billion Word, large", f"Table 4; {_SCRIPTS}", "21.8 ppl", _LM1B, p.lm1b_large),
        Preset("ptb", "Penn Treebank", _PTB_RECIPE, "54.52 ppl", _PTB, p.ptb),
    ]


def _vanilla() -> list[Preset]:
    rows = [
        # corpus, table, layers, published
        ("enwik8", 2, 12, "1.11 bpc (44M)"),
        ("enwik8", 2, 64, "1.06 bpc (235M)"),
        ("text8", 3, 12, "1.18 bpc (44M)"),
        ("text8", 3, 64, "1.13 bpc (235M)"),
    ]
    return [
        Preset(
            f"{corpus}-vanilla-{layers}L", f"{corpus}, vanilla Transformer, {layers} layers",
            f"Table {table} {_AL_RFOU}", result, _BYTES, partial(published.vanilla, corpus, layers),
        )
        for corpus, table, layers, result in rows
    ]


def _baselines() -> list[Preset]:
    b = baselines
    mos = b.ptb_awd_lstm_mos
    return [
        Preset("wt103-adaptive", "WikiText-103, adaptive input", _BAEVSKI, "20.5 ppl (247M)", _WT103, b.wt103_adaptive),
        Preset("wt103-qrnn", "WikiText-103, QRNN", _MERITY_2018, "33.0 ppl (151M)", _WT103, b.wt103_qrnn),
        Preset("wt103-lstm", "WikiText-103, LSTM", "Table 8; shape ours, to 151M", "none", _WT103, b.wt103_lstm),
        Preset("ptb-awd-lstm", "Penn Treebank, AWD-LSTM", _MERITY_2017, "58.8 ppl (24M)", _PTB, b.ptb_awd_lstm),
        Preset("ptb-awd-lstm-mos", "Penn Treebank, AWD-LSTM-MoS", _YANG_2017, "55.97 ppl (22M)", _PTB, mos),
        Preset("ptb-qrnn", "Penn Treebank, QRNN", _AWD_CODE, "58.3 ppl", _PTB, b.ptb_qrnn),
        Preset("wikitext-2-awd-lstm", "WikiText-2, AWD-LSTM", _AWD_CODE, "65.6 ppl (33M)", _WT2, b.wikitext_2_awd_lstm),
    ]


def _own() -> list[Preset]:
    rows = [
        ("wikitext-2", "WikiText-2, as ptb", _WT2, published.wikitext_2),
        ("stdlib-bpe", "the demo: minutes on two CPU cores", _BPE, small.stdlib_bpe),
        ("stdlib-tiny", "minutes on two CPU cores, in bytes", _BYTES, small.stdlib_tiny),
        ("stdlib-small", _CPU_HOUR, _BYTES, small.stdlib_small),
        ("enwik8-small", _CPU_HOUR, _BYTES, small.enwik8_small),
        ("enwik8-vanilla-small", _CPU_HOUR, _BYTES, small.enwik8_vanilla_small),
        ("text8-small", _CPU_HOUR, _TEXT8, small.text8_small),
        ("ptb-small", _CPU_HOUR, _PTB, small.ptb_small),
        ("wikitext-2-small", _CPU_HOUR, _WT2, small.wikitext_2_small),
        ("wt103-small", _CPU_HOUR, _WT103, small.wt103_small),
    ]
    return [Preset(name, description, _OURS, "none", words, make) for name, description, words, make in rows]


def _small_baselines() -> list[Preset]:
    """Return the baselines for ptb-small and wikitext-2-small, with the same training budget."""
    b = baselines
    rows = [
        ("ptb-lstm-small", _PTB, partial(b.small_recurrent, "ptb", "lstm")),
        ("ptb-awd-lstm-small", _PTB, partial(b.small_recurrent, "ptb", "awd-lstm")),
        ("ptb-qrnn-small", _PTB, partial(b.small_recurrent, "ptb", "qrnn")),
        ("wikitext-2-lstm-small", _WT2, partial(b.small_recurrent, "wikitext-2", "lstm")),
        ("wikitext-2-awd-lstm-small", _WT2, partial(b.small_recurrent, "wikitext-2", "awd-lstm")),
        ("wikitext-2-qrnn-small", _WT2, partial(b.small_recurrent, "wikitext-2", "qrnn")),
        ("ptb-awd-lstm-mos-small", _PTB, b.small_mos),
        ("wikitext-2-adaptive-small", _WT2, b.small_adaptive),
    ]
    return [Preset(name, _CPU_HOUR, _OURS, "none", words, make) for name, words, make in rows]


def _ablations() -> list[Preset]:
    """Return the rows of the paper's ablations, and the rows of Table 6 with two small base configurations."""
    wt103, lm1b = published.wt103_ablation, published.lm1b_ablation
    table_6, table_7, table_10 = TABLE_6.values(), TABLE_7.values(), TABLE_10.values()
    standard, wt103_151m = "WikiText-103, ablation, the standard size", published.wt103_ablation_151m
    return [
        Preset("wt103-ablation", "WikiText-103, ablation", "Table 6; shape ours, to 128M", "26.77 ppl", _WT103, wt103),
        *_rows(list(table_6)[1:], wt103, "WikiText-103", "Table 6; shape ours, to 128M", _WT103),
        Preset("wt103-ablation-151M", standard, f"Table 6; {_SCRIPTS}", "23.09 ppl", _WT103, wt103_151m),
        *_rows(table_10, wt103, "WikiText-103", "Table 10; shape ours, to 128M", _WT103),
        Preset("lm1b-ablation", "One Billion Word, ablation", "Table 7; shape ours, to 0.3B", "25.2 ppl", _LM1B, lm1b),
        *_rows(list(table_7)[1:], lm1b, "One Billion Word", "Table 7; shape ours, to 0.3B", _LM1B),
        *_rows(UNPUBLISHED, small.wikitext_2_ablation, "WikiText-2, as Table 6", _OURS, _WT2),
        *_rows(UNPUBLISHED, small.stdlib_ablation, "standard library, as Table 6", _OURS, _BYTES),
    ]


# fmt: on


def _rows(
    rows: Iterable[Ablation], base: Callable[[], RunConfig], corpus: str, source: str, vocab_size: int
) -> list[Preset]:
    """Return a preset for every row of an ablation."""
    return [
        Preset(
            base().name + row.suffix,
            f"{corpus}, {row.description}",
            source,
            row.published,
            vocab_size,
            lambda row=row: apply(row, base()),
        )
        for row in rows
    ]
