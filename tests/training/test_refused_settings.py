"""Settings of training that contradict one another, or are out of range: the error names the field."""

from __future__ import annotations

import pytest
from tests.conftest import small_run

from txl.config import validate
from txl.errors import UserError

NO_MEMORY = {"model.mem_len": "0", "eval.mem_len": "0", "eval.window": "none"}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("train.average_from", {"train.average_from": "12"}),  # as many as steps
        ("train.average_from", {"train.average_from": "-1"}),
        ("train.average_from", {"train.average_from": "3", "train.average_patience": "3"}),
        ("train.average_patience", {"train.average_patience": "0"}),
        ("train.average_patience", {"train.average_patience": "2", "train.eval_every": "0"}),
        ("train.average_mu", {"train.average_from": "3", "train.average_mu": "1.5"}),
        ("train.average_mu", {"train.average_mu": "0.5"}),
        ("train.average_lr_factor", {"train.average_lr_factor": "0"}),
        ("train.average_lr_factor", {"train.average_lr_factor": "7"}),
        ("train.backprop_segments", {"train.backprop_segments": "0"}),
        ("train.backprop_segments", {"train.backprop_segments": "2"} | NO_MEMORY),
        ("train.capture", {"train.backprop_segments": "2", "train.capture": "true"}),
        ("train.on_spike", {"train.on_spike": "rollback", "train.checkpoint_every": "0"}),
        ("train.patience", {"train.patience": "0"}),
        ("train.patience", {"train.patience": "2", "train.eval_every": "0"}),
        ("train.schedule", {"train.schedule": "plateau", "train.eval_every": "0"}),
        ("train.plateau_patience", {"train.plateau_patience": "2"}),
        ("train.plateau_patience", {"train.plateau_patience": "0", "train.schedule": "plateau"}),
        ("train.reset_memory", {"train.reset_memory": "1"}),
        ("train.reset_memory", {"train.reset_memory": "0.1"} | NO_MEMORY),
        ("train.compile", {"train.reset_memory": "0.1", "train.compile": "true"}),
        ("train.decay_share", {"train.decay_share": "0"}),
        ("train.decay_share", {"train.decay_share": "1.1"}),
        ("train.decay_at", {"train.decay_at": "5"}),
        ("train.schedule", {"train.schedule": "steps"}),
        ("train.decay_at", {"train.schedule": "steps", "train.decay_at": "5,5"}),
        ("train.decay_at", {"train.schedule": "steps", "train.decay_at": "0"}),
        ("train.epoch_shift", {"train.epoch_shift": "8"}),  # a segment
        ("train.epoch_shift", {"train.loss": "half", "train.epoch_shift": "4"}),  # a segment with the loss's own shift
        ("train.epoch_shift", {"train.loss": "last", "train.epoch_shift": "7"}),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(field, options):
    with pytest.raises(UserError) as refused:
        validate(small_run("my.txt", **options))
    assert refused.value.field == field


def test_a_shift_that_is_no_multiple_with_the_loss_is_taken():
    run = small_run("my.txt", **{"train.loss": "half", "train.epoch_shift": "3"})
    validate(run)
    assert (run.train.loss, run.train.epoch_shift) == ("half", 3)
