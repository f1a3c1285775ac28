"""Import of a model by its name on the Hub, from a local server that answers the requests of the Hub's client."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import txl
from txl.interop.import_run import import_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model_files(d_inner: int) -> dict[str, bytes]:
    """Return the files of a model of two layers as Hugging Face's class would save the model."""
    torch.manual_seed(0)
    tensors = {
        "crit.out_layers.0.bias": torch.randn(29),
        "transformer.word_emb.emb_layers.0.weight": torch.randn(29, 12),
    }
    for name in ("r_w_bias", "r_r_bias"):
        tensors[f"transformer.{name}"] = torch.randn(2, 5)
    for layer in range(2):
        shapes = {
            "dec_attn.qkv_net.weight": (30, 12), "dec_attn.r_net.weight": (10, 12), "dec_attn.o_net.weight": (12, 10),
            "dec_attn.layer_norm.weight": (12,), "dec_attn.layer_norm.bias": (12,), "pos_ff.layer_norm.weight": (12,),
            "pos_ff.layer_norm.bias": (12,), "pos_ff.CoreNet.0.weight": (d_inner, 12), "pos_ff.CoreNet.0.bias": (d_inner,),
            "pos_ff.CoreNet.3.weight": (12, d_inner), "pos_ff.CoreNet.3.bias": (12,),
        }  # fmt: skip
        tensors |= {f"transformer.layers.{layer}.{name}": torch.randn(shape) for name, shape in shapes.items()}
    config = {
        "model_type": "transfo-xl", "architectures": ["TransfoXLLMHeadModel"], "vocab_size": 29, "cutoffs": [],
        "d_model": 12, "d_embed": 12, "n_head": 2, "d_head": 5, "d_inner": d_inner, "div_val": 1, "n_layer": 2,
        "mem_len": 8, "clamp_len": 4, "same_length": True, "untie_r": False, "dropout": 0.1, "dropatt": 0.0,
    }  # fmt: skip
    words = ["<eos>", "<unk>", *(f"w{number}" for number in range(27))]
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": save(tensors),
        "vocab.txt": "\n".join(words).encode(),
    }


class Hub(ThreadingHTTPServer):
    """A server of one model, org/model. If `break_once`, the first download of the weights is cut off."""

    def __init__(self, files: dict[str, bytes], break_once: bool):
        self.files, self.break_next = files, break_once
        self.requests: Counter[str] = Counter()
        self.ranges: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, *args):  # pyright: ignore[reportIncompatibleMethodOverride]
        pass

    def answer(self, code: int, content: bytes, headers: dict[str, str] | None = None, cut: int | None = None):
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
            if cut is not None:
                self.wfile.flush()
                self.connection.close()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name} for name in [*self.server.files, "README.md", "tf_model.h5"]]
            told: Any = {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": siblings, "tags": []}
            if "/tree/" in path:
                files = self.server.files.items()
                told = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files]
            self.answer(200, json.dumps(told).encode(), {"Content-Type": "application/json"})
            return
        name = path.rpartition("/")[2]
        content = self.server.files.get(name) if path.startswith("/org/model/resolve/") else None
        if content is None:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"ETag": tag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "GET":
            self.server.requests[name] += 1
        asked = self.headers.get("Range")
        if asked and self.command == "GET":
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            self.server.ranges.append(asked)
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self.answer(206, content[first:], headers)
        elif self.command == "GET" and name == "model.safetensors" and self.server.break_next:
            self.server.break_next = False
            self.answer(200, content, headers, cut=len(content) // 2)
        else:
            self.answer(200, content, headers)

    do_HEAD = do_GET


def run_import(name: str, hub_url: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_ENDPOINT": hub_url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0", "NO_PROXY": "*",
    }  # fmt: skip
    words = [sys.executable, "-m", "txl", "import", name, "--out", str(tmp_path / "run")]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("break_once", [False, True])
def test_a_model_is_downloaded_by_name_and_continued_after_a_break(break_once, tmp_path):
    # The client stores downloads in pieces of 10 MB, so only the download of a larger file can be continued.
    files = model_files(d_inner=300_000 if break_once else 16)
    files["vocab.txt"] = files["vocab.txt"].removesuffix(b"\nw26")
    files["added_tokens.json"] = b'{"<formula>": 28}'
    hub = Hub(files, break_once)
    done = run_import("org/model", hub.url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.requests["README.md"] == hub.requests["tf_model.h5"] == 0
    assert hub.requests["model.safetensors"] == (2 if break_once else 1)
    if break_once:
        (asked,) = hub.ranges
        assert 10**7 <= int(asked.removeprefix("bytes=").partition("-")[0]) < len(files["model.safetensors"])
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    import_run(tmp_path, tmp_path / "expected")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["name"] == "model"
    (model, vocabulary), (expected, _) = (txl.load(tmp_path / name) for name in ("run", "expected"))
    assert vocabulary is not None
    assert vocabulary.encode("w1 <formula>\n").tolist() == [3, 28, 0]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in expected.state_dict().items())
    hub.shutdown()


def test_a_name_that_is_not_there_is_one_clear_line(tmp_path):
    hub = Hub({}, False)
    done = run_import("org/other", hub.url, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("txl: error: org/other: no such file or directory, and not found on the Hub (")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    hub.shutdown()
