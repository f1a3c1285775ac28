"""Catalogue of all tables, figures and open questions, and the definitions of Figures 5 to 7 and the samples."""

from __future__ import annotations

from txl.errors import UserError, did_you_mean
from txl_lab.paper import open_questions, tables_1_to_5, tables_6_to_10
from txl_lab.paper.schema import Definition, Product, Row

_NAMES = (
    *(f"table{number}" for number in range(1, 11)),
    *(f"figure{number}" for number in range(3, 8)),
    "samples",
    *(each.name for each in open_questions.QUESTIONS),
)


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
_APPENDIX = (FIGURE5, FIGURE6, FIGURE7, SAMPLES)
"""Figures 5 to 7 and the samples of Appendix E: files made with one trained Transformer-XL."""


def definitions() -> dict[str, Definition]:
    """Return all definitions by name: tables, figures, samples and open questions, in this order."""
    tables = (*tables_1_to_5.TABLES, *tables_6_to_10.TABLES, *_APPENDIX, *open_questions.QUESTIONS)
    every = {each.name: each for each in tables}
    return {name: every[name] for name in _NAMES}


def find_definition(name: str) -> Definition:
    """Return the definition with the name `name`; for an unknown name, suggest the nearest one."""
    every = definitions()
    if name not in every:
        hint = did_you_mean(name, every) or f"expected one of {', '.join(every)}"
        raise UserError(f"unknown table or figure {name!r}; {hint}")
    return every[name]
