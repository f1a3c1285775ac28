"""The model in training: in one process, with gradients averaged by DDP, or with weights sharded by FSDP2.

Every process has the same number of lanes, so the mean of the processes' gradients is the gradient of the mean loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from txl.errors import UserError
from txl.models.family import FamilyModel
from txl.models.language_model import State
from txl.models.loss import EVERY_TARGET, Objective
from txl.processes import Processes

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class TrainedModel:
    """A model with the same weights in every process, and the engine that synchronises its copies or shards.

    The engine is "ddp" or "fsdp", which makes the model's parameters shards; a single process needs neither.
    """

    def __init__(self, model: FamilyModel, processes: Processes = Processes(), engine: str = "ddp"):  # noqa: B008 (a value)
        self.model, self.processes = model, processes
        self.is_sharded = processes.count > 1 and engine == "fsdp"
        self.saving_group: torch.distributed.ProcessGroup | None = None
        self._sharded: list[FSDPModule] = []
        self._ddp: DistributedDataParallel | None = None
        if self.is_sharded:
            # Imported here, because the import takes a second and only FSDP2 needs it.
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            self.mesh = init_device_mesh(next(model.parameters()).device.type, (processes.count,))
            # Checkpoints are saved in the background, so saving has its own process group, and copies on the CPU.
            self._cpu_mesh = init_device_mesh("cpu", (processes.count,))
            self.saving_group = cast("torch.distributed.ProcessGroup", torch.distributed.new_group(backend="gloo"))
            # Each process gathers one layer at a time; the rest (embedding, softmax, shared biases) stays gathered.
            self._sharded = [fully_shard(module, mesh=self.mesh) for module in (*model.layers, model)]
            register_fsdp_forward_method(model, "training_terms")
        elif processes.count > 1:
            # With an adaptive softmax a step may have no target in some cluster, whose weights then get no gradient.
            # The same is true of the classifiers of auxiliary losses that no longer count.
            may_be_unused = bool(model.config.cutoffs) or model.config.n_auxiliary > 0
            self._ddp = DistributedDataParallel(_Terms(model), find_unused_parameters=may_be_unused)

    def training_terms(
        self, tokens: Tensor, targets: Tensor, state: State, objective: Objective = EVERY_TARGET
    ) -> tuple[Tensor, Tensor, State]:
        """Return the terms for this process's lanes; see `LanguageModel.training_terms`."""
        if self._ddp is not None:
            return self._ddp(tokens, targets, state, objective)
        return self.model.training_terms(tokens, targets, state, objective)

    @contextmanager
    def part(self, is_last: bool) -> Iterator[None]:
        """Enclose the passes of one part of the lanes; gradients are exchanged only after the last part."""
        for module in self._sharded[-1:]:  # the model itself, which sets all its layers
            module.set_requires_gradient_sync(is_last)
        with nullcontext() if self._ddp is None or is_last else self._ddp.no_sync():
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all weights in every process within the block, so that `nll` and similar methods can be called."""
        with torch.no_grad():
            for module in self._sharded:
                module.unshard()
        try:
            yield
        finally:
            for module in self._sharded:
                module.reshard()

    def first_says_yes(self, answer: bool) -> bool:
        """Return process 0's answer in all processes, exchanged through the process group for saving."""
        said = torch.tensor([int(answer)])
        torch.distributed.broadcast(said, src=0, group=self.saving_group)
        return bool(said)

    def on_cpu(self, tensor: Tensor) -> Tensor:
        """Return a copy of this process's shard, or of a whole tensor, on the CPU."""
        from torch.distributed.tensor import DTensor

        if not is_sharded(tensor):
            return tensor.detach().cpu().clone()
        local = tensor.to_local().detach().cpu().clone()
        return DTensor.from_local(
            local, self._cpu_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def of_lanes(self, local: Tensor) -> Tensor:
        """Return a copy of this process's lanes [B/P,...] as a shard of all lanes [B,...], with P processes."""
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(local.detach().cpu().clone(), self._cpu_mesh, [Shard(0)], run_check=False)

    def load_shards(self, folder: Path, targets: dict[str, Tensor]) -> None:
        """Fill sharded or whole tensors from safetensors files, whatever their sharding."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(targets, storage_reader=HuggingFaceStorageReader(str(folder)))
        except CheckpointException as error:
            reason = "; ".join(str(failure[0]) for failure in error.failures.values())
            raise UserError(f"{folder}: its tensors are not those of this model ({reason})") from None


class _Terms(nn.Module):
    """A wrapper of the model for DDP, which calls `forward`."""

    def __init__(self, model: FamilyModel):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, state: State, objective: Objective
    ) -> tuple[Tensor, Tensor, State]:
        return self.model.training_terms(tokens, targets, state, objective)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded; all processes have to call this function."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that may be sharded; return a whole tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is sharded: each process holds a part."""
    return hasattr(tensor, "to_local")  # importing DTensor takes a second, and only FSDP2 needs it
