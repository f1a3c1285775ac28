"""Where in a split contexts begin that a model is to continue."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from txl.data.streams import shuffled
from txl.data.vocabulary import ByteVocabulary, CharVocabulary, Vocabulary
from txl.errors import UserError


def draw_contexts(tokens: Any, vocabulary: Vocabulary, *, count: int, length: int, seed: int) -> list[int]:
    """Positions in a split, drawn with a seed, each with room for a context and what follows it; ascending.

    They begin at the beginning of a line that is not empty, where lines can be told and there are enough of them, and
    overlap only where the split has no room for so many.

    Args:
        tokens: the split's token ids.
        vocabulary: tells where lines end.
        count: how many.
        length: tokens of a context and of what follows it.
        seed: the same one gives the same positions, on every machine.

    Raises:
        UserError: if the split is too short.
    """
    total = len(tokens)
    if total < length:
        split = getattr(tokens, "split", "token stream")
        raise UserError(
            f"a context and its continuation are {length:,} tokens, but the {split} split has only {total:,}; "
            f"lower --context or --max-tokens"
        )
    possible = total - length + 1
    starts = _line_starts(np.asarray(tokens[:possible]), _line_end(vocabulary))
    if len(starts) < count:
        starts = np.arange(possible)
    if len(starts) < count:
        raise UserError(
            f"{count:,} different contexts do not fit: with {length:,} tokens each there are {possible:,}; lower "
            f"--count"
        )
    order = starts[shuffled(len(starts), seed, 0)].tolist()
    taken: list[int] = []
    for start in order:
        if len(taken) == count:
            break
        if all(abs(start - other) >= length for other in taken):
            taken.append(start)
    chosen = set(taken)
    overlapping = (start for start in order if start not in chosen)
    return sorted([*taken, *itertools.islice(overlapping, count - len(taken))])


def _line_end(vocabulary: Vocabulary) -> int | None:
    """The token at which lines end, if there is one."""
    if isinstance(vocabulary, ByteVocabulary):
        return vocabulary.values.index(0x0A) if 0x0A in vocabulary.values else None
    if isinstance(vocabulary, CharVocabulary):
        return int(vocabulary.encode("\n")[0]) if "\n" in vocabulary.characters else None
    return vocabulary.eos_id


def _line_starts(tokens: np.ndarray, line_end: int | None) -> np.ndarray:
    """Where lines begin that are not empty."""
    if line_end is None:
        return np.zeros(0, dtype=np.int64)
    ends = tokens == line_end
    begins = np.concatenate([np.ones(1, dtype=bool), ends[:-1]])
    return np.flatnonzero(begins & ~ends)
