"""Compressed sizes, under zlib, bzip2 and lzma, of the text that a run's result was measured on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from txl.data.corpora import data_directory
from txl.data.prepared import Corpus, read_meta
from txl.errors import UserError
from txl.files import JsonObject
from txl.reporting.compressors import SETTINGS, compress, lzma_after
from txl.reporting.findings import Findings, scored_bytes
from txl.runs.directory import RunDirectory
from txl.runs.events import CompressionEvent, Evaluation, EventName

LZMA_AFTER = "lzma_after_training_text"
"""Field of a `compression` event: bytes by which lzma's file grows if the text is appended to the training text."""


def compressed_bits(sizes: CompressionEvent) -> dict[str, float]:
    """Return bits per byte of the text by compressor, and those of `LZMA_AFTER` if they were measured."""
    compressed = {"zlib": sizes["zlib"], "bz2": sizes["bz2"], "lzma": sizes["lzma"]}
    if (after := sizes.get(LZMA_AFTER)) is not None:
        compressed[LZMA_AFTER] = after
    return {name: 8 * size / sizes["text"] for name, size in compressed.items()}


def measure_compression(
    run_directory: RunDirectory, facts: Findings, data_dir: str | Path | None, after_training_text: bool = False
) -> tuple[JsonObject | None, str | None]:
    """Compress the bytes that the result was measured on, and log the sizes if the log can be written.

    The text is looked up among the prepared corpora; no corpus is prepared or downloaded.

    Args:
        run_directory: directory of the run, whose log receives the sizes.
        facts: contents of the run's log.
        data_dir: directory of the prepared corpora; None: the default (`data_directory`).
        after_training_text: True to measure lzma also with the text appended to the training text, if available.

    Returns:
        The event and None; or None and the reason why nothing was measured.
    """
    result = facts.result
    n_bytes = None if result is None else scored_bytes(result)
    if result is None or n_bytes is None:
        return None, "the size of the text that was scored is not known"
    folder = data_directory(data_dir)
    try:
        corpus = _scored_corpus(folder, result)
        if corpus is None:
            return None, f"the text that was scored is not among the corpora in {folder}; `txl eval` puts it there"
        sizes = compress(corpus.text_bytes(result["split"]), n_bytes)
        after = _after_training_text(corpus, result["split"], n_bytes) if after_training_text else None
    except (UserError, OSError) as error:
        return None, str(error)
    if sizes["text"] != n_bytes:
        return None, f"the prepared {result['split']} split has {sizes['text']:,} bytes, {n_bytes:,} were scored"
    fields: JsonObject = {"corpus": result["corpus"], "split": result["split"], "settings": SETTINGS, **sizes}
    fields |= {} if after is None else {LZMA_AFTER: after}
    with suppress(UserError):  # a read-only run still gets its report, with --out
        run_directory.append(EventName.COMPRESSION, facts.train[-1]["step"], **fields)
    return {"event": EventName.COMPRESSION, **fields}, None


def _after_training_text(corpus: Corpus, split: str, n_bytes: int) -> int | None:
    """Return the bytes that a split's start adds to lzma's file of the training text; None if a text is missing."""
    with suppress(UserError):
        text = b"".join(corpus.text_bytes(split))[:n_bytes]
        return lzma_after(corpus.text_bytes("train"), text)
    return None


def _scored_corpus(folder: Path, result: Evaluation) -> Corpus | None:
    """Return the prepared corpus that holds the scored text, facts by the hash of its split; None if there is none."""
    for path in sorted(folder.glob("*/meta.json")):
        with suppress(UserError):  # a corpus that is damaged, or of another version
            prepared = read_meta(path.parent)["splits"].get(result["split"])
            if prepared is not None and prepared["sha256_text"] == result["sha256_text"]:
                return Corpus(path.parent)
    return None
