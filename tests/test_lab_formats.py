"""The simulation behind docs/precision.md, shortened: each format within its targets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ngn_bench.lab import formats_study
from ngn_bench.lab.formats_study import OFFERED, REFUSED, Case, reach, study, study_table

CASES = (Case(0.999, 2), Case(0.95, 2))
TARGETS = {
    '`"bfloat16"`': (1.0, 1.5),
    '`("8bit", "bfloat16")`': (1.0, 1.5),
    '`"8bit"`': (1.0, 5.0),
}
"""In per cent: of Q, and of the displacement where a block's sizes spread over two decades."""
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_formats_stay_within_their_targets() -> None:
    errors = study(OFFERED, CASES, steps=400, elements=2048)
    assert errors.keys() == TARGETS.keys()
    for name, (q, displacement) in TARGETS.items():
        for error in errors[name]:
            assert 0 < error.q < q, name
            assert 0 < error.displacement < displacement, name


def test_what_is_not_offered_does_not() -> None:
    """The study can tell: to nearest v stands still, and the roots lose what is small."""
    errors = study(REFUSED, CASES[:1], steps=400, elements=2048)
    (nearest,) = errors["v to the nearest bfloat16"]
    assert nearest.q > 2
    (root,) = errors["v as a byte of its root"]
    assert root.displacement > 5


def test_what_is_too_small_for_its_block_moves_too_little_never_too_far() -> None:
    near, far = reach(OFFERED['`"8bit"`'], steps=300, elements=1024)
    assert 0.3 < near < 0.8
    assert 0 < far < 0.15


def test_the_kept_study_is_within_the_targets_over_the_whole_run() -> None:
    record = json.loads((ROOT / "bench" / "results" / "formats.json").read_text("utf-8"))
    assert (record["steps"], record["elements"]) == (formats_study.STEPS, formats_study.ELEMENTS)
    for case in map(str, CASES):
        place = record["cases"].index(case)
        for name, target in TARGETS.items():
            assert all(e < t for e, t in zip(record["errors"][name][place], target, strict=True))
    rows = {row[0]: row[1:] for row in study_table(record).rows}
    q, displacement = record["errors"]['`"8bit"`'][1]
    assert rows['`"8bit"`'][1] == f"{q:.2f} / {displacement:.2f}"
