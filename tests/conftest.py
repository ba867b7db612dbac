"""The backend and dtype fixtures: a backend joins the whole suite by being available here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from extent import Extent, extent_of
from helpers import DTYPES, IMPORTS_COMPILER, replace_backend

from ngn_kernels.backends import availability
from ngn_kernels.extension import why_missing
from ngn_kernels.planning import signature

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("search", deadline=None, max_examples=500)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

SIMULATED = False  # whether the CUDA engine runs, in a simulator

# The tensors are small: a second thread would only wait.
torch.set_num_threads(1)

collect_ignore = [] if IMPORTS_COMPILER else ["test_torch_suite.py"]


def runnable_backends() -> list[str]:
    """Triton joins only through its interpreter, CUDA simulated: the tests' tensors are on the CPU."""
    reasons = availability()
    names = [name for name in DTYPES if name in reasons and reasons[name] is None]
    chosen = {"triton": os.environ.get("TRITON_INTERPRET") == "1", "cuda": SIMULATED}
    return [name for name in names if chosen.get(name, True)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        action="append",
        choices=sorted(DTYPES),
        help="run the parametrised suite for this backend only; may be repeated",
    )

    parser.addoption(
        "--signature",
        choices=("native", "python"),
        default="native",
        help="which form of the signature plans get; older torch has only the Python one",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "essential: the reduced set, for backends that are slow to run (interpreters)"
    )
    config.addinivalue_line(
        "markers", "dtypes(*dtypes): which parameter dtypes a test with a `dtype` argument runs in"
    )
    config.addinivalue_line("filterwarnings", "error::ngn_kernels.SkippedStepWarning")
    if os.environ.get("TRITON_INTERPRET") == "1":
        # It computes in numpy, which warns of the numbers that the kernels are tested with.
        config.addinivalue_line("filterwarnings", "ignore:.* encountered in:RuntimeWarning")
    if config.getoption("--signature") == "python":
        signature.NativeSignature = None  # type: ignore[assignment, misc]
    global SIMULATED
    wanted = "cuda" in (config.getoption("--backend") or ())
    SIMULATED = wanted and why_missing("_cuda") is None
    if SIMULATED:
        from ptxsim.cuda import SimulatedCuda, SimulatedCudaBackend

        replace_backend(pytest.MonkeyPatch(), SimulatedCudaBackend(SimulatedCuda()), "cuda")
    missing = set(config.getoption("--backend") or ()) - set(runnable_backends())
    if missing:
        raise pytest.UsageError(f"--backend {', '.join(sorted(missing))} cannot run here")


def pytest_report_header() -> list[str]:
    return [f"ngn backend {name}: {why or 'available'}" for name, why in availability().items()]


@pytest.fixture
def extent(backend: str) -> Extent:
    return extent_of(backend)


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    from bench_runs import Bench

    return Bench(tmp_path, monkeypatch, capsys)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    names = metafunc.config.getoption("--backend") or runnable_backends()
    if "dtype" not in metafunc.fixturenames:
        metafunc.parametrize("backend", names)
        return
    marker = metafunc.definition.get_closest_marker("dtypes")
    pairs = [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in names
        for dtype in DTYPES[name]
        if marker is None or dtype in marker.args
    ]
    metafunc.parametrize(("backend", "dtype"), pairs)
