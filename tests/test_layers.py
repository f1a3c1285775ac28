"""The order of the packages: each imports only from packages before it, and imports form no cycle.

Imports inside functions count too: they hide a cycle, but do not remove it.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import txl

SOURCE = Path(txl.__file__).parent

ORDER = (
    ("errors", "units", "allocator", "processor"),
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
    ("compression",),
    ("analysis",),
    ("benchmarking",),
    ("reporting",),
    ("interop", "reproduction", "serving"),
    ("commands",),
    ("cli", "huggingface"),
    ("__main__",),
)
"""Lowest level first, as in `docs/architecture.md`; packages on one line do not import each other."""

LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
MODULES = {
    ".".join(("txl", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
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
    """Return the package or single file directly below `txl`; None for `txl` itself, which loads names lazily."""
    return module.split(".")[1] if "." in module else None


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
