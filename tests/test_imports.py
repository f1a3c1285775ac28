"""Any module may be the first that a program imports."""

from __future__ import annotations

import subprocess
import sys

from tests.test_layers import MODULES

FIRST = """
import importlib, sys
import torch
for name in sys.argv[1:]:
    for known in [module for module in sys.modules if module.split(".")[0] == "txl"]:
        del sys.modules[known]
    importlib.import_module(name)
"""


def test_every_module_can_be_imported_first():
    """Only a module whose package imports other modules of it can be part of a circle, so only these are tried."""
    packages = [name for name, path in MODULES.items() if path.name == "__init__.py" and " import " in path.read_text()]
    inside = [name for name in MODULES if name.rpartition(".")[0] in packages and name.startswith("txl.")]
    assert "txl.attention.shifted" in inside
    # Only CUDA builds of PyTorch have triton; transformers is in an environment of its own.
    names = [name for name in inside if name.count(".") > 1 and "\nimport triton" not in MODULES[name].read_text()]
    done = subprocess.run([sys.executable, "-c", FIRST, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_is_imported_without_pytorch_s_compiler():
    """The compiler takes as long to import as PyTorch itself; only `train.compile` and optimisers need it."""
    code = "import sys, txl.models, txl.generation.text, txl.evaluation.perplexity, txl.training.trainer; "
    code += "sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
