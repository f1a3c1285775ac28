"""LSTM and QRNN against their equations written out, and the behaviour particular to recurrent models."""

from __future__ import annotations

import dataclasses
import math
import shutil

import pytest
import torch
from tests.conftest import small_run

import txl
from txl.cli import main
from txl.config import ModelConfig, RecurrentConfig, TransformerXLConfig, validate, with_options
from txl.errors import UserError
from txl.models import build_model, recurrent
from txl.models.recurrent import LSTMLayer, QRNNLayer, RecurrentModel, linear_recurrence
from txl.runs.directory import RunDirectory

V, B, T = 17, 3, 11
LSTM = RecurrentConfig(kind="lstm", n_layer=3, d_model=6, d_hidden=10, dropout=0.2)
QRNN = dataclasses.replace(LSTM, kind="qrnn", kernel_sizes=(3, 1))
AWD = dataclasses.replace(LSTM, weight_drop=0.5, locked_dropout=True, dropout_words=0.1, activation_reg=2.0)


def built(config: ModelConfig, scale: float = 0.5) -> RecurrentModel:
    torch.manual_seed(0)
    model = build_model(config, V).double().eval()
    assert isinstance(model, RecurrentModel)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, scale)
    return model


def text(length: int = T) -> torch.Tensor:
    return torch.randint(V, (B, length), generator=torch.Generator().manual_seed(1))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def lstm_by_hand(layer, inputs: list[list[float]]) -> list[list[float]]:
    """Compute an LSTM layer token by token and unit by unit in Python floats; gates in PyTorch's order i, f, g, o."""
    w_in, w_hidden, b_in, b_hidden = (each.tolist() for each in layer.lstm.parameters())
    n_unit = layer.lstm.hidden_size
    hidden, cell, outputs = [0.0] * n_unit, [0.0] * n_unit, []
    for token in inputs:
        sums = [
            sum(w * x for w, x in zip(w_in[row], token, strict=True))
            + sum(w * h for w, h in zip(w_hidden[row], hidden, strict=True))
            + b_in[row]
            + b_hidden[row]
            for row in range(4 * n_unit)
        ]
        for unit in range(n_unit):
            i, f, g = (sums[gate * n_unit + unit] for gate in range(3))
            cell[unit] = sigmoid(f) * cell[unit] + sigmoid(i) * math.tanh(g)
        hidden = [sigmoid(sums[3 * n_unit + unit]) * math.tanh(cell[unit]) for unit in range(n_unit)]
        outputs.append(hidden)
    return outputs


def qrnn_by_hand(layer, inputs: list[list[float]]) -> list[list[float]]:
    weight, bias = layer.convolution.weight.tolist(), layer.convolution.bias.tolist()
    n_unit = len(bias) // 3
    cell, outputs = [0.0] * n_unit, []
    padded = [[0.0] * len(inputs[0])] * (layer.kernel_size - 1) + inputs
    for place in range(len(inputs)):
        window = [number for token in padded[place : place + layer.kernel_size] for number in token]
        sums = [sum(w * x for w, x in zip(row, window, strict=True)) + b for row, b in zip(weight, bias, strict=True)]
        hidden = []
        for unit in range(n_unit):
            z, f = math.tanh(sums[unit]), sigmoid(sums[n_unit + unit])
            cell[unit] = f * cell[unit] + (1 - f) * z
            hidden.append(sigmoid(sums[2 * n_unit + unit]) * cell[unit])
        outputs.append(hidden)
    return outputs


@pytest.mark.parametrize("config", [LSTM, QRNN], ids=["lstm", "qrnn"])
def test_the_equations_written_out(config):
    model, tokens = built(config), text()
    found, _ = model.hidden_states(tokens, model.init_state(B))
    for lane in range(B):
        # The embedding is not scaled.
        rows = model.embedding.tables[0].detach()[tokens[lane]].tolist()
        for layer in model.layers:
            rows = lstm_by_hand(layer, rows) if isinstance(layer, LSTMLayer) else qrnn_by_hand(layer, rows)
        torch.testing.assert_close(found[lane], torch.tensor(rows, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["lstm", "qrnn"])
def test_weight_drop_is_one_mask_for_all_tokens_and_lanes_and_only_in_training(kind):
    config = dataclasses.replace(LSTM if kind == "lstm" else QRNN, n_layer=1, weight_drop=0.4, dropout=0.0)
    config.kernel_sizes = (2,)
    model = built(config).train()
    name = "layers.0.lstm.weight_hh_l0" if kind == "lstm" else "layers.0.convolution.weight"
    weight = model.get_parameter(name)
    kept = weight.detach().clone()
    torch.manual_seed(5)
    mask = torch.nn.functional.dropout(torch.ones_like(weight), 0.4)
    torch.manual_seed(5)
    found, _ = model.hidden_states(text(), model.init_state(B))
    assert torch.equal(weight, kept)  # the parameter itself is not masked
    plain = built(dataclasses.replace(config, weight_drop=0.0))
    plain.get_parameter(name).data.mul_(mask)
    expected, _ = plain.hidden_states(text(), plain.init_state(B))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradient = torch.autograd.grad(found.sum(), weight)[0]
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[mask > 0] != 0).any()
    model.eval()
    first, _ = model.hidden_states(text(), model.init_state(B))
    assert torch.equal(first, model.hidden_states(text(), model.init_state(B))[0])


def test_zoneout_keeps_units_and_only_in_training():
    """For drawn units c_t is c_{t-1}: against a loop with the same draws, from an initial state that is not zero."""
    torch.manual_seed(0)
    layer, n_unit = QRNNLayer(5, 4, 2, 0.0, zoneout=0.3).double().train(), 4
    inputs, cell = torch.randn(B, T, 5, dtype=torch.float64), torch.randn(B, n_unit, dtype=torch.float64)
    earlier = torch.randn(B, 1, 5, dtype=torch.float64)
    torch.manual_seed(5)
    kept = torch.rand(B, T, n_unit, dtype=torch.float64) < 0.3
    assert kept.any()
    assert not kept.all()
    for mask in (kept, torch.zeros_like(kept)):
        torch.manual_seed(5)
        found, (last, _) = layer(inputs, (cell, earlier))
        read, c = torch.cat([earlier, inputs], dim=1), cell
        for t in range(T):
            z, f, o = layer.convolution(torch.cat([read[:, t], read[:, t + 1]], dim=-1)).chunk(3, dim=-1)
            c = torch.where(mask[:, t], c, f.sigmoid() * c + (1 - f.sigmoid()) * z.tanh())
            torch.testing.assert_close(found[:, t], o.sigmoid() * c, rtol=0, atol=1e-12)
        torch.testing.assert_close(last, c, rtol=0, atol=1e-12)
        layer.eval()  # in the second round no unit is kept


@pytest.mark.parametrize("config", [LSTM, QRNN], ids=["lstm", "qrnn"])
def test_a_state_does_not_hold_on_to_the_segment_that_made_it(config):
    model = built(config)
    _, after_one = model.hidden_states(text(1), model.init_state(B))
    _, after_many = model.hidden_states(text(500), model.init_state(B))
    sizes = [
        [each.untyped_storage().nbytes() for layer in state.layers for each in layer]
        for state in (model.init_state(B), after_one, after_many)
    ]
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("n_softmax", [1, 2])
def test_activations_are_regularised_as_they_were_dropped_and_their_steps_before(n_softmax):
    """Merity et al.'s main.py: alpha scales squares of `dropped_rnn_hs[-1]`, beta squared steps of `rnn_hs[-1]`."""
    config = dataclasses.replace(LSTM, dropout=0.0, dropout_out=0.4, locked_dropout=True, n_softmax=n_softmax)
    model = built(dataclasses.replace(config, activation_reg=2.0, temporal_reg=0.7)).train()
    state = model.init_state(B)
    h, _ = model.hidden_states(text(), state)
    torch.manual_seed(5)
    dropped = h * torch.nn.functional.dropout(torch.ones(B, 1, 6, dtype=torch.float64), 0.4)
    expected = 2.0 * (dropped**2).sum() / h.numel()
    expected = expected + 0.7 * sum((h[:, t] - h[:, t - 1]).square().sum() for t in range(1, T)) / h[:, 1:].numel()
    torch.manual_seed(5)
    loss, penalty, _ = model.training_terms(text(), text(), state)
    torch.testing.assert_close(penalty, expected, rtol=1e-12, atol=0)
    # The softmax reads hidden states dropped by the same mask.
    model.eval()
    torch.testing.assert_close(loss, model.nll_of(dropped, text()).mean(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["lstm", "qrnn"])
def test_first_weights_are_those_of_the_models_codes(kind):
    """Layers and mixture have PyTorch's weights, within 1/sqrt(fan in); tail clusters have zeros, as in awd-lstm-lm."""
    torch.manual_seed(0)
    shape = RecurrentConfig(kind=kind, n_layer=1, d_model=64, d_last=100, n_softmax=8, cutoffs=(20, 40))
    model = build_model(dataclasses.replace(shape, init_std=0.0577), 60)
    found = dict(model.named_parameters())
    bounds = {"mixture.prior.weight": 0.1, "mixture.latent.weight": 0.1, "mixture.latent.bias": 0.1}
    recurrent = {"lstm": "layers.0.lstm.weight_hh_l0", "qrnn": "layers.0.convolution.weight"}[kind]
    bounds[recurrent] = {"lstm": 100, "qrnn": 2 * 64}[kind] ** -0.5
    for name, bound in bounds.items():
        values = found[name].detach()
        assert values.abs().max() <= bound, name
        assert values.abs().max() > 0.9 * bound, name
        assert values.std().item() == pytest.approx(bound / 3**0.5, rel=0.1), name
    assert found["softmax.cluster_weight"].abs().max() == 0
    assert found["embedding.tables.0"].std().item() == pytest.approx(0.0577, rel=0.1)


def test_bfloat16_is_near():
    """Under autocast the precision of the state may change, but losses stay float32 and close to the exact losses."""
    for config in (LSTM, QRNN):
        model = built(config).float()
        exact, _ = model.nll(text(), text(), model.init_state(B))
        with torch.autocast("cpu", torch.bfloat16):
            _, state = model.nll(text(), text(), model.init_state(B))
            near, _ = model.nll(text(), text(), model.init_state(B))
            again, _ = model.nll(text(), text(), state)
        assert near.dtype == again.dtype == torch.float32
        torch.testing.assert_close(near, exact, rtol=0.05, atol=0.05)
        after, _ = model.nll(text(), text(), state)  # a state of autocast outside of it
        torch.testing.assert_close(after, again, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("weight_drop", [0.0, 0.4])
def test_an_lstm_leaves_autocast_where_that_would_be_float16(weight_drop, monkeypatch):
    layer = LSTMLayer(4, 6, weight_drop).train()
    inputs, state = torch.randn(2, 5, 4), (torch.randn(2, 6).bfloat16(), torch.randn(2, 6).bfloat16())

    def run(*state):
        torch.manual_seed(3)
        outputs, after = layer(inputs, state)
        return [outputs, *after, *torch.autograd.grad(outputs.float().sum(), list(layer.parameters()))]

    expected = run(*(each.float() for each in state))
    with torch.autocast("cpu", torch.bfloat16):
        # A CPU's autocast uses bfloat16, unless PyTorch has no LSTM in bfloat16 there.
        in_float32 = torch.equal(run(*state)[0].float(), expected[0])
        assert in_float32 == (not torch.ops.mkldnn._is_mkldnn_bf16_supported())
        monkeypatch.setattr(recurrent, "AUTOCAST_IS_FLOAT16", ("cpu",))
        found = run(*state)
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("weight_drop", [0.0, 0.4])
def test_an_lstm_on_cuda_keeps_gradients_that_float16_cannot_hold(weight_drop):
    layer = LSTMLayer(4, 6, weight_drop).cuda().train()
    inputs = torch.randn(2, 5, 4, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        outputs, _ = layer(inputs, layer.empty(2, inputs))
    (1e-12 * outputs.float().sum()).backward()
    assert outputs.dtype == torch.float32
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("lengths", [{"mem_len": 1}, {"window": 4}, {"clamp_len": 2}])
def test_there_are_no_positions_to_count(lengths):
    with pytest.raises(UserError, match="no positions to count"):
        built(LSTM).init_state(B, **lengths)
    built(LSTM).init_state(B, mem_len=0, window="none", clamp_len="none")


def test_the_state_of_another_model_is_refused():
    model = built(LSTM)
    for other in (
        built(QRNN),
        built(dataclasses.replace(LSTM, d_hidden=9)),
        build_model(TransformerXLConfig(n_layer=3), V),
    ):
        with pytest.raises(UserError, match="belongs to another model"):
            model.nll(text(), text(), other.init_state(B))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.n_head": "4"}, r"model\.n_head is 4, but model\.kind is lstm.*default, 8"),
        ({"model.encoding": "learned"}, r"model\.encoding is learned, but model\.kind is lstm"),
        ({"model.kernel_sizes": "3"}, r"model\.kernel_sizes is \[3\], but model\.kind is lstm"),
        ({"model.mem_len": "5"}, r"model\.mem_len is 5, but model\.kind is lstm.*expected 0"),
        ({"eval.mem_len": "5"}, r"eval\.mem_len is 5"),
        ({"model.weight_drop": "1"}, r"model\.weight_drop is 1"),
        ({"model.d_last": "7"}, r"model\.d_last is 7, but model\.n_softmax is 1"),
        ({"model.dropout_latent": "0.1"}, r"model\.dropout_latent is 0.1, but model\.n_softmax is 1"),
        ({"model.kind": "qrnn", "model.kernel_sizes": "2,2,2"}, r"model\.kernel_sizes is \[2, 2, 2\]; expected 1 to 2"),
        (
            {"model.kind": "transformer", "model.weight_drop": "0.1"},
            r"weight_drop is 0\.1, but model\.encoding is relative",
        ),
        ({"model.dropout_tail": "0.1"}, r"model\.dropout_tail"),
        ({"train.momentum": "0.9"}, r"train\.momentum is 0.9, but train\.optimizer is adam"),
    ],
)
def test_settings_that_do_nothing_or_cannot_be(changes, message):
    run = with_options(
        txl.RunConfig(), {"model.kind": "lstm", "model.mem_len": "0", "model.n_layer": "2", "eval.mem_len": "0"}
    )
    validate(run)
    with pytest.raises(UserError, match=message):
        validate(with_options(run, changes))


NO_MEMORY = {"model.mem_len": "0", "eval.mem_len": "0", "eval.window": "none", "model.dropatt": "0"}
RECURRENT = NO_MEMORY | {"model.n_head": "8", "model.d_head": "64", "model.d_inner": "2048", "model.n_softmax": "2"}


@pytest.mark.parametrize(
    "shape",
    [
        RECURRENT | {"model.kind": "lstm", "model.weight_drop": "0.1", "train.average_patience": "1"},
        RECURRENT | {"model.kind": "qrnn", "train.optimizer": "sgd", "train.momentum": "0.5"},
        NO_MEMORY | {"model.encoding": "learned", "model.max_segment": "24"},
    ],
    ids=["lstm", "qrnn", "vanilla"],
)
def test_families_without_memory_train_go_on_evaluate_and_generate(shape, story, data_dir, tmp_path, capsys):
    out, data = str(tmp_path / "run"), ["--data-dir", str(data_dir)]
    run = small_run(str(story), **shape, **{"eval.segment": "24", "train.schedule": "constant"})
    txl.Trainer(run, out, data_dir=data_dir, quiet=True).fit()
    # A run that is stopped after 8 steps and continued ends with the same weights.
    again = tmp_path / "again"
    shutil.copytree(out, again)
    shutil.rmtree(again / "checkpoints" / "step-00000012")
    (again / "latest").write_text("step-00000008\n")
    (again / "best").write_text("step-00000008\n")
    txl.Trainer(run, again, data_dir=data_dir, quiet=True).fit()
    first, second = (txl.load(each, checkpoint="12")[0].state_dict() for each in (out, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for each in (["eval", out], ["eval", out, "--sliding", "20", "--max-tokens", "200"], ["report", out]):
        assert main([*each, *(data if each[0] == "eval" else [])]) == 0, capsys.readouterr().err
    assert "Quality against memory length" not in (tmp_path / "run" / "report.html").read_text()
    assert main(["generate", out, "--prompt", "It was", "--max-tokens", "30"]) == 0
    assert RunDirectory(out).events()[-1]["window"] is None
    recl = ["recl", out, "--step", "4", "--longest", "12", "--targets", "20", *data]
    assert main(recl) == 0, capsys.readouterr().err
    capsys.readouterr()
    for each in (["eval", out, "--mem-len", "8", *data], ["export", out, "--out", str(tmp_path / "exported")]):
        assert main(each) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_exactly_the_context_is_read():
    model = built(LSTM)
    tokens = torch.randint(V, (40,), generator=torch.Generator().manual_seed(2))
    found = txl.losses_at_context(model, tokens, context=5, targets=[5, 20, 39], batch_size=2)
    for loss, target in zip(found, (5, 20, 39), strict=True):
        log_probs, _ = model.log_probs(tokens[target - 5 : target][None], model.init_state(1))
        assert loss.item() == pytest.approx(-log_probs[0, -1, tokens[target]].item(), abs=1e-10)


def test_a_run_of_another_kind_is_no_start(story, data_dir, trained, tmp_path):
    run = small_run(str(story), **RECURRENT, **{"model.kind": "lstm"})
    trainer = txl.Trainer(run, tmp_path / "run", data_dir=data_dir, init_from=trained, quiet=True)
    with pytest.raises(UserError, match=r"model\.family transformer-xl -> recurrent"):
        trainer.fit()


def one_by_one(decay, drive, initial):
    decay, drive, initial = decay.detach(), drive.detach(), initial.detach()
    states = torch.zeros_like(decay)
    for lane in range(decay.shape[0]):
        for unit in range(decay.shape[2]):
            state = float(initial[lane, unit])
            for place in range(decay.shape[1]):
                state = float(decay[lane, place, unit]) * state + float(drive[lane, place, unit])
                states[lane, place, unit] = state
    return states


@pytest.mark.parametrize("n_position", [1, 2, 3, 7, 16, 17, 23])
@pytest.mark.parametrize("chunk", [None, 1, 2, 5, 100])
def test_the_scan_is_a_loop_over_positions(n_position, chunk):
    torch.manual_seed(n_position)
    shapes = ((2, n_position, 3), (2, n_position, 3), (2, 3))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    states = linear_recurrence(*inputs, chunk=chunk)
    torch.testing.assert_close(states, one_by_one(*inputs), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *each: linear_recurrence(*each, chunk=chunk), inputs)


def test_scans_of_decays_of_zero_and_one_and_long_streams_stay_exact():
    """A scan by logarithms or division would overflow or divide by zero here."""
    decay = torch.rand(1, 3000, 4).round()
    drive, initial = torch.randn(1, 3000, 4), torch.randn(1, 4)
    for chunk in (None, 55):
        found = linear_recurrence(decay, drive, initial, chunk=chunk)
        torch.testing.assert_close(
            found.double(), one_by_one(*(each.double() for each in (decay, drive, initial))), rtol=0, atol=1e-5
        )


def test_no_gradient_flows_into_the_segment_before():
    model = built(LSTM)
    _, state = model.nll(text(), text(), model.init_state(B))
    assert not any(each.requires_grad for layer in state.layers for each in layer)
