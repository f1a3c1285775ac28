"""The kernels of `fused_rows` as they are launched, compiled without a GPU: no spilled registers, wide accesses."""

from __future__ import annotations

import collections
import importlib.util
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton, and not its interpreter; make triton runs this", allow_module_level=True)

import triton  # pyright: ignore[reportMissingImports]
from tests.attention.test_triton_binaries import usage
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from txl.models import fused_kernels, fused_rows
from txl.models.fused_rows import Counted, Norm, QueryMasks, n_program

# d_model, E', d_inner, I', H, D, D', whether dropout is locked.
MODELS = {
    "ptb": (380, 384, 900, 912, 10, 38, 48, True),
    "wt103-base": (410, 416, 2100, 2112, 10, 41, 48, False),
    "enwik8-12L": (512, 512, 2048, 2048, 8, 64, 64, False),
    "enwik8-24L": (1024, 1024, 3072, 3072, 8, 128, 128, False),
}
N, B, S = 1400, 20, 140
# Tensors of rows and masks that a kernel reads and writes, as (read, written): one access of 16 bytes each at least.
# Those of bfloat16 have eight bytes a thread beside a float32.
WIDE = {
    "residual_norm_kernel": (1, 2),
    "residual_norm_backward_kernel": (2, 1),
    "relu_bias_kernel": (1, 1),
    "relu_bias_backward_kernel": (2, 1),
    "queries_kernel": (1, 2),
    "queries_backward_kernel": (2, 1),
    "head_norm_kernel": (1, 1),
    "head_norm_backward_kernel": (2, 1),
    # Launches of the LayerNorm's kernels with pre-norm.
    "residual_norm_kernel, pre-norm": (1, 2),
    "residual_norm_kernel, last": (1, 1),
    "residual_norm_kernel, memory": (1, 0),
    "residual_norm_backward_kernel, pre-norm": (2, 1),
    "residual_norm_backward_kernel, last": (1, 1),
    "residual_norm_backward_kernel, memory": (1, 0),
}
# Programs that a multiprocessor can run at a time, where they are not four: some have one warp only.
PROGRAMS = {"residual_norm_kernel": 7, "relu_bias_backward_kernel": 32, "queries_backward_kernel": 16}
BITS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64"}


class Launches:
    """Stands for the module of kernels, and keeps their arguments instead of launching them."""

    def __init__(self):
        self.arguments: dict[str, dict[str, Any]] = {}
        self.kind = ""

    def __getattr__(self, name: str) -> Any:
        return collections.defaultdict(lambda: lambda **given: self.arguments.setdefault(name + self.kind, given))


@pytest.fixture
def launched(monkeypatch):
    """Return the arguments of all kernels for a layer of a model, by kernel."""

    def of(model: str) -> dict[str, dict[str, Any]]:
        d_model, wide, d_inner, wide_inner, n_head, d_head, head, is_locked = MODELS[model]
        launches = Launches()
        monkeypatch.setattr(fused_rows, "_kernels", lambda: launches)

        def low(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="meta")

        def float32(*shape: int) -> Tensor:
            return torch.empty(shape, device="meta")

        def dropout(width: int) -> Tensor | Counted:
            return float32(B, width) if is_locked else Counted(torch.empty(1, dtype=torch.int64, device="meta"), 4, 0.1)

        rows, vector, after = float32(N, wide), float32(d_model), dropout(wide)
        partial, norm = float32(n_program(N), 3, wide), Norm(vector, vector, 1e-5)
        for launches.kind in ("", ", pre-norm"):
            given = vector, after, norm, d_model, None, launches.kind != ""
            saved = fused_rows.residual_norm(rows, low(N, wide), *given)
            given = saved, vector, after, partial, d_model, low(N, wide), launches.kind != ""
            fused_rows.residual_norm_backward(rows, low(N, wide), *given)
        launches.kind = ", last"
        saved = fused_rows.residual_norm(rows, low(N, wide), vector, after, None, d_model, None, True)
        fused_rows.residual_norm_backward(rows, None, saved, None, after, partial, d_model, low(N, wide), True)
        launches.kind = ", memory"
        saved = fused_rows.residual_norm(rows, None, None, None, norm, d_model, low(N, wide), True)
        fused_rows.norm_sums(low(N, wide), saved, vector, partial)
        launches.kind = ""
        inner = fused_rows.relu_bias(low(N, wide_inner), float32(d_inner), dropout(wide_inner))
        fused_rows.relu_bias_backward(low(N, wide_inner), inner, 1.1, float32(n_program(N), wide_inner))
        width, u = n_head * head, float32(n_head, d_head)
        value = low(S, B, n_head, 2, head)[..., 1, :]
        lanes = float32(B, width)
        masks = QueryMasks(lanes, lanes, float32(width), lanes) if is_locked else None
        fused_rows.queries(low(N, width), u, u, masks, value, n_head)
        partial = float32(n_program(N), 2, width)
        fused_rows.queries_backward(low(N, width), low(N, width), masks, value, n_head, partial, low(N, width))
        key, gains = value.flatten(0, 1)[:, None], float32(1, d_head)
        fused_rows.head_norm(key, gains, 1e-5)
        fused_rows.head_norm_backward(key, key, gains, 1e-5, float32(n_program(N), 1, head))
        return launches.arguments

    return of


def compiled(name: str, given: dict[str, Any], capability: int) -> Any:
    """Compile a kernel for the arguments of a launch, specialised as Triton does."""
    function = getattr(fused_kernels, name.partition(",")[0])
    types, constants, attributes = {}, {}, {}
    for parameter in function.params:
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            types[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        specialised = not parameter.do_not_specialize
        if isinstance(value, Tensor):
            types[parameter.name] = f"*{BITS[value.dtype]}"
            aligned = value.storage_offset() * value.element_size() % 16 == 0
        else:
            assert isinstance(value, float) or value != 1 or not specialised
            types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            aligned = isinstance(value, int) and value % 16 == 0
        if aligned and specialised:
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    options = {name: given[name] for name in ("num_warps", "enable_fp_fusion")}
    source = ASTSource(function, types, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", WIDE)
@pytest.mark.parametrize("model", MODELS)
def test_no_spills_and_wide_accesses(model, kernel, capability, launched, tmp_path):
    given = launched(model)[kernel]
    binary = compiled(kernel, given, capability)
    found = usage(binary.asm["cubin"], tmp_path)
    print(f"{kernel} {capability} {model}: {found}, shared {binary.metadata.shared}")
    assert found["STACK"] + found["LOCAL"] == 0
    # As many programs at a time as `MOST_PROGRAMS` counts on; of the forward LayerNorm nearly twice as many.
    programs = PROGRAMS.get(kernel.partition(",")[0], 4)
    assert found["REG"] * 32 * given["num_warps"] * programs <= 65_536
    assert binary.metadata.shared * programs <= 160 * 1024
    if given["num_warps"] == 1:  # sums over rows stay in registers
        assert binary.metadata.shared == 0
    ptx = binary.asm["ptx"]
    assert not re.search(r"(ld|st)\.global\S*\.b16", ptx)
    copies = len(re.findall(r"cp\.async\S* \[[^\]]*\], \[[^\]]*\], 0x10", ptx))
    n_read, n_written = WIDE[kernel]
    assert copies + len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= n_read
    assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) >= n_written
