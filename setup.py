"""Compile libraries into the wheel, if TXL_LIBRARIES is set: `make build` does. Everything else is in pyproject.toml.

Without it the wheel is one of Python alone, for every platform, and the library is compiled when it is first used.
"""

from __future__ import annotations

import os
import platform
import runpy
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

WANTED = bool(os.environ.get("TXL_LIBRARIES"))
NATIVE = Path(__file__).parent / "src" / "txl" / "native"


class BuildWithLibraries(build_py):
    """Lay a library for each kind of processor beside the C++ sources."""

    def run(self) -> None:
        """Copy the package, and compile."""
        super().run()
        if not WANTED or self.editable_mode:
            return
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise SystemExit("TXL_LIBRARIES: libraries are made for Linux on x86-64 alone; unset it")
        sources, compiling = run_file("sources"), run_file("compiling")
        try:
            texts, compiler = sources["cpp_sources"](), compiling["find_compiler"]()
        except ValueError as error:
            raise SystemExit(f"TXL_LIBRARIES: {error}") from None
        for processor in compiling["PROCESSORS"]:
            with tempfile.TemporaryDirectory() as scratch:
                made = Path(scratch) / compiling["library_name"](processor, texts)
                flags = compiling["compiler_flags"](*processor.flags)
                compiling["compile_library"](compiler, flags, texts, made, own_openmp=False)
                self.copy_file(str(made), str(Path(self.build_lib) / "txl" / "native" / made.name))


class Package(Distribution):
    """A package that belongs to a platform, if it has libraries."""

    def has_ext_modules(self) -> bool:
        """Return whether it has libraries."""
        return WANTED


class AnyPython(bdist_wheel):
    """A wheel for any Python: the libraries know nothing of it."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        return ("py3", "none", super().get_tag()[2])


def run_file(name: str) -> dict[str, Any]:
    """Run a file of the package by itself: what the package imports need not be installed to build it."""
    return runpy.run_path(str(NATIVE / f"{name}.py"))


setup(distclass=Package, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": AnyPython})
