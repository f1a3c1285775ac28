"""Figures 5 to 7 and the samples of Appendix E: files made of one trained Transformer-XL."""

from __future__ import annotations

from txl.reproduction.definition import Definition, Product, Row

_MODEL = (Row("xl", "Transformer-XL", {}, {}, preset="wt103-base"),)


def _figure(name: str, title: str, caption: str, product: Product, pictures: str = "") -> Definition:
    return Definition(
        name=name,
        title=title,
        caption=caption,
        corpus="wikitext-103",
        metric="to be looked at",
        unit="word",
        kind="product",
        columns=(),
        rows=_MODEL,
        experiment="one-model",
        product=product,
        pictures=pictures,
        notes=("The paper prints this without numbers, and no claim of C1 to C7 rests on it.",),
    )


FIGURE5 = _figure(
    "figure5",
    "Figure 5: average attention of every head",
    "Average attention over the previous tokens, where each row corresponds to an attention head and each column "
    "corresponds to a relative location.",
    "attention",
    pictures="figure5.svg",
)
FIGURE6 = _figure(
    "figure6",
    "Figure 6: three heads with a wide attention range",
    "Each row corresponds to a target token and each column to a context token. Tokens in the memory that have top 20% "
    "attention values are marked.",
    "attention",
    pictures="figure6-*.svg",
)
FIGURE7 = _figure(
    "figure7",
    "Figure 7: the terms of attention apart",
    "Visualization of the terms (a), (b) and (d) of the attention score, each softmaxed.",
    "attention",
    pictures="figure7.svg",
)
SAMPLES = _figure(
    "samples",
    "Tables 11 to 13: generated text",
    "Text continued from contexts of the test split, beside what follows there.",
    "samples",
)
TABLES = (FIGURE5, FIGURE6, FIGURE7, SAMPLES)
