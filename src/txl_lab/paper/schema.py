"""Classes that define a table or figure: `Definition` with its rows, its measurement, the paper's numbers and claims.

A definition is data (`tables.toml`); `txl_lab.paper.experiment` runs it at a scale of `txl_lab.paper.scales`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from txl_lab.paper.claims import Claim

if TYPE_CHECKING:
    from txl_lab.paper.measurements import Measurement

FITTED = "model.d_hidden"
"""Width that a row with `fit` chooses."""
COSTS = {"time": "training time", "reading": "reading time", "memory": "training memory"}
"""Headings of the measures of a row's cost relative to another row."""


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
    overrides: Mapping[str, str] | None = None
    """Fields to change in the scale's model, by dotted name, with values as on the command line; words in braces stand
    for lengths (`options`). None: a published result that this project does not train."""
    shape: Shape = field(default=Shape())
    preset: str | None = None
    """Preset with the published configuration, for the scale "paper"; None: there is no such preset."""
    cache_over: str | None = None
    """Key of the row whose trained model this row uses, with a continuous cache tuned around the model."""
    fit: str | None = None
    """Key of the row whose number of parameters this row's width `FITTED` is chosen to match."""
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
        """Return the overrides as options, with numbers in place of the words in braces.

        Args:
            segment: number of tokens in a training segment.
            mem_len: memory length of the scale's model, used unless the overrides set another.
            longest: longest context that is evaluated.
        """
        values = self.overrides or {}
        reach = int(values.get("model.mem_len", mem_len)) + segment - 1
        lengths = {"segment": segment, "reach": reach, "longest": longest, "two_segments": 2 * segment}
        return {name: value.format_map(lengths) for name, value in values.items()}


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
    unit: str
    """Unit of the paper's tokens: "word" or "character"."""
    measurement: Measurement
    columns: tuple[str, ...] = ()
    """Columns of the paper's numbers."""
    rows: tuple[Row, ...] = ()
    claims: tuple[Claim, ...] = ()
    experiment: str = ""
    """Name of the experiment, whose definitions share runs and results; empty: `name`."""
    cost_beside: str = ""
    """Key of the row to which every row's time and memory are compared; empty: not measured."""
    separate_sentences: bool = False
    """True if the table needs a corpus of sentences in random order, like One Billion Word, and segments as short as
    the paper's (`Scale.base`)."""
    pictures: str = ""
    """Pattern for the names of files made with the model that the page shows as figures."""
    notes: tuple[str, ...] = ()
    is_open_question: bool = False
    """True for a question that the paper left open, so that the paper has no such table."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the numbers that a result of a row has."""
        return self.measurement.measures + (tuple(COSTS) if self.cost_beside else ())

    @property
    def experiment_name(self) -> str:
        """Name of the experiment, to which runs and results belong."""
        return self.experiment or self.name

    def row(self, key: str) -> Row:
        """Return the row with a key."""
        return next(row for row in self.rows if row.key == key)
