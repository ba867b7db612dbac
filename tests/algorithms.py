"""The algorithms under test, as data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ngn_kernels


class Hyper(NamedTuple):
    """The values of one group; an algorithm uses those it has."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step_cap: float | None = None
    spectral: bool | str = False


TWO_GROUPS = (Hyper(0.3, 0.9, 0.99, 1e-8, 0.02), Hyper(0.05, 0.5, 0.999, 1e-4, 0.3))


@dataclass(frozen=True)
class Algorithm:
    """One point of the grid: a class, and the constructor options that belong to the point.

    `traffic` is what the reduce reads, the apply reads, and the apply writes: g gradient, x parameter,
    m momentum, v second moment. It stands here by hand, to judge what the library has from its rules.
    """

    name: str
    traffic: tuple[str, str, str]
    momentum: str | None = None
    coordinate: bool = False
    rms: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    spectral: tuple[
        bool | str, ...
    ] = ()  # of each group that `build` makes, those of `hypers` aside
    slack: float = 1.0  # how often the usual rounding is in its step size

    def __str__(self) -> str:
        return self.name + ("-rms" if "preconditioner" in self.options else "")

    @property
    def rule_name(self) -> str:
        """Its key in the library's grid."""
        return self.name + ("(rms)" if "preconditioner" in self.options else "")

    @property
    def cls(self) -> type[torch.optim.Optimizer]:
        cls: type[torch.optim.Optimizer] = getattr(ngn_kernels, self.name)
        return cls

    def values(self, hyper: Hyper) -> dict[str, Any]:
        """The group options of this algorithm for the given values."""
        values: dict[str, Any] = {
            "lr": hyper.lr,
            "weight_decay": hyper.weight_decay,
            "step_cap": hyper.step_cap,
        }
        if self.momentum == "momentum":
            values["momentum"] = hyper.beta1
        if self.momentum == "betas":
            values["betas"] = (hyper.beta1, hyper.beta2)
        if self.name == "NGND":
            values["beta2"] = hyper.beta2
        if self.rms:
            values["eps"] = hyper.eps
        if self.spectral:
            values["spectral"] = hyper.spectral
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
            for column, hyper in zip(columns, self.mixed(hypers), strict=True)
        ]
        return self.cls(groups, **{**self.options, **options})

    def mixed(self, hypers: Sequence[Hyper]) -> list[Hyper]:
        """With spectral groups and others by turns, where the algorithm has both."""
        if not self.spectral:
            return list(hypers)
        turns = itertools.cycle(self.spectral)
        return [h if h.spectral else h._replace(spectral=next(turns)) for h in hypers]

    def simple(self, params: Iterable[Any], **options: Any) -> Any:
        """An optimizer with one group and the defaults of its class."""
        return self.cls(params, **{**self.options, **options})


NGN = Algorithm("NGN", ("g", "gx", "x"))
NGNM = Algorithm("NGNM", ("g", "gmx", "mx"), momentum="momentum")
NGND = Algorithm("NGND", ("", "gx", "x"), coordinate=True)
NGND_RMS = Algorithm(
    "NGND", ("", "gvx", "vx"), coordinate=True, rms=True, options={"preconditioner": "rms"}
)
NGNMDv1 = Algorithm("NGNMDv1", ("gv", "gvmx", "vmx"), momentum="betas", rms=True)
NGNMDv2 = Algorithm("NGNMDv2", ("", "gvmx", "vmx"), momentum="betas", coordinate=True, rms=True)
DecNGNMDv1 = Algorithm("DecNGNMDv1", ("gv", "gvmx", "vmx"), momentum="betas", rms=True)
NGNMDv1W = Algorithm("NGNMDv1W", ("gvx", "gvmx", "vmx"), momentum="betas", rms=True)

# "flat", because it takes parameters of any shape: a vector is a matrix of one column.
NGNMuon = Algorithm(
    "NGNMuon",
    ("gv", "gvmx", "vmx"),
    momentum="betas",
    rms=True,
    options={"spectral": False, "adjust_lr_fn": "original"},
    spectral=("flat", False),
    slack=16.0,
)

# The same with spectral groups alone.
DIRECTED = replace(NGNMuon, traffic=("gd", "dmx", "mx"), spectral=("flat",))

ALGORITHMS = (NGN, NGNM, NGND, NGND_RMS, NGNMDv1, NGNMDv2, DecNGNMDv1, NGNMDv1W, NGNMuon)
EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
# Those whose parameters of one element type are in one bucket.
EVERY_BUCKET = pytest.mark.parametrize(
    "algorithm", [a for a in ALGORITHMS if not a.spectral] + [DIRECTED], ids=str
)
SCALAR = tuple(a for a in ALGORITHMS if not a.coordinate)
COORDINATE = tuple(a for a in ALGORITHMS if a.coordinate)
