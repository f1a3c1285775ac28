"""Conversion of any bytes to the symbols of any vocabulary, and back."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from tokenizers import normalizers

from txl.compression.codec import Symbols
from txl.data.bpe import BpeVocabulary
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError

TEXT = "the cat sat on the mat; the dog did not.\n" * 20


def vocabularies() -> dict[str, object]:
    return {
        "bytes": ByteVocabulary(),
        "27 bytes": ByteVocabulary([32, *range(97, 123)]),
        "characters": CharVocabulary(sorted(set(TEXT) | {"é"})),
        "characters without <unk>": CharVocabulary(sorted(set(TEXT)), unknown=False),
        "byte pairs": BpeVocabulary.train([TEXT], 300),
    }


FILES = {
    "empty": b"",
    "one byte": b"\0",
    "text": TEXT.encode(),
    "all bytes": bytes(range(256)) * 3,
    "random": random.Random(1).randbytes(3000),
    "a program": Path(sys.executable).read_bytes()[:3000],
    "other scripts": "Привет, 世界! שלום ก็ 👩‍👩‍👧 é é".encode() * 5,
    "cut characters": "世界".encode()[1:-1],
    "surrogates": b"\xed\xa0\x80\xed\xb2\x80 a \xed\xb0\x80",
    "line ends": b"a\r\nb\rc\n\n \t d\n",
    "nul": b"a\0b\0\0",
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
@pytest.mark.parametrize("vocabulary", vocabularies().values(), ids=vocabularies())
def test_every_file_comes_back(vocabulary, data):
    symbols = Symbols(vocabulary)
    found, literals = symbols.encode(data)
    assert symbols.decode(found, literals) == data
    assert len(literals) == (found == symbols.escape).sum()
    read = symbols.read(found)
    assert read.min(initial=0) >= 0
    assert read.max(initial=0) < len(vocabulary)


def test_what_the_vocabulary_has_is_its_tokens():
    for name, vocabulary in vocabularies().items():
        text = TEXT.replace(";", "").replace(".", "").replace("\n", " ") if name == "27 bytes" else TEXT
        found, literals = Symbols(vocabulary).encode(text.encode())  # pyright: ignore[reportArgumentType]
        assert found.tolist() == vocabulary.encode(text).tolist()  # pyright: ignore[reportAttributeAccessIssue]
        assert literals == b""


def test_a_tokenizer_that_normalises_is_not_believed():
    vocabulary = BpeVocabulary.train([TEXT], 300)
    vocabulary.tokenizer.normalizer = normalizers.Lowercase()
    symbols = Symbols(vocabulary)
    found, literals = symbols.encode(b"The Cat")
    assert symbols.decode(found, literals) == b"The Cat"


def test_words_are_refused():
    with pytest.raises(UserError, match="white space"):
        Symbols(WordVocabulary(["<eos>", "<unk>", "a"]))
