"""Compiled one-token steps: PyTorch's numbers, also after changes of the model, and PyTorch without a compiler."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.test_contract import VARIANTS, B, lively, stream

from txl.devices import cpu_flags
from txl.models.compiled_step import LayerWeights
from txl.models.transformer_xl import TransformerXL
from txl.native import build, compiling
from txl.native.build import compiled_code, why_not
from txl.native.compiling import PROCESSORS, find_prebuilt, library_name
from txl.native.operations import _product_by, linear
from txl.native.sources import cpp_sources

needs_compiler = pytest.mark.skipif(why_not() is not None, reason=f"no compiled library: {why_not()}")


def read(model: TransformerXL, tokens, state):
    parts = []
    for token in tokens.split(1, dim=1):
        part, state = model.log_probs(token, state)
        parts.append(part)
    return torch.cat(parts, dim=1), state


@needs_compiler
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_of_a_few_rows(dtype, rows, bias, transposed):
    # Less than one vector, one vector, several vectors, and widths that are not a multiple of a vector.
    for n_in in (1, 5, 16, 31, 32, 33, 67, 410):
        for n_out in (1, 7, 8, 64, 131):
            shape = (n_in, n_out) if transposed else (n_out, n_in)
            weight, x = torch.randn(shape).to(dtype), torch.randn(rows, n_in).to(dtype)
            weight = weight.t() if transposed else weight
            offset = torch.randn(n_out).to(dtype) if bias else None
            with torch.no_grad():
                assert _product_by(x, weight, offset, True) == "library"
                found = linear(x, weight, offset, keeps_sums=True)
            expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
            assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            tolerance = 1e-13 if dtype == torch.float64 else 2e-6
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * n_in)


@needs_compiler
def test_what_it_does_not_know_is_pytorch_s():
    weight, row = torch.randn(4, 3), torch.randn(1, 3)
    assert _product_by(row, weight, None, True) == "pytorch"  # gradients are required
    with torch.no_grad():
        assert _product_by(row, weight, None, True) == "library"
        assert _product_by(row, weight, None, False) == "pytorch"
        assert _product_by(torch.randn(100, 3), weight, None, True) == "pytorch"
        assert _product_by(row.half(), weight.half(), None, True) == "pytorch"
        with torch.autocast("cpu", torch.bfloat16):
            assert _product_by(row, weight, None, True) == "pytorch"
        with compiled_code(False):
            assert _product_by(row, weight, None, True) == "halves"


def compiled_calls(monkeypatch) -> list[int]:
    calls = []
    real = LayerWeights.step
    monkeypatch.setattr(LayerWeights, "step", lambda self, *given: (calls.append(1), real(self, *given))[1])
    return calls


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if "reference" not in name])
@pytest.mark.parametrize("lengths", [{"mem_len": 7}, {"mem_len": 9, "window": 6, "clamp_len": 2}, {"mem_len": 0}])
def test_log_probs_of_one_token_a_lane(variant, lengths, dtype, tolerance, monkeypatch):
    model = lively(VARIANTS[variant], dtype)
    tokens = torch.cat([stream(seed=seed)[0] for seed in range(2)], dim=1)
    expected, through_hidden = read(model, tokens, model.init_state(B, **lengths))
    calls = compiled_calls(monkeypatch)
    with torch.no_grad():
        found, state = read(model, tokens, model.init_state(B, **lengths))
    assert len(calls) == (tokens.shape[1] if VARIANTS[variant].encoding == "relative" else 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    # PyTorch can read the memory that compiled steps wrote.
    more, _ = model.log_probs(tokens[:, :5], state)
    again, _ = model.log_probs(tokens[:, :5], through_hidden)
    torch.testing.assert_close(more, again, rtol=0, atol=tolerance)


@needs_compiler
def test_lanes_of_different_lengths():
    model = lively(VARIANTS["post-norm"])
    tokens = stream()[0]

    def through(state):
        _, state = read(model, tokens[:, :6], state)
        return read(model, tokens[:, 6:], state.reset(torch.tensor([False, True, False])))[0]

    expected = through(model.init_state(B))
    with torch.no_grad():
        torch.testing.assert_close(through(model.init_state(B)), expected, rtol=0, atol=1e-10)


@needs_compiler
def test_many_keys_in_chunks_and_any_number_of_threads():
    model = lively(VARIANTS["post-norm"])
    tokens = torch.randint(17, (1, 601))
    outputs = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            with torch.no_grad():
                _, state = model.log_probs(tokens[:, :-1], model.init_state(1, mem_len=700))
                outputs.append(model.log_probs(tokens[:, -1:], state)[0])
        finally:
            torch.set_num_threads(before)
    expected = model.log_probs(tokens, model.init_state(1, mem_len=700))[0][:, -1:]
    torch.testing.assert_close(outputs[0], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-10)


@needs_compiler
@pytest.mark.parametrize("change", ["hook", "another module", "another parameter", "in place", "to"])
def test_changes_of_the_model_in_the_middle_of_a_stream_are_noticed(change):
    model = lively(VARIANTS["post-norm"])
    tokens = stream()[0]
    with torch.no_grad():
        _, state = read(model, tokens[:, :9], model.init_state(B))
        inner: Any = model.get_submodule("layers.1.feed_forward.inner")
        if change == "hook":
            inner.register_forward_hook(lambda module, given, output: output * 2)
        elif change == "another module":
            model.get_submodule("layers.1.feed_forward").inner = torch.nn.Linear(10, 13).double()
        elif change == "another parameter":
            inner.weight = torch.nn.Parameter(torch.randn(13, 10, dtype=torch.float64))
        elif change == "in place":
            inner.weight.mul_(2)
        else:
            model.float()
        found, _ = read(model, tokens[:, 9:], state)
        with compiled_code(False):
            expected, _ = read(model, tokens[:, 9:], state)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if change == "to" else 1e-10)


@needs_compiler
def test_states_and_models_that_were_read_by_it_can_be_copied():
    model = lively(VARIANTS["post-norm"])
    tokens = stream()[0]
    with torch.no_grad():
        _, state = read(model, tokens[:, :9], model.init_state(B))
        expected, _ = read(model, tokens[:, 9:], state)
        for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            found, _ = read(copy.deepcopy(model), tokens[:, 9:], other)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@needs_compiler
def test_weights_that_are_not_numbers_stay_so():
    model = lively(VARIANTS["post-norm"], torch.float32)
    model.get_parameter("layers.0.attention.k_proj.weight").data[3, 2] = torch.nan
    with torch.no_grad():
        found, _ = read(model, stream()[0], model.init_state(B))
    assert found.isnan().all()


def test_without_a_compiler_one_line_says_so_and_pytorch_computes(monkeypatch, tmp_path, caplog):
    model = lively(VARIANTS["post-norm"])
    tokens = stream()[0]
    expected, _ = read(model, tokens, model.init_state(B))
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    build._load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING), torch.no_grad():
            found, _ = read(model, tokens, model.init_state(B))
            assert why_not() == "no C++ compiler found (c++, g++, clang++)" or "CXX" in os.environ
    finally:
        build._load.cache_clear()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "compiled code is not available, PyTorch is used instead"
    ]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_system_that_hides_its_processor_has_compiled_code(monkeypatch):
    def hidden(self: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert cpu_flags() == frozenset()
    assert platform.machine() in build._processor()


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'decode.cpp:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "error: no such thing" in (reason_now() or "")
    assert not list((tmp_path / "transformer-xl" / "native").iterdir())


def reason_now() -> str | None:
    """Return why the compiled library is not available in the current environment, or None if it is."""
    build._load.cache_clear()
    try:
        return why_not()
    finally:
        build._load.cache_clear()


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Set CXX to a fast compiler that logs its arguments, with an empty cache; return the paths of cache and log."""
    calls, script = tmp_path / "calls", tmp_path / "compiler with a space"
    script.write_text(
        f"""#!/bin/sh
echo "$@" >> {calls}
test "$2" = --version && exit
for last; do :; done
echo 'int txl_nothing;' | {shlex.quote(real_compiler())} -shared -fPIC -x c++ - -o "$last"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{script}' --as-g++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "transformer-xl" / "native", calls


def real_compiler() -> str:
    return next((path for path in map(shutil.which, compiling.COMPILERS) if path), "no compiler")


def compilations(calls) -> int:
    return sum("--version" not in line for line in calls.read_text().splitlines())


@needs_compiler
def test_a_compiler_may_have_arguments(compiler):
    _, calls = compiler
    assert reason_now() is None
    assert all(line.startswith("--as-g++ ") for line in calls.read_text().splitlines())
    assert compilations(calls) == 1
    assert reason_now() is None
    assert compilations(calls) == 1  # the library was cached


@pytest.mark.parametrize("given", ["no-such-compiler --fast", "g++ 'unclosed"])
def test_a_compiler_that_cannot_be_run_is_named_and_no_other_is_used(given, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", given)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (reason_now() or "").startswith(f"CXX is {given!r}" if "'" not in given else "CXX is ")


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "empty", "a flipped bit"])
def test_a_damaged_library_is_compiled_again_before_it_is_loaded(damage, compiler):
    folder, calls = compiler
    assert reason_now() is None
    (library,) = folder.glob("*.so")
    content = bytearray(library.read_bytes())
    if damage == "a flipped bit":
        content[len(content) // 2] ^= 1
    # Write a new file and rename it, since this process has the old file mapped.
    damaged = library.with_suffix(".damaged")
    damaged.write_bytes({"truncated": content[: len(content) // 2], "empty": b""}.get(damage, content))
    damaged.rename(library)
    assert reason_now() is None
    assert compilations(calls) == 2
    assert any(build._full_name(each.name.rpartition("-")[0], each) == each.name for each in folder.glob("*.so"))


@needs_compiler
def test_processes_that_compile_at_once_both_have_a_library(compiler):
    code = "from txl.native.build import why_not; raise SystemExit(why_not())"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [each.wait(timeout=120) for each in running] == [0, 0, 0]
    folder, calls = compiler
    assert all(build._full_name(each.name.rpartition("-")[0], each) == each.name for each in folder.glob("*.so"))
    before = compilations(calls)
    assert reason_now() is None
    assert compilations(calls) == before


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


@needs_compiler
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
