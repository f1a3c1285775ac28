"""`torch.compile` as an option of training."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from txl.models.decoder import Decoder


def compile_layers(model: Decoder[Any], device: str) -> str | None:
    """Compile a model's layers where gradients are taken; everything else, and the names of its weights, stay.

    All layers run one compiled graph, so that compiling takes a layer's time and not the model's. A QRNN's graphs, one
    for each shape of a layer's weights, are for segments of any length from the first; its recurrence is not part of
    them (`models.scan`). Evaluation reads a view of the model, whose layers run eagerly.

    Returns:
        Why nothing was compiled, in one line: this machine has no working compiler. None if all is well.
    """
    reason = _compiler_missing(device)
    if reason is None:
        for layer in model.get_submodule("layers").children():
            layer.compile(dynamic=model.compiles_any_length)
    return reason


def _compiler_missing(device: str) -> str | None:
    """Compile something small; the first line of the error if that fails."""
    factor = random.Random().random()  # no earlier attempt has left this one in a cache; torch's generator stays

    def small(values: Tensor) -> Tensor:
        return (values * factor).relu() + 1

    try:
        torch.compile(small)(torch.ones(8, device=device))
    except Exception as error:  # whatever it is, it is the compiler's
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return lines[0].strip()
    return None
