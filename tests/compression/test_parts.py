"""The parts of compression alone: arithmetic coding, records of a file, counts, and symbols of a vocabulary."""

from __future__ import annotations

import io
import math
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import normalizers

from txl.compression.codec import Symbols
from txl.compression.coder import TOTAL, Frequencies, Literals, RangeDecoder, RangeEncoder
from txl.compression.container import ContainerReader, ContainerWriter, digest
from txl.compression.counts import DISTRIBUTIONS, MATCH, ORDERS, Counts
from txl.data.bpe import BpeVocabulary
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import CommandFailed, UserError


def spans(seed: int, n: int) -> list[tuple[int, int, int]]:
    """Return start, size and total of random symbols: likely and least likely ones, at both ends of the range."""
    draw = random.Random(seed)
    found = []
    for _ in range(n):
        total = draw.choice([2, 3, 257, 1 << 16, TOTAL, TOTAL + 12345])
        size = draw.choice([1, 1, draw.randint(1, total - 1), total - 1])
        found.append((draw.choice([0, total - size, draw.randint(0, total - size)]), size, total))
    return found


# Always the last part of the range, so its low end comes as near to the upper end as possible: a carry runs far.
FULL = [(TOTAL - 1, 1, TOTAL)] * 40 + [(1, 1, 2)] * 100 + [(0, 1, TOTAL)] * 3


@pytest.mark.parametrize("symbols", [spans(1, 3000), spans(2, 3000), FULL, [], [(0, 2, 2)] * 1000])
def test_symbols_come_back_in_as_many_bits_as_their_probabilities_say(symbols):
    encoder = RangeEncoder()
    for start, size, total in symbols:
        encoder.encode(start, size, total)
    data = encoder.finish()
    decoder = RangeDecoder(data)
    for start, size, total in symbols:
        assert start <= decoder.find(total) < start + size
        decoder.take(start, size)
    bits = sum(math.log2(total / size) for _, size, total in symbols)
    assert 8 * len(data) <= bits * (1 + 1e-6) + 16 * (bits > 0)
    assert symbols is FULL or 8 * len(data) >= bits - 8  # trailing zeros are not written


def test_frequencies_are_the_probabilities_and_never_zero():
    log_probs = torch.tensor([[0.0, -1e9, -math.inf], [math.log(0.5), math.log(0.25), math.log(0.25)]])
    cumulative = Frequencies(None).cumulative(log_probs)
    sizes = cumulative[:, 1:] - cumulative[:, :-1]
    assert sizes[0].tolist() == [TOTAL - 3 + 1, 1, 1]
    assert (sizes[1] / TOTAL).tolist() == pytest.approx([0.5, 0.25, 0.25], abs=1e-8)
    assert cumulative[:, -1].max() <= TOTAL + 3
    for bad in (math.nan, math.inf):
        with pytest.raises(CommandFailed, match="not finite"):
            Frequencies(None).cumulative(torch.tensor([[bad, 0.0]]))


@pytest.mark.parametrize("escape", [1, 3])  # a token of the vocabulary, or an additional symbol
def test_an_escape_that_is_never_needed_costs_a_few_bits_and_one_that_is_always_needed_too(escape):
    log_probs = torch.full((1, 3), 1 / 3).log()

    def cost(symbols: list[int]) -> float:
        frequencies, bits = Frequencies(escape), 0.0
        for symbol in symbols:
            row = frequencies.cumulative(log_probs)[0]
            bits -= math.log2((row[symbol + 1] - row[symbol]) / row[-1])
            frequencies.count([symbol])
        return bits

    assert cost([0] * 2000) < 2000 * math.log2(3) + 8
    assert cost([escape] * 2000) < 8


def test_literals_come_back_and_adapt():
    text = b"abracadabra" * 500
    encoder, literals = RangeEncoder(), Literals()
    for value in text:
        literals.encode(encoder, value)
    data = encoder.finish()
    decoder, literals = RangeDecoder(data), Literals()
    assert bytes(literals.decode(decoder) for _ in text) == text
    assert 8 * len(data) < 2.2 * len(text)  # the entropy of order 0 is 2.04 bits


TEXTS = [b"first", b"", b"the third block"]


def records() -> list[bytes]:
    writer = ContainerWriter()
    made = [writer.header({"lanes": 3, "name": "x" * 40})]
    made += [writer.block(text, len(text), bytes(reversed(text)) * 2) for text in TEXTS]
    return [*made, writer.end()]


def read(data: bytes, most: int = 1000) -> tuple[list[bytes], str]:
    """Return the texts of the blocks (each payload is the text backwards, twice), and the error that ended them."""
    reader, given = ContainerReader(io.BytesIO(data), "FILE"), []
    try:
        reader.header()
        for block in reader.blocks(most):
            text = bytes(reversed(block.payload[: block.n_bytes]))
            assert digest(text) == block.digest
            given.append(text)
            reader.decoded(text)
    except UserError as error:
        assert given == TEXTS[: len(given)]
        return given, str(error)
    return given, ""


def test_damage_at_any_place_is_told_before_any_wrong_text():
    data = b"".join(records())
    assert read(data) == (TEXTS, "")
    for place in range(len(data)):
        for bit in range(8):
            assert read(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])[1]
        assert any(word in read(data[:place])[1] for word in ("cut off", "not a file of txl"))


def test_blocks_that_are_lost_doubled_or_swapped_are_told():
    header, first, second, third, end = records()
    for some in ([first, third], [first, first, second, third], [second, first, third], [first, second]):
        assert "damaged" in read(b"".join([header, *some, end]))[1]
    assert "cut off" in read(b"".join([header, first, second, third]))[1]
    assert "after its end" in read(b"".join([header, first, second, third, end, b"\0"]))[1]
    assert "damaged" in read(b"".join([header, first, end]), most=4)[1]


def test_another_file_and_another_version():
    assert "not a file of txl" in read(b"plain text, long enough")[1]
    data = b"".join(records())
    assert "format 3; this version of txl reads format 2" in read(data[:8] + b"\x03\0" + data[10:])[1]


def test_the_end_counts_the_text_that_was_decoded():
    reader = ContainerReader(io.BytesIO(b"".join(records())), "FILE")
    reader.header()
    with pytest.raises(UserError, match="damaged"):
        for _ in reader.blocks(1000):
            reader.decoded(b"something else")


SHELLS = b"She sells sea shells; the shells she sells are sea shells, I'm sure. So if she sells sea shells " * 2


def by_dictionaries(text: bytes) -> list[np.ndarray]:
    """Return the probabilities before every byte, each float64 [ORDERS,256], by slow code with dictionaries."""
    seen: dict[bytes, Counter[int]] = defaultdict(Counter)
    padded, found = bytes(ORDERS) + text, []
    for place, symbol in enumerate(text, start=ORDERS):
        below, rows = [1 / 256] * 256, []
        for order in range(ORDERS):
            counts = seen[padded[place - order : place]] if order else seen[b""]
            n, d = counts.total(), len(counts)
            if n:
                below = [(counts[value] + d * below[value]) / (n + d) for value in range(256)]
            rows.append(below)
            counts[symbol] += 1
        found.append(np.array(rows))
    return found


def test_distributions_of_growing_contexts_and_a_match_names_what_followed_the_last_time():
    counts, named = Counts(1), []
    for place, (symbol, expected) in enumerate(zip(SHELLS, by_dictionaries(SHELLS), strict=True)):
        found, met = counts.predict()
        np.testing.assert_allclose(found[0, :ORDERS], expected, rtol=1e-5)
        np.testing.assert_allclose(found.sum(axis=2), 1, rtol=1e-5)
        if met[0] >= DISTRIBUTIONS:
            named.append((place, int(found[0, ORDERS].argmax())))
        counts.read(np.array([symbol]))
    repeated = len(SHELLS) // 2 + MATCH
    assert [pair for pair in named if pair[0] >= repeated] == list(enumerate(SHELLS))[repeated:]


def test_counts_that_are_full_are_halved():
    counts = Counts(2)
    for _ in range(600):
        counts.read(np.array([97, 97]))
    found, _ = counts.predict()
    assert found[:, :ORDERS].sum(axis=2) == pytest.approx(1, abs=1e-5)
    assert found[0, 0, 97] > 0.98


def test_the_last_lane_s_text_goes_on_in_the_first():
    one, two = Counts(1), Counts(2)
    for symbol in SHELLS:
        one.read(np.array([symbol]))
    for pair in zip(SHELLS[: len(SHELLS) // 2], SHELLS[len(SHELLS) // 2 :], strict=True):
        two.read(np.array(pair))
    two.rotate()
    assert two.predict()[0][0, ORDERS - 1].argmax() == one.predict()[0][0, ORDERS - 1].argmax()


CAT = "the cat sat on the mat; the dog did not.\n" * 20
VOCABULARIES = {
    "bytes": ByteVocabulary(),
    "27 bytes": ByteVocabulary([32, *range(97, 123)]),
    "characters": CharVocabulary(sorted(set(CAT) | {"é"})),
    "characters without <unk>": CharVocabulary(sorted(set(CAT)), unknown=False),
    "byte pairs": BpeVocabulary.train([CAT], 300),
}
FILES = {
    "empty": b"",
    "one byte": b"\0",
    "text": CAT.encode(),
    "all bytes": bytes(range(256)) * 3,
    "random": random.Random(1).randbytes(3000),
    "a program": Path(sys.executable).read_bytes()[:3000],
    "other scripts": "Привет, 世界! שלום ก็ 👩‍👩‍👧 é é".encode() * 5,
    "cut characters": "世界".encode()[1:-1],
    "surrogates": b"\xed\xa0\x80\xed\xb2\x80 a \xed\xb0\x80",
    "line ends": b"a\r\nb\rc\n\n \t d\n",
    "nul": b"a\0b\0\0",
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_every_file_comes_back_and_what_the_vocabulary_has_is_its_tokens(vocabulary):
    symbols = Symbols(vocabulary)
    for data in FILES.values():
        found, literals = symbols.encode(data)
        assert symbols.decode(found, literals) == data
        assert len(literals) == (found == symbols.escape).sum()
        tokens = symbols.read(found)
        assert tokens.min(initial=0) >= 0
        assert tokens.max(initial=0) < len(vocabulary)
    text = CAT.replace(";", "").replace(".", "").replace("\n", " ") if len(vocabulary) == 27 else CAT
    found, literals = symbols.encode(text.encode())
    assert found.tolist() == vocabulary.encode(text).tolist()
    assert literals == b""


def test_a_tokenizer_that_normalises_is_not_believed_and_words_are_refused():
    vocabulary = BpeVocabulary.train([CAT], 300)
    vocabulary.tokenizer.normalizer = normalizers.Lowercase()
    symbols = Symbols(vocabulary)
    assert symbols.decode(*symbols.encode(b"The Cat")) == b"The Cat"
    with pytest.raises(UserError, match="white space"):
        Symbols(WordVocabulary(["<eos>", "<unk>", "a"]))
