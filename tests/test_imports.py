"""Any module may be the first that a program imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import txl

ROOT = Path(txl.__file__).parent
FIRST = """
import importlib, sys
import torch
for name in sys.argv[1:]:
    for known in [each for each in sys.modules if each.split(".")[0] in ("txl", "txl_lab")]:
        del sys.modules[known]
    importlib.import_module(name)
"""


def imported(path: Path, names: set[str]) -> set[str]:
    """Return the modules of txl that are imported when a file is imported, and the packages that contain them."""
    found: set[str] = set()
    waiting: list[ast.AST] = [*ast.parse(path.read_text(encoding="utf-8")).body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
    lies_in = {".".join(each.split(".")[:depth]) for each in found for depth in range(1, each.count(".") + 2)}
    return lies_in & names


def test_every_module_can_be_imported_first():
    """Only modules in an import cycle can fail, so only these modules are tried."""
    houses = [ROOT, ROOT.with_name("txl_lab")]
    paths = [path for house in houses for path in house.rglob("*.py")]
    files = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in paths}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    parents = {name: name.rpartition(".")[0] for name in files}
    graph = {name: imported(path, set(files)) | {parents[name]} & set(files) for name, path in files.items()}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for each in graph[waiting.pop()] - seen:
                seen.add(each)
                waiting.append(each)
        return seen

    circular = sorted(name for name in files if name in reached(name))
    assert "txl.attention.shifted" in circular  # through its package
    done = subprocess.run([sys.executable, "-c", FIRST, *circular], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_is_imported_without_pytorch_s_compiler():
    """The compiler takes as long to import as PyTorch itself; only `train.compile` and optimisers need it."""
    code = "import sys, txl.models, txl.generation.text, txl.evaluation.perplexity, txl.training.trainer; "
    code += "sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
