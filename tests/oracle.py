"""The algorithms in float64 numpy, in the iterate form in which the paper prints them.

Every update is written as x^{k+1} from x^k, x^{k-1} and v^{k-1}, with the printed divisions by
2f and their limits at f = 0 spelled out.  It shares no code with the package, not even its shape:
the package carries a displacement m and never divides by the loss.

Symbols: c = lr, λ = weight_decay, D = diag(ε + sqrt(v / (1 − β₂^t))), f = loss − loss_floor.
Beyond the paper: a loss target takes its share off f, and with a step cap c is the cap, and the whole
step but for its momentum is multiplied by lr / c. In a spectral group the direction of a matrix U S V^T is
s U p(S) V^T in the place of g / D, where p is a few odd polynomials one after the other, or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SCALAR = {"NGN", "NGNM", "NGNMDv1", "DecNGNMDv1", "NGNMDv1W", "NGNMuon"}
COORDINATE = {"NGND", "NGNMDv2"}
RMS = {"NGNMDv1", "NGNMDv2", "DecNGNMDv1", "NGNMDv1W", "NGNMuon"}


@dataclass
class Variable:
    """One parameter: its last two iterates, its second moment, and how often it has moved."""

    x: Array
    previous: Array
    v: Array
    t: int = 0
    pairs: bool = False  # whether the last dimension has the two parts of complex numbers
    moved: float = 0.0  # the largest element of the last step along a direction in a spectral group

    @staticmethod
    def at(
        x: Array,
        m: Array | None = None,
        v: Array | None = None,
        t: int = 0,
        pairs: bool = False,
    ) -> Variable:
        """A variable at x that arrived there by the displacement m: x^{k-1} = x^k + m."""
        x = np.array(x, dtype=np.float64)
        return Variable(
            x=x,
            previous=x.copy() if m is None else x + m,
            v=np.zeros_like(x) if v is None else np.array(v, dtype=np.float64),
            t=t,
            pairs=pairs,
        )

    @property
    def momentum_buffer(self) -> Array:
        return self.previous - self.x


@dataclass
class Spectral:
    """How the gradients of a group are matrices, and what becomes of their singular values."""

    flat: bool  # the first dimension by all others; otherwise the last two
    match_rms: bool  # 0.2 sqrt(max(rows, columns)); otherwise sqrt(max(1, rows / columns))
    polynomials: Sequence[tuple[float, float, float]] | None = (
        None  # None: each becomes 1, and 0 stays
    )

    def direction(self, g: Array, pairs: bool) -> Array:
        numbers = g[..., 0] + 1j * g[..., 1] if pairs else g
        if not numbers.size:
            return np.zeros_like(g)
        if self.flat:
            matrices = numbers.reshape(1, numbers.shape[0] if numbers.ndim else 1, -1)
        else:
            matrices = numbers.reshape(-1, *numbers.shape[-2:])
        rows, columns = matrices.shape[1:]
        scale = 0.2 * max(rows, columns) ** 0.5 if self.match_rms else max(1, rows / columns) ** 0.5
        found = np.stack([scale * self._orthogonalised(m) for m in matrices])
        found = found.reshape(numbers.shape)
        return np.stack([found.real, found.imag], -1) if pairs else found

    def _orthogonalised(self, matrix: Any) -> Any:
        u, s, vh = np.linalg.svd(matrix, full_matrices=False)
        if s[0] == 0:
            return np.zeros_like(matrix)
        s = s / s[0]
        if self.polynomials is None:
            s = np.where(s > 1e-12, 1.0, 0.0)
        else:
            s = s / np.sqrt(np.sum(s * s))
            for a, b, c in self.polynomials:
                s = a * s + b * s**3 + c * s**5
        return (u * s) @ vh


@dataclass
class Group:
    variables: list[Variable]
    lr: float
    beta1: float = 0.0
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step_cap: float | None = None
    spectral: Spectral | None = None

    @property
    def c(self) -> float:
        """The step size that the shrink factor is computed at: that of the paper is the lr."""
        return self.lr if self.step_cap is None else self.step_cap

    @property
    def schedule(self) -> float:
        """What a schedule leaves of the whole step."""
        return 1.0 if self.step_cap is None else self.lr / self.step_cap


@dataclass
class Oracle:
    algorithm: str
    groups: list[Group]
    rms: bool = False
    loss_floor: float = 0.0
    loss_target: float = 0.0
    max_grad_norm: float | None = None
    adamw_decay: bool = False
    nesterov: bool = False
    step_sizes: list[float] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.algorithm not in SCALAR | COORDINATE:
            raise ValueError(f"no such algorithm: {self.algorithm}")
        self.rms = self.rms or self.algorithm in RMS

    def step(
        self, loss: float, gradients: list[list[Array | None]], grad_scale: float = 1.0
    ) -> None:
        """One step; a variable without gradient stands still, both of its iterates included."""
        f = (1 - self.loss_target) * (float(loss) - self.loss_floor)
        if not f >= 0.0:
            raise ValueError(f"the algorithms need f >= 0, got {f}")
        moving = [
            (j, variable, np.asarray(g, dtype=np.float64) / grad_scale)
            for j, (group, column) in enumerate(zip(self.groups, gradients, strict=True))
            for variable, g in zip(group.variables, column, strict=True)
            if g is not None
        ]
        if self.max_grad_norm is not None:
            norm = np.sqrt(sum(np.sum(g * g) for _, _, g in moving))
            s = min(1.0, self.max_grad_norm / (norm + 1e-6))
            moving = [(j, variable, s * g) for j, variable, g in moving]
        if self.algorithm in COORDINATE:
            for j, variable, g in moving:
                D = self._precondition(self.groups[j], variable, g)
                gamma = coordinate_step_size(self.groups[j].c, f, g, D)
                self._move(self.groups[j], variable, gamma * g, self.groups[j].c)
            return

        directions = [self._direction(self.groups[j], variable, g) for j, variable, g in moving]
        gammas = self._scalar_step_sizes(f, moving, directions)
        for (j, variable, _), d in zip(moving, directions, strict=True):
            self._move(self.groups[j], variable, gammas[j] * d, gammas[j])
        self.step_sizes = [
            group.schedule * gamma for group, gamma in zip(self.groups, gammas, strict=True)
        ]

    def _direction(self, group: Group, variable: Variable, g: Array) -> Array:
        if group.spectral is None:
            return g / self._precondition(group, variable, g)
        variable.t += 1
        return group.spectral.direction(g, variable.pairs)

    def _precondition(self, group: Group, variable: Variable, g: Array) -> Array:
        variable.t += 1
        if not self.rms:
            return np.ones_like(g)
        variable.v = np.asarray(group.beta2 * variable.v + (1 - group.beta2) * g * g)
        return group.eps + np.sqrt(variable.v / (1 - group.beta2**variable.t))

    def _scalar_step_sizes(self, f: float, moving: Any, directions: list[Array]) -> list[float]:
        """γ_j of every group j; the groups share one denominator, and one bracket in NGN-MDv1W."""
        caps = [self._cap(group) for group in self.groups]
        norm = sum(
            caps[j] * float(np.sum(g * d)) for (j, _, g), d in zip(moving, directions, strict=True)
        )
        pull = 0.0
        if self.algorithm == "NGNMDv1W":
            pull = sum(
                self.groups[j].c * self.groups[j].weight_decay * float(np.sum(g * variable.x))
                for j, variable, g in moving
            )
        if f > 0.0:
            shrink = max(0.0, 1 - pull / (2 * f)) / (1 + norm / (2 * f))
        elif norm > 0.0:
            shrink = max(0.0, -pull) / norm
        else:
            shrink = 1.0
        return [cap * shrink for cap in caps]

    def _cap(self, group: Group) -> float:
        """The largest step a group may take: c, or c/(1 + λc) where decay regularises the model."""
        if self.algorithm == "NGNMDv1W":
            return group.c / (1 + group.weight_decay * group.c)
        return group.c

    def _move(self, group: Group, variable: Variable, direction: Array, size: float) -> None:
        x, previous = variable.x, variable.previous
        variable.moved = 0.0
        if group.spectral is not None:
            largest = float(np.abs(direction).max(initial=0.0))
            variable.moved = group.schedule * (1 - group.beta1) * largest
        decay = group.weight_decay * group.c
        if self.adamw_decay:  # the momentum goes on from where the decayed parameter is
            decayed = x - group.weight_decay * group.schedule * size * x
            step = -group.schedule * (1 - group.beta1) * direction
            variable.x = np.asarray(decayed + step + group.beta1 * (x - previous))
            variable.previous = decayed
            if (
                self.nesterov
            ):  # as if the next step had no gradient, and began with the change of this one
                velocity, change = variable.x - decayed, variable.x - decayed - (x - previous)
                variable.x = np.asarray(variable.x + group.beta1 * change)
                variable.previous = variable.x - velocity
                variable.moved *= 1 + group.beta1
            return
        kept = x / (1 + decay) if self.algorithm == "NGNMDv1W" else x - decay * x
        step = (kept - x) - (1 - group.beta1) * direction
        moved = x + group.schedule * step + group.beta1 * (x - previous)
        variable.x = np.asarray(moved)
        variable.previous = x


def coordinate_step_size(c: float, f: float, g: Array, D: Array) -> Array:
    """γ^(j) = (c/D_j) / (1 + c g_j² / (2 f D_j)); at f = 0 it is 0 (where g_j = 0, so is γ g)."""
    if f == 0.0:
        return np.zeros_like(g)
    return (c / D) / (1 + c / (2 * f * D) * g * g)
