"""AdamW's form of weight decay: every algorithm on every engine, and what it means beside torch's AdamW."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from algorithms import ALGORITHMS, TWO_GROUPS, Algorithm, NGNMDv1, NGNMDv1W
from helpers import SHAPES, params_of, random_columns, random_gradients
from pair import Pair
from torch.nn import Parameter

EVERY_FORM = pytest.mark.parametrize(
    "algorithm", [a for a in ALGORITHMS if a.name != "NGNMDv1W"], ids=str
)


@EVERY_FORM
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("clipping", [None, 0.7], ids=["", "clipping"])
def test_steps(
    algorithm: Algorithm, cap: float | None, clipping: float | None, backend: str
) -> None:
    """The form, the lr and the momentum change between steps."""
    options = {"max_grad_norm": clipping, "loss_target": 0.5}
    hypers = [TWO_GROUPS[0]._replace(step_cap=cap), TWO_GROUPS[1]]
    optimizer = algorithm.build(
        random_columns(SHAPES), hypers, backend=backend, decay_form="adamw", **options
    )
    for k, form in enumerate(("adamw", "adamw", "paper", "adamw")):
        optimizer.decay_form = form
        optimizer.param_groups[1].update(algorithm.values(TWO_GROUPS[1]._replace(lr=0.1 * k)))
        random_gradients(params_of(optimizer), seed=k)
        Pair(algorithm, optimizer, decay_form=form, **options).checked_step(0.8)


@EVERY_FORM
@pytest.mark.parametrize("state", ["bfloat16", "8bit"])
def test_narrow_state(algorithm: Algorithm, state: str, backend: str) -> None:
    optimizer = algorithm.build(
        random_columns(([(70, 65)], [(3, 7)])), backend=backend, decay_form="adamw", state=state
    )
    pair = Pair(algorithm, optimizer, decay_form="adamw")
    for k in range(3):
        random_gradients(params_of(optimizer), seed=k)
        pair.checked_step(0.8)


def test_decay_follows_the_step_size_that_is_taken(backend: str) -> None:
    """lr does not matter where the loss holds it back, and neither does it for decay."""
    left = []
    for lr in (1e-2, 1.0, 100.0):
        p = Parameter(torch.tensor([1.0, 4.0], dtype=torch.float64))
        optimizer = NGNMDv1.simple(
            [p], lr=lr, weight_decay=0.1, decay_form="adamw", backend=backend
        )
        for _ in range(20):
            p.grad = torch.tensor([1.0, 0.0], dtype=torch.float64)
            optimizer.step(loss=1e-4)
        left.append(1 - p[1].item() / 4)
    gamma = 2e-4  # 2h / Q of this loss and gradient
    assert left == pytest.approx([20 * 0.1 * gamma] * 3, rel=0.03)


def test_a_recipe_decays_as_with_adamw(backend: str) -> None:
    """With zero gradients: 200 steps at lr 1e-3 and a decay of 0.1."""
    columns = [[torch.full((3,), 2.0)] for _ in range(2)]
    ours, theirs = (Parameter(column[0]) for column in columns)
    optimizers = [
        NGNMDv1.simple([ours], lr=1e-3, weight_decay=0.1, decay_form="adamw", backend=backend),
        torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.1),
    ]
    for _ in range(200):
        ours.grad, theirs.grad = torch.zeros(3), torch.zeros(3)
        optimizers[0].step(loss=1.0)
        optimizers[1].step()
    ours, theirs = ours.detach(), theirs.detach()
    assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-5)
    assert ours[0] == pytest.approx(2 * 0.9802, rel=1e-3)


def test_where_rho_is_1_it_is_adamw(backend: str) -> None:
    """A floor far below the loss; AdamW's own correction of its momentum is left out by a warm start."""
    p, q = Parameter(torch.linspace(-1, 1, 7)), Parameter(torch.linspace(-1, 1, 7))
    ours = NGNMDv1.simple(
        [p], lr=0.01, weight_decay=0.3, decay_form="adamw", loss_floor=-1e30, backend=backend
    )
    theirs = torch.optim.AdamW([q], lr=0.01, weight_decay=0.3)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.rand(7, generator=generator) + 0.5
    for _ in range(400):  # a constant gradient: D is constant, both momenta have settled
        p.grad, q.grad = gradient.clone(), gradient.clone()
        ours.step(loss=0.0)
        theirs.step()
    before = p.detach().clone(), q.detach().clone()
    p.grad, q.grad = gradient.clone(), gradient.clone()
    ours.step(loss=0.0)
    theirs.step()
    assert float(ours.shrink) == 1.0
    q.data, decay = before[0] + (q.detach() - before[1]), 0.01 * 0.3 * (before[0] - before[1])
    assert torch.allclose(p, q - decay, atol=2e-7)


def test_checkpoints_and_copies(backend: str) -> None:
    """A loading optimizer keeps its own form, and says that the other was another."""

    def made(form: str) -> Any:
        optimizer = NGNMDv1.simple([Parameter(torch.ones(3))], decay_form=form, backend=backend)
        params_of(optimizer)[0].grad = torch.ones(3)
        optimizer.step(loss=1.0)
        return optimizer

    saved, loading = made("adamw"), made("paper")
    with pytest.warns(UserWarning, match=r"decay_form=.*adamw.*goes on with decay_form=.*paper"):
        loading.load_state_dict(saved.state_dict())
    assert loading.decay_form == "paper"
    assert copy.deepcopy(saved).decay_form == "adamw"
    assert copy.deepcopy(saved).rule == saved.rule


def test_bad_forms_are_refused() -> None:
    p = Parameter(torch.ones(3))
    for value in ("AdamW", None, True, "regularised"):
        with pytest.raises(ValueError, match=r'decay_form=.*must be "paper" or "adamw"'):
            NGNMDv1.simple([p], decay_form=value)
    with pytest.raises(ValueError, match=r"NGNMDv1W is a form of .*use NGNMDv1\(.*adamw"):
        NGNMDv1W.simple([p], decay_form="adamw")
    with pytest.raises(ValueError, match="decay_form is an option of the whole optimizer"):
        NGNMDv1.simple([{"params": [p], "decay_form": "adamw"}])
