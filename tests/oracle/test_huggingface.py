"""Comparison with Hugging Face's implementation: forward pass, memory and greedy generation with random weights.

These tests run in a separate environment (`make oracle`), because transformers 4.37.2, the last version whose
Transformer-XL works, needs older libraries.
"""

from __future__ import annotations

import json
import pickle
import sys
import types
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import txl
from txl.errors import UserError
from txl.generation.text import Sampling
from txl.interop.import_run import import_run
from txl.interop.vocabulary_files import read_vocabulary

transformers = pytest.importorskip("transformers", reason="make oracle installs transformers 4.37.2 for these tests")
if transformers.__version__ != "4.37.2":
    pytest.skip("these tests need transformers 4.37.2 (make oracle)", allow_module_level=True)

from transformers.models.deprecated.transfo_xl import (  # pyright: ignore[reportMissingImports]
    TransfoXLConfig,
    TransfoXLLMHeadModel,
    TransfoXLTokenizer,
)

VOCABULARY, LANES, SEGMENT, SEGMENTS = 50, 3, 7, 5
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "cutoffs": [], "d_model": 24, "d_embed": 24, "n_head": 3, "d_head": 8, "d_inner": 40,
    "div_val": 1, "n_layer": 3, "mem_len": 11, "clamp_len": -1, "same_length": True, "untie_r": True,
    "proj_share_all_but_first": False, "dropout": 0.1, "dropatt": 0.0,
}  # fmt: skip
TAILS = {"cutoffs": [10, 20]}
CASES = {
    "no cutoffs": {},
    "no window": {"same_length": False},
    "div_val 1": TAILS,
    "div_val 2": TAILS | {"div_val": 2},
    "div_val 4, shared projections, clamp": TAILS | {"div_val": 4, "proj_share_all_but_first": True, "clamp_len": 6},
    "narrower embedding": {"d_embed": 12, "clamp_len": 5},
    "narrower embedding with clusters": TAILS | {"d_embed": 12},
    "narrower embedding, shared projections": TAILS | {"d_embed": 12, "proj_share_all_but_first": True},
    "pre-norm": {"pre_lnorm": True, "clamp_len": 4},
    "another epsilon": {"layer_norm_epsilon": 0.1},
    "shared biases": TAILS | {"div_val": 2, "untie_r": False},
    "output tables of its own": TAILS | {"div_val": 2, "tie_word_embeddings": False},
    "output table of its own": {"tie_word_embeddings": False, "clamp_len": 3},
}


def make(case: str) -> Any:
    torch.manual_seed(0)
    model = TransfoXLLMHeadModel(TransfoXLConfig(**(BASE | CASES[case]))).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.tie_weights()
    return model


def cold(model: Any) -> list[torch.Tensor]:
    """Return empty memory (by default, the class starts with zeros that queries attend to)."""
    return [torch.zeros(0, LANES, model.config.d_model) for _ in range(model.config.n_layer)]


def their_log_probs(model: Any, tokens: torch.Tensor, memory: Any) -> tuple[torch.Tensor, Any]:
    out = model.transformer(tokens, mems=memory)
    logp = model.crit(out.last_hidden_state.reshape(-1, model.config.d_model))
    return logp.view(*tokens.shape, -1), out.mems


def save(model: Any, folder: Path, safe: bool) -> Path:
    model.save_pretrained(folder, safe_serialization=safe)
    return folder


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("case", CASES)
def test_every_token_has_the_loss_that_transformers_gives_it(case, safe, tmp_path):
    model = make(case)
    run, _ = import_run(save(model, tmp_path / "theirs", safe), tmp_path / "ours")
    options = BASE | CASES[case]
    assert run.model.window == (11 if options["same_length"] else None)
    assert run.model.clamp_len == (options["clamp_len"] if options["clamp_len"] > 0 else None)
    assert run.to_dict()["model"]["untie_r"] == options["untie_r"]
    ours, vocabulary = txl.load(tmp_path / "ours")
    assert vocabulary is None
    tokens = torch.randint(VOCABULARY, (LANES, SEGMENT * SEGMENTS + 1))
    state, memory = ours.init_state(LANES), cold(model)
    with torch.inference_mode():
        for start in range(0, SEGMENT * SEGMENTS, SEGMENT):
            read, targets = tokens[:, start : start + SEGMENT], tokens[:, start + 1 : start + SEGMENT + 1]
            found, state = ours.nll(read, targets, state)
            expected, memory = their_log_probs(model, read, memory)
            expected = -expected.gather(-1, targets[..., None]).squeeze(-1)
            assert expected.std() > 0.1
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_greedy_generation_is_the_same(tmp_path):
    model = make("output table of its own")
    for name, parameter in model.named_parameters():
        # Output must depend on the text: with random biases (or tied tables), one token would be repeated for ever.
        if "bias" in name and "r_" not in name:
            parameter.data.zero_()
        elif "layer_norm" in name:
            parameter.data.fill_(1)
    import_run(save(model, tmp_path / "theirs", True), tmp_path / "ours")
    ours, _ = txl.load(tmp_path / "ours")
    made = set()
    for _ in range(8):
        prompt = torch.randint(VOCABULARY, (20,))
        steps = txl.generate_tokens(ours, prompt, max_tokens=20, sampling=Sampling(temperature=0))
        found = [int(step[0]) for step in steps]
        assert found == greedy(model, prompt, 20)
        made |= set(found)
    assert len(made) > 2


@torch.inference_mode()
def greedy(model: Any, prompt: torch.Tensor, count: int) -> list[int]:
    """Return greedily chosen tokens; the prompt is also read token by token, as memory and window require."""
    memory = [torch.zeros(0, 1, model.config.d_model) for _ in range(model.config.n_layer)]
    made: list[int] = []
    token = prompt[0]
    for step in range(1, len(prompt) + count):
        logp, memory = their_log_probs(model, token.view(1, 1), memory)
        token = prompt[step] if step < len(prompt) else logp[0, -1].argmax()
        if step >= len(prompt):
            made.append(int(token))
    return made


def test_tensors_that_the_file_leaves_out_are_the_shared_ones(tmp_path):
    model = make("div_val 4, shared projections, clamp")
    folder = save(model, tmp_path / "theirs", False)
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    for name in ("transformer.word_emb.emb_projs.1", "transformer.word_emb.emb_layers.2.weight"):
        del weights[name]
    torch.save(weights, folder / "pytorch_model.bin")
    import_run(folder, tmp_path / "ours")
    import_run(save(model, tmp_path / "whole", True), tmp_path / "expected")
    ours, expected = (txl.load(tmp_path / name)[0].state_dict() for name in ("ours", "expected"))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_type": 1}, "encoding type 1"),
        ({"vocab_size": 51}, "config.json says 51 tokens, the weights have 50"),
        ({"d_inner": 41}, "model.d_inner 41: the checkpoint's tensors say 40"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(changes, message, tmp_path):
    folder = save(make("no cutoffs"), tmp_path / "theirs", True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=message):
        import_run(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


TEXT = "the cat sat on the mat . <formula> the dog saw strange things and the cat"


def saved_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> Any:
    """Return a tokenizer that the library read, extended and saved: the words, `<formula>`, `more`."""
    monkeypatch.setenv("TRUST_REMOTE_CODE", "True")  # or the library refuses to read its own pickle
    words = ["<eos>", "<unk>", *sorted(set(TEXT.split()) - {"<formula>", "strange", "things"})]
    attributes = {
        "counter": Counter(words), "special": ["<eos>"], "min_freq": 0, "max_size": None, "lower_case": False,
        "delimiter": None, "vocab_file": None, "idx2sym": words, "unk_idx": 1,
        "sym2idx": OrderedDict((word, number) for number, word in enumerate(words)),
    }  # fmt: skip
    folder.mkdir()
    (folder / "vocab.pkl").write_bytes(pickle.dumps(attributes))
    tokenizer = TransfoXLTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(more)
    tokenizer.save_pretrained(folder)
    return TransfoXLTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["vocab.pkl", "vocab.bin"])
def test_a_directory_with_the_library_s_own_tokenizer_gives_its_ids_and_losses(kind, tmp_path, monkeypatch):
    tokenizer = saved_tokenizer(tmp_path / "theirs", monkeypatch, ["<sep>", "new_word"])
    assert tokenizer.added_tokens_encoder["<formula>"] == len(tokenizer) - 3
    torch.manual_seed(0)
    model = TransfoXLLMHeadModel(TransfoXLConfig(**(BASE | {"vocab_size": len(tokenizer)}))).eval()
    save(model, tmp_path / "theirs", True)
    if kind == "vocab.bin":  # as versions 2 and 3 saved the same attributes
        with open(tmp_path / "theirs" / "vocab.pkl", "rb") as file:
            torch.save(pickle.load(file), tmp_path / "theirs" / "vocab.bin")
        (tmp_path / "theirs" / "vocab.pkl").unlink()
    _, notes = import_run(tmp_path / "theirs", tmp_path / "ours")
    assert notes == []
    ours, vocabulary = txl.load(tmp_path / "ours")
    assert vocabulary is not None
    assert len(vocabulary) == len(tokenizer)
    text = TEXT + " new_word <sep> <eos> on"
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 2
    assert vocabulary.encode(text).tolist() == ids
    assert [vocabulary.decode([each]).strip() or "<eos>" for each in ids] == tokenizer.convert_ids_to_tokens(ids)
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        found, _ = ours.nll(tokens[:, :-1], tokens[:, 1:], ours.init_state(1))
        expected, _ = their_log_probs(model, tokens[:, :-1], [each[:, :1] for each in cold(model)])
    expected = -expected.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_nvidia_s_vocabulary_of_a_gpt2_tokenizer_gives_its_ids(tmp_path, monkeypatch):
    from txl.data.bpe import byte_symbols

    merges = ["t h", "th e", "\u0120 the", "c a", "ca t", "\u0120 cat", "i s", "\u0120 is"]
    tokens = [*byte_symbols(), *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tokenizer = transformers.GPT2Tokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    module = types.ModuleType("vocabulary")
    vocab_class = type("OpenAIVocab", (), {"__module__": "vocabulary"})
    module.OpenAIVocab = vocab_class  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "vocabulary", module)
    vocab: Any = vocab_class()
    vars(vocab).update(tokenizer=tokenizer, EOT=tokenizer.eos_token_id, max_size=None)
    torch.save({"vocab": vocab}, tmp_path / "cache.pt")
    vocabulary = read_vocabulary(tmp_path / "cache.pt")
    for text in ("the cat is the cat's, isn't it?", "  the\n\ncat  1999 - \u00e9t\u00e9 \u4e16\u754c", "catthe is"):
        assert vocabulary.encode(text).tolist() == tokenizer.encode(text)
        assert vocabulary.decode(tokenizer.encode(text)) == text
