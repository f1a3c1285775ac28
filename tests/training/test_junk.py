"""Run directories with arbitrary content in a file: readers either succeed or refuse the run in one line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.conftest import small_run

import txl
from txl.errors import UserError
from txl.runs import checkpoints
from txl.runs.directory import RunDirectory
from txl.runs.status import run_status
from txl.training.state import Counters
from txl.training.trainer import Trainer

FILES = (
    "config.json",
    "vocabulary.json",
    "log.jsonl",
    "best",
    "latest",
    "checkpoints/step-00000012/manifest.json",
    "checkpoints/step-00000012/training_state.json",
    "checkpoints/step-00000012/training_state.safetensors",
    "checkpoints/step-00000012/model.safetensors",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
SETTINGS = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def run_copy(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("junk") / "run"
    shutil.copytree(trained, out)
    return out


@pytest.fixture(scope="module")
def weights(trained):
    return txl.load(trained)[0].state_dict()


def read_everything(out, weights, story, data_dir) -> list[str]:
    """Check that each reader succeeds, with the trained weights, or raises a `UserError`; return those without the run."""

    def loaded(checkpoint: str | None) -> None:
        model, _ = txl.load(out, checkpoint=checkpoint)
        found = model.state_dict()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)

    def told() -> None:
        lines = run_status(out).lines()
        assert len(lines) >= 4
        assert lines[0].startswith(f"{out}: ")

    def goes_on() -> None:
        assert isinstance(Trainer(small_run(str(story)), out, data_dir=data_dir, quiet=True).would_go_on(), bool)

    unnamed = []
    for action in (lambda: loaded(None), lambda: loaded("latest"), told, goes_on):
        try:
            action()
        except UserError as refused:
            unnamed += [str(refused)] * (str(out) not in str(refused))
    return unnamed


@pytest.mark.parametrize("name", FILES)
@given(junk=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@SETTINGS
def test_junk_in_any_file_is_a_user_s_mistake(name, junk, run_copy, weights, story, data_dir):
    path = run_copy / name
    original = path.read_bytes()
    try:
        path.write_bytes(junk)
        assert read_everything(run_copy, weights, story, data_dir) == []
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("name", FILES[:7])
@given(data=st.data())
@SETTINGS
def test_a_field_of_any_other_value_is_a_user_s_mistake(name, data, run_copy, weights, story, data_dir):
    """Files are well formed and their hashes match, as if a person or another program had written them."""
    path = run_copy / name
    manifest = run_copy / "checkpoints" / "step-00000012" / "manifest.json"
    original, listed = path.read_bytes(), manifest.read_bytes()
    try:
        lines = original.decode().splitlines()
        if name == "log.jsonl":
            number = data.draw(st.integers(0, len(lines) - 1))
            lines[number] = json.dumps(_changed(json.loads(lines[number]), data))
            path.write_text("\n".join(lines) + "\n")
        elif name in ("best", "latest"):
            path.write_text(data.draw(st.text(max_size=20)), encoding="utf-8", errors="replace")
        else:
            path.write_text(json.dumps(_changed(json.loads(original), data)))
        if path != manifest:
            entries = json.loads(listed)
            entry = entries["files"].get(path.name)
            if entry is not None:
                entry["bytes"], entry["sha256"] = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
            if name == "vocabulary.json":
                entries["vocabulary_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
            write_manifest(manifest, entries)
        assert read_everything(run_copy, weights, story, data_dir) == []
    finally:
        path.write_bytes(original)
        manifest.write_bytes(listed)


def write_manifest(path, entries) -> None:
    path.write_text(json.dumps(entries | {"sha256": checkpoints._own_sha256(entries)}))


def _changed(value, data):
    """Return a JSON value in which one value, at any depth, is replaced by a random value."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return value | {key: _changed(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        number = data.draw(st.integers(0, len(value) - 1))
        return [*value[:number], _changed(value[number], data), *value[number + 1 :]]
    return data.draw(JSON)


@pytest.mark.parametrize("value", [math.nan, "x", [{}], 0.5, 2**63])
def test_counters_of_another_type_are_refused(value):
    for name in ("step", "best_step", "scheduled_step", "validation_losses", "validation_due", "watch"):
        with pytest.raises(UserError, match=f"progress.{name}"):
            Counters.from_dict(dataclasses.asdict(Counters()) | {name: value})
    assert Counters.from_dict(dataclasses.asdict(Counters(best_nll=math.nan, validation_losses=[1.0]))).step == 0


@example(name="memory.limits", shape=[3])  # the right shape, but limits that differ from the configuration
@example(name="memory.hidden.0", shape=[4, 0, 0])
@example(name="memory.hidden.0", shape=[4, 8, 5])
@example(name="memory.filled", shape=[])
@given(
    name=st.sampled_from(["memory.hidden.0", "memory.limits", "memory.filled", "random.cpu", "optimizer.u/exp_avg"]),
    shape=st.lists(st.integers(0, 5), max_size=3) | st.none(),
)
@SETTINGS
def test_a_training_state_of_another_shape_is_refused(name, shape, trained, story, data_dir, tmp_path):
    """The hashes match, so only the check of the shapes can refuse the state."""
    out = tmp_path / "run"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(trained, out)
    for each in (out / "checkpoints").iterdir():
        if each.name != "step-00000012":
            shutil.rmtree(each)
    folder = out / "checkpoints" / "step-00000012"
    tensors = load_file(folder / "training_state.safetensors")
    stored = tensors.pop(name)
    if shape is not None:
        # Zeros of the right shape are a valid state, except for limits, which must agree with the configuration.
        assume(torch.Size(shape) != stored.shape or name == "memory.limits")
        tensors[name] = torch.zeros(shape, dtype=stored.dtype)
    save_file(tensors, folder / "training_state.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    path = folder / "training_state.safetensors"
    manifest["files"][path.name] = {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    write_manifest(folder / "manifest.json", manifest)
    with pytest.raises(UserError):
        Trainer(small_run(str(story)), out, data_dir=data_dir, quiet=True).fit()


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_noticed_or_harmless(name, run_copy, story, data_dir):
    """With any one of 24 bits of the file flipped, loading returns the trained weights or is refused."""
    path = run_copy / name
    original = path.read_bytes()
    weights = {key: tensor.clone() for key, tensor in txl.load(run_copy)[0].state_dict().items()}
    config = RunDirectory(run_copy).config()
    step = max(1, len(original) * 8 // 24)
    for bit in range(0, len(original) * 8, step):
        flipped = bytearray(original)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            model, _ = txl.load(run_copy)
        except UserError:
            continue
        finally:
            path.write_bytes(original)
        assert name == "config.json" or RunDirectory(run_copy).config() == config
        assert all(bool((tensor == weights[key]).all()) for key, tensor in model.state_dict().items()), bit
