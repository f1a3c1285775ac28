"""Published settings of dynamic evaluation, by the names of the models that they were tuned for.

The 2019 ones are those of the scripts tf/sota/*.sh in github.com/benkrause/dynamiceval-transformer; num_batch // 5000
segments of 128 tokens are 140, 140 and 161 there. Their memory begins with positions of zeros that are attended to,
ours with none. The 2018 ones are the defaults (tuned for AWD-LSTM) and the README's in
github.com/benkrause/dynamic-evaluation. They belong to those models: others need settings of their own
(`txl.tune_dynamic`).
"""

from __future__ import annotations

from dataclasses import dataclass

from txl.evaluation.dynamic import Adaptation


@dataclass(frozen=True)
class PublishedSettings:
    """Settings of a published evaluation."""

    adaptation: Adaptation
    statistics_segments: int | None
    """Segments of the training split that are read for them; None: all."""
    statistics_batch_size: int
    segment: int
    mem_len: int | None = None
    """None: the model has no memory of positions."""
    window: int | None = None
    """same_length with memory M is a window of M + 1 in the authors' TensorFlow code."""
    clamp_len: int | None = None
    batch_size: int = 1


def _of_2019(learning_rate: float, decay: float, epsilon: float, segments: int, mem_len: int) -> PublishedSettings:
    adaptation = Adaptation("rms", learning_rate, decay, epsilon, statistics="sum")
    return PublishedSettings(adaptation, segments, 1, 128, mem_len, mem_len + 1, 1000)


def _of_2018(learning_rate: float, decay: float, segment: int) -> PublishedSettings:
    return PublishedSettings(Adaptation("rms", learning_rate, decay, 2e-5), None, 100, segment)


PUBLISHED = {
    "enwik8-24L": _of_2019(1.2e-5, 24.0, 1e-4, 140, 3800),
    "text8-24L": _of_2019(1.5e-5, 24.0, 1e-4, 140, 3800),
    "wt103-large": _of_2019(2e-6, 0.0, 1e-5, 161, 1600),
    "ptb-awd-lstm": _of_2018(5e-5, 2e-3, 5),
    "ptb-qrnn": _of_2018(1.2e-4, 0.02, 20),
    "wikitext-2-qrnn": _of_2018(1.2e-4, 8e-3, 20),
}
