"""Make a corpus without long-term dependency from another corpus: its sentences in random order, one per line.

One Billion Word, the corpus of Tables 4 and 7, is of this form. Another corpus in this form can replace it.
"""

from __future__ import annotations

import re
from pathlib import Path

from txl.data.corpora import Corpus
from txl.data.lanes import shuffled
from txl.errors import UserError
from txl.files import write_whole

# Line ends, and white space after a full stop that is a token; a closing quotation mark stays with its sentence
_TOKEN_ENDS = re.compile(r"(?<=\s[.!?])[^\S\n]+(?![\"')])|\n")
_WORD_ENDS = re.compile(r"(?<=[.!?])\s+|\n")
_LINES = re.compile(r"\n")
_SENTENCE_LINES = ("ptb",)  # corpora with one sentence per line, in which full stops only belong to abbreviations
SEED = 1


def shuffled_sentences(corpus: Corpus, folder: Path) -> Path:
    """Write each split of a corpus as a text file with the sentences of the split in random order.

    Args:
        corpus: corpus of any unit; words that its vocabulary lacks are written as <unk>.
        folder: folder for train.txt, valid.txt and test.txt; existing files are kept.

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
