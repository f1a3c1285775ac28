import math

import pytest

import txl
from txl.config import with_options
from txl.reporting.wording import change_text, counted, layers_text, plain, short_name
from txl.units import duration_text, quality_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.44, "9.4 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (245.2, "4 min 5 s"), (3599.7, "1 h 0 min"),
     (7265, "2 h 1 min"), (200_000, "2 d 7 h")],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("with_memory", "text"),
    [(0.9, "10.0% fewer bits"), (0.9995, "0.05% fewer bits"), (1.25, "25.0% more bits"), (1.0, "0.00% more bits")],
)
def test_small_changes_are_not_rounded_away(with_memory, text):
    assert change_text(with_memory, 1.0) == text


def test_numbers():
    assert quality_text(math.log(2), "byte") == "1.000"
    assert quality_text(math.log(54.518), "word") == "54.52"
    assert quality_text(1e9, "word") == "1.01e+304"  # exp is capped: always a number
    assert [counted(1, "step"), counted(2000, "step")] == ["1 step", "2,000 steps"]


def test_names():
    assert [short_name(name) for name in ("stdlib", "/a/b.txt", "a/b/", "C:\\a\\b.txt", "/")] == [
        "stdlib", "b.txt", "b", "b.txt", "/",
    ]  # fmt: skip


def test_only_what_cannot_be_shown_is_escaped():
    fine = "naïve — «שלום» 日本語 é\n\t<&\u00a0\U0001f600"
    assert plain(fine) == fine
    assert plain("a\x00\x1b\r\u202e\u200b\ue000\udcffb") == r"a\x00\x1b\r\u202e\u200b\ue000\udcffb"


@pytest.mark.parametrize(
    ("preset", "name", "layers"),
    [
        ("stdlib-tiny", "Transformer-XL", "4 layers of width 128"),
        ("wt103-ablation-no-memory", "Transformer-XL without memory", "16 layers of width 380"),
        ("enwik8-vanilla-small", "Vanilla Transformer", "6 layers of width 256"),
        ("wt103-adaptive", "Transformer with sinusoids at its input", "16 layers of width 1024"),
        ("wt103-lstm", "LSTM", "3 layers of width 1760, the last of 400"),
        ("ptb-awd-lstm", "AWD-LSTM", "3 layers of width 1150, the last of 400"),
        ("ptb-qrnn", "QRNN", "4 layers of width 1550, the last of 400"),
    ],
)
def test_a_model_is_called_what_it_is(preset, name, layers):
    model = txl.preset(preset).model
    assert (model.display_name, layers_text(model)) == (name, layers)


def test_the_only_layer_is_as_wide_as_the_last():
    run = with_options(txl.preset("ptb-awd-lstm"), {"model.n_layer": "1"})
    assert layers_text(run.model) == "1 layer of width 400"
