"""Families of models: each has only its own fields; files and options of one family convert to another."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import txl
from txl.cli import main
from txl.config import (
    MODEL_FAMILIES,
    MODEL_FIELDS,
    RecurrentConfig,
    RunConfig,
    TransformerXLConfig,
    VanillaConfig,
    as_family,
    may_change,
    validate,
    with_options,
)
from txl.errors import UserError
from txl.models import FAMILIES

ONE_CLASS: dict[str, Any] = {
    "encoding": "relative", "max_distance": 64, "max_segment": 512, "n_layer": 2, "d_model": 16, "n_head": 8,
    "d_head": 64, "d_inner": 2048, "d_embed": None, "mem_len": 8, "window": None, "clamp_len": None, "dropout": 0.1,
    "dropatt": 0.0, "dropout_r": None, "dropout_embed": None, "dropout_out": None, "dropout_qkv": 0.0,
    "dropout_words": 0.0, "locked_dropout": False, "pre_norm": False, "layer_norm_eps": 1e-05, "untie_r": False,
    "cutoffs": [], "div_val": 1, "tie_projections": "all", "tie_embeddings": True, "init_std": 0.02,
    "proj_init_std": 0.01, "activation_reg": 0.0, "temporal_reg": 0.0, "layer_losses": False, "n_target": 1,
    "extra_target_weight": 0.5, "attention": "auto", "dropout_inner": None, "dropout_tail": 0.0, "init": "normal",
    "kind": "transformer", "d_hidden": None, "d_last": None, "weight_drop": 0.0, "kernel_sizes": [2], "zoneout": 0.0,
    "n_softmax": 1, "dropout_latent": None,
}  # fmt: skip
"""Model of an older config.json, written when one class had the fields of all families."""
VANILLA = {"encoding": "learned", "mem_len": 0}
LSTM = {"kind": "lstm", "mem_len": 0}


def read(**changes: Any) -> RunConfig:
    return RunConfig.from_dict({"model": ONE_CLASS | changes})


@pytest.mark.parametrize(
    ("changes", "family", "own"),
    [
        ({"untie_r": True, "encoding": "shaw"}, "transformer-xl", {"untie_r": True, "encoding": "shaw", "mem_len": 8}),
        # Fields without effect in a model without memory, which were never refused there, are left out.
        (VANILLA | {"dropout_r": 0.0, "untie_r": True, "max_segment": 9}, "vanilla", {"max_segment": 9}),
        (VANILLA | {"encoding": "sinusoid", "n_target": 2}, "vanilla", {"encoding": "sinusoid", "n_target": 2}),
        (LSTM | {"weight_drop": 0.5}, "recurrent", {"kind": "lstm", "weight_drop": 0.5, "kernel_sizes": (2,)}),
        (LSTM | {"kind": "qrnn", "kernel_sizes": [3, 1]}, "recurrent", {"kind": "qrnn", "kernel_sizes": (3, 1)}),
    ],
)
def test_files_with_the_fields_of_all_families_load(changes, family, own):
    run = read(**changes)
    model = run.to_dict()["model"]
    assert (model["family"], type(run.model)) == (family, MODEL_FAMILIES[family])
    assert {name: model[name] for name in own} == own
    shared = model.keys() & ONE_CLASS.keys() - changes.keys() - {"cutoffs", "kernel_sizes"}
    assert {name: model[name] for name in shared} == {name: ONE_CLASS[name] for name in shared}
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zoneout": 0.1}, r"model\.zoneout is 0\.1, but model\.encoding is relative.*recurrent networks"),
        ({"layer_losses": True}, r"model\.layer_losses is true.*Transformers without memory"),
        (LSTM | {"mem_len": 8}, r"model\.mem_len is 8, but model\.kind is lstm.*expected 0"),
        (LSTM | {"encoding": "learned"}, r"model\.encoding is learned, but model\.kind is lstm"),
        ({"family": "vanilla", "encoding": "learned", "mem_len": 3}, r"model\.mem_len is 3"),
        ({"family": "transformer"}, "expected one of transformer-xl, vanilla, recurrent"),
        ({"kinds": "lstm"}, "model.kinds: not known to this version"),
    ],
)
def test_settings_of_other_families_in_a_file_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        read(**changes)


def test_options_that_cross_families_convert_the_model():
    shape = {"model.d_model": "16", "model.dropout_out": "0.3", "model.n_head": "4"}
    run = with_options(RunConfig(), shape | {"model.mem_len": "7"})
    vanilla = with_options(run, {"model.encoding": "sinusoid", "model.mem-len": "0"})
    assert vanilla.model == VanillaConfig(encoding="sinusoid", d_model=16, dropout_out=0.3, n_head=4)
    # Changing the family does not add memory.
    back = with_options(vanilla, {"model.family": "transformer-xl"})
    assert back.model == TransformerXLConfig(d_model=16, dropout_out=0.3, n_head=4, mem_len=0)
    with pytest.raises(UserError, match=r"model\.n_head is 4, but model\.kind is qrnn.*of Transformers;.*default, 8"):
        with_options(back, {"model.kind": "qrnn"})
    left_out = with_options(back, {"model.kind": "qrnn"}, drop=True)
    assert left_out.model == RecurrentConfig(kind="qrnn", d_model=16, dropout_out=0.3)
    assert left_out.model == with_options(back, {"model.kind": "qrnn", "model.n_head": "8"}).model
    assert run.model.mem_len == 7


def test_a_script_cannot_set_what_a_family_lacks_nor_leave_its_family():
    model: Any = txl.preset("ptb-awd-lstm").model
    assert (model.mem_len, model.window, model.clamp_len) == (0, None, None)
    for name, value in (("mem_len", 5), ("n_head", 4)):
        with pytest.raises(AttributeError, match=f"RecurrentConfig has no field '{name}'"):
            setattr(model, name, value)
    run: Any = txl.preset("stdlib-tiny")
    run.model.encoding = "learned"
    with pytest.raises(UserError, match=r"model\.encoding is learned; expected relative or shaw"):
        validate(run)


@pytest.mark.parametrize(
    ("section", "name", "value", "expected"),
    [
        ("train", "steps", "5", "a whole number"),
        ("model", "n_layer", None, "a whole number"),
        ("train", "learning_rate", "x", "a number"),
        (None, "name", 3, "text"),
        (None, "train", None, "an object"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_before_training(section, name, value, expected, tmp_path):
    run: Any = txl.preset("stdlib-tiny")
    setattr(run if section is None else getattr(run, section), name, value)
    with pytest.raises(UserError) as caught:
        txl.Trainer(run, tmp_path / "run")
    field = name if section is None else f"{section}.{name}"
    assert (caught.value.field, caught.value.value, caught.value.expected) == (field, value, expected)


def test_a_misspelt_field_of_any_section_cannot_be_set():
    run: Any = pickle.loads(pickle.dumps(copy.deepcopy(dataclasses.replace(txl.preset("stdlib-tiny"), name="mine"))))
    assert run == dataclasses.replace(txl.preset("stdlib-tiny"), name="mine")
    model, recurrent = run.model, txl.preset("ptb-awd-lstm").model
    for section, name, hint in (
        *((run, "trian", "train"), (model, "n_layers", "n_layer"), (recurrent, "dropouts", "dropout")),
        *((run.train, "stepz", "steps"), (run.data, "vocabsize", "vocab_size"), (run.eval, "mem_length", "mem_len")),
    ):
        expected = rf"{type(section).__name__} has no field '{name}'; did you mean .*{hint}"
        with pytest.raises(AttributeError, match=expected):
            setattr(section, name, 1)
        assert not hasattr(section, name)
    with pytest.raises(AttributeError, match="RunConfig has no field 'foo'$"):
        run.foo = 1
    run.name = "two\nlines"
    with pytest.raises(UserError, match=r"name is 'two\\nlines'; expected a name of printable characters, in one line"):
        validate(run)
    run.train.steps, run.eval.mem_len = 3, 7
    assert (run.train.steps, run.eval.mem_len) == (3, 7)


def test_every_family_is_registered_and_names_itself():
    assert list(FAMILIES) == list(MODEL_FAMILIES.values())
    assert [each().family for each in FAMILIES] == list(MODEL_FAMILIES)
    for config, model in FAMILIES.items():
        assert model.config_class is config
        assert type(as_family(TransformerXLConfig(), config)) is config
    kept = {"mem_len", "window", "clamp_len"}
    assert not kept & {item.name for each in (VanillaConfig, RecurrentConfig) for item in dataclasses.fields(each)}


def test_numbers_outside_of_a_field_s_limits_are_refused():
    """Check every field with limits, at the first value beyond each limit."""
    run = RunConfig()
    sections: list[Any] = [TransformerXLConfig(), VanillaConfig(), RecurrentConfig(), run.data, run.train, run.eval]
    for section in sections:
        for item in dataclasses.fields(section):
            for limit, bound in item.metadata.get("limits", {}).items():
                beyond = {"at_least": bound - 1, "above": bound, "at_most": bound + 1, "below": bound}[limit]
                changed: Any = dataclasses.replace(section, **{item.name: beyond})
                with pytest.raises(UserError) as caught:
                    changed.validate()
                assert (caught.value.field, caught.value.value) == (f"{section.section}.{item.name}", beyond)


def test_fields_that_a_run_that_goes_on_may_change():
    """A field may be added only if no number that a run computes depends on it, except by rounding, where the number of
    processes or the device may change too."""
    assert may_change() == {
        "name", "train.log_every", "train.eval_every", "train.checkpoint_every", "train.keep_checkpoints",
        "train.parallel", "train.capture", "train.async_checkpoints", "train.on_save_error", "train.max_skipped", "train.planned_minutes",
        "train.tensorboard",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "lacking"),
    [
        (["train", "enwik8-12L"], ("kind", "zoneout", "max-segment", "n-target")),
        (["train", "enwik8-vanilla-12L"], ("kind", "mem-len", "untie-r", "clamp-len")),
        (["train", "ptb-awd-lstm"], ("encoding", "n-head", "mem-len", "pre-norm")),
        (["train", "enwik8-12L", "--model.encoding", "learned"], ("kind",)),
        (["bench", "train"], ("kind", "zoneout", "max-segment")),
        (["train"], ()),
    ],
)
def test_help_shows_the_family_s_fields_alone(words, lacking, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # in narrower help, names are broken at hyphens
    with pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    assert left.value.code == 0
    shown = {name.replace("_", "-") for name in re.findall(r"--model\.([a-z0-9_-]+)", capsys.readouterr().out)}
    assert not shown & set(lacking)
    if words == ["train"]:
        assert shown == {name.replace("_", "-") for name in MODEL_FIELDS}
    assert "n-layer" in shown


_SERVES_ONE = {"generation/engine.py", "interop/export_run.py", "minutes/rule.py"}
_KNOWS_ONE = {
    "commands/recl.py",  # the context length in training
    "training/compilation.py",  # models and states that a CUDA graph can replay
    "evaluation/recorded.py",  # likewise
    "training/defaults.py",  # what was timed on a GPU
    "training/starting.py",  # the choice made there
}


def test_only_these_files_ask_which_family_a_model_is():
    """Other files use properties of the configuration or model. A file that needs no check leaves the lists."""
    source = Path(txl.__file__).parent
    kind = re.compile(r"(model|config|shape)\.(kind|encoding)\b(?! is)")
    family = re.compile(r"isinstance\(.*\b(TransformerXL|TransformerXLConfig|Recurrent\w*|Vanilla\w*|Memory)\b")

    def asks(line: str) -> bool:
        return bool(family.search(line) or (kind.search(line) and '"' not in line.split("model.")[0]))

    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if path.relative_to(source).parts[0] not in ("models", "config")
        and any(map(asks, path.read_text(encoding="utf-8").splitlines()))
    }
    assert found == _SERVES_ONE | _KNOWS_ONE


@pytest.mark.parametrize(
    "config",
    [
        TransformerXLConfig(dropout=0.0, dropout_inner=0.5),
        TransformerXLConfig(dropout=0.0, dropout_r=0.5),
        VanillaConfig(dropout=0.0, dropatt=0.1),
        RecurrentConfig(kind="lstm", dropout=0.0, weight_drop=0.5),
        RecurrentConfig(kind="qrnn", dropout=0.0, zoneout=0.1),
    ],
)
def test_any_rate_above_0_is_dropout(config):
    assert config.has_dropout
    assert not type(config)(
        dropout=0.0, locked_dropout=True, **({config.choice: getattr(config, config.choice)})
    ).has_dropout
