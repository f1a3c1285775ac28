"""Tables 6 to 10, Figures 3 and 4: the contributions of recurrence and of the position encoding, and speed.

Transformer-XL without recurrence is trained without memory. A half loss counts only the later half of a segment.
"""

from __future__ import annotations

from dataclasses import replace

from txl.presets.ablation import TABLE_6, TABLE_7, TABLE_10, Ablation
from txl_lab.paper.claims import Claim, above, all_of, higher, lower
from txl_lab.paper.schema import Definition, Length, Overrides, Row, Shape
from txl_lab.paper.tables_1_to_5 import LSTM, QRNN, SINUSOID, VANILLA, width_of
from txl_lab.speed import TABLE_9

_HALF = {"train.loss": "half"}
_WITHOUT = {"model.mem_len": "0"}
_SHAW = {"model.encoding": "shaw", "model.max_distance": Length.REACH}
_ENCODINGS: dict[str, tuple[str, Overrides]] = {
    "relative": ("Ours", {}),
    "shaw": ("Shaw et al. (2018)", _SHAW),
    "sinusoid": ("Vaswani et al. (2017)", SINUSOID),
    "learned": ("Al-Rfou et al. (2018)", VANILLA),
}
"""Name of each encoding in the paper, and the overrides that give a Transformer-XL this encoding."""
_COLUMNS = ("Recurrence", "Encoding", "Loss", "PPL init", "PPL best", "Attn Len")
_STANDARD = Shape(depth=1.0, width=1.1)
"""Size of the standard model, which in the paper is wider than that of the ablations: 410 against about 380."""
_ATTENTION_CAPTION = (
    "“PPL init” refers to using the same length as training. “PPL best” is the perplexity at the optimal length, which "
    "the validation split chooses. “Attn Len” is the shortest attention length during evaluation to achieve it."
)


def _overrides(ablation: Ablation) -> Overrides:
    memory = {} if ablation.recurrence else _WITHOUT
    return {**memory, **_ENCODINGS[ablation.encoding][1], **(_HALF if ablation.loss == "half" else {})}


def _kept(ablation: Ablation) -> tuple[str, str]:
    """Return the cells for recurrence and encoding as the paper prints them."""
    return "✓" if ablation.recurrence else "✗", _ENCODINGS[ablation.encoding][0]


def _ablation(key: str, name: str, ablation: Ablation) -> Row:
    """Return a row of Table 6, with the preset of the ablation for the scale "paper"."""
    figures = (f"{ablation.initial:.2f}", f"{ablation.best:.2f}", str(ablation.attention_length))
    printed = (*_kept(ablation), ablation.loss.capitalize(), *figures)
    return Row(
        key,
        name,
        dict(zip(_COLUMNS, printed, strict=True)),
        _overrides(ablation),
        preset=f"wt103-ablation{ablation.suffix}",
        as_published=True,
    )


_NAMES = {"xl": "Transformer-XL (128M)", "al-rfou-half": "Transformer (128M) †"}
"""Names of the rows of Table 6 that have a name in the paper."""

TABLE6 = Definition(
    name="table6",
    title="Table 6: ablation study on WikiText-103",
    caption=_ATTENTION_CAPTION,
    corpus="wikitext-103",
    metric="perplexity, test split",
    unit="word",
    kind="attention",
    columns=_COLUMNS,
    rows=(
        *(_ablation(key, _NAMES.get(key, "-"), ablation) for key, ablation in TABLE_6.items()),
        Row(
            "xl-standard",
            "Transformer-XL (151M)",
            dict(zip(_COLUMNS, ("✓", "Ours", "Full", "23.43", "23.09", "640"), strict=True)),
            {},
            shape=_STANDARD,
            preset="wt103-base",
            as_published=True,
        ),
        Row(
            "xl-standard-450",
            "Transformer-XL (151M)",
            dict(zip(_COLUMNS, ("✓", "Ours", "Full", "-", "23.16", "450"), strict=True)),
        ),
        Row(
            "xl-standard-300",
            "Transformer-XL (151M)",
            dict(zip(_COLUMNS, ("✓", "Ours", "Full", "-", "23.35", "300"), strict=True)),
        ),
    ),
    claims=(
        Claim(
            "C5",
            "recurrence and our encoding are both needed for the lowest perplexity",
            "26.77 against 27.94 (Shaw et al.) and 29.02 (no recurrence)",
            lower("xl", "xl-shaw", "no-recurrence"),
        ),
        Claim(
            "C5, longer attention",
            "with both, attention at test may be longer than any in training (memory and segment), and is longer than "
            "with either alone",
            "500 (trained with segments of 128), against 256 (Shaw et al.) and 260 (no recurrence)",
            all_of(
                above("xl", lambda results: results["xl"]["training reach"][0], "attention"),
                higher("xl", "xl-shaw", "no-recurrence", measure="attention"),
            ),
        ),
    ),
    notes=(
        "† reduced to the setting of Al-Rfou et al. (2018), except that their auxiliary losses are not implemented in "
        "the paper's experiments.",
        "Models with recurrence read an attention length L as memory and window of L; models without it as a window of "
        "L tokens that slides by one and is recomputed.",
        "The paper's last two rows are the 151M model at shorter attention lengths; here the figure shows all of them.",
    ),
)


def _lm1b(key: str, name: str) -> Row:
    """Return a row of Table 7."""
    ablation = TABLE_7[key]
    return Row(
        key,
        name,
        {"PPL": f"{ablation.best:.1f}"},
        _overrides(ablation),
        preset=f"lm1b-ablation{ablation.suffix}",
        as_published=True,
    )


TABLE7 = Definition(
    name="table7",
    title="Table 7: ablation study on One Billion Word",
    caption="Ablation study on One Billion Word, a dataset without long-term dependency.",
    corpus="lm1b",
    metric="perplexity, test split",
    unit="word",
    kind="quality",
    columns=("PPL",),
    separate_sentences=True,
    rows=(
        _lm1b("xl", "Ours"),
        _lm1b("xl-shaw", "With Shaw et al. (2018) encodings"),
        _lm1b("no-recurrence", "Without recurrence"),
    ),
    claims=(
        Claim(
            "C7",
            "recurrence helps where there is no long-term dependency, by resolving context fragmentation",
            "25.2 against 27.1 perplexity",
            lower("xl", "no-recurrence"),
        ),
        Claim(
            "Table 7",
            "our encoding is better than that of Shaw et al. on short sequences too",
            "25.2 against 25.7 perplexity",
            lower("xl", "xl-shaw"),
        ),
    ),
)

_RECL: tuple[str, ...] = ("r = 0.1", "r = 0.5", "r = 1.0")
_FIRST, _SECOND = "151M", "128M"


def _context(key: str, name: str, paper: str, overrides: Overrides, group: str, preset: str, **more: object) -> Row:
    figures = dict(zip(_RECL, paper.split(), strict=True))
    return Row(
        key,
        name,
        figures,
        overrides,
        group=group,
        preset=preset,
        as_published=True,
        **more,  # pyright: ignore[reportArgumentType]
    )


TABLE8 = Definition(
    name="table8",
    title="Table 8: relative effective context length",
    caption=(
        "Relative effective context length (RECL) comparison. The first three models and the last four are compared as "
        "two model groups. Each group has the same parameter budget."
    ),
    corpus="wikitext-103",
    metric="tokens of context, test split",
    unit="word",
    kind="context",
    columns=_RECL,
    experiment="context",
    rows=(
        _context("xl-151M", "Transformer-XL 151M", "900 800 700", {}, _FIRST, "wt103-base", shape=_STANDARD),
        _context("qrnn", "QRNN", "500 400 300", QRNN, _FIRST, "wt103-qrnn", shape=_STANDARD, fit=width_of("xl-151M")),
        _context("lstm", "LSTM", "400 300 200", LSTM, _FIRST, "wt103-lstm", shape=_STANDARD, fit=width_of("xl-151M")),
        _context("xl-128M", "Transformer-XL 128M", "700 600 500", {}, _SECOND, "wt103-ablation"),
        _context("xl-shaw", "- use Shaw et al. (2018) encoding", "400 400 300", _SHAW, _SECOND, "wt103-ablation-shaw"),
        _context("no-recurrence", "- remove recurrence", "300 300 300", _WITHOUT, _SECOND, "wt103-ablation-no-memory"),
        _context("transformer", "Transformer", "128 128 128", VANILLA | _HALF, _SECOND, "wt103-ablation-learned-half"),
    ),
    claims=(
        Claim(
            "C3",
            "Transformer-XL's relative effective context is longer than recurrent networks' (r = 0.1)",
            "900 against 500 tokens: 80% longer",
            higher("xl-151M", "qrnn", "lstm", measure="r = 0.1"),
        ),
        Claim(
            "C3, Transformer",
            "Transformer-XL's relative effective context is longer than the vanilla Transformer's (r = 0.1)",
            "700 against 128 tokens: 450% longer",
            higher("xl-128M", "transformer", measure="r = 0.1"),
        ),
        Claim(
            "C5",
            "recurrence and our encoding both contribute to a longer effective context (r = 0.1)",
            "700 against 400 (Shaw et al.) and 300 (no recurrence)",
            higher("xl-128M", "xl-shaw", "no-recurrence", measure="r = 0.1"),
        ),
    ),
    notes=(
        "Every loss is read from exactly so many tokens and from nothing else. A model that cannot read more than its "
        "training segment is given its longest context where a longer one is asked for.",
        "A Transformer-XL attends to as many tokens as in training, memory plus segment.",
        "The perplexity beside the lengths is that of the same targets at the longest context.",
    ),
)

FIGURE3 = replace(
    TABLE8,
    name="figure3",
    title="Figure 3: relative perplexity gains",
    caption="Unnormalised relative perplexity gains with r = 0.1.",
    metric="perplexity, test split",
    columns=(),
    notes=("The paper prints this figure without its numbers.", *TABLE8.notes),
)
FIGURE4 = replace(
    FIGURE3,
    name="figure4",
    title="Figure 4: perplexity against context length",
    caption="Perplexity vs context length.",
)

TABLE9 = Definition(
    name="table9",
    title="Table 9: evaluation speed",
    caption="Slowdown in terms of running time during evaluation. Evaluation is based on per-token time on one GPU.",
    corpus="enwik8",
    metric="how many times slower a token of the vanilla Transformer is",
    unit="character",
    kind="speed",
    columns=("slower",),
    rows=tuple(
        Row(f"length-{length}", f"{length:,}", {"slower": f"{times:,}x"}, {}, preset="enwik8-12L", length=length)
        for length, times in sorted(TABLE_9.items(), reverse=True)
    ),
    claims=(
        Claim(
            "C4",
            "evaluation is up to 1,800 times faster, at the longest attention length",
            "1,874 times, at attention length 3,800",
            above("length-3800", 1800.0, "slower"),
        ),
    ),
    notes=(
        "Random weights and random tokens: nothing is trained. Both models have the same shape, dtype and device; what "
        "is repeated is the measurement.",
    ),
)

_MEMORY_COLUMNS = ("Backprop Len", "Recurrence", "Encoding", "Loss", "pplx best", "pplx init", "Attn Len")


def _budget(key: str, ablation: Ablation, longer: bool = False) -> Row:
    """Return a row of Table 10; with `longer`, its segment is to be lengthened to the memory of the first row."""
    figures = (f"{ablation.best:.2f}", f"{ablation.initial:.2f}", str(ablation.attention_length))
    loss = {"full": "Full", "half": "Partial"}[ablation.loss]
    printed = (str(ablation.segment or 128), *_kept(ablation), loss, *figures)
    return Row(
        key,
        "with recurrence" if ablation.recurrence else "without recurrence",
        dict(zip(_MEMORY_COLUMNS, printed, strict=True)),
        _overrides(ablation),
        preset=f"wt103-ablation{replace(ablation, segment=None).suffix}",
        as_published=True,
        equal_memory_with="xl" if longer else None,
    )


TABLE10 = Definition(
    name="table10",
    title="Table 10: ablation study with the same memory",
    caption="Ablation study on WikiText-103 with the same GPU memory constraints.",
    corpus="wikitext-103",
    metric="perplexity, test split",
    unit="word",
    kind="attention",
    columns=_MEMORY_COLUMNS,
    rows=(
        _budget("xl", TABLE_6["xl"]),
        _budget("xl-half", TABLE_6["xl-half"]),
        *(_budget(key, ablation, longer=True) for key, ablation in TABLE_10.items()),
    ),
    claims=(
        Claim(
            "C5",
            "with the memory of recurrence spent on longer segments instead, Transformer-XL is still better",
            "26.77 (segments of 128) against 27.98 (176) perplexity",
            lower("xl", "no-recurrence"),
        ),
    ),
    notes=(
        "Segments without recurrence are as long as fit into the training memory of the first row, as `txl bench "
        "budget` measures it; the number of tokens trained on stays the same.",
    ),
)
TABLES = (TABLE6, TABLE7, TABLE8, FIGURE3, FIGURE4, TABLE9, TABLE10)
