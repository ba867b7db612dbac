"""The optimizers that the lab writes itself or completes: baselines of the paper's comparisons."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ngn_kernels.planning.state import plain

Betas = tuple[float, float]


class SGDM(Optimizer):
    """Momentum as an average of gradients, from a zero buffer.

    b ← βb + (1−β)g, x ← x − lr·b. Torch's SGD with dampening differs in its first step alone: it
    starts from b = g. The paper's counts on x² + x⁴ need the zero buffer.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                p.sub_(buffer, alpha=group["lr"])


class LossAware(Optimizer):
    """Base of the baselines written here whose step size depends on the loss.

    `last_step_size` is the step size of the last step.
    """

    last_step_size: float | None = None

    def step(self, loss: Tensor | float) -> None:  # type: ignore[override]
        raise NotImplementedError

    def with_gradient(self) -> list[tuple[dict[str, Any], Tensor]]:
        """(group, parameter) for all parameters that take part in this step."""
        return [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]

    def squared_norm(self, key: str) -> float:
        """Sum of squares of the state tensor `key` over all parameters."""
        return sum(float(self.state[p][key].square().sum()) for _, p in self.with_gradient())


class ALRSMAG(LossAware):
    """ALR-SMAG: a Polyak step along the momentum direction, capped at lr.

    d ← βd + g, τ = min(lr, (f − floor) / (c‖d‖²)), x ← x − τd.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.9,
        c: float = 1.0,
        loss_floor: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.c = c
        self.loss_floor = loss_floor

    @torch.no_grad()
    def step(self, loss: Tensor | float) -> None:  # type: ignore[override]
        for group, p in self.with_gradient():
            direction = self.state[p].setdefault("direction", torch.zeros_like(p))
            direction.mul_(group["momentum"]).add_(p.grad)
        scaled_norm = self.c * self.squared_norm("direction")
        polyak = (float(loss) - self.loss_floor) / scaled_norm if scaled_norm else math.inf
        for group, p in self.with_gradient():
            self.last_step_size = min(group["lr"], polyak)
            p.sub_(self.state[p]["direction"], alpha=self.last_step_size)


class NGNVer2(LossAware):
    """The momentum that the paper tried and rejected ("Ver. 2"): the NGN step size of the average.

    m ← βm + (1−β)g, γ = c / (1 + c‖m‖² / (2f)), x ← x − γm.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, loss: Tensor | float) -> None:  # type: ignore[override]
        for group, p in self.with_gradient():
            average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            average.lerp_(p.grad, 1 - group["momentum"])
        squared_norm = self.squared_norm("momentum_buffer")
        for group, p in self.with_gradient():
            lr, doubled = group["lr"], 2 * float(loss)
            total = doubled + lr * squared_norm
            self.last_step_size = lr * doubled / total if total else lr
            p.sub_(self.state[p]["momentum_buffer"], alpha=self.last_step_size)


class Observed:
    """Mixed into Momo and Momo-Adam, which do not keep their step size.

    While `observed` is set, each step records it in `last_step_size`.
    """

    last_step_size: float | None = None
    observed = False

    def step(self, closure: None = None, loss: Tensor | None = None) -> None:
        optimizer: Any = self
        params = optimizer.param_groups[0]["params"]
        before = [p.detach().clone() for p in params] if self.observed else []
        super().step(loss=loss)  # type: ignore[misc]
        if self.observed:
            self.last_step_size = _momo_step_size(optimizer, before)


def _momo_step_size(optimizer: Any, before: list[Tensor]) -> float:
    """Momo's τ, from the state after its step and the parameters before it."""
    group = optimizer.param_groups[0]
    rho = 1.0  # Momo-Adam corrects the bias of its averages, Momo starts them at the first value
    if "betas" in group:
        rho -= group["betas"][0] ** optimizer._number_steps
    growth = 1 + group["lr"] * group["weight_decay"]
    norm = gap = 0.0
    for p, x in zip(group["params"], before, strict=True):
        state = optimizer.state[p]
        average, scale = state["grad_avg"], preconditioner(optimizer, p)
        norm += float((average.square() / (1 if scale is None else scale)).sum())
        gap += float((x * average).sum()) - growth * float(state["grad_dot_w"])
    gap += growth * (float(optimizer.loss_avg) - rho * optimizer.lb)
    return min(group["lr"] / rho, max(gap, 0.0) / norm if norm else math.inf)


def momo(params: Iterable[Tensor], lr: float, betas: Betas, weight_decay: float) -> Optimizer:
    base: Any = importlib.import_module("momo").Momo

    class ObservedMomo(Observed, base):
        pass

    return ObservedMomo(params, lr=lr, beta=betas[0], weight_decay=weight_decay)


def momo_adam(params: Iterable[Tensor], lr: float, betas: Betas, weight_decay: float) -> Optimizer:
    base: Any = importlib.import_module("momo").MomoAdam

    class ObservedMomoAdam(Observed, base):
        pass

    return ObservedMomoAdam(params, lr=lr, betas=betas, weight_decay=weight_decay)


def schedule_free(
    params: Iterable[Tensor], lr: float, betas: Betas, weight_decay: float
) -> Optimizer:
    """AdamW that needs no schedule, ready to train."""
    factory: Any = importlib.import_module("schedulefree").AdamWScheduleFree
    optimizer = factory(params, lr=lr, betas=betas, weight_decay=weight_decay)
    optimizer.train()
    return optimizer


def momsps(params: Iterable[Tensor], lr: float, momentum: float = 0.9) -> Optimizer:
    base: Any = importlib.import_module("momsps").MomSPS

    class SweptMomSPS(base):
        """MomSPS has no `lr`; here it is `gamma_max`, the cap of its step size."""

        last_step_size: float | None = None

        def __init__(self) -> None:
            super().__init__(params, gamma_max=lr, beta=momentum)
            for group in self.param_groups:
                group["lr"] = lr

        def step(self, loss: Tensor) -> None:
            self.gamma_max = self.param_groups[0]["lr"]
            super().step(loss=loss)
            norm = float(self.compute_grad_terms()) ** 2
            self.last_step_size = min(float(loss) / norm, self.gamma_max) if norm else None

    return SweptMomSPS()


def preconditioner(optimizer: Optimizer, p: Tensor) -> Tensor | None:
    """D of one parameter, by which its step is divided; None for optimizers without one.

    Adam's D = ε + sqrt(v / (1 − β₂ᵗ)); RMSprop and Adagrad do not correct a bias.
    """
    state, group = optimizer.state[p], optimizer.param_groups[0]
    for key in ("square_avg", "sum"):
        if key in state:
            return state[key].sqrt() + group["eps"]
    if "d" in group or "weight_sum" in group:
        return None
    keys = [k for k in ("exp_avg_sq", "grad_avg_sq", "exp_avg_var") if k in state]
    if not keys:
        return None
    average = plain(state, keys[0]) if keys[0] == "exp_avg_sq" else state[keys[0]]
    average = average.to(torch.promote_types(average.dtype, torch.float32))
    beta2 = group["betas"][1] if "betas" in group else group["beta2"]
    t = float(state.get("step", group.get("step")))
    scale = (average / (1 - beta2**t)).sqrt() + group["eps"]
    return _bounded(optimizer, scale, t) if "final_lr" in group else scale


def _bounded(optimizer: Any, scale: Tensor, t: float) -> Tensor:
    """The D with which Adam's step would be AdaBound's, whose step sizes are clamped."""
    group = optimizer.param_groups[0]
    lr = group["lr"] / (1 - group["betas"][0] ** t)
    final = group["final_lr"] * group["lr"] / optimizer.base_lrs[0]
    low, high = final * (1 - 1 / (group["gamma"] * t + 1)), final * (1 + 1 / (group["gamma"] * t))
    return lr / (lr / scale).clamp(low, high)
