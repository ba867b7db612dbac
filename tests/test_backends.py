"""Which backend serves: what `auto` takes, what it says when it falls back, what it refuses."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithms import EVERY, Algorithm
from helpers import params_of, random_columns, snapshot
from steps import train

from ngn_kernels import extension, layout
from ngn_kernels.backends import availability
from ngn_kernels.doctor import report
from ngn_kernels.version import __version__

# Run where the C++ extension cannot be imported: one line of output for each test below.
WITHOUT_EXTENSION = """
import contextlib, io, json, sys, warnings
sys.modules["ngn_kernels._cpu"] = None
import torch, ngn_kernels
from ngn_kernels.doctor import main

def train(backend):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    ngn_kernels.NGNMDv1([p], backend=backend).step(loss=1.0)
    return p

with warnings.catch_warnings(record=True) as record:
    warnings.simplefilter("always")
    same = [torch.equal(train("auto"), train("reference")) for _ in range(3)]
try:
    refused = repr(train("cpu"))
except RuntimeError as error:
    refused = str(error)
doctor = io.StringIO()
with contextlib.redirect_stdout(doctor):
    main()
said = [str(warning.message) for warning in record]
print(json.dumps({"same": same, "said": said, "refused": refused, "doctor": doctor.getvalue()}))
"""


@pytest.fixture(scope="module")
def without_extension() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTENSION], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def trained(algorithm: Algorithm, backend: str) -> Any:
    optimizer = algorithm.build(random_columns([[(5, 7)], [(40,)]]), backend=backend)
    train(optimizer, 0, 1, 2)
    return optimizer


@EVERY
def test_auto_is_the_extension_for_cpu_tensors(algorithm: Algorithm) -> None:
    if availability()["cpu"] is not None:
        pytest.skip(f"no C++ extension here: {availability()['cpu']}")
    assert snapshot(trained(algorithm, "auto")) == snapshot(trained(algorithm, "cpu"))


@EVERY
def test_backends_agree(algorithm: Algorithm, backend: str) -> None:
    for p, q in zip(
        params_of(trained(algorithm, backend)),
        params_of(trained(algorithm, "reference")),
        strict=True,
    ):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_auto_falls_back_and_says_so_once(without_extension: dict[str, Any]) -> None:
    assert without_extension["same"] == [True, True, True]
    (said,) = without_extension["said"]
    assert "cpu" in said and "reference" in said
    assert "15 to 55 times slower" in said


def test_an_explicit_backend_does_not_fall_back(without_extension: dict[str, Any]) -> None:
    assert 'backend="cpu" cannot run here' in without_extension["refused"]


def test_the_doctor_says_what_is_missing(without_extension: dict[str, Any]) -> None:
    lines = without_extension["doctor"].splitlines()
    (reason,) = [line.split()[1:] for line in lines if line.startswith("cpu")]
    assert "available" not in reason and len(reason) > 3
    (slow,) = [line for line in lines if line.startswith("reference")]
    assert "available" in slow and "times slower" in slow


def test_an_extension_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a clone after a pull: its tables have other columns than the package's."""
    if availability()["cpu"] is not None:
        pytest.skip(f"no C++ extension here: {availability()['cpu']}")
    with monkeypatch.context() as patch:
        patch.setattr(layout, "QUANT_BLOCK", 32)
        reason = extension.why_missing()
        assert reason is not None and "other sources" in reason and "pip install" in reason
    assert extension.why_missing() is None
    from ngn_kernels import _cpu

    monkeypatch.delattr(_cpu, "LAYOUT_CHECKSUM")  # of a time when there was none
    assert "other sources" in str(extension.why_missing())


def test_an_extension_of_another_rule_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sources lie beside the package, it is of these, whatever their tables."""
    if availability()["cpu"] is not None:
        pytest.skip(f"no C++ extension here: {availability()['cpu']}")
    sources = Path(extension.__file__).parents[1] / "csrc"
    shutil.copytree(sources, tmp_path / "csrc")
    (tmp_path / "ngn_kernels").mkdir()
    monkeypatch.setattr(extension, "__file__", str(tmp_path / "ngn_kernels" / "extension.py"))
    monkeypatch.setattr(extension, "_sources", extension._sources.__wrapped__)
    (tmp_path / "csrc" / "notes.txt").write_text("no source")
    (tmp_path / "csrc" / ".#rule.h").symlink_to("an editor's lock, which is no file")
    assert extension.why_missing() is None
    rule = tmp_path / "csrc" / "math" / "rule.h"
    rule.write_text(rule.read_text().replace("left * gamma", "gamma"))
    assert "other sources" in str(extension.why_missing())
    shutil.rmtree(tmp_path / "csrc")
    assert extension.why_missing() is None, "an installed package has no sources beside it"
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "other.cpp").write_text("int x;")
    assert extension.why_missing() is None, "these are another package's"


@pytest.mark.parametrize(
    ("files", "compiler", "said"),
    [
        ((), None, "install a C++ compiler"),
        ((), "/usr/bin/c++", "although a C++ compiler is here"),
        (
            ("_cpu.cpython-38-other.so", "_cpu.pyi"),
            None,
            "of another Python (_cpu.cpython-38-other.so)",
        ),
        ((f"_cpu{EXTENSION_SUFFIXES[0]}",), None, "does not load: undefined symbol"),
    ],
)
def test_why_there_is_no_extension(
    files: tuple[str, ...],
    compiler: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in files:
        (tmp_path / name).write_text("")
    monkeypatch.setattr(extension, "__file__", str(tmp_path / "extension.py"))
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    assert said in extension._why_not_imported(ImportError("undefined symbol"))


def test_the_doctor_prints_what_a_bug_report_needs() -> None:
    lines = {line.split()[0]: line for line in report().splitlines() if line}
    assert torch.__version__ in lines["torch"]
    assert __version__ in lines["ngn_kernels"]
    assert platform.python_version() in lines["Python"]
    assert platform.release() in lines["system"]
    assert platform.machine() in lines["processor"]
    assert np.__version__ in lines["packages"]
    compilers = ", ".join(extension.compilers().values()) or "none"
    assert f"C++: {compilers}; C: " in lines["compilers"]
