"""Contexts of a split, continued by a model, beside what follows there (Appendix E), with measures of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from txl.analysis.consistency import KINDS, Shared, shared_mentions
from txl.analysis.contexts import draw_contexts
from txl.analysis.novelty import Copies, copies
from txl.analysis.repetition import repeated_ngrams
from txl.data.detokenise import Convention, text_decoder
from txl.data.vocabulary import Vocabulary
from txl.generation import Sampling, generate_tokens, undrawable
from txl.models.language_model import LanguageModel

REPEATED = (2, 3, 4)
"""Words of the n-grams whose repetition is measured."""
NOVEL = {"word": (2, 3, 4, 6, 8), "bpe": (2, 4, 8, 12, 16), "char": (5, 10, 20, 30, 40), "byte": (5, 10, 20, 30, 40)}
"""Tokens of the n-grams that are looked for in the training text."""


@dataclass(frozen=True)
class Text:
    """A context, a continuation or a reference."""

    ids: list[int]
    pieces: list[str]
    """What each token adds to the text, and at the end what was left incomplete."""

    @property
    def text(self) -> str:
        """All of it, as it is to be read."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Measures:
    """What can be counted of one text. A pair is a number of hits and the number of what was looked at."""

    repeated: dict[int, tuple[int, int]]
    """For each n: n-grams of words that have occurred before in the text."""
    novel: dict[int, tuple[int, int]]
    """For each n: n-grams of tokens that the training text lacks."""
    longest_copy: tuple[int, int]
    """Position in the text and tokens of the longest span that stands in the training text."""
    copied_from: int
    """Where in the training text that is; -1 if nothing is copied."""
    copies: list[int]
    """For each token, how many from it on stand in the training text."""
    mentions: dict[str, Shared]
    """For headings, names, dates and years, what of the context is taken up."""


@dataclass(frozen=True)
class Sample:
    """One context, what a model makes of it, and what follows it in the corpus."""

    position: int
    """Of the context's first token in the split."""
    seed: int
    context: Text
    generation: Text
    reference: Text
    generation_measures: Measures
    reference_measures: Measures

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: texts, token ids, measures."""

        def both(text: Text, measures: Measures) -> dict[str, Any]:
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
    """Which contexts, and how they are continued."""

    count: int = 3
    context: int = 512
    """Tokens of a context."""
    max_tokens: int = 500
    """Tokens of a continuation; 500 in the paper."""
    seed: int = 0
    """Of the contexts; sample i is drawn with seed + i."""
    sampling: Sampling = field(default_factory=Sampling)
    lengths: dict[str, Any] = field(default_factory=dict)
    """`mem_len`, `window`, `clamp_len`, as in `LanguageModel.init_state`."""


def make_samples(
    model: LanguageModel[Any],
    vocabulary: Vocabulary,
    tokens: Any,
    training: Any,
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

    Raises:
        UserError: if the split is too short, or a setting makes no sense.
    """
    length = plan.context + plan.max_tokens
    positions = draw_contexts(tokens, vocabulary, count=plan.count, length=length, seed=plan.seed)
    triples: list[tuple[Text, Text, Text]] = []
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
            **plan.lengths,
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


def _text(ids: Sequence[int], vocabulary: Vocabulary, convention: Convention | None, before: str) -> Text:
    decoder = text_decoder(vocabulary, convention, before)
    pieces = [decoder.push(token) for token in ids]
    return Text(list(ids), [*pieces, decoder.flush()])


def _measures(context: Text, text: Text, copied: Copies, vocabulary: Vocabulary) -> Measures:
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


def pooled(measures: Sequence[Measures]) -> dict[str, Any]:
    """The measures of several texts together, as plain JSON values.

    A share is the sum of the texts' counts divided by the sum of what was looked at, and None where that is 0.
    """

    def share(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
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
