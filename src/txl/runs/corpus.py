"""Corpora in the vocabulary of a run: the corpus that the run was trained on, or another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from txl.config import RunConfig, with_options
from txl.data.characters import ByteVocabulary
from txl.data.corpora import absolute_path, is_named, open_corpus, refuse_unused, with_absolute_paths
from txl.data.prepared import Corpus, Tokens
from txl.data.progress import say
from txl.data.vocabulary import Vocabulary
from txl.errors import Field, UserError
from txl.runs.directory import RunDirectory


def open_run_corpus(
    run: RunDirectory,
    vocabulary: Vocabulary | None,
    options: Mapping[str, str] | None = None,
    *,
    data_dir: str | None = None,
    whole: bool = False,
    quiet: bool = False,
) -> Corpus:
    """Open the corpus that a run was trained on, or the one that `options` name, in the run's vocabulary.

    Options have full names: {"data.corpus": "my.txt"}. With `whole` a user's own text is one split, "all".
    """
    if vocabulary is None:
        remedy = ("import it again with ", Field("vocabulary"))
        raise UserError("has no vocabulary, so no text can be read", value=run.path, remedy=remedy)
    options = options or {}
    own, started = with_absolute_paths(run.config().data), run.log().started
    data = with_absolute_paths(with_options(RunConfig(data=own), dict(options)).data)
    if data.corpus != own.corpus and "data.source" not in options:
        data.source = None  # the run's source belongs to the run's own corpus
    if "data.unit" in options and data.unit != vocabulary.kind:
        but = f"this model reads {vocabulary.kind} tokens"
        raise UserError(field="data.unit", value=data.unit, but=but, remedy="leave it out")
    for name in ("vocab_size", "min_count", "max_words", "word_rule"):
        if f"data.{name}" in options and getattr(data, name) != getattr(own, name):
            but = "the model has its vocabulary already"
            raise UserError(field=f"data.{name}", value=getattr(data, name), but=but, remedy="leave it out")
    refuse_unused(dataclasses.replace(data, unit=vocabulary.kind), options)  # pyright: ignore[reportArgumentType]
    # If the run's vocabulary was made from this text, training has prepared the text without a given vocabulary.
    prepared_it = is_named(own.corpus) if started is None else not started["init_from"]
    made_of_it = data.corpus == own.corpus and prepared_it
    if (made_of_it and not whole) or vocabulary == ByteVocabulary():
        corpus = open_corpus(data.corpus, config=data, data_dir=data_dir, quiet=quiet, whole=whole)
        if corpus.vocabulary == vocabulary:
            return corpus
    return open_corpus(data.corpus, config=data, data_dir=data_dir, vocabulary=vocabulary, quiet=quiet, whole=whole)


def is_trained_on(run: RunDirectory, corpus: Corpus) -> bool:
    """Return whether a corpus is the text that a run was trained on.

    An imported model is assumed to be trained on the named corpus of its configuration. A text that was opened as a
    whole has other tokens than in training, and is recognised by its path and size.
    """
    trained, own = run.log().trained_on, absolute_path(run.config().data.corpus)
    if not trained:
        return is_named(own) and corpus.name == own
    if "train" in corpus.splits:
        return trained["identity"] == corpus.info()["identity"]
    sizes = (sum(split["bytes"] for split in record["splits"].values()) for record in (trained, corpus.info()))
    return corpus.name == own and next(sizes) == next(sizes)


def training_tokens(
    run: RunDirectory,
    vocabulary: Vocabulary | None,
    corpus: Corpus,
    *,
    data_dir: str | None = None,
    quiet: bool = False,
) -> Tokens:
    """Return the training split of the corpus that a run was trained on.

    This is `corpus`, if the run was trained on it or, with a note, if the log does not name its corpus (an imported
    model); else the run's corpus is opened.

    Raises:
        UserError: if the text has changed since training, or is not known and `corpus` has no training split.
    """
    identity = run.log().trained_on.get("identity")
    if identity not in (None, corpus.info()["identity"]):
        corpus = open_run_corpus(run, vocabulary, data_dir=data_dir, quiet=quiet)
        if identity != corpus.info()["identity"]:
            raise UserError(f"{corpus.name} is not the text that {run.path} was trained on, which is needed here")
    if "train" not in corpus.splits:
        but = f"{run.path} is an imported model that does not record it"
        raise UserError("the training text is needed here", but=but, remedy="give a text with a train split")
    if identity is None and not is_trained_on(run, corpus):
        note = f"note: the training text of {run.path} is not recorded; the train split of {corpus.name} is used for it"
        say(note, quiet=False)
    return corpus.tokens("train")


def trained_unknown(run: RunDirectory) -> float | None:
    """Return the share of `<unk>` in a run's training text; None if the log does not record it."""
    train = run.log().trained_on.get("splits", {}).get("train")
    return None if train is None else train["unknown"] / train["tokens"]


def shared_vocabulary(runs: Sequence[RunDirectory]) -> Vocabulary | None:
    """Return the common vocabulary of all runs; refuse runs with different vocabularies."""
    shared = runs[0].vocabulary()
    for run in runs[1:]:
        if run.vocabulary() != shared:
            problem = f"{run.path} has another vocabulary than {runs[0].path}; their losses cannot be compared"
            raise UserError(problem, expected="runs with one vocabulary")
    return shared


def refuse_different_corpora(runs: Sequence[RunDirectory]) -> None:
    """Refuse runs that were trained on different corpora, as there is then no default corpus to compare the runs on."""
    corpora = {
        run.log().trained_on.get("identity") or absolute_path(run.config().data.corpus): run.path for run in runs
    }
    if len(corpora) > 1:
        problem = f"the runs have different corpora: {', '.join(map(str, corpora.values()))}"
        raise UserError(problem, remedy=("choose one for all with ", Field("data.corpus")))
