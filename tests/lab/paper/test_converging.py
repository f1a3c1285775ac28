"""Rows that are trained until convergence, at the best of a few learning rates."""

from __future__ import annotations

import dataclasses
import errno
import math

import pytest
from tests.lab.paper.conftest import experiment, files, gathered, micro_run

from txl.config import AttentionName, RecurrentConfig, RunConfig, TransformerXLConfig
from txl.errors import RunInterrupted, UserError
from txl.runs.directory import RunDirectory
from txl_lab.paper.catalogue import definitions
from txl_lab.paper.converging import Tried, UntilConverged, recipe_of, tune, with_convergence
from txl_lab.paper.experiment import RowModels
from txl_lab.paper.outcome import markdown
from txl_lab.paper.page import outcome_page
from txl_lab.paper.scales import PAPER

RULES = UntilConverged(patience=2, evaluations=4, tuning_share=0.5, halvings=0)


def tuned(folder, loss, rules=RULES):
    """Return the tried factors in order, and the choice; `loss` maps the factor of a rate to its validation loss."""
    asked = []

    def fit(run: RunConfig, directory) -> Tried:
        asked.append(run.train.learning_rate / 1e-2)
        return Tried(factor=1.0, learning_rate=run.train.learning_rate, nll=loss(asked[-1]), tokens=10, seconds=1.0)

    return asked, tune("table6", "xl", with_convergence(micro_run(), rules), rules, folder, fit)


@pytest.mark.parametrize(
    ("loss", "asked", "chosen", "at_edge"),
    [
        (lambda factor: abs(math.log(factor)), [0.5, 1, 2], 1, False),
        (lambda factor: abs(math.log(factor / 2)), [0.5, 1, 2, 4], 2, False),
        (lambda factor: factor, [0.5, 1, 2, 0.25], 0.25, True),  # the search ends here
        (lambda factor: None if factor > 0.5 else 3.0, [0.5, 1, 2, 0.25], 0.25, True),
    ],
)
def test_the_rate_with_the_lowest_loss_is_chosen(loss, asked, chosen, at_edge, tmp_path):
    tried, found = tuned(tmp_path, loss)
    assert tried == pytest.approx(asked)
    assert (found["factor"], found["at_edge"]) == (chosen, at_edge)
    assert [each["factor"] for each in found["tried"]] == sorted(asked)
    again, same = tuned(tmp_path, lambda factor: 0.0)
    assert (again, same) == ([], found)


def test_families_kinds_of_recurrent_networks_depths_embeddings_and_first_weights_choose_apart():
    usual = micro_run().model
    models = {
        "lstm-3L": RecurrentConfig(kind="lstm", n_layer=3),
        "qrnn-3L": RecurrentConfig(kind="qrnn", n_layer=3),
        "transformer-xl-2L": dataclasses.replace(usual, n_layer=2),
        "transformer-xl-4L": dataclasses.replace(usual, n_layer=4),
        "transformer-xl-2L-adaptive": dataclasses.replace(usual, n_layer=2, cutoffs=(4,), div_val=2),
        "transformer-xl-2L-xavier": dataclasses.replace(usual, n_layer=2, init="xavier"),
    }
    names = [recipe_of(dataclasses.replace(micro_run(), model=model)) for model in models.values()]
    assert names == [f"{name}-adam-0.01" for name in models]


def test_rates_at_which_all_diverges_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"diverges at every learning rate that was tried: 0.005, 0.01, 0.02"):
        tuned(tmp_path, lambda factor: None)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_averages_keeps_its_schedule():
    run = micro_run(100)
    train = with_convergence(run, RULES).train
    assert (train.schedule, train.decay_share, train.plateau_patience) == ("plateau", 0.25, 2)
    run.train = dataclasses.replace(run.train, schedule="constant", average_patience=5, optimizer="sgd")
    train = with_convergence(run, RULES).train
    assert (train.schedule, train.patience, train.average_patience, train.eval_every) == ("constant", 7, 5, 25)


def test_the_machines_fastest_attention_is_taken_where_none_was_asked_for():
    run = micro_run(100)
    assert isinstance(run.model, TransformerXLConfig)
    wanted: dict[AttentionName, str] = {"auto": "fastest", "reference": "reference"}
    for asked, taken in wanted.items():
        run.model.attention = asked
        model = with_convergence(run, RULES).model
        assert isinstance(model, TransformerXLConfig)
        assert model.attention == taken


def test_a_row_that_fails_while_its_rate_is_tuned_does_not_fail_the_next(micro, words, tmp_path, data_dir, monkeypatch):
    scale = dataclasses.replace(micro.changed(steps=8), until_converged=RULES)
    rows = tuple(definitions()["table6"].row(key) for key in ("xl", "xl-shaw"))
    it = experiment("table6", scale, words, tmp_path / "out", data_dir, seeds=1, rows=rows)
    fit, fitted = RowModels.fit, []

    def full(self, run, directory):
        fitted.append(directory)
        if len(fitted) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return fit(self, run, directory)

    monkeypatch.setattr(RowModels, "fit", full)
    found = {result.row.key: result for result in it.run()}
    assert found["xl"].status == "failed"
    assert "No space left" in found["xl"].reason
    assert found["xl-shaw"].status == "done", found["xl-shaw"].reason


def test_rows_of_one_recipe_share_a_rate_and_go_on_after_a_stop(micro, words, tmp_path, data_dir, monkeypatch):
    scale = dataclasses.replace(micro.changed(steps=8), until_converged=RULES)
    rows = tuple(definitions()["table6"].row(key) for key in ("xl", "no-recurrence"))
    it = experiment("table6", scale, words, tmp_path / "out", data_dir, seeds=1, rows=rows)

    def interrupted(run, directory):
        raise RunInterrupted("stopped", exit_code=130)

    monkeypatch.setattr(RowModels, "fit", lambda self, run, directory: interrupted(run, directory))
    with pytest.raises(RunInterrupted):
        it.run()
    monkeypatch.undo()
    (tmp_path / "out" / "rates").mkdir(exist_ok=True)  # left by a stop during the first rate
    longer = dataclasses.replace(micro.changed(steps=16), until_converged=RULES)
    with pytest.raises(UserError, match="holds another reproduction: scale.steps 8 -> 16"):
        experiment("table6", longer, words, tmp_path / "out", data_dir, seeds=1, rows=rows).run()
    found = {result.row.key: result for result in it.run()}
    assert [path.name for path in (tmp_path / "out" / "rates").glob("*.json")] == ["transformer-xl-1L-adam-0.01.json"]
    for key, result in found.items():
        assert result.status == "done", result.reason
        seed = result.by_seed[1]
        assert seed["rates"]["row"] == "xl"
        run = RunDirectory(tmp_path / "out" / "runs" / f"{key}-seed1").config()
        assert run.train.learning_rate == pytest.approx(0.01 * seed["rates"]["factor"])
        assert (run.train.schedule, run.train.patience, run.train.eval_every) == ("plateau", 2, 2)
        assert seed["steps"] <= 8
    tried = found["xl"].by_seed[1]["rates"]["tried"]
    assert len(tried) >= 3
    assert all(each["tokens"] == 4 * 2 * 8 for each in tried)

    before = files(tmp_path / "out")
    outcome = gathered(it, it.run())
    assert files(tmp_path / "out") == before
    assert "learning rate of transformer-xl-1L-adam-0.01: " in markdown(outcome)
    page = outcome_page(
        outcome, tmp_path / "out", ["txl"], {"hardware": {"cpu": "one", "cores": 2, "device": "cpu"}, "software": {}}
    )
    assert "divided by four" in page
    capped = found["xl"].by_seed[1]["steps"] == 8
    assert ("hit the cap" in page) is (capped or found["no-recurrence"].by_seed[1]["steps"] == 8)


def test_published_presets_are_trained_as_they_are():
    with pytest.raises(UserError) as caught:
        PAPER.changed(rules=RULES)
    assert caught.value.field == "until_converged"


WHOLE = dataclasses.replace(RULES, halvings=2)


@pytest.mark.parametrize(
    ("best", "whole", "chosen", "at_edge"),
    [
        (1, [1, 0.5], 1, False),
        (0.5, [1, 0.5, 0.25], 0.5, False),
        (0.1, [1, 0.5, 0.25], 0.25, True),
        (0.5**0.503, [1, 0.5], 1, False),  # half of the rate is better by 0.004 nats
    ],
)
def test_runs_to_the_end_halve_the_rate_while_that_helps(best, whole, chosen, at_edge, tmp_path):
    """Short runs are best at the recipe's rate; `best` is the factor that is best after all steps."""
    asked = []

    def fit(run: RunConfig, directory) -> Tried:
        factor, is_whole = run.train.learning_rate / 1e-2, run.train.steps == 6
        assert directory.name.endswith("-whole") == is_whole
        if is_whole:
            asked.append(factor)
            assert (run.train.schedule, run.train.patience, run.name) == ("plateau", 2, "micro")
        loss = abs(math.log(factor / (best if is_whole else 1)))
        return Tried(factor=1.0, learning_rate=run.train.learning_rate, nll=loss, tokens=10, seconds=1.0)

    found = tune("table6", "xl", with_convergence(micro_run(), WHOLE), WHOLE, tmp_path, fit)
    assert asked == pytest.approx(whole)
    assert [each["factor"] for each in found["whole"]] == whole
    assert (found["factor"], found["at_edge"]) == (chosen, at_edge)


def test_the_chosen_run_to_the_end_is_the_rows_own(micro, words, tmp_path, data_dir, monkeypatch):
    scale = dataclasses.replace(micro.changed(steps=8), until_converged=dataclasses.replace(WHOLE, factors=(1.0,)))
    rows = (definitions()["table6"].row("xl"),)
    it = experiment("table6", scale, words, tmp_path / "out", data_dir, seeds=2, rows=rows)
    fit, fitted = RowModels.fit, []

    def noted(self, run, directory):
        before = RunDirectory(directory).newest()
        outcome = fit(self, run, directory)
        fitted.extend([(run.train.seed, run.train.learning_rate)] if RunDirectory(directory).newest() != before else [])
        return outcome

    monkeypatch.setattr(RowModels, "fit", noted)
    [row] = it.run()
    assert row.status == "done", row.reason
    tuned = row.by_seed[1]["rates"]
    whole = [each["learning_rate"] for each in tuned["whole"]]
    chosen = 0.01 * tuned["factor"]
    tried = [each["learning_rate"] for each in tuned["tried"]]
    assert fitted == [*((1, pytest.approx(rate)) for rate in [*tried, *whole]), (2, pytest.approx(chosen))], (
        "seed 1 is not trained again"
    )
    assert row.by_seed[1]["config"]["train"]["learning_rate"] == pytest.approx(chosen)
    text = markdown(gathered(it, [row]))
    assert " at the end, " in text
    before = files(tmp_path / "out")
    it.run()
    assert files(tmp_path / "out") == before
