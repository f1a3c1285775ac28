"""Versions and hardware that the last bit of a probability depends on: both sides of a file need the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import txl
from txl.native.build import identity


def arithmetic() -> dict[str, str]:
    """Return versions, instruction set, compiled library and processor, as a header holds them."""
    compiled = identity()
    if compiled["library"] != "none":
        compiled["library"] = _short(compiled["library"])
    return {
        "txl": txl.__version__,
        "torch": torch.__version__,
        "build": _short(torch.__config__.show()),
        **compiled,
    }


def difference(written: dict[str, str], here: dict[str, str]) -> str | None:
    """Return in words how the arithmetic of a file differs from this machine's; None if it does not."""
    names = {
        "txl": "version of txl",
        "torch": "version of PyTorch",
        "build": "build of PyTorch or instruction set",
        "library": "compiled library",
        "processor": "processor",
    }
    apart = [
        f"{names.get(name, name)} ({written.get(name)} there, {here.get(name)} here)"
        for name in sorted({*written, *here})
        if written.get(name) != here.get(name)
    ]
    return ", ".join(apart) or None


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of threads of PyTorch and the compiled library within the block.

    PyTorch's products add in another order with another number of threads: what is to be the same on both sides is
    computed by one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
