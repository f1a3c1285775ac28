"""Libraries shipped in a wheel: chosen by processor, built from the same sources, and preferred to a compiler."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from txl.native import build
from txl.native.prebuilt import PROCESSORS, find_prebuilt, library_name
from txl.native.sources import cpp_sources

SOURCES = {"one.cpp": "int one;"}
NEEDS = {kind.name: kind.needs for kind in PROCESSORS}


@pytest.fixture
def folder(tmp_path) -> Path:
    for kind in PROCESSORS:
        (tmp_path / library_name(kind, SOURCES)).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (NEEDS["avx512-bf16"] | {"amx_tile", "sse"}, "avx512-bf16"),
        (NEEDS["avx512"] | {"amx_bf16"}, "avx512"),
        (NEEDS["avx512"] - {"avx512vl"}, "avx2"),
        (NEEDS["avx2"] | {"avx512f"}, "avx2"),
        (NEEDS["avx2"] - {"fma"}, None),
        ((), None),
    ],
)
def test_the_fastest_that_the_processor_can_run_is_found(flags, expected, folder):
    found = find_prebuilt(folder, SOURCES, flags)
    assert (None if found is None else found.stem.partition("-")[2].partition("-")[2]) == expected


def test_the_next_one_serves_where_one_is_missing(folder):
    (folder / library_name(PROCESSORS[0], SOURCES)).unlink()
    found = find_prebuilt(folder, SOURCES, PROCESSORS[0].needs)
    assert found is not None
    assert found.name == library_name(PROCESSORS[1], SOURCES)


def test_a_library_of_other_sources_is_not_found(folder):
    assert find_prebuilt(folder, SOURCES | {"one.cpp": "long one;"}, PROCESSORS[0].needs) is None


@pytest.fixture
def loaded():
    """The function that loads the library, with its cache cleared as in a new process."""
    build._load.cache_clear()
    yield build._load
    build._load.cache_clear()


@pytest.mark.skipif(build.why_not() is not None, reason=f"no compiled library: {build.why_not()}")
def test_a_wheel_s_library_comes_before_a_compiler(loaded, tmp_path, monkeypatch):
    brought = tmp_path / library_name(PROCESSORS[0], cpp_sources())
    brought.write_bytes(build._built().read_bytes())
    monkeypatch.setattr(build, "find_prebuilt", lambda folder, sources, flags: brought)
    monkeypatch.setattr(build, "find_compiler", lambda: pytest.fail("a compiler was looked for"))
    library, reason = loaded()
    assert reason is None
    assert library is not None
    assert library._name == str(brought)
    assert build.identity()["library"] == brought.stem.removeprefix("txl-")


def test_one_that_cannot_be_loaded_is_named_and_compiled_instead(loaded, tmp_path, monkeypatch, caplog):
    broken = tmp_path / "txl-broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(build, "find_prebuilt", lambda folder, sources, flags: broken)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        library, reason = loaded()
    assert library is None
    assert "CXX is 'no-such-compiler'" in (reason or "")
    assert [str(broken) in record.message for record in caplog.records] == [True]  # `library` logs the reason
