"""The oracle beside an optimizer, and how far apart the two may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from algorithms import Algorithm
from helpers import real64
from oracle import Array, Group, Oracle, Spectral, Variable
from torch import Tensor

from ngn_kernels.checkpoint import plain_state
from ngn_kernels.formats import (
    QUANT_BLOCK,
    REMAINDER,
    blocks_of,
    in_memory_order,
    join_bfloat16,
    rounding_of,
)
from ngn_kernels.spectral import polynomials


class Tolerance(NamedTuple):
    """Errors against the float64 oracle.

    `arithmetic`: after one step from identical state, relative to |x| + |m| before or after it.
    `storage`: the unit roundoff of a storage type that is narrower than the arithmetic.
    `smallest`: half of the smallest number of the storage type.
    `trajectory`: after many steps, relative to the largest value a tensor has had.
    """

    arithmetic: float
    storage: float
    smallest: float
    trajectory: float


TOLERANCES = {
    torch.float64: Tolerance(1e-12, 0.0, 2.0**-1074, 1e-12),
    torch.float32: Tolerance(4 * 2.0**-23, 0.0, 2.0**-149, 1e-5),
    torch.bfloat16: Tolerance(4 * 2.0**-23, 2.0**-8, 2.0**-134, float("nan")),
    torch.float16: Tolerance(4 * 2.0**-23, 2.0**-11, 2.0**-25, float("nan")),
}


class FormatError(NamedTuple):
    """What storing a number of the state may change in it.

    `own`: relative to the number. `block`: relative to the largest of its block.
    """

    own: float
    block: float


FORMAT_ERRORS = {
    ("momentum_buffer", torch.bfloat16): FormatError(2.0**-8, 0.0),
    # The scale is a power of two, up to twice what the largest number needs.
    ("momentum_buffer", torch.int8): FormatError(0.0, 2 / 127),
    ("exp_avg_sq", torch.bfloat16): FormatError(2.0**-7, 0.0),
    # 8 steps an octave over 31.75 octaves; what is less is rounded up to the lowest.
    ("exp_avg_sq", torch.uint8): FormatError(2.0**-3, 2.0**-31),
}


def format_error(key: str, stored: Tensor, expected: Array) -> Array | float:
    """How far a column may be from what was computed for it."""
    if (key, stored.dtype) not in FORMAT_ERRORS:
        return 0.0
    error = FORMAT_ERRORS[key, stored.dtype]
    sizes = torch.empty_like(stored, dtype=torch.float64)
    sizes.copy_(torch.from_numpy(np.abs(expected)))
    flat = in_memory_order(sizes)
    largest = (
        blocks_of(flat).amax(1, keepdim=True).expand(-1, QUANT_BLOCK).reshape(-1)[: flat.numel()]
    )
    flat.copy_(error.own * flat + error.block * largest)
    return real64(sizes)


def numbers_in(optimizer: Any, p: Tensor) -> dict[str, Any]:
    """A parameter's state with its quantised values decoded."""
    return plain_state(optimizer.state.get(p, {}))


def value_of(optimizer: Any, p: Tensor) -> Array:
    """A parameter as the optimizer knows it: with the bits that exact rounding keeps beside it."""
    remainder = optimizer.state.get(p, {}).get(REMAINDER)
    return real64(p if remainder is None else join_bfloat16(p.detach(), remainder))


# How much the polynomials of Newton-Schulz may grow a rounding error: 5 slopes of 3.4 at 0.
NEWTON_SCHULZ = 512

# What storing a parameter may change in it, in roundoffs of its type.
ROUNDOFFS = {"nearest": 1.01, "stochastic": 2.02, "exact": 0.0}


def momentum_of(algorithm: Algorithm, group: Mapping[str, Any]) -> float:
    if algorithm.momentum == "momentum":
        return float(group["momentum"])
    return float(group["betas"][0]) if algorithm.momentum == "betas" else 0.0


def spectral_of(group: Mapping[str, Any]) -> Spectral | None:
    if not group.get("spectral"):
        return None
    return Spectral(
        group["spectral"] == "flat",
        group["adjust_lr_fn"] == "match_rms_adamw",
        polynomials(group["ns_coefficients"], group["ns_steps"]),
    )


class Pair:
    """An optimizer and the oracle beside it, both fed from the parameters' `.grad`."""

    def __init__(
        self,
        algorithm: Algorithm,
        optimizer: Any,
        *,
        loss_floor: float = 0.0,
        loss_target: float = 0.0,
        max_grad_norm: float | None = None,
        decay_form: str = "paper",
        nesterov: bool = False,
    ) -> None:
        self.algorithm = algorithm
        self.optimizer = optimizer
        self.loss_floor = loss_floor
        self.loss_target = loss_target
        self.max_grad_norm = max_grad_norm
        self.decay_form = decay_form
        self.nesterov = nesterov
        self.sync()

    def sync(self) -> None:
        """Put the oracle where the optimizer is: parameters, state, step counts."""
        self.oracle = Oracle(
            self.algorithm.name,
            [Group([], lr=0.0) for _ in self.optimizer.param_groups],
            rms=self.algorithm.rms,
            loss_floor=self.loss_floor,
            loss_target=self.loss_target,
            max_grad_norm=self.max_grad_norm,
            adamw_decay=self.decay_form == "adamw",
            nesterov=self.nesterov,
        )
        for p, group in self._params():
            state = numbers_in(self.optimizer, p)
            group.variables.append(
                Variable.at(
                    value_of(self.optimizer, p),
                    real64(state["momentum_buffer"]) if "momentum_buffer" in state else None,
                    real64(state["exp_avg_sq"]) if "exp_avg_sq" in state else None,
                    int(state.get("step", 0)),
                    pairs=p.is_complex(),
                )
            )
        self.before = self._variables()
        self.reached: dict[tuple[int, str], float] = {}

    def step(self, loss: Any, *, grad_scale: float = 1.0) -> None:
        """One step of both."""
        self.expect(loss, grad_scale)
        self.optimizer.step(loss=loss)

    def checked_step(self, loss: Any, *, grad_scale: float = 1.0) -> None:
        """One step of both from where the optimizer is, compared element by element."""
        self.sync()
        self.step(loss, grad_scale=grad_scale)
        self.check_step()

    def expect(self, loss: Any, grad_scale: float = 1.0) -> None:
        """One step of the oracle, with the gradients and group values of the optimizer."""
        for group, values in zip(self.oracle.groups, self.optimizer.param_groups, strict=True):
            group.lr = float(values["lr"])
            group.weight_decay = float(values["weight_decay"])
            group.step_cap = values["step_cap"]
            group.beta1 = momentum_of(self.algorithm, values)
            group.spectral = spectral_of(values)
            if self.algorithm.rms:
                beta2 = values["betas"][1] if "betas" in values else values["beta2"]
                group.beta2, group.eps = float(beta2), float(values["eps"])
        self.before = self._variables()
        gradients: list[list[Array | None]] = [
            [None if p.grad is None else real64(p.grad) for p in values["params"]]
            for values in self.optimizer.param_groups
        ]
        value = loss.detach() if isinstance(loss, Tensor) else loss
        self.oracle.step(float(value), gradients, grad_scale)

    def check_step(self, slack: float = 1.0) -> None:
        """After one step from identical state, element by element.

        Args:
            slack: how often the usual rounding may be there, where a sum's terms cancel.
        """
        slack *= self.algorithm.slack
        for (p, group), variable, before in self._rows():
            tol = TOLERANCES[p.abs().dtype if p.is_complex() else p.dtype]
            x, m = variable.x, variable.momentum_buffer
            roundoff = (
                tol.storage * ROUNDOFFS[rounding_of(p.dtype, self.optimizer._storage.rounding)]
            )
            size = np.maximum(np.abs(x), np.abs(before.x))
            size = size + np.maximum(np.abs(m), np.abs(before.momentum_buffer))
            turned = NEWTON_SCHULZ * tol.arithmetic * variable.moved
            close(
                value_of(self.optimizer, p),
                x,
                slack * tol.arithmetic * size + roundoff * np.abs(x) + 2 * tol.smallest + turned,
                "parameter",
            )
            state, stored = numbers_in(self.optimizer, p), self.optimizer.state.get(p, {})
            if "momentum_buffer" in state:
                terms = np.abs(m) + np.abs(before.momentum_buffer)
                terms = terms + group.lr * group.weight_decay * np.abs(before.x)
                rounding = 4 * 2.0**-53 * np.abs(x) * max(1.0, group.schedule)
                close(
                    real64(state["momentum_buffer"]),
                    m,
                    2 * slack * tol.arithmetic * terms
                    + rounding
                    + 2.0**-149
                    + turned
                    + 1.01 * format_error("momentum_buffer", stored["momentum_buffer"], m),
                    "momentum_buffer",
                )
            if "exp_avg_sq" in state:
                close(
                    real64(state["exp_avg_sq"]),
                    variable.v,
                    slack * tol.arithmetic * variable.v
                    + 2.0**-148
                    + 1.01 * format_error("exp_avg_sq", stored["exp_avg_sq"], variable.v),
                    "exp_avg_sq",
                )
            self._check_count(p, group, variable)

    def check_trajectory(self) -> None:
        """After any number of steps, relative to the largest value each tensor has had.

        The oracle's displacement is a difference of iterates, so it is known to their rounding.
        """
        for i, ((p, group), variable, _) in enumerate(self._rows()):
            tolerance = TOLERANCES[p.dtype].trajectory
            state = self.optimizer.state.get(p, {})
            tensors = {
                "parameter": (p, variable.x),
                "momentum_buffer": (state.get("momentum_buffer"), variable.momentum_buffer),
                "exp_avg_sq": (state.get("exp_avg_sq"), variable.v),
            }
            for name, (value, expected) in tensors.items():
                reached = max(self.reached.get((i, name), 0.0), largest(expected))
                self.reached[i, name] = reached
                rounding = 16 * 2.0**-53 * self.reached[i, "parameter"]
                if value is not None:
                    close(real64(value), expected, tolerance * reached + rounding, name)
            self._check_count(p, group, variable)

    def _check_count(self, p: Tensor, group: Group, variable: Variable) -> None:
        """An empty tensor has nothing to count: backends may leave its `step` alone."""
        state = self.optimizer.state.get(p, {})
        if p.numel() == 0:
            return
        if variable.t and self.algorithm.rms and group.spectral is None:
            assert {"step", "exp_avg_sq"} <= set(state)
        if "step" in state:
            assert int(state["step"]) == variable.t

    def _params(self) -> Iterator[tuple[Tensor, Group]]:
        for values, group in zip(self.optimizer.param_groups, self.oracle.groups, strict=True):
            for p in values["params"]:
                yield p, group

    def _variables(self) -> list[Variable]:
        return [
            Variable(v.x, v.previous, v.v, v.t, v.pairs, v.moved)
            for g in self.oracle.groups
            for v in g.variables
        ]

    def _rows(self) -> Iterator[tuple[tuple[Tensor, Group], Variable, Variable]]:
        return zip(self._params(), self._variables(), self.before, strict=True)


def largest(values: Array) -> float:
    return float(np.abs(values).max(initial=0.0))


def close(actual: Array, expected: Array, bound: Array | float, what: str) -> None:
    """Every element within its bound, or the worst one shown."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    excess = np.abs(actual - expected) - bound
    if not np.all(excess <= 0):
        worst = np.unravel_index(int(np.argmax(np.nan_to_num(excess, nan=np.inf))), excess.shape)
        raise AssertionError(
            f"{what}{list(map(int, worst))}: {actual[worst]!r}, oracle {expected[worst]!r}, "
            f"off by {abs(actual[worst] - expected[worst]):.3g}, "
            f"allowed {np.broadcast_to(bound, expected.shape)[worst]:.3g}"
        )
