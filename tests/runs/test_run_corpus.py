"""Choice of the text that a command reads for a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import small_run

import txl
from txl.config import DataConfig, RunConfig
from txl.data.characters import ByteVocabulary
from txl.errors import UserError
from txl.runs.corpus import is_trained_on, open_run_corpus, training_tokens
from txl.runs.directory import RunDirectory


def test_another_corpus_is_not_taken_from_the_source_of_the_run_s(story: Path, data_dir: Path, tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.write_config(RunConfig(data=DataConfig(corpus="enwik8", unit="byte", source=str(tmp_path / "enwik8.zip"))))
    corpus = open_run_corpus(run, ByteVocabulary(), {"data.corpus": str(story)}, data_dir=str(data_dir), quiet=True)
    assert corpus.name == str(story)


def test_a_text_that_has_changed_is_not_taken_for_the_training_text(story: Path, data_dir: Path, tmp_path: Path):
    text, other = tmp_path / "my.txt", tmp_path / "other.txt"
    text.write_bytes(story.read_bytes())
    other.write_text("something else to measure\n" * 200)
    txl.Trainer(small_run(str(text), **{"train.steps": "1"}), tmp_path / "run", data_dir=data_dir, quiet=True).fit()
    run, places = RunDirectory(tmp_path / "run"), {"data_dir": str(data_dir), "quiet": True}

    def read(corpus: str, whole: bool = False):
        return open_run_corpus(run, run.vocabulary(), {"data.corpus": corpus}, whole=whole, **places)

    assert is_trained_on(run, read(str(text), whole=True))
    tokens = training_tokens(run, run.vocabulary(), read(str(other)), **places)
    assert len(tokens) == run.log().trained_on["splits"]["train"]["tokens"]
    text.write_bytes(story.read_bytes() + b"and one line more\n")
    assert not is_trained_on(run, read(str(text), whole=True))
    with pytest.raises(UserError, match=r"my\.txt is not the text that .* was trained on, which is needed here"):
        training_tokens(run, run.vocabulary(), read(str(other)), **places)


def test_a_text_that_stands_for_an_unrecorded_training_text_is_named(
    story: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = RunDirectory(tmp_path)
    run.write_config(RunConfig(data=DataConfig(corpus="none.txt", unit="byte")))
    corpus = open_run_corpus(run, ByteVocabulary(), {"data.corpus": str(story)}, data_dir=str(data_dir), quiet=True)
    assert len(training_tokens(run, ByteVocabulary(), corpus, quiet=True)) == len(corpus.tokens("train"))
    note = f"the training text of {tmp_path} is not recorded; the train split of {story} is used for it"
    assert note in capsys.readouterr().err
