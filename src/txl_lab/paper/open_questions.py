"""Two questions that the paper left open: memory against depth for the same time, and gradients into memory.

Each row is trained, measured and judged like the rows of the paper's tables. Its time per token and its memory are also
measured relative to the first row; the steps of both are timed alternately.
"""

from __future__ import annotations

from txl_lab.paper.claims import Claim, all_of, lower, lower_at_equal_time, no_worse
from txl_lab.paper.schema import Definition, Length, Row, Shape

_DEPTHS, _MEMORIES = (1, 2), (1, 2, 4, 8)
"""Factors of the scale's layers and memory. Eight times the memory takes about as much time as twice the layers."""
_OPEN = "no numbers for this question"
_COST = (
    "Training time and training memory (the peak of all tensors) are those of a step, reading time that of evaluation "
    "at the row’s test settings: a token’s, as multiples of the first row’s. Both are timed in turns on random tokens "
    "behind a full memory."
)


def _key(depth: int, memory: int) -> str:
    return f"depth-{depth}-memory-{memory}"


def _of_grid(depth: int, memory: int) -> Row:
    return Row(
        _key(depth, memory),
        f"depth × {depth}, memory × {memory}",
        {},
        {},
        shape=Shape(depth=depth, memory=memory),
        group=f"depth × {depth}",
    )


MEMORY_DEPTH = Definition(
    name="memory-depth",
    title="Open question: a longer memory or a deeper model",
    caption="Models of two depths with four lengths of memory. Compare rows that take the same time a token.",
    corpus="wikitext-103",
    metric=_OPEN,
    unit="word",
    kind="quality",
    columns=(),
    rows=tuple(_of_grid(depth, memory) for depth in _DEPTHS for memory in _MEMORIES),
    claims=(
        Claim(
            "Question 1",
            "for the same training time a token, twice the layers are better than a longer memory",
            "left open",
            lower_at_equal_time(_key(2, 1), *(_key(1, memory) for memory in _MEMORIES)),
        ),
        Claim(
            "Question 1, memory",
            "at either depth, the longest memory is better than the shortest",
            "left open",
            all_of(*(lower(_key(depth, _MEMORIES[-1]), _key(depth, 1)) for depth in _DEPTHS)),
        ),
    ),
    is_open_question=True,
    cost_beside=_key(1, 1),
    notes=(
        _COST,
        "Question 1 compares the deeper model with the line, over time, between the two rows of the shallower one that "
        "take less and more time than it.",
    ),
)

GRADIENTS_INTO_MEMORY = Definition(
    name="gradients-into-memory",
    title="Open question: gradients into memory",
    caption="A step of two segments with gradients through the memory between them, of as many tokens as the others’.",
    corpus="wikitext-103",
    metric=_OPEN,
    unit="word",
    kind="quality",
    columns=(),
    rows=(
        Row("one-segment", "no gradient into memory", {}, {}),
        Row(
            "two-segments",
            "gradients through one memory",
            {},
            {"train.backprop_segments": "2"},
            lanes_over=2,
        ),
        Row(
            "longer-segment",
            "one segment of twice the length",
            {},
            {"train.segment": Length.TWO_SEGMENTS},
            lanes_over=2,
        ),
    ),
    claims=(
        Claim(
            "Question 2",
            "gradients into memory for one segment lower the loss, at equal tokens and steps",
            "left open",
            lower("two-segments", "one-segment"),
        ),
        Claim(
            "Question 2, longer segment",
            "they bring as much as a segment of twice the length, within 1%",
            "left open",
            no_worse("two-segments", "longer-segment", tolerance=0.01),
        ),
    ),
    is_open_question=True,
    cost_beside="one-segment",
    notes=(
        _COST,
        "A step has as many tokens in every row: where it reads two segments, or one of twice the length, it has half "
        "of the lanes. `train.backprop_segments` says how gradients flow.",
    ),
)
QUESTIONS = (MEMORY_DEPTH, GRADIENTS_INTO_MEMORY)
