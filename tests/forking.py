"""Processes of their own for tests, forked from a server that has imported PyTorch: a start takes milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["txl.cli", "txl.training.trainer", "torch.distributed.fsdp"])


def start(arguments: Sequence[str], errors: Path, count: int = 1) -> Sequence[BaseProcess]:
    """Start a command of txl in `count` processes, with the environment that torchrun gives to them.

    Args:
        arguments: words of the command.
        errors: file to which the standard error of all processes is appended.
        count: number of processes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    several = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [several | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)] if count > 1 else [{}]
    processes = [SERVER.Process(target=_command, args=(arguments, errors, each)) for each in environments]
    for process in processes:
        process.start()
    return processes


def run(arguments: Sequence[str], errors: Path, count: int = 1, timeout: float = 300) -> CompletedProcess[str]:
    """Run a command of txl in `count` processes to its end; if one of them fails, kill the others.

    Returns:
        The largest exit code, and the standard error of all processes together.
    """
    processes, deadline = start(arguments, errors, count), time.monotonic() + timeout
    while any(each.is_alive() for each in processes):
        if time.monotonic() > deadline or any(each.exitcode for each in processes):
            kill(processes)
        time.sleep(0.01)
    codes = [abs(each.exitcode or 0) for each in processes]
    return CompletedProcess(list(arguments), max(codes), stderr=errors.read_text())


def kill(processes: Sequence[BaseProcess]) -> None:
    """Kill processes, and wait until they are gone."""
    for each in processes:
        each.kill()
    for each in processes:
        each.join()


def _command(arguments: Sequence[str], errors: Path, environment: dict[str, object]) -> None:
    from txl.cli import main

    os.environ.update({name: str(value) for name, value in environment.items()})
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.exit(main(arguments))
