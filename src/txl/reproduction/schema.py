"""Form of a table or figure: `Definition` with its rows, the paper's numbers and the claims that rest on them.

A definition is data; `txl.reproduction.experiment` runs it at a scale of `txl.reproduction.scales`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from txl.reproduction.claims import Claim

Kind = Literal["quality", "attention", "context", "speed", "product"]
"""Measurement of each model.

quality: loss on the test split. attention: the same at many attention lengths, of which the validation split chooses
one. context: loss at exact context lengths (Appendix C). speed: Table 9. product: nothing; files are
made of one trained model.
"""


Product = Literal["attention", "samples"]
"""Files made of one trained model: the figures of attention (5 to 7), or generated text (Tables 11 to 13)."""


class Length(Enum):
    """A length that depends on the scale, as the value of an override."""

    SEGMENT = "segment"
    """Tokens of a training segment."""
    REACH = "reach"
    """The largest distance that training sees: memory and segment, less one."""
    LONGEST = "longest"
    """The longest context that is evaluated."""
    TWO_SEGMENTS = "two segments"
    """Tokens of two training segments."""


Overrides = Mapping[str, "str | Length"]
"""Fields of a configuration by their dotted names, with values as on the command line."""


@dataclass(frozen=True)
class Shape:
    """A row's model beside the scale's: factors of its layers, of the width of everything in them, of its memory."""

    depth: float = 1.0
    width: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True)
class Row:
    """A model of a table, or a length of Table 9."""

    key: str
    """Unique in the table; names files."""
    name: str
    """The name in the paper's table."""
    paper: dict[str, str]
    """The paper's figures by column, as printed."""
    overrides: Overrides | None = None
    """Fields that make the scale's model this one. None: a published result that this project does not train."""
    shape: Shape = field(default=Shape())
    preset: str | None = None
    """The published configuration, for the scale "paper"; None: there is none."""
    as_published: bool = False
    """True if that configuration is this very model; else the overrides make it so."""
    cache_over: str | None = None
    """The row whose trained model this one is, with a continuous cache tuned around it."""
    fit: tuple[str, str] | None = None
    """A field, and the row whose number of parameters it is chosen to come nearest to."""
    adaptive: bool = False
    """True if the model has an adaptive softmax with narrower clusters, whatever the scale's has."""
    group: str = ""
    """Rows that are compared as one model group (Table 8), or drawn as one line."""
    lanes_over: int = 1
    """Number that the scale's lanes are divided by: a step of as many segments, or of a longer one, has as many
    tokens."""
    equal_memory_with: str | None = None
    """The row whose training memory this one may take: its segment is as long as fits (Table 10)."""
    length: int | None = None
    """Attention length of a row of Table 9."""

    @property
    def trained(self) -> bool:
        """True if this project trains the model of this row."""
        return self.overrides is not None

    def options(self, segment: int, mem_len: int, longest: int) -> dict[str, str]:
        """Return the overrides as options, with their lengths in numbers.

        Args:
            segment: tokens of a training segment.
            mem_len: of the scale's model; a row's own counts before it.
            longest: the longest context that is evaluated.
        """
        values = self.overrides or {}
        own = values.get("model.mem_len", mem_len)
        assert not isinstance(own, Length)
        lengths = {
            Length.SEGMENT: segment,
            Length.REACH: int(own) + segment - 1,
            Length.LONGEST: longest,
            Length.TWO_SEGMENTS: 2 * segment,
        }
        return {name: str(lengths[value]) if isinstance(value, Length) else value for name, value in values.items()}


@dataclass(frozen=True)
class Definition:
    """A table or figure."""

    name: str
    """The name on the command line: table6."""
    title: str
    caption: str
    corpus: str
    """The paper's."""
    metric: str
    """The paper's, with its unit: test perplexity, bits per character ..."""
    unit: Literal["word", "character"]
    kind: Kind
    columns: tuple[str, ...]
    """Columns of the paper's figures."""
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    experiment: str = ""
    """Definitions of the same experiment share their runs and results; empty: the name."""
    cost_beside: str = ""
    """The row beside which each row's time and memory are measured; empty: they are not. Kind "quality" alone."""
    separate_sentences: bool = False
    """True if the corpus is to be one of sentences in random order, as One Billion Word is."""
    product: Product | None = None
    """Kind "product": what is made; definitions of one product share its files."""
    pictures: str = ""
    """Pattern of the names of those files that the page shows as figures."""
    notes: tuple[str, ...] = ()
    is_open_question: bool = False
    """True if the paper has no such table: it asks what the paper left open."""

    @property
    def experiment_name(self) -> str:
        """The name under which runs and results are kept."""
        return self.experiment or self.name

    def row(self, key: str) -> Row:
        """Return the row of a key."""
        return next(row for row in self.rows if row.key == key)
