"""Files that a path, folder or glob selects, and the splits among these files."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys

import pytest
from tests.conftest import small_run
from tests.data.test_corpora import refusal, split_bytes

import txl
from txl.config import DataConfig
from txl.data import corpora, prepare
from txl.data.corpora import refuse_unused
from txl.data.user_text import find_files
from txl.errors import UserError
from txl.training.trainer import Trainer


def write(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n" * 30)


@pytest.mark.parametrize(
    ("beside", "found"),
    [
        ((), "but no valid split"),
        (("dev.txt",), b"dev.txt"),
        (("dev.txt", "train.log", "test_notes.md"), b"dev.txt"),  # plain names come first
        (("dev.txt", "valid.txt"), "more than one for a split"),
    ],
)
def test_a_folder_that_has_a_train_but_not_all_splits_is_not_mixed(beside, found, tmp_path):
    write(tmp_path, "train.txt", "test.txt", *beside)
    if isinstance(found, str):
        assert found in refusal(str(tmp_path), tmp_path / "data")
        assert len(split_bytes(str(tmp_path / "*.txt"))["train"]) > 0
    else:
        assert split_bytes(str(tmp_path))["valid"].startswith(found)


@pytest.mark.parametrize(
    "names",
    [
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens", "setup_test.py"),
        ("train.jsonl", "valid.jsonl.gz", "test.jsonl", "test.py", "test_all.py"),
        ("train/part0.jsonl", "valid/part0.jsonl", "test/part0.jsonl", "README.md"),
        ("Train.txt", "VALID.txt", "Test.txt"),
        ("Train/a.txt", "Valid/a.txt", "Test/a.txt"),
        ("training/a.txt", "validation/a.txt", "test/a.txt"),
        ("train.txt", "valid.txt", "test.txt", "training.txt", "training_curve.csv"),
        ("train/a.txt", "valid/a.txt", "test/a.txt", "training/log.md"),
        ("training/a.en", "dev/a.en", "test/a.en", "more/docs/dev/a.txt", "more/docs/test/a.txt"),
        ("train.txt", "valid/a.txt", "test/a.txt"),
        ("train/a.txt", "valid/a.txt", "test/a.txt", "train.txt"),
        ("train1.txt", "valid1.txt", "test1.txt", "notes.md"),
        ("europarl.train.en", "europarl.dev.en", "europarl.test.en", "README"),
        ("text8.train", "text8.valid", "text8.test"),
        ("a_train.txt", "c_valid.txt", "b_test.txt"),
        ("train.txt", "dev/a.txt", "test/b.txt"),
    ],
)
def test_splits_are_known_by_their_names(names, tmp_path):
    plain = [name for name in names if not name.endswith(".gz")]
    write(tmp_path, *plain)
    for name in set(names) - set(plain):
        (tmp_path / name).write_bytes(gzip.compress(f"{name}\n".encode() * 30))
    found = {split: content.split(b"\n")[0].decode() for split, content in split_bytes(str(tmp_path)).items()}
    assert found == dict(zip(("train", "valid", "test"), names[:3], strict=True))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("wiki.train.tokens", "wiki.test.tokens"), "but no valid split"),
        (
            [f"ptb.{kind}{split}.txt" for kind in ("", "char.") for split in ("train", "valid", "test")],
            "more than one for a split",
        ),
        (("my.train.txt", "dev.txt", "valid.txt", "test.txt"), "but no train split"),
        (("train/a.txt", "test/a.txt"), "but no valid split"),
        (("train/a.txt", "valid/a.txt", "dev/a.txt", "test/a.txt"), "more than one for a split"),
        (("valid/a.txt", "test/a.txt"), "but no train split"),
        (("training/a.txt", "test/a.txt"), "but no valid split"),
        (("train1.txt", "train2.txt", "test1.txt"), "but no valid split"),
        (("train.txt", "valid/a.txt"), "holds train.txt, valid/a.txt, but no test split"),
        (("wiki/train/a.txt", "wiki/valid/a.txt", "wiki/test/a.txt"), "wiki in it has folders named after splits"),
        (("wiki/train/a.en", "wiki/dev/a.en", "wiki/test/a.en"), "wiki in it has folders named after splits"),
        (("wiki/train/a.txt", "wiki/test/a.txt"), "wiki in it has folders named after splits"),
        (("train-00000-of-00002.txt", "train-00001-of-00002.txt", "test-00000-of-00001.txt"), "but no valid split"),
        (("train1.txt", "train2.txt", "valid1.txt", "test1.txt"), "more than one for a split"),
        (("train/a", "test/b"), "but no valid split"),
    ],
)
def test_splits_that_cannot_be_told_apart_are_refused_rather_than_mixed(names, said, tmp_path):
    write(tmp_path, *names)
    message = refusal(str(tmp_path), tmp_path / ".data")
    assert said in message
    assert "give the files as a glob" in message


def test_folders_of_source_code_may_be_called_train_and_test(tmp_path):
    write(tmp_path, "src/train.py", "src/test.py", "tests/test_train.py", "test/test_a.py", "dev/notes.txt")
    write(tmp_path, "examples/train/README.md", "examples/test/README.md", "training/loop.py")
    write(tmp_path, "docs/dev/a.txt", "docs/test/a.txt")
    assert len(split_bytes(str(tmp_path))["train"]) > 300


@pytest.mark.parametrize(
    "names",
    [
        ("train.py", "dev-notes.md", "sub/test.sh", "novel.txt"),
        ("train.py", "val.py", "test.py", "novel.txt"),
        ("src/train/a.py", "src/valid/a.py", "src/test/a.py"),
    ],
)
def test_programs_and_notes_are_not_taken_for_splits(names, tmp_path):
    write(tmp_path, *names)
    everything = b"".join(split_bytes(str(tmp_path)).values())
    assert everything == b"".join((tmp_path / name).read_bytes() for name in sorted(names))


def test_what_this_package_wrote_into_a_folder_is_not_its_text(tmp_path):
    write(tmp_path, "a.txt", "config.json", "sub/b.txt")
    before = find_files(str(tmp_path))
    write(tmp_path, "runs/mine/config.json", "runs/mine/log.jsonl", "runs/mine/checkpoints/step-00000001/x.json")
    write(tmp_path, "imported/config.json", "imported/checkpoints/step-00000000/manifest.json")
    write(tmp_path, "runs/reproduce/experiment.json", "runs/reproduce/results/xl-seed1.json")
    write(tmp_path, "cache/a-byte-0/meta.json", "cache/a-byte-0/train.tokens")
    write(tmp_path, "cache/b-byte-0/meta.json", "cache/b-byte-0/all.tokens")
    assert find_files(str(tmp_path)) == before
    write(tmp_path, "sub/experiment.json")  # somebody else's
    assert len(find_files(str(tmp_path))) == len(before) + 1


def test_links_are_followed_once(tmp_path):
    write(tmp_path, "texts/a.txt", "beside/b.txt")
    (tmp_path / "texts" / "linked").symlink_to(tmp_path / "beside", target_is_directory=True)
    (tmp_path / "texts" / "self").symlink_to(tmp_path / "texts", target_is_directory=True)
    (tmp_path / "texts" / "0-link.txt").symlink_to("a.txt")
    both = [tmp_path / "texts" / "a.txt", tmp_path / "texts" / "linked" / "b.txt"]
    assert find_files(str(tmp_path / "texts")) == find_files(str(tmp_path / "texts" / "**")) == both
    assert find_files(str(tmp_path / "texts" / "*.txt")) == both[:1]


def test_a_relative_glob_is_found_in_a_folder_whose_name_looks_like_a_glob(tmp_path, monkeypatch):
    write(tmp_path, "notes [2024]/a.txt", "notes [2024]/b.txt")
    monkeypatch.chdir(tmp_path / "notes [2024]")
    corpus = txl.open_corpus("*.txt", data_dir=tmp_path / "data", quiet=True)
    assert len(corpus.tokens("train")) > 300
    monkeypatch.chdir(tmp_path)
    assert txl.open_corpus(corpus.name, data_dir=tmp_path / "data", quiet=True).directory == corpus.directory


@pytest.mark.parametrize("name", ["a.zip", "a.txt.lz4", "a.txt.GZ", "a.tar", "a.tar.gz"])
def test_compressed_files_of_other_kinds_are_not_read_as_text(name, tmp_path):
    write(tmp_path, name, "novel.txt")
    assert f"{name}: files of this kind are not read" in refusal(str(tmp_path), tmp_path / ".data")
    with pytest.raises(UserError, match="files of this kind are not read"):
        txl.open_corpus(str(tmp_path / name), whole=True, data_dir=tmp_path / ".data", quiet=True)
    write(tmp_path, "train.txt", "valid.txt", "test.txt")
    assert split_bytes(str(tmp_path))["test"].startswith(b"test.txt"), "files that are not read do not matter"


@pytest.mark.parametrize("pattern", ["", "**", "sub/*.txt"])
def test_a_folder_below_that_cannot_be_read_is_named(pattern, tmp_path, monkeypatch):
    write(tmp_path, "a.txt", "sub/b.txt")

    def refusing(call):
        def look(path="."):
            if str(path).endswith("sub"):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path)

        return look

    for name in ("scandir", "listdir"):  # root may read every folder
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(UserError, match=r"sub: cannot be read \(Permission denied\)"):
        find_files(str(tmp_path / pattern))


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("abcd " * 2000)
    real = prepare._make_vocabulary

    def make(*given):
        vocabulary = real(*given)
        path.write_text("wxyz " * 2000)
        os.utime(path, ns=(1, 1))
        return vocabulary

    monkeypatch.setattr(prepare, "_make_vocabulary", make)
    assert "changed while it was read; run the command again" in refusal(str(path), tmp_path / "data", "char")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_damaged_corpus_that_cannot_be_removed_is_not_prepared_for_nothing(story, tmp_path, monkeypatch):
    corpus = txl.open_corpus(str(story), "char", data_dir=tmp_path, quiet=True)
    (corpus.directory / "train.tokens").write_bytes(b"")
    monkeypatch.setattr(prepare.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(corpora, "prepare", lambda *_: pytest.fail("prepared for nothing"))
    assert "it cannot be removed; choose another data_dir" in refusal(str(story), tmp_path, "char")


@pytest.mark.parametrize(
    "settings",
    [
        {"min_count": 5},
        {"vocab_size": 300, "unit": "word"},
        {"normalise": False},
        {"like_original": True},
        {"verify": False},
        {"boundary": "both", "corpus": "enwik8"},
    ],
)
def test_settings_that_a_text_has_no_use_for_are_refused(settings):
    data, (name, value) = DataConfig(**settings), next(iter(settings.items()))
    with pytest.raises(UserError) as caught:
        refuse_unused(data, [f"data.{name}" for name in settings])
    assert (caught.value.field, caught.value.value) == (f"data.{name}", value)
    refuse_unused(data, [])  # settings of a preset, which the user did not give
    for used in (
        DataConfig(min_count=5, unit="word"),
        DataConfig(vocab_size=300, unit="bpe"),
        DataConfig(verify=False, like_original=True, corpus="lm1b", boundary="both", unit="word"),
    ):
        refuse_unused(used, [f"data.{name}" for name in ("min_count", "vocab_size", "verify", "boundary")])


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_text_is_prepared_leaves_nothing(sent, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcd " * 1000)
    code = f"""
import os, signal, sys
sys.argv = ["txl", "data", "info", {str(path)!r}, "--unit", "char", "--data-dir", {str(tmp_path / "data")!r}]
import txl.__main__ as program
from txl.data import prepare
def make(*given):
    os.kill(os.getpid(), {sent:d})
prepare._make_vocabulary = make
program.command()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[1:]) == (128 + sent, [])
    assert list((tmp_path / "data").iterdir()) == []


def test_a_run_in_the_folder_of_its_text_goes_on(story, tmp_path, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    (project / "story.txt").write_bytes(story.read_bytes())
    run = small_run(str(project))
    out, cache = project / "runs" / "a", project / "cache"
    first = Trainer(run, out, device="cpu", data_dir=cache, quiet=True).fit()
    again = Trainer(run, out, device="cpu", data_dir=cache, quiet=True).fit()
    assert again | {"seconds": 0} == first | {"seconds": 0}
