"""Shared fixture for the tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_corpora(tmp_path_factory, monkeypatch) -> Path:
    """Empty folder of prepared corpora: made-up runs have no corpus. Real runs use a folder of their own."""
    folder = tmp_path_factory.mktemp("no-corpora")
    monkeypatch.setenv("TXL_DATA", str(folder))
    return folder
