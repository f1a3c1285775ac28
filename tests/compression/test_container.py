"""Records of a compressed file: damage at any place is reported before any wrong text is returned."""

from __future__ import annotations

import io

import pytest

from txl.compression.container import ContainerReader, ContainerWriter, digest
from txl.errors import UserError

TEXTS = [b"first", b"", b"the third block"]


def records() -> list[bytes]:
    writer = ContainerWriter()
    made = [writer.header({"lanes": 3, "name": "x" * 40})]
    made += [writer.block(text, len(text), bytes(reversed(text)) * 2) for text in TEXTS]
    return [*made, writer.end()]


def read(data: bytes) -> list[bytes]:
    """Return the texts of the blocks; each payload is the text backwards, twice.

    If the reader refuses the data, the error's `given` holds the texts before the damage.
    """
    reader, given = ContainerReader(io.BytesIO(data), "FILE"), []
    try:
        reader.header()
        for block in reader.blocks(1000):
            text = bytes(reversed(block.payload[: block.n_bytes]))
            assert digest(text) == block.digest
            given.append(text)
            reader.decoded(text)
    except UserError as error:
        error.given = given  # pyright: ignore[reportAttributeAccessIssue]
        raise
    return given


def assert_refused(data: bytes, match: str | None = None) -> None:
    with pytest.raises(UserError, match=match) as error:
        read(data)
    given = error.value.given  # pyright: ignore[reportAttributeAccessIssue]
    assert given == TEXTS[: len(given)]


def test_what_was_written_comes_back():
    assert read(b"".join(records())) == TEXTS


def test_every_flipped_bit_is_told():
    data = b"".join(records())
    for place in range(len(data)):
        for bit in range(8):
            assert_refused(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])


def test_every_cut_is_told():
    data = b"".join(records())
    for length in range(len(data)):
        assert_refused(data[:length], "cut off|not a file of txl")


def test_blocks_that_are_lost_doubled_or_swapped_are_told():
    header, first, second, third, end = records()
    for some in ([first, third], [first, first, second, third], [second, first, third], [first, second]):
        assert_refused(b"".join([header, *some, end]), "damaged")
    assert_refused(b"".join([header, first, second, third]), "cut off")
    assert_refused(b"".join([header, first, second, third, end, b"\0"]), "after its end")


def test_another_file_and_another_version():
    assert_refused(b"", "not a file of txl")
    assert_refused(b"plain text, long enough", "not a file of txl")
    data = b"".join(records())
    assert_refused(data[:8] + b"\x03\0" + data[10:], "format 3; this version of txl reads format 2")


def test_the_end_counts_the_text_that_was_decoded():
    reader = ContainerReader(io.BytesIO(b"".join(records())), "FILE")
    reader.header()
    with pytest.raises(UserError, match="damaged"):
        for _ in reader.blocks(1000):
            reader.decoded(b"something else")


def test_a_block_larger_than_the_header_says_is_not_read():
    reader = ContainerReader(io.BytesIO(b"".join(records())), "FILE")
    reader.header()
    with pytest.raises(UserError, match="damaged"):
        next(reader.blocks(4))
