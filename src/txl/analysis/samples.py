"""Contexts of a split, continued by a model, beside what follows there (Appendix E), with measures of both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from txl.analysis.copies import Copies, copies
from txl.analysis.mentions import KINDS, Shared, shared_mentions
from txl.config import Lengths
from txl.data.detokenise import Convention, text_decoder
from txl.data.prepared import Tokens
from txl.data.streams import shuffled
from txl.data.vocabulary import ByteVocabulary, CharVocabulary, Vocabulary
from txl.errors import UserError
from txl.files import JsonObject
from txl.generation.text import Sampling, generate_tokens, undrawable
from txl.models.language_model import LanguageModel


def draw_contexts(
    tokens: Tokens | np.ndarray, vocabulary: Vocabulary, *, count: int, length: int, seed: int
) -> list[int]:
    """Draw positions in a split with a seed, each with room for a context and what follows it; ascending.

    They begin at the beginning of a line that is not empty, where lines can be told and there are enough of them, and
    overlap only where the split has no room for so many.

    Args:
        tokens: the split's token ids.
        vocabulary: tells where lines end.
        count: how many.
        length: tokens of a context and of what follows it.
        seed: the same one gives the same positions, on every machine.
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
    """Return the token at which lines end, if there is one."""
    if isinstance(vocabulary, ByteVocabulary):
        return vocabulary.values.index(0x0A) if 0x0A in vocabulary.values else None
    if isinstance(vocabulary, CharVocabulary):
        return int(vocabulary.encode("\n")[0]) if "\n" in vocabulary.characters else None
    return vocabulary.eos_id


def _line_starts(tokens: np.ndarray, line_end: int | None) -> np.ndarray:
    """Return where lines begin that are not empty."""
    if line_end is None:
        return np.zeros(0, dtype=np.int64)
    ends = tokens == line_end
    begins = np.concatenate([np.ones(1, dtype=bool), ends[:-1]])
    return np.flatnonzero(begins & ~ends)


def repeated_ngrams(symbols: Sequence[Hashable], n: int) -> tuple[int, int]:
    """Return the n-grams of a text that have occurred before in it, and all of its n-grams.

    Their quotient is "seq-rep-n" of Welleck et al. 2020 (Neural text generation with unlikelihood training): 1 minus
    the share of distinct n-grams.
    """
    ngrams = [tuple(symbols[start : start + n]) for start in range(len(symbols) - n + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


REPEATED = (2, 3, 4)
"""Words of the n-grams whose repetition is measured."""
NOVEL = {"word": (2, 3, 4, 6, 8), "bpe": (2, 4, 8, 12, 16), "char": (5, 10, 20, 30, 40), "byte": (5, 10, 20, 30, 40)}
"""Tokens of the n-grams that are looked for in the training text."""


@dataclass(frozen=True)
class Passage:
    """A context, a continuation or a reference."""

    ids: list[int]
    pieces: list[str]
    """Text that each token adds, and at the end the rest that was left incomplete."""

    @property
    def text(self) -> str:
        """The whole text, as it is to be read."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Measures:
    """Counts over one text. A pair is a number of hits and the number of things looked at."""

    repeated: dict[int, tuple[int, int]]
    """For each n: n-grams of words that have occurred before in the text."""
    novel: dict[int, tuple[int, int]]
    """For each n: n-grams of tokens that the training text lacks."""
    longest_copy: tuple[int, int]
    """Position in the text and tokens of the longest span that stands in the training text."""
    copied_from: int
    """Its position in the training text; -1 if nothing is copied."""
    copies: list[int]
    """For each token, how many from it on stand in the training text."""
    mentions: dict[str, Shared]
    """For headings, names, dates and years, what of the context is taken up."""


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
    """Choice of contexts, and settings of their continuation."""

    lengths: Lengths
    """Memory length, window and clamp."""
    count: int = 3
    context: int = 512
    """Tokens of a context."""
    max_tokens: int = 500
    """Tokens of a continuation; 500 in the paper."""
    seed: int = 0
    """Seed of the contexts; sample i is drawn with seed + i."""
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
    """Continue contexts of a split, and measure the continuations and what follows there in truth.

    Args:
        model: any language model.
        vocabulary: the one it was trained with.
        tokens: the split's token ids.
        training: the training split's, in which copies are looked for.
        plan: which contexts, and how they are continued.
        convention: how the text was tokenised, to be undone; None: it is shown as it is.
        compile: as in `generate_tokens`.
        progress: called with what is being done, how much of it is done, and how much there is.
    """
    length = plan.context + plan.max_tokens
    positions = draw_contexts(tokens, vocabulary, count=plan.count, length=length, seed=plan.seed)
    triples: list[tuple[Passage, Passage, Passage]] = []
    for number, position in enumerate(positions):
        ids = [int(token) for token in tokens[position : position + length]]
        made: list[int] = []
        steps = generate_tokens(
            model,
            ids[: plan.context],
            max_tokens=plan.max_tokens,
            sampling=plan.sampling,
            seed=plan.seed + number,
            forbidden=undrawable(vocabulary),
            compile=compile,
            **plan.lengths.options(),
        )
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
    """Return the measures of several texts together, as plain JSON values.

    A share is the sum of the texts' counts divided by the sum of what was looked at, and None where that is 0.
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
