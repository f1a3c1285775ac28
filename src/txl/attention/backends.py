"""The attention backends, what each of them supports, and how one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from txl.attention.compiled import compiled_attention
from txl.attention.equations import KeyScope, reference_attention
from txl.attention.factorised import DotProductKernel, FlexKernel, FusedKernel
from txl.attention.fused import fused_relative_attention, why_not_fused
from txl.attention.shifted import shifted_attention
from txl.config import TransformerXLConfig
from txl.errors import UserError
from txl.native.training_attention import why_not_training


class RelativeAttention(Protocol):
    """Attention from projected positions; shapes as in `reference_attention`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        u: Tensor,
        v: Tensor,
        scope: KeyScope,
        dropout: float = 0.0,
    ) -> Tensor:
        """[B,T,H,D], [B,S,H,D] twice, [S,H,D], [H,D] twice -> [B,T,H,D]."""
        ...


@dataclass(frozen=True)
class Backend:
    """One way to compute A^rel. All of them serve windows, memories of different lengths and untied biases."""

    name: str
    what: str
    attend: RelativeAttention
    """From projected positions: every segment, but where `kernel` is set only those that are read without gradients."""
    kernel: Callable[[], FusedKernel] | None = None
    """Makes the fused attention that segments with gradients go through, in the factorised form."""
    devices: tuple[str, ...] | None = None
    """Where it trains; None: everywhere. Without gradients every model runs everywhere."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """What it trains in; None: everything."""
    obstacle: Callable[[str, torch.dtype | None, int], str | None] | None = None
    """Says what keeps this machine from training with it on a device, in a dtype (None: not known yet), for heads of a
    width; None: nothing can."""
    any_encoding: bool = True
    """Whether R may be something else than the sinusoid."""
    clamp_len: bool = True
    dropatt: bool = True
    dropout_r: bool = True
    """Also dropout on W_kR R (`dropout_qkv`)."""

    def refusal(
        self, model: TransformerXLConfig, device: str | None = None, dtype: torch.dtype | None = None
    ) -> str | None:
        """Why it cannot train a model there, and what to do about it; None if it can.

        Args:
            model: the configuration.
            device: "cpu", "cuda:1" ...; None: not known yet.
            dtype: of the matrix products; None: not known yet.
        """
        reason = self._missing(model) or self._misplaced(model, device, dtype)
        return reason and f"model.attention {self.name} {reason}, or use --model.attention shifted"

    def _missing(self, model: TransformerXLConfig) -> str | None:
        """The first part of the model that it does not have."""
        if not self.any_encoding and model.encoding != "relative":
            return f"needs the sinusoid R (model.encoding is {model.encoding})"
        if not self.clamp_len and model.clamp_len is not None:
            return f"has no clamp (clamp_len is {model.clamp_len}); set it to none"
        on_r = model.dropout if model.dropout_r is None else model.dropout_r
        rates = [
            (self.dropatt, "on attention", "dropatt", model.dropatt),
            (self.dropout_r, "on R", "dropout_r", on_r),
            (self.dropout_r, "on W_kR R", "dropout_qkv", model.dropout_qkv),
        ]
        for supported, where, name, rate in rates:
            if rate and not supported:
                return f"has no dropout {where} (model.{name} is {rate}); set it to 0"
        return None

    def _misplaced(self, model: TransformerXLConfig, device: str | None, dtype: torch.dtype | None) -> str | None:
        """What is wrong with the device or the arithmetic."""
        if device and self.devices and device.partition(":")[0] not in self.devices:
            return f"cannot train on {device}, only on {' or '.join(self.devices)}"
        if dtype and self.dtypes and dtype not in self.dtypes:
            return f"cannot train in {dtype}"
        return self.obstacle(device, dtype, model.d_head) if device and self.obstacle else None


BACKENDS = {
    each.name: each
    for each in (
        Backend("reference", "the equations, one query at a time", reference_attention),
        Backend("shifted", "one product for all distances, read through a shifted view", shifted_attention),
        Backend(
            "compiled",
            "a block of keys at a time in code compiled for the CPU, no matrix of all scores",
            compiled_attention,
            devices=("cpu",),
            dtypes=(torch.float32, torch.bfloat16),
            obstacle=lambda device, dtype, _: why_not_training(device, dtype or torch.float32),
        ),
        Backend(
            "triton",
            "a tile of queries and keys at a time in kernels of our own for NVIDIA GPUs, no matrix of all scores",
            fused_relative_attention,
            devices=("cuda",),
            dtypes=(torch.float32, torch.bfloat16),
            obstacle=why_not_fused,
        ),
        Backend(
            "factorised",
            "plain fused attention over wider heads (`scaled_dot_product_attention`)",
            shifted_attention,
            kernel=DotProductKernel,
            any_encoding=False,
            clamp_len=False,
            dropatt=False,
            dropout_r=False,
        ),
        Backend(
            "flex",
            "plain fused attention over wider heads (FlexAttention)",
            shifted_attention,
            kernel=FlexKernel,
            devices=("cuda",),
            dtypes=(torch.float32, torch.bfloat16),
            any_encoding=False,
            clamp_len=False,
            dropatt=False,
            dropout_r=False,
        ),
    )
}
_FASTEST_FIRST = ("shifted",)
"""What `auto` tries. Only what has been measured to be faster somewhere may stand before `shifted`, which supports
every model everywhere."""
FASTEST_ON: dict[str, str] = {}
"""By the name that CUDA gives a GPU, the backend that trained fastest there in a recorded measurement. None yet."""


def _gpu(device: str | None) -> str | None:
    """The name of an NVIDIA GPU that is here."""
    found = torch.device(device or "cpu")
    if found.type != "cuda" or (found.index or 0) >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_name(found)


def unmeasured_note(model: TransformerXLConfig, device: str | None = None) -> str | None:
    """Return one line for whom `auto` chooses a backend on a GPU on which none was timed; None elsewhere."""
    gpu = _gpu(device)
    if model.attention != "auto" or gpu is None or gpu in FASTEST_ON:
        return None
    chosen = attention_backend(model, device).name
    return f"no attention backend was timed on {gpu}; auto takes {chosen}, --model.attention triton may be faster"


def attention_backend(model: TransformerXLConfig, device: str | None = None) -> Backend:
    """The backend that a configuration asks for; "auto" is the fastest that supports it on the device.

    Args:
        model: the configuration.
        device: where the model will train; None: not known yet.

    Raises:
        UserError: for a name that is not a backend, or one that cannot train the model there.
    """
    if model.attention == "auto":
        measured = FASTEST_ON.get(_gpu(device) or "")
        candidates = [BACKENDS[name] for name in (measured, *_FASTEST_FIRST) if name is not None]
        return next(each for each in candidates if each.refusal(model, device or "cpu") is None)
    if model.attention not in BACKENDS:
        raise UserError(f"model.attention is {model.attention!r}; expected one of auto, {', '.join(BACKENDS)}")
    backend = BACKENDS[model.attention]
    if (reason := backend.refusal(model, device)) is not None:
        raise UserError(reason)
    return backend
