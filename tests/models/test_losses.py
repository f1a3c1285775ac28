"""The positions that count in the training loss, and Al-Rfou et al.'s auxiliary losses, against direct computations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.conftest import small_run
from torch import Tensor

from txl.cli import main
from txl.config import ModelConfig, TrainConfig, TransformerXLConfig, VanillaConfig, as_family, validate
from txl.data.lanes import LaneStream
from txl.errors import UserError
from txl.models import build_model
from txl.models.loss import Objective
from txl.models.vanilla import layer_counts
from txl.runs.directory import RunDirectory
from txl.training import loop
from txl.training.estimate import parameters_by_part
from txl.training.optimisers import build_optimizer
from txl.training.step import StepInputs, training_step
from txl.training.trainer import Trainer

V, B, T = 11, 2, 7
RECURRENT = TransformerXLConfig(n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6, dropout=0.0)
LEARNED = dataclasses.replace(as_family(RECURRENT, VanillaConfig), max_segment=9)
MODELS = {
    "relative": RECURRENT,
    "relative, no recurrence": dataclasses.replace(RECURRENT, mem_len=0),
    "shaw": dataclasses.replace(RECURRENT, encoding="shaw", max_distance=4),
    "adaptive": dataclasses.replace(RECURRENT, cutoffs=(4, 8), div_val=2),
    "learned": LEARNED,
    "sinusoid": dataclasses.replace(LEARNED, encoding="sinusoid"),
}
DEEP = dataclasses.replace(MODELS["learned"], n_layer=4, layer_losses=True, n_target=3, extra_target_weight=0.5)


def text(length: int = T, seed: int = 1) -> tuple[Tensor, Tensor]:
    both = torch.randint(V, (B, length + 1), generator=torch.Generator().manual_seed(seed))
    return both[:, :-1], both[:, 1:]


def model_of(config: ModelConfig) -> Any:
    torch.manual_seed(0)
    model = build_model(config, V).double()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model


def test_how_many_positions_count():
    assert [Objective("full").counted(n) for n in (1, 2, 7, 8)] == [1, 2, 7, 8]
    assert [Objective("half").counted(n) for n in (1, 2, 7, 8)] == [1, 1, 4, 4]
    assert [Objective("last").counted(n) for n in (1, 2, 7, 8)] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("loss", "first"), [("full", 0), ("half", 3), ("last", 6)])
def test_the_loss_is_the_mean_over_the_recent_positions(name, loss, first):
    model = model_of(MODELS[name])
    state = model.init_state(B)
    _, state = model.nll(*text(seed=2), state)
    tokens, targets = text()
    found, penalty, after = model.training_terms(tokens, targets, state, Objective(loss))
    log_probs, expected_after = model.log_probs(tokens, state)
    by_hand = [-log_probs[b, t, targets[b, t]] for b in range(B) for t in range(first, T)]
    expected = torch.stack(by_hand).mean()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert penalty == 0
    for ours, theirs in zip(after.to_tensors().values(), expected_after.to_tensors().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)  # the carried states are equal
    parameters = list(model.parameters())
    ours = torch.autograd.grad(found, parameters, allow_unused=True)
    theirs = torch.autograd.grad(expected, parameters, allow_unused=True)
    for each, other, parameter in zip(ours, theirs, parameters, strict=True):
        each, other = (torch.zeros_like(parameter) if one is None else one for one in (each, other))
        torch.testing.assert_close(each, other, rtol=0, atol=1e-12)


def test_the_half_loss_counts_every_target_within_two_epochs():
    """The exception is the first half segment of each lane, which has too few tokens before it."""
    lane = 50
    stream = LaneStream(torch.arange(B * lane).numpy(), B, 8, shift=Objective("half").counted(8))
    seen: dict[int, list[int]] = {0: [], 1: []}
    position = stream.start()
    starts = []
    while position.epoch < 2:
        segment = stream.read(position)
        if segment.starts_epoch:
            starts.append(position.offset)
        counted = Objective("half").counted(segment.targets.shape[1])
        seen[position.epoch] += segment.targets[0, -counted:].tolist()
        position = segment.next
    assert starts == [0, 4]
    assert len(seen[0]) == 25
    assert not set(range(5, 48)) - set(seen[0]) - set(seen[1])
    assert sorted(set(seen[0]) & set(seen[1])) == [47, 48, 49]  # the last segments are short
    assert stream.read(position).starts_epoch
    assert position.offset == 0


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_says_how_many_targets_counted(parts):
    model = model_of(RECURRENT)
    optimizer = build_optimizer(model, TrainConfig())
    tokens, targets = text()
    states = [model.init_state(B // parts) for _ in range(parts)]
    expected, _ = model.nll(tokens, targets, model.init_state(B))
    result = training_step(model, optimizer, StepInputs(tokens, targets, states), TrainConfig(loss="half"))
    assert result.n_target == B * 4
    assert result.result().loss == pytest.approx(expected[:, 3:].mean().item(), abs=1e-12)


@pytest.mark.parametrize(
    ("encoding", "loss", "recurrence"),
    [("relative", "half", True), ("shaw", "full", False), ("learned", "half", False), ("sinusoid", "full", False)],
)
def test_rows_of_table_6_train_and_evaluate(encoding, loss, recurrence, story, data_dir, tmp_path, capsys):
    words = {"model.encoding": encoding, "train.loss": loss}
    words |= {"model.max_distance": "5"} if encoding in ("relative", "shaw") else {"model.max_segment": "8"}
    words |= {} if recurrence else {"model.mem_len": "0", "eval.mem_len": "0", "eval.window": "none"}
    out = tmp_path / "run"
    outcome = Trainer(small_run(str(story), **words), out, data_dir=data_dir, quiet=True).fit()
    per_step = 4 * (8 if loss == "full" else 4)
    assert outcome["tokens"] == 12 * per_step
    logged = [event for event in RunDirectory(out).events() if event["event"] == "train"]
    assert [event["tokens"] for event in logged] == [per_step * step for step in (3, 6, 9, 12)]
    assert [event["tokens_read"] for event in logged] == [32 * step for step in (3, 6, 9, 12)]
    assert main(["eval", str(out), "--data-dir", str(data_dir), "--json"]) == 0
    assert '"mem_len": 0' in (shown := capsys.readouterr().out) or recurrence, shown


@pytest.mark.parametrize("encoding", ["learned", "sinusoid"])
def test_absolute_positions_have_no_recurrence(encoding):
    with pytest.raises(UserError, match=r"two segments would share the same positions \(Section 3\.3\)"):
        small_run("x", **{"model.encoding": encoding, "model.max_segment": "8"})


def test_a_half_loss_run_goes_on_exactly(story, data_dir, tmp_path, monkeypatch):
    """The run crosses the end of an epoch, after which the segments start at another offset."""
    options = {"train.loss": "half", "train.batch_size": "40", "train.segment": "64", "train.checkpoint_every": "5"}
    run = small_run(str(story), **options, **{"train.steps": "20", "train.eval_every": "0"})
    real = loop.training_step

    def until_12(trained, optimizer, inputs, *args):
        if inputs.progress >= 12 / 20:
            raise KeyboardInterrupt
        return real(trained, optimizer, inputs, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "training_step", until_12)
        with pytest.raises(KeyboardInterrupt):
            Trainer(run, tmp_path / "parts", data_dir=data_dir, quiet=True).fit()
    weights = []
    for name in ("whole", "parts"):
        Trainer(run, tmp_path / name, data_dir=data_dir, quiet=True).fit()
        folder = RunDirectory(tmp_path / name)
        weights.append(folder.load(folder.checkpoint("latest"))[0].state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_layer_l_of_n_counts_until_l_over_2n_of_training():
    """The first of four layers stops counting after 1/8 of training, the second after 2/8, the third after 3/8."""
    table = {
        0.0: [True, True, True, True],
        0.124: [True, True, True, True],
        0.125: [False, True, True, True],
        0.25: [False, False, True, True],
        0.374: [False, False, True, True],
        0.375: [False, False, False, True],
        0.5: [False, False, False, True],
        1.0: [False, False, False, True],
    }
    for progress, expected in table.items():
        assert [layer_counts(layer, 4, progress) for layer in (1, 2, 3, 4)] == expected, progress


def auxiliary_by_hand(model: Any, tokens: Tensor, targets: Tensor, progress: float, first: int) -> Tensor:
    """Return the auxiliary loss, computed prediction by prediction from hidden states that hooks recorded."""
    caught: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: caught.append(out)) for layer in model.layers]
    model.hidden_states(tokens, model.init_state(B))
    for hook in hooks:
        hook.remove()
    weights, total = dict(model.named_parameters()), torch.zeros((), dtype=torch.float64)
    n_layer = model.config.n_layer
    for layer in range(1, n_layer + 1):
        if layer < n_layer and not progress < layer / (2 * n_layer):
            continue
        for ahead in range(1, model.config.n_target + 1):
            if (layer, ahead) == (n_layer, 1):
                continue  # the model's own loss
            losses = []
            for b in range(B):
                for t in range(first, T):
                    if t + ahead - 1 < T:
                        logits = weights[f"auxiliary.heads.{layer}_{ahead}.weight"] @ caught[layer - 1][b, t]
                        logits = logits + weights[f"auxiliary.heads.{layer}_{ahead}.bias"]
                        losses.append(-logits.log_softmax(0)[targets[b, t + ahead - 1]])
            total = total + (1.0 if ahead == 1 else 0.5) * torch.stack(losses).mean()
    return total


@pytest.mark.parametrize("progress", [0.0, 0.2, 0.3, 0.4, 0.9])
@pytest.mark.parametrize(("loss", "first"), [("full", 0), ("half", 3)])
def test_auxiliary_losses_are_those_of_the_equations(progress, loss, first):
    model = model_of(DEEP)
    tokens, targets = text()
    expected = auxiliary_by_hand(model, tokens, targets, progress, first)
    plain, _ = model.nll(tokens, targets, model.init_state(B))
    mean, penalty, _ = model.training_terms(tokens, targets, model.init_state(B), Objective(loss, progress))
    torch.testing.assert_close(penalty, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(mean, plain[:, first:].mean(), rtol=0, atol=1e-12)  # reported without auxiliary losses
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad(penalty, parameters, allow_unused=True)
    theirs = torch.autograd.grad(expected, parameters, allow_unused=True)
    for name, one, other in zip(names, ours, theirs, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_step_carries_how_far_training_is():
    """After half of training the classifiers of the lower layers receive no gradient, so Adam does not change them."""
    for progress, moved in ((0.0, {"1", "2", "3", "4"}), (0.3, {"3", "4"}), (0.6, {"4"})):
        model = model_of(DEEP)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = build_optimizer(model, TrainConfig())
        training_step(model, optimizer, StepInputs(*text(), [model.init_state(B)], progress), TrainConfig())
        changed = {
            name.split(".")[2].split("_")[0]
            for name, parameter in model.named_parameters()
            if name.startswith("auxiliary") and not torch.equal(parameter, before[name])
        }
        assert changed == moved


def test_only_one_of_the_two_kinds():
    layers = model_of(dataclasses.replace(DEEP, n_target=1))
    targets = model_of(dataclasses.replace(DEEP, layer_losses=False, n_target=2))
    assert sorted(layers.auxiliary.heads) == ["1_1", "2_1", "3_1"]
    assert sorted(targets.auxiliary.heads) == ["4_2"]
    assert parameters_by_part(layers)["auxiliary"] == 3 * (8 + 1) * V
    assert model_of(MODELS["learned"]).auxiliary is None


def test_what_is_predicted_does_not_need_the_classifiers():
    """Al-Rfou et al.'s inference parameters give the same losses without the auxiliary parameters."""
    model, plain = model_of(DEEP), model_of(dataclasses.replace(DEEP, layer_losses=False, n_target=1))
    kept = {name: each for name, each in model.state_dict().items() if not name.startswith("auxiliary")}
    plain.load_state_dict(kept)
    assert torch.equal(model.nll(*text(), model.init_state(B))[0], plain.nll(*text(), plain.init_state(B))[0])


def test_auxiliary_losses_train_go_on_and_evaluate(story, data_dir, tmp_path, capsys):
    words = {"model.encoding": "learned", "model.max_segment": "8", "model.mem_len": "0"}
    words |= {"eval.mem_len": "0", "eval.window": "none", "model.layer_losses": "true", "model.n_target": "2"}
    Trainer(small_run(str(story), **words), tmp_path / "run", data_dir=data_dir, quiet=True).fit()
    assert main(["eval", str(tmp_path / "run"), "--data-dir", str(data_dir)]) == 0
    start = next(iter(RunDirectory(tmp_path / "run").events()))
    assert start["parameters"]["auxiliary"] > 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layer_losses": "true"}, r"layer_losses is true, but model\.encoding is relative"),
        ({"model.n_target": "2"}, r"n_target is 2, but model\.encoding is relative"),
        ({"model.encoding": "learned", "model.n_target": "0"}, r"model\.n_target is 0; expected 1"),
        ({"model.encoding": "learned", "model.extra_target_weight": "-1"}, r"extra_target_weight is -1"),
        ({"model.encoding": "learned", "model.n_target": "2", "model.cutoffs": "3,5"}, r"expected no cutoffs"),
        ({"model.encoding": "learned", "model.n_target": "2", "train.loss": "last"}, r"train\.loss is last"),
        ({"train.loss": "most"}, r"expected one of full, half, last"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    if changes.get("model.encoding") == "learned":
        changes = changes | {"model.mem_len": "0", "eval.mem_len": "0", "eval.window": "none"}
    with pytest.raises(UserError, match=message):
        validate(small_run("x", **changes))
