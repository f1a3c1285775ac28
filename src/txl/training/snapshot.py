"""Everything that a run goes on from, out of a training loop into a checkpoint and back.

What determines the next step: weights, optimiser, random state, the lanes' memory, the position in the text, and the
numbers in `Progress`. A snapshot does not depend on how many processes the run has: tensors are whole, or shards that
any number of processes can read, and memory is kept by the lane of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl.data.streams import StreamPosition
from txl.errors import UserError
from txl.runs.checkpoints import (
    MODEL_FILE,
    STATE_SHARDS,
    STATE_TENSORS_FILE,
    Contents,
    read_state,
    read_tensors,
    verify_belongs,
)
from txl.runs.directory import load_weights
from txl.training.optimisers import WeightAverage, load_optimizer_tensors, optimizer_tensors
from txl.training.parallel import TrainedModel, full_tensor
from txl.training.progress import Progress

SHARED = "limits"
"""The tensor of a state that is not one of lanes; all others have the lanes as their first dimension."""


def capture(loop: Any) -> Contents:
    """A copy of everything, which training does not change any more; every process has to call it.

    Process 0's holds it all, the others' what they write themselves: nothing, or shards.
    """
    trained: TrainedModel = loop.trained
    processes, copied = trained.processes, _Copies()
    weights = {name: copied(full_tensor(tensor)) for name, tensor in loop.best_model.state_dict().items()}
    memory, sharded = _joined(loop.states), {}
    tensors = {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(loop.optimizer, loop.model).items()}
    if loop.average is not None:  # the weights that train, beside those that are used
        tensors |= {f"weights.{name}": tensor for name, tensor in loop.model.state_dict().items()}
    if trained.is_sharded:
        sharded = {name: trained.on_cpu(tensor) for name, tensor in tensors.items()}
        tensors = {}
    for name, tensor in memory.items():
        if name == SHARED:
            tensors[f"memory.{name}"] = tensor
        elif tensor.numel() == 0:  # no memory, or none yet
            tensors[f"memory.{name}"] = tensor.new_empty(len(tensor) * processes.count, *tensor.shape[1:])
        elif trained.is_sharded:
            sharded[f"memory.{name}"] = trained.of_lanes(tensor)
        elif (parts := processes.gather(tensor)) is not None:
            tensors[f"memory.{name}"] = torch.cat(parts)
    for name, state in _random_states(loop.device).items():
        states = processes.gather(state)
        if states is not None:
            tensors[f"random.{name}"] = torch.stack(states)
    numbers: dict[str, Any] = {"progress": asdict(loop.progress), "position": loop.position.to_dict()}
    numbers["corpus"], numbers["processes"] = loop.corpus.info()["identity"], processes.count
    if loop.average is not None:
        numbers["averaged"] = loop.average.count
    if not processes.is_first:
        weights, tensors = {}, {}
    writer = _ShardWriter(sharded, trained) if sharded else None
    return Contents(
        weights=weights,
        tensors={name: copied(tensor) for name, tensor in tensors.items()},
        numbers=numbers,
        write_shards=writer,
        give_up=None if writer is None else writer.give_up,
    )


class _Copies:
    """Copies on the CPU, one for all names of the same tensor."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        kept = self._made.get(id(tensor))
        if kept is None or kept[0] is not tensor:
            detached = tensor.detach()
            kept = tensor, detached.clone() if detached.device.type == "cpu" else detached.cpu()
            self._made[id(tensor)] = kept
        return kept[1]


class _ShardWriter:
    """Writes shards, all processes together; process 0 says first whether there is a folder to write into."""

    def __init__(self, tensors: dict[str, Tensor], trained: TrainedModel):
        self._tensors, self._trained, self._begun = tensors, trained, False

    def __call__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        self._begun = True
        if not self._trained.first_says_yes(True):
            return
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        try:
            save(self._tensors, storage_writer=writer, process_group=self._trained.saving_group)
        except CheckpointException as error:
            reasons = [str(each[0]) for each in error.failures.values()]
            raise OSError(5, "; ".join(dict.fromkeys(reasons))) from None

    def give_up(self) -> None:
        """Let the others go on, if they wait."""
        if not self._begun:
            self._begun = True
            self._trained.first_says_yes(False)


def restore(loop: Any, checkpoint: Path) -> None:
    """Put a checkpoint's content into a loop that was built from the same configuration.

    Raises:
        UserError: if it is damaged, or the text is not the one the run was trained on.
    """
    numbers = read_state(checkpoint)
    try:
        corpus, position = numbers["corpus"], StreamPosition.from_dict(numbers["position"])
        progress, averaged = Progress.from_dict(numbers["progress"]), numbers.get("averaged")
        n_process = int(numbers["processes"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{checkpoint}: its training state is damaged ({error!r})") from None
    if corpus != loop.corpus.info()["identity"]:
        raise UserError(
            f"{loop.corpus.name} is not the text that {loop.directory.path} was trained on (its hash was "
            f"{_short(corpus)}, now it is {_short(loop.corpus.info()['identity'])}); give another --out, with "
            f"--init-from {loop.directory.path} to start from its weights, or --fork to do so beside it"
        )
    verify_belongs(checkpoint, asdict(loop.run.model), loop.directory.path / "vocabulary.json")
    try:
        _restore_tensors(loop, checkpoint, averaged, n_process, progress.step)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{checkpoint}: its training state is not that of this configuration ({error!r})") from None
    loop.position, loop.progress = position, progress


def _restore_tensors(loop: Any, checkpoint: Path, averaged: int | None, n_process: int, step: int) -> None:
    """Weights, averaged weights, optimiser, memory and random numbers."""
    trained: TrainedModel = loop.trained
    loop.average = None
    if averaged is not None:
        loop.average = WeightAverage(loop.model, loop.run.train.average_mu)
        loop.average.count = averaged
    tensors = _training_tensors(checkpoint, trained)
    if trained.is_sharded:
        trained.load_shards(checkpoint, dict(loop.model.state_dict()))
    else:
        load_weights(loop.best_model, read_tensors(checkpoint, MODEL_FILE), str(checkpoint))
        if loop.average is not None:
            load_weights(loop.model, under("weights.", tensors), str(checkpoint))
    load_optimizer_tensors(loop.optimizer, loop.model, under("optimizer.", tensors))
    loop.states = _divided(under("memory.", tensors), loop)
    _set_random_states(under("random.", tensors), loop, n_process, step)


def _short(identity: Any) -> str:
    text = str(identity)
    return text[:12]


def _training_tensors(checkpoint: Path, trained: TrainedModel) -> dict[str, Tensor]:
    """All tensors but the weights; sharded where the model is."""
    tensors = read_tensors(checkpoint, STATE_TENSORS_FILE)
    folder = checkpoint / STATE_SHARDS
    if not trained.is_sharded and not folder.is_dir():
        return tensors
    source = folder if folder.is_dir() else checkpoint
    targets: dict[str, Tensor] = {}
    shapes = shapes_in(source)
    parameters = dict(trained.model.named_parameters())
    for name, (shape, dtype) in shapes.items():
        kind, _, rest = name.partition(".")
        parameter, is_moment = parameters.get(rest.rpartition("/")[0]), not name.endswith("/step")
        if kind == "optimizer" and trained.is_sharded and parameter is not None and is_moment:
            targets[name] = torch.zeros_like(parameter.detach())
        elif kind == "memory" and rest != SHARED and trained.is_sharded:
            targets[name] = trained.empty_lanes(shape, dtype)
        elif kind in ("optimizer", "memory", "weights"):
            targets[name] = torch.empty(shape, dtype=dtype)
    trained.load_shards(source, targets)
    local = {
        name: trained.local_lanes(tensor) if name.startswith("memory.") else tensor for name, tensor in targets.items()
    }
    return tensors | local


def shapes_in(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of every tensor in a folder of shards, or of whole files."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in found.items()}  # pyright: ignore


def _joined(states: Iterable[Any]) -> dict[str, Tensor]:
    """The tensors of the memory of all parts, one after the other along the lanes."""
    parts = [state.to_tensors() for state in states]
    return {
        name: first if name == SHARED else torch.cat([part[name] for part in parts]) for name, first in parts[0].items()
    }


def _divided(memory: dict[str, Tensor], loop: Any) -> list[Any]:
    """The memory of this process's lanes, part by part.

    Raises:
        UserError: if it is of another number of lanes.
    """
    train, processes = loop.run.train, loop.trained.processes
    share, parts = processes.share(train.batch_size), train.micro_batches
    size, states = len(share) // parts, []
    _check_fits(memory, loop.model.init_state(1).to_tensors())
    for part in range(parts):
        tensors = {}
        for name, tensor in memory.items():
            if name == SHARED:
                tensors[name] = tensor
                continue
            # Sharded memory is this process's already.
            offset = 0 if len(tensor) == len(share) else share.start
            if len(tensor) not in (len(share), train.batch_size):
                raise UserError(f"the checkpoint's memory has {len(tensor)} lanes; expected {train.batch_size}")
            first = offset + part * size
            tensors[name] = tensor[first : first + size].clone().to(loop.device)
        states.append(loop.model.state_from_tensors(tensors))
    return states


def _check_fits(memory: dict[str, Tensor], empty: dict[str, Tensor]) -> None:
    """Compare memory with what the model's own looks like while it is empty, but for lanes and positions.

    Raises:
        ValueError: naming the tensor that does not fit.
    """
    if memory.keys() != empty.keys():
        raise ValueError(f"memory of {sorted(memory)}, expected {sorted(empty)}")
    for name, expected in empty.items():
        tensor = memory[name]
        if name == SHARED:
            fits = torch.equal(tensor, expected)
        else:  # a second dimension of 0 is one of positions, of which there may be any number
            shapes = zip(tensor.shape[1:], expected.shape[1:], strict=False)
            fits = tensor.ndim == expected.ndim and all(theirs in (ours, 0) for ours, theirs in shapes)
        # Under autocast states may be in a smaller type than the weights.
        if not fits or tensor.is_floating_point() != expected.is_floating_point():
            raise ValueError(f"memory.{name} is {tensor.dtype} {list(tensor.shape)}, which this model has no use for")


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _random_states(device: str) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: dict[str, Tensor], loop: Any, n_process: int, step: int) -> None:
    """Those of this process, or fresh ones if the run had another number of processes."""
    processes = loop.trained.processes
    if any(len(states[name]) != n_process for name in {"cpu", *states}):
        raise ValueError(f"random states of {len(states['cpu'])} processes, of a run with {n_process}")
    if n_process != processes.count:
        seed_of_process(loop.run.train.seed, processes.rank, step)
        if processes.is_first:
            loop.display.message(
                f"note: there were {n_process} processes, now there are {processes.count}: the lanes' texts and memory "
                f"are the same, dropout draws other numbers"
            )
        return
    torch.set_rng_state(states["cpu"][processes.rank].clone())
    if "cuda" in states and loop.device.startswith("cuda"):
        torch.cuda.set_rng_state(states["cuda"][processes.rank].clone(), loop.device)


def seed_of_process(seed: int, rank: int, step: int) -> None:
    """Let a process draw random numbers of its own from a step on."""
    torch.manual_seed(hash((seed, rank, step)) % 2**63)
