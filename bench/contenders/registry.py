"""The optimizers that are timed, by name."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import ngn_kernels
from ngn_kernels.formats import ROUNDINGS
from ngn_kernels.rules import RULES

from ..environment import BACKENDS
from ..errors import BenchError, unknown_name
from .muon import MuonWithAdamW, build_ngn, split
from .plain_torch import PlainNGNMDv1
from .traffic import PASSES, Passes, format_words, narrowed, passes_of, storage_of, stored
from .variants import NGN_VARIANTS, NGNVariant

Build = Callable[..., Optimizer]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
BASELINE = "adamw:fused"
ITSELF = "itself"
MUON = "ngnmuon"
NEWTON_SCHULZ = 1000.0  # what its polynomials make of a rounding error
FLOAT32_CORRECTION = 100.0  # 1 − β₂ᵗ in float32 costs two or three digits


@dataclass(frozen=True)
class Contender:
    """An optimizer, how it is built, and a trusted implementation whose results it must reproduce.

    `build(params, lr=…)` makes it; `build_trusted` makes its slow, trusted implementation, which
    is run in float64 and called `trusted_name` in tables. `unfused` code has its traffic counted
    from the operators that it calls; `rounds_once` is false where half precision is rounded at
    each of them. `slack` multiplies the tolerance of the check. Of `quantised` state only the
    effect on parameters is checked. How many bytes `opaque` code moves is not known. `dtype` is
    that of its parameters and gradients where it is not the run's. `package` must be installed,
    and a `rival` belongs to the group `rivals` alone.
    """

    name: str
    label: str
    passes: Passes
    build: Build
    build_trusted: Build | None = None
    trusted_name: str = ""
    uses_loss: bool = False
    unfused: bool = False
    compiled: bool = False
    rounds_once: bool = True
    slack: float = 1.0
    quantised: bool = False
    opaque: bool = False
    dtype: torch.dtype | None = None
    package: str = ""
    rival: bool = False

    def dtype_in(self, run: torch.dtype) -> torch.dtype:
        """The dtype of its parameters in a run whose others have `run`."""
        return self.dtype or run

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
    return functools.partial(optimizer, **fixed)


def _build_from(package: str, module: str, class_name: str, **fixed: Any) -> Build:
    """An optimizer of a package that is imported when it is built."""

    def build(params: list[Tensor], **options: Any) -> Optimizer:
        if missing := missing_package(package):
            raise RuntimeError(missing)
        logging.getLogger(package).setLevel(
            logging.ERROR
        )  # hides messages on kernels for absent GPUs
        factory = getattr(importlib.import_module(module), class_name)
        optimizer: Optimizer = factory(params, **fixed, **options)
        return optimizer

    return build


MODULES = {"momo-opt": "momo", "muon-optimizer": "muon"}
"""What packages are called in Python, where it is something else."""


def missing_package(package: str) -> str:
    """How to install a missing package; empty if none is missing."""
    module = MODULES.get(package, package)
    try:
        if not package or importlib.util.find_spec(module) is not None:
            return ""
    except ValueError:  # None in sys.modules
        pass
    return f"{package} is not installed: pip install {package}"


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
    directed = passes_of(RULES["NGNMuon"].with_directions())
    for backend in BACKENDS:
        yield Contender(
            f"{MUON}:{backend}",
            f"NGN-Muon · {backend}",
            directed,
            functools.partial(build_ngn, backend=backend),
            functools.partial(build_ngn, backend="reference"),
            ITSELF if backend == "reference" else "reference",
            uses_loss=True,
            slack=NEWTON_SCHULZ,
            opaque=True,
        )
    yield Contender(
        f"{MUON}:bfloat16",
        "NGN-Muon · products in bfloat16",
        directed,
        functools.partial(build_ngn, ns_dtype="bfloat16"),
        uses_loss=True,
        opaque=True,
    )
    yield Contender(
        "muon:torch", "Muon and AdamW · torch, fused", directed, MuonWithAdamW, opaque=True
    )
    yield Contender(
        "muon:muon-optimizer",
        "Muon and Adam · muon-optimizer",
        directed,
        _build_muon_optimizer,
        opaque=True,
        package="muon-optimizer",
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
            slack=FLOAT32_CORRECTION if name == "compiled" else 1.0,
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
            _build_from("momo-opt", "momo", class_name),
            uses_loss=True,
            unfused=True,
            package="momo-opt",
        )
    yield from _rivals()


def _rivals() -> Iterable[Contender]:
    """Other people's AdamW, with m and v in 8 bits or made for the CPU."""
    # A byte of each, and a float32 for every 256.
    blocks = narrowed(PASSES["AdamW"], "mv", 1 + 4 / 256)
    for package in ("torchao", "bitsandbytes"):
        yield Contender(
            f"adamw8bit:{package}",
            f"AdamW 8-bit · {package}",
            blocks,
            _build_from(package, f"{package}.optim", "AdamW8bit"),
            opaque=True,
            package=package,
            rival=True,
        )
    yield Contender(
        "adamw:deepspeed",
        "AdamW · DeepSpeed",
        dataclasses.replace(PASSES["AdamW"], wide_state=True),
        _build_deepspeed,
        _build_torch(torch.optim.AdamW, foreach=False),
        "for-loop",
        slack=FLOAT32_CORRECTION,
        package="deepspeed",
        rival=True,
    )


def _build_muon_optimizer(params: list[Tensor], lr: float = 1e-3) -> Optimizer:
    """Keller Jordan's, on one device."""
    groups = [
        {"params": group, "use_muon": of_muon, "lr": lr}
        for group, of_muon in zip(split(params), (True, False), strict=True)
        if group
    ]
    build = _build_from("muon-optimizer", "muon", "SingleDeviceMuonWithAuxAdam")
    return build(groups)


def _build_deepspeed(params: list[Tensor], **options: Any) -> Optimizer:
    """DeepSpeed's CPU kernel, which is compiled at its first use."""
    # Otherwise its messages would stand between the lines of a table.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    build = _build_from("deepspeed", "deepspeed.ops.adam", "DeepSpeedCPUAdam", weight_decay=1e-2)
    return build(params, **options)


def stored_as(contender: Contender, state: str, rounding: str) -> Contender:
    """An NGN rule with m and v in other formats ("8bit+bfloat16" names both), or x rounded so.

    It is named by the formats of the columns that it has.
    """
    storage = storage_of(state, rounding)
    words = format_words(contender.passes, storage)
    if not words or not is_ngn(contender.name):
        return contender
    return dataclasses.replace(
        contender,
        name="/".join([contender.name, *words]),
        label=" · ".join([contender.label, *words]),
        passes=stored(contender.passes, storage),
        build=functools.partial(contender.build, state=storage.given, rounding=rounding),
        quantised=True,
    )


def _with_dtype(contender: Contender, dtype: str) -> Contender:
    """The contender on parameters of this dtype, whatever the run's is."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    return dataclasses.replace(
        contender,
        name=f"{contender.name}@{dtype}",
        label=f"{contender.label} · on {dtype}",
        dtype=DTYPES[dtype],
    )


CONTENDERS = {contender.name: contender for contender in _all_contenders()}


def select(names: Iterable[str], backend: str, compiled: bool = False) -> list[Contender]:
    """Contenders for command-line names, in the registry's order, always with the baseline.

    `ngnmdv1` is that rule on `backend`; `adamw` all of its forms; `ngn-all`, `torch-all`,
    `momo-all`, `rivals` and `all` are groups. `ngnmdv1/8bit`, `/8bit+bfloat16`, `/bfloat16/exact`
    say how its numbers are stored, and `@bfloat16` what its parameters are. Compiled forms and
    rivals do not belong to `all`; `compiled` adds the former.
    """
    chosen = {BASELINE: CONTENDERS[BASELINE]}
    for name in names:
        chosen.update((c.name, c) for c in _find(name.lower(), backend))
    if compiled:
        chosen.update((c.name, c) for c in CONTENDERS.values() if c.compiled)
    order = list(CONTENDERS)
    return sorted(chosen.values(), key=lambda contender: order.index(base_name(contender.name)))


def _find(name: str, backend: str) -> Iterable[Contender]:
    """The contenders of one name, with the formats and the dtype that it gives them."""
    formats, at, dtype = name.partition("@")
    base, *words = formats.split("/")
    roundings = [word for word in words if word in ROUNDINGS]
    states = [word for word in words if word not in ROUNDINGS]
    if len(roundings) > 1 or len(states) > 1:
        raise BenchError(f"{name!r} names two formats; write ngnmdv1/8bit+bfloat16 for m and v")
    for expanded in _expand(base, backend):
        contender = CONTENDERS[expanded]
        if words and not is_ngn(expanded):
            raise BenchError(f"{name!r}: only NGN rules have formats, and {expanded} is none")
        contender = stored_as(contender, *(states or ["float32"]), *(roundings or ["nearest"]))
        yield _with_dtype(contender, dtype) if at else contender


def base_name(name: str) -> str:
    """The registered contender of a name that may go on with formats and a dtype."""
    return re.split("[/@]", name, maxsplit=1)[0]


def is_ngn(name: str) -> bool:
    """Whether a contender is this library's: an NGN rule on one of its backends."""
    rule, _, form = base_name(name).partition(":")
    return (rule in NGN_VARIANTS or rule == MUON) and form in BACKENDS


def is_reference(name: str) -> bool:
    """Whether a contender is an NGN rule on the reference backend."""
    return base_name(name).endswith(":reference")


def _expand(name: str, backend: str) -> list[str]:
    if name in CONTENDERS:
        return [name]
    if name == "ngn-all":
        return [f"{rule}:{backend}" for rule in NGN_VARIANTS]
    if name in NGN_VARIANTS or name == MUON:
        return [f"{name}:{backend}"]
    groups = {
        "all": lambda _: True,
        "torch-all": lambda contender: contender.name.startswith(("adamw", "sgd")),
        "momo-all": lambda contender: contender.name.startswith("momo"),
        "rivals": lambda contender: True,
        "adamw": lambda contender: contender.name.startswith("adamw"),
        "sgd": lambda contender: contender.name.startswith("sgd"),
    }
    if name not in groups:
        raise unknown_name(
            "contender",
            name,
            [*NGN_VARIANTS, MUON, "ngn-all", *groups, *CONTENDERS],
            "A rule is measured on the fastest backend that runs; ngnmdv1:reference asks for one "
            f"({', '.join(BACKENDS)}). Groups: ngn-all, torch-all, momo-all, rivals, all.",
            [*NGN_VARIANTS, *(name for name in CONTENDERS if not is_ngn(name))],
        )
    return [
        contender.name
        for contender in CONTENDERS.values()
        if groups[name](contender)
        and not contender.compiled
        and contender.rival == (name == "rivals")
    ]
