"""Every supported configuration of the kernels for GPUs, compiled without a GPU: the binaries must fit the device."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from txl.attention.triton_attention import KERNELS, Tiling, padded_width, precision, tilings

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton, and not its interpreter; make triton runs this", allow_module_level=True)

import triton  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.backends.nvidia.compiler import get_ptxas  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from txl.attention import triton_kernels

CAPABILITIES = ((8, 0), (8, 9), (9, 0))
OPERANDS = ("query_u", "query_v", "key", "value", "position", "out", "above", "applied", "by_key", "by_distance")
MOST_STACK = {
    ("forward_kernel", torch.bfloat16): 310,
    ("score_gradient_kernel", torch.bfloat16): 490,
    ("forward_kernel", torch.float32): 410,
    ("score_gradient_kernel", torch.float32): 1460,
}
"""Largest stack size in bytes per thread, for spilled registers; measured when the tilings were chosen."""


def tiles_of(kernel: str, d_head: int, dtype: torch.dtype, tf32: bool, capability: tuple[int, int]) -> Tiling:
    found = tilings(d_head, dtype, tf32, capability)
    assert found is not None
    return found[kernel]


def compiled(kernel: str, d_head: int, dtype: torch.dtype, tf32: bool, capability: tuple[int, int]) -> Any:
    """Return a compiled kernel with all options: dropout, and lanes whose memory is not full."""
    function = getattr(triton_kernels, kernel)
    tiles = tiles_of(kernel, d_head, dtype, tf32, capability)
    constants = {
        "THRESHOLD": 2**29,
        "PRECISION": precision(d_head, tf32),
        "WIDTH": padded_width(d_head),
        "BLOCK": tiles.block,
    }
    types = dict.fromkeys(function.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= {"scale": "fp32", "factor": "fp32", "oldest_of": "*i32", "seed_at": "*i64"}
    types |= dict.fromkeys(OPERANDS, "*bf16" if dtype == torch.bfloat16 else "*fp32") | {"lse": "*fp32"}
    signature = {name: types[name] for name in function.arg_names}
    # As at a launch: addresses, and the strides and widths of operands, are multiples of 16.
    plain = triton_kernels.SIZES
    aligned = [name for name, kind in signature.items() if kind[0] == "*" or (kind == "i32" and name not in plain)]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature, constants, attributes)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    return triton.compile(source, target=target, options=tiles.options)


BIN = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"


def said(tool: str, *arguments: Any) -> str:
    told = subprocess.run([BIN / tool, *arguments], capture_output=True, text=True, check=True)
    return told.stdout + told.stderr


def usage(binary: bytes, folder: Path) -> dict[str, int]:
    """Return registers (REG) and bytes of stack (STACK) and local memory (LOCAL), where registers spill, per thread."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    told = said("cuobjdump", "-res-usage", path)
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}


def warnings(code: str, folder: Path) -> list[str]:
    """Return the assembler's warnings that it waits for every instruction of a matrix unit (C7510 and others)."""
    (folder / "kernel.ptx").write_text(code)
    told = said(get_ptxas(90).path, "-v", "-arch=sm_90a", folder / "kernel.ptx", "-o", folder / "again.cubin")
    return re.findall(r".*\bC75\d\d\b.*", told)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("d_head", "dtype", "tf32"),
    [
        *((d_head, torch.bfloat16, False) for d_head in (32, 41, 64, 128, 256)),
        *((d_head, torch.float32, tf32) for d_head in (32, 41, 64, 128) for tf32 in (False, True)),
    ],
    ids=str,
)
def test_a_kernel_needs_no_more_than_its_tiling_says(
    kernel, d_head, dtype, tf32, capability, tmp_path, record_property
):
    binary = compiled(kernel, d_head, dtype, tf32, capability)
    tiles = tiles_of(kernel, d_head, dtype, tf32, capability)
    found = usage(binary.asm["cubin"], tmp_path)
    print(f"{kernel} {capability} {dtype} {d_head} tf32 {tf32}: {found}, shared {binary.metadata.shared}")
    record_property("shared", binary.metadata.shared)
    assert binary.metadata.shared <= tiles.shared
    assert found["REG"] * 32 * tiles.warps <= 65_536
    assert found["STACK"] + found["LOCAL"] <= MOST_STACK[kernel, dtype]
    if capability == (9, 0) and dtype == torch.bfloat16:
        assert warnings(binary.asm["ptx"], tmp_path) == []
        code = said("nvdisasm", "-c", tmp_path / "kernel.cubin")
        assert ("HGMMA" in code) == (tiles.block == 64)
        assert ("HMMA" in code) == (tiles.block == 32)
