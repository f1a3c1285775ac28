"""Tables 4 and 5: every row that the paper prints, as `txl.reproduction.tables_1_to_5` has Tables 1 to 3."""

from __future__ import annotations

from txl.presets.baselines import SMALL_AWD
from txl.reproduction.claims import Claim, all_of, lower
from txl.reproduction.definition import Definition, Row
from txl.reproduction.tables_1_to_5 import ADAPTIVE, ADAPTIVE_INPUT, LARGER, LSTM, best, published_row, width_of

_AWD_LSTM = LSTM | {f"model.{name}": str(rate) for name, rate in SMALL_AWD.items()} | {"model.locked_dropout": "true"}

TABLE4 = Definition(
    name="table4",
    title="Table 4: One Billion Word",
    caption="Comparison with state-of-the-art results on One Billion Word. ◊ indicates contemporary work.",
    corpus="lm1b",
    metric="perplexity, test split",
    unit="word",
    kind="quality",
    columns=("#Param", "PPL"),
    separate_sentences=True,
    rows=(
        published_row("Shazeer et al. (2014) - Sparse Non-Negative", "33B", "52.9", "PPL"),
        published_row("Chelba et al. (2013) - RNN-1024 + 9 Gram", "20B", "51.3", "PPL"),
        published_row("Kuchaiev and Ginsburg (2017) - G-LSTM-2", "-", "36.0", "PPL"),
        published_row("Dauphin et al. (2016) - GCNN-14 bottleneck", "-", "31.9", "PPL"),
        Row(
            "lstm",
            "Jozefowicz et al. (2016) - LSTM",
            {"#Param": "1.8B", "PPL": "30.6"},
            LSTM | {"model.tie_projections": "tails"},
            fit=width_of("xl-base"),
            adaptive=True,  # with one width of embeddings they alone would have more parameters than that row
        ),
        published_row("Jozefowicz et al. (2016) - LSTM + CNN Input", "1.04B", "30.0", "PPL"),
        published_row("Shazeer et al. (2017) - Low-Budget MoE", "~5B", "34.1", "PPL"),
        published_row("Shazeer et al. (2017) - High-Budget MoE", "~5B", "28.0", "PPL"),
        published_row("Shazeer et al. (2018) - Mesh Tensorflow", "4.9B", "24.0", "PPL"),
        Row(
            "adaptive-input",
            "Baevski and Auli (2018) - Adaptive Input ◊",
            {"#Param": "0.46B", "PPL": "24.1"},
            ADAPTIVE_INPUT,
            adaptive=True,
        ),
        Row(
            "adaptive-input-large",
            "Baevski and Auli (2018) - Adaptive Input ◊",
            {"#Param": "1.0B", "PPL": "23.7"},
            ADAPTIVE_INPUT,
            shape=LARGER,
            adaptive=True,
        ),
        Row(
            "xl-base",
            "Ours - Transformer-XL Base",
            {"#Param": "0.46B", "PPL": "23.5"},
            ADAPTIVE,
            adaptive=True,
            preset="lm1b-base",
            as_published=True,
        ),
        Row(
            "xl-large",
            "Ours - Transformer-XL Large",
            {"#Param": "0.8B", "PPL": "21.8"},
            ADAPTIVE,
            shape=LARGER,
            adaptive=True,
            preset="lm1b-large",
            as_published=True,
        ),
    ),
    claims=(
        Claim(
            "Table 4",
            "without long-term dependency too, each Transformer-XL is better than the adaptive-input Transformer of "
            "its size",
            "23.5 against 24.1, 21.8 against 23.7 perplexity",
            all_of(lower("xl-base", "adaptive-input"), lower("xl-large", "adaptive-input-large")),
        ),
    ),
)

TABLE5 = Definition(
    name="table5",
    title="Table 5: Penn Treebank",
    caption="Comparison with state-of-the-art results on Penn Treebank. † indicates using two-step finetuning.",
    corpus="ptb",
    metric="perplexity, test split",
    unit="word",
    kind="quality",
    columns=("#Param", "PPL"),
    rows=(
        published_row("Inan et al. (2016) - Tied Variational LSTM", "24M", "73.2", "PPL"),
        published_row("Zilly et al. (2016) - Variational RHN", "23M", "65.4", "PPL"),
        published_row("Zoph and Le (2016) - NAS Cell", "25M", "64.0", "PPL"),
        Row(
            "awd-lstm",
            "Merity et al. (2017) - AWD-LSTM",
            {"#Param": "24M", "PPL": "58.8"},
            _AWD_LSTM,
            fit=width_of("xl"),
            preset="ptb-awd-lstm",
            as_published=True,
        ),
        published_row("Pham et al. (2018) - Efficient NAS", "24M", "58.6", "PPL"),
        published_row("Liu et al. (2018) - Differentiable NAS", "23M", "56.1", "PPL"),
        Row(
            "awd-lstm-mos",
            "Yang et al. (2017) - AWD-LSTM-MoS",
            {"#Param": "22M", "PPL": "55.97"},
            _AWD_LSTM | {"model.n_softmax": "3"},
            fit=width_of("xl"),
            preset="ptb-awd-lstm-mos",
            as_published=True,
        ),
        published_row("Melis et al. (2018) - Dropout tuning", "24M", "55.3", "PPL"),
        Row("xl", "Ours - Transformer-XL", {"#Param": "24M", "PPL": "54.52"}, {}, preset="ptb"),
        published_row("Merity et al. (2017) - AWD-LSTM+Finetune †", "24M", "57.3", "PPL"),
        published_row("Yang et al. (2017) - MoS+Finetune †", "22M", "54.44", "PPL"),
    ),
    claims=(best("Table 5", "xl", ("awd-lstm", "awd-lstm-mos"), "54.52 against 58.8 and 55.97 perplexity"),),
)
TABLES = (TABLE4, TABLE5)
