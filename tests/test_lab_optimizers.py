"""The lab's optimizer registry and the baselines it writes itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from importlib import metadata

import pytest
import torch

pytest.importorskip("momo")
pytest.importorskip("momsps")
pytest.importorskip("pytorch_optimizer")
pytest.importorskip("dadaptation")
pytest.importorskip("prodigyopt")
pytest.importorskip("schedulefree")

from ngn_bench.errors import BenchError
from ngn_bench.lab import optimizers
from ngn_bench.lab.baselines import preconditioner

DATA = torch.tensor([[1.0, 2.0, -1.0], [0.5, -1.0, 3.0]], dtype=torch.float64)
TARGET = torch.tensor([3.0, -2.0], dtype=torch.float64)


def problem() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Two parameters of a small least-squares problem, and its loss with gradients in place."""
    parts = [torch.tensor([0.3, -0.2], dtype=torch.float64), torch.tensor([0.1]).double()]
    for part in parts:
        part.requires_grad_(True)
    return parts, loss_of(parts)


def loss_of(parts: list[torch.Tensor]) -> torch.Tensor:
    for part in parts:
        part.grad = None
    loss = (DATA @ torch.cat(parts) - TARGET).square().sum()
    loss.backward()
    return loss.detach()


def flat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.detach().clone() for part in parts])


def gradient(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.grad for part in parts])  # type: ignore[misc]


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_every_optimizer_lowers_the_loss(name: str) -> None:
    parts, first = problem()
    estimated = optimizers.find(name).family == "adapted"
    optimizer = optimizers.make(name, parts, lr=1.0 if estimated else 0.01)
    loss = first
    for _ in range(100 if estimated else 20):
        optimizers.step(name, optimizer, loss)
        loss = loss_of(parts)
    assert float(loss) < 0.95 * float(first)


@pytest.mark.parametrize(
    ("spelling", "name"), [("NGNM", "ngn-m"), ("NGN-MDv1", "ngn-mdv1"), ("Momo Adam", "momo-adam")]
)
def test_names_ignore_case_and_punctuation(spelling: str, name: str) -> None:
    assert optimizers.find(spelling).name == name


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(BenchError, match="Did you mean 'ngn-mdv1'"):
        optimizers.find("ngn-mdv11")


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = dataclasses.replace(optimizers.OPTIMIZERS["momo"], module="no_such_module_here")
    monkeypatch.setitem(optimizers.OPTIMIZERS, "momo", entry)
    optimizers.find.cache_clear()
    try:
        assert not entry.installed()
        with pytest.raises(BenchError, match="pip install momo-opt"):
            optimizers.make("momo", [torch.zeros(1, requires_grad=True)], 1.0)
    finally:
        optimizers.find.cache_clear()


def test_the_papers_ngn_d_has_the_rms_preconditioner() -> None:
    parts, loss = problem()
    optimizer = optimizers.make("ngn-d", parts, 0.1)
    optimizers.step("ngn-d", optimizer, loss)
    assert "exp_avg_sq" in optimizer.state[parts[0]]


def test_the_two_forms_of_sgdm_differ_in_the_first_buffer() -> None:
    after = {}
    for name in ("sgdm", "sgdm-zero"):
        parts, loss = problem()
        start, g = flat(parts), gradient(parts)
        optimizer = optimizers.make(name, parts, 0.01)
        optimizers.step(name, optimizer, loss)
        after[name] = (start - flat(parts)) / g
    torch.testing.assert_close(after["sgdm"], torch.full((3,), 0.01).double())
    torch.testing.assert_close(after["sgdm-zero"], torch.full((3,), 0.001).double())


def polyak(lr: float, loss: float, squared_norm: float) -> float:
    return min(lr, loss / squared_norm)


def ngn(lr: float, loss: float, squared_norm: float) -> float:
    return lr / (1 + lr / (2 * loss) * squared_norm)


@pytest.mark.parametrize(
    ("name", "share", "step_size", "lr"),
    [
        ("alr-smag", 1.0, polyak, 1e-4),
        ("alr-smag", 1.0, polyak, 10.0),
        ("ngn-ver2", 0.1, ngn, 1e-3),
        ("ngn-ver2", 0.1, ngn, 10.0),
    ],
)
def test_steps_along_the_momentum_follow_their_formula(
    name: str, share: float, step_size: Callable[[float, float, float], float], lr: float
) -> None:
    """The direction is 0.9 of the last one and a share of the gradient."""
    parts, loss = problem()
    optimizer = optimizers.make(name, parts, lr)
    x, d = flat(parts), torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        d = 0.9 * d + share * gradient(parts)
        size = step_size(lr, float(loss), float(d.square().sum()))
        x = x - size * d
        optimizers.step(name, optimizer, loss)
        torch.testing.assert_close(flat(parts), x)
        assert optimizers.step_size(optimizer) == pytest.approx(size)
        loss = loss_of(parts)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-3, 10.0])
@pytest.mark.parametrize("name", ["momo", "momo-adam"])
def test_the_noted_step_size_of_momo_is_the_one_it_took(
    name: str, lr: float, weight_decay: float
) -> None:
    parts, loss = problem()
    optimizer = optimizers.make(name, parts, lr, weight_decay=weight_decay)
    optimizers.observe(optimizer, True)
    for _ in range(4):
        before = flat(parts)
        optimizers.step(name, optimizer, loss)
        tau = optimizers.step_size(optimizer)
        direction = []
        for part in parts:
            scale = preconditioner(optimizer, part)
            direction.append(optimizer.state[part]["grad_avg"] / (1 if scale is None else scale))
        moved = before - flat(parts) * (1 + lr * weight_decay)
        torch.testing.assert_close(moved, tau * torch.cat(direction), rtol=1e-6, atol=1e-12)
        loss = loss_of(parts)


def test_momsps_is_swept_through_the_cap_of_its_step_size() -> None:
    for lr, capped in ((1e-6, True), (1e3, False)):
        parts, loss = problem()
        norm = float(gradient(parts).square().sum())
        optimizer = optimizers.make("momsps", parts, lr)
        optimizers.step("momsps", optimizer, loss)
        expected = lr if capped else float(loss) / norm
        assert optimizers.step_size(optimizer) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["adam", "ngn-mdv1", "ngn-d", "momo-adam"])
def test_the_preconditioner_is_the_corrected_root_mean_square(name: str) -> None:
    parts, loss = problem()
    optimizer = optimizers.make(name, parts, 1e-3)
    g = parts[0].grad.clone()  # type: ignore[union-attr]
    optimizers.step(name, optimizer, loss)
    scale = preconditioner(optimizer, parts[0])
    assert scale is not None
    torch.testing.assert_close(scale, g.abs() + 1e-8, rtol=1e-6, atol=0)


@pytest.mark.parametrize("lr", [1e-4, 1.0])
@pytest.mark.parametrize(
    "name", ["sgd", "rmsprop", "adagrad", "adam", "adabelief", "adabound", "ngn-mdv1"]
)
def test_the_coordinates_step_sizes_are_what_was_taken(name: str, lr: float) -> None:
    """Without momentum, a step is γ/D times the gradient."""
    if name == "adabelief" and int(metadata.version("pytorch_optimizer").split(".")[0]) < 4:
        pytest.skip("its AdaBelief was another one")
    parts, loss = problem()
    optimizer = optimizers.make(name, parts, lr, betas=(0.0, 0.9))
    for _ in range(3):
        before, g = parts[0].detach().clone(), parts[0].grad.clone()  # type: ignore[union-attr]
        optimizers.step(name, optimizer, loss)
        sizes = optimizers.coordinate_step_sizes(name, optimizer, parts[0])
        assert sizes is not None
        taken = (before - parts[0].detach()) / g
        torch.testing.assert_close(sizes.expand_as(taken), taken, rtol=1e-6, atol=0)
        loss = loss_of(parts)


@pytest.mark.parametrize(
    "name",
    [
        *("lion", "ngn-d", "ngn-mdv2", "ngn-d-plain"),
        *("prodigy", "dadapt-adam", "schedulefree"),
    ],
)
def test_no_step_size_per_coordinate_is_made_up(name: str) -> None:
    parts, loss = problem()
    optimizer = optimizers.make(name, parts, 0.1)
    optimizers.step(name, optimizer, loss)
    assert optimizers.coordinate_step_sizes(name, optimizer, parts[0]) is None


def test_step_sizes_of_scalar_and_coordinate_rules() -> None:
    for name, scalar in (
        ("ngn-m", True),
        ("ngn-mdv1", True),
        ("ngn-mdv2", False),
        ("ngn-d", False),
    ):
        parts, loss = problem()
        optimizer = optimizers.make(name, parts, 0.5)
        optimizers.step(name, optimizer, loss)
        size = optimizers.step_size(optimizer)
        assert (size is not None) == scalar
        assert size is None or (0 < size < 0.5 and math.isfinite(size))


def test_weight_decay_of_an_optimizer_without_it_is_refused() -> None:
    with pytest.raises(BenchError, match="has no weight decay"):
        optimizers.make("alr-smag", problem()[0], 0.1, weight_decay=0.1)


@pytest.mark.parametrize("name", [n for n, entry in optimizers.OPTIMIZERS.items() if entry.floor])
def test_a_loss_floor_is_subtracted_from_the_loss(name: str) -> None:
    """A loss of f above a floor of b gives the step that a loss of f − b gives."""
    moved = []
    for floor in (0.0, 2.5):
        parts, loss = problem()
        optimizer = optimizers.make(name, parts, lr=1e3, loss_floor=floor)
        optimizers.step(name, optimizer, loss + floor)
        moved.append(flat(parts))
    assert moved[0].equal(moved[1]) or torch.allclose(moved[0], moved[1], rtol=1e-9)
    without, loss = problem()
    optimizers.step(name, optimizers.make(name, without, lr=1e3), loss + 2.5)
    assert not torch.allclose(flat(without), moved[0], rtol=1e-3)


@pytest.mark.parametrize("name", [n for n, entry in optimizers.OPTIMIZERS.items() if entry.own])
def test_a_target_and_a_cap_reach_the_optimizers(name: str) -> None:
    """Half of the loss gives the step that half of the loss gives, a cap that of another lr."""
    moved = {}
    for lr, loss_share, aim in (
        (1e3, 0.5, {}),
        (1e3, 1.0, {"loss_target": 0.5}),
        (10.0, 1.0, {"loss_target": 0.5, "step_cap": 1e3}),
    ):
        parts, loss = problem()
        before = flat(parts)
        optimizer = optimizers.make(name, parts, lr=lr, aim=aim)
        optimizers.step(name, optimizer, loss * loss_share)
        moved[lr, len(aim)] = before - flat(parts)
    torch.testing.assert_close(moved[1e3, 1], moved[1e3, 0], rtol=1e-9, atol=0)
    torch.testing.assert_close(100 * moved[10.0, 2], moved[1e3, 0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["prodigy", "dadapt-adam"])
def test_the_noted_step_size_is_the_estimate_times_lr(name: str) -> None:
    parts, loss = problem()
    optimizer = optimizers.make(name, parts, lr=0.5)
    for _ in range(10):
        optimizers.step(name, optimizer, loss)
        loss = loss_of(parts)
    estimate = optimizer.param_groups[0]["d"]
    assert estimate > 1e-5
    assert optimizers.step_size(optimizer) == pytest.approx(0.5 * estimate)


def test_schedule_free_is_scored_at_other_parameters_than_it_trains_at() -> None:
    parts, loss = problem()
    optimizer = optimizers.make("schedulefree", parts, lr=0.1)
    for _ in range(5):
        optimizers.step("schedulefree", optimizer, loss)
        loss = loss_of(parts)
    trained = flat(parts)
    optimizers.set_training(optimizer, False)
    assert not torch.allclose(flat(parts), trained)
    optimizers.set_training(optimizer, True)
    torch.testing.assert_close(flat(parts), trained)


def test_a_loss_floor_is_refused_where_it_would_be_ignored() -> None:
    with pytest.raises(BenchError, match="SGDM takes no loss floor"):
        optimizers.make("sgdm", problem()[0], lr=0.1, loss_floor=1.0)
