"""Every preset: number of parameters, and a configuration that can be built, trained and evaluated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import txl
from txl.config import RecurrentConfig, TransformerXLConfig, VanillaConfig, validate
from txl.errors import UserError
from txl.models import build_model
from txl.models.adaptive import cluster_bounds
from txl.training.schedule import learning_rate

EXACT = {
    "enwik8-12L": (204, 41_055_436),
    "enwik8-24L": (204, 277_231_820),
    "text8-12L": (27, 40_964_635),
    "text8-24L": (27, 277_050_395),
    "wt103-base": (267_735, 151_107_538),
    "wt103-large": (267_735, 285_170_506),
    "wt103-ablation-151M": (267_735, 151_107_538),
    "ptb": (10_000, 24_038_120),
    "ptb-awd-lstm": (10_000, 24_221_600),
    "ptb-awd-lstm-mos": (10_000, 21_500_620),
    "ptb-qrnn": (10_000, 24_020_150),
    "wikitext-2-awd-lstm": (33_278, 33_556_078),
    "wt103-qrnn": (267_735, 153_886_638),
}
"""Size of the vocabulary and number of parameters, computed elsewhere from the authors' scripts."""
ROUNDED = {
    "enwik8-18L": 88e6,
    "wt103-ablation": 128e6,
    "lm1b-base": 358e6,
    "lm1b-large": 841e6,
    "lm1b-ablation": 300e6,
    "ptb": 24e6,
    **{f"{corpus}-vanilla-12L": 44e6 for corpus in ("enwik8", "text8")},
    **{f"{corpus}-vanilla-64L": 235e6 for corpus in ("enwik8", "text8")},
    **{name: 128e6 for name in txl.presets() if name.startswith("wt103-ablation") and not name.endswith("151M")},
    **{name: 300e6 for name in txl.presets() if name.startswith("lm1b-ablation")},
    "ptb-awd-lstm": 24e6,
    "ptb-awd-lstm-mos": 22e6,
    "wikitext-2-awd-lstm": 33e6,
    "wt103-qrnn": 151e6,
    "wt103-lstm": 151e6,
    "wt103-adaptive": 247e6,
}


def parameters(name: str) -> int:
    preset = txl.presets()[name]
    return preset.run.model.parameter_count(preset.vocab_size)  # which is compared with the built model below


def test_parameters_are_counted_without_building_any_model():
    """Check every preset, and options without a preset: all ways of tying, dividing and cutting the vocabulary."""
    models = {name: (preset.make().model, preset.vocab_size) for name, preset in txl.presets().items()}
    for name, options in {
        "shared biases": {},
        "own biases": {"untie_r": True},
        "narrow": {"d_embed": 12},
        "untied": {"tie_embeddings": False, "d_embed": 12, "tie_projections": "none"},
        "cut": {"cutoffs": (7, 20)},
        **{
            f"divided, {tied}": {"cutoffs": (7, 20), "div_val": 2, "tie_projections": tied}
            for tied in ("all", "all_but_first", "tails", "none")
        },
        "cut, narrow": {"cutoffs": (7, 20), "d_embed": 12, "tie_projections": "none"},
        "shaw": {"encoding": "shaw", "max_distance": 9},
        "sinusoid": {"encoding": "sinusoid", "max_segment": 8},
        "learned": {"encoding": "learned", "max_segment": 8, "n_target": 3},
        "mixture": {"n_softmax": 3},
        "lstm": {"kind": "lstm", "d_hidden": 24},
        "qrnn": {"kind": "qrnn", "kernel_sizes": (3, 2), "n_softmax": 2, "d_last": 10},
    }.items():
        shape: dict[str, Any] = {"n_layer": 3, "d_model": 16, **options}
        if "kind" in options:
            model = RecurrentConfig(**shape)
        else:
            absolute = options.get("encoding") in ("sinusoid", "learned")
            model = (VanillaConfig if absolute else TransformerXLConfig)(**shape, n_head=2, d_head=5, d_inner=11)
        models[name] = (model, 31)
    for name, (model, vocab_size) in models.items():
        with torch.device("meta"):
            built = build_model(model, vocab_size)
        assert model.parameter_count(vocab_size) == sum(parameter.numel() for parameter in built.parameters()), name


def test_parameter_counts_are_those_of_the_paper_and_the_authors_scripts():
    for name, exact in EXACT.items():
        assert (txl.presets()[name].vocab_size, parameters(name)) == exact, name
    for name, rounded in ROUNDED.items():
        allowed = 0.025 if name.startswith(("ptb", "wikitext-2", "wt103-qrnn", "wt103-lstm")) else 0.07
        allowed = 0.002 if name == "wt103-adaptive" else 0.005 if "vanilla" in name else allowed
        assert abs(parameters(name) / rounded - 1) < allowed, name


def test_every_preset_is_a_valid_configuration_of_its_name():
    for name, preset in txl.presets().items():
        run = txl.preset(name)
        validate(run)
        assert run.name == name
        cluster_bounds(preset.vocab_size, run.model.cutoffs)
        assert txl.RunConfig.from_dict(run.to_dict()) == run
        if run.model.no_memory:
            assert run.eval.mem_len == 0
            assert run.model.context in (None, run.eval.segment)
        else:
            assert run.eval.mem_len > run.train.segment or run.eval.mem_len >= run.model.mem_len


def test_the_rows_of_table_6():
    """Compare the encoding, recurrence, loss and perplexity of each preset with the paper."""
    table = {
        "wt103-ablation": ("relative", True, "full", "26.77 ppl"),
        "wt103-ablation-shaw": ("shaw", True, "full", "27.94 ppl"),
        "wt103-ablation-half": ("relative", True, "half", "28.33 ppl"),
        "wt103-ablation-no-memory": ("relative", False, "full", "29.02 ppl"),
        "wt103-ablation-no-memory-half": ("relative", False, "half", "30.1 ppl"),
        "wt103-ablation-shaw-no-memory": ("shaw", False, "full", "29.75 ppl"),
        "wt103-ablation-shaw-no-memory-half": ("shaw", False, "half", "30.5 ppl"),
        "wt103-ablation-sinusoid-half": ("sinusoid", False, "half", "30.97 ppl"),
        "wt103-ablation-learned-half": ("learned", False, "half", "31.16 ppl"),
        "wt103-ablation-151M": ("relative", True, "full", "23.09 ppl"),
    }
    for name, (encoding, recurrence, loss, published) in table.items():
        run = txl.preset(name)
        assert isinstance(run.model, (TransformerXLConfig, VanillaConfig))
        assert (run.model.encoding, run.model.mem_len > 0, run.train.loss) == (encoding, recurrence, loss), name
        assert txl.presets()[name].published == published
        assert (run.eval.mem_len > 0) == recurrence
    for name, farthest in (("wt103-ablation-shaw", 255), ("wt103-ablation-shaw-no-memory", 127)):
        assert txl.preset(name).to_dict()["model"]["max_distance"] == farthest
    assert [txl.preset(f"wt103-ablation-no-memory{end}").train.segment for end in ("-176", "-half-172")] == [176, 172]


def test_small_ablations_are_the_rows_of_table_6_on_one_base():
    paper = {name.removeprefix("wt103-ablation") for name in txl.presets() if name.startswith("wt103-ablation")}
    for base in ("wikitext-2-ablation", "stdlib-ablation"):
        names = [name for name in txl.presets() if name.startswith(base)]
        assert {name.removeprefix(base) for name in names} == paper - {"-151M", "-no-memory-176", "-no-memory-half-172"}
        assert len({(txl.preset(name).train.steps, txl.preset(name).train.segment) for name in names}) == 1


def test_segments_of_random_length_need_room_for_positions():
    run = txl.preset("wikitext-2-ablation-learned-half")
    run.train.random_segments = True
    with pytest.raises(UserError, match=r"expected at least 110"):
        validate(run)
    run.model.max_segment = 110
    run.eval.segment = 110
    validate(run)


def test_each_call_gives_a_configuration_of_its_own():
    txl.preset("ptb").model.n_layer = 1
    assert txl.preset("ptb").model.n_layer == 16


def test_test_settings_are_the_authors():
    for name, settings in {
        "enwik8-12L": (80, 2100, 2100, 820),
        "text8-24L": (128, 3800, 3800, 1000),
        "wt103-base": (64, 640, 640, 400),
        "wt103-large": (128, 1600, 1600, 1000),
        "lm1b-large": (32, 128, 128, None),
    }.items():
        found = txl.preset(name).eval
        assert (found.segment, found.mem_len, found.window, found.clamp_len, found.batch_size) == (*settings, 10), name
    ptb = txl.preset("ptb").eval
    assert (ptb.batch_size, ptb.segment, ptb.temperature) == (1, 10, 1.08)


@pytest.mark.parametrize(("n_layer", "dropout"), [(12, 0.2), (64, 0.55)])
@pytest.mark.parametrize("corpus", ["enwik8", "text8"])
def test_vanilla_presets_are_al_rfou_et_al_s_experimental_setup(corpus, n_layer, dropout):
    run = txl.preset(f"{corpus}-vanilla-{n_layer}L")
    model, train = run.model, run.train
    assert isinstance(model, VanillaConfig)
    assert (model.d_model, model.d_inner, model.n_head, model.d_head, model.n_layer) == (512, 2048, 2, 256, n_layer)
    assert (run.data.corpus, train.segment, train.batch_size, train.steps) == (corpus, 512, 16, 4_000_000)
    assert (train.optimizer, train.momentum, train.schedule, train.warmup_steps) == ("sgd", 0.99, "constant", 0)
    assert {learning_rate(step, train) for step in (0, 1000, 3_999_999)} == {0.003}
    model.n_layer = 2
    rates = {name: getattr(part, "p", 0) for name, part in build_model(model, 256).named_modules()}
    dropped = {name: rate for name, rate in rates.items() if rate}
    assert dropped == {f"layers.{layer}.feed_forward.dropout_inner": dropout for layer in range(2)}
    assert model.dropatt == dropout


def test_the_small_vanilla_preset_is_about_as_large_as_the_one_it_is_compared_with():
    vanilla, other = txl.preset("enwik8-vanilla-small"), txl.preset("enwik8-small")
    assert abs(parameters("enwik8-vanilla-small") / parameters("enwik8-small") - 1) < 0.15
    assert vanilla.model.n_auxiliary == 11
    vanilla.train.epoch_shift = 0
    assert vanilla.train == other.train
