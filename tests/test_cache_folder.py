"""The folder of the cache, with and without a home folder."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from txl import files as module
from txl.data.corpora import data_directory


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """Empty temporary folder, for a user without a home folder and without an entry in the system's user database."""
    for name in ("HOME", "XDG_CACHE_HOME", "TXL_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module._warn.cache_clear()
    yield tmp_path
    module._warn.cache_clear()


def test_the_cache_is_the_user_s(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_directory(None) == tmp_path / "transformer-xl"
    assert not data_directory(None).exists()


def test_without_a_home_it_is_a_private_folder_below_the_temporary_one(nowhere, caplog):
    with caplog.at_level(logging.WARNING):
        found = data_directory(None)
        assert data_directory(None) == found
    assert found.parent == nowhere
    assert found.stat().st_mode & 0o777 == 0o700
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"note: ~/.cache/transformer-xl cannot be made; the cache is {found}, which the system may empty"
    assert data_directory("~/data") == Path("~/data")  # `~` stays, as in a shell without HOME


def test_a_home_that_cannot_be_is_as_none(nowhere, monkeypatch, caplog):
    monkeypatch.setenv("HOME", "/dev/null/home")
    assert data_directory(None).parent == nowhere
    assert "/dev/null/home/.cache/transformer-xl cannot be made" in caplog.text


def test_a_home_that_may_not_be_looked_into_is_as_none(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir(mode=0)
    before = os.geteuid()
    try:
        if before == 0:
            os.seteuid(65_534)
        with pytest.raises(PermissionError):
            (home / ".cache").stat()
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        found = module.cache_folder()
    finally:
        os.seteuid(before)
    assert found.parent == Path(tempfile.gettempdir())
    found.rmdir()


def test_a_folder_that_others_can_write_is_not_taken(nowhere):
    theirs = data_directory(None)
    theirs.chmod(0o777)
    assert data_directory(None) not in (theirs, data_directory(None))
    theirs.rmdir()
    theirs.symlink_to("/")
    assert data_directory(None) != theirs


def test_a_trained_model_is_used_without_a_home(trained, tmp_path):
    code = "import os, sys; os.getuid = lambda: 987_654; from txl.cli import main; sys.exit(main(sys.argv[1:]))"
    gone = ("HOME", "XDG_CACHE_HOME", "TXL_DATA", "USER", "LOGNAME", "LNAME", "USERNAME")
    env = {name: value for name, value in os.environ.items() if name not in gone} | {"TMPDIR": str(tmp_path)}
    words = ["generate", str(trained), "--prompt", "The ", "--max-tokens", "3"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The ")
    assert [line.split(";")[0] for line in done.stderr.splitlines()] == ["note: ~/.cache/transformer-xl cannot be made"]
