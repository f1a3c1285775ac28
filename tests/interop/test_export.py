"""Exports as files: their content, the equality of an export that is imported again, and refusals."""

from __future__ import annotations

import ast
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

import txl
from tests.conftest import small_run
from tests.interop.test_original import GOLDEN
from txl.cli import main
from txl.data.bpe import BpeVocabulary, byte_level, byte_symbols
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.located import LocatedToken, located_tokens
from txl.data.pieces import Piece
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError
from txl.interop.export_run import export_run, flat_modules, tokenizer_files
from txl.interop.import_run import import_run
from txl.native.sources import cpp_sources


@pytest.fixture(scope="module", params=["byte", "word, adaptive"])
def run(request, story, data_dir, tmp_path_factory) -> Path:
    changes = {"eval.clamp_len": "9"}
    if request.param != "byte":
        changes |= {"data.unit": "word", "model.cutoffs": "10,20", "model.div_val": "2", "train.average_from": "6"}
    path = tmp_path_factory.mktemp("export") / "run"
    txl.Trainer(small_run(str(story), **changes), path, data_dir=data_dir, quiet=True).fit()
    return path


@pytest.mark.parametrize("kind", ["huggingface", "safetensors"])
def test_exported_and_imported_again_losses_are_the_same_to_the_last_bit(kind, run, tmp_path):
    assert main(["export", str(run), "--format", kind, "--out", str(tmp_path / "out")]) == 0
    assert main(["import", str(tmp_path / "out"), "--out", str(tmp_path / "again")]) == 0
    (model, vocabulary), (again, its_vocabulary) = txl.load(run), txl.load(tmp_path / "again")
    assert its_vocabulary == vocabulary
    tokens = torch.randint(model.vocab_size, (3, 50))
    with torch.inference_mode():
        state = model.init_state(3, mem_len=16, window=16, clamp_len=9)
        expected, _ = model.nll(tokens[:, :-1], tokens[:, 1:], state)
        found, _ = again.nll(tokens[:, :-1], tokens[:, 1:], again.init_state(3))
    assert torch.equal(found, expected)


def test_another_memory_length_takes_the_window_with_it(run, tmp_path):
    export_run(run, tmp_path / "out", "huggingface")
    lengths = {}
    for mem_len in (7, 40, 0):
        imported, _ = import_run(tmp_path / "out", tmp_path / str(mem_len), model_options={"mem_len": mem_len})
        lengths[mem_len] = imported.eval.window
    assert lengths == {7: 7, 40: 40, 0: None}


def test_plain_safetensors_are_weights_and_plain_json(run, tmp_path):
    export_run(run, tmp_path / "out", "safetensors")
    names = ["config.json", "model.safetensors", "vocabulary.json"]
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == names
    model, vocabulary = txl.load(run)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert vocabulary is not None
    assert config["vocab_size"] == len(vocabulary)
    assert config["model"]["d_model"] == 16


def test_the_code_beside_the_weights_is_this_package_s_own_and_complete():
    files = flat_modules("txl.huggingface")
    assert {"txl_huggingface.py", "txl_models_transformer_xl.py", "txl_attention.py", "txl_config.py"} <= files.keys()
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                for module in [node.module] if node.module else [alias.name for alias in node.names]:
                    assert f"{module}.py" in files, (name, module)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not any(each.split(".")[0] == "txl" for each in names), name
                outside = {each.split(".")[0] for each in names} - set(sys.stdlib_module_names)
                kernels = {"triton"} if name.endswith(("_kernels.py", "_fused_ends.py")) else set()
                assert outside <= {"torch", "transformers"} | kernels, (name, outside)


def test_the_code_beside_the_weights_can_be_imported(tmp_path):
    """On a machine without transformers and Triton, the model's module can, and those that it imports."""
    for name, text in flat_modules("txl.huggingface").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    code = "from flat.txl_models_transformer_xl import TransformerXL, fused_hidden_states; import sys; "
    code += "print(*[name for name in sys.modules if name.split('.')[0] == 'txl'])"
    (tmp_path / "__init__.py").touch()
    (tmp_path.parent / "flat").symlink_to(tmp_path)
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path.parent, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.strip()) == (0, ""), found.stderr


def test_the_code_beside_the_weights_compiles_what_this_package_compiles():
    """transformers copies only Python files with the weights, so one of these files contains the C++ sources."""
    found: dict[str, Any] = {}
    exec(flat_modules("txl.huggingface")["txl_native_sources.py"], found)
    assert found["cpp_sources"]() == cpp_sources()
    assert "txl_step_" in cpp_sources()["decode.cpp"]


TEXTS = [
    "",
    "the mill",
    "The river rose\nin the night. ",
    "\n\n  a\tb ",
    "— “é” \x00 ü",
    "the\x1cmill\x1fthe\x85night.\u2028the",
]


@pytest.mark.parametrize(
    "vocabulary",
    [
        ByteVocabulary(),
        CharVocabulary("abcdefghijklmnopqrstuvwxyz ."),
        WordVocabulary(["<eos>", "the", "<unk>", "night."]),
        WordVocabulary(["<eos>", "the", "<unk>", "night", "."], rule="punctuation"),
        WordVocabulary(["<S>", "the", "<UNK>"], eos="<S>", unk="<UNK>", boundary="end"),
        BpeVocabulary.train(["the river rose in the night, in the night"] * 5, 262),
    ],
    ids=["byte", "char", "word", "punctuation", "sentences", "bpe"],
)
@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_files_encode_as_the_vocabulary_does(vocabulary, text):
    tokenizer = Tokenizer.from_str(tokenizer_files(vocabulary)["tokenizer.json"])
    if vocabulary.kind == "char":
        expected = vocabulary.encode_block(text)
    else:
        expected = vocabulary.encode(text)
    assert tokenizer.encode(text).ids == expected.tolist()


WORDS = ["<eos>", "<unk>", "the", "café", "x", "￭.", "￭-￭", "(￭", "￭)", "￭”", "“￭", ".", "—", "￭<￭", "￭>", "eos"]
PIECES = st.one_of(
    st.sampled_from(["the", "The", "café", "CAFÉ", "cafe\u0301", "x", "eos", "<eos>", "<unk>", "\r\n", "\ufeff"]),
    st.sampled_from("￭_0.-()“”—<>$😀 \t\n\r\x1c\x85\u2028\u3000"),
    st.characters(codec="utf-8", exclude_characters="\0"),
)


def place(token: LocatedToken, data: bytes) -> tuple[int, int]:
    """Return the characters of a token's place; a part of a character has its place, and \\r\\n that of its \\n."""
    start = token.end - 1 if token.text == b"\r\n" else token.start
    return len(data[:start].decode(errors="ignore")), len(data[: token.end].decode(errors="replace"))


@pytest.fixture(
    scope="module",
    params=[
        WordVocabulary(WORDS, rule="punctuation"),
        WordVocabulary(WORDS, rule="punctuation", normalise=True),
        WordVocabulary(WORDS),
        WordVocabulary([*(word.lower() for word in WORDS), "xς"], lower=True),
        CharVocabulary("thecaféx.-()“”—<> \n", normalise=True),
        CharVocabulary("thecaféx.-()“”—<> \n", lower=True),
        ByteVocabulary(),
        BpeVocabulary.train(["the café (x) — “the café”."] * 5, 270),
    ],
    ids=["punctuation", "normalised", "word", "lower words", "char", "lower", "byte", "bpe"],
)
def with_tokenizer(request) -> tuple[Vocabulary, Tokenizer]:
    files = tokenizer_files(request.param)
    tokenizer, config = Tokenizer.from_str(files["tokenizer.json"]), json.loads(files["tokenizer_config.json"])
    known = {each.content for each in tokenizer.get_added_tokens_decoder().values()}
    if request.param.unk_id is not None and config["unk_token"] not in known:
        tokenizer.add_special_tokens([config["unk_token"]])  # as transformers does
    return request.param, tokenizer


@settings(deadline=None)
@given(text=st.lists(PIECES, max_size=12).map("".join))
@example("The cat. (the cat) well-known")
@example("￭.￭x ￭ (￭x) x.￭")
@example("<eos>. <eos>x (<eos>) <unk>")
@example("x<unk> <eos>, x<eos>x <eos><eos> <unk>.")
@example("XΣ. xΣ\u0301 xΣx İx")
def test_tokenizer_files_give_the_ids_and_the_places_of_the_vocabulary(with_tokenizer, text):
    vocabulary, tokenizer = with_tokenizer
    found, data = tokenizer.encode(text), text.encode()
    tokens = [*located_tokens(Piece(Path("text")), [data], vocabulary)][: len(found.ids)]  # a last line end is added
    assert found.ids == vocabulary.encode(text).tolist() == [token.id for token in tokens]
    assert found.offsets == [place(token, data) for token in tokens]
    if vocabulary.kind != "word":
        assert tokenizer.decode(found.ids, skip_special_tokens=False) == vocabulary.decode(found.ids)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (ByteVocabulary([1, 2, 3]), "has 3 of the 256 bytes"),
        (WordVocabulary(["<S>", "<UNK>"], eos="<S>", unk="<UNK>", boundary="both"), "marks both ends of a sentence"),
    ],
)
def test_vocabularies_that_no_tokenizer_can_represent_are_refused(vocabulary, message):
    with pytest.raises(UserError, match=message):
        tokenizer_files(vocabulary)


def test_tokens_of_the_vocabulary_that_are_named_like_padding_and_line_end():
    tokens = {each: number for number, each in enumerate([*byte_symbols(), "<|pad|>", "<|endoftext|>"])}
    vocabulary, text = BpeVocabulary(byte_level(models.BPE(tokens, []))), "a<|endoftext|>b<|pad|>"
    files = tokenizer_files(vocabulary)
    tokenizer, config = Tokenizer.from_str(files["tokenizer.json"]), json.loads(files["tokenizer_config.json"])
    assert tokenizer.encode(text).ids == vocabulary.encode(text).tolist()
    names = (config["pad_token"], config["bos_token"], config["eos_token"])
    ids = tokenizer.get_vocab()
    assert [ids[each] - len(vocabulary) for each in names] == [0, 1, 1]


def test_a_run_without_a_vocabulary_is_exported_without_tokenizer(tmp_path, capsys):
    import_run(GOLDEN / "div-val-2.pt", tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert "no vocabulary: none was written" in capsys.readouterr().out
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    import_run(tmp_path / "out", tmp_path / "again")
    (model, _), (again, _) = txl.load(tmp_path / "run"), txl.load(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_mistakes_are_one_clear_line_and_nothing_is_left(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    out = str(tmp_path / "out")
    for words, message in (
        ([str(tmp_path / "nothing"), "--out", out], "no such directory"),
        ([str(tmp_path / "full"), "--out", out], "expected a run directory"),
        ([str(run), "--out", out, "--format", "onnx"], "--format is onnx; expected one of huggingface, safetensors"),
        ([str(run), "--out", str(tmp_path / "full")], "not empty"),
        ([str(run), "--out", str(tmp_path / "file")], ": a file; expected a directory"),
        ([str(run), "--out", str(tmp_path / "file" / "below")], "cannot be written"),
        ([str(run), "--out", out, "--checkpoint", "77"], "checkpoint is 77, but "),
        ([str(run)], "--out"),
    ):
        assert main(["export", *words]) == 2, words
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "full"]


@pytest.mark.parametrize("damage", ["missing", "truncated", "contradiction", "not a number"])
def test_damaged_exports_are_refused_on_import(damage, run, tmp_path, capsys):
    export_run(run, tmp_path / "out", "safetensors")
    weights = tmp_path / "out" / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "not a number":
        tensors = load_file(weights)
        tensors["softmax.bias"][3] = torch.nan
        save_file(tensors, weights)
    words = ["import", str(tmp_path / "out"), "--out", str(tmp_path / "again")]
    words += ["--model.div-val", "7"] if damage == "contradiction" else []
    assert main(words) == 2
    message = {
        "missing": "no weights there",
        "truncated": "damaged",
        "contradiction": "--model.div-val 7:",
        "not a number": "the tensor softmax.bias holds numbers that are not finite",
    }
    assert message[damage] in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_configuration_that_was_changed_is_not_exported(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace('"pre_norm": false', '"pre_norm": true'))
    with pytest.raises(UserError, match="model.pre_norm is True, but .* was written with False; set it back"):
        export_run(copy, tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists()


def test_an_export_into_the_folder_that_one_is_in(run, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.partial-0123").mkdir()  # belongs to another export
    monkeypatch.chdir(tmp_path / "out")
    export_run(run, Path("."), "safetensors")
    assert Path("config.json").is_file()
    assert [each.name for each in tmp_path.glob(".out*")] == [".out.partial-0123"]


def test_an_existing_folder_may_be_on_another_file_system(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    rename = os.rename
    renamed: list[str] = []

    def fail_between_systems(old, new):
        if (out in Path(old).parents) != (out in Path(new).parents):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        if fails_at == len(renamed):
            raise OSError(errno.EIO, "Input/output error")
        renamed.append(new)
        rename(old, new)

    monkeypatch.setattr(os, "rename", fail_between_systems)
    fails_at = 1
    with pytest.raises(UserError, match="cannot be written"):
        export_run(run, out, "safetensors")
    assert list(out.iterdir()) == [], "a file that was moved stayed"
    fails_at = None
    export_run(run, out, "safetensors")
    assert sorted(each.name for each in out.iterdir()) == ["config.json", "model.safetensors", "vocabulary.json"]


def test_a_path_through_a_link_and_up_again_is_the_one_that_was_checked(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/sub")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text("mine")
    export_run(run, Path("link/../new"), "safetensors")
    assert (tmp_path / "disk" / "new" / "model.safetensors").is_file()
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["config.json"]


@pytest.mark.parametrize("kind", ["huggingface", "safetensors"])
def test_the_command_measures_the_same_before_and_after(kind, story, data_dir, tmp_path, capsys):
    run = small_run(str(story), **{"eval.segment": "11", "eval.batch_size": "3", "eval.temperature": "1.1"})
    txl.Trainer(run, tmp_path / "run", data_dir=data_dir, quiet=True).fit()
    export_run(tmp_path / "run", tmp_path / "out", kind)
    import_run(tmp_path / "out", tmp_path / "back")
    found = []
    for each in ("run", "back"):
        words = ["eval", str(tmp_path / each), "--data.corpus", str(story), "--data-dir", str(data_dir), "--json"]
        assert main(words) == 0
        found.append(json.loads(capsys.readouterr().out))
    for name in ("nll", "tokens", "segment", "batch_size", "temperature", "mem_len", "window"):
        assert found[0][name] == found[1][name], name
