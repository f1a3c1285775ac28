"""Continuing a run: to more steps than configured before, and after its text was renamed."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.conftest import options_of, small_run
from tests.training.test_trainer import assert_same_end, before_step, killed, stop_after, train, train_until

import txl
from txl.cli import main
from txl.errors import RunInterrupted, UserError
from txl.native import build
from txl.runs.directory import RunDirectory
from txl.runs.status import run_status
from txl.training.schedule import learning_rate
from txl.training.trainer import Trainer

SCHEDULES = {
    "cosine whose warm-up is not over": {"train.warmup_steps": "11"},
    "constant": {"train.schedule": "constant"},
    "inverse_sqrt": {"train.schedule": "inverse_sqrt"},
    "steps": {"train.schedule": "steps", "train.decay_at": "5,14"},
    "cosine to an average": {"train.average_from": "5"},
    "muon along a line to an average": {
        "train.optimizer": "muon",
        "train.schedule": "linear",
        "train.average_from": "5",
    },
    # The evaluation at the old end, step 10, must not influence when the average begins.
    "average by patience": {
        "train.schedule": "constant",
        "train.average_patience": "1",
        "train.learning_rate": "0.3",
        "train.eval_every": "3",
    },
}


def extended(event_of) -> dict:
    return next(event for event in RunDirectory(event_of).events() if event["event"] == "extend")


def test_a_longer_run_has_the_plan_that_is_given_with_it(story, data_dir, tmp_path):
    for steps, minutes in (("12", "9"), ("24", "7")):
        run = small_run(str(story), **{"train.steps": steps, "train.planned_minutes": minutes})
        train(run, tmp_path / "run", data_dir, extend=steps == "24")
    assert RunDirectory(tmp_path / "run").config().train.planned_minutes == 7


@pytest.mark.parametrize(("name", "old_end"), [("constant", "12"), *((name, "10") for name in SCHEDULES)])
def test_a_longer_run_is_what_it_would_have_been(name, old_end, story, data_dir, tmp_path):
    options = SCHEDULES[name] | {"train.planned_minutes": "9"}
    short, long = (small_run(str(story), **options, **{"train.steps": steps}) for steps in (old_end, "24"))
    train(long, tmp_path / "whole", data_dir)
    train(short, tmp_path / "run", data_dir)
    train(long, tmp_path / "run", data_dir, extend=True)
    assert extended(tmp_path / "run")["changes"] == []
    assert RunDirectory(tmp_path / "run").config().train.planned_minutes is None  # it was for fewer steps
    if name != "average by patience" and old_end == "10":
        # The evaluation at the old end stays in the training state, but nothing depends on it.
        for out in (tmp_path / "run", tmp_path / "whole"):
            forget_evaluations(out)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    status = run_status(tmp_path / "run")
    assert (status.state, status.step, status.steps) == ("finished", 24, 24)


def forget_evaluations(out) -> None:
    path = RunDirectory(out).checkpoint("latest") / "training_state.json"
    state = json.loads(path.read_text())
    for name in ("validation_losses", "best_nll", "best_step", "scheduled_best"):
        state["progress"].pop(name)
    path.write_text(json.dumps(state))


def test_a_crash_while_it_is_longer_changes_nothing(story, data_dir, tmp_path, monkeypatch):
    changes = SCHEDULES["average by patience"]
    long = small_run(str(story), **changes, **{"train.steps": "24"})
    train(long, tmp_path / "whole", data_dir)
    train(small_run(str(story), **changes, **{"train.steps": "10"}), tmp_path / "run", data_dir)
    for step in (1, 7):  # before the first new checkpoint, and after it
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            before_step(patch, step, killed)
            train(long, tmp_path / "run", data_dir, extend=True)
    train(long, tmp_path / "run", data_dir)  # the run directory already has the new number of steps
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def attentions(out) -> list[str | None]:
    return [event.get("attention") for event in RunDirectory(out).events() if event["event"] in ("start", "resume")]


def test_a_run_keeps_the_attention_that_it_began_with(story, data_dir, tmp_path, monkeypatch, capsys):
    """A run that began without a compiler continues with the same attention backend where a compiler exists."""
    run, shifted = (small_run(str(story), **{"model.attention": name}) for name in ("fastest", "shifted"))
    train(shifted, tmp_path / "whole", data_dir)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_load", lambda: (None, "no C++ compiler found (c++)"))
        stop_after(patch, 5)
        with pytest.raises(RunInterrupted):
            Trainer(run, tmp_path / "run", data_dir=data_dir).fit()
    told = capsys.readouterr().err
    assert "note: model.attention fastest (compiled) needs the compiled library" in told
    assert told.count("no C++ compiler found (c++)); shifted is used, which is slower") == 1
    train(run, tmp_path / "run", data_dir)
    assert attentions(tmp_path / "run") == ["shifted", "shifted"]
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.skipif(build.why_not() is not None, reason=f"needs the compiled library: {build.why_not()}")
def test_a_run_with_compiled_attention_does_not_go_on_without_it(story, data_dir, tmp_path, monkeypatch):
    run = small_run(str(story), **{"model.attention": "fastest"})
    train(run, tmp_path / "whole", data_dir)
    for _ in range(2):
        train_until(4, monkeypatch, run, tmp_path / "run", data_dir)
        with (
            monkeypatch.context() as patch,
            pytest.raises(
                UserError, match=r"run was trained with compiled attention, which needs a C\+\+ compiler: no C\+\+ comp"
            ),
        ):
            patch.setattr(build, "_load", lambda: (None, "no C++ compiler found (c++)"))
            train(run, tmp_path / "run", data_dir)
    train(run, tmp_path / "run", data_dir)
    assert set(attentions(tmp_path / "run")) == {"compiled"}
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_cosine_says_what_changes(trained, story, data_dir, tmp_path, capsys):
    out = shutil.copytree(trained, tmp_path / "run")
    run = small_run(str(story), **{"train.steps": "20", "train.log_every": "1"})
    where = ["--out", str(out), "--data-dir", str(data_dir)]
    assert main(["train", "stdlib-tiny", *options_of(run), *where, "--extend"]) == 0
    told = "the learning rate follows the cosine to step 20 from here (0.00413, it would be 0)"
    assert f"train.steps 12 -> 20, from step 12 on: {told}" in capsys.readouterr().err
    event = extended(out)
    assert (event["from_steps"], event["to_steps"], event["step"], event["changes"]) == (12, 20, 12, [told])
    assert json.loads((out / "config.json").read_text())["train"]["steps"] == 20
    later = [each for each in RunDirectory(out).events() if each["event"] == "train" and each["step"] > 12]
    assert [each["learning_rate"] for each in later] == [learning_rate(step, run.train) for step in range(12, 20)]
    assert main(["report", str(out), "--data-dir", str(data_dir)]) == 0
    assert "not finished" not in (out / "report.html").read_text()


def test_what_is_no_extension_is_refused(trained, story, data_dir, tmp_path, capsys):
    out = shutil.copytree(trained, tmp_path / "run")

    def refused(steps: str, *more: str) -> str:
        words = ["train", "stdlib-tiny", *options_of(small_run(str(story), **{"train.steps": steps}))]
        assert main([*words, "--data-dir", str(data_dir), *more]) == 2
        return capsys.readouterr().err

    assert "train.steps 12 -> 20; add --extend to train this one longer, or give another" in refused(
        "20", "--out", str(out)
    )
    assert "add --extend" not in refused("8", "--out", str(out))
    assert "train.steps is 8, but the run in" in refused("8", "--out", str(out), "--extend")
    assert "model.n_layer 2 -> 3; give" in refused("20", "--out", str(out), "--extend", "--model.n-layer=3")
    assert "holds no run to continue" in refused("20", "--out", str(tmp_path / "new"), "--extend")
    assert "--fork and --extend" in refused("20", "--out", str(out), "--extend", "--fork")
    assert not (tmp_path / "new").exists()


def test_the_same_text_under_another_name_goes_on(story, data_dir, tmp_path, monkeypatch, capsys):
    train(small_run(str(story)), tmp_path / "whole", data_dir)
    text, moved, out = tmp_path / "text.txt", tmp_path / "moved.txt", tmp_path / "run"
    text.write_bytes(story.read_bytes())
    train_until(5, monkeypatch, small_run(str(text)), out, data_dir)
    text.rename(moved)
    with pytest.raises(UserError, match=r"text\.txt: no such file or folder"):
        train(small_run(str(text)), out, data_dir)
    with pytest.raises(UserError, match=r"missing\.txt: no such file or folder"):
        train(small_run(str(tmp_path / "missing.txt")), out, data_dir)
    Trainer(small_run(str(moved)), out, data_dir=data_dir).fit()
    assert f"{moved} is the text that this run was trained on as {text}" in capsys.readouterr().err
    assert RunDirectory(out).config().data.corpus == str(moved)
    assert_same_end(out, tmp_path / "whole")
    other = tmp_path / "other.txt"
    other.write_bytes(story.read_bytes().replace(b"river", b"brook"))
    with pytest.raises(UserError, match="is not the text that .* was trained on"):
        train(small_run(str(other)), out, data_dir)
    with pytest.raises(UserError, match="data.corpus .* -> stdlib"):
        train(small_run("stdlib"), out, data_dir)


def test_a_relative_path_is_the_absolute_one(story, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_bytes(story.read_bytes())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    train(small_run("text.txt"), "run", tmp_path / "cache")
    assert RunDirectory("run").config().data.corpus == str(tmp_path / "text.txt")
    assert txl.open_corpus("./text.txt", data_dir=tmp_path / "cache").name == str(tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(small_run("../text.txt"), "../run", tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
