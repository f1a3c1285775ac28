"""Files that are no UTF-8 text: formats told by their first bytes, and what a user can do about them."""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from txl.data.compressed import BLOCK, TOOLS, open_file
from txl.errors import UserError

RAW = ".bin"
"""Ending of the names of files that are read in bytes whatever they hold."""
_UNPACK = "unpack it"
_GIVE_A_TEXT = f"give a text (or, to model its bytes as they are, let its name end in {RAW}, and use the unit byte)"
_FORMATS = {
    rb"\x1f\x8b": ("gzip data", "rename it to {path}.gz, which is decompressed"),
    rb"BZh[1-9]1AY": ("bzip2 data", "rename it to {path}.bz2, which is decompressed"),
    rb"\xfd7zXZ\0": ("xz data", "rename it to {path}.xz, which is decompressed"),
    rb"(\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)": ("zstd data", "rename it to {path}.zst, which is decompressed"),
    rb"\x04\x22\x4d\x18": ("lz4 data", "decompress it"),
    rb"7z\xbc\xaf": ("a 7z archive", _UNPACK),
    rb"Rar!\x1a": ("a RAR archive", _UNPACK),
    rb".{257}ustar": ("a tar archive", _UNPACK),
    rb"PK(\x03\x04|\x05\x06)": ("a ZIP file (.docx, .xlsx, .epub, .npz and .pt too)", "unpack it, or save it as text"),
    rb"%PDF-": ("a PDF", "pdftotext makes a text of it"),
    rb"\xd0\xcf\x11\xe0": ("an old Office document", "save it as text"),
    rb"(\xff\xfe\0\0|\0\0\xfe\xff)": ("UTF-32", "iconv -f UTF-32 -t UTF-8"),
    rb"(\xff\xfe|\xfe\xff)": ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    rb"([\t\n\r -~]\0){8}": ("UTF-16", "iconv -f UTF-16LE -t UTF-8"),  # without its mark
    rb"(\0[\t\n\r -~]){8}": ("UTF-16", "iconv -f UTF-16BE -t UTF-8"),
    rb"\x93NUMPY": ("a NumPy array", _GIVE_A_TEXT),
    rb"PAR1": ("Parquet data", _GIVE_A_TEXT),
    rb"ARROW1": ("Arrow data", _GIVE_A_TEXT),
    rb"\x89HDF": ("HDF5 data", _GIVE_A_TEXT),
    rb"SQLite format 3\0": ("an SQLite database", _GIVE_A_TEXT),
    rb"\x80[\x02-\x05]": ("a Python pickle (as an old .pt file is)", _GIVE_A_TEXT),
    rb".{6}\0\0\{\"": ("a safetensors file", _GIVE_A_TEXT),
    rb"GGUF": ("a GGUF file", _GIVE_A_TEXT),
    rb"MThd": ("a MIDI file", _GIVE_A_TEXT),
    rb"(\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP)": ("an image", _GIVE_A_TEXT),
    rb"(RIFF....WAVE|ID3|OggS|fLaC)": ("a sound recording", _GIVE_A_TEXT),
    rb"(RIFF....AVI|....ftyp|\x1a\x45\xdf\xa3)": ("a video", _GIVE_A_TEXT),
}
"""Formats that are no text: first bytes as a regular expression, name, and what to do. Text may begin with the letters
of some of them, so a file that is UTF-8 without NUL bytes has none of them."""


def refuse_format(path: Path, head: bytes) -> None:
    """Refuse content that begins like one of the formats that are no text, unless the file's name ends in .bin.

    Args:
        path: file, for its name and the message.
        head: beginning of its (decompressed) content.
    """
    if without_compression(path).suffix == RAW:
        return
    for begin, (what, remedy) in _FORMATS.items():
        if re.match(begin, head, re.DOTALL) and first_bad_byte(head) is not None:
            if remedy.startswith("iconv"):
                remedy = f"convert it: {_command(remedy, path)}"
            elif remedy.startswith("rename") and path.suffix in TOOLS:
                remedy = f"it is compressed twice: decompress it once ({TOOLS[path.suffix]} -d)"
            told = remedy.format(path=path) if path.is_file() else "give UTF-8 text"  # not for standard input or a pipe
            raise UserError(f"{path}: {what}, not UTF-8 text; {told}")


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
            return (
                f"{path} is not UTF-8 (byte 0x{head[bad]:02X} at offset {bad}): its bytes are read as they are; if it "
                f"is text in another encoding, convert it first: {_conversion(path, bad, head[bad])}"
            )
        if _is_json_object(head.partition(b"\n")[0]):
            return (
                f"{path} holds JSON, which is read as it is, with its braces, names and \\u escapes; to read one field "
                f"alone, such as text: {_command('jq -r .text', path)}"
            )
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
    """Return the error for a file's first byte that is NUL or not UTF-8, with its line and commands that help."""
    what = f"not UTF-8 (byte 0x{value:02X} at offset {offset}" if value else f"binary (a NUL byte at offset {offset}"
    if not path.is_file():  # standard input, or a pipe, which cannot be read again
        return UserError(f"{path}: {what}); convert it to UTF-8: only the unit byte reads other files")
    with open_file(path) as file:
        left, line = offset, 1
        while left > 0 and (block := file.read(min(BLOCK, left))):
            left, line = left - len(block), line + block.count(b"\n")
    without = _command("iconv -c -f UTF-8 -t UTF-8" if value else "tr -d '\\0'", path)
    encoding = "Latin-1 (iconv -l lists other encodings)" if value else "UTF-16"
    convert = f"if it is {encoding}, convert it ({_conversion(path, offset, value)})"
    remedy = f"{convert}, else leave out such bytes ({without}): only the unit byte reads other files"
    return UserError(f"{path}: {what}, line {line:,}); {remedy}")


def without_compression(path: Path) -> Path:
    """Return a path without the ending of a compressed file."""
    return path.with_suffix("") if path.suffix in TOOLS else path


def _conversion(path: Path, offset: int, value: int) -> str:
    """Return the command that converts a file whose first byte that is NUL or not UTF-8 is `value`, at `offset`."""
    utf16 = "UTF-16LE" if offset % 2 else "UTF-16BE"  # without its mark; a character of ASCII has a NUL byte
    return _command(f"iconv -f {'LATIN1' if value else utf16} -t UTF-8", path)


def _command(program: str, path: Path) -> str:
    """Return a shell's command that writes the content of a file through a program into a new file."""
    plain = without_compression(path)
    read = "cat" if plain == path else f"{TOOLS[path.suffix]} -dc"
    new = plain.with_name(f"{plain.stem}.utf8{plain.suffix}")
    return f"{read} {shlex.quote(str(path))} | {program} > {shlex.quote(str(new))}"


def _head(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(BLOCK)


def _is_json_object(line: bytes) -> bool:
    try:
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
