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
    """Draw ascending positions in a split, each with room for `length` tokens: a context and its continuation.

    Contexts begin at lines that are not empty, if the vocabulary shows line ends and the split has enough lines.
    Positions are drawn one after another, each separate from those before it. If that leaves room for fewer than
    `count`, the others overlap them. The seed determines the positions, equally on every machine.
    """
    total = len(tokens)
    if total < length:
        split = getattr(tokens, "split", "token stream")
        raise UserError(
            f"a context and its continuation are {length:,} tokens, but the {split} split has only {total:,}",
            remedy=("lower ", Field("context"), " or ", Field("max_tokens")),
        )
    starts = np.arange(total - length + 1)
    if line_ends := vocabulary.line_ends():
        ends = np.isin(np.asarray(tokens[: len(starts)]), line_ends)
        lines = np.flatnonzero(np.concatenate([[True], ends[:-1]]) & ~ends)
        starts = lines if len(lines) >= count else starts
    if len(starts) < count:
        raise UserError(
            f"{count:,} different contexts do not fit: with {length:,} tokens each there are {len(starts):,}",
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


def repeated_ngrams(symbols: Sequence[Hashable], n: int) -> tuple[int, int]:
    """Return the number of n-grams that occurred earlier in the text, and the number of all n-grams.

    The quotient of the two numbers is "seq-rep-n" of Welleck et al. 2020 (Neural text generation with unlikelihood
    training): 1 minus the share of distinct n-grams.
    """
    ngrams = [tuple(symbols[start : start + n]) for start in range(len(symbols) - n + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


# Lengths in words of the n-grams whose repetition is measured; and lengths in tokens, by kind of vocabulary, of the
# n-grams that are searched for in the training text.
REPEATED = (2, 3, 4)
NOVEL = {"word": (2, 3, 4, 6, 8), "bpe": (2, 4, 8, 12, 16), "char": (5, 10, 20, 30, 40), "byte": (5, 10, 20, 30, 40)}


@dataclass(frozen=True)
class Passage:
    """Token ids and text of a context, a continuation or a reference."""

    ids: list[int]
    pieces: list[str]  # text that each token adds, and finally the rest that the last tokens left incomplete

    @property
    def text(self) -> str:
        """The whole text, for a reader."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Measures:
    """Counts over one text."""

    repeated: dict[int, tuple[int, int]]  # by n, n-grams of words that occurred earlier in the text, and all n-grams
    novel: dict[int, tuple[int, int]]  # by n, n-grams of tokens that the training text lacks, and all n-grams
    longest_copy: tuple[int, int]  # position and length in tokens of the longest span of the training text
    copied_from: int  # position of the longest copied span in the training text; -1 if nothing is copied
    copies: list[int]  # by token, length of the longest span from there on that also occurs in the training text
    mentions: dict[str, Shared]  # numbers of headings, names, dates and years that the text shares with the context


@dataclass(frozen=True)
class Sample:
    """A context, its continuation by a model, and its continuation in the corpus."""

    position: int  # position of the context's first token in the split
    seed: int
    context: Passage
    generation: Passage
    reference: Passage
    generation_measures: Measures
    reference_measures: Measures

    def to_dict(self) -> JsonObject:
        """Return plain JSON values: texts, token ids, measures."""
        both = ((self.generation, self.generation_measures), (self.reference, self.reference_measures))
        generation, reference = (
            {"text": text.text, "tokens": text.ids, "measures": asdict(measures)} for text, measures in both
        )
        return {
            "position": self.position,
            "seed": self.seed,
            "context": {"text": self.context.text, "tokens": self.context.ids},
            "generation": generation,
            "reference": reference,
        }


@dataclass(frozen=True)
class Plan:
    """Settings for the choice of contexts and for the continuations."""

    lengths: Lengths  # memory length, window and clamp
    count: int = 3
    context: int = 512  # number of tokens of a context
    max_tokens: int = 500  # number of tokens of a continuation; 500 in the paper
    seed: int = 0  # seed for drawing contexts; continuation i is generated with seed + i
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
        model, vocabulary: any language model, and its vocabulary.
        tokens: token ids of the split.
        training: token ids of the training split, which is searched for copies.
        plan: settings for the choice of contexts and for the continuations.
        convention: tokenisation to undo in the text; None: the text is shown unchanged.
        compile: as in `generate_tokens`.
        progress: called with the name of the current activity, the amount done and the total amount.
    """
    length = plan.context + plan.max_tokens
    positions = draw_contexts(tokens, vocabulary, count=plan.count, length=length, seed=plan.seed)
    made: list[list[Passage]] = []  # context, generation and reference of each sample
    for number, position in enumerate(positions):
        ids = [int(token) for token in tokens[position : position + length]]
        before, after = ids[: plan.context], ids[plan.context :]
        seed = plan.seed + number
        options = GenerationOptions(plan.max_tokens, 1, plan.sampling, seed, compile=compile, **plan.lengths.options())
        generated: list[int] = []
        for step in generate_tokens_with(model, before, options, undrawable(vocabulary)):
            generated.append(int(step[0]))
            progress("generating", number * plan.max_tokens + len(generated), plan.count * plan.max_tokens)
        preceding = vocabulary.decode(before)
        passages = []
        for text, precedes in ((before, ""), (generated, preceding), (after, preceding)):
            decoder = text_decoder(vocabulary, convention, precedes)
            passages.append(Passage(text, [*(decoder.push(token) for token in text), decoder.flush()]))
        made.append(passages)
    texts = [text.ids for _, *pair in made for text in pair]
    found = copies(texts, training, lambda done, total: progress("looking for copies", done, total))
    samples = []
    for number, (position, (context, generation, reference)) in enumerate(zip(positions, made, strict=True)):
        of_generation = _measures(context, generation, found[2 * number], vocabulary)
        of_reference = _measures(context, reference, found[2 * number + 1], vocabulary)
        sample = Sample(position, plan.seed + number, context, generation, reference, of_generation, of_reference)
        samples.append(sample)
    return samples


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

    shared = {kind: [text.mentions[kind] for text in measures] for kind in KINDS}
    return {
        "repeated": {n: share([text.repeated[n] for text in measures]) for n in measures[0].repeated},
        "novel": {n: share([text.novel[n] for text in measures]) for n in measures[0].novel},
        "longest_copy": max(text.longest_copy[1] for text in measures),
        "mean_copy": float(np.concatenate([text.copies for text in measures]).mean()),
        "taken_up": {kind: share([(n.taken_up, n.in_context) for n in found]) for kind, found in shared.items()},
        "known": {kind: share([(n.known, n.in_continuation) for n in found]) for kind, found in shared.items()},
    }
