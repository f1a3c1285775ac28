"""A preset, and the two ways in which one is made from another: by changes, and as a row of an ablation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from txl.config import EvalConfig, FieldValues, LossName, RunConfig, model_with


@dataclass(frozen=True)
class Preset:
    """A named configuration with its source and published result."""

    run: RunConfig  # the configuration itself, whose name is the preset's; `make` returns copies of it
    description: str
    source: str
    published: str  # published result on the test split of the corpus, or "none"
    vocab_size: int  # vocabulary size to which the published number of parameters refers

    @property
    def name(self) -> str:
        """Name of the preset."""
        return self.run.name

    def make(self) -> RunConfig:
        """Return a new copy of the configuration; the caller may change it."""
        return changed(self.run, self.name)


def changed(
    base: RunConfig,
    name: str,
    *,
    model: FieldValues | None = None,
    data: FieldValues | None = None,
    train: FieldValues | None = None,
    eval: FieldValues | None = None,
) -> RunConfig:
    """Return a copy of a configuration with another name, and other values of some fields of its sections."""
    return RunConfig(
        name,
        model=replace(base.model, **(model or {})),
        data=replace(base.data, **(data or {})),
        train=replace(base.train, **(train or {})),
        eval=replace(base.eval, **(eval or {})),
    )


@dataclass(frozen=True)
class Ablation:
    """A row of an ablation; the defaults are those of Transformer-XL.

    Recurrence means memory: without it `mem_len` is 0, every segment is read on its own, and tests use segments as long
    as those of training. Losses at longer attention lengths ("Attn Len") need `txl eval RUN --sliding L`.
    """

    encoding: Literal["relative", "shaw", "learned", "sinusoid"] = "relative"
    recurrence: bool = True
    loss: LossName = "full"
    best: float | None = None  # published perplexity with the best attention length; None: not published
    attention_length: int | None = None  # published shortest attention length with the best perplexity
    segment: int | None = None  # backpropagation length (Table 10); None: that of the base configuration


# WikiText-103, 128M parameters; the first row is the base itself, the model with 151M is a separate preset.
TABLE_6 = (
    Ablation(best=26.77, attention_length=500),
    Ablation("shaw", best=27.94, attention_length=256),
    Ablation(loss="half", best=28.33, attention_length=460),
    Ablation(recurrence=False, best=29.02, attention_length=260),
    Ablation(recurrence=False, loss="half", best=30.10, attention_length=120),
    Ablation("shaw", recurrence=False, best=29.75, attention_length=120),
    Ablation("shaw", recurrence=False, loss="half", best=30.50, attention_length=120),
    Ablation("sinusoid", recurrence=False, loss="half", best=30.97, attention_length=120),
    Ablation("learned", recurrence=False, loss="half", best=31.16, attention_length=120),
)
# One Billion Word; the first row is the base itself.
TABLE_7 = (Ablation(best=25.2), Ablation("shaw", best=25.7), Ablation(recurrence=False, best=27.1))
# Rows without recurrence: segments that train in the same GPU memory as the first row of Table 6, whose rows are those
# with recurrence. `txl bench budget` finds such segment lengths by measurement.
TABLE_10 = (
    Ablation(recurrence=False, best=27.98, attention_length=400, segment=176),
    Ablation(recurrence=False, loss="half", best=28.83, attention_length=120, segment=172),
)
_ENCODINGS = {
    "relative": "relative encoding",
    "shaw": "Shaw et al.'s encoding",
    "learned": "Al-Rfou et al.'s encoding",
    "sinusoid": "Vaswani et al.'s encoding",
}


def ablation_presets(
    rows: Iterable[Ablation], base: RunConfig, corpus: str, source: str, vocab_size: int
) -> list[Preset]:
    """Return a preset for every row of an ablation; `base` is the first row of the same table, with memory."""
    presets = []
    for row in rows:
        words = [_ENCODINGS[row.encoding], "recurrence" if row.recurrence else "no recurrence", f"{row.loss} loss"]
        names = [base.name] + ([] if row.encoding == "relative" else [row.encoding])
        if not row.recurrence and row.encoding in ("relative", "shaw"):  # absolute positions never have memory
            names.append("no-memory")
        if row.loss != "full":
            names.append(row.loss)
        segment = row.segment or base.train.segment
        if row.segment is not None:
            names.append(str(row.segment))
            words.append(f"segments of {row.segment}")
        run = changed(base, "-".join(names), train={"loss": row.loss, "segment": segment})
        if not row.recurrence:
            run.model = model_with(run.model, {"mem_len": 0, "window": None, "clamp_len": None})
            run.eval = EvalConfig(segment=segment, mem_len=0, batch_size=base.eval.batch_size)
        elif row.attention_length is not None:
            run.eval.mem_len = run.eval.window = row.attention_length
        reach = {"max_distance": base.model.mem_len + segment} if row.encoding == "shaw" else {}
        run.model = model_with(run.model, {"encoding": row.encoding, **reach}).for_segment(segment)
        if row.encoding == "shaw":
            run.eval.clamp_len = None  # this encoding already clips distances
        published = "none" if row.best is None else f"{row.best} ppl"
        presets.append(Preset(run, f"{corpus}, {', '.join(words)}", source, published, vocab_size))
    return presets
