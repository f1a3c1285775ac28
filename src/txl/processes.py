"""Several processes that train one model, started by torchrun: PyTorch's own process groups, DDP and FSDP2.

The lanes of the batch are divided over the processes in order, so that the global batch, its order and every lane's
memory are the same as with one process. Only process 0 writes files and prints.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from txl.errors import Field, ProcessLost, UserError

# Longest wait for another process in one exchange. A dead process is noticed at once, by its closed connection.
_TIMEOUT = timedelta(minutes=10)
# PyTorch has no class of its own for errors of a connection to another process that is gone.
_LOST_PEER = re.compile(r"gloo|nccl|[Cc]onnection (closed|reset)")

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Rank and number of processes, and exchanges of data. Every process must call the methods that exchange data."""

    rank: int = 0
    count: int = 1
    _store: PrefixStore | None = None

    @property
    def is_first(self) -> bool:
        """True for the process that writes and prints."""
        return self.rank == 0

    def share(self, total: int) -> range:
        """Return the lanes of this process, out of `total` lanes."""
        if total % self.count:
            raise UserError(f"{total} lanes cannot be divided over {self.count} processes; expected a multiple")
        each = total // self.count
        return range(self.rank * each, (self.rank + 1) * each)

    def sum(self, *values: float) -> list[float]:
        """Return the sums over all processes, in float64."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def sum_of(self, numbers: Tensor) -> Tensor:
        """Return the elementwise sum of a tensor over all processes; on a GPU, without waiting for the result."""
        if self.count > 1:
            numbers = numbers.clone()
            dist.all_reduce(numbers)
        return numbers

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return self.sum(float(flag))[0] > 0

    def most(self, value: int) -> int:
        """Return the largest value in all processes."""
        if self.count == 1:
            return value
        largest = torch.tensor([value])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """Return the tensors of all processes (one shape), on the CPU of process 0; return None in other processes."""
        tensor = tensor.detach().cpu().contiguous()
        if self.count == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.count)] if self.is_first else None
        dist.gather(tensor, parts)
        return parts

    def first_does(self, name: str, action: Callable[[], T]) -> T:
        """Call `action` in process 0 while the others wait without a limit; return its JSON value in all processes.

        If it fails, process 0 raises its exception, and the others `ProcessLost`. Each `name` is used once.
        """
        if self.count == 1:
            return action()
        assert self._store is not None
        # A store, not a barrier: a corpus may take hours to prepare, and no exchange waits that long.
        if not self.is_first:
            while not self._store.check([name]):
                time.sleep(0.05)
            outcome = json.loads(self._store.get(name))
            if not outcome:
                raise ProcessLost(quiet=True)
            return outcome[0]
        try:
            result = action()
        except BaseException:
            self._store.set(name, "[]")
            raise
        self._store.set(name, json.dumps([result]))
        return result


def process_count(variable: Literal["WORLD_SIZE", "LOCAL_WORLD_SIZE"] = "WORLD_SIZE") -> int:
    """Return the number of processes that torchrun started in all, or on this machine; 1 without torchrun."""
    text = os.environ.get(variable) or "1"
    try:
        return int(text)
    except ValueError:
        raise UserError(f"the environment variable {variable} is {text!r}; expected a number of processes") from None


@contextmanager
def processes_of(device: str) -> Iterator[tuple[Processes, str]]:
    """Connect the processes that torchrun started (if any), and yield them with the device of this process.

    For the device "cuda", each process of a machine gets its own GPU.
    """
    count, here = process_count(), process_count("LOCAL_WORLD_SIZE")
    if device.startswith("cuda:"):
        if count > 1 and here > 1 and torch.cuda.device_count() > 1:
            problem = f"one GPU, and {here} processes run here"
            raise UserError(problem, field="device", value=device, remedy=("use ", Field("device", "cuda")))
        torch.cuda.set_device(device)
    if count < 2 or "RANK" not in os.environ:
        yield Processes(), device
        return
    for name, most in (("RANK", count - 1), ("MASTER_PORT", 65535), ("MASTER_ADDR", None)):
        text = os.environ.get(name, "")
        if not text or (most is not None and not (text.isascii() and text.isdecimal() and int(text) <= most)):
            expected = "the name of a machine" if most is None else f"a number from 0 to {most}"
            remedy = "start several processes with torchrun, or unset WORLD_SIZE to train in one"
            raise UserError(f"the environment variable {name} is {text!r}; expected {expected}", remedy=remedy)
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    store, rank, count = next(rendezvous("env://", timeout=_TIMEOUT))
    # Torchrun's store keeps its values; under a name of its own, a second run in the same processes reads none of them.
    time_here = store.add(f"begun-{rank}", 1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        store=PrefixStore(f"groups-{time_here}", store),
        rank=rank,
        world_size=count,
        timeout=_TIMEOUT,
    )
    try:
        yield Processes(rank, count, PrefixStore(f"txl-{time_here}", store)), device
        dist.barrier()  # a process that leaves early looks like one that died
    except BaseException as error:
        if not device.startswith("cuda"):  # NCCL might wait for a process that has died
            with suppress(RuntimeError):  # the first error tells more
                dist.destroy_process_group()
        if isinstance(error, RuntimeError) and is_lost_peer(error):
            reason = str(error).partition("\n")[0][:200]
            raise ProcessLost(f"another process of this run has died ({reason}); run the same command again") from None
        raise
    dist.destroy_process_group()


def is_lost_peer(error: Exception) -> bool:
    """Return whether an exchange between processes has failed because another process has died."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_LOST_PEER.search(str(error)))
