"""A model on many ranks takes the steps of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from algorithms import EVERY, Algorithm
from helpers import bits
from torch import Tensor

from ranks.layouts import LAYOUTS, Trained, train_whole
from ranks.narrow import NARROW, SAME_CODES, TOLERANCES
from ranks.pool import Pool

CASES = [
    pytest.param(layout, size, id=f"{layout}-{size}")
    for layout, (_, sizes) in LAYOUTS.items()
    for size in sizes
]


@cache
def expected(algorithm: str, **options: Any) -> list[dict[str, Tensor]]:
    """What the whole model was, at first and after each step."""
    return train_whole(algorithm, **options)


def trained(
    layout: str, size: int, pool: Pool, twice: bool, **options: Any
) -> list[dict[str, Tensor]]:
    """The whole model after each step, once all ranks have been found to hold the same."""
    task = {"layout": layout, "backend": "cpu" if size == 2 else "reference", **options}
    answers: list[Trained] = pool.run("ranks.layouts", "train", **task)
    first = answers[0]
    for rank, (seen, contents) in enumerate(answers):
        for k, step in enumerate(seen):
            for name, tensor in step.items():
                assert bits(tensor) == bits(first.seen[k][name]), f"{name} on {rank} after {k}"
        for k, parts in enumerate(contents):
            for name, part in parts.items():
                for other in answers[:rank]:
                    assert other.contents[k].get(name, part) == part, f"{name} on {rank} after {k}"
    if twice:
        again: list[Trained] = pool.run("ranks.layouts", "train", **task)
        assert [a.contents for a in again] == [a.contents for a in answers]
    return first.seen


@EVERY
@pytest.mark.parametrize("clipping", [None, 0.1], ids=["", "clipping"])
@pytest.mark.parametrize(("layout", "size"), CASES)
def test_steps_are_those_of_one_process(
    layout: str,
    size: int,
    algorithm: Algorithm,
    clipping: float | None,
    ranks: Callable[[int], Pool],
) -> None:
    options = {"algorithm": str(algorithm), "max_grad_norm": clipping}
    seen = trained(layout, size, ranks(size), twice=clipping is None, **options)
    for k, wanted in enumerate(expected(**options)[1:]):  # type: ignore[arg-type]
        for name, tensor in wanted.items():
            error = (seen[k][name] - tensor).abs().max()
            assert error < 1e-11, f"{name} after step {k}: {error}"


def test_the_steps_differ_from_each_other() -> None:
    """Otherwise the comparison would say nothing."""
    _, first, *_, last = expected("NGNMDv1", max_grad_norm=None)
    assert all(not torch.equal(first[name], last[name]) for name in first)


# Matrices whose shards begin at whole blocks and follow each other in memory, on all ranks.
BOTH = ("0.weight", "2.weight")
ALIGNED: dict[tuple[str, int], tuple[str, ...]] = {
    ("ddp", 2): BOTH,
    ("ddp", 4): BOTH,
    ("fsdp2", 2): BOTH,
    ("fsdp2", 4): ("2.weight",),
    ("hsdp", 4): BOTH,
    ("mixed", 2): BOTH,
}


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize(("layout", "size"), CASES)
def test_narrow_numbers(layout: str, size: int, narrow: str, ranks: Callable[[int], Pool]) -> None:
    options = {"algorithm": "NGNMDv1", **NARROW[narrow]}
    start, *steps = expected(**options)
    seen = trained(layout, size, ranks(size), twice=True, **options)
    for k, wanted in enumerate(steps):
        for name, tensor in wanted.items():
            aligned = name in ALIGNED.get((layout, size), ()) and tensor.dtype == torch.float32
            tolerance = SAME_CODES if aligned else TOLERANCES[narrow]
            moved = (steps[-1][name] - start[name]).float().norm()
            error = (seen[k][name] - tensor).float().norm() / moved
            assert error < tolerance, f"{name} after step {k}: {error}"
