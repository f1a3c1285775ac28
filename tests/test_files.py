"""Files are written completely or not at all, with the usual permissions."""

from __future__ import annotations

import os
import stat

import pytest

import txl
from tests.conftest import small_run
from txl.errors import UserError
from txl.files import replacing, write_whole
from txl.interop.export_run import export_run


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    path = tmp_path / "text"
    write_whole(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half of what is ne")
        raise RuntimeError
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["text"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match="missing/text: cannot be written"):
        write_whole(tmp_path / "missing" / "text", "x")


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_a_run_and_its_export_have_the_permissions_of_any_new_file(umask, story, data_dir, tmp_path):
    run = small_run(str(story), **{"train.steps": "2", "train.eval_every": "0"})
    before = os.umask(umask)
    try:
        txl.Trainer(run, tmp_path / "run", data_dir=data_dir, quiet=True).fit()
        export_run(tmp_path / "run", tmp_path / "plain", "safetensors")
        export_run(tmp_path / "run", tmp_path / "huggingface", "huggingface")
    finally:
        os.umask(before)
    made = [each for each in tmp_path.rglob("*") if each.name not in ("run", "plain", "huggingface")]
    assert sum(each.suffix == ".safetensors" for each in made) == 4
    for each in made:
        expected = (0o777 if each.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(each.stat().st_mode) == expected, each
