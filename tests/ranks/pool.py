"""Ranks that are started once and then run one task after the other."""

from __future__ import annotations

import importlib
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 240  # seconds that a task may take, on a machine that does much else
HOST = "127.0.0.1"


class Failed:
    """An exception on a rank, or in place of its answer."""

    def __init__(self, error: BaseException) -> None:
        self.traceback = "".join(traceback.format_exception(error))


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, is_master=False)
    timeout = timedelta(seconds=TIMEOUT / 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
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
        # It takes a free port by itself: one that is only looked for may be gone when it is needed.
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        self.broken = False
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, self.store.port, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, module: str, name: str, **arguments: Any) -> list[Any]:
        """Each rank's answer. If one raises, others may wait for it: then all of them are ended."""
        for pipe in self.pipes:
            pipe.send((module, name, arguments))
        deadline = time.monotonic() + TIMEOUT
        answers = [self._answer(pipe, deadline) for pipe in self.pipes]
        failed = {r: a.traceback for r, a in enumerate(answers) if isinstance(a, Failed)}
        if failed:
            self.kill()
            told = "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise AssertionError(f"{name}({arguments})\n{told}")
        return answers

    def _answer(self, pipe: Connection, deadline: float) -> Any:
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pipe.recv()
        except EOFError:
            return Failed(ChildProcessError("it has ended"))
        return Failed(TimeoutError("it hangs"))

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.kill()

    def kill(self) -> None:
        self.broken = True
        for process in self.processes:
            process.kill()
            process.join()
