"""Scales of a reproduction: model, budget, seeds, and amount of evaluation.

All models of a table have the same budget: steps, lanes and segment, and therefore tokens. It is the scale's, except
that tables of separate sentences have shorter segments and more lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from txl.config import DataConfig, EvalConfig, RunConfig, TrainConfig, TransformerXLConfig
from txl.data.benchmarks import BENCHMARKS
from txl.errors import UserError
from txl.files import JsonObject
from txl.presets import preset
from txl_lab.paper.converging import UntilConverged

Dtype = Literal["float32", "bfloat16"]  # arithmetic; bfloat16 applies to matrix products only (autocast).


_CAP = 4  # largest number of steps of a model that trains until convergence, relative to the scale's


@dataclass(frozen=True)
class Scale:
    """Model, budget and evaluation of a reproduction. Lengths count tokens."""

    name: str
    about: str
    seeds: int  # number of runs of each model, unless the command sets another
    judged: bool  # True if claims are judged; False for a scale that only tests the machinery.
    # Corpus to use instead of each corpus of the paper; "*" stands for the others. Without an entry: the paper's.
    corpora: dict[str, str]
    # Base configuration of the rows of a table of words, of running text; None: each row uses its published preset
    words: Callable[[], RunConfig] | None
    # Base configuration of the rows of a table of characters; None: as for `words`
    characters: Callable[[], RunConfig] | None
    # Attention lengths to try, as multiples of the training segment (Tables 6 and 10)
    attention_lengths: tuple[float, ...]
    eval_tokens: int | None  # number of tokens to read of the validation and of the test split; None: all.
    context_step: int  # step between context lengths that RECL compares (Table 8)
    longest_context: int  # longest context length (Table 8, Figure 4)
    targets: int  # least number of targets in Table 8 (`spread_targets`)
    speed_lengths: float  # factor of the attention lengths of Table 9
    speed_steps: int = 5
    max_words: int | None = None  # largest vocabulary of words for a corpus that is not a benchmark
    steps: int | None = None  # steps of every model as the user set them; None: the steps of the base configuration.
    # Rules of training until convergence; None: every model makes all steps
    until_converged: UntilConverged | None = None
    # Arithmetic of training and of Table 9 as the user set it; None: float32, or that of the preset
    dtype: Dtype | None = None

    def changed(
        self,
        steps: int | None = None,
        eval_tokens: int | None = None,
        dtype: Dtype | None = None,
        rules: UntilConverged | None = None,
    ) -> Scale:
        """Return the scale with what the user sets: steps, tokens to read of each split, arithmetic, convergence.

        With fewer tokens there are at most as many targets in Table 8. Published presets may use another arithmetic,
        because it only serves speed.
        """
        scale, about = self, self.about
        for name, value, least in (("steps", steps, 1), ("eval_tokens", eval_tokens, 2)):
            if value is not None and value < least:
                raise UserError(field=name, value=value, expected=f"{least} or more")
        for name, value in (("steps", steps), ("until_converged", rules)):
            if value is not None and self.is_published:
                but = f"scale {self.name} trains the published presets as they are"
                raise UserError(field=name, value=value if name == "steps" else True, but=but)
        if steps is not None:
            scale, about = replace(scale, steps=steps), f"{about}; cut to {steps:,} steps"
        if eval_tokens is not None:
            scale = replace(scale, eval_tokens=eval_tokens, targets=min(scale.targets, eval_tokens))
            about = f"{about}; {eval_tokens:,} tokens evaluated"
        if dtype is not None:
            scale, about = replace(scale, dtype=dtype), f"{about}; in {dtype}"
        if rules is not None:
            scale, about = replace(scale, until_converged=rules), f"{about}; until validation no longer improves"
        return replace(scale, about=about)

    @property
    def is_published(self) -> bool:
        """True if the rows train the published presets."""
        return self.words is None

    def base(self, unit: str, separate_sentences: bool = False) -> RunConfig:
        """Return the base configuration of rows, for tables of words or of characters ("word", "character").

        Tables of separate sentences have segments and memory as short as the paper's models of One Billion Word, and
        more lanes, which keep the tokens a step about equal: Table 7 asks what recurrence is worth where nothing but a
        cut sentence needs it, and long segments cut few sentences.
        """
        make = self.words if unit == "word" else self.characters
        assert make is not None, "a scale of published presets has no base"
        run = make()
        published = preset("lm1b-base")
        if separate_sentences and run.train.segment > (segment := published.train.segment):
            run.train.batch_size = round(run.train.batch_size * run.train.segment / segment)
            run.train.segment = run.eval.segment = segment
            run.model = replace(run.model, mem_len=published.model.mem_len)
        if self.steps is not None:
            _cut(run.train, self.steps)
        elif self.until_converged is not None:
            run.train.steps *= _CAP
        return run

    def attention_lengths_of(self, run: RunConfig) -> list[int]:
        """Return the attention lengths to try: multiples of the training segment, and the segment itself."""
        lengths = {max(1, round(factor * run.train.segment)) for factor in self.attention_lengths}
        return sorted(lengths | {run.train.segment})

    @property
    def context_lengths(self) -> range:
        """Context lengths of Table 8, half a step apart (an odd step stays whole).

        Claims only count two lengths as different if a tried length lies between them. With half steps, this is true of
        two lengths a whole step apart.
        """
        step = self.context_step // 2 if self.context_step % 2 == 0 else self.context_step
        return range(step, self.longest_context + 1, step)

    def speed_length(self, length: int) -> int:
        """Return the attention length at which a row of Table 9 with the paper's `length` is measured."""
        return max(1, round(length * self.speed_lengths))

    def to_dict(self) -> JsonObject:
        """Return the fields that determine results, ready for JSON."""
        names = (
            "name", "attention_lengths", "eval_tokens", "context_step", "longest_context", "targets", "speed_lengths",
            "speed_steps",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        values |= {name: getattr(self, name) for name in ("steps", "dtype") if getattr(self, name) is not None}
        if self.until_converged is not None:
            values["until_converged"] = asdict(self.until_converged) | {"factors": list(self.until_converged.factors)}
        return values | {"attention_lengths": list(self.attention_lengths)}

    def data(self, corpus: str, unit: str) -> DataConfig:
        """Return the data of a table: its corpus, or the corpus that this scale uses instead."""
        chosen = self.corpora.get(corpus, self.corpora.get("*", corpus))
        return named_data(chosen, unit, self.max_words)


def _cut(train: TrainConfig, steps: int) -> None:
    """Set the number of steps, and scale the beginning of averaging in proportion."""
    if train.average_from is not None:
        train.average_from = min(round(train.average_from * steps / train.steps), steps - 1)
    # After a warm-up of only a few dozen steps, a post-norm model predicts little more than word frequencies for a long
    # time; and each evaluation is as long as before. So both are kept while half, or four of them, fit into the steps.
    train.steps, train.warmup_steps = steps, min(train.warmup_steps, steps // 2)
    for interval in ("eval_every", "checkpoint_every", "log_every"):
        setattr(train, interval, min(getattr(train, interval), max(1, steps // 4)))


def named_data(corpus: str, unit: str, max_words: int | None) -> DataConfig:
    """Return the configuration of a corpus: a benchmark has its own unit, other texts are read in words or in bytes."""
    if corpus in BENCHMARKS:
        return DataConfig(corpus=corpus, unit=BENCHMARKS[corpus].unit)  # pyright: ignore[reportArgumentType]
    if unit == "word":
        return DataConfig(corpus=corpus, unit="word", max_words=max_words)
    return DataConfig(corpus=corpus, unit="byte")


def _tiny(unit: str) -> RunConfig:
    return RunConfig(
        name=f"tiny-{unit}",
        model=TransformerXLConfig(n_layer=2, d_model=64, n_head=2, d_head=32, d_inner=128, mem_len=32, dropout=0.0),
        train=TrainConfig(
            steps=300,
            batch_size=16,
            segment=32,
            learning_rate=2e-3,
            warmup_steps=30,
            log_every=50,
            eval_every=100,
            eval_tokens=4000,
            checkpoint_every=100,
            keep_checkpoints=1,
        ),
        eval=EvalConfig(segment=32, mem_len=96, window=96, batch_size=4),
    )


def _small_words() -> RunConfig:
    run = preset("wikitext-2-small")
    run.name, run.model.cutoffs = "small-word", ()
    run.train.random_segments = False  # absolute positions need segments of equal length
    run.train.keep_checkpoints = 1
    return run


def _small_characters() -> RunConfig:
    run = preset("enwik8-small")
    run.name = "small-character"
    run.model, run.train.segment = replace(run.model, n_layer=4, mem_len=128), 128
    run.eval = EvalConfig(segment=128, mem_len=512, window=512)
    run.train.keep_checkpoints = 1
    return run


TINY = Scale(
    name="tiny",
    about="minutes on two CPU cores; tests the machinery, judges nothing",
    seeds=2,
    judged=False,
    corpora={"*": "stdlib"},
    words=lambda: _tiny("word"),
    characters=lambda: _tiny("character"),
    attention_lengths=(0.5, 1, 1.5, 2, 3),
    eval_tokens=2000,
    context_step=16,
    longest_context=96,
    targets=200,
    speed_lengths=0.1,
    max_words=4000,
)
SMALL = Scale(
    name="small",
    about="hours of CPU, or a GPU",
    seeds=3,
    judged=True,
    corpora={"wikitext-103": "wikitext-2", "lm1b": "wikitext-2"},
    words=_small_words,
    characters=_small_characters,
    attention_lengths=(0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5),
    eval_tokens=10_000,
    context_step=50,
    longest_context=900,
    targets=2000,
    speed_lengths=1.0,
)
PAPER = Scale(
    name="paper",
    about="the published presets",
    seeds=1,
    judged=True,
    corpora={},
    words=None,
    characters=None,
    attention_lengths=(0.5, 0.75, 0.9375, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5),
    eval_tokens=None,
    context_step=100,
    longest_context=1000,
    targets=10_000,
    speed_lengths=1.0,
)
SCALES = {scale.name: scale for scale in (TINY, SMALL, PAPER)}


def find_scale(name: str) -> Scale:
    """Return the scale with the name `name`."""
    if name not in SCALES:
        raise UserError(f"unknown scale {name!r}; expected one of {', '.join(SCALES)}")
    return SCALES[name]
