"""Format of a compressed file: a header, blocks and an end, each with a checksum that also covers all earlier records.

    magic (8 bytes), version u16, length u32, header (deflated JSON), checksum u32
    a block: 1 (u8), bytes of text u32, symbols u32, bytes of payload u32, digest of the text (8 bytes), payload,
        checksum u32; 2 in place of 1 if the payload is the text itself
    the end: 0 (u8), bytes of all text u64, digest of all text (16 bytes), checksum u32

Numbers are little-endian. The header is a raw deflate stream with the preset dictionary `_USUAL`. A checksum is the
CRC-32 of its record, continued from the previous checksum, so that lost, repeated or swapped blocks are detected.
Digests are BLAKE2b of the text itself and detect that decoding returned a different text.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from txl.errors import UserError
from txl.files import JsonObject, parsed_json

MAGIC = b"\x89TXL\r\n\x1a\n"
VERSION = 2
MOST_BLOCK = 1 << 26  # bytes of text in a block
_LONGEST_HEADER = 1 << 16
# Typical header text, the preset dictionary of deflate. A change of this text requires a new format version.
_USUAL = (
    b'"online":{"beta1":0.9,"beta2":0.999,"clip":1.0,"counts":true,"eps":1e-08,"halved_after":0,"learning_rate":0.004,'
    b'"model":{"d_model":256,"family":"recurrent","n_layer":1},"seed":1,"segment":16,"warmup_steps":50,'
    b'"weights_factor":2.0},"probe":","statistics":"'
    b'"dynamic":{"adaptation":{"decay":0.0,"epsilon":2e-05,"learning_rate":0.03,"rule":"sgd","statistics":"mean",'
    b'"weights":"all"},"segment":128,"statistics_batch_size":1,"statistics_segments":500},'
    b'{"arithmetic":{"build":"","library":"","processor":"","torch":"2.13.0+cpu","txl":"0.2.0.dev0"},"block":262144,'
    b'"block":524288,"lanes":1,"lengths":{"clamp_len":null,"mem_len":128,"window":128},"model":"","probe":"'
)
_END_KIND, _CODED, _STORED = 0, 1, 2
_HEADER = struct.Struct("<8sHI")
_BLOCK = struct.Struct("<BIII8s")
_END = struct.Struct("<BQ16s")


@dataclass(frozen=True)
class Block:
    """A block of text in its coded or stored form."""

    n_bytes: int
    n_symbols: int
    digest: bytes
    payload: bytes
    stored: bool  # the payload is the text itself, because its code would have been longer


def digest(text: bytes) -> bytes:
    """Return the digest of a block's text."""
    return hashlib.blake2b(text, digest_size=8).digest()


class ContainerWriter:
    """Builder of the records of a file, each returned as bytes."""

    def __init__(self) -> None:
        self._checksum, self._n_bytes, self._digest = 0, 0, hashlib.blake2b(digest_size=16)

    def header(self, values: JsonObject) -> bytes:
        """Return the record of the header."""
        deflate = zlib.compressobj(9, wbits=-zlib.MAX_WBITS, zdict=_USUAL)
        packed = deflate.compress(json.dumps(values, separators=(",", ":"), sort_keys=True).encode()) + deflate.flush()
        return self._record(_HEADER.pack(MAGIC, VERSION, len(packed)) + packed)

    def block(self, text: bytes, n_symbols: int, payload: bytes) -> bytes:
        """Return the record of a block; its payload is the coded text, or the text itself."""
        self._n_bytes += len(text)
        self._digest.update(text)
        kind = _STORED if payload == text else _CODED
        return self._record(_BLOCK.pack(kind, len(text), n_symbols, len(payload), digest(text)) + payload)

    def end(self) -> bytes:
        """Return the record of the file's end."""
        return self._record(_END.pack(_END_KIND, self._n_bytes, self._digest.digest()))

    def _record(self, record: bytes) -> bytes:
        self._checksum = zlib.crc32(record, self._checksum)
        return record + struct.pack("<I", self._checksum)


class ContainerReader:
    """Reader of the records of a file that need not be seekable; UserErrors tell by its name that it is damaged."""

    def __init__(self, file: IO[bytes], name: str):
        self._file, self._name = file, name
        self._checksum, self._n_bytes, self._digest = 0, 0, hashlib.blake2b(digest_size=16)
        self.n_read = 0  # bytes read from the file

    def header(self) -> JsonObject:
        """Read and return the values of the header."""
        start = self._file.read(len(MAGIC))
        self.n_read += len(start)
        if start != MAGIC:
            raise UserError(f"{self._name} is not a file of txl compress, or its beginning is damaged")
        start += self._read(_HEADER.size - len(MAGIC))
        _, version, length = _HEADER.unpack(start)
        if version != VERSION:
            raise UserError(f"{self._name} has format {version}; this version of txl reads format {VERSION}")
        packed = self._rest(start, length, length <= _LONGEST_HEADER)
        try:
            text = zlib.decompressobj(-zlib.MAX_WBITS, _USUAL).decompress(packed, _LONGEST_HEADER)
            values = parsed_json(text.decode())
        except (zlib.error, ValueError):
            values = None
        if not isinstance(values, dict):
            raise self._damaged()
        return values

    def blocks(self, most: int) -> Iterator[Block]:
        """Yield the blocks, of at most `most` bytes, once checked; the end is compared with what `decoded` got."""
        while (kind := self._read(1)[0]) != _END_KIND:
            start = bytes([kind]) + self._read(_BLOCK.size - 1)
            _, n_bytes, n_symbols, length, digest = _BLOCK.unpack(start)
            is_possible = kind in (_CODED, _STORED) and n_symbols <= n_bytes <= most and length <= 16 * n_bytes + 64
            yield Block(n_bytes, n_symbols, digest, self._rest(start, length, is_possible), kind == _STORED)
        end = bytes([kind]) + self._read(_END.size - 1)
        self._rest(end, 0, end == _END.pack(_END_KIND, self._n_bytes, self._digest.digest()))
        if self._file.read(1):
            raise UserError(f"{self._name} has data after its end; expected one file that txl compress wrote")

    def decoded(self, text: bytes) -> None:
        """Add the decoded text of the block yielded last to the digest of all text."""
        self._n_bytes += len(text)
        self._digest.update(text)

    def _read(self, count: int) -> bytes:
        data = self._file.read(count)
        self.n_read += len(data)
        if len(data) < count:
            raise UserError(f"{self._name} is cut off: it has no end")
        return data

    def _rest(self, start: bytes, length: int, is_possible: bool) -> bytes:
        """Return the rest of a record before its checksum, which is compared, if the record's `start` is possible."""
        if not is_possible:
            raise self._damaged()
        rest = self._read(length)
        self._checksum = zlib.crc32(start + rest, self._checksum)
        if self._read(4) != struct.pack("<I", self._checksum):
            raise self._damaged()
        return rest

    def _damaged(self) -> UserError:
        return UserError(f"{self._name} is damaged: its first {self.n_read:,} bytes are not what was written")
