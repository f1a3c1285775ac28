"""The tables as data: every row is valid or flagged, and the paper's numbers are as printed."""

import dataclasses
import re
from collections import Counter

import pytest
import torch
from tests.lab.paper.printed import PRINTED

from txl.config import DataConfig, RunConfig, TransformerXLConfig, validate, with_options
from txl.errors import UserError
from txl.models import build_model
from txl.presets import preset, presets
from txl.presets.baselines import SMALL_AWD
from txl.training.estimate import estimate
from txl_lab.paper.catalogue import definitions
from txl_lab.paper.configuring import NotTrained, configure, estimated_segment, fitted, with_equal_tokens
from txl_lab.paper.converging import UntilConverged
from txl_lab.paper.measurements import Quality, Speed
from txl_lab.paper.scales import PAPER, SMALL, TINY

ROWS = [(each, row) for each in definitions().values() for row in each.rows]
IDS = [f"{each.name}-{row.key}" for each, row in ROWS]
NUMBER = re.compile(r"~?[\d,]+(\.\d+)?[MBx]?|-|✓|✗")
WORDS = {"Ours", "Full", "Half", "Partial", "Shaw et al. (2018)", "Vaswani et al. (2017)", "Al-Rfou et al. (2018)"}


def test_every_table_and_figure_is_there():
    names = [f"table{number}" for number in range(1, 11)] + [
        "figure3",
        "figure4",
        "figure5",
        "figure6",
        "figure7",
        "samples",
        "memory-depth",
        "gradients-into-memory",
    ]
    assert list(definitions()) == names
    assert all(each.name == name for name, each in definitions().items())


@pytest.mark.parametrize("definition", definitions().values(), ids=definitions())
def test_keys_are_unique_names_of_files(definition):
    keys = [row.key for row in definition.rows]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[A-Za-z0-9-]+", key) for key in keys)


@pytest.mark.parametrize(("definition", "row"), ROWS, ids=IDS)
def test_the_papers_numbers_parse(definition, row):
    assert set(row.paper) == set(definition.columns) or not definition.columns
    for figure in row.paper.values():
        assert NUMBER.fullmatch(figure) or figure in WORDS


@pytest.mark.parametrize("name", PRINTED)
def test_tables_are_as_the_paper_prints_them(name):
    rows = definitions()[name].rows
    names = [[] if name == "table10" else [row.name] for row in rows]  # Table 10 has no column of names
    found = [(*model, *row.paper.values()) for model, row in zip(names, rows, strict=True)]
    assert Counter(found) == Counter(PRINTED[name])


@pytest.mark.parametrize("name", ["table6", "table7", "table8"])
def test_rows_of_the_scale_paper_are_presets_that_agree_with_the_rows(name):
    """Compare the preset of a row with the row's options: memory, encoding, loss and largest learned distance."""
    table = definitions()[name]
    for row in table.rows:
        if not row.trained:
            continue
        assert row.preset is not None
        run = configure(table, row, PAPER, DataConfig(corpus=table.corpus, unit="word"), 267_735, estimated_segment)
        assert run.model == presets()[row.preset].make().model
        if run.model.constant_state:
            continue
        options = row.options(run.train.segment, run.model.mem_len, run.train.segment)
        varied = with_options(presets()["wt103-ablation"].make(), options)
        for field in ("encoding", "max_distance"):
            if f"model.{field}" in options:
                assert getattr(run.model, field) == getattr(varied.model, field), (row.key, field)
        assert (run.model.mem_len == 0) == (varied.model.mem_len == 0)
        assert run.train.loss == varied.train.loss


def test_rows_that_are_trained_have_a_preset_but_those_of_one_billion_word():
    without = {(table.name, row.key) for table in definitions().values() for row in table.rows if row.preset is None}
    tables = [table for table in definitions().values() if not table.is_open_question]
    trained = {(table.name, row.key) for table in tables for row in table.rows if row.trained}
    assert without & trained == {("table4", key) for key in ("lstm", "adaptive-input", "adaptive-input-large")}
    for table in ("table1", "table2", "table3", "table5"):
        used = {row.preset for row in definitions()[table].rows}
        of_it = {name for name, each in presets().items() if re.match(rf"Tables? {table[-1]}\b", each.source)}
        assert of_it <= used, table


@pytest.mark.parametrize("definition", definitions().values(), ids=definitions())
def test_claims_are_about_rows_that_are_trained(definition):
    measures = ("quality", "time", "attention", "training reach", "slower", "r = 0.1")
    made_up = {row.key: {measure: [1.0, 2.0] for measure in measures} for row in definition.rows if row.trained}
    for claim in definition.claims:
        assert "no result" not in claim.judge(made_up, {}).reason


@pytest.mark.parametrize("scale", [TINY, SMALL, PAPER], ids=lambda scale: scale.name)
@pytest.mark.parametrize(("definition", "row"), ROWS, ids=IDS)
def test_every_row_is_valid_or_flagged(definition, row, scale):
    if isinstance(definition.measurement, Speed):
        assert row.preset in presets()
        return
    data = DataConfig(corpus="stdlib", unit="word" if definition.unit == "word" else "byte")
    size = presets()[row.preset].vocab_size if scale.is_published and row.preset in presets() else 10_000
    flagged = {"published only": not row.trained, "not at this scale": scale.is_published and row.preset is None}
    if any(flagged.values()):
        with pytest.raises(NotTrained) as why:
            configure(definition, row, scale, data, size, estimated_segment)
        assert flagged[why.value.status]
        return
    run = configure(definition, row, scale, data, size, estimated_segment)
    validate(run)
    assert run.data == data


@pytest.mark.parametrize("definition", definitions().values(), ids=definitions())
def test_models_of_a_table_have_equal_budgets(definition):
    if isinstance(definition.measurement, Speed):
        return
    data = DataConfig(corpus="stdlib", unit="word" if definition.unit == "word" else "byte")
    budgets = set()
    for row in definition.rows:
        if row.trained and row.equal_memory_with is None:
            train = configure(definition, row, SMALL, data, 10_000, estimated_segment).train
            lanes = None if definition.is_open_question else train.batch_size
            budgets.add((train.steps, train.tokens_per_step, lanes, train.learning_rate))
    assert len(budgets) == 1


def test_rows_of_the_open_questions_differ_in_what_is_asked():
    data = DataConfig(corpus="stdlib", unit="word")

    def configured(name, scale=SMALL):
        table = definitions()[name]
        return {row.key: configure(table, row, scale, data, 10_000, estimated_segment) for row in table.rows}

    grid = configured("memory-depth")
    assert [(run.model.n_layer, run.model.mem_len) for run in grid.values()] == [
        (n_layer, mem_len) for n_layer in (4, 8) for mem_len in (70, 140, 280, 560)
    ]
    rows = configured("gradients-into-memory")
    shapes = {key: (r.train.batch_size, r.train.segment, r.train.backprop_segments) for key, r in rows.items()}
    assert shapes == {"one-segment": (20, 70, 1), "two-segments": (10, 70, 2), "longer-segment": (10, 140, 1)}
    assert len({(run.model.mem_len, run.model.n_layer) for run in rows.values()}) == 1


@pytest.mark.parametrize(
    "name", [each.name for each in definitions().values() if isinstance(each.measurement, Quality)]
)
def test_models_of_a_scale_are_tested_with_the_attention_of_training(name):
    """Small models become worse with more, so that rows with memory would be compared at a handicap."""
    table, data = definitions()[name], DataConfig(corpus="stdlib", unit="word")
    for row in table.rows:
        if not row.trained:
            continue
        run = configure(table, row, SMALL, data, 10_000, estimated_segment)
        if run.model.mem_len == 0:
            assert (run.eval.mem_len, run.eval.window) == (0, None)
        else:
            reach = run.model.mem_len + run.train.segment - 1
            assert (run.eval.mem_len, run.eval.window) == (reach, reach)


def test_the_regularisation_of_the_awd_lstm_is_that_of_the_small_preset():
    overrides = definitions()["table5"].row("awd-lstm").overrides or {}
    assert {name: float(overrides[f"model.{name}"]) for name in SMALL_AWD} == SMALL_AWD


def test_published_rows_are_the_presets():
    table = definitions()["table1"]
    row = table.row("xl-large")
    run = configure(table, row, PAPER, DataConfig(corpus="wikitext-103", unit="word"), 267_735, estimated_segment)
    assert run.model == presets()["wt103-large"].make().model


def test_a_width_is_fitted_to_a_number_of_parameters():
    table = definitions()["table6"]
    run = configure(table, table.row("xl"), TINY, DataConfig(corpus="stdlib", unit="word"), 1000, estimated_segment)
    narrow = run.model.parameter_count(1000)
    run.model.d_inner = 6
    found = fitted(run, "model.d_inner", 1000, narrow)
    assert found.model.parameter_count(1000) == narrow
    between = narrow + 10  # less than one step of `model.d_inner`
    assert fitted(run, "model.d_inner", 1000, between).model.parameter_count(1000) == narrow


def test_a_number_of_parameters_out_of_reach_is_refused():
    table = definitions()["table1"]
    data = DataConfig(corpus="stdlib", unit="word")
    run = configure(table, table.row("lstm"), TINY, data, 4000, estimated_segment)
    assert 4000 * run.model.d_model > 100_000  # the embeddings alone are larger
    with pytest.raises(
        UserError, match=r"no model.d_hidden gives about 100,000 parameters; the nearest has 27\d,\d\d\d"
    ):
        fitted(run, "model.d_hidden", 4000, 100_000)


@pytest.mark.parametrize(("scale", "vocab_size"), [(TINY, 2000), (TINY, 4000), (SMALL, 10_000), (SMALL, 33_278)])
@pytest.mark.parametrize("table", definitions().values(), ids=definitions())
def test_rows_of_equal_parameters_have_them_and_a_width_to_speak_of(table, scale, vocab_size):
    for row in table.rows:
        if row.fit is not None:
            run, other = (
                configure(table, each, scale, DataConfig(), vocab_size, estimated_segment)
                for each in (row, table.row(row.fit))
            )
            found, asked = (each.model.parameter_count(vocab_size) for each in (run, other))
            assert found == pytest.approx(asked, rel=0.01), row.key
            assert run.model.layer_width >= run.model.d_model // 2, row.key


def test_equal_memory_gives_the_longest_segment_and_equal_tokens():
    table = definitions()["table10"]
    data = DataConfig(corpus="stdlib", unit="word")
    first = configure(table, table.row("xl"), TINY, data, 1000, estimated_segment)
    longer = configure(table, table.row("no-recurrence"), TINY, data, 1000, estimated_segment)
    budget = estimate(first, 1000).total_bytes
    assert estimate(longer, 1000).total_bytes <= budget
    assert longer.train.segment > first.train.segment
    tokens = [run.train.steps * run.train.segment for run in (first, longer)]
    assert tokens[1] == pytest.approx(tokens[0], rel=0.02)
    longer.train.segment += 1
    assert estimate(longer, 1000).total_bytes > budget
    assert estimated_segment(first, first, 1000) == first.train.segment


def test_equal_memory_is_that_of_rows_as_they_are_trained():
    """Until convergence no weights are averaged and attention is the machine's fastest; both rows are measured so."""
    table, data = definitions()["table10"], DataConfig(corpus="ptb", unit="word")
    measured = []

    def fit(run: RunConfig, other: RunConfig, vocab_size: int) -> int:
        measured.extend((run, other))
        return 80

    until_converged = dataclasses.replace(SMALL, until_converged=UntilConverged())
    trained = configure(table, table.row("no-recurrence"), until_converged, data, 1000, fit)
    assert trained.train.segment == 80
    for run in measured:
        assert (run.train.schedule, run.train.average_from) == ("plateau", None)
        assert isinstance(run.model, TransformerXLConfig)
        assert run.model.attention == "fastest"


@pytest.mark.parametrize("name", ["table4", "table7"])
def test_tables_of_separate_sentences_have_the_papers_short_segments(name):
    """Segments of several sentences would hardly cut any, so that recurrence could not show what it is worth."""
    table, data = definitions()[name], DataConfig(corpus="wikitext-2")
    usual = SMALL.base("word").train
    for row in table.rows:
        if not row.trained:
            continue
        run = configure(table, row, SMALL, data, 33_278, estimated_segment)
        published = preset("lm1b-base")
        assert run.train.segment == published.train.segment == 32
        assert run.train.batch_size * 32 == pytest.approx(usual.batch_size * usual.segment, rel=0.02)
        assert run.eval.segment == 32
        if run.model.mem_len != 0 and isinstance(run.model, TransformerXLConfig):
            assert run.model.mem_len == published.model.mem_len
            assert run.model.encoding == "relative" or run.model.max_distance == 32 + 32 - 1


def test_segments_that_are_short_already_stay():
    assert TINY.base("word", separate_sentences=True) == TINY.base("word")


def test_another_segment_keeps_tokens_and_where_averaging_begins():
    run = TINY.base("word")
    run.train.steps, run.train.segment, run.train.average_from = 300, 32, 150
    longer = with_equal_tokens(run, 48)
    assert (longer.train.segment, longer.train.steps, longer.train.average_from) == (48, 200, 100)
    assert run.train.segment == 32


def test_words_of_adaptive_input_are_as_large_as_its_positions():
    """Sinusoids have a mean square of 1/2; embeddings with the usual initialisation would be negligible beside them."""
    table = definitions()["table1"]
    run = configure(
        table, table.row("adaptive-input"), SMALL, DataConfig(corpus="wikitext-2"), 33_278, estimated_segment
    )
    torch.manual_seed(0)
    model = build_model(run.model, 33_278)
    for token in (0, 10_000, 30_000):  # 500 words from each cluster
        words = model.embedding(torch.arange(token, token + 500))
        assert 0.3 < words.square().mean().sqrt() < 3
