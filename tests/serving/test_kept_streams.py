"""Streams that outlive a server: moved as snapshots, or kept in a folder across a restart."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

import txl
from tests.serving.conftest import running, wait_for
from tests.serving.test_streams import OCTETS, TEXT, generate, new, nothing_left, restore, snapshot
from txl.data.characters import CharVocabulary
from txl.serving import kept_streams
from txl.serving.kept_streams import _digest
from txl.serving.requests import Limits
from txl.serving.service import Service

__all__ = ["nothing_left"]  # fixture of every test


def go_on_alike(first, stream: str, second, twin: str) -> None:
    """Generate and append text on two servers, and compare all numbers exactly."""
    pairs = ((first, stream), (second, twin))
    ours, theirs = (generate(server, name, 30, logprobs=4)["tokens"] for server, name in pairs)
    assert ours == theirs
    value = {"text": TEXT, "logprobs": 1}
    ours, theirs = (server.post(f"/v1/streams/{name}/append", value)["tokens"] for server, name in pairs)
    assert ours == theirs


def test_a_restored_stream_goes_on_bit_for_bit(server, server_with):
    other = server_with(max_streams=2)  # an engine of another size
    stream = new(server, TEXT * 3, seed=11)
    generate(server, stream, 25)
    data = snapshot(server, stream)
    moved = restore(other, data)
    here = server.get(f"/v1/streams/{stream}")
    for name in ("tokens", "memory", "seed", "drawn", "scored", "bits", "characters"):
        assert moved[name] == here[name]
    for _ in range(3):
        go_on_alike(server, stream, other, moved["id"])
    assert snapshot(server, stream)[-2000:] == snapshot(other, moved["id"])[-2000:]


def test_snapshots_of_others_are_refused_with_the_reason(server, server_with, served):
    data = snapshot(server, new(server))
    torch.manual_seed(0)
    other_model = txl.build_model(served.model.config, served.vocabulary)
    other_vocabulary = CharVocabulary([chr(300 + number) for number in range(len(served.vocabulary) - 1)])
    for changes, reason in (
        ({"model": other_model}, "model "),
        ({"vocabulary": other_vocabulary}, "model "),
        ({"mem_len": 32, "window": 32}, "mem_len"),
        ({"dtype": torch.bfloat16}, "dtype"),
    ):
        other = server_with(**changes)
        error = other.refused(409, "/v1/streams", content=data, headers=OCTETS)
        assert reason in error["message"]
        assert other.get("/v1/streams")["data"] == []


def about_of(data: bytes) -> dict[str, Any]:
    """Return the description of a stream in a snapshot."""
    return json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["txl_stream"])


def forged(data: bytes, entries: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    """Return a snapshot with other values and a matching checksum."""
    tensors = safetensors.torch.load(data) | (tensors or {})
    about = about_of(data) | entries
    del about["sha256"]
    return safetensors.torch.save(tensors, {"txl_stream": json.dumps(about | {"sha256": _digest(about, tensors)})})


def test_damaged_and_forged_snapshots_are_refused(server):
    data = snapshot(server, new(server))
    flipped = bytearray(data)
    flipped[-5] ^= 1
    for damaged in (bytes(flipped), data[:-100], data[:50], b"", b"\xff" * 100, TEXT.encode()):
        server.refused(400, "/v1/streams", content=damaged, headers=OCTETS)
    for name, value in (
        ("n_token", 3), ("waiting", 256), ("seed", -1), ("tail", [999]), ("n_token", -1), ("drawn", 2**62),
        ("scored", 10**400), ("scored", -1), ("characters", 2**62), ("created", math.inf), ("created", 1e300),
        ("other", json.loads("[" * 100 + "]" * 100)),
    ):  # fmt: skip
        content = forged(data, {name: value})
        message = server.refused(400, "/v1/streams", content=content, headers=OCTETS)["message"]
        assert "does not match its hash" not in message
        assert server.client.get("/v1/streams").is_success
    server.refused(413, "/v1/streams", content=b"\0" * (4 << 20), headers=OCTETS)


@pytest.mark.parametrize(("name", "value"), [("keys.0", math.nan), ("values.1", -math.inf), ("keys.1", -1e16)])
def test_snapshots_with_values_that_no_model_computes_are_refused(server, name, value):
    data = snapshot(server, new(server))
    tensors = {name: safetensors.torch.load(data)[name].clone()}
    tensors[name][0, 3, 1] = value
    message = server.refused(400, "/v1/streams", content=forged(data, {}, tensors), headers=OCTETS)["message"]
    assert "1e+15" in message


def test_the_largest_values_of_a_snapshot_can_be_continued(server):
    """So no snapshot makes the probabilities NaN, for which the server would blame the model."""
    data = snapshot(server, new(server))
    signs = torch.Generator().manual_seed(1)
    for size in (1e15, 1e6):
        large = {
            name: size * (1 - 2 * torch.randint(2, tensor.shape, generator=signs)).to(tensor.dtype)
            for name, tensor in safetensors.torch.load(data).items()
        }
        stream = restore(server, forged(data, {}, large))["id"]
        assert len(generate(server, stream, 20, logprobs=3)["tokens"]) == 20
        assert math.isfinite(server.post(f"/v1/streams/{stream}/append", {"text": TEXT})["bits"])


def test_snapshots_whose_header_is_nested_or_large(server):
    data = snapshot(server, new(server))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    about = header["__metadata__"]["txl_stream"]
    for depth in (100, 900, 950, 990):  # json.dumps fails at a lower depth than json.loads
        for entry in ("extra", "dtype"):
            deep = about[:-1] + f', "{entry}": ' + "[" * depth + "]" * depth + "}"
            head = json.dumps(header | {"__metadata__": {"txl_stream": deep}}).encode()
            content = len(head).to_bytes(8, "little") + head + data[8 + size :]
            answer = server.client.post("/v1/streams", content=content, headers=OCTETS)
            assert answer.status_code in (400, 409), answer.text
            assert len(answer.json()["error"]["message"]) < 300
    head = json.dumps(header | {"__metadata__": {"txl_stream": about, "more": "x" * 200_000}}).encode()
    content = len(head).to_bytes(8, "little") + head + data[8 + size :]
    message = server.refused(400, "/v1/streams", content=content, headers=OCTETS)["message"]
    assert message == "not a snapshot of a stream that this version reads"


def test_kept_over_a_restart(server_with, tmp_path, served):

    folder = tmp_path / "streams"
    with running(Service(served), folder=folder) as first:
        stream = new(first, seed=4)
        gone = new(first)
        text = generate(first, stream, 20)["text"]
        first.client.delete(f"/v1/streams/{gone}")
        with pytest.raises(txl.errors.UserError, match="another server"), running(Service(served), folder=folder):
            pass
    assert [path.name for path in folder.glob("*.safetensors")] == [f"{stream}.safetensors"]
    assert os.name == "nt" or folder.stat().st_mode & 0o77 == 0, "others could read what clients wrote"
    (folder / f"stream-{'0' * 32}.safetensors").write_bytes(b"damaged")
    with running(Service(served), folder=folder) as second:
        assert [kept["id"] for kept in second.get("/v1/streams")["data"]] == [stream]
        more = generate(second, stream, 20)["text"]
    with running(Service(dataclasses.replace(served))) as third:
        assert generate(third, new(third, seed=4), 40)["text"].startswith(text + more)
    assert (folder / f"stream-{'0' * 32}.safetensors").read_bytes() == b"damaged"


def test_streams_that_could_not_be_written_are_not_called_saved(served, tmp_path, monkeypatch):
    from txl.commands.serve import farewell

    folder = tmp_path / "streams"
    folder.mkdir()
    (folder / f"stream-{'0' * 32}.safetensors.1.partial").write_bytes(b"left by a server that was killed")

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with running(Service(served), folder=folder) as server:
        assert not list(folder.glob("*.partial"))
        for seed in range(2):
            new(server, seed=seed)
        monkeypatch.setattr(Path, "write_bytes", full)
    assert farewell(server.kept, "streams") == "stopped; streams lost: 2 (streams could not be written)"
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_stream_is_saved_while_a_long_request_changes_it(served, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_streams, "_WRITE_EVERY", 0.1)
    folder = tmp_path / "streams"
    folder.mkdir()
    with running(Service(served), folder=folder) as server:
        stream = new(server)
        url = f"{server.url}/v1/streams/{stream}/generate"
        with httpx.stream("POST", url, json={"max_tokens": 60_000, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()

            def saved_tokens() -> int:
                list(itertools.islice(lines, 50))
                path = folder / f"{stream}.safetensors"
                return about_of(path.read_bytes())["n_token"] if path.exists() else 0

            wait_for(lambda: saved_tokens() > 1000)
            assert server.service.engine.streams, "the request has ended"


def test_streams_above_the_limit_are_left_alone_and_named(tmp_path, served, caplog):
    with running(Service(served), folder=tmp_path) as first:
        streams = sorted(new(first, seed=seed) for seed in range(3))
    with running(Service(served, limits=Limits(max_kept=1)), folder=tmp_path) as second:
        assert [stream["id"] for stream in second.get("/v1/streams")["data"]] == streams[:1]
    left = [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage()]
    assert [stream in line for stream, line in zip(streams[1:], left, strict=True)] == [True, True]
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_bfloat16_streams_move_too(server_with):
    first, second = server_with(dtype=torch.bfloat16), server_with(dtype=torch.bfloat16, max_streams=2)
    stream = new(first, seed=12)
    generate(first, stream, 30)
    moved = restore(second, snapshot(first, stream))["id"]
    for _ in range(2):
        go_on_alike(first, stream, second, moved)
    ours, theirs = first.get(f"/v1/streams/{stream}"), second.get(f"/v1/streams/{moved}")
    assert (ours["tokens"], ours["bits"]) == (theirs["tokens"], theirs["bits"])
