"""Classes of a table or figure: `Definition` with its rows, measurement and claims, and `Outcome` with our results.

A definition is data (`tables.toml`); `txl_lab.paper.experiment` runs it at a scale of `txl_lab.paper.scales`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from txl.files import JsonObject
from txl.reporting.plots import Plot
from txl_lab.paper.claims import Claim, Verdict
from txl_lab.paper.scales import Scale

FITTED = "model.d_hidden"  # width that a row with `fit` chooses
DrawnFigure = tuple[str, Plot, str]  # heading, plot and caption
# Headings of the measures of a row's cost relative to another row
COSTS = {"time": "training time", "reading": "reading time", "memory": "training memory"}


@dataclass(frozen=True)
class Shape:
    """Size of a row's model relative to the scale's: factors of the number of layers, of all widths, and of memory."""

    depth: float = 1.0
    width: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True)
class Row:
    """A row of a table: a model, or an attention length in Table 9."""

    key: str  # name that is unique in the table, used in file names
    name: str  # name in the paper's table
    paper: dict[str, str]  # the paper's numbers by column, as printed
    # Fields to change in the scale's model, by dotted name, with values as on the command line; words in braces stand
    # for lengths (`options`). None: a published result that this project does not train.
    overrides: Mapping[str, str] | None = None
    shape: Shape = field(default=Shape())
    # Preset with the published configuration, for the scale "paper"; None: there is no such preset
    preset: str | None = None
    # Key of the row whose trained model this row uses, with a continuous cache tuned around the model
    cache_over: str | None = None
    fit: str | None = None  # key of the row whose number of parameters this row's width `FITTED` is chosen to match
    # True if the model has an adaptive softmax with narrower tail clusters, whatever the scale's model has
    adaptive: bool = False
    # Name of the model group in which rows are compared (Table 8), or of the line that joins them in a figure
    group: str = ""
    # Divisor of the scale's number of lanes. A step of more segments, or of a longer segment, then has as many tokens
    # as before.
    lanes_over: int = 1
    # Key of the row whose training memory limits this row's, which takes the longest segment that fits (Table 10)
    equal_memory_with: str | None = None
    length: int = 0  # attention length of a row of Table 9

    @property
    def trained(self) -> bool:
        """True if this project trains the model of this row."""
        return self.overrides is not None

    def options(self, segment: int, mem_len: int, longest: int) -> dict[str, str]:
        """Return the overrides as options, with numbers in place of the words in braces.

        The reach is that of segments of `segment` tokens and the overrides' memory, or else `mem_len`.
        """
        values = self.overrides or {}
        reach = int(values.get("model.mem_len", mem_len)) + segment - 1
        lengths = {"segment": segment, "reach": reach, "longest": longest, "two_segments": 2 * segment}
        return {name: value.format_map(lengths) for name, value in values.items()}


class Measurement:
    """A kind of table. Its instances have no state."""

    measures: ClassVar[tuple[str, ...]] = ()  # names of the numbers that a result of a row has
    repeat: ClassVar[str] = "seed"  # experiment that is repeated
    # Folder of the results, below that of the experiment's results: tables of one experiment share theirs
    results: ClassVar[str] = ""
    has_numbers: ClassVar[bool] = True  # False if files are all that is made of a model
    # True if, apart from published presets, attention at test is as long as in training: small models become worse with
    # the longer memory of the published models
    tests_as_trained: ClassVar[bool] = False
    # True if losses of single targets, which records do not have, are compared between the models of a group
    compares_losses: ClassVar[bool] = False

    def gather(self, outcome: Outcome) -> None:
        """Add to an outcome what is not a number of a single result."""

    def headings(self, outcome: Outcome) -> tuple[str, ...]:
        """Return the headings of `cells`."""
        return ("parameters", "status")

    def cells(self, outcome: Outcome, result: RowResult, status: str) -> tuple[str, ...]:
        """Return our numbers for a row, as means with the spread over seeds, and its status."""
        return (result.parameters_text, status)

    def figures(self, outcome: Outcome) -> list[DrawnFigure]:
        """Return the figures of the page."""
        return []


@dataclass(frozen=True)
class Definition:
    """A table or figure."""

    name: str  # name on the command line, such as "table6"
    title: str
    caption: str
    corpus: str  # corpus in the paper
    metric: str  # metric in the paper and its split, such as "perplexity, test split"
    unit: str  # unit of the paper's tokens: "word" or "character"
    measurement: Measurement
    columns: tuple[str, ...] = ()  # columns of the paper's numbers
    rows: tuple[Row, ...] = ()
    claims: tuple[Claim, ...] = ()
    experiment: str = ""  # name of the experiment, whose definitions share runs and results; empty: `name`.
    cost_beside: str = ""  # key of the row to which every row's time and memory are compared; empty: not measured.
    # True if the table needs a corpus of sentences in random order, like One Billion Word, and segments as short as the
    # paper's (`Scale.base`)
    separate_sentences: bool = False
    pictures: str = ""  # pattern for the names of files made with the model that the page shows as figures
    notes: tuple[str, ...] = ()
    is_open_question: bool = False  # True for a question that the paper left open, so that the paper has no such table

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


@dataclass
class RowResult:
    """Status of a row and its measurements."""

    row: Row
    status: Literal["done", "failed", "not finished", "published only", "not at this scale"]
    reason: str = ""
    config: JsonObject | None = None
    parameters: int | None = None
    by_seed: dict[int, JsonObject] = field(default_factory=dict)  # measurements by seed

    @property
    def parameters_text(self) -> str:
        """Number of parameters, or a dash."""
        return "-" if self.parameters is None else f"{self.parameters:,}"

    @property
    def hit_cap(self) -> bool:
        """True if the row trains until convergence and made all of its steps with some seed."""
        if self.config is None or self.config["train"].get("patience") is None:
            return False
        return any(measured.get("steps") == self.config["train"]["steps"] for measured in self.by_seed.values())


@dataclass(frozen=True)
class GroupGains:
    """Data of Figure 3 for one model group and seed: exp f(c,c) - exp f(c,c') of each model."""

    group: str
    seed: int
    gains: dict[str, dict[tuple[int, int], float]]  # gains by row and pair of context lengths (c, c')


@dataclass(frozen=True)
class Outcome:
    """Contents of a table's page."""

    definition: Definition
    scale: Scale
    seeds: int
    corpus: str  # name or path of our corpus
    unit: str
    rows: list[RowResult]
    values: dict[str, dict[str, list[float]]]  # values by row and measure, one per seed
    # Mean loss in nats by row and attention or context length, one value per seed
    curves: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    changed_text: tuple[str, ...] = ()  # differences of our corpus from the published one
    gains: list[GroupGains] = field(default_factory=list)
    # Possible values by measure, for measures that are lengths
    grids: dict[str, list[float]] = field(default_factory=dict)

    @property
    def failed(self) -> list[RowResult]:
        """Rows that failed."""
        return [row for row in self.rows if row.status == "failed"]

    @property
    def groups(self) -> dict[str, list[RowResult]]:
        """Rows by the group of models in which they are compared."""
        groups: dict[str, list[RowResult]] = {}
        for result in self.rows:
            groups.setdefault(result.row.group, []).append(result)
        return groups

    @property
    def compares_with_paper(self) -> bool:
        """True if published models were trained on the paper's corpus and tested on its whole test split."""
        is_the_papers = self.corpus == self.definition.corpus and not self.changed_text
        return self.scale.is_published and is_the_papers and self.scale.eval_tokens is None

    def verdicts(self) -> list[tuple[Claim, Verdict]]:
        """Return every claim of the table with its verdict; some scales judge no claims."""
        verdicts = []
        for claim in self.definition.claims:
            if not self.scale.judged:
                verdict = Verdict("not judged", f"the scale {self.scale.name} tests the machinery")
            elif claim.at_full_size and not self.compares_with_paper:
                verdict = Verdict("not judged", "a claim about the published model on the paper's corpus")
            else:
                verdict = claim.judge(self.values, self.grids)
            verdicts.append((claim, verdict))
        return verdicts
