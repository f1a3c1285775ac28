"""Compressed texts: all of the content or a refusal, whatever happened to the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import struct
import tarfile
import zipfile
import zlib

import pytest
import zstandard

from txl.data import compressed
from txl.data.compressed import COMPRESSED, open_file, unpack
from txl.errors import UserError

ONE, TWO = b"The river ran by the mill.\n" * 4, b"It turned the wheel.\n" * 3


def _zstd(content: bytes, checksum: bool = True, **parameters: int) -> bytes:
    settings = zstandard.ZstdCompressionParameters.from_level(3, write_checksum=checksum, **parameters)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    return stream.compress(content) + stream.flush()


STREAM = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": _zstd}
SKIPPED = struct.pack("<II", 0x184D2A50, 12) + b"not the text"
"""A frame of a .zst file that readers leave out; it has no checksum."""


def read(path, data: bytes) -> bytes | None:
    """Return the content of a file with these bytes; None if it is refused, in one line that names the file."""
    path.write_bytes(data)
    try:
        with open_file(path) as file:
            return file.read()
    except UserError as error:
        refused = str(error)
    assert str(path) in refused
    assert "\n" not in refused
    return None


@pytest.fixture
def notes(monkeypatch):
    """Return the list of paths for which a missing checksum was noted."""
    noted = []
    monkeypatch.setattr(compressed, "_note_unchecked", noted.append)
    return noted


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_damaged_file_is_refused_never_read_short(ending, tmp_path, notes):
    """Each byte of a file of three streams is changed in three ways, of which one changes a single bit."""
    path, make = tmp_path / f"a.txt{ending}", STREAM[ending]
    padding = {".gz": b"\0" * 5, ".xz": b"\0" * 8}.get(ending, b"")
    data = make(ONE) + padding + make(TWO) + make(ONE) + padding
    whole = ONE + TWO + ONE
    assert read(path, data) == whole
    assert notes == []
    refused = 0
    for place in range(len(data)):
        for change in (1 << place % 8, 0xFF, data[place]):
            damaged = bytearray(data)
            damaged[place] ^= change
            content = read(path, bytes(damaged))
            assert content in (whole, None) or notes, f"byte {place} ^ {change:02x}: {len(content or b'')} bytes"
            refused += content is None
            notes.clear()
    assert refused > 2 * len(data)


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_truncated_file_is_refused_unless_it_ends_between_streams(ending, tmp_path):
    path, make = tmp_path / f"a.txt{ending}", STREAM[ending]
    first, second = make(ONE), make(TWO)
    for length in range(len(first + second)):
        expected = ONE if length == len(first) else None
        assert read(path, (first + second)[:length]) == expected, length
    with pytest.raises(UserError, match="cannot be read .*it may be incomplete"), open_file(path) as file:
        file.read()


@pytest.mark.parametrize("ending", COMPRESSED)
@pytest.mark.parametrize("garbage", [b"x", b"garbage\n" * 9, b"\0\0\0x", b"\x1f", b"\xfd7zXZ", b"BZ", b"\x28\xb5\x2f"])
def test_what_follows_the_last_stream_is_refused(ending, garbage, tmp_path):
    path = tmp_path / f"a.txt{ending}"
    assert read(path, STREAM[ending](ONE) + garbage) is None


@pytest.mark.parametrize("ending", [".gz", ".xz"])
@pytest.mark.parametrize("zeros", [1, 2, 3, 4, 8, 1020, 1024, 1028, 4095, 5000])
def test_padding_between_and_behind_streams_is_left_out(ending, zeros, tmp_path):
    path, make = tmp_path / f"a.txt{ending}", STREAM[ending]
    is_padding = ending == ".gz" or zeros % 4 == 0
    assert read(path, make(ONE) + bytes(zeros) + make(TWO)) == (ONE + TWO if is_padding else None)
    assert read(path, make(ONE) + bytes(zeros)) == (ONE if is_padding else None)
    assert read(path, bytes(4) + make(ONE)) is None, "padding follows a stream"


def test_streams_that_end_anywhere_in_a_block_are_read(tmp_path, monkeypatch):
    for ending in COMPRESSED:
        data = STREAM[ending](ONE) + STREAM[ending](b"") + STREAM[ending](TWO)
        for size in (*range(1, 60), len(data)):
            monkeypatch.setattr(compressed, "_COMPRESSED_BLOCK", size)
            assert read(tmp_path / f"a{ending}", data) == ONE + TWO, (ending, size)


@pytest.mark.parametrize(
    ("ending", "data"),
    [
        (".xz", lzma.compress(ONE, check=lzma.CHECK_NONE)),
        (".xz", lzma.compress(TWO) + lzma.compress(ONE, check=lzma.CHECK_NONE)),
        (".zst", _zstd(ONE, checksum=False)),
        (".zst", _zstd(TWO) + _zstd(ONE, checksum=False)),
        (".zst", SKIPPED + _zstd(ONE)),
    ],
)
def test_content_without_a_checksum_is_noted_once(ending, data, tmp_path, caplog):
    path = tmp_path / f"a.txt{ending}"
    for _ in range(2):
        content = read(path, data)
        assert content is not None
        assert content.endswith(ONE)
    assert caplog.messages == [f"note: {path} has no checksum of all its content; damage may go unnoticed"]


@pytest.mark.parametrize("window_log", [27, 28, 30, 31])
def test_a_long_window_of_zstandard_is_read(window_log, tmp_path):
    content = ONE * 20_000
    assert read(tmp_path / "a.zst", _zstd(content, window_log=window_log, enable_ldm=True)) == content


def test_what_is_not_compressed_as_its_name_says_is_refused(tmp_path):
    samples: list = [b"%d: the same words once more\n" % number for number in range(3000)]
    with_dictionary = zstandard.ZstdCompressor(dict_data=zstandard.train_dictionary(1000, samples))
    assert read(tmp_path / "dictionary.zst", with_dictionary.compress(ONE)) is None
    for ending in COMPRESSED:
        assert read(tmp_path / f"plain{ending}", ONE) is None


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])  # bzip2 compresses at most 900,000 bytes at once
def test_text_that_repeats_itself_is_decompressed_in_parts(ending, tmp_path):
    path = tmp_path / f"line{ending}"
    content = b"the same line once more\n" * 2_000_000
    path.write_bytes(STREAM[ending](content))
    largest = 0
    with open_file(path) as file:
        assert isinstance(file, io.BufferedReader)
        read = checksum = 0
        while block := file.read(1 << 16):
            largest = max(largest, len(file.raw._ready))  # pyright: ignore[reportAttributeAccessIssue]
            checksum = zlib.crc32(block, checksum)
            read += len(block)
    assert (read, checksum) == (len(content), zlib.crc32(content))
    assert largest < len(content) / 3


@pytest.mark.parametrize("comment", [b"", b"a comment"])
@pytest.mark.parametrize("behind", [b"", b"\0" * 30, b"more"])
def test_a_zip_archive_may_have_a_comment_and_more_behind_its_end(behind, comment, tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train.txt", ONE)
        archive.comment = comment
    path.write_bytes(path.read_bytes() + behind)
    unpack(path, tmp_path, lambda name: True)
    assert (tmp_path / "train.txt").read_bytes() == ONE


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tgz", "tar.xz", "tar.bz2", "zip"])
def test_a_damaged_archive_is_refused_or_its_files_are_whole(kind, tmp_path):
    """A plain .tar file has no checksum of its members' content."""
    members = {"ptb/train.txt": ONE, "ptb/valid.txt": TWO, "ptb/test.txt": ONE + TWO}
    path = tmp_path / f"a.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
    else:
        mode = {"tar": "w", "tgz": "w:gz"}.get(kind, f"w:{kind[4:]}")
        with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    data = path.read_bytes()
    places = range(len(data))
    if kind == "tar":  # a member's header of 512 bytes precedes its content, which fills one block
        places = [place for place in range(0, 6 * 512, 3) if place % 1024 < 512]
    refused = 0
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        folder = tmp_path / "unpacked"
        folder.mkdir()
        try:
            unpack(path, folder, lambda name: True)
            found = {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}
            assert found == members, place
        except UserError as error:
            refused += str(path) in str(error)
        shutil.rmtree(folder)
    assert refused > len(places) / 8
