"""The kernels of the cross-entropy for GPUs, compiled without a GPU: registers do not spill."""

from __future__ import annotations

import pytest
from tests.attention.test_triton_binaries import CAPABILITIES, usage

import triton  # pyright: ignore[reportMissingImports] # isort: skip (the tests above are skipped without it)
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from txl.models import loss_kernels

# Widths of the tiles, and warps, as they are launched for many classes or features, and arguments without specialised code.
KERNELS = {
    "loss_kernel": ({"BLOCK": 4096}, 8, ("n_class",)),
    "gradient_kernel": ({"ROWS": 32, "TILE": 4, "BLOCK": 1024}, 4, ("n_row", "above_row")),
    "copy_kernel": ({"TILE": 8, "BLOCK": 512}, 4, ("n_row", "n_out")),
}
FLOATS = ("bias", "losses", "sums", "above", "partial", "source")


@pytest.mark.parametrize("capability", [(7, 5), *CAPABILITIES], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_does_not_spill(kernel, dtype, capability, tmp_path):
    function, (constants, warps, plain) = getattr(loss_kernels, kernel), KERNELS[kernel]
    types = dict.fromkeys(function.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= {"logits": f"*{dtype}", "out": f"*{dtype}", "targets": "*i64"} | dict.fromkeys(FLOATS, "*fp32")
    signature = {name: types[name] for name in function.arg_names}
    aligned = [name for name in signature if name not in (*plain, *constants)]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    source = ASTSource(function, signature, constants, attributes)
    binary = triton.compile(source, target=target, options={"num_warps": warps})
    found = usage(binary.asm["cubin"], tmp_path)
    print(f"{kernel} {capability} {dtype}: {found}, shared {binary.metadata.shared}")
    assert found["REG"] <= 128
    assert found["STACK"] + found["LOCAL"] == 0
