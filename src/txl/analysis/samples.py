"""Contexts of a split, continued by a model and by the split itself (the reference), with measures (Appendix E)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from txl.analysis.copies import Copies, copies
from txl.analysis.mentions import KINDS, Shared, shared_mentions
from txl.config import Lengths
from txl.data.detokenise import Convention, text_decoder
from txl.data.lanes import shuffled
from txl.data.prepared import Tokens
from txl.data.vocabulary import Vocabulary
from txl.errors import Field, UserError
from txl.files import JsonObject
from txl.generation.sampling import GenerationOptions, Sampling
from txl.generation.text import generate_tokens_with, undrawable
from txl.models.language_model import LanguageModel


def draw_contexts(
    tokens: Tokens | np.ndarray, vocabulary: Vocabulary, *, count: int, length: int, seed: int
) -> list[int]:
    """Draw ascending positions in a split, each with room for a context and its continuation.

    Contexts begin at lines that are not empty, if the vocabulary shows line ends and the split has enough lines.
    Positions are drawn one after another, each separate from those before it. If that leaves room for fewer than
    `count`, the others overlap them.

    Args:
        tokens: token ids of the split.
        vocabulary: vocabulary of the split, which determines the line ends.
        count: number of positions.
        length: number of tokens of a context and its continuation together.
        seed: random seed; it determines the positions, equally on every machine.
    """
    total = len(tokens)
    if total < length:
        split = getattr(tokens, "split", "token stream")
        raise UserError(
            f"a context and its continuation are {length:,} tokens, but the {split} split has only {total:,}",
            remedy=("lower ", Field("context"), " or ", Field("max_tokens")),
        )
    possible = total - length + 1
    starts = _line_starts(np.asarray(tokens[:possible]), vocabulary.line_ends())
    if len(starts) < count:
        starts = np.arange(possible)
    if len(starts) < count:
        raise UserError(
            f"{count:,} different contexts do not fit: with {length:,} tokens each there are {possible:,}",
            remedy=("lower ", Field("count")),
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


def _line_starts(tokens: np.ndarray, line_ends: list[int]) -> np.ndarray:
    """Return the positions at which lines begin that do not end with their first token."""
    if not line_ends:
        return np.zeros(0, dtype=np.int64)
    ends = np.isin(tokens, line_ends)
    begins = np.concatenate([np.ones(1, dtype=bool), ends[:-1]])
    return np.flatnonzero(begins & ~ends)


def repeated_ngrams(symbols: Sequence[Hashable], n: int) -> tuple[int, int]:
    """Return the number of n-grams that occurred earlier in the text, and the number of all n-grams.

    The quotient of the two numbers is "seq-rep-n" of Welleck et al. 2020 (Neural text generation with unlikelihood
    training): 1 minus the share of distinct n-grams.
    """
    ngrams = [tuple(symbols[start : start + n]) for start in range(len(symbols) - n + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


REPEATED = (2, 3, 4)
"""Lengths in words of the n-grams whose repetition is measured."""
NOVEL = {"word": (2, 3, 4, 6, 8), "bpe": (2, 4, 8, 12, 16), "char": (5, 10, 20, 30, 40), "byte": (5, 10, 20, 30, 40)}
"""Lengths in tokens, by kind of vocabulary, of the n-grams that are searched for in the training text."""


@dataclass(frozen=True)
class Passage:
    """Token ids and text of a context, a continuation or a reference."""

    ids: list[int]
    pieces: list[str]
    """Text that each token adds, and finally the rest that the last tokens left incomplete."""

    @property
    def text(self) -> str:
        """The whole text, for a reader."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Measures:
    """Counts over one text."""

    repeated: dict[int, tuple[int, int]]
    """For each n, number of n-grams of words that occurred earlier in the text, and number of all n-grams."""
    novel: dict[int, tuple[int, int]]
    """For each n, number of n-grams of tokens that the training text lacks, and number of all n-grams."""
    longest_copy: tuple[int, int]
    """Position in the text and length in tokens of the longest span that also occurs in the training text."""
    copied_from: int
    """Position of the longest copied span in the training text; -1 if nothing is copied."""
    copies: list[int]
    """For each token, length of the longest span from this token on that also occurs in the training text."""
    mentions: dict[str, Shared]
    """Numbers of headings, names, dates and years that the text shares with the context."""


@dataclass(frozen=True)
class Sample:
    """A context, its continuation by a model, and its continuation in the corpus."""

    position: int
    """Position of the context's first token in the split."""
    seed: int
    context: Passage
    generation: Passage
    reference: Passage
    generation_measures: Measures
    reference_measures: Measures

    def to_dict(self) -> JsonObject:
        """Return plain JSON values: texts, token ids, measures."""

        def both(text: Passage, measures: Measures) -> JsonObject:
            return {"text": text.text, "tokens": text.ids, "measures": asdict(measures)}

        return {
            "position": self.position,
            "seed": self.seed,
            "context": {"text": self.context.text, "tokens": self.context.ids},
            "generation": both(self.generation, self.generation_measures),
            "reference": both(self.reference, self.reference_measures),
        }


@dataclass(frozen=True)
class Plan:
    """Settings for the choice of contexts and for the continuations."""

    lengths: Lengths
    """Memory length, window and clamp."""
    count: int = 3
    context: int = 512
    """Number of tokens of a context."""
    max_tokens: int = 500
    """Number of tokens of a continuation; 500 in the paper."""
    seed: int = 0
    """Seed for drawing contexts; continuation i is generated with seed + i."""
    sampling: Sampling = field(default_factory=Sampling)


def make_samples(
    model: LanguageModel,
    vocabulary: Vocabulary,
    tokens: Tokens | np.ndarray,
    training: Tokens | np.ndarray,
    plan: Plan,
    *,
    convention: Convention | None = None,
    compile: bool = True,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Sample]:
    """Continue contexts of a split, and measure the continuations and the references that follow in the split.

    Args:
        model: any language model.
        vocabulary: vocabulary of the model.
        tokens: token ids of the split.
        training: token ids of the training split, which is searched for copies.
        plan: settings for the choice of contexts and for the continuations.
        convention: tokenisation to undo in the text; None: the text is shown unchanged.
        compile: as in `generate_tokens`.
        progress: called with the name of the current activity, the amount done and the total amount.
    """
    length = plan.context + plan.max_tokens
    positions = draw_contexts(tokens, vocabulary, count=plan.count, length=length, seed=plan.seed)
    triples: list[tuple[Passage, Passage, Passage]] = []
    for number, position in enumerate(positions):
        ids = [int(token) for token in tokens[position : position + length]]
        made: list[int] = []
        options = GenerationOptions(
            plan.max_tokens, 1, plan.sampling, plan.seed + number, compile=compile, **plan.lengths.options()
        )
        steps = generate_tokens_with(model, ids[: plan.context], options, undrawable(vocabulary))
        for step in steps:
            made.append(int(step[0]))
            progress("generating", number * plan.max_tokens + len(made), plan.count * plan.max_tokens)
        before = vocabulary.decode(ids[: plan.context])
        context = _text(ids[: plan.context], vocabulary, convention, "")
        generation = _text(made, vocabulary, convention, before)
        triples.append((context, generation, _text(ids[plan.context :], vocabulary, convention, before)))
    texts = [text.ids for _, *pair in triples for text in pair]
    found = copies(texts, training, lambda done, total: progress("looking for copies", done, total))
    return [
        Sample(
            positions[number],
            plan.seed + number,
            context,
            generation,
            reference,
            _measures(context, generation, found[2 * number], vocabulary),
            _measures(context, reference, found[2 * number + 1], vocabulary),
        )
        for number, (context, generation, reference) in enumerate(triples)
    ]


def _text(ids: Sequence[int], vocabulary: Vocabulary, convention: Convention | None, before: str) -> Passage:
    decoder = text_decoder(vocabulary, convention, before)
    pieces = [decoder.push(token) for token in ids]
    return Passage(list(ids), [*pieces, decoder.flush()])


def _measures(context: Passage, text: Passage, copied: Copies, vocabulary: Vocabulary) -> Measures:
    words = text.ids if vocabulary.kind == "word" else text.text.split()
    position, longest = copied.longest
    return Measures(
        {n: repeated_ngrams(words, n) for n in REPEATED},
        {n: copied.novel_ngrams(n) for n in NOVEL[vocabulary.kind]},
        (position, longest),
        int(copied.sources[position]) if longest else -1,
        copied.lengths.tolist(),
        shared_mentions(context.text, text.text),
    )


def pooled(measures: Sequence[Measures]) -> JsonObject:
    """Return the measures pooled over several texts, as plain JSON values.

    A share is the sum of all texts' counts divided by the sum of the texts' totals; None if the total is 0.
    """

    def share(pairs: Sequence[tuple[int, int]]) -> JsonObject:
        count, total = (sum(column) for column in zip(*pairs, strict=True))
        return {"share": count / total if total else None, "count": count, "of": total}

    lengths = np.concatenate([each.copies for each in measures])
    return {
        "repeated": {n: share([each.repeated[n] for each in measures]) for n in measures[0].repeated},
        "novel": {n: share([each.novel[n] for each in measures]) for n in measures[0].novel},
        "longest_copy": max(each.longest_copy[1] for each in measures),
        "mean_copy": float(lengths.mean()),
        "taken_up": {
            kind: share([(each.mentions[kind].taken_up, each.mentions[kind].in_context) for each in measures])
            for kind in KINDS
        },
        "known": {
            kind: share([(each.mentions[kind].known, each.mentions[kind].in_continuation) for each in measures])
            for kind in KINDS
        },
    }
