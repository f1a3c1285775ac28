"""Devices on which tests run Triton's kernels: a CPU in Triton's interpreter (`make triton`), and a GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
WITHOUT_GPU = [pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is not on here; make triton runs this")]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
DEVICES = [pytest.param("cpu", marks=WITHOUT_GPU), pytest.param("cuda", marks=GPU)]
