"""Which backend serves: what `auto` takes, what it says when it falls back, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from algorithms import EVERY, Algorithm
from helpers import params_of, random_columns, snapshot
from steps import train

from ngn_kernels.backends import availability

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


def test_an_explicit_backend_does_not_fall_back(without_extension: dict[str, Any]) -> None:
    assert 'backend="cpu" cannot run here' in without_extension["refused"]


def test_the_doctor_says_what_is_missing(without_extension: dict[str, Any]) -> None:
    lines = without_extension["doctor"].splitlines()
    (reason,) = [line.split()[1:] for line in lines if line.startswith("cpu")]
    assert "available" not in reason and len(reason) > 3
