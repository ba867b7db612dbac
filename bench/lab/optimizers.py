"""Every optimizer of the paper's experiments, by name, with one function to make it and one to step it.

`make("ngn-m", params, lr=1.0)` builds one; `step` hands the loss to those that use it.
Names are compared without case and punctuation: `NGNM`, `ngn-m` and `NGN-M` are the same.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ngn_kernels.formats import STATE_FORMATS, Storage

from ..errors import BenchError, unknown_name
from . import baselines, muon
from .baselines import Betas

Make = Callable[..., Optimizer]

GRIDS = {
    "gradient": tuple(float(f"1e{k}") for k in range(-3, 5)),
    "coordinate": tuple(float(f"1e{k}") for k in range(-5, 3)),
    "adapted": (0.1, 1.0, 10.0),
    "matrices": (0.006, 0.02, 0.06, 0.2, 0.6, 2.0),
}
"""Default step sizes of the families: those that step along the gradient; those that divide it by
coordinate-wise scales, whose step sizes are about a hundred times smaller; those that estimate the
step size themselves, whose lr is a factor of it; and those that orthogonalise matrices, from 0.3 to
100 times Muon's usual 0.02."""


@dataclass(frozen=True)
class Entry:
    """One optimizer: `make(params, lr, betas, weight_decay)`, and what a sweep needs to know.

    Those of this library also take `state`, `rounding`, `loss_target` and `step_cap`.
    """

    name: str
    label: str
    make: Make
    family: str
    needs_loss: bool = False
    floor: str = ""
    """The attribute that holds the lower bound of its loss, if it takes one."""
    own: bool = False
    """Whether it is this library's, and takes `state`, `rounding`, `loss_target` and `step_cap`."""
    own_schedule: bool = False
    """Whether it warms up by itself and no schedule sets its lr."""
    lrs: tuple[float, ...] = ()
    """Its default step sizes, if they are not its family's."""
    of_model: bool = False
    """Whether it tells hidden matrices from other parameters, and so is made of a model."""
    module: str | None = None
    package: str | None = None
    note: str = ""
    """What a reader of its scores should know."""

    @property
    def grid(self) -> tuple[float, ...]:
        return self.lrs or GRIDS[self.family]

    def installed(self) -> bool:
        return self.module is None or importlib.util.find_spec(self.module) is not None

    @property
    def install_command(self) -> str:
        return f"pip install {self.package}"


def _of(
    module: str, name: str, beta_options: Callable[[Betas], dict[str, Any]], **rest: Any
) -> Make:
    """The class `name` of a module; `beta_options` names the options for its betas."""

    def make(
        params: Iterable[Tensor], lr: float, betas: Betas, weight_decay: float, **stored: Any
    ) -> Optimizer:
        factory = getattr(importlib.import_module(module), name)
        options = beta_options(betas) | rest | stored
        return factory(params, lr=lr, weight_decay=weight_decay, **options)

    return make


_ngn = functools.partial(_of, "ngn_kernels")
_torch = functools.partial(_of, "torch.optim")
_extra = functools.partial(_of, "pytorch_optimizer")


def _without_decay(factory: Callable[..., Optimizer]) -> Make:
    """A factory that takes parameters, lr and momentum only."""

    def make(params: Iterable[Tensor], lr: float, betas: Betas, weight_decay: float) -> Optimizer:
        if weight_decay:
            raise BenchError(
                f"{factory.__name__} has no weight decay: leave it out of this ablation"
            )
        return factory(params, lr, betas[0])

    return make


LION_NOTE = "its β₂ averages gradients, not squares, and is its own 0.99 where others have 0.999"


def _lion_betas(betas: Betas) -> dict[str, Any]:
    return {"betas": (betas[0], 0.99 if betas[1] == 0.999 else betas[1])}


def _no_betas(betas: Betas) -> dict[str, Any]:
    return {}


def _both_betas(betas: Betas) -> dict[str, Any]:
    return {"betas": betas}


def _entries() -> Iterable[Entry]:
    """All optimizers in the order in which tables show them."""
    gradient, coordinate, adapted, orthogonal = GRIDS
    ngn: dict[str, Any] = {"needs_loss": True, "floor": "loss_floor", "own": True}
    momo: dict[str, Any] = {
        "needs_loss": True,
        "floor": "lb",
        "module": "momo",
        "package": "momo-opt",
    }
    momsps: dict[str, Any] = {"needs_loss": True, "module": "momsps", "package": "MomSPS"}
    extra: dict[str, Any] = {"module": "pytorch_optimizer", "package": "pytorch_optimizer"}

    yield Entry("ngn", "NGN", _ngn("NGN", _no_betas), gradient, **ngn)
    yield Entry("ngn-m", "NGN-M", _ngn("NGNM", lambda b: {"momentum": b[0]}), gradient, **ngn)
    rms_ngnd = _ngn("NGND", lambda b: {"beta2": b[1]}, preconditioner="rms")
    yield Entry("ngn-d", "NGN-D", rms_ngnd, coordinate, **ngn)
    yield Entry("ngn-d-plain", "NGN-D (no RMS)", _ngn("NGND", _no_betas), gradient, **ngn)
    yield Entry("ngn-mdv1", "NGN-MDv1", _ngn("NGNMDv1", _both_betas), coordinate, **ngn)
    yield Entry("ngn-mdv2", "NGN-MDv2", _ngn("NGNMDv2", _both_betas), coordinate, **ngn)
    yield Entry("dec-ngn-mdv1", "Dec-NGN-MDv1", _ngn("DecNGNMDv1", _both_betas), coordinate, **ngn)
    yield Entry("ngn-mdv1w", "NGN-MDv1W", _ngn("NGNMDv1W", _both_betas), coordinate, **ngn)
    matrices: dict[str, Any] = {"family": orthogonal, "of_model": True}
    yield Entry("ngn-muon", "NGN-Muon", muon.ngn_muon, **ngn, **matrices)
    nesterov = functools.partial(muon.ngn_muon, nesterov=True, decay_form="adamw")
    yield Entry("ngn-muon-nesterov", "NGN-Muon, Nesterov", nesterov, **ngn, **matrices)
    yield Entry("ngn-ver2", "NGN Ver. 2", _without_decay(baselines.NGNVer2), gradient, True)

    yield Entry("sgd", "SGD", _torch("SGD", _no_betas), gradient)
    dampened = _torch("SGD", lambda b: {"momentum": b[0], "dampening": b[0]})
    yield Entry("sgdm", "SGDM", dampened, gradient)
    yield Entry("sgdm-zero", "SGDM (zero buffer)", _without_decay(baselines.SGDM), gradient)
    yield Entry("momo", "Momo", baselines.momo, gradient, **momo)
    yield Entry("momsps", "MomSPS", _without_decay(baselines.momsps), gradient, **momsps)
    alr_smag = _without_decay(baselines.ALRSMAG)
    yield Entry("alr-smag", "ALR-SMAG", alr_smag, gradient, True, floor="loss_floor")

    yield Entry("adam", "Adam", _torch("Adam", _both_betas), coordinate)
    yield Entry("adamw", "AdamW", _torch("AdamW", _both_betas), coordinate)
    yield Entry("muon", "Muon and Adam", muon.MuonAdam, **matrices)
    of_loss: dict[str, Any] = {"needs_loss": True, "floor": "loss_floor", **matrices}
    yield Entry("muonmax-momo", "MuonMax-Momo", muon.MuonMaxMomo, **of_loss)
    yield Entry("ngn-scion", "NGN-Scion", muon.NGNScion, **of_loss)
    yield Entry("momo-adam", "Momo-Adam", baselines.momo_adam, coordinate, **momo)
    yield Entry("lion", "Lion", _extra("Lion", _lion_betas), coordinate, note=LION_NOTE, **extra)
    yield Entry("adabelief", "AdaBelief", _extra("AdaBelief", _both_betas), coordinate, **extra)
    yield Entry("adabound", "AdaBound", _extra("AdaBound", _both_betas), coordinate, **extra)
    rmsprop = _torch("RMSprop", lambda b: {"alpha": b[1]})
    yield Entry("rmsprop", "RMSprop", rmsprop, coordinate)
    yield Entry("adagrad", "Adagrad", _torch("Adagrad", _no_betas), coordinate)

    yield Entry(
        "schedulefree",
        "Schedule-Free AdamW",
        baselines.schedule_free,
        coordinate,
        own_schedule=True,
        lrs=(0.00025, 0.0025, 0.025),
        module="schedulefree",
        package="schedulefree",
        note="it warms up over the first 5 % of the steps, and no schedule sets its lr",
    )
    prodigy = _of("prodigyopt", "Prodigy", _both_betas, safeguard_warmup=True)
    yield Entry("prodigy", "Prodigy", prodigy, adapted, module="prodigyopt", package="prodigyopt")
    dadapt = _of("dadaptation", "DAdaptAdam", _both_betas)
    dadapted: dict[str, Any] = {"module": "dadaptation", "package": "dadaptation"}
    yield Entry("dadapt-adam", "D-Adapted Adam", dadapt, adapted, **dadapted)


OPTIMIZERS: dict[str, Entry] = {entry.name: entry for entry in _entries()}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@functools.cache
def find(name: str) -> Entry:
    """The optimizer that `name` means, installed or not."""
    for entry in OPTIMIZERS.values():
        if _plain(name) == _plain(entry.name):
            return entry
    raise unknown_name("optimizer", name.lower(), OPTIMIZERS)


def make(
    name: str,
    params: Iterable[Tensor] | nn.Module,
    lr: float,
    betas: Betas = (0.9, 0.999),
    weight_decay: float = 0.0,
    loss_floor: float = 0.0,
    stored: Mapping[str, Any] | None = None,
    aim: Mapping[str, float] | None = None,
) -> Optimizer:
    """Build the optimizer `name`; momentum methods take `betas[0]`.

    Args:
        params: parameters, or the model that has them.
        stored: `state` and `rounding`, as NGN optimizers take them.
        aim: `loss_target` and `step_cap`, as NGN optimizers take them.
    """
    entry = find(name)
    if not entry.installed():
        raise BenchError(f"{entry.label} is not installed; get it with: {entry.install_command}")
    for options, names in ((stored, ("state", "rounding")), (aim, ("loss-target", "step-cap"))):
        if options and not entry.own:
            raise BenchError(
                f"{entry.label} takes no --{names[0]} and no --{names[1]}: "
                "leave it out of --optimizers"
            )
    if isinstance(params, nn.Module) and not entry.of_model:
        params = params.parameters()
    optimizer = entry.make(params, lr, betas, weight_decay, **stored or {}, **aim or {})
    if loss_floor:
        if not entry.floor:
            raise BenchError(f"{entry.label} takes no loss floor: leave it out of --optimizers")
        setattr(optimizer, entry.floor, loss_floor)
    return optimizer


def storage(state: str | None, rounding: str | None) -> dict[str, Any]:
    """The optimizer's options for `--state` and `--rounding`; `8bit+bfloat16` names m and v."""
    if state is None and rounding is None:
        return {}
    m, plus, v = (state or "float32").partition("+")
    try:
        chosen = Storage.of((m, v) if plus else m, rounding or "nearest")
    except ValueError:
        raise BenchError(
            f"--state {state}: must be one of {', '.join(STATE_FORMATS)}, or two of them for m and "
            "v, such as 8bit+bfloat16"
        ) from None
    return {"state": chosen.given, "rounding": chosen.rounding}


def step(name: str, optimizer: Optimizer, loss: Tensor | float) -> None:
    """One step; the loss goes to those that use it."""
    if find(name).needs_loss:
        optimizer.step(loss=loss)  # type: ignore[call-overload]
    else:
        optimizer.step()


def observe(optimizer: Optimizer, on: bool) -> None:
    """Make an optimizer record its next step size where that costs time."""
    if hasattr(optimizer, "observed"):
        optimizer.observed = on


def set_training(optimizer: Optimizer, on: bool) -> None:
    """Tell an optimizer that trains at other parameters than it is scored at which ones to show."""
    if hasattr(optimizer, "train"):
        (optimizer.train if on else optimizer.eval)()  # type: ignore[attr-defined]


def step_size(optimizer: Optimizer) -> float | None:
    """The last step's scalar step size: γ, τ, lr or d · lr; None where each coordinate has its own."""
    if hasattr(optimizer, "step_sizes"):
        sizes = optimizer.step_sizes()
        return None if sizes is None else float(sizes[0])
    noted = getattr(optimizer, "last_step_size", None)
    group = optimizer.param_groups[0]
    lr = group.get("scheduled_lr", group["lr"]) * group.get("d", 1.0)
    return float(noted if noted is not None else lr)


def coordinate_step_sizes(name: str, optimizer: Optimizer, p: Tensor) -> Tensor | None:
    """γ/D of each coordinate of `p` in the last step, D = 1 for steps along the gradient.

    None where no γ or no D exists: coordinate-wise NGN rules, and Lion, which takes signs. Nor is it
    known of those that estimate a step size or average their parameters.
    """
    size, scale = step_size(optimizer), baselines.preconditioner(optimizer, p)
    if scale is None and find(name).family == "gradient":
        scale = p.new_ones(())
    return None if size is None or scale is None else size / scale
