"""Choice of the text that a command reads for a run."""

from __future__ import annotations

from pathlib import Path

from txl.config import DataConfig, RunConfig
from txl.data.vocabulary import ByteVocabulary
from txl.runs.corpus import open_run_corpus
from txl.runs.directory import RunDirectory


def test_another_corpus_is_not_taken_from_the_source_of_the_run_s(story: Path, data_dir: Path, tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.write_config(RunConfig(data=DataConfig(corpus="enwik8", unit="byte", source=str(tmp_path / "enwik8.zip"))))
    corpus = open_run_corpus(run, ByteVocabulary(), {"data.corpus": str(story)}, data_dir=str(data_dir), quiet=True)
    assert corpus.name == str(story)
