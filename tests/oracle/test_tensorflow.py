"""Import of checkpoints written by TensorFlow. Needs the extra `tensorflow` in a separate environment."""

from __future__ import annotations

import pytest
import torch

tensorflow = pytest.importorskip("tensorflow", reason="make oracle-tensorflow installs TensorFlow for these tests")

import txl
from tests.interop.test_nvidia_and_tensorflow import OPTIONS, TENSORFLOW_CASES, tensorflow_arrays
from tests.interop.test_original import EXPECTED, losses
from txl.errors import UserError
from txl.interop.import_run import import_run, read_source


def save(case: str, folder, untie_r: bool = False) -> None:
    """Save a checkpoint like the authors' code: with a Saver for all variables, including the optimiser's."""
    v1 = tensorflow.compat.v1
    with tensorflow.Graph().as_default(), v1.Session() as session:
        for name, array in tensorflow_arrays(case, untie_r).items():
            v1.get_variable(name, initializer=array.copy())
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(folder / "model.ckpt"), global_step=5)


@pytest.mark.parametrize("untie_r", [False, True])
@pytest.mark.parametrize("case", TENSORFLOW_CASES)
def test_every_token_has_the_authors_loss(case, untie_r, tmp_path):
    save(case, tmp_path, untie_r)
    import_run(tmp_path, tmp_path / "run", model_options=OPTIONS)
    model, _ = txl.load(tmp_path / "run")
    found = losses(model, torch.tensor(EXPECTED[case]["tokens"]))
    torch.testing.assert_close(found, torch.tensor(EXPECTED[case]["losses"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("ending", [".index", ".data-00000-of-00001"])
@pytest.mark.parametrize("part", [0, 0.3, 0.9])
def test_damaged_files_are_refused(ending, part, tmp_path):
    save("plain", tmp_path)
    path = tmp_path / f"model.ckpt-5{ending}"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(UserError, match="damaged"):
        read_source(tmp_path)
