"""Optimizers that orthogonalise matrices: this library's, torch's Muon, MuonMax-Momo, NGN-Scion.

In all of them hidden matrices step with `lr`, and the other parameters with `OTHERS` times `lr`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ngn_kernels
from ngn_kernels.spectral import polar, polynomials

from .baselines import Betas, LossAware

Source = Iterable[Tensor] | nn.Module
OTHERS = 0.15  # 0.003 beside a Muon of 0.02
STEPS = polynomials((3.4445, -4.775, 2.0315), 5)


def groups_of(source: Source, lr: float) -> list[dict[str, Any]]:
    """Matrices and all others, of a model, or of parameters whose shapes alone are known."""
    if isinstance(source, nn.Module):
        found = ngn_kernels.muon_groups(source)
        for group in found:
            group["params"] = [param for _, param in group["params"]]
            group.pop("weight_decay", None)  # as with the other optimizers, vectors have one
    else:
        params = list(source)
        matrices = [p for p in params if p.ndim == 2]
        others = [p for p in params if p.ndim != 2]
        found = [{"params": matrices, "spectral": True}, {"params": others, "spectral": False}]
    found = [group for group in found if group["params"]]
    for group in found:
        beside = any(other["spectral"] for other in found)
        group["lr_factor"] = 1.0 if group["spectral"] or not beside else OTHERS
        group["lr"] = lr * group["lr_factor"]
    return found


def ngn_muon(
    source: Source,
    lr: float,
    betas: Betas,
    weight_decay: float,
    step_cap: float | None = None,
    **options: Any,
) -> Optimizer:
    groups = groups_of(source, lr)
    for group in groups if step_cap else ():
        group["step_cap"] = step_cap * group["lr_factor"]
    return ngn_kernels.NGNMuon(
        groups, betas=betas, weight_decay=weight_decay, adjust_lr_fn="original", **options
    )


class MuonAdam(Optimizer):
    """``torch.optim.Muon`` for matrices, and Adam for the others."""

    def __init__(self, source: Source, lr: float, betas: Betas, weight_decay: float) -> None:
        super().__init__(groups_of(source, lr), {"lr": lr})
        self.parts: list[Optimizer] = []
        for group in self.param_groups:
            if group["spectral"]:
                matrices, beta = group["params"], betas[0]
                self.parts.append(
                    torch.optim.Muon(matrices, lr, weight_decay=weight_decay, momentum=beta)
                )
            else:
                self.parts.append(
                    torch.optim.AdamW(group["params"], lr, betas, weight_decay=weight_decay)
                )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group, part in zip(self.param_groups, self.parts, strict=True):
            part.param_groups[0]["lr"] = group["lr"]
            part.step()


def orthogonal(matrix: Tensor) -> Tensor:
    return polar(matrix.reshape(1, len(matrix), -1), STEPS).reshape(matrix.shape)


class MuonMaxMomo(LossAware):
    """MuonMax-Momo (arXiv 2510.09827): Momo's cap of the step in the norm that MuonMax steps in.

    m ← βm + (1−β)g, v ← β₂v + (1−β₂)g², both from the first gradient; f̄ ← βf̄ + (1−β)(f − ⟨g, x⟩);
    N = Σ ⟨m, polar(m)⟩ over the matrices, ‖m‖² = κ N² + Σ m² / (ε + √v) over the others;
    τ = min(lr, max(0, f̄ + ⟨m, x⟩ − floor) / ‖m‖²);
    x ← x − τ κ N polar(m) for matrices, x ← x − τ m / (ε + √v) for the others.

    κ is its `lr_scale`, 10 in the authors' code. Here lr is that of the others over `OTHERS`.
    """

    def __init__(
        self,
        source: Source,
        lr: float,
        betas: Betas,
        weight_decay: float,
        lr_scale: float = 10.0,
        eps: float = 1e-8,
        loss_floor: float = 0.0,
    ) -> None:
        super().__init__(groups_of(source, lr), {"lr": lr})
        self.betas, self.weight_decay = betas, weight_decay
        self.lr_scale, self.eps = lr_scale, eps
        self.loss_floor = loss_floor
        self.model: float | None = None

    @torch.no_grad()
    def step(self, loss: Tensor | float) -> None:  # type: ignore[override]
        beta, beta2 = self.betas
        nuclear = diagonal = before = after = 0.0
        for group, p in self.with_gradient():
            g, state = p.grad, self.state[p]
            assert g is not None
            m = state.setdefault("momentum_buffer", g.clone()).lerp_(g, 1 - beta)
            before += float((p * g).sum())
            after += float((p * m).sum())
            if group["spectral"]:
                state["direction"] = orthogonal(m)
                nuclear += float((m * state["direction"]).sum())
            else:
                v = state.setdefault("average_square", g.square()).lerp_(g.square(), 1 - beta2)
                state["direction"] = m / (self.eps + v.sqrt())
                diagonal += float((m * state["direction"]).sum())
        offset = float(loss) - before
        self.model = offset if self.model is None else beta * self.model + (1 - beta) * offset
        norm = self.lr_scale * nuclear**2 + diagonal
        cap = max(0.0, self.model + after - self.loss_floor) / norm if norm else math.inf
        for group, p in self.with_gradient():
            lr = group["lr"] / group["lr_factor"] * OTHERS
            self.last_step_size = step = min(lr, cap)
            p.mul_(1 - lr * self.weight_decay)
            if group["spectral"]:
                step *= self.lr_scale * nuclear
            p.sub_(self.state[p]["direction"], alpha=step)


class NGNScion(LossAware):
    """NGN-Scion: a step size from the raw gradients, along the directions of their momentum.

    m ← βm + (1−β)g; D = Σ_l s_l ⟨g_l, LMO(g_l)⟩ over all parameters; ρ = 2 α f / D;
    γ = lr ρ / (lr + ρ); x ← x − γ s_l LMO(m_l).

    LMO is √(rows/columns) polar for matrices and the sign for the others, whose s_l is `OTHERS`.
    """

    def __init__(
        self,
        source: Source,
        lr: float,
        betas: Betas,
        weight_decay: float,
        alpha: float = 0.07,
        loss_floor: float = 0.0,
    ) -> None:
        super().__init__(groups_of(source, lr), {"lr": lr})
        self.beta, self.weight_decay, self.alpha = betas[0], weight_decay, alpha
        self.loss_floor = loss_floor

    def lmo(self, spectral: Any, values: Tensor) -> Tensor:
        if not spectral:
            return values.sign()
        columns = values[0].numel()
        return math.sqrt(len(values) / columns) * orthogonal(values)

    @torch.no_grad()
    def step(self, loss: Tensor | float) -> None:  # type: ignore[override]
        total = 0.0
        for group, p in self.with_gradient():
            g = p.grad
            assert g is not None
            total += group["lr_factor"] * float((g * self.lmo(group["spectral"], g)).sum())
            m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            m.lerp_(g, 1 - self.beta)
        aim = 2 * self.alpha * (float(loss) - self.loss_floor)
        for group, p in self.with_gradient():
            lr = group["lr"] / group["lr_factor"]
            size = lr * aim / (lr * total + aim) if total else lr
            self.last_step_size = size
            p.mul_(1 - size * self.weight_decay)
            direction = self.lmo(group["spectral"], self.state[p]["momentum_buffer"])
            p.sub_(direction, alpha=size * group["lr_factor"])
