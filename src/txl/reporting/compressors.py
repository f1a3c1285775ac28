"""Sizes of a text under general-purpose compressors: the simplest baseline for a language model."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from txl.data.corpora import data_directory
from txl.data.prepared import Corpus, read_meta
from txl.errors import UserError
from txl.files import JsonObject
from txl.runs.events import CompressionEvent, Evaluation

# Settings of `compress`, logged with the sizes, so that sizes from other settings are not mistaken for these sizes.
SETTINGS = "zlib level 9, bzip2 level 9, xz preset 9e"
# Field of a `compression` event: bytes by which lzma's file grows if the text is appended to the training text.
LZMA_AFTER = "lzma_after_training_text"
# Dictionary size of xz preset 9 in bytes: the largest distance at which lzma finds repetitions.
_LARGEST_DICTIONARY = 64 * 2**20


def compressed_bits(sizes: CompressionEvent) -> dict[str, float]:
    """Return bits per byte of the text by compressor, and those of `LZMA_AFTER` if they were measured."""
    compressed = {"zlib": sizes["zlib"], "bz2": sizes["bz2"], "lzma": sizes["lzma"]}
    if (after := sizes.get(LZMA_AFTER)) is not None:
        compressed[LZMA_AFTER] = after
    return {name: 8 * size / sizes["text"] for name, size in compressed.items()}


def measured_sizes(
    result: Evaluation, n_bytes: int | None, data_dir: str | Path | None, after_training_text: bool
) -> JsonObject:
    """Compress the `n_bytes` of text that an evaluation read, and return the fields of a `compression` event.

    The text is looked up among the prepared corpora by its hash; no corpus is prepared or downloaded. With
    `after_training_text`, lzma is also measured with the text appended to the training text, if that is available.

    Raises:
        UserError: if the text is not there, or has another size.
    """
    folder, split = data_directory(data_dir), result["split"]
    if n_bytes is None:
        raise UserError("the size of the text that was scored is not known")
    corpus = None
    for path in sorted(folder.glob("*/meta.json")):
        with suppress(UserError):  # a corpus that is damaged, or of another version
            prepared = read_meta(path.parent)["splits"].get(split)
            if corpus is None and prepared is not None and prepared["sha256_text"] == result["sha256_text"]:
                corpus = Corpus(path.parent)
    if corpus is None:
        raise UserError(f"the text that was scored is not among the corpora in {folder}; `txl eval` puts it there")
    fields: JsonObject = {"corpus": result["corpus"], "split": split, "settings": SETTINGS}
    fields |= compress(corpus.text_bytes(split), n_bytes)
    if fields["text"] != n_bytes:
        raise UserError(f"the prepared {split} split has {fields['text']:,} bytes, {n_bytes:,} were scored")
    if after_training_text:
        with suppress(UserError):  # the training text is not there
            text = b"".join(corpus.text_bytes(split))[:n_bytes]
            fields[LZMA_AFTER] = lzma_after(corpus.text_bytes("train"), text)
    return fields


def compress(blocks: Iterable[bytes], limit: int | None = None) -> dict[str, int]:
    """Return the sizes in bytes of a text, or of its first `limit` bytes, and of its compressed forms.

    Memory use does not grow with the text beyond lzma's dictionary.
    """
    compressors = {
        "zlib": zlib.compressobj(level=9),
        "bz2": bz2.BZ2Compressor(9),
        "lzma": _xz(_LARGEST_DICTIONARY if limit is None else limit),
    }
    sizes = dict.fromkeys(("text", *compressors), 0)
    for block in blocks:
        if limit is not None:
            block = block[: limit - sizes["text"]]
        sizes["text"] += len(block)
        for name, compressor in compressors.items():
            sizes[name] += len(compressor.compress(block))
        if sizes["text"] == limit:
            break
    return sizes | {name: sizes[name] + len(compressor.flush()) for name, compressor in compressors.items()}


def lzma_after(before: Iterable[bytes], text: bytes) -> int:
    """Return the number of bytes by which lzma's file grows when `text` is appended to the blocks of `before`.

    lzma uses only the end of `before`, as far back as its dictionary reaches. Two threads compress, one with `text` and
    one without. They need about twenty times the memory of both texts, at most 1.4 GB.
    """
    recent = bytearray()
    for block in before:
        recent += block
        del recent[:-_LARGEST_DICTIONARY]
    seen = bytes(recent[-max(_LARGEST_DICTIONARY - len(text), 1) :])

    def compressed(data: bytes) -> int:
        xz = _xz(len(seen) + len(text))
        return len(xz.compress(data)) + len(xz.flush())

    with ThreadPoolExecutor() as threads:
        alone, both = threads.map(compressed, (seen, seen + text))
    return both - alone


def _xz(text: int) -> lzma.LZMACompressor:
    """Return an `xz -9e` compressor for a text of `text` bytes.

    A dictionary larger than the text would save nothing and need ten times its size in memory.
    """
    dictionary = min(max(text, 4096), _LARGEST_DICTIONARY)
    preset = 9 | lzma.PRESET_EXTREME
    return lzma.LZMACompressor(filters=[{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": dictionary}])
