"""The kernels of a decoding step, compiled without a GPU: nothing spills, and operands are loaded 16 bytes at a time."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton, and not its interpreter; make triton runs this", allow_module_level=True)

import triton  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from txl.generation import decode_kernels, fused_step

TYPES = {
    **dict.fromkeys(("by_distance", "partials", "sums"), "*fp32"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
    **dict.fromkeys(("read", "keys", "tokens", "before", "drawn"), "*i64"),
    **{"log_probs": "*fp32", "settings": "*fp64", "never": "*u8"},
    "tickets": "*i32",
}
OPERANDS = (
    "query", "key", "value", "u", "v", "keys", "values", "positions", "out",
    "rows", "residual", "normed", "gain", "shift", "weight", "bias",
)  # fmt: skip
STRIDES = ("ring_lane", "ring_head", "position_head", "weight_row")


def usage(kernel: str, constants: dict[str, Any], dtype: str, folder: Path) -> tuple[dict[str, int], str]:
    """Return registers and bytes of stack and local memory of a thread, and the instructions, on Hopper GPUs."""
    function = getattr(decode_kernels, kernel)
    types = dict.fromkeys(function.arg_names, "i32") | dict.fromkeys(OPERANDS, dtype) | TYPES
    if kernel != "draw_kernel":
        types["keys"] = dtype  # the rings
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in function.arg_names}
    aligned = [name for name, kind in signature.items() if kind[0] == "*" or name in STRIDES]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    path, tools = folder / "kernel.cubin", Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    path.write_bytes(binary.asm["cubin"])
    told, code = (
        subprocess.run([tools / tool, option, path], capture_output=True, text=True, check=True).stdout
        for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
    )
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}, code


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("stored", "width"), [(64, 64), (48, 64), (128, 128)])
def test_attention_loads_tiles_in_16_bytes_and_does_not_spill(stored, width, inside, dtype, tmp_path):
    block = fused_step._TILE // width // (2 if dtype == "*bf16" else 4)
    constants = {"STORED": stored, "WIDTH": width, "BLOCK": block, "SPLITS": 32, "INSIDE": inside}
    found, code = usage("attention_kernel", constants | {"STAGES": fused_step._STAGES}, dtype, tmp_path)
    print(found)
    assert found["STACK"] + found["LOCAL"] == 0
    assert found["REG"] <= 168  # three programs of four warps in a multiprocessor at least
    tiles = 3 if inside else 2
    # Each thread copies four times 16 bytes of a tile, in the loop and for every tile that is loaded ahead.
    copies = re.findall(r"LDGSTS\S*\.128", code)
    assert len(copies) >= tiles * 4 * fused_step._STAGES


@pytest.mark.parametrize("lanes", [1, fused_step._FEW])
@pytest.mark.parametrize(("width", "block", "norm"), [(512, 16, True), (512, 8, True), (2048, 4, False)])
def test_products_load_weights_in_16_bytes_and_do_not_spill(width, block, norm, lanes, tmp_path):
    constants = {
        "LANES": lanes,
        "WIDTH": width,
        "BLOCK": block,
        "NORM": norm,
        "BIAS": True,
        "RELU": norm,
    }
    found, code = usage("product_kernel", constants, "*bf16", tmp_path)
    print(found)
    assert found["STACK"] + found["LOCAL"] == 0
    assert len(re.findall(r"LDG\.E\.128", code)) >= width * block // 8 // 128
    # Weights, which no kernel writes, are on their way before the kernel before has ended.
    assert len(re.findall(r"LDG\.E\.128", code.split("ACQBULK")[0])) == width * block // 8 // 128


@pytest.mark.parametrize("width", [256, fused_step._MOST_SORTED])
def test_drawing_is_compiled_without_spills(width, tmp_path):
    found, _ = usage("draw_kernel", {"WIDTH": width}, "*bf16", tmp_path)
    print(found)
    assert found["STACK"] + found["LOCAL"] == 0
