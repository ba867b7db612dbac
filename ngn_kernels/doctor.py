"""`python -m ngn_kernels`: what a bug report needs, and each backend or why it cannot run here."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

import torch

from . import extension
from .backends import SLOWER, availability, usable
from .version import __version__

PACKAGES = (
    "numpy",
    "triton",
    "transformers",
    "accelerate",
    "trl",
    "lightning",
    "pytorch-lightning",
)


def report() -> str:
    lines = [
        f"{'ngn_kernels':<12} {__version__} in {Path(__file__).parent}",
        f"{'torch':<12} {torch.__version__}{_gpu_build()}",
        f"{'packages':<12} {_packages()}",
        f"{'Python':<12} {platform.python_version()}, {sys.executable}",
        f"{'system':<12} {platform.platform()}",
        f"{'processor':<12} {_processor()}, {cores()} of {os.cpu_count()} cores",
        *(f"{'GPU':<12} {name}" for name in _gpus()),
        f"{'compilers':<12} C++: {_listed(extension.compilers())}; C: {_listed(_c_compilers())}",
        "",
    ]
    for name, reason in availability().items():
        lines.append(f"{name:<12} {_where(name) if reason is None else reason}")
    if availability()["cpu"] is not None:
        lines[-1] += " (CPU tensors use it" + SLOWER["cpu"] + ")"
    return "\n".join(lines)


def _where(name: str) -> str:
    """That a backend is available, unless every GPU refuses it, and the refusals."""
    seen = [usable(name, torch.device("cuda", index)) for index in range(len(_gpus()))]
    refusals = [reason for reason in seen if isinstance(reason, str)]
    available = [] if seen and len(refusals) == len(seen) else ["available" + detail(name)]
    return "; ".join(available + refusals)


def detail(name: str) -> str:
    if name == "cpu":
        from . import _cpu

        return f" ({_cpu.isa()}, {torch.get_num_threads()} threads)"
    if name == "cuda":
        from . import _cuda

        return f" (code for sm_{_cuda.TARGETS.replace(' ', ', sm_')} by nvcc {_cuda.COMPILER})"
    return ""


def cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu_build() -> str:
    for name, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version:
            return f", built for {name} {version}"
    return ", built without CUDA and ROCm"


def _packages() -> str:
    """Versions of what the optimizers meet, where it is installed."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({platform.machine()})"
    except OSError:
        pass
    return f"{platform.processor() or 'unknown'} ({platform.machine()})"


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _c_compilers() -> dict[str, str]:
    """What Triton calls when it compiles its launcher."""
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    return {name: path for name in names if (path := shutil.which(name))}


def _listed(found: dict[str, str]) -> str:
    return ", ".join(found.values()) or "none"


def main() -> None:
    try:
        print(report(), flush=True)
    except BrokenPipeError:  # of a reader such as `head`, which has read enough
        sys.stderr.close()
