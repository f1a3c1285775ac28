"""Write the golden checkpoints: the authors' model with random weights, and the loss of every token.

    python tests/interop/make_golden.py CHECKOUT

CHECKOUT is a checkout of the authors' repository, which is neither changed nor copied: only weights, options and losses
are kept. The authors' code uses byte tensors as masks, which current PyTorch refuses; `Tensor.byte` is replaced by
`Tensor.bool` while the code runs.
"""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent / "golden"
VOCABULARY, LANES, SEGMENT, SEGMENTS = 29, 2, 5, 5
BASE: dict[str, Any] = {
    "n_token": VOCABULARY, "n_layer": 2, "n_head": 2, "d_model": 12, "d_head": 5, "d_inner": 16, "dropout": 0.1,
    "dropatt": 0.05, "tgt_len": SEGMENT, "ext_len": 0, "mem_len": 8, "cutoffs": [], "div_val": 1,
}  # fmt: skip
TAILS = {"cutoffs": [7, 15]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clamp-and-window": {"clamp_len": 4, "same_length": True},
    "pre-norm": {"pre_lnorm": True},
    "narrow-embedding": {"d_embed": 6, "tie_projs": [True]},
    "narrow-embedding-untied": {"d_embed": 6, "tie_projs": [False]},
    "clusters": TAILS | {"tie_projs": [False, True, True]},
    "clusters-narrow": TAILS | {"d_embed": 6, "tie_projs": [False, True, True]},
    "div-val-2": TAILS | {"div_val": 2, "tie_projs": [False, True, True]},
    "div-val-4-untied": TAILS | {"div_val": 4, "d_embed": 16, "d_model": 16, "tie_projs": [False, False, False]},
    "div-val-2-all-tied": TAILS | {"div_val": 2, "tie_projs": [True, True, True], "same_length": True},
    "embeddings-untied": TAILS | {"div_val": 2, "tie_weight": False, "tie_projs": [False, True, True]},
}
LEGACY = ("clamp-and-window", "div-val-2")
"""Cases that are also saved in the stream format of PyTorch in 2019."""


@contextmanager
def today(checkout: Path):
    """Make it possible to import and run the authors' code on current PyTorch."""
    real = torch.Tensor.byte
    sys.path[:0] = [str(checkout / "pytorch"), str(checkout / "pytorch" / "utils")]
    torch.Tensor.byte = torch.Tensor.bool  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.byte = real  # type: ignore[method-assign]


def losses(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the nll of every target, [B, T * segments]; memory is carried from segment to segment."""
    model.crit.keep_order = True
    memory: list[torch.Tensor] = []
    found = []
    with torch.no_grad():
        for start in range(0, SEGMENT * SEGMENTS, SEGMENT):
            block = tokens[:, start : start + SEGMENT + 1].t()
            loss, *memory = model(block[:-1].contiguous(), block[1:].contiguous(), *memory)
            found.append(loss.t())
    return torch.cat(found, dim=1)


def main(checkout: Path) -> None:
    """Write every case."""
    HERE.mkdir(exist_ok=True)
    expected = {}
    with today(checkout):
        from mem_transformer import MemTransformerLM  # pyright: ignore[reportMissingImports]

        for number, (name, changes) in enumerate(CASES.items()):
            torch.manual_seed(number)
            model = MemTransformerLM(**(BASE | changes)).eval()
            for parameter in model.parameters():
                parameter.data.normal_(0, 0.3)
            tokens = torch.randint(VOCABULARY, (LANES, SEGMENT * SEGMENTS + 1))
            expected[name] = {"tokens": tokens.tolist(), "losses": losses(model, tokens).tolist()}
            model.crit.keep_order = False
            torch.save(model, HERE / f"{name}.pt")
            if name in LEGACY:
                without_source(lambda model=model, name=name: torch.save(
                    model, HERE / f"{name}.legacy.pt", _use_new_zipfile_serialization=False
                ))  # fmt: skip
    (HERE / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")


def without_source(save: Any) -> None:
    """Call `save` without access to source code: the stream format would store the source of the authors' classes."""
    real = inspect.getsourcelines

    def refused(_: Any) -> Any:
        raise OSError("not kept")

    inspect.getsourcelines = refused
    try:
        save()
    finally:
        inspect.getsourcelines = real


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} CHECKOUT")
    main(Path(sys.argv[1]))
