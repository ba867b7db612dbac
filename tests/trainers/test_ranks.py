"""Two gloo ranks: replicas stay bit-equal and end where one process with all the data ends."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from byhand import DIVIDE_BY_LENGTH, DIVIDE_BY_SETTING, Case, Model, by_hand, distance

WORKER = Path(__file__).with_name("ranks.py")


def free_port() -> int:
    """Below those that the system gives away: it is bound only after the imports of a rank."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", port))
            return port
    raise OSError("no port is free")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What the two ranks left, a directory each; all runs in one pair of processes."""
    directories = [tmp_path_factory.mktemp(f"rank{rank}") for rank in range(2)]
    port = free_port()
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    world |= {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    # As torchrun would set it: Lightning then starts no processes of its own.
    world |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(directory)],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=directory,
        )
        for rank, directory in enumerate(directories)
    ]
    try:
        texts = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, texts, strict=True):
        if process.returncode:
            raise RuntimeError(text[-3000:])
    return directories


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("name", "divide"),
    [("transformers", DIVIDE_BY_LENGTH), ("lightning", DIVIDE_BY_SETTING)],
    ids=["transformers", "lightning"],
)
def test_two_ranks(name: str, divide: Any, accumulate: int, ranks: list[Path]) -> None:
    """Rank r has micro-batches r, r + 2, ...: a step of both is a window of twice the length."""
    one, other = Model(), Model()
    for model, directory in zip((one, other), ranks, strict=True):
        model.load_state_dict(torch.load(directory / f"{name}-{accumulate}.pt"))
    expected = by_hand(Case(accumulate=2 * accumulate), divide)
    assert distance(expected, Model()) > 0.05
    assert distance(one, other) == 0.0
    assert distance(one, expected) <= 1e-6
