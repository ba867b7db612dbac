"""The optimizers that are measured side by side, by name."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import ngn_kernels

from .environment import BACKENDS
from .errors import unknown_name
from .plain_torch import PlainNGNMDv1
from .traffic import PASSES, Passes
from .variants import NGN_VARIANTS, NGNVariant

Build = Callable[..., Optimizer]

BASELINE = "adamw:fused"
ITSELF = "itself"


@dataclass(frozen=True)
class Contender:
    """An optimizer with a way to build it, and another whose results it must reproduce.

    `build(params, lr=…)` makes it; `build_truth` makes its slow, trusted form, which is run in
    float64 and called `truth` in tables. `unfused` code has its traffic counted from the operators
    that it calls; `rounds_once` is false where half precision is rounded at each of them. `slack`
    multiplies the tolerance of the check. Of `coded` state only what it does to parameters is checked.
    """

    name: str
    label: str
    passes: Passes
    build: Build
    build_truth: Build | None = None
    truth: str = ""
    uses_loss: bool = False
    unfused: bool = False
    compiled: bool = False
    rounds_once: bool = True
    slack: float = 1.0
    coded: bool = False

    def step_function(self, optimizer: Optimizer) -> Callable[[Tensor], object]:
        """One whole `step()` for a loss, as a training loop would call it."""
        step: Callable[..., Any] = optimizer.step
        if self.compiled:
            step = torch.compile(step)
        if self.uses_loss:
            return lambda loss: step(loss=loss)
        return lambda loss: step()


def _build_ngn(variant: NGNVariant, backend: str) -> Build:
    def build(params: list[Tensor], **options: Any) -> Optimizer:
        factory = getattr(ngn_kernels, variant.class_name)
        optimizer: Optimizer = factory(params, **variant.options, **options, backend=backend)
        return optimizer

    return build


def _build_torch(optimizer: type[Optimizer], **fixed: Any) -> Build:
    return lambda params, **options: optimizer(params, **fixed, **options)


def _build_momo(class_name: str) -> Build:
    def build(params: list[Tensor], **options: Any) -> Optimizer:
        try:
            factory = getattr(importlib.import_module("momo"), class_name)
        except ImportError:
            raise RuntimeError("momo-opt is not installed: pip install momo-opt") from None
        optimizer: Optimizer = factory(params, **options)
        return optimizer

    return build


def _all_contenders() -> Iterable[Contender]:
    for backend in BACKENDS:
        for name, variant in NGN_VARIANTS.items():
            yield Contender(
                f"{name}:{backend}",
                f"{variant.label} · {backend}",
                PASSES[variant.label],
                _build_ngn(variant, backend),
                _build_ngn(variant, "reference"),
                ITSELF if backend == "reference" else "reference",
                uses_loss=True,
                unfused=backend == "reference",
            )
    yield Contender(
        "ngnmdv1:plain",
        "NGN-MDv1 · plain torch",
        dataclasses.replace(PASSES["NGN-MDv1"], wide_state=False),
        PlainNGNMDv1,
        _build_ngn(NGN_VARIANTS["ngnmdv1"], "reference"),
        "reference",
        uses_loss=True,
        unfused=True,
        rounds_once=False,
    )
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    for name, options in (
        ("fused", {"fused": True}),
        ("foreach", {"foreach": True}),
        ("for-loop", {"foreach": False}),
        ("compiled", {"foreach": True}),
    ):
        yield Contender(
            f"adamw:{name}",
            f"AdamW · {name}",
            PASSES["AdamW"],
            _build_torch(adamw, **options),
            _build_torch(adamw, foreach=False),
            ITSELF if name == "for-loop" else "for-loop",
            unfused=name in ("foreach", "for-loop"),
            compiled=name == "compiled",
            rounds_once=name == "fused",
            # Compiled code takes 1 − β₂ᵗ in float32, which costs it two or three digits.
            slack=100.0 if name == "compiled" else 1.0,
        )
    yield Contender(
        "sgd:fused",
        "SGD momentum · fused",
        PASSES["SGDM"],
        _build_torch(sgd, momentum=0.9, fused=True),
        _build_torch(sgd, momentum=0.9, foreach=False),
        "for-loop",
    )
    for name, class_name, rule in (
        ("momo", "Momo", "Momo"),
        ("momo-adam", "MomoAdam", "Momo-Adam"),
    ):
        yield Contender(
            name,
            f"{rule} · momo-opt",
            PASSES[rule],
            _build_momo(class_name),
            uses_loss=True,
            unfused=True,
        )


def stored_as(contender: Contender, state: str, rounding: str) -> Contender:
    """An NGN rule with m and v in other formats ("8bit+bfloat16" names both), or x rounded so."""
    from ngn_kernels.formats import FORMATS

    if not is_ngn(contender.name) or (state, rounding) == ("float32", "nearest"):
        return contender
    m, _, v = state.partition("+")
    pair = (m, v or m)
    for name in pair:
        if name not in FORMATS["exp_avg_sq"]:
            raise unknown_name("state", name, list(FORMATS["exp_avg_sq"]), "Two: 8bit+bfloat16.")
    narrow = {
        stream: named[name].bytes
        for stream, named, name in zip("mv", FORMATS.values(), pair, strict=True)
        if name != "float32"
    }
    if rounding == "exact":
        narrow["x"] = 2
    words = [word for word in (state, rounding) if word not in ("float32", "nearest")]
    return dataclasses.replace(
        contender,
        name="/".join([contender.name, *words]),
        label=" · ".join([contender.label, *words]),
        passes=dataclasses.replace(contender.passes, narrow=narrow),
        build=functools.partial(contender.build, state=pair, rounding=rounding),
        coded=True,
    )


CONTENDERS = {contender.name: contender for contender in _all_contenders()}


def select(names: Iterable[str], backend: str, compiled: bool = False) -> list[Contender]:
    """Contenders for command-line names, in the registry's order, always with the baseline.

    `ngnmdv1` is that rule on `backend`; `adamw` all of its forms; `ngn-all`, `torch-all`,
    `momo-all` and `all` are groups. Compiled forms belong to no group; `compiled` adds them.
    """
    chosen = {BASELINE}
    for name in names:
        chosen.update(_expand(name.lower(), backend))
    return [
        contender
        for name, contender in CONTENDERS.items()
        if name in chosen or (compiled and contender.compiled)
    ]


def is_ngn(name: str) -> bool:
    """Whether a contender is this library's: an NGN rule on one of its backends."""
    rule, _, form = name.partition("/")[0].partition(":")
    return rule in NGN_VARIANTS and form in BACKENDS


def _expand(name: str, backend: str) -> list[str]:
    if name in CONTENDERS:
        return [name]
    if name == "ngn-all":
        return [f"{rule}:{backend}" for rule in NGN_VARIANTS]
    if name in NGN_VARIANTS:
        return [f"{name}:{backend}"]
    groups = {
        "all": lambda _: True,
        "torch-all": lambda contender: contender.name.startswith(("adamw", "sgd")),
        "momo-all": lambda contender: contender.name.startswith("momo"),
        "adamw": lambda contender: contender.name.startswith("adamw"),
        "sgd": lambda contender: contender.name.startswith("sgd"),
    }
    if name not in groups:
        raise unknown_name(
            "contender",
            name,
            [*NGN_VARIANTS, "ngn-all", *groups, *CONTENDERS],
            "A rule is measured on the fastest backend that runs; ngnmdv1:reference asks for one "
            f"({', '.join(BACKENDS)}). Groups: ngn-all, torch-all, momo-all, all.",
            [*NGN_VARIANTS, *(name for name in CONTENDERS if not is_ngn(name))],
        )
    return [
        contender.name
        for contender in CONTENDERS.values()
        if groups[name](contender) and not contender.compiled
    ]
