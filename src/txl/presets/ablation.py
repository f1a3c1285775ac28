"""The rows of the paper's ablations (Tables 6, 7 and 10), each as changes of one base configuration.

"Recurrence" is memory: without it `mem_len` is 0, and every segment is read on its own. Models without recurrence are
tested here in segments as long as in training; what a longer attention gives them (the paper's "Attn Len") is measured
with a window that slides, `txl eval RUN --sliding L`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from txl.config import Encoding, EvalConfig, LossName, RunConfig, model_with


@dataclass(frozen=True)
class Ablation:
    """A row of an ablation, as it differs from Transformer-XL: relative encoding, recurrence, full loss."""

    encoding: Encoding = "relative"
    recurrence: bool = True
    loss: LossName = "full"
    initial: float | None = None
    """Published perplexity with the attention length of training ("PPL init"), where it is given."""
    best: float | None = None
    """Published perplexity with the best attention length."""
    attention_length: int | None = None
    """The shortest attention length that gives it."""
    segment: int | None = None
    """Backpropagation length, if not that of the base (Table 10)."""

    @property
    def suffix(self) -> str:
        """Ending of the preset's name behind that of its base: "-shaw-no-memory-half"."""
        parts = [] if self.encoding == "relative" else [self.encoding]
        # Absolute positions never have memory, so their names need not say it.
        if not self.recurrence and self.encoding in ("relative", "shaw"):
            parts.append("no-memory")
        parts += [self.loss] if self.loss != "full" else []
        parts += [] if self.segment is None else [str(self.segment)]
        return "".join(f"-{part}" for part in parts)

    @property
    def description(self) -> str:
        """The row in words."""
        encoding = {
            "relative": "relative encoding",
            "shaw": "Shaw et al.'s encoding",
            "learned": "Al-Rfou et al.'s encoding",
            "sinusoid": "Vaswani et al.'s encoding",
        }[self.encoding]
        return f"{encoding}, {'recurrence' if self.recurrence else 'no recurrence'}, {self.loss} loss" + (
            "" if self.segment is None else f", segments of {self.segment}"
        )

    @property
    def published(self) -> str:
        """The published result as presets give it."""
        return "none" if self.best is None else f"{self.best} ppl"


TABLE_6 = {
    "xl": Ablation(initial=27.02, best=26.77, attention_length=500),
    "xl-shaw": Ablation("shaw", initial=27.94, best=27.94, attention_length=256),
    "xl-half": Ablation(loss="half", initial=28.69, best=28.33, attention_length=460),
    "no-recurrence": Ablation(recurrence=False, initial=29.59, best=29.02, attention_length=260),
    "no-recurrence-half": Ablation(recurrence=False, loss="half", initial=30.10, best=30.10, attention_length=120),
    "shaw": Ablation("shaw", recurrence=False, initial=29.75, best=29.75, attention_length=120),
    "shaw-half": Ablation("shaw", recurrence=False, loss="half", initial=30.50, best=30.50, attention_length=120),
    "vaswani-half": Ablation(
        "sinusoid", recurrence=False, loss="half", initial=30.97, best=30.97, attention_length=120
    ),
    "al-rfou-half": Ablation("learned", recurrence=False, loss="half", initial=31.16, best=31.16, attention_length=120),
}
"""WikiText-103, 128M parameters, by short names; the table's last model is the one of 151M parameters."""
UNPUBLISHED = [replace(row, initial=None, best=None, attention_length=None) for row in TABLE_6.values()]
"""The rows of Table 6 for other corpora and sizes, of which the paper says nothing."""
TABLE_7 = {
    "xl": Ablation(best=25.2),
    "xl-shaw": Ablation("shaw", best=25.7),
    "no-recurrence": Ablation(recurrence=False, best=27.1),
}
"""One Billion Word."""
TABLE_10 = {
    "no-recurrence": Ablation(recurrence=False, initial=28.43, best=27.98, attention_length=400, segment=176),
    "no-recurrence-half": Ablation(
        recurrence=False, loss="half", initial=28.83, best=28.83, attention_length=120, segment=172
    ),
}
"""WikiText-103 with the memory of the first row of Table 6; its rows with recurrence are those of Table 6.

`txl bench budget` finds such segments by measurement.
"""


def apply(row: Ablation, base: RunConfig) -> RunConfig:
    """Return the configuration of a row.

    Args:
        row: the row.
        base: the first row of its table, with memory; stays as it is.
    """
    run = RunConfig.from_dict(base.to_dict())
    run.name += row.suffix
    train = run.train
    train.loss = row.loss
    if row.segment is not None:
        train.segment = row.segment
    if row.recurrence:
        if row.attention_length is not None:
            run.eval.mem_len = run.eval.window = row.attention_length
    else:
        run.model = model_with(run.model, {"mem_len": 0, "window": None, "clamp_len": None})
        run.eval = EvalConfig(segment=train.segment, mem_len=0, batch_size=base.eval.batch_size)
    reach = {"max_distance": base.model.mem_len + train.segment} if row.encoding == "shaw" else {}
    run.model = model_with(run.model, {"encoding": row.encoding, **reach}).for_segment(train.segment)
    if row.encoding == "shaw":
        run.eval.clamp_len = None  # distances are clipped already
    return run
