"""Random shapes, layouts, groups and hyper-parameters against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import ALGORITHMS, DTYPES, Algorithm, Hyper, Pair, parameter
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

LAYOUTS = ("contiguous", "transposed", "strided", "offset")

hypers = st.builds(
    Hyper,
    lr=st.sampled_from([0.0, 1e-4, 1e-2, 0.3, 1.0, 50.0]),
    beta1=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    beta2=st.sampled_from([0.0, 0.9, 0.999]),
    eps=st.sampled_from([1e-8, 1e-3, 1.0]),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.1]),
)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.tuples(st.integers(0, 3000))
tensors = st.tuples(shapes, st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.booleans())
groups = st.lists(
    st.tuples(hypers, st.lists(tensors, min_size=1, max_size=4)), min_size=1, max_size=3
)
options = st.fixed_dictionaries(
    {
        "loss_floor": st.sampled_from([0.0, -1.0, 0.5]),
        "max_grad_norm": st.sampled_from([None, 0.1, 1e3]),
    }
)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout."""
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and values.dim():
        gaps = torch.full((*values.shape[:-1], 2 * values.shape[-1]), torch.nan, dtype=values.dtype)
        return gaps[..., ::2].copy_(values)
    if layout == "offset":
        return torch.cat([values.new_full((1,), torch.nan), values.flatten()])[1:].view(
            values.shape
        )
    return values


@pytest.mark.essential
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@given(
    groups=groups,
    options=options,
    height=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_any_problem(
    algorithm: Algorithm,
    backend: str,
    groups: list[tuple[Hyper, list[tuple[tuple[int, ...], str, str, bool]]]],
    options: dict[str, Any],
    height: float,
    seed: int,
) -> None:
    """Two steps; every parameter and gradient in a layout of its own, some without gradient."""
    dtype = DTYPES[backend][0]
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...], layout: str, scale: float) -> Tensor:
        values = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return laid_out(values.to(dtype), layout)

    columns = [[parameter(draw(s, here, 0.5)) for s, here, _, _ in rows] for _, rows in groups]
    optimizer = algorithm.build(columns, [hyper for hyper, _ in groups], **options, backend=backend)
    pair = Pair(algorithm, optimizer, **options)
    for _ in range(2):
        for (_, rows), params in zip(groups, columns, strict=True):
            for p, (shape, _, there, has_gradient) in zip(params, rows, strict=True):
                p.grad = draw(shape, there, 0.1) if has_gradient else None
        pair.sync()
        pair.step(options["loss_floor"] + height)
        pair.check_step()
