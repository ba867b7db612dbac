"""A run that is saved on some ranks goes on, with the same numbers, on any others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.checkpoints import Options, resume, save, uninterrupted
from ranks.layouts import Trained, train_whole
from ranks.narrow import NARROW, TOLERANCES
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
Place = tuple[str, int]


@cache
def expected(algorithm: str, narrow: str | None = None) -> list[dict[str, Tensor]]:
    options = {} if narrow is None else {"options": NARROW[narrow]}
    return uninterrupted("whole", algorithm, **options).seen


def saved(place: Place, ranks: Callable[[int], Pool], **task: Any) -> list[dict[str, Tensor]]:
    layout, size = place
    if layout == "whole":
        return save(layout, **task)
    return ranks(size).run(MODULE, "save", layout=layout, **task)[0]  # type: ignore[no-any-return]


def resumed(
    place: Place, ranks: Callable[[int], Pool], **task: Any
) -> list[tuple[list[dict[str, Tensor]], Trained]]:
    layout, size = place
    if layout == "whole":
        return [resume(layout, **task)]
    return ranks(size).run(MODULE, "resume", layout=layout, **task)


def check(seen: list[dict[str, Tensor]], algorithm: str) -> None:
    for k, (step, wanted) in enumerate(zip(seen, expected(algorithm), strict=True)):
        for name, tensor in wanted.items():
            error = (step[name] - tensor).abs().max()
            assert error < 1e-11, f"{name}, {k + 1} steps after loading: {error}"


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("algorithm", ["NGNMDv1", "NGNM", "NGNMuon"])
@pytest.mark.parametrize(("source", "target"), WAYS, ids=lambda way: f"{way[0]}-{way[1]}")
def test_training_goes_on_elsewhere(
    source: Place,
    target: Place,
    algorithm: str,
    flat: bool,
    tmp_path: Path,
    ranks: Callable[[int], Pool],
) -> None:
    task = {"algorithm": algorithm, "flat": flat, "folder": str(tmp_path)}
    saved(source, ranks, **task)
    for _, trained in resumed(target, ranks, **task):
        check(trained.seen, algorithm)


@pytest.mark.parametrize("algorithm", ["NGNMDv1", "NGNM"])
def test_zero_redundancy_consolidation(algorithm: str, ranks: Callable[[int], Pool]) -> None:
    for going_on, loaded in ranks(2).run(MODULE, "zero_consolidation", algorithm=algorithm):
        assert loaded.contents == going_on.contents
        check(loaded.seen, algorithm)


def test_zero_redundancy_echoes_all_options(ranks: Callable[[int], Pool]) -> None:
    """Into its groups, where they are compared with those of the optimizer that is being built."""
    options = {**WIDE, "decay_form": "adamw", "nesterov": True, "loss_target": 0.5}
    task = {"algorithm": "NGNMuon", "options": options}
    for going_on, loaded in ranks(2).run(MODULE, "zero_consolidation", **task):
        assert loaded.contents == going_on.contents


# Narrow numbers


@pytest.mark.parametrize(
    ("place", "narrow", "flat"),
    [
        (("fsdp2", 4), "8bit", False),
        (("fsdp2", 2), "exact", True),
        (("hsdp", 4), "exact", False),
        (("tp", 2), "8bit+bfloat16", True),
        (("two_d", 4), "stochastic", False),
        (("mixed", 2), "bfloat16", True),
    ],
)
def test_the_same_layout_goes_on_with_the_same_bits(
    place: Place, narrow: str, flat: bool, tmp_path: Path, ranks: Callable[[int], Pool]
) -> None:
    layout, size = place
    task: dict[str, Any] = {"algorithm": "NGNMDv1", "options": NARROW[narrow]}
    going_on = ranks(size).run(MODULE, "uninterrupted", layout=layout, **task)
    task |= {"flat": flat, "folder": str(tmp_path)}
    saved(place, ranks, **task)
    for wanted, (_, trained) in zip(going_on, resumed(place, ranks, **task), strict=True):
        assert trained.contents == wanted.contents


@pytest.mark.parametrize("narrow", ["8bit", "exact"])
def test_all_state_on_one_rank(narrow: str, ranks: Callable[[int], Pool]) -> None:
    task = {"layout": "fsdp2", "algorithm": "NGNMDv1", "options": NARROW[narrow]}
    for going_on, loaded in ranks(2).run(MODULE, "gathered", **task):
        assert loaded.contents == going_on.contents


def test_narrow_zero_redundancy_consolidation(ranks: Callable[[int], Pool]) -> None:
    task = {"algorithm": "NGNMDv1", "options": NARROW["exact"]}
    for going_on, loaded in ranks(2).run(MODULE, "zero_consolidation", **task):
        assert loaded.contents == going_on.contents


WIDE: Options = {"dtype": torch.float32}
# A step of the 8-bit codes, as a share of the numbers: linear in m, and at most an eighth of each v.
CODES = {"momentum_buffer": 2.0**-6, "exp_avg_sq": 2.0**-3}


@pytest.mark.parametrize(
    ("source", "narrow", "target", "state"),
    [
        (("fsdp2", 4), "8bit", ("fsdp2", 2), "8bit"),
        (("fsdp2", 2), "exact", ("whole", 1), "8bit"),
        (("whole", 1), "exact", ("fsdp2", 4), "8bit"),
        (("whole", 1), "8bit", ("fsdp2", 4), "bfloat16"),
        (("hsdp", 4), "8bit+bfloat16", ("ddp", 2), "float32"),
        (("two_d", 4), "stochastic", ("fsdp2", 2), "8bit"),
        (("tp", 2), "bfloat16", ("two_d", 4), "float32"),
        (("fsdp2", 2), None, ("tp", 4), "8bit"),
    ],
)
def test_narrow_training_goes_on_elsewhere(
    source: Place,
    narrow: str | None,
    target: Place,
    state: str,
    tmp_path: Path,
    ranks: Callable[[int], Pool],
) -> None:
    """With the numbers that were saved, rounded once where the target has other blocks or formats."""
    options = WIDE if narrow is None else NARROW[narrow]
    task: dict[str, Any] = {"algorithm": "NGNMDv1", "flat": False, "folder": str(tmp_path)}
    before = saved(source, ranks, options=options, **task)
    start = train_whole("NGNMDv1", options["dtype"])[0]
    for after, trained in resumed(target, ranks, options={**options, "state": state}, **task):
        for wanted, loaded in zip(before, after, strict=True):
            assert set(wanted) == set(loaded)
            for key, numbers in wanted.items():
                if state == "float32" or key in ("remainder", "step"):
                    assert torch.equal(loaded[key].to(numbers.dtype), numbers), key
                else:
                    error = (loaded[key].float() - numbers.float()).norm() / numbers.float().norm()
                    assert error < CODES[key], f"{key}: {error}"
        tolerance = max(TOLERANCES[narrow or "bfloat16"], TOLERANCES.get(state, 0.0))
        for k, wanted in enumerate(expected("NGNMDv1", narrow)):
            for name, tensor in wanted.items():
                moved = (tensor - start[name]).float().norm()
                error = (trained.seen[k][name] - tensor).float().norm() / moved
                assert error < tolerance, f"{name}, {k + 1} steps after loading: {error}"
