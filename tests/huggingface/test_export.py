"""Exports, used by transformers 5 and its pipeline. These tests need a separate environment (`make huggingface`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import txl
from tests.conftest import small_run

transformers = pytest.importorskip("transformers", reason="make huggingface installs transformers 5 for these tests")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("these tests need transformers 5 (make huggingface)", allow_module_level=True)

from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline  # pyright: ignore[reportMissingImports]

import txl.huggingface
from txl.data.vocabulary import Vocabulary
from txl.interop.export_run import export_run
from txl.interop.import_run import import_run
from txl.native.build import why_not
from txl.serving.texts import Texts

VARIANTS = {
    "byte": {},
    "window and clamp": {"eval.mem_len": "12", "eval.window": "9", "eval.clamp_len": "5"},
    "no window, short memory": {"eval.mem_len": "6", "eval.window": "none"},
    "words, adaptive": {
        "data.unit": "word", "model.cutoffs": "10,20", "model.div_val": "2", "model.tie_projections": "all_but_first",
        "model.pre_norm": "true", "model.untie_r": "true",
    },
    "char": {"data.unit": "char", "model.qk_norm": "true"},
    "bpe": {"data.unit": "bpe", "data.vocab_size": "300"},
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS)
def exported(request, story, data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    run = small_run(str(story), **{"train.learning_rate": "0.05", "model.dropout": "0.1"} | VARIANTS[request.param])
    txl.Trainer(run, folder / "run", data_dir=data_dir, quiet=True).fit()
    export_run(folder / "run", folder / "hf", "huggingface")
    return folder


def ours(folder: Path) -> tuple[txl.TransformerXL, Vocabulary, dict[str, Any]]:
    model, vocabulary = txl.load(folder / "run")
    assert vocabulary is not None
    assert isinstance(model, txl.TransformerXL)
    lengths = json.loads((folder / "run" / "config.json").read_text())["eval"]
    settings = {"mem_len": lengths["mem_len"], "window": lengths["window"] or "none"}
    return model, vocabulary, settings | {"clamp_len": lengths["clamp_len"] or "none"}


def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "hf").eval()


@torch.inference_mode()
def log_probs(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model, _, settings = ours(folder)
    return model.log_probs(tokens, model.init_state(len(tokens), **settings))[0]


def test_forward_with_labels_is_ours(exported):
    model = theirs(exported)
    tokens = torch.randint(model.config.vocab_size, (3, 17))
    labels = tokens.clone()
    labels[1, 4:9] = -100
    with torch.inference_mode():
        out = model(tokens, labels=labels)
    expected = log_probs(exported, tokens)
    torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-5)
    nll = -out.logits[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    assert torch.equal(out.loss, nll[labels[:, 1:] != -100].mean())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("masked", [True, False])
def test_padding_may_stand_in_labels_as_it_does_in_the_input(side, masked, exported):
    """The id of padding is the size of the vocabulary, so padding has no probability."""
    model = theirs(exported)
    size = model.config.vocab_size
    rows = [torch.randint(size, (length,)) for length in (11, 6)]
    padded = torch.full((2, 11), size)
    for lane, row in enumerate(rows):
        padded[lane, slice(11 - len(row), None) if side == "left" else slice(len(row))] = row
    with torch.no_grad():
        found = model(padded, attention_mask=(padded != size).long() if masked else None, labels=padded).loss
        alone = [model(row[None], labels=row[None]).loss for row in rows]
    torch.testing.assert_close(found, (alone[0] * 10 + alone[1] * 5) / 15, rtol=0, atol=1e-5)


def test_memory_goes_on_where_it_was(exported):
    model, (reference, _, settings) = theirs(exported), ours(exported)
    tokens = torch.randint(model.config.vocab_size, (2, 30))
    state, cache = reference.init_state(2, **settings), None
    with torch.inference_mode():
        for start in range(0, 30, 7):
            out = model(tokens[:, start : start + 7], past_key_values=cache)
            expected, state = reference.log_probs(tokens[:, start : start + 7], state)
            torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-5)
            cache = out.past_key_values
    assert cache is not None
    assert cache.get_seq_length() == 30


def test_greedy_generation_reads_the_prompt_once_and_takes_one_step_a_token(exported, monkeypatch):
    model, (reference, _, settings) = theirs(exported), ours(exported)
    prompt = torch.randint(model.config.vocab_size, (1, 20))
    read = []
    real = model.model.hidden_states
    monkeypatch.setattr(
        model.model, "hidden_states", lambda ids, state: (read.append(ids.shape[1]), real(ids, state))[1]
    )
    found = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, 20:].tolist()
    assert read == [20] + [1] * 11
    with torch.inference_mode():
        state = reference.init_state(1, **settings)
        logp, state = reference.log_probs(prompt, state)
        expected = [int(logp[0, -1].argmax())]
        while len(expected) < 12:
            logp, state = reference.log_probs(torch.tensor([[expected[-1]]]), state)
            expected.append(int(logp[0, -1].argmax()))
    assert found == expected


def test_beams_find_what_an_exhaustive_search_with_beams_finds(exported):
    """Compare with a beam search that scores each hypothesis from the start: memory must follow the beams."""
    model, (reference, _, settings) = theirs(exported), ours(exported)
    prompt = torch.randint(model.config.vocab_size, (1, 6))
    found = model.generate(prompt, max_new_tokens=5, num_beams=4, do_sample=False, length_penalty=0.0)[0, 6:].tolist()
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    with torch.inference_mode():
        for _ in range(5):
            grown = []
            for score, made in beams:
                state = reference.init_state(1, **settings)
                logp, state = reference.log_probs(prompt, state)
                for token in made:
                    logp, state = reference.log_probs(torch.tensor([[token]]), state)
                best = logp[0, -1].topk(4)
                grown += [(score + float(v), [*made, int(i)]) for v, i in zip(best.values, best.indices, strict=True)]
            beams = sorted(grown, reverse=True)[:4]
    assert found == beams[0][1]


def test_left_padded_rows_have_the_result_that_they_have_alone(exported):
    model = theirs(exported)
    size, lengths, width = model.config.vocab_size, (11, 4, 7, 11, 1), 11
    tokens, mask = torch.randint(size, (5, width)), torch.zeros(5, width, dtype=torch.int64)
    for lane, length in enumerate(lengths):
        mask[lane, width - length :] = 1
    more = torch.randint(size, (5, 6))
    with torch.inference_mode():
        together = model(tokens, attention_mask=mask)
        mask_after = torch.cat([mask, torch.ones(5, 6, dtype=torch.int64)], dim=1)
        after = model(more, attention_mask=mask_after, past_key_values=together.past_key_values)
        for lane, length in enumerate(lengths):
            alone = model(tokens[lane : lane + 1, width - length :])
            torch.testing.assert_close(together.logits[lane, width - length :], alone.logits[0], rtol=0, atol=1e-5)
            going_on = model(more[lane : lane + 1], past_key_values=alone.past_key_values)
            torch.testing.assert_close(after.logits[lane], going_on.logits[0], rtol=0, atol=1e-5)


def test_padded_batches_generate_what_each_row_generates_alone(exported):
    model = theirs(exported)
    tokens, mask = torch.randint(model.config.vocab_size, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
    mask[1, :5] = mask[2, :2] = 0
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    together = model.generate(tokens, attention_mask=mask, **settings)
    for lane in range(3):
        first = int((mask[lane] == 0).sum())
        alone = model.generate(
            tokens[lane : lane + 1, first:], attention_mask=mask[lane : lane + 1, first:], **settings
        )
        assert together[lane, 9:].tolist() == alone[0, 9 - first :].tolist()


def test_masks_and_labels_that_cannot_be_honoured_are_refused(exported):
    model, ids = theirs(exported), torch.zeros(1, 3, dtype=torch.int64)
    for mask in ([[1, 0, 1]], [[0, 0, 0]], [[1, 1]]):
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids, attention_mask=torch.tensor(mask))
    for labels in (ids[:, :2], torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"labels have shape .*; expected \[1, 3\]"):
            model(ids, labels=labels)
    for label in (-1, model.config.vocab_size + 2):
        with pytest.raises(ValueError, match="labels go from .*expected token ids, 0 to"):
            model(ids, labels=torch.full_like(ids, label))


def test_saved_and_loaded_it_is_the_same_bit_for_bit(exported, tmp_path):
    model = theirs(exported)
    model.save_pretrained(tmp_path / "again")
    names = {path.name for path in (exported / "hf").glob("txl_*.py")}
    assert {path.name for path in (tmp_path / "again").glob("txl_*.py")} == names
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.to_model_config() == model.config.to_model_config()
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    import_run(tmp_path / "again", tmp_path / "run")
    assert_same_losses(exported, tmp_path / "run")


def assert_same_losses(exported: Path, again: Path) -> None:
    (model, _, settings), (other, _) = ours(exported), txl.load(again)
    tokens = torch.randint(model.vocab_size, (2, 40))
    with torch.inference_mode():
        expected, _ = model.nll(tokens[:, :-1], tokens[:, 1:], model.init_state(2, **settings))
        found, _ = other.nll(tokens[:, :-1], tokens[:, 1:], other.init_state(2))
    assert torch.equal(found, expected)


TEXT = "The river rose in the night,\n\nand   “nobody” knew — 3. éü\x00\t"


def test_the_tokenizer_gives_our_ids(exported):
    tokenizer, (_, vocabulary, _) = AutoTokenizer.from_pretrained(exported / "hf"), ours(exported)
    text = TEXT if vocabulary.kind in ("byte", "bpe", "word") else "The river rose in the night"
    assert tokenizer(text)["input_ids"] == vocabulary.encode(text).tolist()
    if vocabulary.kind in ("byte", "char"):
        assert tokenizer.decode(vocabulary.encode(text)) == text
    if vocabulary.kind == "bpe":
        assert tokenizer.decode(vocabulary.encode("rose in the night")) == "rose in the night"
    if vocabulary.kind == "word":
        batch = tokenizer(["the river rose", "morning"], padding=True, return_tensors="pt")
        assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_the_library_s_own_pipeline_runs(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported / "hf")
    make = pipeline("text-generation", model=theirs(exported), tokenizer=tokenizer)
    (made,) = make("The river", max_new_tokens=8, do_sample=False)
    assert len(made["generated_text"]) > len("The river")


ALONE = """
import sys
import torch
from transformers import AutoModelForCausalLM
assert not any(name.split(".")[0] == "txl" for name in sys.modules)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokens = torch.arange(20)[None] % model.config.vocab_size
torch.save((model(tokens).logits.detach(), model.generate(tokens, max_new_tokens=5, do_sample=False)), sys.argv[2])
assert not any(name.split(".")[0] == "txl" for name in sys.modules)
"""


def test_the_directory_alone_is_enough(exported, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HOME": str(tmp_path)}
    words = [sys.executable, "-c", ALONE, str(exported / "hf"), str(tmp_path / "out.pt")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The export contains the C++ sources: with a compiler, compiled code runs, and no message says otherwise.
    assert ("without compiled code" in done.stderr) == (why_not() is not None), done.stderr
    logits, made = torch.load(tmp_path / "out.pt")
    model = theirs(exported)
    tokens = torch.arange(20)[None] % model.config.vocab_size
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, logits, rtol=0, atol=1e-5)
    assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), made)


def test_the_python_of_the_documentation_runs(exported, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "import.md").read_text(encoding="utf-8")
    imported, code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(exported)
    found: dict[str, Any] = {}
    exec(compile(imported.replace('"runs/wt103"', '"run"'), "import.md", "exec"), found)
    assert found["nll"].shape == (1, found["ids"].shape[1] - 1)
    if (exported / "hf" / "tokenizer.json").is_file():
        exec(compile(code.replace('"exported"', '"hf"'), "import.md", "exec"), found)
        assert len(found["text"]) > len("It was")
        assert found["state"].get_seq_length() == found["prompt"]["input_ids"].shape[1]


def test_a_batch_in_parts_has_the_gradient_of_the_whole(exported):
    """The Trainer of transformers passes the divisor for the sum of losses."""
    model = theirs(exported)
    tokens = torch.randint(model.config.vocab_size, (4, 9))
    whole = model(tokens, labels=tokens).loss
    parts = [model(part, labels=part, num_items_in_batch=torch.tensor(4 * 8)).loss for part in tokens.chunk(2)]
    torch.testing.assert_close(sum(parts), whole)


def test_embeddings_are_there_to_be_used_but_not_to_be_resized(exported):
    model = theirs(exported)
    embedded = model.get_input_embeddings()(torch.tensor([[0, 1]]))
    assert embedded.shape == (1, 2, model.config.d_model)
    with pytest.raises(ValueError, match="cannot be resized"):
        model.resize_token_embeddings(model.config.vocab_size + 1)


def test_padding_takes_nothing_from_the_gradient_of_another_row(exported):
    """The gradient is that of the rows without padding, whatever token ids the padding has."""
    model = theirs(exported)
    row, other = torch.randint(model.config.vocab_size, (1, 12)), torch.randint(model.config.vocab_size, (1, 5))

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    alone = [model(each, labels=each).loss for each in (row, other)]
    expected = gradients((alone[0] * 11 + alone[1] * 4) / 15)
    for filler in (0, 1, model.config.vocab_size):
        padded = torch.cat([row, torch.cat([torch.full((1, 7), filler), other], dim=1)])
        mask = torch.ones_like(padded)
        mask[1, :7] = 0
        found = gradients(model(padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100)).loss)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_right_padded_segment_is_continued_as_if_the_padding_were_not_there(exported):
    model = theirs(exported)
    row, more = torch.randint(model.config.vocab_size, (1, 6)), torch.randint(model.config.vocab_size, (1, 3))
    padded = torch.cat([torch.cat([row, torch.zeros(1, 4, dtype=torch.int64)], dim=1)] * 2)
    padded[1] = torch.randint(model.config.vocab_size, (10,))
    mask = torch.ones_like(padded)
    mask[0, 6:] = 0
    with torch.no_grad():
        cache = model(padded, attention_mask=mask).past_key_values
        both = torch.cat([mask, torch.ones(2, 3, dtype=torch.int64)], dim=1)
        found = model(torch.cat([more] * 2), attention_mask=both, past_key_values=cache).logits[:1]
        expected = model(more, past_key_values=model(row).past_key_values).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_prompts_of_words_may_hold_line_ends(exported):
    """No token of the vocabulary may be treated as padding."""
    model = theirs(exported)
    assert getattr(model.config, "pad_token_id", None) is None
    for first in range(min(5, model.config.vocab_size)):
        ids = torch.tensor([[first, 3, first, 2]])
        settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": model.config.vocab_size}
        with_mask = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), with_mask)


def test_padding_that_would_be_read_is_refused(exported):
    """A tokenizer makes padding of the text <|pad|>, and gives it a mask of ones."""
    model = theirs(exported)
    tokens, ones = torch.tensor([[1, model.config.vocab_size, 2]]), torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="it cannot be read"):
        model(tokens, attention_mask=ones)
    ended = tokens[:, [0, 2, 1]]  # as `generate` pads a lane that has ended, if it has no cache
    found, expected = model(ended, attention_mask=ones).logits[:, :2], model(ended[:, :2]).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_every_tokenizer_pads(exported):
    if not (exported / "hf" / "tokenizer.json").is_file():
        pytest.skip("this vocabulary has no tokenizer")
    model, tokenizer = theirs(exported), AutoTokenizer.from_pretrained(exported / "hf")
    assert tokenizer.pad_token_id == model.config.vocab_size
    batch = tokenizer(["the river", "t"], padding=True, return_tensors="pt")
    assert (batch["attention_mask"] == 0).any()
    rows = model(**batch).logits
    alone = model(**tokenizer(["t"], return_tensors="pt")).logits
    torch.testing.assert_close(rows[1, -1], alone[0, -1], rtol=0, atol=1e-5)
    assert len(pipeline("text-generation", model=model, tokenizer=tokenizer)(["the", "t"], batch_size=2)) == 2


def test_special_tokens_are_declared_as_the_server_declares_them(exported):
    model, tokenizer = theirs(exported), AutoTokenizer.from_pretrained(exported / "hf")
    vocabulary = ours(exported)[1]
    info, ids = Texts(vocabulary, "run").describe(), tokenizer.convert_tokens_to_ids
    assert (model.config.eos_token_id, model.config.pad_token_id) == (None, None), "generation goes on at a line end"
    assert [model.config.bos_token_id] == vocabulary.encode("\n").tolist()
    assert tokenizer.unk_token_id == vocabulary.unk_id
    if vocabulary.kind == "word":
        assert (
            (tokenizer.bos_token, tokenizer.eos_token) == (info["bos_token"], info["eos_token"]) == ("<eos>", "<eos>")
        )
        assert (tokenizer.unk_token, ids("<eos>")) == ("<unk>", vocabulary.eos_id)
    else:
        assert info["bos_token"] == "\n"
        assert tokenizer.bos_token_id == tokenizer.eos_token_id == ids("<|endoftext|>") == len(vocabulary) + 1


def test_a_text_behind_the_token_of_the_beginning_is_one_behind_a_line_end(exported):
    model, tokenizer = theirs(exported), AutoTokenizer.from_pretrained(exported / "hf")
    vocabulary = ours(exported)[1]
    found = tokenizer(tokenizer.bos_token + "The river", return_tensors="pt")
    ids = torch.tensor([[*vocabulary.encode("\n"), *vocabulary.encode("The river")]])
    with torch.no_grad():
        assert torch.equal(model(**found, labels=found["input_ids"]).loss, model(ids, labels=ids).loss)
        assert torch.equal(model(**found).logits, model(ids).logits)
    made = model.generate(max_new_tokens=5, do_sample=False)
    assert made.tolist() == model.generate(ids[:, :1], max_new_tokens=5, do_sample=False).tolist()


def test_padding_with_the_token_of_the_end_pads(exported):
    model, tokenizer = theirs(exported), AutoTokenizer.from_pretrained(exported / "hf")
    tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(["the river rose", "t"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1, 0] == tokenizer.eos_token_id
    with torch.no_grad():
        found, alone = model(**batch).logits[1, -1], model(**tokenizer(["t"], return_tensors="pt")).logits[0, -1]
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_hidden_states_are_what_enters_the_first_layer_and_leaves_each(training, exported):
    model = theirs(exported)
    tokens, more = torch.randint(model.config.vocab_size, (2, 9)), torch.randint(model.config.vocab_size, (2, 5))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    with torch.set_grad_enabled(training):
        first = model(tokens, attention_mask=mask, output_hidden_states=True)
        second = model(more, past_key_values=first.past_key_values, output_hidden_states=True)
    with torch.no_grad():
        plain = model(tokens, attention_mask=mask)
        again = model(more, past_key_values=plain.past_key_values)
    torch.testing.assert_close(first.logits, plain.logits)
    torch.testing.assert_close(second.logits, again.logits)
    assert first.past_key_values.state.length == plain.past_key_values.state.length
    assert not any(each.requires_grad for each in first.past_key_values.state.hidden)

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, arguments, result: seen.append((arguments[0], result)))
    with torch.no_grad():
        model(more, past_key_values=plain.past_key_values)
        expected = [seen[0][0], *(result for _, result in seen)]
        seen.clear()
        model(tokens[1:, 4:])
    torch.testing.assert_close(second.hidden_states, tuple(expected), rtol=0, atol=1e-5)
    alone = [seen[0][0], *(result for _, result in seen)]
    torch.testing.assert_close([each[1:, 4:] for each in first.hidden_states], alone, rtol=0, atol=1e-5)
    if training:
        second.hidden_states[1].sum().backward()
        assert model.model.layers[0].attention.q_proj.weight.grad.abs().sum() > 0


def test_a_model_without_probabilities_has_the_same_hidden_states(exported, tmp_path):
    model = AutoModel.from_pretrained(exported / "hf").eval()
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    with torch.no_grad():
        found = model(tokens, output_hidden_states=True)
        expected = theirs(exported)(tokens, output_hidden_states=True).hidden_states
        assert torch.equal(model(tokens, return_dict=False)[0], found.last_hidden_state)
    torch.testing.assert_close(found.hidden_states, expected)
    torch.testing.assert_close(found.last_hidden_state, expected[-1])
    model.save_pretrained(tmp_path / "saved")
    again = AutoModel.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(tokens).last_hidden_state, model(tokens).last_hidden_state)


def test_what_the_model_lacks_is_refused_and_what_has_no_effect_is_not(exported):
    model, tokens = theirs(exported), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="output_attentions: attention weights are not returned"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions: attention weights are not returned"):
        model.generate(tokens, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="inputs_embeds: .* give input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 16))
    with pytest.raises(TypeError, match="unknown argument 'atention_mask'"):
        model(tokens, atention_mask=torch.ones_like(tokens))
    model(
        tokens, output_attentions=False, inputs_embeds=None, position_ids=torch.arange(3)[None], token_type_ids=tokens
    )
    made = model.generate(tokens, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    assert [each.shape[1] for step in made.hidden_states for each in step] == [3] * 3 + [1] * 3
