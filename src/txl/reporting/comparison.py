"""Measuring what compressors need for the very text that a run's result is about."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from txl.config import DataConfig, RunConfig
from txl.data.corpora import Corpus, open_corpus
from txl.errors import UserError
from txl.reporting.compression import SETTINGS, compress
from txl.reporting.findings import Findings, scored_bytes, tokens_read
from txl.run_directory import RunDirectory


def measure_compression(
    run_directory: RunDirectory, config: RunConfig, found: Findings, data_dir: str | Path | None
) -> tuple[dict[str, Any] | None, str | None]:
    """Compress the bytes that the result is about, and log it if the log can be written.

    Returns:
        The event; or None and the reason.
    """
    result = found.result
    n_bytes = None if result is None else scored_bytes(result)
    if result is None or n_bytes is None:
        return None, "the size of the text that was scored is not known"
    different = f"the {result['split']} split of {result['corpus']} on this machine is not what was scored"
    logged = found.split_of(result)
    try:
        data = DataConfig() if logged is None else config.data
        corpus = _corpus(run_directory, result["corpus"], data, logged is not None, data_dir)
        split = corpus.info()["splits"].get(result["split"])
        if split is None or split["tokens"] < tokens_read(result):
            return None, different
        if logged is not None and split["sha256_text"] != logged["sha256_text"]:
            return None, different
        sizes = compress(corpus.text_bytes(result["split"]), n_bytes)
    except (UserError, OSError) as error:
        return None, str(error)
    if sizes.text != n_bytes:
        return None, different
    fields = {"corpus": result["corpus"], "split": result["split"], "settings": SETTINGS}
    fields |= {"text": sizes.text, "zlib": sizes.zlib, "lzma": sizes.lzma}
    with suppress(UserError):  # a run that can only be read still has its report, with --out
        run_directory.append("compression", found.train[-1]["step"], **fields)
    return {"event": "compression", **fields}, None


def _corpus(run_directory: RunDirectory, name: str, data: DataConfig, own: bool, data_dir: str | Path | None) -> Corpus:
    """The corpus as the run reads it: another text, and a fine-tuned model's, is read with the run's vocabulary."""
    vocabulary = run_directory.vocabulary()
    if own:
        corpus = open_corpus(name, config=data, data_dir=data_dir)
        if vocabulary is None or corpus.vocabulary == vocabulary:
            return corpus
    return open_corpus(name, config=data, data_dir=data_dir, vocabulary=vocabulary)
