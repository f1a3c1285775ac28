"""Compare all functions of a compiled library with float64 and PyTorch, in an environment with the wheel.

The argument is the kind of processor whose library is used.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from txl.attention.equations import KeyScope, Operands, reference_attention
from txl.native import build, compiling
from txl.native.attention import reading_attention, training_attention
from txl.native.operations import linear

(kind,) = (each for each in compiling.PROCESSORS if each.name == sys.argv[1])
build.find_prebuilt = lambda folder, sources, flags: folder / compiling.library_name(kind, sources)
library = build.library()
assert library is not None
assert Path(library._name).name.endswith(f"-{kind.name}.so")

torch.manual_seed(0)
scope = KeyScope(640, 600, (0, 640, 13))
shapes = [(3, 64, 2, 41), (3, 704, 2, 41), (3, 704, 2, 41), (704, 2, 41), (2, 41), (2, 41)]
operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
multiplies = {torch.float32: 1e-5} | ({torch.bfloat16: 3e-2} if library.txl_attends_bfloat16() else {})
assert (torch.bfloat16 in multiplies) == ("bf16" in kind.name)

for dtype, tolerance in multiplies.items():
    rounded = [each.to(dtype) for each in operands]
    exact = [each.double().requires_grad_() for each in rounded]
    expected = reference_attention(Operands(*exact), scope)
    with torch.no_grad():
        found = reading_attention(rounded, window=scope.window, filled=scope.filled)
    assert found is not None
    torch.testing.assert_close(found.double(), expected.detach(), rtol=0, atol=tolerance)

    above = torch.randn_like(expected)
    leaves = [each.clone().requires_grad_() for each in rounded]
    out = training_attention(leaves, window=scope.window, filled=torch.tensor(scope.filled))
    for one, other in zip(
        torch.autograd.grad(out, leaves, above.to(out.dtype)), torch.autograd.grad(expected, exact, above), strict=True
    ):
        assert F.cosine_similarity(one.double().flatten(), other.flatten(), 0) > 1 - tolerance

for dtype in (torch.float32, torch.float64, torch.bfloat16):
    weight, rows = torch.randn(131, 67).to(dtype), torch.randn(3, 67).to(dtype)
    with torch.no_grad():
        found = linear(rows, weight, keeps_sums=True)
    torch.testing.assert_close(found.double(), F.linear(rows.double(), weight.double()), rtol=1e-5, atol=1e-4)
print("the same")
