"""Ranks that are started once and then run one task after the other."""

from __future__ import annotations

import importlib
import os
import socket
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 120  # seconds that a task may take


class Failed:
    """An exception on a rank."""

    def __init__(self, error: BaseException) -> None:
        self.kind = type(error).__name__
        self.text = str(error)
        self.traceback = traceback.format_exc()


def _serve(rank: int, size: int, port: int, pipe: Connection, backend: str = "gloo") -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    while True:
        task = pipe.recv()
        if task is None:
            break
        module, name, arguments = task
        try:
            answer = getattr(importlib.import_module(module), name)(**arguments)
        except Exception as error:
            answer = Failed(error)
        pipe.send(answer)
    dist.destroy_process_group()


class Pool:
    """`size` processes of one group on this machine."""

    def __init__(self, size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, module: str, name: str, **arguments: Any) -> list[Any]:
        """Each rank's answer; a rank that raised gives a Failed."""
        for pipe in self.pipes:
            pipe.send((module, name, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"rank {rank} hangs in {name}({arguments})")
            answers.append(pipe.recv())
        return answers

    def run(self, module: str, name: str, **arguments: Any) -> list[Any]:
        """The same, where no rank may raise."""
        answers = self.ask(module, name, **arguments)
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failed):
                raise AssertionError(f"rank {rank}: {answer.traceback}")
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
