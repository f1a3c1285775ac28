"""Make a corpus without long-term dependency of another: its sentences, one a line, in random order.

One Billion Word is such a corpus. Tables 4 and 7 are about it; in this form others can stand for it.
"""

from __future__ import annotations

import re
from pathlib import Path

from txl.data.corpora import Corpus
from txl.data.streams import shuffled
from txl.errors import UserError
from txl.files import write_whole

_TOKEN_ENDS = re.compile(r"(?<=\s[.!?])[^\S\n]+(?![\"')])|\n")
"""Lines, and what follows a full stop that is a token of its own; a quotation's closing mark stays with it."""
_WORD_ENDS = re.compile(r"(?<=[.!?])\s+|\n")
_LINES = re.compile(r"\n")
_SENTENCE_LINES = ("ptb",)
"""Corpora of one sentence a line, whose full stops are those of abbreviations."""
SEED = 1


def shuffled_sentences(corpus: Corpus, folder: Path) -> Path:
    """Write a corpus's splits as text files of sentences in random order, each split in itself.

    Args:
        corpus: of any unit; words that its vocabulary lacks are written as <unk>.
        folder: gets train.txt, valid.txt and test.txt; files that are there are kept.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        path = folder / f"{split}.txt"
        if path.exists():
            continue
        text = corpus.vocabulary.decode(corpus.tokens(split)[:].tolist())
        sentences = [sentence for part in _ends(corpus, text).split(text) if (sentence := part.strip())]
        if not sentences:
            raise UserError(f"the {split} split of {corpus.name} has no sentence to put in order")
        order = shuffled(len(sentences), SEED, 0).tolist()
        write_whole(path, "".join(f"{sentences[place]}\n" for place in order))
    return folder


def _ends(corpus: Corpus, text: str) -> re.Pattern[str]:
    """Return the pattern of sentence ends; in tokenised text an abbreviation's full stop is part of its word."""
    if corpus.name in _SENTENCE_LINES:
        return _LINES
    return _TOKEN_ENDS if re.search(r"\s[.!?]\s", text) else _WORD_ENDS
