"""Complete tables in seconds: training, measuring, storing, continuing and refusing."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from tests.lab.paper.conftest import experiment, files, gathered, micro_run

import txl
import txl_lab.paper.experiment as experiment_module
from txl.config import DataConfig, RunConfig
from txl.errors import RunInterrupted, UserError
from txl.evaluation.effective_context import spread_targets
from txl.evaluation.perplexity import evaluate
from txl.evaluation.sliding import evaluate_sliding, losses_at_context
from txl.runs.directory import RunDirectory
from txl_lab.paper import measurements
from txl_lab.paper.catalogue import definitions
from txl_lab.paper.experiment import Experiment, shuffled_sentences
from txl_lab.paper.measurements import loss_at
from txl_lab.paper.outcome import group_distances, markdown, spread_text
from txl_lab.paper.page import write_outcome
from txl_lab.paper.schema import Row
from txl_lab.speed.budget import peak_bytes, with_segment

CIRCUMSTANCES = {"hardware": {"cpu": "a processor", "cores": 2, "device": "cpu"}, "software": {"torch": "2"}}


def test_attention_lengths_are_those_of_the_models_that_were_trained(micro, words, tmp_path, data_dir):
    it = experiment("table6", micro, words, tmp_path / "out", data_dir, seeds=1)
    rows = {result.row.key: result for result in it.run()}
    for key, result in rows.items():
        row = it.definition.row(key)
        assert result.status == ("done" if row.trained else "published only")
    for key in ("xl", "no-recurrence"):
        found = rows[key].by_seed[1]
        model, _ = txl.load(tmp_path / "out" / "runs" / f"{key}-seed1")
        corpus = txl.open_corpus(words.corpus, "word", data_dir=data_dir)

        def loss(split, length, key=key, model=model, corpus=corpus):
            tokens = corpus.tokens(split)
            if key == "no-recurrence":
                return evaluate_sliding(model, tokens, context=length, max_tokens=80).nll
            settings = {"segment": 8, "batch_size": 1, "max_tokens": 80, "exhaustive": True}
            return evaluate(model, tokens, mem_len=length, window=length, **settings).nll

        curve = {point["length"]: point["nll"] for point in found["curve"]}
        assert list(curve) == [4, 8, 16]
        assert curve == pytest.approx({length: loss("valid", length) for length in curve})
        lowest = min(round(math.exp(nll), 2) for nll in curve.values())
        best = min(length for length, nll in curve.items() if round(math.exp(nll), 2) == lowest)
        assert (found["attention"], found["training length"]) == (best, 8)
        assert found["quality"] == pytest.approx(math.exp(loss("test", best)))
        assert found["init"] == pytest.approx(math.exp(loss("test", 8)))


def test_memory_and_sliding_windows_of_one_length_see_the_same(words, data_dir):
    """One layer with memory and a window of L has the loss of a sliding window of L tokens, read again per target."""
    with_memory = micro_run()
    corpus = txl.open_corpus(words.corpus, "word", data_dir=data_dir)
    model = txl.build_model(with_memory.model, corpus.vocabulary)
    tokens = corpus.tokens("test")
    without = micro_run()
    without.model = dataclasses.replace(without.model, mem_len=0)
    for length in (4, 16):
        found = [loss_at(model.eval(), run, tokens, length, 80) for run in (with_memory, without)]
        assert found[0].tokens == found[1].tokens
        assert found[0].nll == pytest.approx(found[1].nll, abs=1e-6)


def test_the_segment_of_equal_memory_is_measured_once_and_kept(micro, words, tmp_path, data_dir, monkeypatch):
    out, table = tmp_path / "out", definitions()["table10"]
    rows = tuple(table.row(key) for key in ("xl", "no-recurrence"))
    first, second = experiment("table10", micro, words, out, data_dir, seeds=1, rows=rows).run()
    size = len(txl.open_corpus(words.corpus, "word", data_dir=data_dir).vocabulary)
    reference, chosen = (RunConfig.from_dict(result.config or {}) for result in (first, second))
    budget = peak_bytes(reference, size)
    assert peak_bytes(chosen, size) <= budget < peak_bytes(with_segment(chosen, chosen.train.segment + 1), size)
    assert json.loads((out / "memory" / "table10-no-recurrence.json").read_text())["budget_bytes"] == budget
    monkeypatch.setattr(experiment_module, "longest_segment", pytest.fail)  # the folder stores the length
    path = out / "memory" / "table10-no-recurrence.json"
    stored = path.read_text()
    for damage in ("{}", '{"segment": "x"}', '{"segment": 0}'):
        path.write_text(damage)
        failed = experiment("table10", micro, words, out, data_dir, seeds=2, rows=rows).run()[1]
        assert f"{path}: damaged (no length of a segment); delete it" in failed.reason
    path.write_text(stored)
    again = experiment("table10", micro, words, out, data_dir, seeds=2, rows=rows).run()[1]
    assert again.config == second.config
    assert sorted(again.by_seed) == [1, 2]


def test_equal_perplexities_take_the_shortest_length(micro, words, tmp_path, data_dir, monkeypatch):
    real = measurements.loss_at
    perplexities = {4: 50.0, 8: 40.0, 16: 39.998}

    def fixed(model, run, tokens, length, max_tokens):
        return dataclasses.replace(real(model, run, tokens, length, max_tokens), nll=math.log(perplexities[length]))

    monkeypatch.setattr(measurements, "loss_at", fixed)
    rows = (definitions()["table6"].row("xl"),)
    found = experiment("table6", micro, words, tmp_path / "out", data_dir, seeds=1, rows=rows).run()[0].by_seed[1]
    assert found["attention"] == 8  # 39.998 and 40.0 are both 40.00 in a table


def test_contexts_are_exact_and_bounded_by_what_a_model_reads(micro, words, tmp_path, data_dir):
    it = experiment("table8", micro, words, tmp_path / "out", data_dir)
    rows = it.run()
    outcome = gathered(it, rows)
    by_key = {result.row.key: result for result in rows}
    tokens = txl.open_corpus(words.corpus, "word", data_dir=data_dir).tokens("test")
    targets = spread_targets(len(tokens), 12, 20, 2)
    for key, longest in (("xl-128M", 12), ("transformer", 8)):
        model, _ = txl.load(tmp_path / "out" / "runs" / f"{key}-seed2")
        losses = by_key[key].by_seed[2]["losses"]
        assert by_key[key].by_seed[2]["longest_context"] == (8 if key == "transformer" else None)
        assert list(losses) == ["2", "4", "6", "8", "10", "12"]
        expected = losses_at_context(model, tokens, context=longest, targets=targets)
        torch.testing.assert_close(torch.tensor(losses["12"], dtype=torch.float64), expected)
    by_hand = {
        result.row.key: {int(c): torch.tensor(each) for c, each in result.by_seed[1]["losses"].items()}
        for result in rows
        if result.row.group == "128M" and result.by_seed
    }
    for r in (0.1, 0.5, 1.0):
        for key, length in txl.relative_effective_context_length(by_hand, r, step=4).items():
            assert outcome.values[key][f"r = {r:.1f}"][0] == length
    assert outcome.curves["xl-128M"][4][0] == pytest.approx(by_hand["xl-128M"][4].double().mean().item())
    at_longest = {key: [each.by_seed[seed]["losses"]["12"] for seed in (1, 2)] for key, each in by_key.items()}
    ppl = {key: [math.exp(sum(each) / len(each)) for each in seeds] for key, seeds in at_longest.items()}
    assert outcome.values["xl-128M"]["quality"] == pytest.approx(ppl["xl-128M"])
    means = [sum(ppl[key]) / 2 for key in by_hand]
    apart = max(means) / min(means) - 1
    assert group_distances(outcome)["128M"] == pytest.approx(apart)
    assert f"group 128M: perplexity at the longest context differs by up to {100 * apart:.0f}%" in markdown(outcome)
    found = outcome.gains[-1]
    assert (found.group, found.seed, set(found.gains)) == ("128M", 2, set(by_hand))
    by_key["transformer"].by_seed[1]["longest_context"] = 1  # no length in Table 8 exceeds this context
    assert gathered(it, rows).values["transformer"]["r = 1.0"][0] == 1


def test_figure4_is_another_page_of_the_same_results(micro, words, tmp_path, data_dir):
    out = tmp_path / "out"
    rows = definitions()["table8"].rows[3:4]
    experiment("table8", micro, words, out, data_dir, seeds=1, rows=rows).run()
    before = files(out)
    it = experiment("figure4", micro, words, out, data_dir, seeds=1, rows=rows)
    outcome = gathered(it, it.run())
    assert files(out) == before
    write_outcome(outcome, out, ["txl"], CIRCUMSTANCES)
    assert (out / "figure4.html").is_file()


def test_what_is_finished_is_not_done_again_and_more_seeds_are_added(micro, words, tmp_path, data_dir, monkeypatch):
    out, rows = tmp_path / "out", definitions()["table7"].rows[:1]
    first = experiment("table7", micro, words, out, data_dir, seeds=1, rows=rows).run()
    before = files(out)
    trained = []
    real = experiment_module.Trainer

    def counting(run, directory, **settings):
        trained.append(directory.name)
        return real(run, directory, **settings)

    monkeypatch.setattr(experiment_module, "Trainer", counting)
    again = experiment("table7", micro, words, out, data_dir, seeds=2, rows=rows).run()
    assert trained == ["xl-seed2"]
    assert {path: stamp for path, stamp in files(out).items() if path in before} == before
    assert again[0].by_seed[1] == first[0].by_seed[1]
    assert again[0].by_seed[2]["quality"] != again[0].by_seed[1]["quality"]


def test_a_run_that_was_stopped_goes_on_and_ends_as_if_it_had_not_been(micro, words, tmp_path, data_dir, monkeypatch):
    rows = definitions()["table7"].rows[:1]
    whole = experiment("table7", micro, words, tmp_path / "whole", data_dir, seeds=1, rows=rows).run()
    import txl.training.loop as loop

    real, steps = loop.training_step, []

    def stopping(*arguments):
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(loop, "training_step", stopping)
    stopped = experiment("table7", micro, words, tmp_path / "stopped", data_dir, seeds=1, rows=rows)
    with pytest.raises(RunInterrupted):
        stopped.run()
    assert not (tmp_path / "stopped" / "results").exists()
    resumed = stopped.run()
    assert len(steps) == 6
    assert resumed[0].by_seed[1]["quality"] == whole[0].by_seed[1]["quality"]
    events = RunDirectory(tmp_path / "stopped" / "runs" / "xl-seed1").events()
    assert [event["event"] for event in events if event["event"] in ("start", "resume")] == ["start", "resume"]


def test_another_scale_or_corpus_is_refused(micro, words, tmp_path, data_dir):
    out, rows = tmp_path / "out", definitions()["table7"].rows[:1]
    experiment("table7", micro, words, out, data_dir, seeds=1, rows=rows).run()
    before = files(out)
    longer = dataclasses.replace(micro, name="other", eval_tokens=90)
    with pytest.raises(UserError, match=r"another reproduction: scale.eval_tokens 80 -> 90, scale.name micro -> other"):
        experiment("table7", longer, words, out, data_dir, rows=rows).run()
    with pytest.raises(UserError, match="data.corpus .* -> stdlib"):
        experiment("table7", micro, DataConfig(corpus="stdlib", unit="word"), out, data_dir, rows=rows).run()
    with pytest.raises(UserError, match="experiment table7 -> table6"):
        experiment("table6", micro, words, out, data_dir).run()
    assert files(out) == before


def test_results_of_another_configuration_are_refused(micro, words, tmp_path, data_dir):
    out, rows = tmp_path / "out", definitions()["table7"].rows[:2]
    experiment("table7", micro, words, out, data_dir, seeds=1, rows=rows).run()
    before = files(out)
    nearer = dataclasses.replace(rows[1], overrides={**(rows[1].overrides or {}), "model.max_distance": "3"})
    with pytest.raises(UserError, match=r"xl-shaw-seed1.json: of another configuration: model.max_distance 15 -> 3"):
        experiment("table7", micro, words, out, data_dir, seeds=2, rows=(rows[0], nearer)).run()
    assert files(out) == before


def test_a_corpus_too_short_for_the_contexts_is_refused_before_training(micro, words, tmp_path, data_dir):
    longer = dataclasses.replace(micro, longest_context=10**6)
    with pytest.raises(UserError, match=r"the test split of .* has [\d,]+ tokens, but table8 reads 1,000"):
        experiment("table8", longer, words, tmp_path / "out", data_dir).run()
    assert not (tmp_path / "out" / "runs").exists()


def test_a_group_that_lacks_a_model_has_no_effective_context(micro, words, tmp_path, data_dir, monkeypatch):
    real = measurements.Context.measure

    def failing(self, trained, *rest):
        if "no-recurrence" in trained.run.name:
            raise RuntimeError("no")
        return real(self, trained, *rest)

    monkeypatch.setattr(measurements.Context, "measure", failing)
    it = experiment("table8", micro, words, tmp_path / "out", data_dir, seeds=1)
    outcome = gathered(it, it.run())
    assert "r = 0.1" in outcome.values["xl-151M"]
    assert "r = 0.1" not in outcome.values["xl-128M"]
    assert {verdict.outcome for _, verdict in outcome.verdicts()} == {"not judged"}
    assert "128M" not in {gains.group for gains in outcome.gains}


def test_a_folder_of_something_else_is_refused_and_left_alone(micro, words, tmp_path, data_dir):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError) as caught:
        experiment("table7", micro, words, tmp_path, data_dir).run()
    assert caught.value.field == "out"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_row_that_fails_is_reported_and_the_others_run(micro, words, tmp_path, data_dir, monkeypatch):
    real = experiment_module.Trainer

    class Failing(real):
        def fit(self):
            if "no-recurrence" in str(self.directory.path):
                raise RuntimeError("the sky\nfell")
            return super().fit()

    rows = tuple(definitions()["table7"].row(key) for key in ("no-recurrence", "xl"))
    it = experiment("table7", micro, words, tmp_path / "out", data_dir, rows=rows)
    monkeypatch.setattr(experiment_module, "Trainer", Failing)
    outcome = gathered(it, it.run())
    assert [(each.row.key, each.reason) for each in outcome.failed] == [("no-recurrence", "seed 1: the sky fell")]
    assert len(outcome.values["xl"]["quality"]) == 2
    write_outcome(outcome, it.out, ["txl"], CIRCUMSTANCES)
    assert "no-recurrence failed: seed 1: the sky fell" in (it.out / "table7.html").read_text()
    monkeypatch.undo()
    assert gathered(it, it.run()).failed == []


def test_tables_of_separate_sentences_are_trained_on_the_corpus_in_random_order(micro, words, tmp_path, data_dir):
    it = experiment("table7", micro, words, tmp_path / "out", data_dir, seeds=1, rows=definitions()["table7"].rows[:1])
    it.run()
    config = RunDirectory(tmp_path / "out" / "runs" / "xl-seed1").config()
    assert config.data.corpus == str(tmp_path / "out" / "corpus")
    original = txl.open_corpus(words.corpus, "word", data_dir=data_dir)
    for split in ("train", "valid", "test"):
        before = original.vocabulary.decode(original.tokens(split)[:].tolist())
        after = (tmp_path / "out" / "corpus" / f"{split}.txt").read_text()
        assert sorted(after.split()) == sorted(before.split())
        assert after.split() != before.split()
        spans = f" {' '.join(before.split())} "
        assert all(f" {' '.join(sentence.split())} " in spans for sentence in after.splitlines())


@pytest.mark.parametrize(
    ("name", "text", "sentences"),
    [
        (
            "ptb",
            "mr. vinken is chairman\nexxon corp. rose in nov. and fell\n",
            2,
        ),  # one sentence per line; full stops belong to abbreviations
        ("wikitext-2", "The U.S. agreed . It said No. 1 won !\n= Title =\n", 3),
        ("wikitext-2", 'He said " we go . " and went . She stayed ?\n', 2),  # a quotation is not cut at its end
        ("novel", "It rained. He came in!  She left\nthen. So be it?", 5),
    ],
)
def test_sentences_end_where_the_text_says_so(name, text, sentences, tmp_path):
    class Vocabulary:
        def decode(self, ids):
            return text

    corpus = SimpleNamespace(name=name, vocabulary=Vocabulary(), tokens=lambda split: torch.zeros(1).numpy())
    shuffled_sentences(corpus, tmp_path / "out")  # pyright: ignore[reportArgumentType]
    assert len((tmp_path / "out" / "train.txt").read_text().splitlines()) == sentences


def test_speed_is_measured_without_training(micro, tmp_path, data_dir):
    it = experiment("table9", micro, DataConfig(corpus="enwik8"), tmp_path / "out", data_dir)
    outcome = gathered(it, it.run())
    assert not (tmp_path / "out" / "runs").exists()
    lengths = [result.by_seed[1]["attention_length"] for result in outcome.rows]
    assert lengths == [19, 14, 9, 4]
    assert all(len(each["slower"]) == 2 and min(each["slower"]) > 0 for each in outcome.values.values())


def test_figures_are_made_of_the_trained_model(micro, words, tmp_path, data_dir):
    it = Experiment(definitions()["figure5"], micro, words, tmp_path / "out", 1, "cpu", None, quiet=True)
    outcome = gathered(it, it.run())
    assert outcome.failed == []
    (made,) = outcome.rows[0].by_seed.values()
    assert any(name.endswith("figure5.svg") for name in made["files"])
    record = write_outcome(outcome, it.out, ["txl"], CIRCUMSTANCES)
    assert record["rows"][0]["seeds"]["1"]["files"] == made["files"]
    assert f'href="{made["files"][0]}"' in (it.out / "figure5.html").read_text()
    shutil.rmtree(it.out / "made")  # files that are gone are made anew, of the same model
    checkpoints = it.out / "runs" / "xl-seed1" / "checkpoints"
    trained = files(checkpoints)
    write_outcome(gathered(it, it.run()), it.out, ["txl"], CIRCUMSTANCES)
    assert (it.out / made["files"][0]).exists()
    assert files(checkpoints) == trained


def test_figures_of_attention_share_their_files_and_show_their_own(micro, words, tmp_path, data_dir, capsys):
    out, made = tmp_path / "out", {}
    for name, pictures in (("figure5", 1), ("figure6", 3), ("figure7", 1)):
        it = experiment(name, micro, words, out, data_dir, seeds=1)
        outcome = gathered(it, it.run())
        assert outcome.failed == []
        assert capsys.readouterr().out == ""  # standard output is reserved for the table
        write_outcome(outcome, out, ["txl"], CIRCUMSTANCES)
        text = (out / f"{name}.html").read_text()
        assert 1 <= text.count('<img src="data:image/svg+xml;base64,') <= pictures
        assert "mean ± standard deviation" not in text
        made[name] = files(out / "made")
    assert made["figure5"] == made["figure6"] == made["figure7"]


@pytest.mark.parametrize("name", ["table6", "table8", "table9", "table2"])
def test_the_page_and_the_record_hold_papers_numbers_ours_and_the_claims(name, micro, words, tmp_path, data_dir):
    data = words if definitions()[name].unit == "word" else DataConfig(corpus=words.corpus)
    it = experiment(name, dataclasses.replace(micro, judged=name != "table6"), data, tmp_path / "out", data_dir)
    outcome = gathered(it, it.run())
    assert outcome.failed == []
    command = ["txl", "reproduce", name]
    record = write_outcome(outcome, it.out, command, CIRCUMSTANCES)
    assert json.loads((it.out / f"{name}.json").read_text()) == json.loads(json.dumps(record))
    text = (it.out / f"{name}.html").read_text()
    # Placeholders of overrides are filled in.
    assert "{" not in re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    assert ("model.encoding learned; model.max_segment 8" in text) == (name in ("table2", "table6", "table8"))
    assert "<img" not in text
    assert "<image" not in text
    shown = markdown(outcome)
    for row in record["rows"]:
        for figure in row["paper"].values():
            assert figure in text
            assert figure in shown
        if row["seeds"]:
            assert row["shown"][next(iter(row["shown"]))] in text
    for claim in record["claims"]:
        assert claim["claim"] in shown
        assert claim["outcome"] in text
        assert (claim["outcome"] == "not judged") == (name == "table6" or claim["claim"] == "C1, threshold")
    repeats = "2 measurements" if name == "table9" else "2 seeds"
    assert shown.startswith(f"{outcome.definition.title}, scale micro, {repeats}")


def test_parameters_and_budgets_are_said_by_row(micro, words, tmp_path, data_dir):
    rows = definitions()["table7"].rows[:1]
    it = experiment("table7", micro, words, tmp_path / "out", data_dir, rows=rows)
    outcome = gathered(it, it.run())
    model, _ = txl.load(tmp_path / "out" / "runs" / "xl-seed1")
    assert outcome.rows[0].parameters == sum(each.numel() for each in model.parameters())
    write_outcome(outcome, it.out, ["txl"], CIRCUMSTANCES)
    text = (it.out / "table7.html").read_text()
    assert "Budgets" in text
    assert f"{6 * 2 * 8:,}" in text


def test_a_row_without_a_configuration_fails_alone(micro, words, tmp_path, data_dir):
    rows = (Row("wrong", "wrong", {}, {"model.encoding": "learned"}), definitions()["table7"].rows[0])
    found = experiment("table7", micro, words, tmp_path / "out", data_dir, seeds=1, rows=rows).run()
    assert [each.status for each in found] == ["failed", "done"]
    assert "mem_len is 8" in found[0].reason


def test_spread_in_words():
    assert spread_text([], 2) == "-"
    assert spread_text([27.0234], 2) == "27.02"
    assert spread_text([27.0, 28.0], 2) == "27.50 ± 0.71"
    assert spread_text([3800.0, 3800.0], 0) == "3,800 ± 0"


def test_the_micro_scale_is_micro():
    assert micro_run().train.steps == 6
