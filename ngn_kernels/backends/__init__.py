"""The protocol of a backend, and which one serves a bucket."""

from __future__ import annotations

import importlib
from functools import cache

import torch

from ..messages import warn
from ..planning.plan import Backend
from ..planning.rows import BucketKey

NAMES = ("triton", "cpu", "reference")
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
        reason = backend.unfit(key)
        if reason:
            raise RuntimeError(f'backend="{name}" cannot serve these parameters: {reason}')
        return backend
    preferred = preferred_backend(key.device.type)
    backend = _load(preferred)
    if not isinstance(backend, str):
        reason = backend.unfit(key)
        if reason is None:
            return backend
        if key.narrow and key.device.type != "mps":
            _say_once(preferred, reason)
    elif preferred == "cpu" or key.device.type == "cuda":
        _say_once(preferred, backend)
    reference = _load("reference")
    assert not isinstance(reference, str)
    reason = reference.unfit(key)
    if reason:
        raise TypeError(f"no backend can serve these parameters: {reason}")
    return reference


def preferred_backend(device_type: str) -> str:
    return "cpu" if device_type == "cpu" else "triton"


def default_backend(name: str, device_type: str) -> str:
    """Which backend serves ordinary parameters of a device; ranks compare it."""
    if name != "auto":
        return name
    preferred = preferred_backend(device_type)
    return "reference" if isinstance(_load(preferred), str) else preferred


@cache
def _say_once(name: str, reason: str) -> None:
    warn(
        f"ngn_kernels: the {name} backend cannot run here ({reason}); "
        f"using the reference backend{SLOWER.get(name, ', which is slower')}",
        RuntimeWarning,
    )


def is_real_float(dtype: torch.dtype) -> bool:
    return dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
