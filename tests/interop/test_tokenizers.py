"""Vocabularies inside the tokenizers that Hugging Face's and NVIDIA's code pickle, and what a bad one does."""

from __future__ import annotations

import json
import pickle
import random
import re
import sys
import types
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

import txl
from tests.interop.test_hub import model_files
from tests.interop.test_nvidia_and_tensorflow import nvidia_checkpoint
from txl.cli import main
from txl.data.bpe import byte_symbols
from txl.errors import UserError
from txl.interop.import_run import import_run
from txl.interop.vocabulary_files import read_vocabulary, vocabulary_from

WORDS = ["<eos>", "<unk>", *(f"w{number}" for number in range(27))]
"""Words of `model_files`, which has as many rows."""


@pytest.fixture
def known(monkeypatch) -> Any:
    """Function that makes an object of a class by module and name, which `pickle` finds again in that module."""

    modules: dict[str, types.ModuleType] = {}

    def make(module: str, name: str, **attributes: Any) -> Any:
        holder = modules.setdefault(module, types.ModuleType(module))
        monkeypatch.setitem(sys.modules, module, holder)
        if "." in module:  # `pickle` imports the package first
            monkeypatch.setitem(sys.modules, module.partition(".")[0], types.ModuleType(module.partition(".")[0]))
        if not hasattr(holder, name):
            setattr(holder, name, type(name, (), {"__module__": module}))
        each = getattr(holder, name)()
        vars(each).update(attributes)
        return each

    return make


class Compiled:
    """An object that is pickled as a call of `regex._regex.compile`, as a pattern of the module regex is."""

    def __init__(self, compiler: Any):
        self.compiler = compiler

    def __reduce__(self):
        return self.compiler, ("'s|'t", 32, [1, 2], {}, {}, {}, [], None, None, 0, 0)


@pytest.fixture
def pattern(monkeypatch) -> Compiled:
    module = types.ModuleType("regex._regex")
    exec("def compile(*parts): raise AssertionError", vars(module))
    monkeypatch.setitem(sys.modules, "regex", types.ModuleType("regex"))
    monkeypatch.setitem(sys.modules, "regex._regex", module)
    return Compiled(vars(module)["compile"])


def attributes_of_tokenizer(known: Any, words: list[str]) -> dict[str, Any]:
    """Return the attributes that Hugging Face's TransfoXLTokenizer saves, with objects of the same modules."""
    return {
        "counter": Counter(words),
        "special": ["<eos>"],
        "lower_case": False,
        "delimiter": None,
        "punction_without_space_before_pattern": re.compile(r"[^\w\s][x]"),
        "moses_punct_normalizer": known("sacremoses.normalize", "MosesPunctNormalizer", substitutions=[(re.compile("a"), "b")]),
        "moses_tokenizer": known("sacremoses.tokenize", "MosesTokenizer", lang="en", NONBREAKING_PREFIXES=["Mr"]),
        "moses_detokenizer": known("sacremoses.tokenize", "MosesDetokenizer", lang="en"),
        "idx2sym": words,
        "sym2idx": OrderedDict((word, number) for number, word in enumerate(words)),
        "tokens_trie": known("transformers.tokenization_utils", "Trie", data={"<": {"e": {"": 1}}}),
        "_added_tokens_decoder": {0: AddedToken("<eos>", special=True)},
        "unk_idx": 1,
    }  # fmt: skip


def directory(tmp_path: Path, **files: bytes) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name, content in (model_files(16) | files).items():
        (folder / name).write_bytes(content)
    (folder / "vocab.txt").unlink()
    return folder


@pytest.mark.parametrize("kind", ["vocab.pkl", "vocab.bin", "vocab.bin of 2019"])
def test_the_tokenizer_that_transformers_saved_gives_the_vocabulary_with_its_added_tokens(kind, known, tmp_path):
    folder = directory(tmp_path)
    attributes = attributes_of_tokenizer(known, WORDS[:27])
    if kind == "vocab.pkl":
        (folder / kind).write_bytes(pickle.dumps(attributes))
    else:
        torch.save(attributes, folder / "vocab.bin", _use_new_zipfile_serialization=kind == "vocab.bin")
    (folder / "added_tokens.json").write_text(json.dumps({"<other>": 28, "<formula>": 27, "<more>": 29}))
    _, notes = import_run(folder, tmp_path / "ours")
    assert notes == ["added tokens for which the model has no weights are left out: <more>"]
    vocabulary = txl.load(tmp_path / "ours")[1]
    assert vocabulary is not None
    assert vocabulary.encode("w3 <formula> strange <other> w24").tolist() == [5, 27, 1, 28, 26]


def test_flipped_bytes_of_a_tokenizer_lead_to_our_own_errors_only(known, tmp_path):
    content, generator, refused = pickle.dumps(attributes_of_tokenizer(known, WORDS)), random.Random(0), 0
    for _ in range(500):
        changed = bytearray(content)
        for _ in range(generator.choice((1, 1, 3, 20))):
            changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        (tmp_path / "vocab.pkl").write_bytes(changed)
        try:
            read_vocabulary(tmp_path / "vocab.pkl")
        except UserError:
            refused += 1
    assert 100 < refused < 500


def test_added_tokens_whose_ids_do_not_follow_the_vocabulary_are_refused(known, tmp_path):
    folder = directory(tmp_path)
    (folder / "vocab.pkl").write_bytes(pickle.dumps(attributes_of_tokenizer(known, WORDS[:27])))
    (folder / "added_tokens.json").write_text('{"<formula>": 28}')
    with pytest.raises(UserError, match=r"the vocabulary has 27 symbols, the checkpoint 29"):
        import_run(folder, tmp_path / "ours")
    (folder / "added_tokens.json").write_text('{"<formula>": "27"}')
    with pytest.raises(UserError, match=r"added_tokens.json: expected tokens with their ids"):
        import_run(folder, tmp_path / "ours")


def test_a_vocabulary_that_is_given_wins_over_one_that_cannot_be_read(tmp_path, capsys):
    folder = directory(tmp_path, **{"vocab.pkl": b"cposix\nsystem\n(S'true'\ntR."})
    (folder / "added_tokens.json").write_text("[")
    assert main(["import", str(folder), "--out", str(tmp_path / "ours")]) == 2
    assert "--vocabulary FILE gives another vocabulary" in capsys.readouterr().err
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    words = ["import", str(folder), "--out", str(tmp_path / "ours"), "--vocabulary", str(tmp_path / "vocab.txt")]
    assert main(words) == 0
    vocabulary = txl.load(tmp_path / "ours")[1]
    assert vocabulary is not None
    assert vocabulary.encode("w3 strange\n").tolist() == [5, 1, 0]


MERGES = ["t h", "th e", "Ġ the", "c a", "ca t", "Ġ cat"]


def gpt2_vocabulary(known: Any, pattern: object, **changes: Any) -> Any:
    """Return NVIDIA's `OpenAIVocab` with a tokenizer of pytorch_transformers: bytes, merges, a special token."""
    tokens = [*byte_symbols(), *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>"]
    tokenizer = {
        "encoder": {token: number for number, token in enumerate(tokens)},
        "bpe_ranks": {tuple(merge.split()): rank for rank, merge in enumerate(MERGES)},
        "added_tokens_encoder": {"madeupword000000000": len(tokens)},
        "byte_encoder": dict(enumerate(byte_symbols())),
        "pat": pattern,
        "cache": {"the": "the"},
    }
    inner = known("pytorch_transformers.tokenization_gpt2", "GPT2Tokenizer", **(tokenizer | changes))
    return known("vocabulary", "OpenAIVocab", tokenizer=inner, EOT=262, max_size=None)


def with_gpt2(path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: object) -> Path:
    """Write NVIDIA's checkpoint of 264 tokens, with a vocabulary."""
    with monkeypatch.context() as ours:
        nvidia_checkpoint("plain", path, ours)
        value = torch.load(path, weights_only=False)
    rows = torch.randn(264, value["model_config"]["d_model"])
    for name in value["model_state"]:
        if "emb_layers" in name or "out_layers_weights" in name:
            value["model_state"][name] = rows
        elif "out_layers_biases" in name:
            value["model_state"][name] = torch.randn(264)
    torch.save(value | {"vocab": vocabulary}, path)
    return path


def test_nvidia_s_bpe_vocabulary_is_read(known, pattern, tmp_path, monkeypatch):
    path = with_gpt2(tmp_path / "a.pt", monkeypatch, gpt2_vocabulary(known, pattern))
    run, _ = import_run(path, tmp_path / "run")
    assert run.data.unit == "bpe"
    vocabulary = txl.load(tmp_path / "run")[1]
    assert vocabulary is not None
    assert len(vocabulary) == 264
    the, cat, space = 257, 260, byte_symbols().index("Ġ")
    letters = [byte_symbols().index(each) for each in "x"]
    assert vocabulary.encode("the cat the x").tolist() == [the, 261, 258, space, *letters]
    assert vocabulary.encode("cat").tolist() == [cat]
    assert vocabulary.decode(vocabulary.encode("the cäts\n<|endoftext|>")) == "the cäts\n<|endoftext|>"
    assert vocabulary.decode([262]) == "<|endoftext|>"


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder": {"a": 0}},
        {"encoder": {each: number + 1 for number, each in enumerate(byte_symbols())}},
        {"encoder": []},
        {"bpe_ranks": {"ab": 0}},
        {"bpe_ranks": {("q", "z"): 0}},
        {"bpe_ranks": None},
        {"added_tokens_encoder": {"a b": 263}},
        {"added_tokens_encoder": {"a": "b"}},
    ],
)
def test_a_bpe_vocabulary_that_cannot_be_read_leaves_the_weights(changes, known, pattern, tmp_path, monkeypatch):
    path = with_gpt2(tmp_path / "a.pt", monkeypatch, gpt2_vocabulary(known, pattern, **changes))
    with pytest.raises(UserError, match=r"not those of byte-level BPE"):
        import_run(path, tmp_path / "run")
    other = vocabulary_from(["<eos>", "<unk>", *(f"w{number}" for number in range(262))], "here")
    import_run(path, tmp_path / "run", vocabulary=other)
    assert txl.load(tmp_path / "run")[1] == other


@pytest.mark.parametrize("architecture", ["TransfoXLModel", "TransfoXLForSequenceClassification"])
def test_a_model_without_an_output_layer_is_refused_for_that_reason(architecture, tmp_path):
    from safetensors.torch import load, save

    files = model_files(16)
    tensors = {name: tensor for name, tensor in load(files["model.safetensors"]).items() if "crit." not in name}
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    config = json.loads(files["config.json"]) | {"architectures": [architecture]}
    folder = directory(tmp_path, **{"model.safetensors": save(tensors), "config.json": json.dumps(config).encode()})
    with pytest.raises(UserError, match=rf"Hugging Face's {architecture}: the output layer is missing"):
        import_run(folder, tmp_path / "ours")
