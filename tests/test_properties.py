"""Random shapes, layouts, groups and hyper-parameters against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithms import ALGORITHMS, Algorithm, Hyper
from helpers import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from layouts import LAYOUTS
from pair import Pair
from torch import Tensor
from torch.nn import Parameter

hypers = st.builds(
    Hyper,
    lr=st.sampled_from([0.0, 1e-4, 1e-2, 0.3, 1.0, 50.0]),
    beta1=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    beta2=st.sampled_from([0.0, 0.9, 0.999]),
    eps=st.sampled_from([1e-8, 1e-3, 1.0]),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.1]),
    step_cap=st.sampled_from([None, 0.05, 3.0]),
    spectral=st.sampled_from(["flat", False]),
)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.tuples(st.integers(0, 3000))
tensors = st.tuples(
    shapes, st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS)), st.booleans()
)
groups = st.lists(
    st.tuples(hypers, st.lists(tensors, min_size=1, max_size=4)), min_size=1, max_size=3
)
options = st.fixed_dictionaries(
    {
        "loss_floor": st.sampled_from([0.0, -1.0, 0.5]),
        "loss_target": st.sampled_from([0.0, 0.8]),
        "decay_form": st.sampled_from(["paper", "adamw"]),
        "max_grad_norm": st.sampled_from([None, 0.1, 1e3]),
    }
)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@given(
    groups=groups,
    options=options,
    above_floor=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_any_problem(
    algorithm: Algorithm,
    backend: str,
    groups: list[tuple[Hyper, list[tuple[tuple[int, ...], str, str, bool]]]],
    options: dict[str, Any],
    above_floor: float,
    seed: int,
) -> None:
    """Two steps; every parameter and gradient in a layout of its own, some without gradient."""
    if algorithm.name == "NGNMDv1W":  # which is a form of its own
        options = {**options, "decay_form": "paper"}
    dtype = DTYPES[backend][0]
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...], layout: str, scale: float) -> Tensor:
        values = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return LAYOUTS[layout](values.to(dtype))

    columns = [[Parameter(draw(s, here, 0.5)) for s, here, _, _ in rows] for _, rows in groups]
    optimizer = algorithm.build(columns, [hyper for hyper, _ in groups], **options, backend=backend)
    pair = Pair(algorithm, optimizer, **options)
    for _ in range(2):
        for (_, rows), params in zip(groups, columns, strict=True):
            for p, (shape, _, there, has_gradient) in zip(params, rows, strict=True):
                p.grad = draw(shape, there, 0.1) if has_gradient else None
        pair.checked_step(options["loss_floor"] + above_floor)
