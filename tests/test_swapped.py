"""Tensors that are swapped between steps: parameters, state, whole dtypes."""

from __future__ import annotations

import numpy as np
import torch
from algorithms import EVERY, Algorithm
from helpers import GPU_ENGINES, fresh, params_of, random_gradients, real64
from pair import Pair
from steps import check_next_step
from torch.nn import Parameter


@EVERY
def test_model_turned_double(algorithm: Algorithm, backend: str) -> None:
    """`model.double()` changes the parameters under the optimizer; the state goes on."""
    model = torch.nn.Linear(6, 4)
    pair = Pair(algorithm, algorithm.simple(model.parameters(), backend=backend))
    for k in range(4):
        if k == 2:
            if backend in GPU_ENGINES:
                break
            model.double()
        random_gradients(model.parameters(), seed=k)
        pair.step(1.0)
        for p, x in zip(params_of(pair.optimizer), pair.oracle.groups[0].variables, strict=True):
            np.testing.assert_allclose(real64(p), x.x, rtol=1e-5, atol=1e-7)


@EVERY
def test_state_replaced_between_steps(algorithm: Algorithm, backend: str) -> None:
    optimizer = fresh(algorithm, backend)
    pair = Pair(algorithm, optimizer)
    pair.step(1.0)
    for p in params_of(optimizer):
        for key in {"momentum_buffer", "exp_avg_sq"} & set(optimizer.state[p]):
            optimizer.state[p][key] = optimizer.state[p][key] * 2 + 1e-3
    pair.checked_step(1.0)
    for p in params_of(optimizer):
        for key in {"momentum_buffer", "exp_avg_sq"} & set(optimizer.state[p]):
            optimizer.state[p][key].mul_(0.5)
    pair.checked_step(1.0)


@EVERY
def test_state_cleared_between_steps(algorithm: Algorithm, backend: str) -> None:
    optimizer = fresh(algorithm, backend)
    pair = Pair(algorithm, optimizer)
    pair.step(1.0)
    optimizer.state.clear()
    pair.checked_step(1.0)


@EVERY
def test_parameter_replaced_in_its_group(algorithm: Algorithm, backend: str) -> None:
    """Trainers that swap tensors inside `param_groups` get what they put there."""
    optimizer = fresh(algorithm, backend)
    optimizer.step(loss=1.0)
    replaced = Parameter(torch.linspace(-1, 1, 35).view(5, 7))
    optimizer.param_groups[0]["params"][1] = replaced
    check_next_step(algorithm, optimizer, seed=4, loss=1.0)
