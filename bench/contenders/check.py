"""Check a contender's steps on a small case, before its time is shown."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ngn_kernels.checkpoint import plain_state

from ..environment import first_line
from .registry import Contender

# Below, at odd sizes around, and far above the sizes of a kernel's vector, block and chunk.
SHAPES = ((3,), (17, 5), (1,), (64, 33), (4099,), (40_009,))
LOSSES = (0.5, 0.8, 0.3)
LEARNING_RATE = 0.5
ROUNDINGS = 8
TINY = 1e-300


@dataclass(frozen=True)
class Verdict:
    """`ok` is None where there is no implementation to compare with."""

    ok: bool | None
    text: str


def checked(contender: Contender, dtype: torch.dtype, device: torch.device) -> Verdict | str:
    """The contender's verdict, or the reason why it cannot run at all."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if contender.build_trusted is None:
                try_once(contender, dtype, device)
            return check(contender, dtype, device)
    except Exception as error:  # shown with the contender
        return first_line(error)


def try_once(
    contender: Contender, dtype: torch.dtype, device: torch.device, elements: int = 8
) -> Callable[[], object]:
    """Build the contender on one tensor and take a step, so that its state exists; returns the
    next step."""
    param = torch.ones(elements, dtype=dtype, device=device, requires_grad=True)
    param.grad = torch.ones_like(param)
    step = contender.step_function(contender.build([param]))
    loss = torch.ones((), device=device)
    step(loss)
    return lambda: step(loss)


def check(contender: Contender, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Compare with the trusted implementation in float64 over a few steps, each from identical state."""
    if contender.build_trusted is None:
        return Verdict(None, "nothing to check against")
    params = _parameters(dtype, device)
    trusted_params = [_float64(p.detach()).requires_grad_() for p in params]
    optimizer = contender.build(params, lr=LEARNING_RATE)
    trusted = contender.build_trusted(trusted_params, lr=LEARNING_RATE)
    loss = torch.zeros((), device=device)
    loss_f64 = torch.zeros((), dtype=torch.float64)
    step = contender.step_function(optimizer)
    trusted_step = dataclasses.replace(contender, compiled=False).step_function(trusted)
    # A scalar step size compares the loss with a sum over all coordinates.
    scale = sum(p.numel() for p in params) if contender.passes.reduce else 1

    worst = 0.0
    for value, gradients in zip(LOSSES, _gradients(params), strict=False):
        loss.fill_(value * scale)
        loss_f64.copy_(loss)
        before = _snapshot(params, optimizer)
        _restore(before, trusted_params, trusted)
        for p, q, gradient in zip(params, trusted_params, gradients, strict=True):
            p.grad = gradient
            q.grad = _float64(gradient)
        step(loss)
        trusted_step(loss_f64)
        after, expected = _snapshot(params, optimizer), _snapshot(trusted_params, trusted)
        if contender.quantised:
            expected = [{"parameter": saved["parameter"]} for saved in expected]
        worst = max(worst, *_errors(before, after, expected, contender.rounds_once))
    worst /= contender.slack
    if worst <= 1.0:
        return Verdict(True, f"= {contender.trusted_name} in float64")
    return Verdict(
        False,
        f"differs from {contender.trusted_name} in float64 by {worst:.3g} times the tolerance",
    )


def _parameters(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in SHAPES
    ]


def _gradients(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients away from zero, whose squares do not underflow a half-precision state."""
    generator = torch.Generator().manual_seed(1)
    while True:
        normal = [torch.randn(p.shape, generator=generator) for p in params]
        yield [
            (g + 0.25 * g.sign()).to(p.device, p.dtype) for p, g in zip(params, normal, strict=True)
        ]


Snapshot = list[dict[str, Tensor]]


def _snapshot(params: list[Tensor], optimizer: Optimizer) -> Snapshot:
    """Copies of each parameter and of its state tensors of the same shape."""
    return [
        {
            name: value.detach().clone()
            for name, value in {"parameter": p, **plain_state(optimizer.state[p])}.items()
            if isinstance(value, Tensor) and value.shape == p.shape and value.dim()
        }
        for p in params
    ]


def _restore(snapshot: Snapshot, params: list[Tensor], optimizer: Optimizer) -> None:
    """Copy the values of a snapshot into parameters and state, where these exist."""
    for saved, p in zip(snapshot, params, strict=True):
        for name, value in saved.items():
            target = p if name == "parameter" else optimizer.state[p].get(name)
            if target is not None:
                target.detach().copy_(value)


def _errors(
    before: Snapshot, after: Snapshot, expected: Snapshot, rounds_once: bool
) -> Iterator[float]:
    """Largest error of each tensor, relative to the tolerance for rounding."""
    float32_eps = torch.finfo(torch.float32).eps
    for old, new, right in zip(before, after, expected, strict=True):
        for name, value in right.items():
            if name not in new or not bool(torch.isfinite(new[name]).all()):
                yield math.inf
                continue
            start = _float64(old[name]) if name in old else torch.zeros_like(value)
            # An update's terms can cancel: its own size is no measure of their rounding.
            size = value.abs() + start.abs() + (value - start).square().mean().sqrt()
            stored_eps = torch.finfo(new[name].dtype).eps
            math_eps = min(stored_eps, float32_eps) if rounds_once else stored_eps
            allowed = (ROUNDINGS * math_eps + stored_eps) * size
            error = (_float64(new[name]) - value).abs()
            yield float((error / (allowed + TINY)).max())


def _float64(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float64, copy=True)
