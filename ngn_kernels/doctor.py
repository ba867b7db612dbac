"""`python -m ngn_kernels`: each backend, or why it cannot run here and what to do about it."""

from __future__ import annotations

import platform

import torch

from .backends import availability
from .version import __version__


def report() -> str:
    lines = [
        f"ngn_kernels {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "",
    ]
    for name, reason in availability().items():
        lines.append(f"{name:<10} {'available' + detail(name) if reason is None else reason}")
    return "\n".join(lines)


def detail(name: str) -> str:
    if name != "cpu":
        return ""
    from . import _cpu

    return f" ({_cpu.isa()}, {torch.get_num_threads()} threads)"


def main() -> None:
    print(report())
