"""Muon beside another optimizer for what is no hidden matrix: torch's, and this library's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import ngn_kernels

LONGEST = 16  # times as long as it is wide, a matrix is one of a vocabulary


def split(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden matrices and all others, told by their shapes alone."""
    params = list(params)
    hidden = [p.dim() == 2 and max(p.shape) <= LONGEST * min(p.shape) for p in params]
    chosen = [p for p, matrix in zip(params, hidden, strict=True) if matrix]
    return chosen, [p for p, matrix in zip(params, hidden, strict=True) if not matrix]


def ngn_groups(params: Iterable[Tensor]) -> list[dict[str, Any]]:
    """The two groups of ``NGNMuon``."""
    groups = zip(split(params), (True, False), strict=True)
    return [{"params": group, "spectral": spectral} for group, spectral in groups if group]


def build_ngn(params: list[Tensor], **options: Any) -> Optimizer:
    return ngn_kernels.NGNMuon(ngn_groups(params), **options)


class MuonWithAdamW(Optimizer):
    """``torch.optim.Muon`` for hidden matrices and a fused AdamW for the others, in one ``step()``."""

    def __init__(self, params: list[Tensor], lr: float = 1e-3) -> None:
        matrices, others = split(params)
        options = {"lr": lr, "weight_decay": 0.0}
        self.parts: list[Optimizer] = []
        if matrices:
            self.parts.append(
                torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)  # type: ignore[arg-type]
            )
        if others:
            self.parts.append(torch.optim.AdamW(others, fused=True, **options))  # type: ignore[arg-type]
        super().__init__(params, {"lr": lr})
        for part in self.parts:
            self.state.update(part.state)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
            self.state.update(part.state)
