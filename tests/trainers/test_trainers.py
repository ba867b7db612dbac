"""Each trainer ends where the hand-written loop ends: the table of cells."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import runs
from byhand import (
    DIVIDE_BY_LENGTH,
    DIVIDE_BY_SETTING,
    Case,
    Model,
    by_hand,
    distance,
    unbroken_windows,
    windows,
)

from ngn_kernels import SkippedStepWarning

CASES = {
    "plain": Case(),
    "accumulation": Case(accumulate=4),
    "clipping": Case(clip=0.05),
    "bf16": Case(bf16=True),
    "bf16 clipping": Case(bf16=True, clip=0.05),
    "fp16 overflow": Case(overflow=3),
    "fp16 accumulation overflow": Case(accumulate=4, overflow=3),
    "fp16 clipping overflow": Case(overflow=3, clip=0.05),
    "schedule": Case(schedule=True),
    "accumulation schedule": Case(accumulate=4, schedule=True),
    "label smoothing": Case(smoothing=0.1),
    "accumulation label smoothing": Case(accumulate=4, smoothing=0.1),
    "items": Case(items=True),
    "accumulation items": Case(accumulate=4, items=True),
}
OF_ALL = ("plain", "accumulation", "clipping")
OF_MOST = (*OF_ALL, "bf16", "bf16 clipping", "fp16 overflow", "fp16 accumulation overflow")
OF_MOST = (*OF_MOST, "schedule", "accumulation schedule")
OF_HF = (*OF_MOST, "label smoothing", "accumulation label smoothing", "items", "accumulation items")
ITEMS = ("items", "accumulation items")
MANUAL = (*OF_ALL, "bf16", "fp16 overflow", "accumulation schedule")
CLIPPED = "fp16 clipping overflow"
# What runs it, its cases, how it divides the loss, and its windows.
TRAINERS: dict[str, tuple[Any, tuple[str, ...], Any, Any]] = {
    "transformers": (runs.transformers, OF_HF, DIVIDE_BY_LENGTH, windows),
    "transformers, compute_loss_func": (
        *(runs.transformers_loss_func, ITEMS, DIVIDE_BY_LENGTH, windows),
    ),
    "transformers, late optimizer": (runs.transformers_late, OF_ALL, DIVIDE_BY_LENGTH, windows),
    "accelerate": (runs.accelerate, OF_MOST, DIVIDE_BY_SETTING, windows),
    "lightning": (runs.lightning, (*OF_MOST, CLIPPED), DIVIDE_BY_SETTING, windows),
    "pytorch_lightning": (runs.pytorch_lightning, (*OF_ALL, CLIPPED), DIVIDE_BY_SETTING, windows),
    "lightning, manual": (runs.lightning_manual, MANUAL, DIVIDE_BY_SETTING, windows),
    "fabric": (runs.fabric, (*OF_ALL, "bf16"), DIVIDE_BY_SETTING, unbroken_windows),
    "ignite": (runs.ignite, ("plain", "accumulation"), DIVIDE_BY_SETTING, unbroken_windows),
}
CELLS = [
    pytest.param(run, CASES[case], divide, windows_of, id=f"{name}: {case}")
    for name, (run, cases, divide, windows_of) in TRAINERS.items()
    for case in cases
]


@pytest.mark.parametrize(("run", "case", "divide", "windows_of"), CELLS)
def test_a_trainer_ends_where_the_loop_ends(
    run: Any, case: Case, divide: Any, windows_of: Any
) -> None:
    with warnings.catch_warnings():
        if case.overflow:
            warnings.simplefilter("ignore", SkippedStepWarning)
        trained = run(case)
        expected = by_hand(case, divide, windows_of)
        wrong = by_hand(case, divide, windows_of, factor=0.5)
    tolerance = 1e-5 if case.clip else 1e-6
    assert distance(expected, Model()) > 0.05
    assert distance(expected, wrong) > 100 * tolerance
    assert distance(trained, expected) <= tolerance
