"""What the tests share: the algorithms as data, tolerances, random problems, the oracle beside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from oracle import Array, Group, Oracle, Variable
from torch import Tensor

import ngn_kernels

DTYPES = {
    "reference": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "triton": (torch.float32, torch.bfloat16, torch.float16),
}


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


class Hyper(NamedTuple):
    """The values of one group; an algorithm uses those it has."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


TWO_GROUPS = (Hyper(0.3, 0.9, 0.99, 1e-8, 0.02), Hyper(0.05, 0.5, 0.999, 1e-4, 0.3))


@dataclass(frozen=True)
class Algorithm:
    """One point of the grid: a class, and the constructor options that belong to the point."""

    name: str
    momentum: str | None = None
    coordinate: bool = False
    rms: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name + ("-rms" if self.options else "")

    @property
    def cls(self) -> type[torch.optim.Optimizer]:
        cls: type[torch.optim.Optimizer] = getattr(ngn_kernels, self.name)
        return cls

    def values(self, hyper: Hyper) -> dict[str, Any]:
        """The group options of this algorithm for the given values."""
        values: dict[str, Any] = {"lr": hyper.lr, "weight_decay": hyper.weight_decay}
        if self.momentum == "momentum":
            values["momentum"] = hyper.beta1
        if self.momentum == "betas":
            values["betas"] = (hyper.beta1, hyper.beta2)
        if self.name == "NGND":
            values["beta2"] = hyper.beta2
        if self.rms:
            values["eps"] = hyper.eps
        return values

    def build(
        self,
        columns: Sequence[Sequence[Tensor]],
        hypers: Sequence[Hyper] = TWO_GROUPS,
        **options: Any,
    ) -> Any:
        """An optimizer with one group per column of parameters."""
        groups = [
            {"params": list(column), **self.values(hyper)}
            for column, hyper in zip(columns, hypers, strict=True)
        ]
        return self.cls(groups, **{**self.options, **options})

    def simple(self, params: Iterable[Any], **options: Any) -> Any:
        """An optimizer with one group and the defaults of its class."""
        return self.cls(params, **{**self.options, **options})


NGN = Algorithm("NGN")
NGNM = Algorithm("NGNM", momentum="momentum")
NGND = Algorithm("NGND", coordinate=True)
NGND_RMS = Algorithm("NGND", coordinate=True, rms=True, options={"preconditioner": "rms"})
NGNMDv1 = Algorithm("NGNMDv1", momentum="betas", rms=True)
NGNMDv2 = Algorithm("NGNMDv2", momentum="betas", coordinate=True, rms=True)
DecNGNMDv1 = Algorithm("DecNGNMDv1", momentum="betas", rms=True)
NGNMDv1W = Algorithm("NGNMDv1W", momentum="betas", rms=True)

ALGORITHMS = (NGN, NGNM, NGND, NGND_RMS, NGNMDv1, NGNMDv2, DecNGNMDv1, NGNMDv1W)
SCALAR = tuple(a for a in ALGORITHMS if not a.coordinate)
COORDINATE = tuple(a for a in ALGORITHMS if a.coordinate)


def real64(tensor: Tensor) -> Array:
    """Any tensor as float64 numpy, exactly; complex numbers as pairs in a last dimension."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return np.array(tensor.double().numpy())


def params_of(optimizer: Any) -> list[Any]:
    """All parameters; as Any, since the tests know which of them have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def parameter(data: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(data)


def random_columns(
    shapes: Sequence[Sequence[tuple[int, ...]]],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = 0.1,
) -> list[list[Tensor]]:
    """Parameters of the given shapes, one list per group."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            parameter(
                (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
            )
            for shape in column
        ]
        for column in shapes
    ]


def random_gradients(
    params: Iterable[Tensor], seed: int, norm: float = 1.0, dtype: torch.dtype | None = None
) -> None:
    """Give every parameter a random gradient; together they have about the given norm."""
    params = list(params)
    generator = torch.Generator().manual_seed(seed)
    size = max(1, sum(p.numel() for p in params))
    for p in params:
        values = torch.randn(p.shape, generator=generator, dtype=torch.float64) * norm / size**0.5
        if p.is_complex():
            values = torch.complex(values, values.flip(0) / 2) if values.dim() else values + 0j
        p.grad = None
        if dtype is not None:
            p.grad_dtype = dtype
        p.grad = values.to(dtype or p.dtype)


def momentum_of(algorithm: Algorithm, group: Mapping[str, Any]) -> float:
    if algorithm.momentum == "momentum":
        return float(group["momentum"])
    return float(group["betas"][0]) if algorithm.momentum == "betas" else 0.0


class Pair:
    """An optimizer and the oracle beside it, both fed from the parameters' `.grad`."""

    def __init__(
        self,
        algorithm: Algorithm,
        optimizer: Any,
        *,
        loss_floor: float = 0.0,
        max_grad_norm: float | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.optimizer = optimizer
        self.loss_floor = loss_floor
        self.max_grad_norm = max_grad_norm
        self.sync()

    def sync(self) -> None:
        """Put the oracle where the optimizer is: parameters, state, step counts."""
        self.oracle = Oracle(
            self.algorithm.name,
            [Group([], lr=0.0) for _ in self.optimizer.param_groups],
            rms=self.algorithm.rms,
            loss_floor=self.loss_floor,
            max_grad_norm=self.max_grad_norm,
        )
        for p, group in self._params():
            state = self.optimizer.state.get(p, {})
            group.variables.append(
                Variable.at(
                    real64(p),
                    real64(state["momentum_buffer"]) if "momentum_buffer" in state else None,
                    real64(state["exp_avg_sq"]) if "exp_avg_sq" in state else None,
                    int(state.get("step", 0)),
                )
            )
        self.before = self._variables()
        self.reached: dict[tuple[int, str], float] = {}

    def step(self, loss: Any, *, grad_scale: float = 1.0) -> None:
        """One step of both."""
        self.expect(loss, grad_scale)
        self.optimizer.step(loss=loss)

    def expect(self, loss: Any, grad_scale: float = 1.0) -> None:
        """One step of the oracle, with the gradients and group values of the optimizer."""
        for group, values in zip(self.oracle.groups, self.optimizer.param_groups, strict=True):
            group.lr = float(values["lr"])
            group.weight_decay = float(values["weight_decay"])
            group.beta1 = momentum_of(self.algorithm, values)
            if self.algorithm.rms:
                beta2 = values["betas"][1] if "betas" in values else values["beta2"]
                group.beta2, group.eps = float(beta2), float(values["eps"])
        self.before = self._variables()
        gradients: list[list[Array | None]] = [
            [None if p.grad is None else real64(p.grad) for p in values["params"]]
            for values in self.optimizer.param_groups
        ]
        self.oracle.step(float(loss), gradients, grad_scale)

    def check_step(self) -> None:
        """After one step from identical state, element by element."""
        for (p, group), variable, before in self._rows():
            tol = TOLERANCES[p.abs().dtype if p.is_complex() else p.dtype]
            x, m = variable.x, variable.momentum_buffer
            size = np.maximum(np.abs(x), np.abs(before.x))
            size = size + np.maximum(np.abs(m), np.abs(before.momentum_buffer))
            close(
                real64(p),
                x,
                tol.arithmetic * size + 1.01 * tol.storage * np.abs(x) + tol.smallest,
                "parameter",
            )
            state = self.optimizer.state.get(p, {})
            if "momentum_buffer" in state:
                terms = np.abs(m) + np.abs(before.momentum_buffer)
                terms = terms + group.lr * group.weight_decay * np.abs(before.x)
                rounding = 4 * 2.0**-53 * np.abs(x)
                close(
                    real64(state["momentum_buffer"]),
                    m,
                    2 * tol.arithmetic * terms + rounding + 2.0**-149,
                    "momentum_buffer",
                )
            if "exp_avg_sq" in state:
                close(
                    real64(state["exp_avg_sq"]),
                    variable.v,
                    tol.arithmetic * variable.v + 2.0**-148,
                    "exp_avg_sq",
                )
            self._check_count(p, variable)

    def check_trajectory(self) -> None:
        """After any number of steps, relative to the largest value each tensor has had.

        The oracle's displacement is a difference of iterates, so it is known to their rounding.
        """
        for i, ((p, _), variable, _) in enumerate(self._rows()):
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
            self._check_count(p, variable)

    def _check_count(self, p: Tensor, variable: Variable) -> None:
        """An empty tensor has nothing to count: backends may leave its `step` alone."""
        state = self.optimizer.state.get(p, {})
        if p.numel() == 0:
            return
        if variable.t and self.algorithm.rms:
            assert {"step", "exp_avg_sq"} <= set(state)
        if "step" in state:
            assert int(state["step"]) == variable.t

    def _params(self) -> Iterator[tuple[Tensor, Group]]:
        for values, group in zip(self.optimizer.param_groups, self.oracle.groups, strict=True):
            for p in values["params"]:
                yield p, group

    def _variables(self) -> list[Variable]:
        return [
            Variable(v.x, v.previous, v.v, v.t) for g in self.oracle.groups for v in g.variables
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


def bits(tensor: Tensor) -> bytes:
    """The stored bits, so that NaN equals NaN and 0.0 differs from -0.0."""
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def snapshot(optimizer: Any) -> list[tuple[bytes, dict[str, bytes]]]:
    """Parameters and state of an optimizer, as bits, in the order of its parameters."""
    return [
        (
            bits(p),
            {k: bits(torch.as_tensor(v)) for k, v in optimizer.state.get(p, {}).items()},
        )
        for p in params_of(optimizer)
    ]


def assert_unchanged(optimizer: Any, before: list[tuple[bytes, dict[str, bytes]]]) -> None:
    """Bit-identical, except that state which did not exist may now be there as zeros."""
    for i, ((x0, state0), (x1, state1)) in enumerate(zip(before, snapshot(optimizer), strict=True)):
        assert x0 == x1, f"parameter {i} changed"
        for key, value in state1.items():
            assert value == state0.get(key, bytes(len(value))), f"{key} of parameter {i} changed"
        assert set(state0) <= set(state1), f"state of parameter {i} was lost"
