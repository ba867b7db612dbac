"""The protocol of a backend, and which one serves a bucket."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

import torch

from ..extension import is_built
from ..messages import warn
from ..planning.plan import Backend
from ..planning.rows import BucketKey

NAMES = ("cuda", "triton", "cpu", "reference")
# A step of NGNMDv1 on CPU tensors: 15 times with 70.8M parameters, 55 times in 12 layers of 512 x 512.
SLOWER = {"cpu": ", whose plain torch operations are 15 to 55 times slower"}


class Unavailable(RuntimeError):
    """Raised by a backend's module when it cannot run here; the message says why and what to do."""


@cache
def _load(name: str) -> Backend | str:
    """The backend, or the reason why it cannot run here."""
    try:
        backend: Backend = importlib.import_module(f"{__name__}.{name}").load()
    except Unavailable as reason:
        return str(reason)
    return backend


def availability() -> dict[str, str | None]:
    """Each backend's name, with None if it can run here or else the reason why not."""
    loaded = {name: _load(name) for name in NAMES}
    return {name: b if isinstance(b, str) else None for name, b in loaded.items()}


def check_backend(name: str) -> None:
    """Raise unless `name` is "auto" or a backend that can run here."""
    if name == "auto":
        return
    if name not in NAMES:
        known = ", ".join(repr(n) for n in ("auto", *NAMES))
        raise ValueError(f"unknown backend {name!r}: choose one of {known}")
    loaded = _load(name)
    if isinstance(loaded, str):
        raise RuntimeError(f'backend="{name}" cannot run here: {loaded}')


def select_backend(name: str, key: BucketKey) -> Backend:
    """The backend for a bucket: the one asked for or an error, or the best that `auto` finds."""
    if name != "auto":
        check_backend(name)
        backend = _load(name)
        assert not isinstance(backend, str)
        reason = backend.unfit(key) or backend.refusal(key.device)
        if reason:
            raise RuntimeError(f'backend="{name}" cannot serve these parameters: {reason}')
        return backend
    failed: list[tuple[str, str]] = []  # what was expected to serve, and is worth a word
    for preferred in preferred_backends(key.device.type):
        backend = usable(preferred, key.device)
        if isinstance(backend, str):
            if key.device.type in ("cpu", "cuda"):
                failed.append((preferred, backend))
            continue
        reason = backend.unfit(key)
        if reason is None:
            if failed:
                _say_once(tuple(failed), preferred)
            return backend
        if key.narrow and key.device.type != "mps":
            failed.append((preferred, reason))
    if failed:
        _say_once(tuple(failed), "reference")
    reference = _load("reference")
    assert not isinstance(reference, str)
    reason = reference.unfit(key)
    if reason:
        raise TypeError(f"no backend can serve these parameters: {reason}")
    return reference


def preferred_backends(device_type: str) -> tuple[str, ...]:
    """The engines that `auto` tries before the reference, the first one first."""
    if device_type == "cpu":
        return ("cpu",)
    # docs/gpu.md has the reasons. Nobody expects CUDA kernels that were not built, or on an AMD GPU.
    has_cuda = device_type == "cuda" and torch.version.hip is None and is_built("_cuda")
    return ("cuda", "triton") if has_cuda else ("triton",)


def usable(name: str, device: torch.device) -> Backend | str:
    """The backend as `auto` sees it, or the reason why it cannot run on a device."""
    backend = _load(name)
    return backend if isinstance(backend, str) else _first(backend.refusal, device) or backend


@cache
def _first(refusal: Callable[[torch.device], str | None], device: torch.device) -> str | None:
    """A device's first answer, which stays: no run changes its engine in the middle."""
    return refusal(device)


def default_backend(name: str, device: torch.device) -> str:
    """Which backend serves ordinary parameters of a device; ranks compare it."""
    if name != "auto":
        return name
    preferred = preferred_backends(device.type)
    return next((n for n in preferred if not isinstance(usable(n, device), str)), "reference")


@cache
def _say_once(failed: tuple[tuple[str, str], ...], used: str) -> None:
    reasons = " and ".join(f"the {name} backend cannot run here ({why})" for name, why in failed)
    slower = SLOWER.get(failed[-1][0], ", which is slower") if used == "reference" else ""
    warn(f"ngn_kernels: {reasons}; using the {used} backend{slower}", RuntimeWarning)


def unfit_types(key: BucketKey) -> str | None:
    """Why the engines of the CPU do not take these parameters and gradients, if they do not."""
    for what, dtype in (("parameters", key.param), ("gradients", key.grad)):
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"{what} of {dtype}; float64, float32, bfloat16 and float16 are supported"
    return None
