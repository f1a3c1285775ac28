"""Versions and hardware that determine the last bit of a probability; encoder and decoder need equal ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import txl
from txl.native.build import identity


def arithmetic() -> dict[str, str]:
    """Return versions, instruction set, compiled library and processor, in the form stored in a file's header."""
    compiled = identity()
    if compiled["library"] != "none":
        compiled["library"] = _short(compiled["library"])
    return {"txl": txl.__version__, "torch": torch.__version__, "build": _short(torch.__config__.show()), **compiled}


_NAMES = {
    "txl": "version of txl",
    "torch": "version of PyTorch",
    "build": "build of PyTorch or instruction set",
    "library": "compiled library",
    "processor": "processor",
}


def difference(written: dict[str, str], here: dict[str, str]) -> str | None:
    """Return a description of the differences between a file's arithmetic and this machine's; None if both agree."""
    apart = [
        f"{_NAMES.get(name, name)} ({written.get(name)} there, {here.get(name)} here)"
        for name in sorted({*written, *here})
        if written.get(name) != here.get(name)
    ]
    return ", ".join(apart) or None


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of threads of PyTorch and the compiled library within the block.

    The number of threads affects the order of additions in PyTorch's matrix products. Values that must be equal in
    encoder and decoder are therefore computed with one thread.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
