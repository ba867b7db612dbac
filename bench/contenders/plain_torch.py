"""NGN-MDv1 as one would first write it in torch: a yardstick, not a part of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class PlainNGNMDv1(torch.optim.Optimizer):
    """The paper's algorithm tensor by tensor, with one temporary per operation.

    Two loops over the parameters: the first updates the second moment and adds up the weighted
    gradient norm, the second moves.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, loss: Tensor
    ) -> None:
        norm: Tensor | float = 0.0
        for group in self.param_groups:
            beta2 = group["betas"][1]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum_buffer"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                scale = self._preconditioner(state, group)
                norm += group["lr"] * (p.grad.square() / scale).sum()

        shrink = (2 * loss / (2 * loss + norm)).item()
        for group in self.param_groups:
            beta1 = group["betas"][0]
            for p in group["params"]:
                state = self.state[p]
                scale = self._preconditioner(state, group)
                step_size = (1 - beta1) * group["lr"] * shrink
                state["momentum_buffer"].mul_(beta1).add_(step_size * p.grad / scale)
                p.sub_(state["momentum_buffer"])

    @staticmethod
    def _preconditioner(state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        correction = 1 - group["betas"][1] ** state["step"]
        return (state["exp_avg_sq"] / correction).sqrt() + group["eps"]
