"""Classes that define a table or figure: `Definition` with its rows, the paper's numbers and the claims.

A definition is data; `txl_lab.paper.experiment` runs it at a scale of `txl_lab.paper.scales`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from txl_lab.paper.claims import Claim

Kind = Literal["quality", "attention", "context", "speed", "product"]
"""Measurement of each model.

quality: loss on the test split. attention: loss on the test split at the length of the training segment, and at the
attention length that is best on the validation split. context: loss at exact context lengths (Appendix C). speed:
slowdown of Table 9. product: no measurement; files are made with one trained model.
"""


Product = Literal["attention", "samples"]
"""Files made with one trained model: the figures of attention (5 to 7), or generated text (Tables 11 to 13)."""


class Length(Enum):
    """A length that depends on the scale, as the value of an override."""

    SEGMENT = "segment"
    """Number of tokens in a training segment."""
    REACH = "reach"
    """The largest distance that occurs in training: memory length plus segment length, less one."""
    LONGEST = "longest"
    """The longest context that is evaluated."""
    TWO_SEGMENTS = "two segments"
    """Number of tokens in two training segments."""


Overrides = Mapping[str, "str | Length"]
"""Fields of a configuration by their dotted names, with values as on the command line."""


@dataclass(frozen=True)
class Shape:
    """Size of a row's model relative to the scale's: factors of the number of layers, of all widths, and of memory."""

    depth: float = 1.0
    width: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True)
class Row:
    """A row of a table: a model, or an attention length in Table 9."""

    key: str
    """Name that is unique in the table, used in file names."""
    name: str
    """Name in the paper's table."""
    paper: dict[str, str]
    """The paper's numbers by column, as printed."""
    overrides: Overrides | None = None
    """Fields to change in the scale's model; None: a published result that this project does not train."""
    shape: Shape = field(default=Shape())
    preset: str | None = None
    """Preset with the published configuration, for the scale "paper"; None: there is no such preset."""
    as_published: bool = False
    """True if the preset is the row's model; False if the preset also needs the overrides."""
    cache_over: str | None = None
    """Key of the row whose trained model this row uses, with a continuous cache tuned around the model."""
    fit: tuple[str, str] | None = None
    """Width to choose, and key of the row with the number of parameters to match."""
    adaptive: bool = False
    """True if the model has an adaptive softmax with narrower tail clusters, whatever the scale's model has."""
    group: str = ""
    """Name of the model group in which rows are compared (Table 8), or of the line that joins them in a figure."""
    lanes_over: int = 1
    """Divisor of the scale's number of lanes. A step of more segments, or of a longer segment, then has as many tokens
    as before."""
    equal_memory_with: str | None = None
    """Key of the row whose training memory limits this row's, which takes the longest segment that fits (Table 10)."""
    length: int | None = None
    """Attention length of a row of Table 9."""

    @property
    def trained(self) -> bool:
        """True if this project trains the model of this row."""
        return self.overrides is not None

    def options(self, segment: int, mem_len: int, longest: int) -> dict[str, str]:
        """Return the overrides as options, with a number for every `Length`.

        Args:
            segment: number of tokens in a training segment.
            mem_len: memory length of the scale's model, used unless the overrides set another.
            longest: longest context that is evaluated.
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


MEASURES: dict[Kind, tuple[str, ...]] = {
    "quality": ("quality",),
    "attention": ("quality", "init", "attention", "training length"),
    "speed": ("slower",),
    "context": (),
    "product": (),
}
COSTS = {"time": "training time", "reading": "reading time", "memory": "training memory"}
"""Headings of the measures of a row's cost relative to another row."""


@dataclass(frozen=True)
class Definition:
    """A table or figure."""

    name: str
    """Name on the command line, such as "table6"."""
    title: str
    caption: str
    corpus: str
    """Corpus in the paper."""
    metric: str
    """Metric in the paper and its split, such as "perplexity, test split"."""
    unit: Literal["word", "character"]
    kind: Kind
    columns: tuple[str, ...]
    """Columns of the paper's numbers."""
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    experiment: str = ""
    """Name of the experiment, whose definitions share runs and results; empty: `name`."""
    cost_beside: str = ""
    """Key of the row to which every row's time and memory are compared, for kind "quality"; empty: not measured."""
    separate_sentences: bool = False
    """True if the table needs a corpus of sentences in random order, like One Billion Word, and segments as short as
    the paper's (`Scale.base`)."""
    product: Product | None = None
    """Product to make, for kind "product"; definitions with the same product share its files."""
    pictures: str = ""
    """Pattern for the names of product files that the page shows as figures."""
    notes: tuple[str, ...] = ()
    is_open_question: bool = False
    """True for a question that the paper left open, so that the paper has no such table."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the numbers that a result of a row has."""
        return MEASURES[self.kind] + (tuple(COSTS) if self.cost_beside else ())

    @property
    def experiment_name(self) -> str:
        """Name of the experiment, to which runs and results belong."""
        return self.experiment or self.name

    def stored_as(self, key: str) -> str:
        """Return the name of a row's results: each product has its own, tables of one experiment share theirs."""
        return key if self.product is None else f"{self.product}/{key}"

    def row(self, key: str) -> Row:
        """Return the row with a key."""
        return next(row for row in self.rows if row.key == key)
