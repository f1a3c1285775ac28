"""The order of the packages: each imports only from packages before it, and imports form no cycle.

Imports inside functions count too: they hide a cycle, but do not remove it.
"""

from __future__ import annotations

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import txl

SOURCE = Path(txl.__file__).parent
LABORATORY = SOURCE.with_name("txl_lab")

ORDER = (
    ("errors", "units"),
    ("devices", "files"),
    ("native",),
    ("config", "processes"),
    ("data",),
    ("attention",),
    ("models",),
    ("runs",),
    ("presets",),
    ("evaluation",),
    ("generation",),
    ("training",),
    ("minutes",),
    ("compression",),
    ("analysis",),
    ("reporting",),
    ("interop", "serving"),
    ("commands",),
    ("cli", "huggingface"),
    ("__main__",),
    ("txl_lab.records",),
    ("txl_lab.pages", "txl_lab.speed"),
    ("txl_lab.paper",),
    ("txl_lab.commands",),
)
"""Lowest level first, as in `docs/architecture.md`; packages on one line do not import each other."""

LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for house in (SOURCE, LABORATORY)
    for path in house.rglob("*.py")
}


def _imported(module: str, path: Path) -> set[str]:
    """Return the modules of this project that a module imports, anywhere in its file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import in line {node.lineno}; write it in full"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        of_ours = [name for name in names if name in MODULES]
        # `from txl.models import memory` imports the module; `from txl.models import build_model` imports the package.
        found |= set(of_ours[1:] or of_ours) if isinstance(node, ast.ImportFrom) else set(of_ours)
    return found - {module}


IMPORTS = {module: _imported(module, path) for module, path in MODULES.items()}


def _package(module: str) -> str | None:
    """Return the package or single file directly below `txl`; None for `txl` itself, which loads names lazily.

    Packages of the laboratory are named in full, as in `ORDER`.
    """
    house, _, inside = module.partition(".")
    package = inside.partition(".")[0] or None
    return f"{house}.{package}" if house == LABORATORY.name and package else package


def test_every_package_stands_in_the_order():
    assert {_package(module) for module in MODULES} - {None} <= set(LEVEL)


def test_no_import_runs_upwards():
    upward = []
    for module, imported in IMPORTS.items():
        for other in imported:
            ours, theirs = _package(module), _package(other)
            if ours is None or theirs is None or ours == theirs:
                continue
            if LEVEL[theirs] >= LEVEL[ours]:
                upward.append(f"{module} imports {other}")
    assert not upward, "\n".join(sorted(upward))


def test_the_core_never_imports_the_laboratory():
    upward = [
        f"{module} imports {other}"
        for module, imported in IMPORTS.items()
        for other in imported
        if module.startswith("txl.") and other.split(".")[0] == LABORATORY.name
    ]
    assert not upward
    assert LABORATORY.name not in (SOURCE / "commands" / "parser.py").read_text(encoding="utf-8")  # nor by name


def _speaks_in_options(path: Path) -> bool:
    """Return whether a text in a file, apart from docstrings, holds an option such as `--out`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in bare]
    return any(isinstance(text, str) and re.search(r"^--[a-z.-]+ |[\s(]--[a-z]", text) for text in texts)


def test_only_the_command_line_speaks_in_options():
    """Elsewhere a message names a setting (`txl.errors.Field`); pages of `reporting` show commands to copy."""
    told = ("txl.commands", "txl.cli", "txl.reporting", "txl_lab")
    speaking = {module for module, path in MODULES.items() if not module.startswith(told) and _speaks_in_options(path)}
    assert speaking == set()


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle; an empty list if there is no cycle."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_imports_go_in_circles():
    assert circle({"a": {"b"}, "b": {"a"}})
    assert not circle({name: each - {"txl"} for name, each in IMPORTS.items()})


def test_importing_the_package_imports_no_torch():
    code = "import sys, txl, txl.presets, txl.config, txl.cli; txl.cli.build_parser(); "  # imports every command
    code += "sys.exit(sorted({'torch', 'numpy'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_model_works_as_a_copy_of_the_packages_that_architecture_names(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"copy these of `src/txl/`: (.*?), beside an empty `__init__.py`", page, flags=re.DOTALL)
    copied = tmp_path / "txl"
    copied.mkdir()
    (copied / "__init__.py").touch()
    for name in re.findall(r"`([\w.]+)`", sentence):
        if name.endswith(".py"):
            shutil.copy(SOURCE / name, copied)
        else:
            shutil.copytree(SOURCE / name, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = """
        import sys, torch
        from txl.config.transformer_xl import TransformerXLConfig
        from txl.models import build_model

        model = build_model(TransformerXLConfig(n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=8), 11)
        tokens = torch.randint(11, (2, 9))
        loss, state = model.training_loss(tokens[:, :-1], tokens[:, 1:], model.init_state(2))
        loss.backward()
        with torch.no_grad():
            model.eval().log_probs(tokens, state)
        print(*(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "txl"), sep="\\n")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported = {Path(line).relative_to(tmp_path) for line in done.stdout.splitlines()}
    assert {each.name for each in copied.iterdir()} == {
        path.parts[1] for path in imported
    }  # and nothing is copied in vain
