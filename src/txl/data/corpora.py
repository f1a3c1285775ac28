"""Corpora, opened by name or path and prepared on first use."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from txl.config import Boundary, DataConfig, Unit
from txl.data.benchmarks import BENCHMARKS
from txl.data.formats import reading_note
from txl.data.pieces import SPLITS, WHOLE, Piece, Pieces
from txl.data.prepare import Recipe, normalises, prepare, prepared_before, stamps_of
from txl.data.prepared import META_FORMAT, Corpus, json_sha256
from txl.data.progress import say
from txl.data.public import PublicCorpus, cut_down_by
from txl.data.user_text import find_files, refuse_no_text, stdlib_files, stdlib_pieces, user_pieces
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import Field, UserError, did_you_mean
from txl.files import JsonObject, absolute, cache_folder, refuse_file

STDLIB = "stdlib"


def list_corpora() -> list[dict[str, str]]:
    """Return name, description and natural unit of every named corpus."""
    about = "the Python standard library's own .py files; on every machine, no download"
    stdlib = {"name": STDLIB, "description": about, "unit": "byte"}
    public = BENCHMARKS.values()
    return [stdlib, *({"name": one.name, "description": one.description, "unit": one.unit} for one in public)]


def natural_unit(name: str) -> Unit:
    """Return the default unit of a corpus: byte, or the unit of a public corpus's published results."""
    return BENCHMARKS[name].unit if name in BENCHMARKS else "byte"


def refuse_unused(data: DataConfig, given: Iterable[str]) -> None:
    """Refuse given settings (full names such as "data.min_count") without effect on the corpus and unit."""
    public = BENCHMARKS.get(data.corpus)
    no_use = f"{data.unit} tokens do not use it"
    uses = {
        "vocab_size": (data.unit == "bpe", no_use),
        **dict.fromkeys(("min_count", "max_words", "word_rule"), (data.unit == "word", no_use)),
        "normalise": (data.unit != "byte", "bytes are never changed"),
        **dict.fromkeys(("like_original", "verify"), (public is not None, "only public corpora use it")),
        "boundary": (public is not None and public.sentences, "only lm1b uses it"),
    }
    for name, (is_used, why) in uses.items():
        if not is_used and f"data.{name}" in given and getattr(data, name) != getattr(DataConfig, name):
            raise UserError(field=f"data.{name}", value=getattr(data, name), but=why, remedy="leave it out")


def known_vocabulary_size(config: DataConfig) -> int | None:
    """Return the vocabulary size of a corpus if it is known without opening the corpus, else None."""
    if config.unit == "byte" and not config.like_original:
        return 256
    public = BENCHMARKS.get(config.corpus)
    cut_down = config.unit == "word" and bool(cut_down_by(config))
    if public is None or config.unit != public.unit or cut_down or config.normalise or not config.verify:
        return None
    sizes = public.original_vocabulary if config.like_original and public.original_vocabulary else public.vocabulary
    return None if sizes is None else sizes[1]


def vocabulary_size(config: DataConfig, data_dir: str | Path | None = None, quiet: bool = False) -> int:
    """Return the vocabulary size of a corpus; open the corpus only if its size is not known in advance."""
    known = known_vocabulary_size(config)
    if known is not None:
        return known
    return len(open_corpus(config.corpus, config=config, data_dir=data_dir, quiet=quiet).vocabulary)


def open_corpus(
    name: str,
    unit: str | None = None,
    *,
    config: DataConfig | None = None,
    source: str | Path | None = None,
    data_dir: str | Path | None = None,
    vocabulary: Vocabulary | None = None,
    quiet: bool = False,
    like_original: bool | None = None,
    boundary: str | None = None,
    verify: bool | None = None,
    whole: bool = False,
) -> Corpus:
    """Open a corpus; prepare the corpus first if it is not yet prepared.

    Args:
        name: name of a corpus, or a file, folder or glob. A folder with files named train, valid and test has these
            splits; everything else is cut 90/5/5 by position.
        unit: unit of one token: byte, char, word or bpe; None: the unit of `config`, else the corpus's natural unit.
        config: data settings; None: the defaults.
        source: folder or archive to read a public corpus from instead of downloading it; None: the source of `config`.
        data_dir: directory of prepared corpora; None: the environment variable TXL_DATA, else the user's cache.
        vocabulary: vocabulary to encode with, for example of another model; its kind is then the unit. None: the
            corpus's own.
        quiet: True to write no progress to standard error.
        like_original: True to prepare a public corpus as the authors' code does: the vocabulary counted over all splits
            (except for WikiText-103), enwik8 without newlines, text8 without a space at the ends of a split, Penn
            Treebank in lower case. None: the value of `config`, else False.
        boundary: predicted `<S>` tokens around a sentence of lm1b: "end" for only the one at the end (as in the
            authors' PyTorch code), or "both" (as in their TensorFlow code). None: the value of `config`, else "end".
        verify: True to refuse a public corpus whose counts or hashes are not the known ones; False to print and record
            the differences. None: the value of `config`, else True.
        whole: True to read the user's own text as one split, "all", with its files in the order of their paths.

    Raises:
        UserError: if the corpus does not exist, cannot be read in this unit, or differs from the known public corpus.
    """
    if not name:
        remedy = ("give ", Field("data.corpus"))
        raise UserError("no corpus is named (an imported model has none of its own)", remedy=remedy)
    name = absolute_path(name)
    if whole and is_named(name):
        raise UserError(f"{name} has the splits {', '.join(SPLITS)}; the split {WHOLE} exists only for your own text")
    chosen = {"like_original": like_original, "boundary": boundary, "verify": verify}
    chosen = {setting: value for setting, value in chosen.items() if value is not None}
    if vocabulary is not None:
        unit = vocabulary.kind
    chosen["unit"] = unit or (natural_unit(name) if config is None else config.unit)
    config = dataclasses.replace(config or DataConfig(), corpus=name, **chosen)
    for field, value, known in (("unit", config.unit, Unit), ("data.boundary", config.boundary, Boundary)):
        if value not in get_args(known):
            raise UserError(field=field, value=value, expected=f"one of {', '.join(get_args(known))}")
    source, folder = config.source if source is None else source, data_directory(data_dir)
    if name in BENCHMARKS:
        source = None if source is None else Path(os.path.expanduser(source))
        return PublicCorpus(BENCHMARKS[name], config, folder, source, vocabulary, quiet).open()
    if source is not None:
        but = f"{name} is not fetched from anywhere"
        raise UserError(field="data.source", value=str(source), but=but, remedy="leave it out")
    return _open_own(config, vocabulary, folder, quiet, whole)


def _open_own(config: DataConfig, vocabulary: Vocabulary | None, folder: Path, quiet: bool, whole: bool) -> Corpus:
    """Open the Python standard library's sources, or the user's own text.

    A text is prepared once for each recipe and state of its files (paths, sizes and modification times).
    """
    name = config.corpus
    recipe = Recipe(
        config.unit,
        config.vocab_size,
        config.min_count,
        config.max_words,
        config.word_rule,
        normalise=normalises(config, vocabulary, by_default=True),
        vocabulary=vocabulary,
        counted=(WHOLE,) if whole else ("train",),
    )
    label, files = (name, stdlib_files()) if name == STDLIB else (Path(name).stem, own_files(name))
    label = f"{label}-{WHOLE}" if whole else label
    if whole:
        refuse_no_text(files)
    stamps = stamps_of(files)
    paths: dict[Path, None] = {}

    def pieces() -> Pieces:
        if name == STDLIB:
            return stdlib_pieces(config.unit)
        splits = {WHOLE: [Piece(path) for path in files]} if whole else user_pieces(name)
        paths.update((piece.path, None) for parts in splits.values() for piece in parts)
        return splits

    def check(meta: JsonObject) -> None:
        if stamps_of(files) != stamps:
            raise UserError(f"{name} changed while it was read; run the command again")
        if (note := reading_note(paths, recipe.unit)) is not None:
            meta["note"] = note

    key = json_sha256([META_FORMAT, name, stamps, recipe.settings(), *([WHOLE] if whole else [])])
    safe = re.sub(r"[^\w.-]", "_", label).lstrip(".")[:40] or "text"
    directory = folder / f"{safe}-{recipe.unit}-{key[:16]}"
    if (corpus := prepared_before(directory, name, quiet)) is not None:
        return corpus
    corpus = prepare(directory, name, pieces, recipe, quiet, check)
    was_cut = isinstance(corpus.vocabulary, WordVocabulary) and corpus.vocabulary.rule == "whitespace"
    if was_cut and recipe.vocabulary is None and recipe.word_rule is None:
        say(
            f"note: {name} is already cut into words (<unk> or @-@ stands alone in it): only white space separates "
            f"words, and with <unk> all words are kept; data.word_rule and data.min_count change that",
            quiet,
        )
    return corpus


def with_absolute_paths(data: DataConfig) -> DataConfig:
    """Return a copy of the data settings with absolute paths, which are valid in every working directory."""
    source = None if data.source is None else absolute(os.path.expanduser(data.source))
    return dataclasses.replace(data, corpus=absolute_path(data.corpus), source=source)


def absolute_path(corpus: str) -> str:
    """Return the absolute path of the user's file, folder or glob; return the name of a named corpus unchanged.

    The name of a named corpus takes precedence over a file or folder of the same name, which is written as `./NAME`.
    """
    if not corpus or is_named(corpus):
        return corpus  # empty for an imported model
    if os.sep not in corpus and not os.path.exists(corpus):
        try:
            find_files(corpus)  # a glob
        except UserError:
            return corpus  # an unknown name: error messages quote it as typed
    if os.path.exists(corpus) or not glob.has_magic(corpus):
        return absolute(corpus)
    return os.path.join(glob.escape(absolute(".")), corpus)


def is_named(corpus: str) -> bool:
    """Return whether `corpus` is the name of a named corpus, rather than the path of the user's own text."""
    return corpus == STDLIB or corpus in BENCHMARKS


def data_directory(data_dir: str | Path | None) -> Path:
    """Return the directory of prepared corpora: `data_dir`, else TXL_DATA, else the user's cache."""
    chosen = data_dir or os.environ.get("TXL_DATA")
    if chosen:
        folder = Path(os.path.expanduser(chosen))
        refuse_file(folder, "data_dir" if data_dir else "TXL_DATA", "a folder")
        return folder
    return cache_folder()


def own_files(name: str) -> list[Path]:
    """Return the files of a user's own text."""
    try:
        return find_files(name)
    except UserError as error:
        # A bare word was probably meant as a name.
        if os.path.exists(name) or any(mark in name for mark in "/\\.*?["):
            raise
        names = [STDLIB, *BENCHMARKS]
        hint = did_you_mean(name, names, cutoff=0.5) or f"named corpora: {', '.join(names)}"
        raise UserError(f"unknown corpus {name[:200]!r}, and {error}; {hint}") from None
