"""A model on many ranks takes the steps of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from algorithms import EVERY, Algorithm
from torch import Tensor

from ranks.layouts import LAYOUTS, train_whole
from ranks.pool import Pool

CASES = [
    pytest.param(layout, size, id=f"{layout}-{size}")
    for layout, (_, sizes) in LAYOUTS.items()
    for size in sizes
]


@cache
def expected(algorithm: str, max_grad_norm: float | None) -> list[dict[str, Tensor]]:
    return train_whole(algorithm, max_grad_norm=max_grad_norm)


def bits(step: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in step.items()}


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
    task: dict[str, Any] = {"layout": layout, "algorithm": str(algorithm)}
    task |= {"max_grad_norm": clipping, "backend": "cpu" if size == 2 else "reference"}
    answers = ranks(size).run("ranks.layouts", "train", **task)
    for k, wanted in enumerate(expected(str(algorithm), clipping)):
        for rank in range(1, size):
            assert bits(answers[rank][k]) == bits(answers[0][k]), f"rank {rank} after step {k}"
        for name, tensor in wanted.items():
            error = (answers[0][k][name] - tensor).abs().max()
            assert error < 1e-11, f"{name} after step {k}: {error}"
    if clipping is not None:
        return
    again = ranks(size).run("ranks.layouts", "train", **task)
    assert [bits(step) for step in again[0]] == [bits(step) for step in answers[0]]


def test_the_steps_differ_from_each_other() -> None:
    """Otherwise the comparison would say nothing."""
    first, *_, last = expected("NGNMDv1", None)
    assert all(not torch.equal(first[name], last[name]) for name in first)
