"""Everything that can be reproduced, by name."""

from __future__ import annotations

from txl.errors import UserError, did_you_mean
from txl.reproduction import appendix, published_sentences
from txl.reproduction import tables_1_to_5 as published
from txl.reproduction import tables_6_to_10 as ablations
from txl.reproduction.definition import Definition

_NAMES = (
    *(f"table{number}" for number in range(1, 11)),
    *(f"figure{number}" for number in range(3, 8)),
    "samples",
)


def definitions() -> dict[str, Definition]:
    """All tables and figures by name, in the paper's order."""
    every = {
        each.name: each
        for each in (*published.TABLES, *published_sentences.TABLES, *ablations.TABLES, *appendix.TABLES)
    }
    return {name: every[name] for name in _NAMES}


def find_definition(name: str) -> Definition:
    """The table or figure of a name.

    Raises:
        UserError: with the nearest names, if there is none.
    """
    every = definitions()
    if name not in every:
        hint = did_you_mean(name, every) or f"expected one of {', '.join(every)}"
        raise UserError(f"unknown table or figure {name!r}; {hint}")
    return every[name]
