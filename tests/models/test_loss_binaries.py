"""The kernels of the loss and of both ends of a step on a GPU, compiled without a GPU: registers do not spill."""

from __future__ import annotations

import pytest
from tests.attention.test_triton_binaries import CAPABILITIES, usage

import triton  # pyright: ignore[reportMissingImports] # isort: skip (the tests above are skipped without it)
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from txl.models import fused_ends, loss_kernels

# Widths of the tiles, and warps, as they are launched for many classes or features, and arguments without specialised code.
KERNELS = {
    "loss_kernel": ({"BLOCK": 4096}, 8, ("n_class",)),
    "gradient_kernel": ({"ROWS": 32, "TILE": 4, "BLOCK": 1024}, 4, ("n_row", "above_row")),
    "copy_kernel": ({"TILE": 8, "BLOCK": 512}, 4, ("n_row", "n_out")),
    "look_up_kernel": ({"LOOKS_UP": True, "TILE": 4, "BLOCK": 1024}, 4, ("n_row", "token_lane", "token_position")),
    "regularised_kernel": ({"OF_DROPPED": True, "TILE": 4, "BLOCK": 1024}, 4, ("n_row", "n_position")),
    "regularised_gradient_kernel": ({"OF_DROPPED": True, "TILE": 4, "BLOCK": 1024}, 4, ("n_row", "n_position")),
}
FLOATS = ("bias", "losses", "sums", "above", "partial", "source", "words", "lanes", "hidden", "dropped", "grad")
NUMBERS = ("scale", "word_factor", "lane_factor", "activation", "temporal")


@pytest.mark.parametrize("capability", [(7, 5), *CAPABILITIES], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_does_not_spill(kernel, dtype, capability, tmp_path):
    function = getattr(loss_kernels if hasattr(loss_kernels, kernel) else fused_ends, kernel)
    constants, warps, plain = KERNELS[kernel]
    types = dict.fromkeys(function.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= {"logits": f"*{dtype}", "out": f"*{dtype}", "targets": "*i64", "tokens": "*i64", "begins": "*i1"}
    types |= dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(NUMBERS, "fp32") | {"above_penalty": "*fp32"}
    signature = {name: types[name] for name in function.arg_names}
    aligned = [name for name in signature if name not in (*plain, *constants, *NUMBERS)]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    source = ASTSource(function, signature, constants, attributes)
    binary = triton.compile(source, target=target, options={"num_warps": warps})
    found = usage(binary.asm["cubin"], tmp_path)
    print(f"{kernel} {capability} {dtype}: {found}, shared {binary.metadata.shared}")
    assert found["REG"] <= 128
    assert found["STACK"] + found["LOCAL"] == 0
