"""Rows of the paper's ablations (Tables 6, 7 and 10), each as changes to one base configuration.

"Recurrence" means memory: without recurrence `mem_len` is 0, and every segment is read on its own. Presets without
recurrence are tested in segments as long as in training. Their loss at longer attention lengths (the paper's "Attn
Len") is measured with a sliding window: `txl eval RUN --sliding L`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from txl.config import EvalConfig, LossName, RunConfig, model_with
from txl.presets.recipe import Preset, changed


@dataclass(frozen=True)
class Ablation:
    """A row of an ablation; the defaults are those of Transformer-XL: relative encoding, recurrence, full loss."""

    encoding: Literal["relative", "shaw", "learned", "sinusoid"] = "relative"
    recurrence: bool = True
    loss: LossName = "full"
    initial: float | None = None
    """Published perplexity with the attention length of training ("PPL init"); None: not published."""
    best: float | None = None
    """Published perplexity with the best attention length; None: not published."""
    attention_length: int | None = None
    """Published shortest attention length with the best perplexity."""
    segment: int | None = None
    """Backpropagation length (Table 10); None: that of the base configuration."""

    @property
    def suffix(self) -> str:
        """Ending of the preset's name after the name of its base, such as "-shaw-no-memory-half"."""
        parts = [] if self.encoding == "relative" else [self.encoding]
        # Models with absolute positions never have memory, so their names do not mention it.
        if not self.recurrence and self.encoding in ("relative", "shaw"):
            parts.append("no-memory")
        parts += [self.loss] if self.loss != "full" else []
        parts += [] if self.segment is None else [str(self.segment)]
        return "".join(f"-{part}" for part in parts)

    @property
    def description(self) -> str:
        """Description of the row in words."""
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
        """Published result in the form of `Preset.published`."""
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
"""Rows of Table 6 (WikiText-103, 128M parameters), by short name; the model with 151M is a separate preset."""
TABLE_7 = {
    "xl": Ablation(best=25.2),
    "xl-shaw": Ablation("shaw", best=25.7),
    "no-recurrence": Ablation(recurrence=False, best=27.1),
}
"""Rows of Table 7 (One Billion Word), by short name."""
TABLE_10 = {
    "no-recurrence": Ablation(recurrence=False, initial=28.43, best=27.98, attention_length=400, segment=176),
    "no-recurrence-half": Ablation(
        recurrence=False, loss="half", initial=28.83, best=28.83, attention_length=120, segment=172
    ),
}
"""Rows of Table 10 without recurrence: segments that train in the same GPU memory as the first row of Table 6.

The rows with recurrence are those of Table 6. `txl bench budget` finds such segment lengths by measurement.
"""


def ablation_presets(
    rows: Iterable[Ablation], base: RunConfig, corpus: str, source: str, vocab_size: int
) -> list[Preset]:
    """Return a preset for every row of an ablation.

    Args:
        rows: rows of an ablation.
        base: configuration of the first row of the same table, with memory.
        corpus: corpus in words.
        source: source of all rows.
        vocab_size: number of tokens in the vocabulary of the corpus.
    """
    return [
        Preset(_run_of(row, base), f"{corpus}, {row.description}", source, row.published, vocab_size) for row in rows
    ]


def _run_of(row: Ablation, base: RunConfig) -> RunConfig:
    run = changed(base, base.name + row.suffix, train={"loss": row.loss, "segment": row.segment or base.train.segment})
    segment = run.train.segment
    if not row.recurrence:
        run.model = model_with(run.model, {"mem_len": 0, "window": None, "clamp_len": None})
        run.eval = EvalConfig(segment=segment, mem_len=0, batch_size=base.eval.batch_size)
    elif row.attention_length is not None:
        run.eval.mem_len = run.eval.window = row.attention_length
    reach = {"max_distance": base.model.mem_len + segment} if row.encoding == "shaw" else {}
    run.model = model_with(run.model, {"encoding": row.encoding, **reach}).for_segment(segment)
    if row.encoding == "shaw":
        run.eval.clamp_len = None  # this encoding already clips distances
    return run
