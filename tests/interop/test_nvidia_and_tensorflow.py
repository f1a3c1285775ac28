"""Checkpoints in NVIDIA's and TensorFlow's formats, made from the authors' golden weights, give equal losses."""

from __future__ import annotations

import argparse
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import txl
from tests.interop.make_golden import BASE, CASES
from tests.interop.test_original import EXPECTED, GOLDEN, losses
from txl.cli import main
from txl.errors import UserError
from txl.interop import import_run as import_module
from txl.interop.conversion import flip_clusters
from txl.interop.import_run import import_run, read_source
from txl.interop.tensorflow import source_of, tensorflow_prefix
from txl.interop.vocabulary_files import read_vocabulary

WORDS = ["<eos>", "<unk>", *(f"w{number}" for number in range(27))]


def nvidia_state(case: str) -> dict[str, torch.Tensor]:
    """Return the authors' weights under NVIDIA's names, with cluster rows in NVIDIA's order."""
    tensors = dict(read_source(GOLDEN / f"{case}.pt").tensors)
    flip_clusters(tensors)
    ties = CASES[case].get("tie_projs", [False])
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("crit.out_layers."):
            _, _, number, kind = name.split(".")
            if kind == "weight" and CASES[case].get("tie_weight", True):
                continue
            name = f"crit.out_layers_{'biases' if kind == 'bias' else 'weights'}.{number}"
        if name.startswith("crit.out_projs.") and ties[int(name.rpartition(".")[2])]:
            continue
        state[name] = tensor.clone()
    for name in [name for name in tensors if name.startswith("word_emb.emb_projs.")]:
        state[f"crit.shared_out_projs.{name.rpartition('.')[2]}"] = tensors[name].clone()
    return state


def nvidia_checkpoint(case: str, path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    options = BASE | CASES[case] | changes
    config = {"d_embed": options["d_model"], "attn_type": 0, "sample_softmax": -1} | options
    config.pop("tie_projs", None)
    module = types.ModuleType("utils.vocabulary")
    vocab_class = type("Vocab", (), {"__module__": "utils.vocabulary"})
    module.Vocab = vocab_class  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "utils", types.ModuleType("utils"))
    monkeypatch.setitem(sys.modules, "utils.vocabulary", module)
    vocab: Any = vocab_class()
    vars(vocab).update(idx2sym=WORDS, lower_case=False, special=["<eos>"])
    checkpoint = {
        "args": argparse.Namespace(dataset="wt103"), "model_config": config, "model_state": nvidia_state(case),
        "optimizer_state": {"state": {}, "param_groups": [{"lr": 0.1}]}, "scheduler_state": {}, "vocab": vocab,
        "amp_state": None, "epoch": 1, "train_step": 5, "best_val_loss": np.float64(2.5),
    }  # fmt: skip
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize("case", [case for case in CASES if not CASES[case].get("same_length")])
def test_nvidia_s_checkpoints_give_the_authors_losses(case, tmp_path, monkeypatch):
    path = nvidia_checkpoint(case, tmp_path / "checkpoint_best.pt", monkeypatch)
    run, _ = import_run(tmp_path, tmp_path / "run")
    assert path.exists()
    assert run.eval.segment == BASE["tgt_len"]
    model, vocabulary = txl.load(tmp_path / "run")
    found = losses(model, torch.tensor(EXPECTED[case]["tokens"]))
    torch.testing.assert_close(found, torch.tensor(EXPECTED[case]["losses"]), rtol=0, atol=1e-5)
    assert vocabulary is not None
    assert vocabulary.encode("w3 strange\n").tolist() == [5, 1, 0]


def test_same_length_counts_the_query_in_addition_there(tmp_path, monkeypatch):
    nvidia_checkpoint("plain", tmp_path / "a.pt", monkeypatch, same_length=True, clamp_len=4)
    run, _ = import_run(tmp_path / "a.pt", tmp_path / "run")
    assert (run.model.mem_len, run.model.window, run.model.clamp_len) == (8, 9, 4)
    for asked, got in (({"mem_len": 20}, (20, 21)), ({"mem_len": 3}, (3, 4)), ({"mem_len": 20, "window": 5}, (20, 5))):
        run, _ = import_run(tmp_path / "a.pt", tmp_path / f"run-{len(list(tmp_path.iterdir()))}", model_options=asked)
        assert (run.model.mem_len, run.model.window) == (run.eval.mem_len, run.eval.window) == got


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_type": 2}, "encoding type 2"),
        ({"ext_len": 3}, "ext_len is 3"),
        ({"sample_softmax": 9}, "sample_softmax is 9"),
        ({"dropout": None}, "dropout is None; expected a number"),
        ({"cutoffs": 5}, "cutoffs is 5; expected a list of whole numbers"),
        ({"cutoffs": torch.tensor([1, 2])}, "cutoffs is a tensor; expected a plain value"),
        ({"attn_type": torch.tensor([0, 0])}, "attn_type is a tensor; expected a plain value"),
        ({"tgt_len": "8"}, "tgt_len is '8'; expected a whole number"),
        ({"n_layer": 5}, "the checkpoint's tensors say 2"),
        ({"dropout": 10**400}, "dropout is 1000.*; expected a number"),
        ({"mem_len": 10**30}, "model.mem_len is 1000"),
        ({"tgt_len": 10**30}, "train.segment is 1000"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(changes, message, tmp_path, monkeypatch):
    nvidia_checkpoint("plain", tmp_path / "a.pt", monkeypatch, **changes)
    with pytest.raises(UserError, match=message):
        import_run(tmp_path / "a.pt", tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("word_emb.emb_layers.0.weight", torch.full((29, 12), torch.nan), "holds numbers that are not finite"),
        ("crit.cluster_bias", torch.tensor(1.0), "in 0 dimensions"),
        ("crit.out_layers_biases.0", torch.tensor(1.0), "in 0 dimensions"),
    ],
)
def test_tensors_that_no_model_has_are_refused(name, tensor, message, tmp_path, monkeypatch):
    path = nvidia_checkpoint("plain", tmp_path / "a.pt", monkeypatch)
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["model_state"][name] = tensor
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match=message):
        import_run(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def tensorflow_arrays(case: str, untie_r: bool = False) -> dict[str, np.ndarray]:
    """Return the authors' weights as variables of the authors' TensorFlow code."""
    tensors = {name: tensor.numpy() for name, tensor in read_source(GOLDEN / f"{case}.pt").tensors.items()}
    cutoffs, div_val = CASES[case].get("cutoffs", []), CASES[case].get("div_val", 1)
    ties = CASES[case].get("tie_projs", [True])
    ends = [0, *cutoffs, BASE["n_token"]]
    arrays: dict[str, np.ndarray] = {"global_step": np.array(5), "transformer/r_w_bias/Adam": np.zeros(3)}
    for name, ours in (("transformer/r_w_bias", "r_w_bias"), ("transformer/r_r_bias", "r_r_bias")):
        arrays[name] = np.stack([tensors[ours]] * 2) if untie_r else tensors[ours]
    embed, softmax = "transformer/adaptive_embed", "transformer/adaptive_softmax"
    for i in range(len(ends) - 1):
        folder = "" if div_val == 1 else f"cutoff_{i}/"
        if div_val > 1 or i == 0:
            arrays[f"{embed}/{folder}lookup_table"] = tensors[f"word_emb.emb_layers.{i}.weight"]
            if f"word_emb.emb_projs.{i}" in tensors:
                arrays[f"{embed}/{folder}proj_W"] = tensors[f"word_emb.emb_projs.{i}"].T
        bias = tensors[f"crit.out_layers.{i if div_val > 1 else 0}.bias"]
        arrays[f"{softmax}/cutoff_{i}/b" if cutoffs else f"{softmax}/bias"] = (
            bias if div_val > 1 else bias[ends[i] : ends[i + 1]]
        )
        if f"crit.out_projs.{i}" in tensors and not ties[i]:
            arrays[f"{softmax}/cutoff_{i}/proj"] = tensors[f"crit.out_projs.{i}"].T
    if cutoffs:
        arrays[f"{softmax}/cutoff_0/cluster_W"] = tensors["crit.cluster_weight"]
        arrays[f"{softmax}/cutoff_0/cluster_b"] = tensors["crit.cluster_bias"]
    for layer in range(BASE["n_layer"]):
        theirs, ours = f"transformer/layer_{layer}", f"layers.{layer}"
        for name in ("qkv", "r", "o"):
            arrays[f"{theirs}/rel_attn/{name}/kernel"] = tensors[f"{ours}.dec_attn.{name}_net.weight"].T
        for folder, part in (("rel_attn", "dec_attn"), ("ff", "pos_ff")):
            arrays[f"{theirs}/{folder}/LayerNorm/gamma"] = tensors[f"{ours}.{part}.layer_norm.weight"]
            arrays[f"{theirs}/{folder}/LayerNorm/beta"] = tensors[f"{ours}.{part}.layer_norm.bias"]
        for name, place in (("layer_1", 0), ("layer_2", 3)):
            arrays[f"{theirs}/ff/{name}/kernel"] = tensors[f"{ours}.pos_ff.CoreNet.{place}.weight"].T
            arrays[f"{theirs}/ff/{name}/bias"] = tensors[f"{ours}.pos_ff.CoreNet.{place}.bias"]
    return arrays


TENSORFLOW_CASES = ["plain", "narrow-embedding", "clusters", "clusters-narrow", "div-val-2", "div-val-4-untied"]


def model_variables(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if name.startswith("transformer/") and "/Adam" not in name}


# Options that the checkpoint does not contain. The golden losses were computed with PyTorch's epsilon.
OPTIONS: dict[str, Any] = {"mem_len": 8, "layer_norm_eps": 1e-5}


@pytest.mark.parametrize("untie_r", [False, True])
@pytest.mark.parametrize("case", TENSORFLOW_CASES)
def test_tensorflow_s_variables_give_the_authors_losses(case, untie_r, tmp_path, monkeypatch):
    source = source_of(model_variables(tensorflow_arrays(case, untie_r)), "model.ckpt")
    (tmp_path / "model.ckpt-5.index").write_bytes(b"")
    monkeypatch.setattr(import_module, "read_tensorflow", lambda prefix: source)
    run, notes = import_run(tmp_path, tmp_path / "run", model_options=OPTIONS)
    assert any("does not state memory" in note for note in notes)
    assert run.to_dict()["model"]["untie_r"] is untie_r
    model, _ = txl.load(tmp_path / "run")
    found = losses(model, torch.tensor(EXPECTED[case]["tokens"]))
    torch.testing.assert_close(found, torch.tensor(EXPECTED[case]["losses"]), rtol=0, atol=1e-5)


def test_a_first_cluster_without_projection_has_the_identity():
    arrays = model_variables(tensorflow_arrays("div-val-2"))
    arrays.pop("transformer/adaptive_embed/cutoff_0/proj_W")
    source = source_of(arrays, "model.ckpt")
    assert torch.equal(source.tensors["word_emb.emb_projs.0"], torch.eye(12))
    assert source.settings["layer_norm_eps"] == 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("transformer/r_w_bias"), "r_w_bias, r_r_bias or layer_0 is missing"),
        (lambda arrays: arrays.pop("transformer/layer_0/rel_attn/qkv/kernel"), "layer_0 is missing"),
        (lambda arrays: arrays.update({"transformer/r_w_bias": np.zeros((1, 2, 5))}), "one pair a layer"),
        (lambda arrays: arrays.update({"transformer/layer_0/x": np.zeros(1)}), "transformer/layer_0/x has no place"),
    ],
)
def test_variables_of_another_model_are_refused_by_name(change, message):
    arrays = model_variables(tensorflow_arrays("plain"))
    change(arrays)
    with pytest.raises(UserError, match=message):
        source_of(arrays, "model.ckpt")


def test_a_checkpoint_s_prefix_is_found(tmp_path):
    for step in (5, 10, 9):
        (tmp_path / f"model.ckpt-{step}.index").write_bytes(b"")
    assert tensorflow_prefix(tmp_path) == tmp_path / "model.ckpt-10"
    assert tensorflow_prefix(tmp_path / "model.ckpt-9") == tmp_path / "model.ckpt-9"
    assert tensorflow_prefix(tmp_path / "model.ckpt-9.index") == tmp_path / "model.ckpt-9"
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt-5"\n')
    assert tensorflow_prefix(tmp_path) == tmp_path / "model.ckpt-5"
    assert tensorflow_prefix(tmp_path / "nothing") is None


def test_without_tensorflow_it_is_said_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    (tmp_path / "model.ckpt-5.index").write_bytes(b"")
    assert main(["import", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "pip install 'transformer-xl[tensorflow]'" in capsys.readouterr().err


def test_pickles_of_python_2_are_read(tmp_path):
    """The authors cached corpora in this form: protocol 2 with byte strings."""
    words = b"".join(b"U" + bytes([len(word)]) + word.encode() for word in WORDS)
    program = (
        b"\x80\x02cdata_utils\nCorpus\n)\x81}U\x05vocabcvocabulary\nVocab\n)\x81}U\x07idx2sym](" + words + b"esbsb."
    )
    (tmp_path / "cache.pkl").write_bytes(program)
    assert len(read_vocabulary(tmp_path / "cache.pkl")) == 29


KINDS = {"byte": ["32", "101", "10"], "char": ["_", "e", "a"], "word": ["the", "<eos>", "<unk>"]}


@pytest.mark.parametrize(("kind", "symbols"), [*KINDS.items(), ("word", ["<S>", "x", "<UNK>"])])
def test_symbols_become_what_they_are(symbols, kind, tmp_path):
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": symbols}))
    (tmp_path / "vocab.txt").write_text("\n".join(symbols))
    vocabulary = read_vocabulary(tmp_path / "vocab.pkl")
    assert vocabulary.kind == kind
    assert len(vocabulary) == 3
    assert read_vocabulary(tmp_path / "vocab.txt") == vocabulary
    if kind == "char":
        assert vocabulary.decode([1, 0, 2]) == "e a"
    if kind == "byte":
        assert vocabulary.decode([1, 0, 1]) == "e e"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b'{"a": 5}', b"a\nb\n", b"\x80\x02]."])
def test_what_is_no_vocabulary_is_refused(content, tmp_path, capsys):
    (tmp_path / "vocab").write_bytes(content)
    words = ["import", str(GOLDEN / "plain.pt"), "--out", str(tmp_path / "run")]
    assert main([*words, "--vocabulary", str(tmp_path / "vocab")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_of_another_size_is_refused(tmp_path, capsys):
    (tmp_path / "vocab.txt").write_text("<eos>\n<unk>\nx\n")
    words = ["import", str(GOLDEN / "plain.pt"), "--out", str(tmp_path / "run")]
    assert main([*words, "--vocabulary", str(tmp_path / "vocab.txt")]) == 2
    assert "the vocabulary has 3 symbols, the checkpoint 29" in capsys.readouterr().err
