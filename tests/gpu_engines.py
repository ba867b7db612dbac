"""The GPU engines on simulated GPUs, for tests that any of them must pass."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers import replace_backend

from ngn_kernels.extension import why_missing

TRITON = ("triton-80", "triton-90", "triton-100")
CUDA = "cuda"  # its PTX is the same for every architecture
EVERY_TARGET = (*TRITON, CUDA)
EACH_ENGINE = ("triton-90", CUDA)


def require(engine: str) -> None:
    """Skip the test where an engine cannot take part."""
    if engine != CUDA:
        if importlib.util.find_spec("triton") is None:
            pytest.skip("Triton is not installed")
        return
    missing = why_missing("_cuda")
    if missing is not None:
        pytest.skip(missing)
    from ngn_bench.gpu.stub_driver import compiler

    if compiler() is None:
        pytest.skip("the stand-in for CUDA's driver takes a C compiler")


@contextmanager
def simulated(engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A GPU that stands in for a real one; its `name` is the backend to ask for."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("these tests compile, the interpreter does not")
    require(engine)
    if engine == CUDA:
        from ptxsim.image import tool

        if tool("cuobjdump") is None:
            pytest.skip("there is no cuobjdump on PATH or in Triton, which finds the kernels' PTX")
        from ptxsim.cuda import SimulatedCuda, SimulatedCudaBackend

        cuda = SimulatedCuda()
        replace_backend(monkeypatch, SimulatedCudaBackend(cuda), "cuda")
        yield cuda
        return
    from ptxsim.backend import SimulatedBackend
    from ptxsim.driver import SimulatedGPU

    gpu = SimulatedGPU(int(engine.partition("-")[2]))
    replace_backend(monkeypatch, SimulatedBackend(gpu), "triton")
    with gpu.active():
        yield gpu


def on(*engines: str) -> pytest.MarkDecorator:
    """Run a test with a `gpu` on these engines only."""
    return pytest.mark.parametrize("gpu", engines, indirect=True)
