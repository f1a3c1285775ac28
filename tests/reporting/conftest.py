"""What the tests of reports share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_corpora(tmp_path_factory, monkeypatch) -> Path:
    """The folder of prepared corpora, empty: those of made-up runs are not there. Real runs have their own."""
    folder = tmp_path_factory.mktemp("no-corpora")
    monkeypatch.setenv("TXL_DATA", str(folder))
    return folder
