"""Import of the authors' checkpoints: every option is recovered, and every loss equals that of the authors' code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import txl
from tests.interop.make_golden import BASE, CASES, LEGACY, SEGMENT, VOCABULARY
from txl.cli import main
from txl.errors import UserError
from txl.interop.conversion import converted
from txl.interop.import_run import import_run, read_source
from txl.interop.original import source_of
from txl.interop.torch_files import read_torch_file
from txl.runs.directory import RunDirectory

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
FILES = [f"{name}.pt" for name in CASES] + [f"{name}.legacy.pt" for name in LEGACY]


def losses(model: txl.LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    state, found = model.init_state(len(tokens)), []
    with torch.inference_mode():
        for start in range(0, tokens.shape[1] - 1, SEGMENT):
            block = tokens[:, start : start + SEGMENT + 1]
            nll, state = model.nll(block[:, :-1], block[:, 1:], state)
            found.append(nll)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("file", FILES)
def test_every_token_has_the_loss_that_the_authors_code_gives_it(file, tmp_path):
    case = file.partition(".")[0]
    import_run(GOLDEN / file, tmp_path / "run")
    model, vocabulary = txl.load(tmp_path / "run")
    assert vocabulary is None
    found = losses(model, torch.tensor(EXPECTED[case]["tokens"]))
    expected = torch.tensor(EXPECTED[case]["losses"])
    assert expected.std() > 0.3  # nearly equal losses would prove nothing
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("file", FILES)
def test_options_are_recovered_whole(file, tmp_path):
    options = BASE | CASES[file.partition(".")[0]]
    run, _ = import_run(GOLDEN / file, tmp_path / "run")
    model: Any = run.model
    for name in ("n_layer", "n_head", "d_model", "d_head", "d_inner", "mem_len", "dropout", "dropatt"):
        assert getattr(model, name) == options[name], name
    assert model.cutoffs == tuple(options["cutoffs"])
    assert model.div_val == options["div_val"]
    assert model.d_embed == options.get("d_embed", options["d_model"])
    assert model.pre_norm == options.get("pre_lnorm", False)
    assert model.clamp_len == options.get("clamp_len")
    assert model.window == (options["mem_len"] if options.get("same_length") else None)
    assert model.tie_embeddings == options.get("tie_weight", True)
    ties = options.get("tie_projs", [True])
    if options["div_val"] > 1 or "d_embed" in options:
        expected = "all" if all(ties) else "all_but_first" if len(ties) > 1 and all(ties[1:]) else "none"
        assert model.tie_projections == expected
    assert run.eval.mem_len == options["mem_len"]
    assert run.eval.window == model.window
    assert run.eval.segment == options["tgt_len"]
    assert RunDirectory(tmp_path / "run").config() == run


def test_both_forms_of_a_file_give_the_same_weights(tmp_path):
    for name in LEGACY:
        zipped, stream = (read_source(GOLDEN / f"{name}{ending}") for ending in (".pt", ".legacy.pt"))
        assert zipped.settings == stream.settings
        assert zipped.tensors.keys() == stream.tensors.keys()
        assert all(torch.equal(zipped.tensors[key], stream.tensors[key]) for key in zipped.tensors)


def test_a_dictionary_of_weights_needs_what_it_does_not_say(tmp_path):
    module = read_source(GOLDEN / "clamp-and-window.pt")
    weights = {f"module.{name}": tensor for name, tensor in module.tensors.items()}
    torch.save(weights, tmp_path / "weights.pt")
    stated = {"mem_len": 8, "window": 8, "clamp_len": 4}
    _, notes = import_run(tmp_path / "weights.pt", tmp_path / "run", model_options=stated)
    assert any("does not state memory" in note for note in notes)
    model, _ = txl.load(tmp_path / "run")
    expected = torch.tensor(EXPECTED["clamp-and-window"]["losses"])
    torch.testing.assert_close(
        losses(model, torch.tensor(EXPECTED["clamp-and-window"]["tokens"])), expected, rtol=0, atol=1e-5
    )


def test_cutoffs_that_no_tensor_tells_have_to_be_given(tmp_path):
    source = read_source(GOLDEN / "clusters.pt")
    source.tensors["crit.cluster_weight"] = source.tensors["crit.cluster_weight"].flip(0)
    source.tensors["crit.cluster_bias"] = source.tensors["crit.cluster_bias"].flip(0)
    torch.save(dict(source.tensors), tmp_path / "weights.pt")
    with pytest.raises(UserError, match=r"has 2 tail clusters, but does not say where they begin"):
        import_run(tmp_path / "weights.pt", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    import_run(tmp_path / "weights.pt", tmp_path / "run", model_options={"cutoffs": (7, 15), "mem_len": 8})
    model, _ = txl.load(tmp_path / "run")
    expected = torch.tensor(EXPECTED["clusters"]["losses"])
    torch.testing.assert_close(losses(model, torch.tensor(EXPECTED["clusters"]["tokens"])), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_layer": 3}, "the checkpoint says 2"),
        ({"div_val": 4}, "the checkpoint says 2"),
        ({"cutoffs": (7, 16)}, "the checkpoint says (7, 15)"),
        ({"pre_norm": True}, "the checkpoint says False"),
        ({"d_inner": 17}, "the checkpoint's tensors say 16"),
        ({"tie_projections": "none"}, "the checkpoint's tensors say all_but_first"),
        ({"tie_embeddings": False}, "the checkpoint's tensors say True"),
        ({"untie_r": True}, "the checkpoint's tensors say False"),
    ],
)
def test_contradictions_are_errors(options, problem, tmp_path):
    with pytest.raises(UserError) as caught:
        import_run(GOLDEN / "div-val-2.pt", tmp_path / "run", model_options=options)
    [(name, value)] = options.items()
    assert (caught.value.field, caught.value.value, caught.value.problem) == (f"model.{name}", value, problem)
    assert not (tmp_path / "run").exists()


def test_lengths_and_dropout_may_be_said_otherwise(tmp_path):
    stated = {"mem_len": 20, "window": 10, "clamp_len": None, "dropout": 0.4}
    run, _ = import_run(GOLDEN / "clamp-and-window.pt", tmp_path / "run", model_options=stated)
    assert {name: getattr(run.model, name) for name in stated} == stated
    assert (run.eval.mem_len, run.eval.window, run.eval.clamp_len) == (20, 10, None)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("attn_type", 1, "encoding type 1"),
        ("ext_len", 5, "ext_len is 5"),
        ("sample_softmax", 50, "sample_softmax is 50"),
        ("n_head", 3, "the checkpoint's tensors say 2"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(attribute, value, message):
    module = read_torch_file(GOLDEN / "plain.pt")
    module.__dict__[attribute] = value
    with pytest.raises(UserError, match=message):
        converted(source_of(module, "model.pt"), {})


def test_the_command_shows_the_configuration_and_the_run_can_be_used(tmp_path, capsys):
    out = str(tmp_path / "run")
    symbols = ["<unk>", "<eos>", *(f"w{number}" for number in range(VOCABULARY - 2))]
    (tmp_path / "vocab.txt").write_text("\n".join(symbols) + "\n")
    words = ["import", str(GOLDEN / "clamp-and-window.pt"), "--out", out, "--vocabulary", str(tmp_path / "vocab.txt")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    settings = dict(line.split() for line in printed.splitlines() if line.startswith("model."))
    assert len(settings) == 10
    assert (settings["model.mem_len"], settings["model.window"], settings["model.clamp_len"]) == ("8", "8", "4")
    text = tmp_path / "my.txt"
    text.write_text("w1 w2 w3 w4\nw5 w6 strange w8\n" * 400)
    data = ["--data-dir", str(tmp_path / "data")]
    assert main(["eval", out, "--data.corpus", str(text), "--json", *data]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["mem_len"], result["window"], result["clamp_len"], result["unit"]) == (8, 8, 4, "word")
    assert main(["generate", out, "--prompt", "w1 w2", "--max-tokens", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out.strip()
    tuned = str(tmp_path / "tuned")
    words = ["train", out, "--out", tuned, "--init-from", out, "--data.corpus", str(text), "--train.steps", "2"]
    assert main([*words, "--train.batch-size", "2", "--train.eval-every", "0", "--quiet", *data]) == 0
    before, after = (txl.load(each)[0] for each in (out, tuned))
    assert isinstance(before, txl.TransformerXL)
    assert isinstance(after, txl.TransformerXL)
    assert after.config.window == 8
    assert not torch.equal(before.u, after.u)
    assert torch.allclose(before.u, after.u, atol=0.01)
    vocabulary = txl.load(tuned)[1]
    assert vocabulary is not None
    assert len(vocabulary) == VOCABULARY


def test_without_a_vocabulary_only_text_is_refused(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main(["import", str(GOLDEN / "plain.pt"), "--out", out]) == 0
    printed = capsys.readouterr().out
    assert "note: no vocabulary: text cannot be read or printed\n" in printed
    assert printed.endswith("; next: the same command with --vocabulary FILE and another --out\n")
    for words in (["eval", out, "--data.corpus", "stdlib"], ["generate", out, "--prompt", "x"]):
        assert main(words) == 2
        assert "import it again" in capsys.readouterr().err
    model, vocabulary = txl.load(out)
    assert vocabulary is None
    assert txl.evaluate(model, torch.randint(VOCABULARY, (200,))).tokens == 190
    assert len(list(txl.generate_tokens(model, [1, 2, 3], max_tokens=4))) == 4


def test_the_corpus_of_an_import_is_what_eval_reads(tmp_path, capsys):
    out, text = str(tmp_path / "run"), tmp_path / "my.txt"
    text.write_text("w1 w2 w3 strange\n" * 400)
    (tmp_path / "vocab.txt").write_text("\n".join(["<unk>", "<eos>", *(f"w{n}" for n in range(VOCABULARY - 2))]))
    words = ["import", str(GOLDEN / "plain.pt"), "--out", out, "--vocabulary", str(tmp_path / "vocab.txt")]
    assert main([*words, "--corpus", "nope"]) == 2
    assert "nope" in capsys.readouterr().err
    assert main([*words, "--corpus", str(text)]) == 0
    assert f"next: txl eval {out}\n" in capsys.readouterr().out
    assert main(["eval", out, "--data-dir", str(tmp_path / "data")]) == 0
    told = capsys.readouterr()
    assert str(text) in told.out
    assert "in training" not in told.err, "nobody knows what the model was trained on"


def test_an_import_that_fails_removes_only_its_own(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        (tmp_path / "runs" / "other").mkdir()
        raise UserError("no room")

    monkeypatch.setattr("txl.interop.import_run.write_checkpoint", fails)
    with pytest.raises(UserError, match="no room"):
        import_run(GOLDEN / "plain.pt", tmp_path / "runs" / "ours")
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["other"]


def test_a_device_in_the_file_is_no_damage(tmp_path):
    torch.save({"device": torch.device("cuda", 0), "cpu": torch.device("cpu")}, tmp_path / "a.pt")
    assert read_torch_file(tmp_path / "a.pt") == {"device": ("cuda", 0), "cpu": ("cpu",)}


def test_clusters_that_grow_wider_are_refused():
    source = read_source(GOLDEN / "plain.pt")
    width = source.tensors["word_emb.emb_layers.0.weight"].shape[1]
    source.tensors["word_emb.emb_layers.1.weight"] = torch.zeros(5, 2 * width)
    with pytest.raises(UserError, match="which no div_val produces"):
        converted(source, {})


def test_without_a_corpus_eval_asks_for_one(tmp_path, capsys):
    out = str(tmp_path / "run")
    (tmp_path / "vocab.txt").write_text("\n".join(["<unk>", "<eos>", *(f"w{n}" for n in range(VOCABULARY - 2))]))
    assert main(["import", str(GOLDEN / "plain.pt"), "--out", out, "--vocabulary", str(tmp_path / "vocab.txt")]) == 0
    assert main(["eval", out]) == 2
    assert "give --data.corpus" in capsys.readouterr().err


def test_half_precision_weights_become_float32(tmp_path):
    source = read_source(GOLDEN / "plain.pt")
    torch.save({name: tensor.half() for name, tensor in source.tensors.items()}, tmp_path / "half.pt")
    import_run(tmp_path / "half.pt", tmp_path / "run", model_options={"mem_len": 8})
    model, _ = txl.load(tmp_path / "run")
    assert model.u.dtype == torch.float32
    torch.testing.assert_close(model.u, source.tensors["r_w_bias"].half().float())


@pytest.mark.parametrize("missing", ["r_w_bias", "layers.1.pos_ff.CoreNet.3.bias", "word_emb.emb_layers.0.weight"])
def test_missing_tensors_are_named(missing, tmp_path):
    tensors = dict(read_source(GOLDEN / "plain.pt").tensors)
    del tensors[missing]
    torch.save(tensors, tmp_path / "weights.pt")
    with pytest.raises(UserError, match=missing):
        import_run(tmp_path / "weights.pt", tmp_path / "run", model_options={"mem_len": 8})
    assert not (tmp_path / "run").exists()
    whole = dict(read_source(GOLDEN / "plain.pt").tensors) | {"layers.0.extra.weight": torch.zeros(2)}
    torch.save(whole, tmp_path / "weights.pt")
    with pytest.raises(UserError, match=r"layers.0.extra.weight has no place"):
        import_run(tmp_path / "weights.pt", tmp_path / "run", model_options={"mem_len": 8})


def test_out_must_be_empty(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        import_run(GOLDEN / "plain.pt", tmp_path / "run")
    assert (tmp_path / "run" / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"", "no checkpoint there"), (b"hello there", "no checkpoint there")],
)
def test_what_is_no_checkpoint_is_refused(content, message, tmp_path):
    path = tmp_path / "model.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        import_run(path, tmp_path / "run")


MEASURE = """
import sys
from pathlib import Path
import torch
from txl.interop.import_run import import_run

def status(name):
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

path = Path(sys.argv[1])
before = status("VmRSS")
import_run(path, path.with_suffix(".run"), model_options={"mem_len": 8})
print((status("VmHWM") - before) / path.stat().st_size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("is_zip", [True, False])
def test_importing_takes_less_than_twice_the_checkpoint_s_size(is_zip, tmp_path):
    tensors = dict(read_source(GOLDEN / "plain.pt").tensors)
    rows = 2_000_000  # 96 MB of embeddings; the memory of the import itself is small in comparison
    tensors["word_emb.emb_layers.0.weight"] = torch.zeros(rows, 12)
    tensors["crit.out_layers.0.weight"] = tensors["word_emb.emb_layers.0.weight"]
    tensors["crit.out_layers.0.bias"] = torch.zeros(rows)
    torch.save(tensors, tmp_path / "big.pt", _use_new_zipfile_serialization=is_zip)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "big.pt")], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 2
