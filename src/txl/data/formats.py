"""Files that are no UTF-8 text: formats told by their first bytes, and what a user can do about them."""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from txl.data.compressed import BLOCK, COMPRESSED, TOOLS, open_file
from txl.errors import UserError

RAW = ".bin"  # ending of the names of files that are read in bytes whatever they hold
_TEXT = f"give a text (or, to model its bytes as they are, let its name end in {RAW}, and use the unit byte)"
_DECOMPRESS = f"decompress it, or give it the ending that it should have ({', '.join(COMPRESSED)})"
# Formats that are no text: first bytes as a regular expression, name, and what to do (or the encoding to convert from).
# Text may begin with the letters of some of them, so a file that is UTF-8 without NUL bytes has none of them.
_FORMATS = {
    rb"\x1f\x8b": ("gzip data", _DECOMPRESS),
    rb"BZh[1-9]1AY": ("bzip2 data", _DECOMPRESS),
    rb"\xfd7zXZ\0": ("xz data", _DECOMPRESS),
    rb"(\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)": ("zstd data", _DECOMPRESS),
    rb"\x04\x22\x4d\x18": ("lz4 data", "decompress it"),
    rb"(7z\xbc\xaf|Rar!\x1a|.{257}ustar)": ("an archive (7z, RAR or tar)", "unpack it"),
    rb"PK(\x03\x04|\x05\x06)": ("a ZIP file (.docx, .xlsx, .epub, .npz and .pt too)", "unpack it, or save it as text"),
    rb"%PDF-": ("a PDF", "pdftotext makes a text of it"),
    rb"\xd0\xcf\x11\xe0": ("an old Office document", "save it as text"),
    rb"(\xff\xfe\0\0|\0\0\xfe\xff)": ("UTF-32", "UTF-32"),
    rb"(\xff\xfe|\xfe\xff)": ("UTF-16", "UTF-16"),
    rb"([\t\n\r -~]\0){8}": ("UTF-16", "UTF-16LE"),  # without its mark
    rb"(\0[\t\n\r -~]){8}": ("UTF-16", "UTF-16BE"),
    rb"(\x93NUMPY|PAR1|ARROW1|\x89HDF|SQLite format 3\0|\x80[\x02-\x05]|.{6}\0\0\{\"|GGUF)": (
        "binary data (NumPy, Parquet, Arrow, HDF5, SQLite, pickle, safetensors or GGUF)",
        _TEXT,
    ),
    rb"(\x89PNG|\xff\xd8\xff|GIF8|RIFF....(WEBP|WAVE|AVI)|ID3|OggS|fLaC|MThd|....ftyp|\x1a\x45\xdf\xa3)": (
        "a recording (an image, sound, music or a video)",
        _TEXT,
    ),
}


def refuse_format(path: Path, head: bytes) -> None:
    """Refuse (decompressed) content that begins like a format that is no text, unless the file's name ends in .bin."""
    if without_compression(path).suffix == RAW:
        return
    for begin, (what, remedy) in _FORMATS.items():
        if re.match(begin, head, re.DOTALL) and first_bad_byte(head) is not None:
            if not path.is_file():  # standard input or a pipe
                remedy = "give UTF-8 text"
            elif remedy.startswith("UTF"):
                remedy = f"convert it: {_conversion(path, remedy)}"
            raise UserError(f"{path}: {what}, not UTF-8 text", remedy=remedy)


def refuse_formats(paths: Iterable[Path]) -> None:
    """Refuse files whose content begins like one of the formats that are no text."""
    for path in paths:
        refuse_format(path, _head(path))


def reading_note(paths: Iterable[Path], unit: str) -> str | None:
    """Return a note on the first file that is probably not read as its owner means; None if there is none.

    These are JSON lines, and in the unit byte text in an encoding other than UTF-8. Only the first megabyte is read.
    """
    for path in paths:
        head = _head(path)
        if unit == "byte" and without_compression(path).suffix != RAW and (bad := first_bad_byte(head)) is not None:
            what = f"is not UTF-8 (byte 0x{head[bad]:02X} at offset {bad})"
            return f"{path} {what}: its bytes are read as they are; a text is converted by {_conversion(path)}"
        with suppress(ValueError, RecursionError):
            if head.startswith(b"{") and isinstance(json.loads(head.partition(b"\n")[0]), dict):
                return f"{path} holds JSON, which is read as it is; jq -r .text writes one field alone"
    return None


def first_bad_byte(head: bytes) -> int | None:
    """Return the offset of the first byte that is NUL or not UTF-8; the last character may be incomplete."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        end = len(head)
    except UnicodeDecodeError as error:
        end = error.start
    zero = head.find(b"\0", 0, end)
    return zero if zero >= 0 else end if end < len(head) else None


def bad_byte(path: Path, offset: int, value: int) -> UserError:
    """Return the error for a file's first byte that is NUL or not UTF-8, with its line and a command that helps."""
    what = f"not UTF-8 (byte 0x{value:02X} at offset {offset}" if value else f"binary (a NUL byte at offset {offset}"
    if not path.is_file():  # standard input, or a pipe, which cannot be read again
        return UserError(f"{path}: {what})", remedy="convert it to UTF-8: only the unit byte reads other files")
    with open_file(path) as file:
        left, line = offset, 1
        while left > 0 and (block := file.read(min(BLOCK, left))):
            left, line = left - len(block), line + block.count(b"\n")
    # An ASCII character of UTF-16 without a mark has a NUL byte.
    encoding = "LATIN1" if value else "UTF-16LE" if offset % 2 else "UTF-16BE"
    remedy = f"convert it, if it is {encoding}: {_conversion(path, encoding)} (only the unit byte reads other files)"
    return UserError(f"{path}: {what}, line {line:,})", remedy=remedy)


def without_compression(path: Path) -> Path:
    """Return a path without the ending of a compressed file."""
    return path.with_suffix("") if path.suffix in TOOLS else path


def _conversion(path: Path, encoding: str = "LATIN1") -> str:
    """Return a shell's command that converts a file to UTF-8, into a new file."""
    plain = without_compression(path)
    read = "cat" if plain == path else f"{TOOLS[path.suffix]} -dc"
    new = plain.with_name(f"{plain.stem}.utf8{plain.suffix}")
    return f"{read} {shlex.quote(str(path))} | iconv -f {encoding} -t UTF-8 > {shlex.quote(str(new))}"


def _head(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(BLOCK)
