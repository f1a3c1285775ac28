"""The training state: copied for a checkpoint, and restored from one.

A checkpoint does not depend on the number of processes of the run: tensors are whole, or shards that any number of
processes can read, and memory is stored by the lanes of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from txl.data.lanes import StreamPosition
from txl.errors import UserError, cause, is_out_of_memory
from txl.files import JsonObject
from txl.models.language_model import State
from txl.processes import Processes, is_lost_peer
from txl.runs.checkpoints import MODEL_FILE, OTHERWISE, STATE_SHARDS, STATE_TENSORS_FILE, Contents, VerifiedCheckpoint
from txl.runs.directory import load_weights
from txl.training.optimisers import load_optimizer_tensors, optimizer_tensors
from txl.training.parallel import TrainedModel, full_tensor, local_tensor
from txl.training.starting import imported, start_from
from txl.training.state import Counters, TrainingSetup, TrainingState, WeightAverage

SHARED = "limits"  # tensor of a state that has no lanes; all other tensors have the lanes as their first dimension


def copied_state(state: TrainingState, setup: TrainingSetup) -> Contents:
    """Copy the training state, so that training does not change the copy; every process has to call this function.

    Process 0 returns everything that it writes. The other processes return only their shards, if there are any.
    """
    trained = setup.trained
    processes, made = trained.processes, {}

    def copied(tensor: Tensor) -> Tensor:
        """Copy a tensor to the CPU; a tensor with several names is copied once."""
        if id(tensor) not in made:
            detached = tensor.detach()
            # The tensor is kept with its copy, so that its id stays its own.
            made[id(tensor)] = tensor, detached.clone() if detached.device.type == "cpu" else detached.cpu()
        return made[id(tensor)][1]

    weights = {name: copied(full_tensor(tensor)) for name, tensor in state.best_model.state_dict().items()}
    memory, sharded = _joined(state.memory, processes), {}
    tensors = {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(state.optimizer, state.model).items()}
    if state.optimizer.loss_scale is not None:
        tensors |= {f"loss_scale.{name}": tensor for name, tensor in state.optimizer.loss_scale.tensors().items()}
    if state.average is not None:  # the weights that are trained; `weights` holds their average
        tensors |= {f"weights.{name}": tensor for name, tensor in state.model.state_dict().items()}
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
    for name, generator in generator_states(setup.device).items():
        if (generators := processes.gather(generator)) is not None:
            tensors[f"random.{name}"] = torch.stack(generators)
    # "progress" is the name of the counters in the format of checkpoints.
    numbers: JsonObject = {"progress": asdict(state.counters), "position": state.position.to_dict()}
    numbers["corpus"], numbers["processes"] = setup.corpus.info()["identity"], processes.count
    if state.average is not None:
        numbers["averaged"] = state.average.count
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


class _ShardWriter:
    """Writer of shards in all processes together; process 0 decides first whether they are written."""

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
            reasons = [str(failure[0]) for failure in error.failures.values()]
            raise OSError(5, "; ".join(dict.fromkeys(reasons))) from None

    def give_up(self) -> None:
        """Tell the other processes, if they wait, that no shards will be written."""
        if not self._begun:
            self._begun = True
            self._trained.first_says_yes(False)


def restore(state: TrainingState, setup: TrainingSetup, checkpoint: VerifiedCheckpoint) -> None:
    """Load a checkpoint into a training state that was built from the same configuration."""
    numbers, where, train = checkpoint.state(), setup.directory.path, setup.run.train
    if "imported_from" in numbers:
        raise imported(where)
    try:
        corpus, position = numbers["corpus"], StreamPosition.from_dict(numbers["position"])
        counters, averaged = Counters.from_dict(numbers["progress"]), numbers.get("averaged")
        n_process = int(numbers["processes"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise UserError(f"{checkpoint.path}: its training state is damaged; {OTHERWISE}") from None
    identity = setup.corpus.info()["identity"]
    if corpus != identity:
        raise UserError(
            f"{setup.corpus.name} is not the text that {where} was trained on (its hash was {str(corpus)[:12]}, now it "
            f"is {str(identity)[:12]})",
            remedy=start_from(where),
        )
    checkpoint.check_belongs(asdict(setup.run.model), where / "vocabulary.json")
    state.average, trained, source = None, setup.trained, str(checkpoint.path)
    try:
        if averaged is not None:
            state.average = WeightAverage(state.model, train.average_mu)
            state.average.count = averaged
        tensors = _training_tensors(checkpoint, trained)
        if trained.is_sharded:
            trained.load_shards(checkpoint.path, dict(state.model.state_dict()))
        else:
            load_weights(state.best_model, checkpoint.tensors(MODEL_FILE), source)
            if state.average is not None:
                load_weights(state.model, _under("weights.", tensors), source)
        load_optimizer_tensors(state.optimizer, state.model, _under("optimizer.", tensors))
        saved = _under("loss_scale.", tensors)
        if state.optimizer.loss_scale is not None and saved:  # none in a checkpoint of a run in another dtype
            for name, tensor in state.optimizer.loss_scale.tensors().items():
                tensor.copy_(saved[name])
        state.memory = _divided(_under("memory.", tensors), setup)
        _restore_generators(_under("random.", tensors), setup, n_process, counters.step)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError) or is_out_of_memory(error) or is_lost_peer(error):
            raise  # the checkpoint is not to blame
        raise UserError(
            f"{checkpoint.path}: its training state is not that of this configuration{cause(error)}; {OTHERWISE}"
        ) from None
    if train.follows_validation and counters.step < train.steps:
        # In an extended run, the evaluation at the former end does not count unless it was on the schedule.
        del counters.validation_losses[counters.step // train.eval_every :]
        counters.validation_due &= counters.step % train.eval_every == 0
    state.position, state.counters = position, counters


def _training_tensors(checkpoint: VerifiedCheckpoint, trained: TrainedModel) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint except the weights, as shards if the model is sharded."""
    tensors, folder = checkpoint.tensors(STATE_TENSORS_FILE), checkpoint.path / STATE_SHARDS
    if not trained.is_sharded and not folder.is_dir():
        return tensors
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # an import of a second

    source = folder if folder.is_dir() else checkpoint.path
    shards: dict[str, Tensor] = {}
    parameters = dict(trained.model.named_parameters())
    for name, entry in HuggingFaceStorageReader(str(source)).read_metadata().state_dict_metadata.items():
        shape, dtype = entry.size, entry.properties.dtype  # pyright: ignore (an entry of a tensor)
        kind, _, rest = name.partition(".")
        parameter, is_moment = parameters.get(rest.rpartition("/")[0]), not name.endswith("/step")
        if kind == "optimizer" and trained.is_sharded and parameter is not None and is_moment:
            shards[name] = torch.zeros_like(parameter.detach())
        elif kind == "memory" and rest != SHARED and trained.is_sharded:
            lanes = torch.empty(len(trained.processes.share(shape[0])), *shape[1:], dtype=dtype)
            shards[name] = trained.of_lanes(lanes)
        elif kind in ("optimizer", "memory", "weights"):
            shards[name] = torch.empty(shape, dtype=dtype)
    trained.load_shards(source, shards)
    local = {name: local_tensor(tensor) if name.startswith("memory.") else tensor for name, tensor in shards.items()}
    return tensors | local


def _joined(states: Sequence[State], processes: Processes) -> dict[str, Tensor]:
    """Join the memory of all parts along the lanes.

    If all lanes of a part were emptied (`train.reset_memory`), the part holds fewer positions than others. It is padded
    with unfilled positions to the largest number that any part of any process holds.
    """
    length = processes.most(max(state.length or 0 for state in states))
    parts = []
    for state in states:
        tensors = state.to_tensors()
        if state.length is not None and state.length < length:
            missing = (0, 0, length - state.length, 0)
            tensors = {name: pad(value, missing) if value.ndim == 3 else value for name, value in tensors.items()}
        parts.append(tensors)
    return {
        name: first if name == SHARED else torch.cat([part[name] for part in parts]) for name, first in parts[0].items()
    }


def _divided(memory: dict[str, Tensor], setup: TrainingSetup) -> list[State]:
    """Return the states of this process's lanes, one for each part.

    Raises:
        ValueError: if names, shapes or types of the tensors, apart from lanes and positions, are not the model's.
    """
    train, model = setup.run.train, setup.trained.model
    share, empty = setup.trained.processes.share(train.batch_size), model.init_state(1).to_tensors()
    if memory.keys() != empty.keys():
        raise ValueError(f"memory of {sorted(memory)}, expected {sorted(empty)}")
    parts: list[dict[str, Tensor]] = [{} for _ in range(train.micro_batches)]
    for name, expected in empty.items():
        tensor = memory[name]
        if name == SHARED:
            fits = torch.equal(tensor, expected)
        else:  # a dimension of 0 in the empty memory counts positions, of which there may be any number
            sizes = zip(tensor.shape[1:], expected.shape[1:], strict=False)
            fits = tensor.ndim == expected.ndim and all(theirs in (ours, 0) for ours, theirs in sizes)
            fits = fits and len(tensor) in (len(share), train.batch_size)
        # Under autocast states may have a smaller dtype than the weights.
        if not fits or tensor.is_floating_point() != expected.is_floating_point():
            raise ValueError(f"memory.{name} is {tensor.dtype} {list(tensor.shape)}, which this model has no use for")
        # Sharded memory holds only this process's lanes.
        lanes = tensor if name == SHARED or len(tensor) == len(share) else tensor[share.start : share.stop]
        chunks = [tensor] * len(parts) if name == SHARED else lanes.chunk(len(parts))
        for part, chunk in zip(parts, chunks, strict=True):
            part[name] = chunk if name == SHARED else chunk.clone().to(setup.device)
    return [model.state_from_tensors(part) for part in parts]


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, with the prefix removed."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def generator_states(device: str) -> dict[str, Tensor]:
    """Return the states of PyTorch's random generators: "cpu", and "cuda" if the device is a GPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generators(states: dict[str, Tensor], device: str) -> None:
    """Set the random generators to the result of `generator_states`."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.startswith("cuda"):
        torch.cuda.set_rng_state(states["cuda"], device)


def _restore_generators(states: dict[str, Tensor], setup: TrainingSetup, n_process: int, step: int) -> None:
    """Restore this process's random generators, or seed them anew if the run had another number of processes."""
    processes = setup.trained.processes
    if any(len(states[name]) != n_process for name in {"cpu", *states}):
        raise ValueError(f"random states of {len(states['cpu'])} processes, of a run with {n_process}")
    if n_process == processes.count:
        set_generators({name: state[processes.rank].clone() for name, state in states.items()}, setup.device)
        return
    sequence = np.random.SeedSequence((setup.run.train.seed, processes.rank, step))
    torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))
    if processes.is_first:
        setup.display.message(
            f"note: there were {n_process} processes, now there are {processes.count}: the lanes' texts and memory are "
            f"the same, but dropout uses other random numbers"
        )
