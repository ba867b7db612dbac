"""A run that is saved on some ranks goes on, with the same numbers, on any others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from ranks.checkpoints import resume, save, uninterrupted
from ranks.pool import Pool

MODULE = "ranks.checkpoints"
WAYS = [
    (("fsdp2", 4), ("fsdp2", 2)),
    (("fsdp2", 2), ("whole", 1)),
    (("whole", 1), ("fsdp2", 4)),
    (("fsdp2", 4), ("hsdp", 4)),
    (("hsdp", 4), ("ddp", 2)),
    (("two_d", 4), ("fsdp2", 2)),
    (("tp", 2), ("two_d", 4)),
]


@cache
def expected(algorithm: str) -> list[dict[str, Tensor]]:
    return uninterrupted(algorithm)


def check(seen: list[dict[str, Tensor]], algorithm: str) -> None:
    for k, (step, wanted) in enumerate(zip(seen, expected(algorithm), strict=True)):
        for name, tensor in wanted.items():
            error = (step[name] - tensor).abs().max()
            assert error < 1e-11, f"{name}, {k + 1} steps after loading: {error}"


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("algorithm", ["NGNMDv1", "NGNM"])
@pytest.mark.parametrize(("source", "target"), WAYS, ids=lambda way: f"{way[0]}-{way[1]}")
def test_training_goes_on_elsewhere(
    source: tuple[str, int],
    target: tuple[str, int],
    algorithm: str,
    flat: bool,
    tmp_path: Path,
    ranks: Callable[[int], Pool],
) -> None:
    task = {"algorithm": algorithm, "flat": flat, "folder": str(tmp_path)}
    if source[0] == "whole":
        save("whole", **task)  # type: ignore[arg-type]
    else:
        ranks(source[1]).run(MODULE, "save", layout=source[0], **task)
    if target[0] == "whole":
        check(resume("whole", **task), algorithm)  # type: ignore[arg-type]
        return
    for seen in ranks(target[1]).run(MODULE, "resume", layout=target[0], **task):
        check(seen, algorithm)


@pytest.mark.parametrize("algorithm", ["NGNMDv1", "NGNM"])
def test_zero_redundancy_consolidation(algorithm: str, ranks: Callable[[int], Pool]) -> None:
    for seen in ranks(2).run(MODULE, "zero_consolidation", algorithm=algorithm):
        check(seen, algorithm)
