"""How two vocabularies differ, for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from txl.data.vocabulary import ByteVocabulary, CharVocabulary, Vocabulary, WordVocabulary


def vocabulary_difference(ours: Vocabulary, theirs: Vocabulary, our_name: str, their_name: str) -> str | None:
    """In one line, in what two vocabularies differ; None if they are equal.

    Args:
        ours: one.
        theirs: the other.
        our_name: what the first belongs to, say "the corpus".
        their_name: what the second belongs to, say "the checkpoint".
    """
    if ours == theirs:
        return None
    if ours.kind != theirs.kind:
        return f"{our_name} is read in {ours.kind} tokens, {their_name} in {theirs.kind} tokens"
    sizes = f"{our_name} has {len(ours):,} {ours.kind} tokens, {their_name} {len(theirs):,}"
    mine, others = _symbols(ours), _symbols(theirs)
    if mine is None or others is None:
        return f"{sizes}: their byte pairs are not the same"
    missing, extra = _lacking(mine, others), _lacking(others, mine)
    if not missing and not extra:
        place = next((number for number, (a, b) in enumerate(zip(mine, others, strict=True)) if a != b), None)
        if place is None:
            return f"{sizes}: the same ones, but texts are read in other ways (boundaries, word rule, line ends)"
        return f"{sizes}: the same ones in another order (token {place} is {mine[place]!r} and {others[place]!r})"
    parts = []
    for lacking, name in ((missing, their_name), (extra, our_name)):
        if lacking:
            shown = ", ".join(repr(each) for each in islice(lacking, 3))
            parts.append(f"{name} lacks {len(lacking):,} ({shown}{', ...' if len(lacking) > 3 else ''})")
    return f"{sizes}: {' and '.join(parts)}"


def _symbols(vocabulary: Vocabulary) -> Sequence[str] | None:
    if isinstance(vocabulary, WordVocabulary):
        return vocabulary.words
    if isinstance(vocabulary, CharVocabulary):
        return vocabulary.characters if vocabulary.unk_id is None else ["<unk>", *vocabulary.characters]
    if isinstance(vocabulary, ByteVocabulary):
        return [f"0x{value:02X}" for value in vocabulary.values]
    return None


def _lacking(symbols: Sequence[str], among: Sequence[str]) -> list[str]:
    there = set(among)
    return [symbol for symbol in symbols if symbol not in there]
