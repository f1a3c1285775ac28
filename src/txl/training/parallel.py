"""The model as one process or several train it: as it is, with DDP's averaged gradients, or sharded by FSDP2.

Every process has the same number of lanes, so the mean of the processes' gradients is the gradient of the mean loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from txl.errors import UserError
from txl.models.family import FamilyModel
from txl.models.language_model import EVERY_TARGET, Objective, State
from txl.processes import Processes

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class TrainedModel:
    """A model and the engine that keeps its copies, or its shards, in step.

    Args:
        model: on its device, with the same weights in every process. With "fsdp" its parameters become shards.
        processes: those that train it.
        engine: "ddp" or "fsdp"; a single process needs neither.
    """

    def __init__(self, model: FamilyModel, processes: Processes = Processes(), engine: str = "ddp"):  # noqa: B008 (a value)
        self.model, self.processes = model, processes
        self.is_sharded = processes.count > 1 and engine == "fsdp"
        self.saving_group: torch.distributed.ProcessGroup | None = None
        self._sharded: list[FSDPModule] = []
        self._ddp: DistributedDataParallel | None = None
        if self.is_sharded:
            # Imported here: a second of time, for those alone who need it.
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            self.mesh = init_device_mesh(_device_of(model).type, (processes.count,))
            # Saving goes on beside training, so it has a group of its own, and copies on the CPU.
            self._cpu_mesh = init_device_mesh("cpu", (processes.count,))
            self.saving_group = cast("torch.distributed.ProcessGroup", torch.distributed.new_group(backend="gloo"))
            # A layer at a time is whole on each process; what is left (embedding, softmax, shared biases) stays so.
            self._sharded = [fully_shard(module, mesh=self.mesh) for module in (*model.layers, model)]
            register_fsdp_forward_method(model, "training_terms")
        elif processes.count > 1:
            # With an adaptive softmax a step may have no target in some cluster, whose weights then get no gradient;
            # the same goes for the heads of auxiliary losses that have been switched off.
            may_be_unused = bool(model.config.cutoffs) or model.config.n_auxiliary > 0
            self._ddp = DistributedDataParallel(_Terms(model), find_unused_parameters=may_be_unused)

    def training_terms(
        self, tokens: Tensor, targets: Tensor, state: State, objective: Objective = EVERY_TARGET
    ) -> tuple[Tensor, Tensor, State]:
        """See `LanguageModel.training_terms`; for this process's lanes."""
        if self._ddp is not None:
            return self._ddp(tokens, targets, state, objective)
        return self.model.training_terms(tokens, targets, state, objective)

    @contextmanager
    def part(self, is_last: bool) -> Iterator[None]:
        """Exchange gradients after the last part of the lanes alone; the block is the passes of one part."""
        for module in self._sharded[-1:]:
            module.set_requires_gradient_sync(is_last)
        with nullcontext() if self._ddp is None or is_last else self._ddp.no_sync():
            yield

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters, or this process's shards of them."""
        return self.model.parameters()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let every process hold all weights within the block, so that `nll` and its like can be called."""
        with torch.no_grad():
            for module in self._sharded:
                module.unshard()
        try:
            yield
        finally:
            for module in self._sharded:
                module.reshard()

    def first_says_yes(self, answer: bool) -> bool:
        """Return process 0's answer in all processes; exchanged beside training, as saving is."""
        said = torch.tensor([int(answer)])
        torch.distributed.broadcast(said, src=0, group=self.saving_group)
        return bool(said)

    def on_cpu(self, tensor: Tensor) -> Tensor:
        """Copy this process's shard, or a tensor that is whole, to the CPU."""
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return tensor.detach().cpu().clone()
        local = tensor.to_local().detach().cpu().clone()
        return DTensor.from_local(
            local, self._cpu_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def of_lanes(self, local: Tensor) -> Tensor:
        """Copy this process's lanes [B/P,...] as its shard of all lanes [B,...]."""
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(local.detach().cpu().clone(), self._cpu_mesh, [Shard(0)], run_check=False)

    def empty_lanes(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return room for the lanes of all processes, of which this one holds its own."""
        return self.of_lanes(torch.empty(len(self.processes.share(shape[0])), *shape[1:], dtype=dtype))

    def local_lanes(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a tensor from `empty_lanes`; a whole tensor as it is."""
        from torch.distributed.tensor import DTensor

        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def load_shards(self, folder: Path, targets: dict[str, Tensor]) -> None:
        """Fill tensors, sharded or whole, from the safetensors files of a folder, however those are sharded."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(targets, storage_reader=HuggingFaceStorageReader(str(folder)))
        except CheckpointException as error:
            reason = "; ".join(str(each[0]) for each in error.failures.values())
            raise UserError(f"{folder}: its tensors are not those of this model ({reason})") from None


class _Terms(nn.Module):
    """The model as DDP calls it: by `forward`."""

    def __init__(self, model: FamilyModel):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, state: State, objective: Objective
    ) -> tuple[Tensor, Tensor, State]:
        return self.model.training_terms(tokens, targets, state, objective)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor that may be sharded, whole; all processes have to ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore


def is_sharded(parameter: Tensor) -> bool:
    """Return whether each process holds a part of a parameter."""
    return hasattr(parameter, "to_local")


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
